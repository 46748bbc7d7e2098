// A warpgroup that folds chunk after chunk for the scan (fold_and_scan.cu), while its next keys are copied. keeps: and
// for the backward pass.
#pragma once

#include <algorithm>

#include "engines/cuda/delta_rule/fold/shared_gate.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/scan/warpgroup/stages.h"

namespace softdelta::cuda::chunk_scan {
template <class T, int K, bool keeps>
class Folds {
    using Fold = SharedFold<T, K, true, true>;
    using Record = FoldedChunk<K, false>;
    // The inverse lies where q was.
    static constexpr int key_bytes = KeyTile<T, K>::bytes(C), q = key_bytes,
                         factors = q + std::max(key_bytes, static_cast<int>(sizeof(InverseMemory))),
                         memory = (factors + static_cast<int>(sizeof(ChunkFactors)) + 127) / 128 * 128,
                         warpgroup_bytes = (memory + static_cast<int>(sizeof(SharedFoldMemory)) + 1023) / 1024 * 1024;

  public:
    static constexpr int warpgroups = 5, bytes = warpgroups * warpgroup_bytes;
    static_assert(bytes <= 227 * 1024);

    __device__ explicit Folds(const ChunkForward& of)
        : call_(of.call), sequences_(of.sequences), folded_(of.folded), kept_(of.out.kept), flags_(of.flags) {}

    // What falls to this warpgroup of the warpgroups of so many blocks: chunks in the order of time, as the scan wants
    // them.
    __device__ void run(int block, int blocks) const {
        const int step = blocks * warpgroups;
        Chunk chunk = find(block * warpgroups + warpgroup_of_thread(), step);
        if (exists(chunk)) copy(0, call_.k, chunk);
        while (exists(chunk)) {
            copy(q, call_.q, chunk);
            const auto given = Fold(call_, sequences_[chunk.sequence], chunk.hv, thread_, barrier_).load_given(chunk.c);
            ptx::wait_for_copies();
            ptx::publish_to_products();
            wait();
            fold(chunk, given, step);
            chunk = find(chunk.index + step, step);
        }
    }

  private:
    struct Chunk {
        int index, c;  // of all, of its sequence
        int hv, sequence;
    };
    struct Steps {
        static constexpr bool makes_scores = true;

        const Folds& folds;
        const SharedFoldTiles<T, K>& tiles;
        char* score;
        int next, step;

        __device__ void have_factors() const {
            const KeyProducts<T, K, true> products{folds.call_, folds.thread_ / 32, folds.thread_ % 32};
            float x[C / 8][4] = {};
            products.make_scores(tiles, x);
            folds.wait();  // scores take the place of q
            store_products(tiles.score, 16 * products.warp, products.lane, x);
            folds.keep_rows(tiles.score, score);
        }
        // Nobody reads the keys any more, nor scores.
        __device__ void have_products() const {
            folds.wait();
            const Chunk chunk = folds.find(next, step);
            if (folds.exists(chunk)) folds.copy(0, folds.call_.k, chunk);
        }
        __device__ void have_inverse(const float (&inverse)[C / 8][4]) const {
            folds.wait();
            if constexpr (keeps) store_products(folds.inverse(), folds.thread_ / 32 * 16, folds.thread_ % 32, inverse);
        }
    };

    __device__ static int warpgroup_of_thread() { return static_cast<int>(threadIdx.x) / warpgroup_threads; }
    __device__ void wait() const { ptx::barrier(barrier_, warpgroup_threads); }

    __device__ bool exists(const Chunk& chunk) const { return Index(chunk.c) * C < call_.tokens; }
    // The first from `index` on; sequences may be shorter than their tensor.
    __device__ Chunk find(int index, int step) const {
        const int of_time = call_.heads * sequences_.count;
        for (;; index += step) {
            const int c = index / of_time, rest = index % of_time;
            const Chunk chunk{index, c, rest % call_.heads, rest / call_.heads};
            if (!exists(chunk) || Index(c) * C < sequences_[chunk.sequence].count) return chunk;
        }
    }
    __device__ KeyTile<T, K> tile(int at) const { return {base_ + static_cast<std::uint32_t>(at)}; }
    __device__ SquareTile<T> inverse() const { return {base_ + static_cast<std::uint32_t>(q + Record::square_bytes)}; }
    __device__ void copy(int at, const View& from, const Chunk& chunk) const {
        copy_rows<warpgroup_threads>(tile(at), from, sequences_[chunk.sequence], chunk.c, call_.key_head(chunk.hv), 0,
                                     call_.key_size, thread_);
    }
    __device__ void fold(const Chunk& chunk, const GivenTokens& given, int step) const {
        const DeltaSequence s = sequences_[chunk.sequence];
        char* const at = shared_at(base_);
        // Scores, and then `solve`, leave through memory of the inverse.
        const SquareTile<T> square{base_ + static_cast<std::uint32_t>(q)};
        static_assert(sizeof(InverseMemory) >= Record::square_bytes);
        const SharedFoldTiles<T, K> tiles{tile(q),
                                          tile(0),
                                          tile(0),
                                          square,
                                          square,
                                          reinterpret_cast<ChunkFactors*>(at + factors),
                                          reinterpret_cast<SharedFoldMemory*>(at + memory),
                                          reinterpret_cast<InverseMemory*>(at + q)};
        const Index slot = s.first_slot + chunk.c;
        char* const record = folded_.record(slot, chunk.hv, Record::bytes);
        const Index of_kept = slot * folded_.heads + chunk.hv;
        Fold(call_, s, chunk.hv, thread_, barrier_)
            .run(chunk.c, given, tiles,
                 Steps{*this, tiles, keeps ? kept_.record(of_kept) : record, chunk.index + step, step});
        keep_rows(square, record + Record::solve);
        if (keeps) keep_rows(inverse(), kept_.record(of_kept) + ChunkRecord::inverse);
        copy_out(tiles.factors, record + Record::factors, static_cast<int>(sizeof(ChunkFactors)), thread_,
                 warpgroup_threads);
        if (keeps) keep_factors(kept_, of_kept, *tiles.factors, *tiles.memory, thread_);
        wait();
        // Not by the first warp, which goes on with the gates.
        if (thread_ == 32) ptx::raise_flag(flags_.of(slot, chunk.hv));
    }
    __device__ void keep_rows(const SquareTile<T>& from, char* to) const {
        copy_own_rows(from, to, thread_ / 32, thread_ % 32);
        __syncwarp();
    }

    const DeltaCall& call_;
    const ChunkSequences& sequences_;
    const FoldedChunks& folded_;
    const KeptChunks& kept_;
    const FoldFlags& flags_;
    const std::uint32_t base_ =
        ptx::shared_address(ptx::shared_memory()) + static_cast<std::uint32_t>(warpgroup_of_thread() * warpgroup_bytes);
    const int thread_ = static_cast<int>(threadIdx.x) % warpgroup_threads, barrier_ = 1 + warpgroup_of_thread();
};

}  // namespace softdelta::cuda::chunk_scan
