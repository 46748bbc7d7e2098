// A folded chunk over a range of value columns: values in, the scan, o out.
#pragma once

#include <type_traits>

#include "engines/cpu/kernels/delta_rule/chunk/prepare.h"
#include "engines/cpu/kernels/delta_rule/chunk/states.h"
#include "engines/cpu/kernels/delta_rule/forward/scan.h"
#include "engines/cpu/kernels/delta_rule/forward/tiles.h"
#include "engines/cpu/kernels/delta_rule/forward/tokens.h"
#include "engines/cpu/kernels/delta_rule/forward/walk.h"

namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE {

// Fewer rows cost less in pairs. Of bf16 they cost digits: every chunk multiplies with a rounded copy of the state.
template <class P>
constexpr Index most_forward_rows = P::depth == 1 ? 32 : largest_chunk;

template <class P>
ChunkSizes<P> forward_sizes(const DeltaHeads& heads) {
    return {heads.key_size, heads.value_size, min(heads.tokens, most_forward_rows<P>)};
}

template <class P>
class ForwardChunk {
  public:
    ForwardChunk(const DeltaHeads& heads, const ChunkSizes<P>& sizes, Scratch& scratch)
        : heads_(heads),
          columns_(sizes.value_columns()),
          o_(scratch.take<float>(sizes.rows * columns_)),
          u_(scratch.take<float>(sizes.rows * columns_)),
          buffer_(scratch.take<float>(columns_)),
          tokens_(heads, sizes, scratch),
          walk_(heads, sizes, scratch),
          tiles_(heads, columns_, scratch) {}

    Range all_columns() const { return {0, columns_}; }
    float* buffer() const { return buffer_; }  // [V], free between chunks

    // part: value columns from a multiple of NR on. writes: as in scan.h.
    void run(const Tokens& at, const Folded<P>& folded, const float* beta, Range part, const StatePanels<P>& state,
             const DeltaOutput& out, Prefetch& ahead, bool writes = true) {
        load_values_of(at, beta, part, state);
        if (fits_tiles(out.o)) {
            const Row first = row_from(out.o, at.head, at.begin, 0);
            scan(heads_.erases(), folded, heads_.key_size, part, state,
                 static_cast<float*>(const_cast<void*>(first.data)), out.o.row, ahead, writes);
        } else {
            scan(heads_.erases(), folded, heads_.key_size, part, state, o_, columns_, ahead, writes);
            store_rows(o_, out.o, at, part);
        }
        store_written(at, part, state, out.u);
    }

    // The same by matrix tiles. is_rounded: the chunk before, too, and wrote.
    void run_tiles(const Tokens& at, const TileChunk& x, Range part, const StatePanels<P>& state,
                   const DeltaOutput& out, Prefetch& ahead, bool writes, bool is_rounded) {
        const bool direct = is_direct(out.o), past_caches = passes_caches(out.o) && part.begin % NR == 0;
        const auto run_direct = [&](auto in_steps) {  // known when compiled: rules of one step do not ask for each row
            const Row first = row_at(out.o, at.head, in_steps ? 0 : at.begin, 1);
            auto* o = static_cast<std::uint16_t*>(const_cast<void*>(first.data));
            tiles_.run(
                at, x, part, state,
                [&](Index i, Index c, Index width, const auto& sums) {
                    if (in_steps && !out.o.has(at.begin + i)) return;
                    const Index row = in_steps ? (at.begin + i) / out.o.steps : i;
                    auto* to = reinterpret_cast<std::uint32_t*>(o + row * out.o.row + c);
                    if constexpr (P::Tiles::exist)
                        if (width == NR && past_caches) return P::Tiles::store_past_caches(to, sums(0), sums(W));
                    if (width == NR)  // at once, for a line is read first where only a part of it is written
                        store_bf16(to, sums(0), sums(W));
                    else
                        store_bf16(to, sums(0));
                },
                ahead, writes, is_rounded);
        };
        if (direct && out.o.steps == 1)
            run_direct(std::false_type{});
        else if (direct)
            run_direct(std::true_type{});
        else
            tiles_.run(
                at, x, part, state,
                [&](Index i, Index c, Index width, const auto& sums) {
                    for (Index m = 0; m < width; m += W) store(o_ + i * columns_ + c + m, sums(m));
                },
                ahead, writes, is_rounded);
        if (!direct) store_rows(o_, out.o, at, part);
        store_written(at, part, state, out.u);
    }

    // A walked chunk: its first `steady` tokens by the walk, the others as in run_tokens().
    void run_walk(const Tokens& at, Index steady, const Preparation<P>& prepared, Range part,
                  const StatePanels<P>& state, const DeltaOutput& out, Prefetch& ahead) {
        const Tokens walked{at.head, at.begin, steady};
        if (steady > 0) {
            load_values_of(walked, prepared.beta(0), part, state);
            walk_.prepare(walked, prepared.keys(), prepared.gates());
            walk_.run(walked, prepared.keys(), part, state, out.o.data == nullptr ? nullptr : o_, columns_, ahead);
            store_rows(o_, out.o, walked, part);
            store_written(walked, part, state, out.u);
        }
        if (steady < at.n)
            run_tokens({at.head, at.begin + steady, at.n - steady}, 0, prepared, part, state, out, steady);
    }

    // The same, token by token; the first ones have their results from the chunk form. loaded: the first one's place
    // among those that are prepared.
    void run_tokens(const Tokens& at, Index first, const Preparation<P>& prepared, Range part,
                    const StatePanels<P>& state, const DeltaOutput& out, Index loaded = 0) {
        const KeyChunk<P> keys = prepared.keys().from(loaded);
        tokens_.load_gates(at.n, prepared.gates().from(loaded, heads_.has_channel_gate()));
        for (Index c = part.begin; c < part.end; c += W) {
            load_columns(state, c, heads_.key_size, tokens_.state());
            tokens_.advance(at, c, keys, prepared.beta(loaded), o_, out.u.data == nullptr ? nullptr : u_, columns_);
            store_columns(tokens_.state(), c, heads_.key_size, state);
        }
        store_rows(o_, out.o, at, part, first);
        store_rows(u_, out.u, at, part, first);
    }

    // Whether tiles store rows of o to memory at once, which saves reading their lines: rows that lie apart, in a long
    // sequence, where they leave the caches before anybody reads them.
    bool passes_caches(const DeltaRows& o) const {
        const auto place = reinterpret_cast<std::uintptr_t>(o.data);
        const auto rows = static_cast<std::uintptr_t>((o.head | o.row) * static_cast<Index>(sizeof(core::bf16)));
        return is_direct(o) && heads_.tokens >= long_sequence && o.row > heads_.value_size &&
               (place | rows) % cache_line == 0;
    }

  private:
    static constexpr Index long_sequence = 512;

    bool is_direct(const DeltaRows& o) const {
        return o.dtype == DType::bf16 && o.column == 1 && columns_ == heads_.value_size;
    }

    // Whether register tiles are stored to the caller's rows at once. Rows whose distance is a multiple of 4 KiB share
    // one set of the L1 cache, and evict each other while tiles are stored. In a short sequence they are still in L2.
    bool fits_tiles(const DeltaRows& o) const {
        constexpr Index place = 4096 / static_cast<Index>(sizeof(float));
        return o.data != nullptr && o.steps == 1 && o.dtype == DType::f32 && o.column == 1 &&
               columns_ == heads_.value_size && (o.row % place != 0 || heads_.tokens < long_sequence);
    }

    void load_values_of(const Tokens& at, const float* beta, Range part, const StatePanels<P>& state) const {
        const Index width = min(part.end, heads_.value_size) - part.begin;
        const auto v = [&](Index i) { return row_from(heads_.v, at.head, at.begin + i, part.begin); };
        load_values(at.n, width, v, beta, buffer_, part, state);
    }

    // U, from the panels.
    void store_written(const Tokens& at, Range part, const StatePanels<P>& state, const DeltaRows& u) const {
        if (u.data == nullptr) return;
        const auto copy = [&](auto* to, Index row, Index begin) {
            for (Index c = part.begin; c < part.end; c += NR) {
                const auto panel = state.panel(c);
                for (Index i = 0; i < at.n; ++i)
                    for (Index m = 0; m < panel.width; m += W)
                        store(to + i * row + c - begin + m, operand_row(panel.operand_rows, panel.width, i, m));
            }
        };
        void* first = const_cast<void*>(row_from(u, at.head, at.begin, part.begin).data);
        const bool direct = u.column == 1 && columns_ == heads_.value_size;
        if (direct && u.dtype == DType::f32) return copy(static_cast<float*>(first), u.row, part.begin);
        if (direct && u.dtype == DType::bf16) return copy(static_cast<core::bf16*>(first), u.row, part.begin);
        copy(u_, columns_, 0);
        store_rows(u_, u, at, part);
    }

    void store_rows(const float* x, const DeltaRows& t, const Tokens& at, Range part, Index first = 0) const {
        const Index width = min(part.end, heads_.value_size) - part.begin;
        for (Index i = first; t.data != nullptr && i < at.n; ++i) {
            if (!t.has(at.begin + i)) continue;
            const Row to = row_from(t, at.head, at.begin + i, part.begin);
            store_row(x + i * columns_ + part.begin, width, const_cast<void*>(to.data), to.dtype, to.step);
        }
    }

    const DeltaHeads& heads_;
    Index columns_;
    float *o_, *u_;  // [n, V]
    float* buffer_;  // [V]
    TokenForm<P> tokens_;
    Walk<P> walk_;
    TileScan<P> tiles_;
};

}  // namespace softdelta::kernels::SOFTDELTA_ISA_NAMESPACE
