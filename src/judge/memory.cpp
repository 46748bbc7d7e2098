#include "judge/memory.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "core/parallel.h"
#include "io/call/results.h"
#include "io/file/core_view.h"
#include "io/file/stored_type.h"
#include "io/file/text.h"
#include "judge/blocks.h"

namespace softdelta::judge {

namespace {

constexpr double f64 = sizeof(double), f32 = sizeof(float);
constexpr double tile = 64;  // rows of a chunk, a tile or a segment
// Of lists that grow: the old one, the new one, and a quarter of it unused.
constexpr double growing = 3;
// Of each thread: blocks that Eigen copies of the operands of a product, and its stack.
constexpr double of_thread = 1 << 20;
constexpr double least = 1 << 20;  // names, lists, messages

double size(const Tensor& t, std::size_t dim) {
    return t && dim < t.rank() ? static_cast<double>(t.shape(dim)) : 0;
}

double count(const std::vector<std::int64_t>& shape) {
    double n = 1;
    for (const std::int64_t d : shape) n *= static_cast<double>(d);
    return n;
}

double count(const Tensor& t) {
    return t ? count(std::vector<std::int64_t>(t.shape().begin(), t.shape().end())) : 0;
}

double longest(const io::Bounds& bounds, double otherwise) {
    if (bounds.empty()) return otherwise;
    std::int64_t most = 0;
    for (std::size_t i = 1; i < bounds.size(); ++i) most = std::max(most, bounds[i] - bounds[i - 1]);
    return static_cast<double>(most);
}

// Units of work that are in hand at once.
double hands(int threads, double units) {
    return std::min(units, static_cast<double>(core::all_threads(threads)));
}

enum class Computer { reference, stages_f64, stages_f32, other };

// A call that names no engine may come to the reference.
Computer computer_of(const std::string& name) {
    return name == "reference" || name == "automatic" ? Computer::reference
           : name == "stages_f64"                     ? Computer::stages_f64
           : name == "stages_f32"                     ? Computer::stages_f32
                                                      : Computer::other;
}

// The passes of attention, as src/engines/reference/attention and src/engines/stages/attention allocate.
class Attention {
  public:
    Attention(const io::Call& call, int threads) : in_(call.attention), threads_(threads) {
        sequences_ =
            call.packing.queries.empty() ? size(in_.q, 0) : static_cast<double>(call.packing.queries.size()) - 1;
        heads_ = size(in_.q, 2), key_heads_ = size(in_.k, 2), D_ = size(in_.q, 3), Dv_ = size(in_.v, 3);
        if (in_.v && in_.v.rank() == 5) Dv_ *= size(in_.v, 4) * 2;  // numbers of 4 bits, at most
        queries_ = longest(call.packing.queries, size(in_.q, 1));
        all_queries_ = size(in_.q, 0) * size(in_.q, 1);
        keys_ = longest(call.packing.keys, size(in_.k, 1) * (in_.block_table ? size(in_.block_table, 1) : 1));
        group_ = heads_ / std::max(key_heads_, 1.0);
        rows_ = queries_ * group_;
        slice_ = in_.bias ? (size(in_.bias, 1) == heads_ ? group_ : 1) * size(in_.bias, 2) * size(in_.bias, 3) : 0;
    }

    double reference(bool forward) const {
        constexpr double head = 88, block = 40, most_scores = 1 << 22;
        const double step = std::clamp(most_scores / std::max(keys_, 1.0), 4.0, 128.0);
        const double heads = sequences_ * key_heads_;
        const double row = f64 * ((tile + 1) * std::max(D_, Dv_) + 2 * keys_);
        double bytes = growing * head * heads;
        if (forward) {
            const double blocks = key_heads_ * (all_queries_ * group_ / step + sequences_),
                         rows = std::min(step, rows_);
            return bytes + growing * block * blocks +
                   hands(threads_, blocks) * (row + f64 * (rows * (D_ + Dv_ + keys_)));
        }
        constexpr double most_rows = 1024, gap = 24;
        const double rows = std::min(most_rows, rows_);
        const double scores =
            std::min(rows_ * (keys_ + gap), std::max(most_scores + most_rows * gap, 4 * (keys_ + gap)));
        bytes += f64 * (rows * (D_ + Dv_) + 5 * scores + 2 * keys_ * (D_ + Dv_) + slice_ + heads_);
        return bytes + hands(threads_, 2 * tile) * (row + f64 * tile * D_);
    }

    double stages(double element, bool forward) const {
        const double held = queries_ > tile ? keys_ : tile;
        double bytes = tile * (2 * D_ + 3 * Dv_ + 4 * tile + 16) + held * (D_ + Dv_) + 4 * keys_;  // of a thread
        if (forward) return hands(threads_, sequences_ * heads_) * (element * bytes + of_thread);
        constexpr double unit = growing * (16 + 64) + 48 + 24;
        constexpr double most_in_sums = 1 << 26;
        const double units = sequences_ * key_heads_;
        bytes += keys_ * (D_ + Dv_);
        const double sums = std::min(units * slice_, std::max(most_in_sums, hands(threads_, units) * slice_));
        return units * unit + element * (sequences_ * heads_ + sums) +
               hands(threads_, units) * (element * bytes + of_thread);
    }

  private:
    const AttentionInputs& in_;
    int threads_;
    double sequences_, heads_, key_heads_, group_, D_, Dv_;
    double queries_, keys_, all_queries_, rows_, slice_;  // of the longest sequence; of all; of a key head; of a bias
};

bool rises(const io::Call& call) {
    if (call.delta_options.use_gate_in_kernel) return false;
    for (const Tensor& t : {call.delta.g, call.delta.g_gamma}) {
        if (!t || !io::is_float(t.dtype())) continue;
        const core::Tensor from = io::core_row(t);
        for (std::int64_t i = 0, n = t.count(); i < n; ++i)
            if (core::load(from, i) > 0) return true;
    }
    return false;
}

// Those of the delta rules, as src/engines/reference/delta_rule and src/engines/stages/delta_rule allocate.
class Delta {
  public:
    Delta(const io::Call& call, int threads) : threads_(threads), rises_(rises(call)) {
        const DeltaInputs& in = call.delta;
        sequences_ = call.packing.tokens.empty() ? size(in.q, 0) : static_cast<double>(call.packing.tokens.size()) - 1;
        heads_ = size(in.q, 2), value_heads_ = size(in.v, 2), K_ = size(in.q, 3), V_ = size(in.v, 3);
        tokens_ = longest(call.packing.steps, size(in.k, 1));
        group_ = value_heads_ / std::max(heads_, 1.0);
        channels_ = io::operation_of(call).rule->gate == core::Gate::channel ? K_ : 1;
        sums_ = sequences_ * value_heads_ * (96 + f64 * channels_);
    }

    double reference(bool forward) const {
        const double columns = std::ceil(V_ / 16) * 16, state = K_ * columns;
        if (forward)
            return sequences_ * f64 +
                   hands(threads_, sequences_ * value_heads_) * f64 * (state + tile * (4 * K_ + 1 + 3 * columns));
        const double segment = std::max(tile, std::floor(std::sqrt(tokens_)));
        const double starts = std::ceil(tokens_ / segment) * group_;
        return sums_ +
               hands(threads_, sequences_ * heads_) * f64 *
                   (state * (starts + group_ + 2) + starts * 4 + segment * (8 * K_ + 2 + 3 * columns + 16 * K_ + 16));
    }

    double stages(double element, bool forward) const {
        const double n = std::min(tile, tokens_), pieces = std::ceil(tokens_ / (rises_ ? 1 : tile));
        const double rows = rises_ ? 1 : n, state = K_ * V_;
        const auto of_piece = [&](double r) { return r * (4 * K_ + 3 * r + 3 * channels_ + 3 * V_) + state + K_ + 64; };
        const double head = tokens_ * (element * (3 * K_ + V_ + 4) + 2 * f64 * channels_) + growing * 16 * pieces;
        const double moment = element * (n * (24 * K_ + 8 * V_ + 10 * n) + 5 * state);
        const double gradients = element * tokens_ * (3 * K_ + 2 * V_ + 2 + 3 * channels_);
        const double thread = forward ? head + moment + element * of_piece(n)
                                      : head + moment + gradients + element * growing / 2 * pieces * of_piece(rows);
        return sums_ + hands(threads_, sequences_ * heads_) * (thread + of_thread);
    }

  private:
    int threads_;
    bool rises_;
    double sequences_, tokens_, heads_, value_heads_, group_, K_, V_, channels_, sums_;
};

double passes(const io::Call& call, Computer engine, int threads) {
    const auto most = [&](const auto& sizes) {
        double bytes = 0;
        for (const bool forward : {true, false}) {
            if (!forward && !call.d_o && !call.dfinal_state) continue;
            bytes = std::max(bytes, engine == Computer::reference ? sizes.reference(forward)
                                    : engine == Computer::other
                                        ? 0
                                        : sizes.stages(engine == Computer::stages_f32 ? f32 : f64, forward));
        }
        return bytes;
    };
    return call.is_attention ? most(Attention(call, threads)) : most(Delta(call, threads));
}

// Rows of each thread; of a norm a sum for each block of rows.
double passes(const io::LayerCall& call, int threads) {
    constexpr double block_rows = 64;
    const Tensor& x = call.is_convolution ? call.convolution.x : call.norm.x;
    const double row = size(x, call.is_convolution ? 1 : 3), units = count(x);
    const double blocks = call.is_convolution ? 0 : size(x, 0) * size(x, 1) * size(x, 2) / block_rows + 1;
    return blocks * (f64 * row + 48) +
           hands(threads, call.is_convolution ? size(x, 2) : units) * (10 * f64 * row + 512);
}

template <class Call>
double bytes_of_results(const Call& call) {
    double bytes = 0;
    for (const std::string& name : io::output_names(call))
        bytes += count(io::output_shape(call, name)) *
                 static_cast<double>(io::stored_type(io::output_dtype(call, name)).bytes);
    return bytes;
}

// What the judge keeps of an element, its truths and its place in a run, and of a block.
double bytes_kept(const std::vector<std::int64_t>& shape, DType dtype, double truths, double blocks) {
    constexpr double block = 256;
    return count(shape) * (truths * f64 + static_cast<double>(io::stored_type(dtype).bytes)) + block * blocks;
}

// The results of an engine that is judged, and what it needs besides.
template <class Call>
double computed_before(const Call& call, const std::string& engine, int threads) {
    return engine.empty() ? 0 : memory_to_compute(call, engine, threads);
}

}  // namespace

double memory_to_compute(const io::Call& call, const std::string& engine, int threads) {
    return least + bytes_of_results(call) + passes(call, computer_of(engine), threads);
}

double memory_to_compute(const io::LayerCall& call, const std::string&, int threads) {
    return least + bytes_of_results(call) + passes(call, threads);
}

double memory_to_judge(const io::Call& call, const std::vector<std::string>& results, const std::string& engine,
                       int threads) {
    double bytes = least + computed_before(call, engine, threads);
    for (const std::string& name : results) {
        const std::vector<std::int64_t> shape = io::output_shape(call, name);
        bytes += bytes_kept(shape, io::output_dtype(call, name), call.is_attention ? 2 : 1,
                            block_count(*io::find_shape(call, name), shape, call.packing));
    }
    if (call.is_attention) {
        bytes += (f64 + 4) * size(call.attention.q, 0) * size(call.attention.q, 1) * size(call.attention.q, 2);
        if (io::has_quantised_numbers(call)) bytes += 4 * f64 * (count(call.attention.k) + count(call.attention.v));
    } else {
        bytes += f32 * std::max(count(call.delta.g), count(call.delta.v));
    }
    return bytes + std::max(passes(call, Computer::reference, threads), passes(call, Computer::stages_f32, threads));
}

double memory_to_judge(const io::LayerCall& call, const std::vector<std::string>& results, const std::string& engine,
                       int threads) {
    double bytes = least + computed_before(call, engine, threads);
    for (const std::string& name : results) {
        const std::vector<std::int64_t> shape = io::output_shape(call, name);
        const double sequences = call.is_convolution ? count(call.convolution.cu_seqlens) : 0;
        double blocks = std::ceil(static_cast<double>(shape[shape.size() > 2 ? 1 : 0]) / tile) + sequences;
        if (shape.size() > 2)
            blocks *= static_cast<double>(shape[0]) * (shape.size() > 3 ? static_cast<double>(shape[2]) : 1);
        bytes += bytes_kept(shape, io::output_dtype(call, name), 1, blocks);
    }
    const NormInputs& n = call.norm;
    const ConvolutionInputs& c = call.convolution;
    for (const Tensor& t : {n.x, n.z, n.weight, c.x, c.weight, c.bias, c.initial_state, call.dy, call.dfinal_state})
        bytes += f64 * count(t);  // copies that are disturbed
    return bytes + passes(call, threads);
}

std::string memory_text(double bytes) {
    constexpr const char* units[] = {"KiB", "MiB", "GiB", "TiB"};
    std::size_t unit = 0;
    for (bytes /= 1024; bytes >= 1024 && unit + 1 < std::size(units); ++unit) bytes /= 1024;
    char text[40];
    std::snprintf(text, sizeof text, "%.*f %s", bytes < 10 ? 1 : 0, bytes, units[unit]);
    return text;
}

void expect_memory(const std::string& file, double needed, double allowed) {
    if (needed > allowed)
        io::fail(file, "needs " + memory_text(needed) + " of memory, and " + memory_text(allowed) +
                           " are allowed (--memory)");
}

}  // namespace softdelta::judge
