#include "judge/blocks.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/tensor.h"

namespace softdelta::judge {

namespace {

constexpr std::int64_t block_rows = 64;

std::int64_t entry(const Tensor& t, std::int64_t i) {
    return t.dtype() == DType::i32 ? static_cast<const std::int32_t*>(t.data())[i * t.stride()[0]]
                                   : static_cast<const std::int64_t*>(t.data())[i * t.stride()[0]];
}

void append_ranges(std::vector<RowRange>& ranges, std::int64_t begin, std::int64_t end, std::int64_t sequence) {
    for (std::int64_t row = begin; row < end; row += block_rows)
        ranges.push_back({row, std::min(row + block_rows, end), sequence});
}

// Rows of the whole tensor, or of each packed sequence.
std::vector<RowRange> row_ranges(std::int64_t rows, const Tensor& cumulative) {
    std::vector<RowRange> ranges;
    if (!cumulative) append_ranges(ranges, 0, rows, -1);
    for (std::int64_t n = 0; cumulative && n + 1 < cumulative.shape(0); ++n)
        append_ranges(ranges, entry(cumulative, n), entry(cumulative, n + 1), n);
    return ranges;
}

// The dimensions' names; the row dimension, what comes after `features` dimensions is summed within a row.
struct Layout {
    std::vector<std::string> names;
    std::size_t row;
    std::size_t features;
    Tensor cumulative;
};

Layout layout_of(const io::Call& call, const std::string& result, const std::vector<std::int64_t>& shape) {
    if (call.is_attention) {
        const AttentionInputs& in = call.attention;
        if (result == "lse") return {{"batch", "head", "queries"}, 2, 0, in.cu_seqlens_q};
        if (result == "dk" || result == "dv") return {{"batch", "keys", "head", ""}, 1, 1, in.cu_seqlens_k};
        if (result == "dsink") return {{"heads"}, 0, 0, {}};
        if (result == "dbias" && shape[2] == 1) return {{"batch", "head", "query", "keys"}, 3, 0, {}};
        if (result == "dbias") return {{"batch", "head", "queries", ""}, 2, 1, {}};
        return {{"batch", "queries", "head", ""}, 1, 1, in.cu_seqlens_q};
    }
    if (result == "final_state" || result == "dinitial_state") return {{"sequence", "head", "rows", ""}, 2, 1, {}};
    if (is_parameter_gradient(result)) return {{"elements"}, 0, 0, {}};
    const bool channels = shape.size() == 4;
    return {{"batch", "tokens", "head", ""}, 1, channels ? 1u : 0u, call.delta.cu_seqlens};
}

}  // namespace

std::int64_t Blocks::elements(std::int64_t block) const {
    const RowRange& r = ranges[static_cast<std::size_t>(block / middle % range_count())];
    return (r.end - r.begin) * features;
}

std::string Blocks::name(std::int64_t block) const {
    const RowRange& r = ranges[static_cast<std::size_t>(block / middle % range_count())];
    std::string text;
    const auto append = [&](const std::vector<std::string>& names, const std::vector<std::int64_t>& sizes,
                            std::int64_t index) {
        std::int64_t stride = 1;
        for (const std::int64_t size : sizes) stride *= size;
        for (std::size_t i = 0; i < names.size(); ++i) {
            stride /= sizes[i];
            if (sizes[i] > 1) text += names[i] + " " + std::to_string(index / stride % sizes[i]) + ", ";
        }
    };
    append(outer_names, outer_sizes, block / middle / range_count());
    append(middle_names, middle_sizes, block % middle);
    if (r.sequence >= 0) text += "sequence " + std::to_string(r.sequence) + ", ";
    return text + row_name + " " + std::to_string(r.begin) + "-" + std::to_string(r.end - 1);
}

bool is_parameter_gradient(const std::string& result) {
    return result == "dA_log" || result == "ddt_bias" || result == "dg_gamma";
}

Blocks blocks_of(const io::Call& call, const std::string& result) {
    std::vector<std::int64_t> shape = io::output_shape(call, result);
    if (is_parameter_gradient(result))  // of any shape, seen as a vector
        shape = {std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>())};
    const Layout layout = layout_of(call, result, shape);
    Blocks blocks;
    for (std::size_t i = 0; i < shape.size(); ++i) {
        if (i < layout.row) {
            blocks.outer *= shape[i];
            blocks.outer_names.push_back(layout.names[i]);
            blocks.outer_sizes.push_back(shape[i]);
        } else if (i == layout.row) {
            blocks.rows = shape[i];
            blocks.row_name = layout.names[i];
        } else if (i + layout.features < shape.size()) {
            blocks.middle *= shape[i];
            blocks.middle_names.push_back(layout.names[i]);
            blocks.middle_sizes.push_back(shape[i]);
        } else {
            blocks.features *= shape[i];
        }
    }
    blocks.ranges = row_ranges(blocks.rows, layout.cumulative);
    return blocks;
}

}  // namespace softdelta::judge
