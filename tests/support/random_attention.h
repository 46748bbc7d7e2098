// Attention calls drawn at random: shapes, options, broadcasts, layouts and numbers, all from one seed. A failing test
// prints the seed; SOFTDELTA_SEED=<seed> draws that call first.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "softdelta/softdelta.hpp"

namespace softdelta::test {

using Index = std::int64_t;
using Random = std::mt19937_64;
using Shape = std::vector<Index>;

// From SOFTDELTA_SEED, else `otherwise`.
std::uint64_t first_seed(std::uint64_t otherwise = 1);

// A tensor with its own memory; elements are counted row-major whatever the strides. A moved array keeps its memory.
class Array {
  public:
    Array() = default;
    Array(DType dtype, const Shape& shape) : Array(dtype, shape, nullptr) {}
    // Dimensions in any order in memory, either direction, with gaps.
    Array(DType dtype, const Shape& shape, Random& layout) : Array(dtype, shape, &layout) {}
    Array(Array&&) = default;
    Array& operator=(Array&&) = default;

    const Tensor& view() const { return view_; }
    Index count() const { return view_ ? view_.count() : 0; }
    double get(Index element) const;
    void set(Index element, double value) const;
    double get(const Shape& index) const;
    void set(const Shape& index, double value) const;
    std::vector<double> values() const;

  private:
    Array(DType dtype, const Shape& shape, Random* layout);
    std::vector<std::uint64_t> memory_;
    Tensor view_;
};

// Fills with standard normal numbers.
void fill_normal(const Array& array, Random& random);

struct AttentionRanges {
    Index batch = 2, queries = 6, keys = 8, key_heads = 2, group = 3, channels = 5;  // largest sizes drawn
    Index shortest = 0;                                                              // queries, keys
};

struct RandomAttention {
    std::uint64_t seed = 0;
    Array q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens;
    Array d_o, dlse;      // gradients of the results
    bool v_in_k = false;  // v is the first Dv channels of k
    AttentionInputs inputs;
    AttentionOptions options;
    std::vector<std::string> features;  // what the draw has, as "bias heads Hk"

    Shape o_shape() const;
    Shape lse_shape() const;
    std::string describe() const;
};

RandomAttention draw_attention(std::uint64_t seed, const AttentionRanges& ranges = {});

}  // namespace softdelta::test
