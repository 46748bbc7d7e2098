// What a call can yield, in terms of its operands.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "io/call/call.h"
#include "io/call/operands.h"

namespace softdelta::io {

const Operation& operation_of(const Call& call);

// A result that a call can have: its shape, and that shape in symbols.
struct Result {
    std::string name;
    std::vector<std::int64_t> shape;
    const core::Shape* symbols;
};
std::vector<Result> results_of(const Call& call);  // in the order of output_names

// An input that the call has; an absent tensor when it has none of this name.
Tensor input_of(const Call& call, std::string_view name);

// The shape in symbols of an input, a result or a gradient that is given; null for what is none of them.
const core::Shape* find_shape(const Call& call, std::string_view name);

// What a function that checks returns; 0 of one that computes.
template <class Function, class... Arguments>
std::size_t bytes_of(Function function, const Arguments&... arguments) {
    if constexpr (std::is_void_v<std::invoke_result_t<Function, const Arguments&...>>)
        return function(arguments...), 0;
    else
        return function(arguments...);
}

// Puts the results that have a field in `tensors` there; false when there are none. Parameters' gradients, which files
// shape as they like, become vectors.
template <class Struct>
bool assign(const std::map<std::string, Tensor>& results, Struct& tensors) {
    bool any = false;
    for (const auto& field : fields_of<Struct>) {
        const auto found = results.find(field.name);
        if (found == results.end() || field.wanted == nullptr) continue;
        const Tensor& t = found->second;
        tensors.*field.tensor =
            is_gate_parameter(found->first.substr(1)) ? Tensor(t.data(), t.dtype(), {t.count()}) : t;
        any = true;
    }
    return any;
}

}  // namespace softdelta::io
