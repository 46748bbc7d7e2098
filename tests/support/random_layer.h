// Calls of the causal convolution and of the gated norm drawn at random: shapes, options, layouts and numbers, all from
// one seed; computed by the reference in f64, or by the fast engine beside unreadable pages.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/guarded.h"

namespace softdelta::test {

using Numbers = std::vector<double>;
using NumbersByName = std::map<std::string, Numbers>;

struct Convolution {
    using Inputs = ConvolutionInputs;
    using Options = ConvolutionOptions;
    using Outputs = ConvolutionOutputs;
    using Gradients = ConvolutionGradients;
    static constexpr auto forward = causal_convolution_forward;
    static constexpr auto forward_workspace = causal_convolution_forward_workspace;
    static constexpr auto backward = causal_convolution_backward;
    static constexpr auto backward_workspace = causal_convolution_backward_workspace;
};

struct Norm {
    using Inputs = NormInputs;
    using Options = NormOptions;
    using Outputs = NormOutputs;
    using Gradients = NormGradients;
    static constexpr auto forward = gated_norm_forward;
    static constexpr auto forward_workspace = gated_norm_forward_workspace;
    static constexpr auto backward = gated_norm_backward;
    static constexpr auto backward_workspace = gated_norm_backward_workspace;
};

// The structure's tensors by their names; those that are not in the map are not given.
template <class Struct, class Tensors>
Struct assign(const Tensors& tensors) {
    Struct s;
    for (const auto& field : fields_of<Struct>)
        if (const auto found = tensors.find(field.name); found != tensors.end()) s.*field.tensor = found->second.view();
    return s;
}

template <class Family>
struct LayerCall {
    std::uint64_t seed = 0;
    typename Family::Options options;
    std::map<std::string, Array> given;        // inputs and gradients of results, by name
    Shape state_shape;                         // of a convolution
    std::string features;                      // what the draw has
    std::vector<std::string> outputs, wanted;  // results that are asked for

    std::string describe() const { return "SOFTDELTA_SEED=" + std::to_string(seed) + features; }
    const Array& operator[](const std::string& name) const { return given.at(name); }
    bool has(const std::string& name) const { return given.count(name) > 0; }
    typename Family::Inputs inputs() const { return assign<typename Family::Inputs>(given); }

    // Of a result.
    Shape shape_of(const std::string& name) const {
        if (name == "final_state" || name == "dinitial_state") return state_shape;
        const Tensor& like = given.at(name == "y" ? "x" : name.substr(1)).view();
        return {like.shape().begin(), like.shape().end()};
    }
};

// Sizes, types and kinds of the calls that a test wants.
struct LayerRanges {
    Index tokens = 9, channels = 5;         // largest sizes drawn
    std::vector<DType> dtypes{DType::f64};  // each tensor takes one of them
    bool pools = false;                     // states may lie in a pool; there are no gradients through it
    bool nonfinite = false;                 // some elements of x may be Inf or NaN
    bool row_sizes = false;                 // rows of the norm's x may be huge or tiny
    bool repeats = false;                   // strides may be zero
};

LayerCall<Convolution> draw_convolution(std::uint64_t seed, const LayerRanges& ranges = {});
LayerCall<Norm> draw_norm(std::uint64_t seed, const LayerRanges& ranges = {});

// Shapes that kernels take apart: whole vectors, their rests, several ranges of tokens and parts of channels; storage
// types of the fast engine.
LayerRanges fast_layer_ranges(std::uint64_t seed);

// Results of the reference, dense and in f64.
template <class Family>
NumbersByName truth(const LayerCall<Family>& call, const std::vector<std::string>& names, bool backward) {
    Execution execution;
    execution.engine = "reference";
    execution.threads = 1;
    std::map<std::string, Array> tensors;
    for (const std::string& name : names) tensors[name] = Array(DType::f64, call.shape_of(name));
    if (backward) {
        auto gradients = assign<typename Family::Gradients>(tensors);
        for (const auto& field : fields_of<typename Family::Gradients>)
            if (field.given != nullptr && call.has(field.name)) gradients.*field.tensor = call[field.name].view();
        Family::backward(call.inputs(), gradients, call.options, execution);
    } else {
        Family::forward(call.inputs(), assign<typename Family::Outputs>(tensors), call.options, execution);
    }
    NumbersByName results;
    for (const auto& [name, array] : tensors) results[name] = array.values();
    return results;
}

// A result of the fast engine, and the type that it is stored in.
struct Stored {
    DType dtype = DType::f32;
    Numbers numbers;
};
using StoredByName = std::map<std::string, Stored>;

Numbers numbers_of(const Tensor& t);

// Results of the fast engine: operands and results lie beside unreadable pages, results in types and layouts drawn by
// the seed. Throws when a byte was written that belongs to none.
template <class Family>
StoredByName fast_results(const LayerCall<Family>& call, const std::vector<std::string>& names, bool backward,
                          const std::vector<DType>& dtypes, int threads = 1, Memory memory = Memory::own) {
    Execution execution;
    execution.engine = "fast";
    execution.threads = threads;
    const Side side = call.seed % 2 == 0 ? Side::end : Side::begin;
    std::map<std::string, Guarded> given, results;
    for (const auto& [name, array] : call.given) given.emplace(name, Guarded::input(array.view(), side));
    Random layout(call.seed);
    for (const std::string& name : names) {
        const DType dtype = dtypes[layout() % dtypes.size()];
        const Shape shape = call.shape_of(name);
        const Array like = layout() % 2 == 0 ? Array(dtype, shape, layout) : Array(dtype, shape);
        results.emplace(name, Guarded::result(like.view(), side));
    }
    tell_on_bad_access((backward ? "backward, " : "forward, ") + call.describe());
    const auto inputs = assign<typename Family::Inputs>(given);
    if (backward) {
        auto gradients = assign<typename Family::Gradients>(results);
        for (const auto& field : fields_of<typename Family::Gradients>)
            if (field.given != nullptr && call.has(field.name)) gradients.*field.tensor = given.at(field.name).view();
        run_in(memory, Family::backward_workspace(inputs, gradients, call.options, execution), side, execution,
               [&](const Execution& e) { Family::backward(inputs, gradients, call.options, e); });
    } else {
        const auto outputs = assign<typename Family::Outputs>(results);
        run_in(memory, Family::forward_workspace(inputs, outputs, call.options, execution), side, execution,
               [&](const Execution& e) { Family::forward(inputs, outputs, call.options, e); });
    }
    StoredByName stored;
    for (const auto& [name, result] : results) {
        if (!result.gaps_are_intact()) throw std::runtime_error(name + ": memory outside of the tensor was written");
        stored[name] = {result.view().dtype(), numbers_of(result.view())};
    }
    return stored;
}

// Bounds of the error of each element, as multiples of f32's rounding.
NumbersByName bounds(const LayerCall<Convolution>& call, const std::vector<std::string>& names, bool backward);
NumbersByName bounds(const LayerCall<Norm>& call, const std::vector<std::string>& names, bool backward);

// What is wrong with the fast engine's results of a call; nothing: an empty text.
std::string compare(const StoredByName& actual, const NumbersByName& expected, const NumbersByName& bounds,
                    const std::string& what);

template <class Family>
std::string check_call(const LayerCall<Family>& call, bool backward, const std::vector<DType>& dtypes,
                       int threads = 1) {
    const std::vector<std::string>& names = backward ? call.wanted : call.outputs;
    const Memory memory = call.seed / 2 % 2 == 0 ? Memory::own : Memory::workspace;
    return compare(fast_results(call, names, backward, dtypes, threads, memory), truth(call, names, backward),
                   bounds(call, names, backward), call.describe());
}

}  // namespace softdelta::test
