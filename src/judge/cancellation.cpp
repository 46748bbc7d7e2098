#include "judge/cancellation.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/tensor.h"
#include "io/file/core_view.h"
#include "judge/lost_scores.h"
#include "judge/sigmoid.h"

namespace softdelta::judge {

namespace {

using std::int64_t;

constexpr double floor_factor = 4 * 0x1p-23;

double element(const Tensor& t, std::initializer_list<int64_t> index) {
    int64_t offset = 0;
    std::size_t dim = 0;
    for (const int64_t i : index) offset += i * t.stride()[dim++];
    return core::load(io::core_view(t), offset);
}

// d(gate)/d(what the gate is made from) at one token: how noise of dg reaches those of a raw gate.
struct Slopes {
    double raw = 1, A_log = 0;
};

Slopes gate_slopes(const io::Call& call, int64_t b, int64_t t, int64_t h, int64_t channel, int64_t channels) {
    const DeltaInputs& in = call.delta;
    if (!call.delta_options.use_gate_in_kernel) return {};
    const double raw = in.g.rank() == 4 ? element(in.g, {b, t, h, channel}) : element(in.g, {b, t, h});
    const Tensor& bias = call.gate_bias();
    const double x = raw + (bias ? element(bias, {h * channels + channel}) : 0);
    const double a = in.A_log ? std::exp(element(in.A_log, {h})) : 1;
    if (std::isnan(call.delta_options.lower_bound)) return {-a * sigmoid(x), -a * softplus(x)};
    const double slope = call.delta_options.lower_bound * sigmoid(a * x) * sigmoid(-a * x) * a;
    return {slope, slope * x};
}

// The tokens, sequence by sequence, in chunks of the kernel.
template <class Visit>
void for_each_chunk(const Bounds& tokens, int64_t chunk_size, Visit&& visit) {
    for (std::size_t n = 0; n + 1 < tokens.size(); ++n)
        for (int64_t first = tokens[n], end = tokens[n + 1]; first < end; first += chunk_size)
            visit(first, std::min(first + chunk_size, end));
}

// The squared terms of one row and gate.
class Terms {
  public:
    Terms(const Blocks& gate, const io::OwnedTensor& terms)
        : gate_(gate), data_(static_cast<const float*>(terms.data())) {}
    double squared(int64_t o, int64_t t, int64_t m, int64_t f) const {
        const auto term = static_cast<double>(data_[((o * gate_.rows + t) * gate_.middle + m) * gate_.features + f]);
        return term * term;
    }

  private:
    const Blocks& gate_;
    const float* data_;
};

// Which range of the gate's rows a row belongs to.
std::vector<int64_t> ranges_of_rows(const Blocks& gate) {
    std::vector<int64_t> range_of(static_cast<std::size_t>(gate.rows));
    for (std::size_t r = 0; r < gate.ranges.size(); ++r)
        std::fill(range_of.begin() + gate.ranges[r].begin, range_of.begin() + gate.ranges[r].end,
                  static_cast<int64_t>(r));
    return range_of;
}

// dg is a reverse cumulative sum within a chunk: a row has the noise of all rows of its chunk from it on.
Floor floor_of_gate(const io::Call& call, const Bounds& tokens, int64_t chunk, const Blocks& gate, const Terms& terms) {
    const std::vector<int64_t> range_of = ranges_of_rows(gate);
    std::vector<double> squared(static_cast<std::size_t>(gate.count()));
    double all_terms = 0, all = 0;
    for (int64_t o = 0; o < gate.outer; ++o)
        for (int64_t m = 0; m < gate.middle; ++m)
            for (int64_t f = 0; f < gate.features; ++f)
                for_each_chunk(tokens, chunk, [&](int64_t begin, int64_t end) {
                    double sum = 0;
                    for (int64_t t = end; t-- > begin;) {
                        const double term = terms.squared(o, t, m, f);
                        const double slope = gate_slopes(call, o, t, m, f, gate.features).raw;
                        sum += term;
                        squared[static_cast<std::size_t>(gate.index(o, range_of[static_cast<std::size_t>(t)], m))] +=
                            sum * slope * slope;
                        all_terms += term;
                    }
                });
    Floor floor;
    for (int64_t b = 0; b < gate.count(); ++b) {
        const double sum = squared[static_cast<std::size_t>(b)];
        const auto n = static_cast<double>(std::max<int64_t>(gate.elements(b), 1));
        floor.blocks.push_back(floor_factor * std::sqrt(sum / n));
        all += sum;
    }
    const auto n = static_cast<double>(std::max<int64_t>(gate.outer * gate.rows * gate.middle * gate.features, 1));
    floor.whole = floor_factor * std::sqrt(all / n);
    floor.terms = std::sqrt(all_terms / n);
    return floor;
}

// Gradients of a gate's parameters, [HV] or [HV·K], are weighted sums of dg over tokens. dg is a reverse cumulative
// sum within a chunk, so the noise of row s enters with the sum of the weights of the chunk's rows up to s.
Floor floor_of_sum(const io::Call& call, const Bounds& tokens, int64_t chunk, const Case& c, const Blocks& gate,
                   const Terms& terms) {
    const Blocks& sums = c.blocks;
    const bool by_channel = sums.rows == gate.middle * gate.features;
    std::vector<double> squared(static_cast<std::size_t>(sums.rows));
    double all_terms = 0;
    for (int64_t o = 0; o < gate.outer; ++o)
        for (int64_t m = 0; m < gate.middle; ++m)
            for (int64_t f = 0; f < gate.features; ++f)
                for_each_chunk(tokens, chunk, [&](int64_t begin, int64_t end) {
                    double weight = 0;
                    for (int64_t t = begin; t < end; ++t) {
                        const Slopes slopes = gate_slopes(call, o, t, m, f, gate.features);
                        weight += c.name == "dA_log" ? slopes.A_log : slopes.raw;
                        const double term = terms.squared(o, t, m, f);
                        squared[static_cast<std::size_t>(by_channel ? m * gate.features + f : m)] +=
                            term * weight * weight;
                        all_terms += term;
                    }
                });
    Floor floor;
    double all = 0;
    for (const RowRange& r : sums.ranges) {
        const double sum = std::accumulate(squared.begin() + r.begin, squared.begin() + r.end, 0.0);
        floor.blocks.push_back(floor_factor * std::sqrt(sum / static_cast<double>(r.end - r.begin)));
        all += sum;
    }
    const auto n = static_cast<double>(std::max<int64_t>(gate.outer * gate.rows * gate.middle * gate.features, 1));
    floor.whole = floor_factor * std::sqrt(all / static_cast<double>(sums.rows));
    floor.terms = std::sqrt(all_terms / n);
    return floor;
}

// Sums of gates and of their gradients span a chunk, of the kernel or of the widest baseline.
int64_t rows_of_chunk(const io::Call& call, const Case& c) {
    constexpr int64_t widest = 128;
    return c.exact.errors.count(Baseline::chunks_of_128) > 0 ? std::max(call.chunk_size, widest) : call.chunk_size;
}

int64_t longest_sequence(const io::Call& call) {
    if (call.packing.tokens.empty()) return call.delta.q.shape(1);
    int64_t longest = 0;
    for (std::size_t n = 1; n < call.packing.tokens.size(); ++n)
        longest = std::max(longest, call.packing.tokens[n] - call.packing.tokens[n - 1]);
    return longest;
}

// RMS of the terms of an element of which chance may leave far less. Attention: s = scale·q kᵀ, ds = p (do·v − D). A
// delta rule's first token without a state: o = scale·(q·k) v, and its gradients.
double terms_by_chance(const io::Call& call, const std::string& name, double width) {
    const auto norm = [](const Tensor& t) { return t ? largest_norm(t) : 1; };
    if (call.is_attention) {
        const AttentionInputs& in = call.attention;
        const double ds = 2 * norm(call.d_o) * norm(in.v), rows = static_cast<double>(in.q.shape(1));
        const double group = static_cast<double>(in.q.shape(2)) / static_cast<double>(in.k.shape(2));
        if (name == "lse") return scale_of(call) * norm(in.q) * norm(in.k);
        if (name == "dq") return scale_of(call) * ds * norm(in.k);
        if (name == "dk") return scale_of(call) * ds * norm(in.q) * rows * group;
        return ds * static_cast<double>(in.q.shape(0) * in.q.shape(2));
    }
    const bool unit = call.delta_options.use_qk_l2norm_in_kernel;
    const double q = norm(call.delta.q), k = norm(call.delta.k), v = norm(call.delta.v), d_o = norm(call.d_o);
    const double all = scale_of(call) * (unit ? 1 : q * k) * v * d_o;
    const double own = name == "o" ? d_o : name == "dv" ? v : name == "dq" ? q : name == "dk" ? k : std::sqrt(width);
    return all / own / std::sqrt(width);
}

// What rounding may do to blocks that average over little: their truth is 0, a difference of equal sums; or they hang
// on one product q·k. So do states that matrix units sum, whose accumulators are cut off and not rounded.
void add_chance(const io::Call& call, const Case& c, Floor& floor) {
    const auto is = [&](std::initializer_list<const char*> names) {
        return std::any_of(names.begin(), names.end(), [&](const char* n) { return c.name == n; });
    };
    const bool may_be_zero = call.is_attention ? is({"dq", "dk", "dbias"}) : is({"dg"});
    const bool may_be_small =
        call.is_attention ? is({"lse"}) : is({"o", "dq", "dk", "dv", "dbeta"}) && !call.delta.initial_state;
    const bool is_state = is({"final_state", "dinitial_state"}) && call.delta.q.dtype() != DType::f32;
    if (!may_be_zero && !may_be_small && !is_state) return;
    const Blocks& blocks = c.blocks;
    std::vector<double> squares(static_cast<std::size_t>(blocks.count()));
    const auto* truth = static_cast<const double*>(c.exact.truth.data());
    for (int64_t o = 0; o < blocks.outer; ++o)
        for (int64_t r = 0; r < blocks.range_count(); ++r)
            blocks.for_each_run(o, r, [&](int64_t block, int64_t first, int64_t n) {
                for (int64_t i = 0; i < n; ++i)
                    squares[static_cast<std::size_t>(block)] += truth[first + i] * truth[first + i];
            });
    double bound = 0;
    const auto terms = [&] {
        if (bound == 0) bound = terms_by_chance(call, c.name, static_cast<double>(blocks.features));
        floor.terms = std::max(floor.terms, bound);
        return bound;
    };
    const double ulp = core::epsilon_of(io::core_type(c.result.dtype()));
    const double by_units = is_state ? 0x1p-28 * static_cast<double>(longest_sequence(call)) : 0;
    floor.blocks.resize(squares.size());
    double all = 0;
    for (int64_t b = 0; b < blocks.count(); ++b) {
        const auto i = static_cast<std::size_t>(b),
                   r = static_cast<std::size_t>(b / blocks.middle % blocks.range_count());
        const RowRange& rows = blocks.ranges[r];
        const bool is_first = r == 0 || blocks.ranges[r - 1].sequence != rows.sequence;
        const bool is_small =
            call.is_attention ? blocks.elements(b) == 1 : is_first && rows.end - rows.begin <= call.delta_options.steps;
        const double own = may_be_zero && squares[i] == 0 ? std::max(floor_factor, ulp / 8) * terms()
                           : may_be_small && is_small
                               ? floor_factor * terms()
                               : by_units * root_mean(squares[i], static_cast<double>(blocks.elements(b)));
        floor.blocks[i] = std::max(floor.blocks[i], own);
        all += floor.blocks[i] * floor.blocks[i];
    }
    if (std::all_of(floor.blocks.begin(), floor.blocks.end(), [](double x) { return x > 0; }))
        floor.whole = std::max(floor.whole, root_mean(all, static_cast<double>(blocks.count())));
}

}  // namespace

std::map<std::string, io::OwnedTensor> make_term_tensors(const io::Call& call) {
    std::map<std::string, io::OwnedTensor> terms;
    if (call.is_attention || (!call.delta.g && !call.delta.g_gamma) || call.delta_options.steps > 1) return terms;
    const Tensor& like = call.delta.g ? call.delta.g : call.delta.v;
    std::vector<int64_t> shape(like.shape().begin(), like.shape().end());
    if (!call.delta.g) shape.pop_back();
    terms.emplace("dg_terms", io::OwnedTensor(DType::f32, shape));
    return terms;
}

std::map<std::string, io::OwnedTensor> terms_of_truths(const io::Call& call, const std::vector<Case>& cases) {
    std::map<std::string, io::OwnedTensor> terms;
    if (call.is_attention || !call.delta.g || call.delta_options.steps == 1) return terms;
    const Tensor& g = call.delta.g;
    io::OwnedTensor sizes(DType::f32, {g.shape().begin(), g.shape().end()});
    auto* to = static_cast<float*>(sizes.data());
    const int64_t B = g.shape(0), T = g.shape(1), HV = g.shape(2), channels = g.rank() == 4 ? g.shape(3) : 1;
    int64_t found = 0;
    for (const Case& c : cases) {
        const Tensor* x = c.name == "dq"   ? &call.delta.q
                          : c.name == "dk" ? &call.delta.k
                          : c.name == "dp" ? &call.delta.p
                                           : nullptr;
        if (x == nullptr || !*x) continue;
        ++found;
        const int64_t rows = x->shape(1), H = x->shape(2), K = x->shape(3), steps = rows / T;
        const auto* d = static_cast<const double*>(c.exact.truth.data());
        for (int64_t b = 0; b < B; ++b)
            for (int64_t t = 0; t < rows; ++t)
                for (int64_t hv = 0; hv < HV; ++hv)
                    for (int64_t i = 0, h = hv / (HV / H); i < K; ++i) {
                        const double term = element(*x, {b, t, h, i}) * d[((b * rows + t) * H + h) * K + i];
                        to[((b * T + t / steps) * HV + hv) * channels + (channels > 1 ? i : 0)] +=
                            static_cast<float>(term * term);
                    }
    }
    if (found < 2) return terms;
    for (int64_t i = 0; i < sizes.count(); ++i) to[i] = std::sqrt(to[i]);
    terms.emplace("dg_terms", std::move(sizes));
    return terms;
}

std::optional<Floor> cancellation_floor(const io::Call& call, const Case& c,
                                        const std::map<std::string, io::OwnedTensor>& terms) {
    Floor floor;
    if (!terms.empty() && (c.blocks.parameters || c.name == "dg")) {
        const io::OwnedTensor& tensor = terms.begin()->second;
        const std::vector<int64_t>& shape = tensor.shape();
        const Bounds tokens = call.packing.tokens.empty() ? Bounds{0, shape[1]} : call.packing.tokens;
        const int64_t chunk = rows_of_chunk(call, c);
        Blocks gate = c.blocks;
        if (c.blocks.parameters) {  // the gate's own layout, whether or not dg is judged
            gate = Blocks();
            gate.outer = shape[0];
            gate.rows = shape[1];
            gate.middle = shape[2];
            gate.features = shape.size() == 4 ? shape[3] : 1;
        }
        floor = c.blocks.parameters ? floor_of_sum(call, tokens, chunk, c, gate, Terms(gate, tensor))
                                    : floor_of_gate(call, tokens, chunk, gate, Terms(gate, tensor));
    }
    add_chance(call, c, floor);
    if (floor.blocks.empty()) return std::nullopt;
    return floor;
}

}  // namespace softdelta::judge
