#include "cli/bench/models.h"

#include <algorithm>
#include <variant>

namespace softdelta::cli {

namespace {

using std::int64_t;

struct Layer {
    const char* name;
    int64_t count;
    std::variant<AttentionShape, DeltaShape, ConvolutionShape, NormShape> shape;
    int64_t latent = 0,
            rope = 0;  // MLA decodes over one key head, of rank + rotary channels, whose rank are the values
};

struct Model {
    const char* name;
    std::vector<Layer> layers;
};

// Shapes as the models' configurations have them. What lies between these layers, the projections and experts, is not
// ours, nor is Mamba-2's norm, which gates before it normalises.
const std::vector<Model>& models() {
    static const std::vector<Model> all = {
        // huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, config.json: every fourth of 48 layers has attention
        {"qwen3-next-80b",
         {{"causal_convolution", 36, ConvolutionShape{.channels = 2 * 16 * 128 + 32 * 128}},
          {"gated_delta_rule", 36, DeltaShape{.rule = Rule::gated_delta_rule, .heads = 16, .value_heads = 32}},
          {"gated_norm", 36, NormShape{.heads = 32}},
          {"attention", 12, AttentionShape{.heads = 16, .key_heads = 2, .head_size = 256}}}},
        // huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Instruct, config.json: layers 4, 8, …, 24 and 27 have MLA
        {"kimi-linear-48b",
         {{"causal_convolution", 20, ConvolutionShape{.channels = 3 * 32 * 128}},
          {"kda", 20, DeltaShape{.rule = Rule::kda, .heads = 32, .value_heads = 32}},
          {"gated_norm", 20, NormShape{.heads = 32, .gate = Activation::sigmoid}},
          {"attention (MLA)", 7, AttentionShape{.heads = 32, .key_heads = 32, .head_size = 192, .value_size = 128}, 512,
           64}}},
        // huggingface.co/openai/gpt-oss-20b, config.json: layers alternate
        {"gpt-oss-20b",
         {{"attention, window 128", 12,
           AttentionShape{.heads = 64, .key_heads = 8, .head_size = 64, .window = 128, .sink = true}},
          {"attention", 12, AttentionShape{.heads = 64, .key_heads = 8, .head_size = 64, .sink = true}}}},
        // huggingface.co/state-spaces/mamba2-2.7b, config.json, and the defaults of mamba_ssm's Mamba2
        {"mamba2-2.7b",
         {{"causal_convolution", 64, ConvolutionShape{.channels = 2 * 2560 + 2 * 128}},
          {"simple_gla", 64,
           DeltaShape{
               .rule = Rule::simple_gla, .heads = 1, .value_heads = 80, .value_size = 64, .normalises = false}}}}};
    return all;
}

// Bytes that all sequences keep of a layer between two tokens.
struct Kept {
    int64_t batch;

    int64_t operator()(const AttentionShape& s) const {
        const int64_t row =
            s.shared_values ? s.head_size : s.head_size + (s.value_size > 0 ? s.value_size : s.head_size);
        return 2 * batch * s.keys * s.key_heads * row;
    }
    int64_t operator()(const DeltaShape& s) const {
        return 4 * batch * s.value_heads * s.head_size * (s.value_size > 0 ? s.value_size : s.head_size);
    }
    int64_t operator()(const ConvolutionShape& s) const { return 4 * batch * s.channels * (s.width - 1); }
    int64_t operator()(const NormShape&) const { return 0; }
};

template <class Shape>
void set(Shape& shape, Step step, int64_t batch) {
    shape.dtype = DType::bf16, shape.batch = batch;
    shape.pass = step == Step::training ? Pass::training : Pass::forward;
}

// The shape of a layer in a step.
struct Shaped {
    const Layer& layer;
    Step step;
    int64_t batch, context;
    using Shape = decltype(Layer::shape);

    Shape operator()(AttentionShape s) const {
        set(s, step, batch);
        s.queries = s.keys = context;
        s.causal = Causal::bottom_right;
        if (step != Step::decode) return s;
        s.queries = 1;
        if (s.window > 0) s.keys = std::min(context, s.window);  // older ones are not kept
        s.window = -1, s.causal = Causal::none;
        if (layer.latent > 0)
            s.key_heads = 1, s.head_size = layer.latent + layer.rope, s.value_size = layer.latent,
            s.shared_values = true;
        return s;
    }
    template <class Other>
    Shape operator()(Other s) const {
        set(s, step, batch);
        s.tokens = step == Step::decode ? 1 : context;
        return s;
    }
};

Problem make_problem(AttentionShape s, int64_t layers) {
    if (layers == 1) return make_attention(s);
    std::vector<Problem> all;
    for (int64_t i = 0; i < layers; ++i) all.push_back(make_attention(s));
    Problem one = all.front();
    one.call = [all](const Execution& execution) {
        for (const Problem& problem : all) problem.call(execution);
    };
    return one;
}
Problem make_problem(DeltaShape s, int64_t layers) {
    s.layers = s.tokens == 1 ? layers : 0;
    return make_delta(s);
}
Problem make_problem(ConvolutionShape s, int64_t layers) {
    s.layers = s.tokens == 1 ? layers : 0;
    return make_convolution(s);
}
Problem make_problem(const NormShape& s, int64_t /*layers*/) {
    return make_norm(s);
}

}  // namespace

std::vector<std::string> model_names() {
    std::vector<std::string> names;
    for (const Model& model : models()) names.emplace_back(model.name);
    return names;
}

std::vector<ModelRow> model_rows(const std::string& name, int64_t batch, int64_t context) {
    constexpr int64_t most_kept = int64_t{1} << 30;
    static constexpr std::pair<Step, const char*> steps[] = {
        {Step::prefill, "prefill"}, {Step::decode, "decode"}, {Step::training, "training"}};
    const auto model = std::ranges::find(models(), name, [](const Model& m) { return std::string(m.name); });
    std::vector<ModelRow> rows;
    for (const auto& [step, step_name] : steps)
        for (const Layer& layer : model->layers) {
            const auto shape = std::visit(Shaped{layer, step, batch, context}, layer.shape);
            ModelRow row{std::string(layer.name) + ", " + step_name, step, layer.count, 1,
                         static_cast<double>(step == Step::decode ? batch : batch * context)};
            const int64_t kept = std::visit(Kept{batch}, shape);
            if (step == Step::decode && kept > 0) row.timed = std::clamp<int64_t>(most_kept / kept, 1, layer.count);
            row.make = [shape, timed = row.timed] {
                return std::visit([&](const auto& s) { return make_problem(s, timed); }, shape);
            };
            rows.push_back(std::move(row));
        }
    return rows;
}

}  // namespace softdelta::cli
