#include "judge/cancellation.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/tensor.h"
#include "io/file/core_view.h"
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
Floor floor_of_gate(const io::Call& call, const Bounds& tokens, const Blocks& gate, const Terms& terms) {
    const std::vector<int64_t> range_of = ranges_of_rows(gate);
    std::vector<double> squared(static_cast<std::size_t>(gate.count()));
    double all_terms = 0, all = 0;
    for (int64_t o = 0; o < gate.outer; ++o)
        for (int64_t m = 0; m < gate.middle; ++m)
            for (int64_t f = 0; f < gate.features; ++f)
                for_each_chunk(tokens, call.chunk_size, [&](int64_t begin, int64_t end) {
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
Floor floor_of_sum(const io::Call& call, const Bounds& tokens, const Case& c, const Blocks& gate, const Terms& terms) {
    const Blocks& sums = c.blocks;
    const bool by_channel = sums.rows == gate.middle * gate.features;
    std::vector<double> squared(static_cast<std::size_t>(sums.rows));
    double all_terms = 0;
    for (int64_t o = 0; o < gate.outer; ++o)
        for (int64_t m = 0; m < gate.middle; ++m)
            for (int64_t f = 0; f < gate.features; ++f)
                for_each_chunk(tokens, call.chunk_size, [&](int64_t begin, int64_t end) {
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

std::optional<Floor> cancellation_floor(const io::Call& call, const Case& c,
                                        const std::map<std::string, io::OwnedTensor>& terms) {
    if (terms.empty() || (!c.blocks.parameters && c.name != "dg")) return std::nullopt;
    const io::OwnedTensor& tensor = terms.begin()->second;
    const std::vector<int64_t>& shape = tensor.shape();
    const Bounds tokens = call.packing.tokens.empty() ? Bounds{0, shape[1]} : call.packing.tokens;
    if (!c.blocks.parameters) return floor_of_gate(call, tokens, c.blocks, Terms(c.blocks, tensor));
    Blocks gate;  // the gate's own layout, whether or not dg is judged
    gate.outer = shape[0];
    gate.rows = shape[1];
    gate.middle = shape[2];
    gate.features = shape.size() == 4 ? shape[3] : 1;
    return floor_of_sum(call, tokens, c, gate, Terms(gate, tensor));
}

}  // namespace softdelta::judge
