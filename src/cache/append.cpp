#include "cache/append.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "core/rows.h"

namespace softdelta::cache {

namespace {

using core::DType;
using core::Index;
using core::Tensor;

constexpr Index tokens_of_unit = 16;

// The largest number of a type of 8 or 4 bits, which the largest of a row becomes.
float largest(DType type) {
    return type == DType::i8 ? 127.0F : type == DType::u8 ? -8.0F : 448.0F;
}

// x as a number of that type, in the range that it has; NaN is a NaN of f8, else 0.
int quantise(DType type, float x) {
    if (type == DType::f8) return core::to_f8(static_cast<double>(x != x ? x : std::clamp(x, -448.0F, 448.0F))).bits;
    const float least = type == DType::i8 ? -127.0F : -8.0F, most = type == DType::i8 ? 127.0F : 7.0F;
    return x != x ? 0 : static_cast<int>(std::nearbyint(std::clamp(x, least, most)));
}

// Rows of one of k and v.
class Rows {
  public:
    Rows(const Tensor& from, const Tensor& cache, const Tensor& scale, bool own_scales)
        : from_(from),
          cache_(cache),
          scale_(scale),
          own_scales_(own_scales),
          x_(static_cast<std::size_t>(from.shape[3])) {}

    void append(Index batch, Index token, Index h, Index entry, Index row) {
        const Index D = from_.shape[3];
        core::load_row(from_, from_.offset({batch, token, h, 0}), 3, D, x_.data());
        const Index to = place(cache_, entry, row, h);
        if (!core::is_quantised(cache_.dtype)) return core::write_row(cache_, to, 3, D, x_.data());
        const Index scales = place(scale_, entry, row, h), block = cache_.block > 0 ? cache_.block : D;
        for (Index b = 0; b * block < D; ++b) {
            float* x = x_.data() + b * block;
            const Index at = scales + b * scale_.stride[3];
            if (own_scales_) core::store(scale_, at, scale_of(x, block));
            const auto scale = static_cast<float>(core::load(scale_, at));
            const float inverse = scale != 0 ? 1 / scale : 0.0F;
            for (Index c = 0; c < block; ++c) x[c] *= inverse;
            store_block(to + b * cache_.block_stride, x, block);
        }
    }

  private:
    // Where one scale serves all rows or heads its stride is 0.
    static Index place(const Tensor& t, Index entry, Index row, Index h) {
        return entry * t.stride[0] + row * t.stride[1] + h * t.stride[2];
    }

    // NaN where a number is not finite: the row is lost, and says so.
    double scale_of(const float* x, Index count) const {
        float most = 0, size = 0;
        bool finite = true;
        for (Index c = 0; c < count; ++c) {
            finite = finite && std::isfinite(x[c]);
            if (std::abs(x[c]) > size) most = x[c], size = std::abs(x[c]);
        }
        if (!finite) return std::numeric_limits<double>::quiet_NaN();
        return static_cast<double>(cache_.dtype == DType::u8 ? most : size) /
               static_cast<double>(largest(cache_.dtype));
    }

    void store_block(Index at, const float* x, Index count) const {
        auto* bytes = static_cast<std::uint8_t*>(cache_.data) + at;
        if (cache_.dtype == DType::u8) {
            for (Index c = 0; c < core::bytes_of_halves; ++c) {
                const int low = quantise(DType::u8, x[c]) + 8,
                          high = quantise(DType::u8, x[c + core::bytes_of_halves]) + 8;
                bytes[c * cache_.stride[3]] = static_cast<std::uint8_t>(low | high << 4);
            }
            return;
        }
        for (Index c = 0; c < count; ++c)
            bytes[c * cache_.stride[3]] = static_cast<std::uint8_t>(quantise(cache_.dtype, x[c]));
    }

    const Tensor &from_, &cache_, &scale_;
    bool own_scales_;
    std::vector<float> x_;
};

}  // namespace

void append(const core::CacheAppendInputs& in, const OwnScales& own, int threads, const core::CacheAppendOutputs& out) {
    const Index sequences = core::sequence_count(in), rows = out.k_cache.shape[1];
    std::vector<Index> ends;  // units of each sequence
    for (Index n = 0, end = 0; n < sequences; ++n)
        ends.push_back(end += (core::new_tokens(in, n).count + tokens_of_unit - 1) / tokens_of_unit);
    core::Work work;
    work.bytes = 2 * static_cast<double>(in.k.count() + in.v.count()) * static_cast<double>(core::size_of(in.k.dtype));
    core::parallel_units(core::useful_threads(threads, work), ends.empty() ? 0 : ends.back(), [&] {
        return [&, k = Rows(in.k, out.k_cache, out.k_scale, own.k),
                v = Rows(in.v, out.v_cache, out.v_scale, own.v)](Index unit) mutable {
            const auto place = std::upper_bound(ends.begin(), ends.end(), unit);
            const Index n = place - ends.begin(), first = (unit - (n > 0 ? *(place - 1) : 0)) * tokens_of_unit;
            const core::NewTokens s = core::new_tokens(in, n);
            for (Index i = first; i < std::min(first + tokens_of_unit, s.count); ++i) {
                const Index key = s.first + i;
                const Index entry =
                    in.block_table ? core::load_index(in.block_table, in.block_table.offset({n, key / rows})) : n;
                const Index row = in.block_table ? key % rows : key;
                for (Index h = 0; h < in.k.shape[2]; ++h) {
                    k.append(s.batch, s.begin + i, h, entry, row);
                    v.append(s.batch, s.begin + i, h, entry, row);
                }
            }
        };
    });
}

}  // namespace softdelta::cache
