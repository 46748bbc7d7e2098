// The gradients of chunks that go token by token, in f64: a block takes a chunk and key head, and goes the walks of
// walk_back.h over its tokens, from the states that were saved before and after it. Rare, and slow.
#include "engines/cuda/delta_rule/saved.h"
#include "engines/cuda/delta_rule/tokens/unfold.h"
#include "engines/cuda/delta_rule/tokens/walk_back.h"

namespace softdelta::cuda {

namespace {

using S = WalkShape<128, 16>;  // all value columns: saved chunks have at most 128
static_assert(S::slab == 128);

struct Shared {
    WalkMemory<S> walk;
    int found[S::threads];
};

// [V, K] in memory, filled up to `size`.
template <class T>
struct StateOfTile {
    const char* from;
    int size;

    __device__ double operator()(int m, int j) const {
        const auto at = size == 64 ? Tile<T, 64>{0}.unit(j, m / 8) : Tile<T, 128>{0}.unit(j, m / 8);
        return static_cast<double>(to_float(reinterpret_cast<const T*>(from + at)[m % 8]));
    }
};

template <class T>
class ChunkUnfold {
  public:
    __device__ explicit ChunkUnfold(const ChunkGradients& of)
        : call_(of.call), sequences_(of.sequences), grad_(of.grad), saved_(of.saved) {
        constexpr Index rows = chunk_rows * S::K;
        double* const scratch = saved_.scratch + Index(blockIdx.x) * token_scratch;
        memory_.rows = chunk_rows;
        memory_.slots = memory_.heads = memory_.slabs = 1;
        memory_.channels = call_.gate == core::Gate::channel ? call_.key_size : 1;
        memory_.erased = scratch, memory_.dwritten = scratch + rows;
        memory_.dq = reinterpret_cast<float*>(scratch + 2 * rows);
        memory_.dk = memory_.dq + rows, memory_.dp = memory_.dk + rows;
        if (call_.gate == core::Gate::none || (!grad_.dg && !saved_.shares)) return;
        memory_.ends = scratch + 4 * rows - S::K;
        memory_.written = scratch + 4 * rows, memory_.erase = scratch + 5 * rows, memory_.dstates = scratch + 6 * rows;
        static_assert(token_scratch >= 6 * rows + S::K * S::slab);
    }

    // Every thread looks at a chunk; the block takes those found, one after the other.
    __device__ void run() {
        const int key_heads = call_.key_heads();
        const Index all = sequences_.all_chunks() * key_heads;
        for (Index first = Index(blockIdx.x) * S::threads; first < all; first += Index(token_blocks) * S::threads) {
            const bool found = first + thread_ < all && is_by_token(first + thread_, key_heads);
            m_.found[thread_] = found;
            if (!ptx::any(1, S::threads, found)) continue;
            for (int i = 0; i < S::threads; ++i) {
                if (m_.found[i] == 0) continue;
                find(first + i, key_heads);
                take_chunk();
            }
            __syncthreads();
        }
    }

  private:
    __device__ void find(Index i, int key_heads) {
        const ChunkPosition at = sequences_.number(static_cast<unsigned>(i / key_heads));
        h_ = static_cast<int>(i % key_heads);
        chunk_ = {{at.s.batch, at.s.begin + at.c * chunk_rows, at.rows(), 0}, 0, 0};
        slot_ = at.s.first_slot + at.c;
    }
    __device__ bool is_by_token(Index i, int key_heads) {
        find(i, key_heads);
        for (int v = 0; v < call_.group && chunk_.count > 0; ++v)
            if (saved_.goes_by_token(slot_, call_.value_head(h_, v))) return true;
        return false;
    }

    __device__ void take_chunk() const {
        const TokenUnfold unfold{call_, grad_, memory_};
        const int warp = thread_ / 32, rows = static_cast<int>(chunk_.count);
        for (int i = 0; i < call_.group; ++i) {
            const int hv = call_.value_head(h_, i);
            walk(hv, i > 0);
            for (int t = warp; t < rows; t += S::warps) unfold.values(chunk_, t, hv, t);
            if (memory_.ends && thread_ < memory_.channels) {
                const Index share = ((saved_.first_slot + slot_) * saved_.heads + hv) * memory_.channels + thread_;
                unfold.gates(chunk_, 0, hv, thread_, {}, saved_.shares ? saved_.shares + share : nullptr,
                             saved_.all_slots * saved_.heads * memory_.channels);
            }
            __syncthreads();
        }
        for (int u = warp; u < 3 * rows; u += S::warps)
            unfold.keys(u % 3, chunk_, u / 3, h_, 1, [&](int) { return u / 3; });
        __syncthreads();
    }
    __device__ void walk(int hv, bool adds) const {
        const Walk<S> my(call_, chunk_, hv, 0, {});
        const StateOfTile<T> before{saved_.state(slot_, hv), saved_.size}, after{saved_.dstate(slot_, hv), saved_.size};
        const WalkOutputs erased{{}, {}, {}, memory_.erased};
        const BackwardWalk<S> back{my, grad_.d_o, memory_, adds};
        typename S::State state;
        my.load_state(before, state);
        ForwardWalk<S>{my, erased, 1}.run(state);
        my.load_state(after, state);
        back.run_back(state);
        my.load_state(before, state);
        back.run_again(state);
    }

    const DeltaCall& call_;
    const ChunkSequences& sequences_;
    const GradientViews& grad_;
    const SavedChunks& saved_;
    GradientMemory memory_;  // of a chunk and value head
    Shared& m_ = *reinterpret_cast<Shared*>(ptx::shared_memory());
    const int thread_ = static_cast<int>(threadIdx.x);
    DeltaSequence chunk_{};
    Index slot_ = 0;
    int h_ = 0;
};

template <class T>
__global__ void __launch_bounds__(S::threads) unfold_by_token_kernel(const __grid_constant__ ChunkGradients of) {
    ChunkUnfold<T>(of).run();
}

}  // namespace

void launch_unfold_by_token(const ChunkGradients& of, cudaStream_t stream) {
    launch(unfold_by_token_kernel<SavedElement>, {token_blocks, S::threads, static_cast<int>(sizeof(Shared))}, stream,
           "gradients token by token", of);
}

}  // namespace softdelta::cuda
