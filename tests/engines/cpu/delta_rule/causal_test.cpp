// An Inf, a NaN or a rise of the gate at one token of the fast delta rules: earlier tokens, and other sequences and
// heads, keep their bits; what the f64 recurrence still has finite is finite. Backward, one in d_o reaches no dq of
// another token, and no dk, dv, dp, dg, dbeta of a later one.
//
// SOFTDELTA_SEED: the first call; SOFTDELTA_CALLS: how many for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "io/file/core_view.h"
#include "support/fast_delta.h"
#include "support/levels.h"

namespace softdelta::test {
namespace {

// Element [b, t, …] of a tensor in row-major order.
struct Place {
    Index batch, token, rest;
};

Place place_of(Index element, std::span<const Index> shape) {
    Index row = 1;
    for (std::size_t d = 2; d < shape.size(); ++d) row *= shape[d];
    return {element / row / shape[1], element / row % shape[1], element % row};
}

// A drawn call, and the same one with one element of a tensor replaced.
struct Pair {
    FastDelta clean, spoiled;
    const char* name;
    Place at;
    Index sequence_begin, sequence_end;  // tokens of the sequence that it is in
    std::string describe() const {
        return clean.describe() + "; " + name + " at token " + std::to_string(at.token) + " of batch row " +
               std::to_string(at.batch) + ", element " + std::to_string(at.rest);
    }
};

// The tensor that gets it; null where the call has none.
using Choose = std::pair<const char*, Array*> (*)(RandomDelta& call, Random& random);

std::pair<const char*, Array*> choose_input(RandomDelta& call, Random& random) {
    constexpr const char* names[] = {"q", "k", "p", "v", "g", "beta"};
    const char* name = names[random() % std::size(names)];
    for (const DeltaOperand& operand : delta_operands())
        if (name == std::string(operand.name)) return {name, &(call.*operand.array)};
    return {name, nullptr};
}

std::pair<const char*, Array*> choose_output_gradient(RandomDelta& call, Random& /*random*/) {
    return {"d_o", &call.d_o};
}

std::pair<const char*, Array*> choose_head_gate(RandomDelta& call, Random& /*random*/) {
    const bool chosen = call.options.rule != Rule::kda && !call.options.use_gate_in_kernel;
    return {"g", chosen ? &call.g : nullptr};
}

const std::vector<double> not_finite = {std::numeric_limits<double>::infinity(),
                                        std::numeric_limits<double>::quiet_NaN(),
                                        -std::numeric_limits<double>::infinity()};

// values: g takes one of the first two, for −∞ is a gate.
Pair draw_pair(std::uint64_t seed, Choose choose, const std::vector<double>& values = not_finite) {
    Random random(seed);
    for (std::uint64_t at = seed;; at += 100000) {
        RandomDelta clean = draw_fast_delta_call(at), spoiled = draw_fast_delta_call(at);
        const auto [name, array] = choose(spoiled, random);
        if (array == nullptr || array->count() == 0 || clean.options.steps > 1) continue;
        if (std::ranges::find(array->view().stride(), 0) != array->view().stride().end()) continue;  // one for many
        const Index element = static_cast<Index>(random() % static_cast<std::uint64_t>(array->count()));
        const Place place = place_of(element, array->view().shape());
        const double value = values[random() % (name == std::string("g") ? 2 : values.size())];
        array->set(element, value);
        Index begin = 0, end = array->view().shape(1);
        for (Index n = 0; clean.cu_seqlens.view() && n < clean.sequences; ++n)
            if (place.token >= clean.begin(n) && place.token < clean.begin(n) + clean.length(n))
                begin = clean.begin(n), end = begin + clean.length(n);
        return {FastDelta(std::move(clean)), FastDelta(std::move(spoiled)), name, place, begin, end};
    }
}

bool same_bits(const io::OwnedTensor& a, const io::OwnedTensor& b, Index element) {
    const auto size = a.bytes() / static_cast<std::size_t>(a.count());
    const auto at = static_cast<std::size_t>(element) * size;
    return std::memcmp(static_cast<const std::byte*>(a.data()) + at, static_cast<const std::byte*>(b.data()) + at,
                       size) == 0;
}

// Elements of a result that must not change. allowed(place): those that may.
template <class Allowed>
std::string compare(const Pair& pair, const FastDelta::Results& clean, const FastDelta::Results& spoiled,
                    const std::string& name, const Allowed& allowed) {
    const io::OwnedTensor &a = clean.at(name), &b = spoiled.at(name);
    for (Index i = 0; i < a.count(); ++i)
        if (const Place p = place_of(i, a.shape()); !allowed(p) && !same_bits(a, b, i))
            return pair.describe() + ": " + name + " changes at token " + std::to_string(p.token) + ", element " +
                   std::to_string(p.rest) + "\n";
    return "";
}

std::string check_forward(const Pair& pair, std::uint64_t seed) {
    // About an anchor, gates of a channel round what comes before them.
    if (pair.clean.drawn().rule().has_channel_gate() && pair.name == std::string("g")) return "";
    const auto clean = pair.clean.forward({"o"}, fast(seed)), spoiled = pair.spoiled.forward({"o"}, fast(seed));
    return compare(pair, clean, spoiled, "o", [&](const Place& p) {
        return p.batch == pair.at.batch && p.token >= pair.at.token && p.token < pair.sequence_end;
    });
}

std::string check_backward(const Pair& pair, std::uint64_t seed) {
    const FastDelta::Names names = pair.clean.gradient_names();
    const auto clean = pair.clean.backward(names, fast(seed)), spoiled = pair.spoiled.backward(names, fast(seed));
    std::string faults;
    for (const std::string& name : names) {
        const bool dq = name == "dq";
        if (!dq && name != "dk" && name != "dv" && name != "dp" && name != "dg" && name != "dbeta") continue;
        faults += compare(pair, clean, spoiled, name, [&](const Place& p) {
            return p.batch == pair.at.batch && p.token <= pair.at.token &&
                   p.token >= (dq ? pair.at.token : pair.sequence_begin);
        });
    }
    return faults;
}

TEST(DeltaCausality, OfInputsThatAreNotFinite) {
    check_calls(
        call_count(200), [](std::uint64_t seed) { return draw_pair(seed, choose_input); }, check_forward);
}

// Such a chunk is not steady: its earlier tokens go by products as they do without.
TEST(DeltaCausality, OfAGateThatRises) {
    check_calls(
        call_count(25),
        [](std::uint64_t seed) {
            return draw_pair(seed, choose_head_gate, {30, 80});
        },
        check_forward);
}

double value_at(const Tensor& t, Index element) {
    const core::Tensor view = io::core_view(t);
    Index at = 0;
    for (auto dim = static_cast<std::size_t>(view.rank); dim-- > 0; element /= view.shape[dim])
        at += element % view.shape[dim] * view.stride[dim];
    return core::load(view, at);
}

// What the forward pass keeps: u of earlier tokens keeps its bits, that of a value which is not finite is not finite.
std::string check_kept(const Pair& pair, std::uint64_t seed) {
    const bool is_gate = pair.name == std::string("g"), is_value = pair.name == std::string("v");
    if (pair.clean.drawn().rule().has_channel_gate() && is_gate) return "";
    const Keep keep{.interval = 64, .u = seed % 3 == 0 ? DType::bf16 : DType::f32};
    const auto clean = pair.clean.kept(keep, fast(seed)), spoiled = pair.spoiled.kept(keep, fast(seed));
    const Tensor &a = clean.u.view(), &b = spoiled.u.view();
    std::string faults;
    for (Index i = 0; i < a.count(); ++i) {
        const Place p = place_of(i, a.shape());
        const double x = value_at(a, i), y = value_at(b, i);
        const bool may_change = p.batch == pair.at.batch && p.token >= pair.at.token && p.token < pair.sequence_end;
        if (!may_change && std::memcmp(&x, &y, sizeof x) != 0 && (x == x || y == y))
            faults = ": u changes at token " + std::to_string(p.token);
        const bool own = p.batch == pair.at.batch && p.token == pair.at.token && p.rest == pair.at.rest;
        if (is_value && own && std::isfinite(y)) faults = ": u is finite where v is not";
    }
    return faults.empty() ? "" : pair.describe() + faults + "\n";
}

TEST(DeltaCausality, OfWhatIsKept) {
    check_calls(
        call_count(100), [](std::uint64_t seed) { return draw_pair(seed, choose_input); }, check_kept);
}

TEST(DeltaCausality, OfOutputGradientsThatAreNotFinite) {
    check_calls(
        call_count(200), [](std::uint64_t seed) { return draw_pair(seed, choose_output_gradient); }, check_backward);
}

}  // namespace
}  // namespace softdelta::test
