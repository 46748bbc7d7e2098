// What a tensor of a call is, as data: name, member, shape in symbols, type, and which rules take it. The tables stand
// beside the structures (core/attention.h, core/delta_rule.h, core/layer). Code that
// visits all tensors of a call reads them: checks of arguments, case files, verdicts, Python, docs/case-file.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/tensor.h"

namespace softdelta::core {

// Sizes of a call, as shapes spell them.
enum class Symbol : std::uint8_t {
    one,
    B,
    N,
    bounds,
    T,
    nT,
    NT,
    Lq,
    Lk,
    H,
    Hk,
    HV,
    K,
    V,
    D,
    Dv,
    HV_times_K,
    blocks,
    ranges,
    C,
    W,
    S,
    D_blocks,
    Dv_blocks
};
inline constexpr std::array<std::string_view, 24> symbol_names = {
    "1", "B", "N", "N+1", "T",    "nT",         "NT", "Lq", "Lk", "H", "Hk",   "HV",
    "K", "V", "D", "Dv",  "HV*K", "max_blocks", "P",  "C",  "W",  "S", "D/32", "Dv/32"};

// A dimension has one of a few sizes: "H|Hk|1".
struct Dimension {
    std::array<Symbol, 3> alternatives{};
    int count = 0;

    constexpr bool has(Symbol symbol) const {
        for (int i = 0; i < count; ++i)
            if (alternatives[static_cast<std::size_t>(i)] == symbol) return true;
        return false;
    }
};

// A shape from its text, "B T HV V"; what is no symbol does not compile. Rank 0: no shape.
struct Shape {
    std::string_view text;
    int rank = 0;
    std::array<Dimension, Tensor::max_rank> dims{};

    constexpr Shape() = default;
    constexpr Shape(const char* shape) : text(shape) {
        for (std::size_t at = 0; at < text.size(); ++rank) {
            Dimension& dim = dims[static_cast<std::size_t>(rank)];
            for (bool more = true; more;) {
                const std::size_t end = text.find_first_of("| ", at);
                const std::size_t stop = end == std::string_view::npos ? text.size() : end;
                dim.alternatives[static_cast<std::size_t>(dim.count++)] = symbol(text.substr(at, stop - at));
                more = stop < text.size() && text[stop] == '|';
                at = stop + 1;
            }
        }
    }
    constexpr bool has(Symbol symbol) const {
        for (const Dimension& dim : dims)
            if (dim.has(symbol)) return true;
        return false;
    }

  private:
    static constexpr Symbol symbol(std::string_view name) {
        for (std::size_t i = 0; i < symbol_names.size(); ++i)
            if (symbol_names[i] == name) return static_cast<Symbol>(i);
        throw std::invalid_argument("no symbol of a shape");
    }
};

// "[B, T, HV, V]", as errors and the documentation have it.
inline std::string text_of(const Shape& shape) {
    std::string text = "[";
    for (const char c : shape.text) text += c == ' ' ? ", " : std::string(1, c);
    return text + "]";
}

enum class Kind { floating, boolean, integer };  // integers are lengths and indices, which may stay on the host

// Whether a rule takes an operand, and in a few words why.
enum class Use { optional, required, none };
struct Need {
    Use use = Use::optional;
    const char* why = "";
};
struct Rule;
namespace needs {
constexpr Need optional(const Rule&) {
    return {};
}
constexpr Need required(const Rule&) {
    return {Use::required};
}
}  // namespace needs

template <class Struct>
using TensorOf = Tensor Struct::*;

// The inputs that a structure of gradients belongs to.
template <class Struct>
struct InputsOf {
    using type = Struct;
};

template <class Struct>
struct Operand {
    using Inputs = typename InputsOf<Struct>::type;

    const char* name;
    TensorOf<Struct> tensor;
    Shape shape{};                                     // of a gradient by an input: none, it has the input's
    Need (*need)(const Rule& rule) = needs::optional;  // attention has no rule and asks with an empty one
    Kind kind = Kind::floating;
    Shape channel_shape{};             // instead, where the gate is one of each key channel
    Shape v_first_shape{};             // instead, where states are [.., V, K]
    Shape number_shape{};              // instead, where a rule maps states by a number: for a whole matrix
    bool written = false;              // a result
    TensorOf<Inputs> input = nullptr;  // a gradient's
};

// operands_of<AttentionInputs> and so on: a std::array of Operand<AttentionInputs>, in the order of softdelta.h.
template <class Struct>
inline constexpr auto operands_of = nullptr;

// The row of a name; null when there is none.
template <class Struct>
constexpr const Operand<Struct>* find_operand(std::string_view name) {
    for (const Operand<Struct>& operand : operands_of<Struct>)
        if (name == operand.name) return &operand;
    return nullptr;
}

// visit(operand, tensor) for every tensor that is given.
template <class Struct, class Visit>
void for_each_given(const Struct& of, const Visit& visit) {
    for (const Operand<Struct>& operand : operands_of<Struct>)
        if (of.*operand.tensor) visit(operand, of.*operand.tensor);
}

// Which entries of a pool of states sequences use.
inline bool is_of_pools(std::string_view name) {
    return name.ends_with("_indices") || name == "has_initial_state";
}

}  // namespace softdelta::core
