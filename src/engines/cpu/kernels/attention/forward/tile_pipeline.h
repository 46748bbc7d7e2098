// Products of matrix tiles between other work. The tile unit takes 16 cycles for a product, and no vector instruction
// waits for it as long as few products stand between them. So a panel of 32 rows and 32 keys goes through three stages,
// of which each works on another panel at a time:
//
//     scores of panel t + 1   | one product after the other, between
//     exponentials of panel t | the steps of the caller
//     sums of an older panel  |
//
// Tiles 0 to 3 hold 32 × 32 sums of o, 4 and 5 scores of 32 rows and 16 keys, 6 what is read of A and 7 of B.
#pragma once

#include <utility>

#include "engines/cpu/kernels/gemm/tile_microkernel.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// K, U: how many 16 pairs a row of queries has, and how many 32 columns o has.
template <class Tiles, int K, int U>
class TilePipeline {
  public:
    static constexpr Index panel_words = tile_size * NR;  // of probabilities: [32 rows, 16 pairs]
    static constexpr int steps = 16;

    TilePipeline(const std::uint32_t* q, Index q_row, float* o, Index o_row)
        : q_(q), q_row_(q_row), o_(o), o_row_(o_row) {}

    // scores = q·keys of one panel, and as many products of the sums as a panel has. step(i), i < 16, is called
    // between.
    template <class Step>
    SOFTDELTA_INLINE void panel(const std::uint32_t* keys, float* scores, Step&& step) {
        keys_ = keys;
        scores_ = scores;
        each(std::make_integer_sequence<int, steps>{}, step);
        write_scores(tile_size);
    }

    // What panel() sums from now on: the products of `panels` panels of probabilities with values, whose micropanels
    // lie value_panel words apart. Those before are done.
    void sum(const std::uint32_t* probabilities, const std::uint32_t* values, Index value_panel, Index panels) {
        p_ = probabilities;
        v_ = values;
        value_panel_ = value_panel;
        panels_ = panels;
        left_ = U * panels;
        k_ = n_ = 0;
    }

    // What is left of the sums.
    void finish() {
        while (left_ > 0) sum_products(std::make_integer_sequence<int, 4>{});
        write_sums();
    }

    // Sums as they are until now, in memory.
    void write_sums() {
        if (written_ == nullptr) return;
        float* lower = written_ + tile_size * o_row_;
        Tiles::template write<0>(written_, o_row_);
        Tiles::template write<1>(written_ + W, o_row_);
        Tiles::template write<2>(lower, o_row_);
        Tiles::template write<3>(lower + W, o_row_);
        written_ = nullptr;
    }

  private:
    // Products of a panel in their order: scores of 16 keys, half the sums, scores of 16 keys, the other sums.
    static constexpr int score_products = 2 * K, early_sums = U / 2 * 4, products = 4 * K + 4 * U;

    template <int... i, class Step>
    SOFTDELTA_INLINE void each(std::integer_sequence<int, i...> /*steps*/, Step& step) {
        (one_step<i>(step), ...);
    }
    template <int i, class Step>
    SOFTDELTA_INLINE void one_step(Step& step) {
        step(Index{i});
        constexpr int begin = products * i / steps, end = products * (i + 1) / steps;
        some<begin>(std::make_integer_sequence<int, end - begin>{});
    }
    template <int begin, int... i>
    SOFTDELTA_INLINE void some(std::integer_sequence<int, i...> /*products*/) {
        (product<begin + i>(), ...);
    }
    template <int... i>
    SOFTDELTA_INLINE void sum_products(std::integer_sequence<int, i...> /*products*/) {
        (sum_product<i>(), ...);
    }

    template <int w>
    SOFTDELTA_INLINE void product() {
        if constexpr (w < score_products)
            score_product<0, w>();
        else if constexpr (w < score_products + early_sums)
            sum_product<(w - score_products) % 4>();
        else if constexpr (w < 2 * score_products + early_sums)
            score_product<1, w - score_products - early_sums>();
        else
            sum_product<(w - 2 * score_products) % 4>();
    }

    template <int half, int w>
    SOFTDELTA_INLINE void score_product() {
        constexpr Index k = w / 2 * tile_size;
        if constexpr (w == 0) {
            if constexpr (half == 1) write_scores(0);
            Tiles::template clear<4>();
            Tiles::template clear<5>();
        }
        if constexpr (w % 2 == 0) {
            Tiles::template read<7>(keys_ + k * NR + half * W, NR);
            Tiles::template read<6>(q_ + k, q_row_);
            Tiles::template multiply_add<4, 6, 7>();
        } else {
            Tiles::template read<6>(q_ + tile_size * q_row_ + k, q_row_);
            Tiles::template multiply_add<5, 6, 7>();
        }
    }
    SOFTDELTA_INLINE void write_scores(Index column) {
        Tiles::template write<4>(scores_ + column, NR);
        Tiles::template write<5>(scores_ + tile_size * NR + column, NR);
    }

    // One of the four products of a panel of probabilities with 32 columns of the values.
    template <int w>
    SOFTDELTA_INLINE void sum_product() {
        if (left_ == 0) return;
        const std::uint32_t *p = p_ + k_ * panel_words, *v = v_ + n_ * value_panel_ + k_ * tile_size * NR;
        if constexpr (w == 0) {
            if (k_ == 0) read_sums();
            Tiles::template read<6>(p, tile_size);
            Tiles::template read<7>(v, NR);
            Tiles::template multiply_add<0, 6, 7>();
        } else if constexpr (w == 1) {
            Tiles::template read<7>(v + W, NR);
            Tiles::template multiply_add<1, 6, 7>();
        } else if constexpr (w == 2) {
            Tiles::template read<6>(p + tile_size * tile_size, tile_size);
            Tiles::template multiply_add<3, 6, 7>();
        } else {
            Tiles::template read<7>(v, NR);
            Tiles::template multiply_add<2, 6, 7>();
            --left_;
            if (++k_ == panels_) {
                k_ = 0;
                ++n_;
            }
        }
    }
    void read_sums() {
        write_sums();
        written_ = o_ + n_ * NR;
        float* lower = written_ + tile_size * o_row_;
        Tiles::template read<0>(written_, o_row_);
        Tiles::template read<1>(written_ + W, o_row_);
        Tiles::template read<2>(lower, o_row_);
        Tiles::template read<3>(lower + W, o_row_);
    }

    const std::uint32_t* q_;
    Index q_row_;
    float* o_;
    Index o_row_;
    const std::uint32_t *keys_ = nullptr, *p_ = nullptr, *v_ = nullptr;
    float *scores_ = nullptr, *written_ = nullptr;  // written_: where tiles 0 to 3 belong
    Index value_panel_ = 0, panels_ = 0, left_ = 0, k_ = 0, n_ = 0;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
