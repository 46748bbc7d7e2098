// softdelta make: inputs for a call, with the hard cases at hand.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/plan.h"
#include "io/call/call.h"
#include "io/call/make_case.h"
#include "io/call/operands.h"
#include "io/file/output.h"
#include "io/file/text.h"
#include "judge/memory.h"

namespace softdelta::cli {

namespace {

void make(const io::MakeOptions& options, const std::string& output, std::uint64_t memory) {
    io::expect_output(output);
    judge::expect_memory(output, io::bytes_of_case(options), static_cast<double>(memory));
    const io::CaseFile file = io::make_case(options);
    io::check(io::call_of(file), {});  // what readers refuse is not written
    io::write_case(output, file);
    std::printf("%s: %zu tensors for %s\n", io::printable(output).c_str(), file.tensors.size(), options.op.c_str());
}

}  // namespace

void add_make(CLI::App& app) {
    struct Request {
        io::MakeOptions make;
        std::string output, plan;
        bool no_gradients = false, no_l2norm = false, no_initial_state = false;
        std::optional<double> scale;
        std::uint64_t memory = 0;
    };
    auto request = std::make_shared<Request>();
    io::MakeOptions& o = request->make;
    std::vector<std::string> operations;
    for (const io::Operation& op : io::operations) operations.emplace_back(op.name);
    CLI::App* command = app.add_subcommand("make", "Make a case file with the inputs of a call");
    command->add_option("OP", o.op, "Operation")->required()->check(CLI::IsMember(operations));
    command->add_option("-o,--output", request->output, "Case file to write; with --plan the folder")->required();
    command
        ->add_option("--plan", request->plan,
                     "gate: many files, each of inputs that show mistakes which others hide; shapes are the plan's")
        ->check(CLI::IsMember({"gate"}));
    command->add_option("--seed", o.seed, "Seed of the random numbers")->capture_default_str();
    command->add_option("--type", o.dtype, "Storage type")
        ->transform(
            one_of<DType>({{"f64", DType::f64}, {"f32", DType::f32}, {"bf16", DType::bf16}, {"f16", DType::f16}}))
        ->type_name("f64|f32|bf16|f16");
    command->add_flag("--no-gradients", request->no_gradients, "Leave out do, dlse, dfinal_state: a forward call");
    command->add_option("-B,--batch", o.batch, "Batch")->capture_default_str();
    command->add_option("-H,--heads", o.heads, "Query (and, for delta rules, key) heads")->capture_default_str();
    command->add_option("-K,-D,--key-size", o.key_size, "Head dimension of q and k")->capture_default_str();
    command->add_option("-V,--value-size", o.value_size, "Head dimension of v")->capture_default_str();
    command->add_option("--scale", request->scale, "Scale of the scores; default: key size^-1/2");
    command->add_option("--lengths", o.lengths, "Packed sequences: their lengths, as 5,0,1,130")->delimiter(',');

    const std::string attention = "Attention", delta = "Delta rules";
    command->add_option("--queries", o.queries, "Lq")->capture_default_str()->group(attention);
    command->add_option("--keys", o.keys, "Lk")->capture_default_str()->group(attention);
    command->add_option("--key-heads", o.key_heads, "Key and value heads")->capture_default_str()->group(attention);
    command->add_option("--key-lengths", o.key_lengths, "Key lengths of packed sequences; default: --lengths")
        ->delimiter(',')
        ->group(attention);
    command->add_option("--block-rows", o.block_rows, "Keys in a paged cache, in blocks of so many rows; 0: not")
        ->capture_default_str()
        ->group(attention);
    command->add_option("--causal", o.causal, "none|top_left|bottom_right")
        ->check(CLI::IsMember({"none", "top_left", "bottom_right"}))
        ->capture_default_str()
        ->group(attention);
    command->add_option("--window-left", o.window_left, "Keys to the left of the diagonal; -1: all")
        ->capture_default_str()
        ->group(attention);
    command->add_option("--window-right", o.window_right, "Keys to the right; -1: all")
        ->capture_default_str()
        ->group(attention);
    command->add_option("--softcap", o.softcap, "c of c·tanh(x/c); 0: off")->capture_default_str()->group(attention);
    command->add_option("--empty-row", o.empty_row, "lse of a row without keys: minus_infinity|plus_infinity|zero")
        ->check(CLI::IsMember({"minus_infinity", "plus_infinity", "zero"}))
        ->capture_default_str()
        ->group(attention);
    command->add_option("--mask", o.mask, "none|random|padding|dead_rows")
        ->check(CLI::IsMember({"none", "random", "padding", "dead_rows"}))
        ->capture_default_str()
        ->group(attention);
    command->add_option("--bias", o.bias, "none|full|row|head|key_head|padding")
        ->check(CLI::IsMember({"none", "full", "row", "head", "key_head", "padding"}))
        ->capture_default_str()
        ->group(attention);
    command->add_option("--mask-value", o.mask_value, "Of --bias padding: the number that hides a key, or -inf")
        ->capture_default_str()
        ->group(attention);
    command->add_option("--top-w", o.top_w, "Keep this many largest biases of each row; -1: all")
        ->capture_default_str()
        ->group(attention);
    command->add_flag("--sink", o.sink, "A learnable sink for each head")->group(attention);
    command->add_option("--quantised", o.quantised, "Keys and values of fewer bits, with scales: none|q8_0|q4_0|i8|f8")
        ->check(CLI::IsMember({"none", "q8_0", "q4_0", "i8", "f8"}))
        ->capture_default_str()
        ->group(attention);
    command->add_flag("--alibi", o.alibi, "A slope of ALiBi for each head: -slope·|i + Lk - Lq - j|")->group(attention);
    command->add_flag("--bias-slopes", o.bias_slopes, "A factor of the bias for each head")->group(attention);

    command->add_option("-T,--tokens", o.tokens, "T")->capture_default_str()->group(delta);
    command->add_option("--value-heads", o.value_heads, "Value heads, a multiple of --heads")
        ->capture_default_str()
        ->group(delta);
    command
        ->add_option("--keys-like", o.keys_like,
                     "drawn|alike|few; few: whole numbers, so that hardly anything is rounded")
        ->check(CLI::IsMember({"drawn", "alike", "few"}))
        ->capture_default_str()
        ->group(delta);
    command->add_option("--most-beta", o.most_beta, "Other than 1: beta evenly from 0 to it")
        ->capture_default_str()
        ->group(delta);
    command->add_option("--gate", o.gate, "mild|steep|uniform|spread|halves|wipe|constant|none")
        ->check(CLI::IsMember({"mild", "steep", "uniform", "spread", "halves", "wipe", "constant", "none"}))
        ->capture_default_str()
        ->group(delta);
    command->add_option("--gate-value", o.gate_value, "Of --gate uniform; of spread the lowest")
        ->capture_default_str()
        ->group(delta);
    command->add_option("--raw-gate", o.raw_gate, "Gate made in the kernel: none|softplus|lower_bound")
        ->check(CLI::IsMember({"none", "softplus", "lower_bound"}))
        ->capture_default_str()
        ->group(delta);
    command->add_option("--lower-bound", o.lower_bound, "Of --raw-gate lower_bound")
        ->capture_default_str()
        ->group(delta);
    command->add_flag("--beta-logits", o.beta_logits, "beta as a logit")->group(delta);
    command->add_flag("--allow-neg-eigval", o.allow_neg_eigval, "beta up to 2, with --beta-logits")->group(delta);
    command->add_flag("--no-l2norm", request->no_l2norm, "q and k of unit length instead of l2norm in the kernel")
        ->group(delta);
    command->add_flag("--no-initial-state", request->no_initial_state, "Start from 0")->group(delta);
    command->add_option("--steps", o.steps, "Of each token: rows of k, v, p and beta")->group(delta);
    command->add_flag("--tiled-heads", o.tiled_heads, "Value head h reads key head h mod H")->group(delta);
    command->add_flag("--state-v-first", o.state_v_first, "States are [V, K]")->group(delta);
    add_memory(*command, request->memory);
    command->callback([request] {
        request->make.gradients = !request->no_gradients;
        request->make.l2norm = !request->no_l2norm;
        request->make.initial_state = !request->no_initial_state;
        if (request->scale && std::isnan(*request->scale))
            throw std::invalid_argument("scale: nan given, expected a finite number");
        if (request->scale) request->make.scale = *request->scale;
        if (request->plan.empty()) return make(request->make, request->output, request->memory);
        std::filesystem::create_directories(request->output);
        for (const auto& [name, options] : gate_plan(request->make))
            make(options, (std::filesystem::path(request->output) / (name + ".safetensors")).string(), request->memory);
    });
}

}  // namespace softdelta::cli
