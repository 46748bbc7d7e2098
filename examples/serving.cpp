// A server of a hybrid model: a layer with a delta rule (convolution, gated delta rule, gated norm) and a layer of
// attention with sinks. Sequences join and leave. Each step is one batch of whole prompts and of single tokens, packed.
// Pools hold the states of both recurrences, blocks hold keys and values. At the end every sequence is compared with
// the f64 reference, which reads it in one piece. docs/serving.md explains the parts.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <softdelta/softdelta.hpp>
#include <vector>

using softdelta::DType, softdelta::Tensor;
using Index = std::int64_t;

constexpr Index H = 2, HV = 4, K = 32, V = 32;  // delta rule: heads of q and k, heads of v, their sizes
constexpr Index C = 2 * H * K + HV * V, W = 4;  // convolution: channels of q, k and v side by side, width
constexpr Index HQ = 4, HK = 2, D = 32;         // attention: heads of q, heads of k and v, their size
constexpr Index pool = 3, block_rows = 16, blocks = 14, most_blocks = 8;

std::vector<float> normal(Index count) {
    static std::mt19937 engine(1);
    std::normal_distribution<float> draw;
    std::vector<float> x(static_cast<std::size_t>(count));
    std::generate(x.begin(), x.end(), [&] { return draw(engine); });
    return x;
}

struct Weights {
    std::vector<float> convolution = normal(C * W), norm = normal(V), sink = normal(HQ);
};

// What a model's projections make of some tokens, row after row.
struct Rows {
    std::vector<float> x, z, g, beta, q, k, v;  // [T, C], [T, HV, V], [T, HV] twice, [T, HQ, D], [T, HK, D] twice

    static Rows draw(Index tokens) {
        Rows r{normal(tokens * C),      normal(tokens * HV * V), normal(tokens * HV),    normal(tokens * HV),
               normal(tokens * HQ * D), normal(tokens * HK * D), normal(tokens * HK * D)};
        for (float& g : r.g) g = -std::abs(g);
        for (float& beta : r.beta) beta = 1 / (1 + std::exp(-beta));
        return r;
    }
    void append(const Rows& from, Index begin, Index count) {
        const auto rows = [&](std::vector<float>& to, const std::vector<float>& source, Index row) {
            to.insert(to.end(), source.data() + begin * row, source.data() + (begin + count) * row);
        };
        rows(x, from.x, C), rows(z, from.z, HV * V), rows(g, from.g, HV), rows(beta, from.beta, HV);
        rows(q, from.q, HQ * D), rows(k, from.k, HK * D), rows(v, from.v, HK * D);
    }
};

// How to compute. One workspace serves all calls, one after the other: it grows while batches do, then nothing
// allocates.
struct Compute {
    softdelta::Execution execution{};
    std::vector<std::byte> memory{};

    void operator()(auto forward, auto workspace, const auto& in, const auto& out, const auto& options) {
        const std::size_t bytes = workspace(in, out, options, execution);
        if (bytes > memory.size()) memory.resize(bytes);
        execution.workspace = memory;
        forward(in, out, options, execution);
    }
};

// One batch: the tokens of some sequences, one sequence after the other. In all that is not given there is one
// sequence.
struct Batch {
    Index tokens;
    Tensor cu_seqlens{}, state_indices{}, has_initial_state{}, cache_seqlens{}, block_table{};
};

// The layer with the delta rule; Number is the type of activations. The rule reads q, k and v where the convolution has
// written them: views with strides. Both states change in place.
template <class Number>
std::vector<Number> delta_layer(Compute& compute, const Weights& w, const Rows& rows, const Batch& batch,
                                const Tensor& window, const Tensor& state) {
    constexpr DType type = sizeof(Number) == 8 ? DType::f64 : DType::f32;
    const Index T = batch.tokens;
    std::vector<Number> mixed(static_cast<std::size_t>(T * C)), o(static_cast<std::size_t>(T * HV * V)), y(o.size());
    const auto heads = [&](Index begin, Index count, Index size) {
        return Tensor(mixed.data() + begin, type, {1, T, count, size}, {T * C, C, size, 1});
    };
    const Tensor o_view(o.data(), type, {1, T, HV, V});
    compute(softdelta::causal_convolution_forward, softdelta::causal_convolution_forward_workspace,
            softdelta::ConvolutionInputs{.x = Tensor(rows.x.data(), DType::f32, {1, T, C}),
                                         .weight = Tensor(w.convolution.data(), DType::f32, {C, W}),
                                         .initial_state = window,
                                         .cu_seqlens = batch.cu_seqlens,
                                         .state_indices = batch.state_indices,
                                         .has_initial_state = batch.has_initial_state},
            softdelta::ConvolutionOutputs{.y = Tensor(mixed.data(), type, {1, T, C}), .final_state = window},
            softdelta::ConvolutionOptions{softdelta::Activation::silu});
    compute(softdelta::delta_forward, softdelta::delta_forward_workspace,
            softdelta::DeltaInputs{.q = heads(0, H, K),
                                   .k = heads(H * K, H, K),
                                   .v = heads(2 * H * K, HV, V),
                                   .g = Tensor(rows.g.data(), DType::f32, {1, T, HV}),
                                   .beta = Tensor(rows.beta.data(), DType::f32, {1, T, HV}),
                                   .initial_state = state,
                                   .cu_seqlens = batch.cu_seqlens,
                                   .state_indices = batch.state_indices,
                                   .has_initial_state = batch.has_initial_state},
            softdelta::DeltaOutputs{.o = o_view, .final_state = state},
            softdelta::DeltaOptions{.rule = softdelta::Rule::gated_delta_rule, .use_qk_l2norm_in_kernel = true});
    compute(softdelta::gated_norm_forward, softdelta::gated_norm_forward_workspace,
            softdelta::NormInputs{.x = o_view,
                                  .z = Tensor(rows.z.data(), DType::f32, {1, T, HV, V}),
                                  .weight = Tensor(w.norm.data(), DType::f32, {V})},
            softdelta::NormOutputs{.y = Tensor(y.data(), type, {1, T, HV, V})}, softdelta::NormOptions{});
    return y;
}

// The layer of attention. A sequence's last query sees all its keys: prompts and single tokens need no distinction.
template <class Number>
std::vector<Number> attention_layer(Compute& compute, const Weights& w, const Rows& rows, const Batch& batch,
                                    const Tensor& k, const Tensor& v) {
    std::vector<Number> o(static_cast<std::size_t>(batch.tokens * HQ * D));
    compute(softdelta::attention_forward, softdelta::attention_forward_workspace,
            softdelta::AttentionInputs{.q = Tensor(rows.q.data(), DType::f32, {1, batch.tokens, HQ, D}),
                                       .k = k,
                                       .v = v,
                                       .sink = Tensor(w.sink.data(), DType::f32, {HQ}),
                                       .cu_seqlens_q = batch.cu_seqlens,
                                       .cache_seqlens = batch.cache_seqlens,
                                       .block_table = batch.block_table},
            softdelta::AttentionOutputs{
                .o = Tensor(o.data(), sizeof(Number) == 8 ? DType::f64 : DType::f32, {1, batch.tokens, HQ, D})},
            softdelta::AttentionOptions{.causal = softdelta::Causal::bottom_right});
    return o;
}

struct Sequence {
    Rows rows;  // of all its tokens: a real server has those of the next step
    Index prompt, length;
    Index done = 0;  // tokens that were computed
    std::int32_t entry = -1;
    std::vector<std::int32_t> table{};  // its blocks
    std::vector<float> y{}, o{};        // results of both layers
};

class Server {
  public:
    explicit Server(const Weights& weights) : weights_(weights) {
        for (std::int32_t i = 0; i < pool; ++i) free_entries_.push_back(i);
        for (std::int32_t i = 0; i < blocks; ++i) free_blocks_.push_back(i);
    }

    bool join(Sequence& s) {
        if (free_entries_.empty()) return false;
        s.entry = take(free_entries_);
        running_.push_back(&s);
        return true;
    }

    // The next tokens of every running sequence: its prompt, later one token. Sequences that have ended leave.
    void step() {
        Rows rows;
        std::vector<std::int32_t> cu_seqlens{0}, indices, lengths, table;
        std::vector<std::uint8_t> goes_on;  // a prompt begins from 0, whatever its entry of the pools holds
        for (Sequence* s : running_) {
            const Index count = s->done == 0 ? s->prompt : 1;
            rows.append(s->rows, s->done, count);
            for (Index t = s->done; t < s->done + count; ++t) append_key(*s, t);
            cu_seqlens.push_back(cu_seqlens.back() + static_cast<std::int32_t>(count));
            indices.push_back(s->entry);
            goes_on.push_back(s->done > 0);
            lengths.push_back(static_cast<std::int32_t>(s->done + count));
            table.insert(table.end(), s->table.begin(), s->table.end());
            table.resize(lengths.size() * most_blocks);  // what lies behind a sequence's blocks is not read
        }
        const auto N = static_cast<Index>(running_.size());
        const Batch batch{cu_seqlens.back(),
                          Tensor(cu_seqlens.data(), DType::i32, {N + 1}),
                          Tensor(indices.data(), DType::i32, {N}),
                          Tensor(goes_on.data(), DType::boolean, {N}),
                          Tensor(lengths.data(), DType::i32, {N}),
                          Tensor(table.data(), DType::i32, {N, most_blocks})};
        const auto y =
            delta_layer<float>(compute_, weights_, rows, batch, Tensor(windows_.data(), DType::f32, {pool, C, W - 1}),
                               Tensor(states_.data(), DType::f32, {pool, HV, K, V}));
        const auto o = attention_layer<float>(compute_, weights_, rows, batch,
                                              Tensor(k_.data(), DType::f32, {blocks, block_rows, HK, D}),
                                              Tensor(v_.data(), DType::f32, {blocks, block_rows, HK, D}));
        std::printf("step of %lld sequences, %d tokens, %zu KiB of workspace\n", static_cast<long long>(N),
                    cu_seqlens.back(), compute_.memory.size() / 1024);
        for (std::size_t n = 0; n < running_.size(); ++n) {
            Sequence& s = *running_[n];
            const auto part = [&](std::vector<float>& to, const std::vector<float>& from, Index row) {
                to.insert(to.end(), from.data() + cu_seqlens[n] * row, from.data() + cu_seqlens[n + 1] * row);
            };
            part(s.y, y, HV * V), part(s.o, o, HQ * D);
            s.done = lengths[n];
        }
        std::erase_if(running_, [&](Sequence* s) { return s->done == s->length && leave(*s); });
    }

    bool idle() const { return running_.empty(); }

  private:
    static std::int32_t take(std::vector<std::int32_t>& from) {
        const std::int32_t last = from.back();
        from.pop_back();
        return last;
    }
    void append_key(Sequence& s, Index t) {
        if (t % block_rows == 0) s.table.push_back(take(free_blocks_));
        const Index row = s.table.back() * block_rows + t % block_rows;
        std::copy_n(&s.rows.k[static_cast<std::size_t>(t * HK * D)], HK * D,
                    &k_[static_cast<std::size_t>(row * HK * D)]);
        std::copy_n(&s.rows.v[static_cast<std::size_t>(t * HK * D)], HK * D,
                    &v_[static_cast<std::size_t>(row * HK * D)]);
    }
    bool leave(const Sequence& s) {
        free_entries_.push_back(s.entry);
        free_blocks_.insert(free_blocks_.end(), s.table.begin(), s.table.end());
        return true;
    }

    const Weights& weights_;
    Compute compute_;
    std::vector<float> windows_ = std::vector<float>(pool * C * (W - 1)),
                       states_ = std::vector<float>(pool * HV * K * V);
    std::vector<float> k_ = std::vector<float>(blocks * block_rows * HK * D), v_ = k_;
    std::vector<std::int32_t> free_entries_, free_blocks_;
    std::vector<Sequence*> running_;
};

// Of a result against the same layer in f64, relative to its root mean square.
double error(const std::vector<float>& actual, const std::vector<double>& truth) {
    double difference = 0, square = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) {
        difference += (actual[i] - truth[i]) * (actual[i] - truth[i]);
        square += truth[i] * truth[i];
    }
    return actual.size() == truth.size() ? std::sqrt(difference / square) : INFINITY;
}

int main() {
    const Weights weights;
    Server server(weights);
    std::vector<Sequence> all;
    for (const auto& [prompt, length] : {std::pair<Index, Index>{37, 45}, {5, 9}, {70, 72}, {1, 12}})
        all.push_back({Rows::draw(length), prompt, length});
    std::size_t next = 0;
    do {
        if (next < all.size() && server.join(all[next])) ++next;  // one at a time: prompts beside running sequences
        server.step();
    } while (!server.idle() || next < all.size());

    Compute reference{{.engine = "reference"}};
    double worst = 0;
    for (const Sequence& s : all) {
        const Batch one{s.length};
        worst = std::max(worst, error(s.y, delta_layer<double>(reference, weights, s.rows, one, {}, {})));
        worst = std::max(
            worst, error(s.o, attention_layer<double>(reference, weights, s.rows, one,
                                                      Tensor(s.rows.k.data(), DType::f32, {1, s.length, HK, D}),
                                                      Tensor(s.rows.v.data(), DType::f32, {1, s.length, HK, D}))));
    }
    const bool right = worst < 1e-5;
    std::printf("largest error against the f64 reference: %.1e, %s\n", worst, right ? "right" : "WRONG");
    return right ? 0 : 1;
}
