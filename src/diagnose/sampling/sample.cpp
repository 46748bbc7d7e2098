#include "diagnose/sampling/sample.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>

#include "io/call/operands.h"
#include "io/call/results.h"
#include "io/file/core_view.h"

namespace softdelta::diagnose {

namespace {

using Numbers = std::vector<std::int64_t>;

Numbers first(std::int64_t count) {
    Numbers numbers(static_cast<std::size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
}

// The dimensions of a tensor, a letter each. n: sequences, b: batch rows, t: query rows or tokens, r: rows of their
// steps, s: key rows, h: heads. i and j: rows and keys within a sequence. d: tiles of rows, c: chunks. A point is a
// dimension that stays whole.
char letter_of(const core::Dimension& dim) {
    using enum core::Symbol;
    const bool of_scores = dim.count > 1;  // of a mask or bias, which may be broadcast
    switch (dim.alternatives[0]) {
        case B:
            return of_scores ? 'n' : 'b';
        case N:
            return 'n';
        case T:
            return 't';
        case nT:
            return 'r';
        case Lq:
            return of_scores ? 'i' : 't';
        case Lk:
            return of_scores ? 'j' : 's';
        case H:
        case Hk:
        case HV:
        case HV_times_K:
            return 'h';
        default:
            return '.';
    }
}

std::string layout_of(const io::Call& call, std::string_view name) {
    const core::Shape* symbols = io::find_shape(call, name);
    if (symbols != nullptr) {
        std::string layout;
        for (int i = 0; i < symbols->rank; ++i) layout += letter_of(symbols->dims.at(static_cast<std::size_t>(i)));
        const bool of_keys = layout.starts_with("bs");  // in blocks, packed, or in caches of sequences
        if (of_keys && call.attention.block_table)
            layout.replace(0, 2, "..");
        else if (of_keys && !call.attention.cu_seqlens_k)
            layout[0] = 'n';
        return layout;
    }
    if (!call.is_attention) return name == "h" || name == "dh" ? "bch.." : "bth.";
    return name == "delta" ? "bht" : name == "ds" ? "nhij" : "nhdj";  // dbias_tiles
}

Numbers lengths_of(const io::Bounds& bounds) {
    Numbers lengths;
    for (std::size_t i = 1; i < bounds.size(); ++i) lengths.push_back(bounds[i] - bounds[i - 1]);
    return lengths;
}

const io::Bounds& bounds_of(const io::Call& call, bool keys) {
    if (!call.is_attention) return call.packing.tokens;
    return keys ? call.packing.keys : call.packing.queries;
}

// Items of the selected sequences, each of which has its `counts` one after the other.
Numbers within(const Numbers& counts, const Numbers& sequences) {
    Numbers items;
    std::int64_t begin = 0, next = 0;
    for (const std::int64_t n : sequences) {
        for (; next < n; ++next) begin += counts[static_cast<std::size_t>(next)];
        for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(n)]; ++i) items.push_back(begin + i);
    }
    return items;
}

// The longest of the selected sequences.
std::int64_t longest(const Numbers& lengths, const Numbers& sequences) {
    std::int64_t most = 0;
    for (const std::int64_t n : sequences) most = std::max(most, lengths[static_cast<std::size_t>(n)]);
    return most;
}

Numbers in_chunks(Numbers lengths, std::int64_t chunk) {
    for (std::int64_t& length : lengths) length = (length + chunk - 1) / chunk;
    return lengths;
}

// The chosen indices of a dimension of `size`.
Numbers choose(const io::Call& call, const Selection& selection, char dimension, std::int64_t size, bool& partial) {
    const auto summed = [&](const Numbers& chosen, std::int64_t all) {
        partial = partial || static_cast<std::int64_t>(chosen.size()) < all;
        return first(size);
    };
    const bool keys = dimension == 's' || dimension == 'j';
    const io::Bounds& bounds = bounds_of(call, keys);
    const bool packed = !bounds.empty();
    const Numbers lengths = lengths_of(bounds);
    switch (dimension) {
        case 'n':
            return size == sequence_count(call) ? selection.sequences
                                                : summed(selection.sequences, sequence_count(call));
        case 'b':
            return packed ? first(size) : selection.sequences;
        case 'r': {
            Numbers rows = lengths;
            for (std::int64_t& length : rows) length *= call.delta_options.steps;
            return packed ? within(rows, selection.sequences) : first(size);
        }
        case 't':
        case 's':
            return packed ? within(lengths, selection.sequences) : first(size);
        case 'c':
            return packed ? within(in_chunks(lengths, call.chunk_size), selection.sequences) : first(size);
        case 'i':
        case 'j':
            return packed && size > 1 ? first(longest(lengths, selection.sequences)) : first(size);
        case 'd':
            return packed ? first(longest(in_chunks(lengths, call.chunk_size), selection.sequences)) : first(size);
        case 'h': {
            const std::int64_t groups = group_count(call);
            if (size % groups != 0) return summed(selection.groups, groups);
            Numbers heads;
            const std::int64_t value_heads = call.is_attention ? 0 : call.delta.v.shape(2);
            if (value_heads > groups && size % value_heads == 0 && call.delta_options.head_order == HeadOrder::tiled) {
                const std::int64_t width = size / value_heads;  // channels of a head
                for (std::int64_t first = 0; first < value_heads; first += groups)
                    for (const std::int64_t g : selection.groups)
                        for (std::int64_t i = 0; i < width; ++i) heads.push_back((first + g) * width + i);
                return heads;
            }
            for (const std::int64_t g : selection.groups)
                for (std::int64_t h = g * (size / groups); h < (g + 1) * (size / groups); ++h) heads.push_back(h);
            return heads;
        }
        default:
            return first(size);
    }
}

io::OwnedTensor gather(const Tensor& from, const TensorPart& part) {
    Numbers shape;
    for (const Numbers& chosen : part.indices) shape.push_back(static_cast<std::int64_t>(chosen.size()));
    io::OwnedTensor to(from.dtype(), shape);
    if (to.count() == 0) return to;
    const std::size_t element = to.bytes() / static_cast<std::size_t>(to.count());
    auto* target = static_cast<std::byte*>(to.data());
    part.for_each_run(from.shape(), [&](std::int64_t at, std::int64_t n) {
        const std::size_t bytes = static_cast<std::size_t>(n) * element;
        std::memcpy(target, static_cast<const std::byte*>(from.data()) + static_cast<std::size_t>(at) * element, bytes);
        target += bytes;
    });
    return to;
}

// Per-head parameters and their gradients have any shape in a file.
Tensor flattened(const std::string& name, const Tensor& t) {
    return io::is_gate_parameter(name.substr(1)) ? Tensor(t.data(), t.dtype(), {t.count()}) : t;
}

}  // namespace

std::int64_t sequence_count(const io::Call& call) {
    const io::Bounds& bounds = bounds_of(call, false);
    return bounds.empty() ? (call.is_attention ? call.attention.q : call.delta.q).shape(0)
                          : static_cast<std::int64_t>(bounds.size()) - 1;
}

std::int64_t group_count(const io::Call& call) {
    return (call.is_attention ? call.attention.k : call.delta.q).shape(2);
}

Selection select_all(const io::Call& call) {
    return {first(sequence_count(call)), first(group_count(call))};
}

TensorPart part_of(const io::Call& call, const Selection& selection, const std::string& name, const Tensor& tensor) {
    const std::string layout = layout_of(call, name);
    TensorPart part;
    for (std::size_t i = 0; i < tensor.rank(); ++i) {
        const char dimension = i < layout.size() ? layout[i] : '.';
        part.indices.push_back(choose(call, selection, dimension, tensor.shape(i), part.partial));
        if (dimension == 'n' || dimension == 'b') part.sequences = part.indices.back();
        if (dimension == 'h') part.heads = part.indices.back();
    }
    if (layout == "h" && static_cast<std::int64_t>(selection.sequences.size()) < sequence_count(call))
        part.partial = true;
    return part;
}

TensorPart part_of_result(const io::Call& call, const Selection& selection, const std::string& name,
                          const Tensor& result) {
    return part_of(call, selection, name, flattened(name, result));
}

Tensor Sample::take(const std::string& name, const Tensor& tensor) {
    memory_.push_back(gather(tensor, part_of(whole_, selection_, name, tensor)));
    return memory_.back().view();
}

void Sample::take_bounds(io::Bounds& bounds, Tensor& cumulative) {
    if (!cumulative) return;
    const Numbers lengths = lengths_of(bounds);
    bounds = {0};
    for (const std::int64_t n : selection_.sequences)
        bounds.push_back(bounds.back() + lengths[static_cast<std::size_t>(n)]);
    memory_.emplace_back(DType::i64, Numbers{static_cast<std::int64_t>(bounds.size())});
    std::ranges::copy(bounds, static_cast<std::int64_t*>(memory_.back().data()));
    cumulative = memory_.back().view();
}

Sample::Sample(const io::Call& whole, const std::map<std::string, Tensor>& all_results,
               const std::map<std::string, Tensor>& all_intermediates, const Selection& selection)
    : call(whole), whole_(whole), selection_(selection) {
    const auto take_inputs = [&]<class Inputs>(Inputs& inputs) {
        for (const auto& field : fields_of<Inputs>) {
            Tensor& t = inputs.*field.tensor;
            const std::string name(field.name);
            if (t && !name.starts_with("cu_seqlens")) t = take(name, t);
        }
    };
    whole.is_attention ? take_inputs(call.attention) : take_inputs(call.delta);
    take_bounds(call.packing.tokens, call.delta.cu_seqlens);
    call.packing.steps.clear();
    for (const std::int64_t token : call.packing.tokens) call.packing.steps.push_back(token * call.delta_options.steps);
    take_bounds(call.packing.queries, call.attention.cu_seqlens_q);
    take_bounds(call.packing.keys, call.attention.cu_seqlens_k);
    if (call.d_o) call.d_o = take("do", call.d_o);
    if (call.dlse) call.dlse = take("dlse", call.dlse);
    if (call.dfinal_state) call.dfinal_state = take("dfinal_state", call.dfinal_state);
    call.parameter_shapes.clear();

    for (const auto& [name, tensor] : all_results)
        if (part_of_result(whole, selection, name, tensor).partial)
            left_out.push_back(name);
        else
            results[name] = take(name, flattened(name, tensor));
    for (const auto& [name, tensor] : all_intermediates)
        if (!part_of(whole, selection, name, tensor).partial) intermediates[name] = take(name, tensor);
}

}  // namespace softdelta::diagnose
