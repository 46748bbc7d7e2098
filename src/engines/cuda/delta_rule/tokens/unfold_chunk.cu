// The gradients of chunks that go token by token, in f64: a block takes a chunk and key head, and goes the walks of
// walk_back.h over its tokens, from the states that were saved before and after it. Rare, and slow.
#include "engines/cuda/delta_rule/saved.h"
#include "engines/cuda/delta_rule/tokens/unfold.h"
#include "engines/cuda/delta_rule/tokens/walk_back.h"

namespace softdelta::cuda {

namespace {

// All value columns, of which saved chunks have at most 128; where the card has no memory for that, half of them.
template <bool small>
using Shape = WalkShape<128, small ? 8 : 16>;
template <class S>
constexpr int slabs = 128 / S::slab;
static_assert(slabs<Shape<false>> == 1 && slabs<Shape<true>> == most_token_slabs);

template <class S>
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
        constexpr int unit = unit_elements<T>;
        const auto at = size == 64 ? Tile<T, 64>{0}.unit(j, m / unit) : Tile<T, 128>{0}.unit(j, m / unit);
        return static_cast<double>(to_float(reinterpret_cast<const T*>(from + at)[m % unit]));
    }
};

template <class T, class S>
class ChunkUnfold {
  public:
    __device__ explicit ChunkUnfold(const ChunkGradients& of)
        : call_(of.call), sequences_(of.sequences), grad_(of.grad), saved_(of.saved) {
        constexpr Index rows = chunk_rows * S::K;
        constexpr int parts = slabs<S>;
        double* const scratch = saved_.scratch + Index(blockIdx.x) * token_scratch(parts);
        memory_.rows = chunk_rows;
        memory_.slots = memory_.heads = 1;
        memory_.slabs = parts;
        memory_.channels = call_.gate == core::Gate::channel ? call_.key_size : 1;
        memory_.erased = scratch, memory_.dwritten = scratch + rows;
        memory_.dq = reinterpret_cast<float*>(scratch + 2 * rows);
        memory_.dk = memory_.dq + parts * rows, memory_.dp = memory_.dk + parts * rows;
        if (call_.gate == core::Gate::none || (!grad_.dg && !saved_.shares)) return;
        memory_.written = scratch + (2 + 2 * parts) * rows, memory_.ends = memory_.written - parts * S::K;
        memory_.erase = memory_.written + parts * rows, memory_.dstates = memory_.erase + parts * rows;
        static_assert(token_scratch(parts) >= (2 + 4 * parts) * rows + S::K * 128);
    }

    // Every thread looks at a chunk; the block takes those found, one after the other. What that needs stands behind a
    // look at all of them, or every block would compute and spill it.
    __device__ void run() {
        bool some = false;
        for_each_first([&](Index first) { some = some || is_by_token(first + thread_); });
        if (!ptx::any(1, S::threads, some)) return;
        for_each_first([&](Index first) {
            m_.found[thread_] = is_by_token(first + thread_);
            __syncthreads();
            for (int i = 0; i < S::threads; ++i) {
                if (m_.found[i] == 0) continue;
                find(first + i);
                take_chunk();
            }
            __syncthreads();
        });
    }

  private:
    template <class Use>  // use(the first chunk and key head of the block's threads)
    __device__ void for_each_first(const Use& use) const {
        for (Index first = Index(blockIdx.x) * S::threads; first < all_; first += Index(token_blocks) * S::threads)
            use(first);
    }
    __device__ void find(Index i) {
        const ChunkPosition at = sequences_.number(static_cast<unsigned>(i / key_heads_));
        h_ = static_cast<int>(i % key_heads_);
        chunk_ = {{at.s.batch, at.s.begin + at.c * chunk_rows, at.rows(), 0}, 0, 0};
        slot_ = at.s.first_slot + at.c;
    }
    __device__ bool is_by_token(Index i) {
        if (i >= all_) return false;
        find(i);
        for (int v = 0; v < call_.group && chunk_.count > 0; ++v)
            if (saved_.goes_by_token(slot_, call_.value_head(h_, v))) return true;
        return false;
    }

    __device__ void take_chunk() const {
        const TokenUnfold unfold{call_, grad_, memory_};
        const int warp = thread_ / 32, rows = static_cast<int>(chunk_.count);
        for (int i = 0; i < call_.group; ++i) {
            const int hv = call_.value_head(h_, i);
            for (int slab = 0; slab < slabs<S>; ++slab) walk(hv, slab, i > 0);
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
    __device__ void walk(int hv, int slab, bool adds) const {
        const Walk<S> my(call_, chunk_, hv, slab, {});
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
    const int key_heads_ = call_.key_heads();
    const Index all_ = sequences_.all_chunks() * key_heads_;
    GradientMemory memory_;  // of a chunk and value head
    Shared<S>& m_ = *reinterpret_cast<Shared<S>*>(ptx::shared_memory());
    const int thread_ = static_cast<int>(threadIdx.x);
    DeltaSequence chunk_{};
    Index slot_ = 0;
    int h_ = 0;
};

template <class T, class S>
__global__ void __launch_bounds__(S::threads) unfold_by_token_kernel(const __grid_constant__ ChunkGradients of) {
    ChunkUnfold<T, S>(of).run();
}

constexpr int most_bytes = static_cast<int>(sizeof(Shared<Shape<false>>));

}  // namespace

int token_slabs(const Card& card) {
    return card.shared_bytes < most_bytes ? most_token_slabs : 1;
}

void launch_unfold_by_token(const ChunkGradients& of, cudaStream_t stream) {
    const bool split = of.call.q.dtype == core::DType::f32;
    with_room<most_bytes>([&]<bool small>() {
        using S = Shape<small>;
        launch(split ? unfold_by_token_kernel<float, S> : unfold_by_token_kernel<SavedElement, S>,
               {token_blocks, S::threads, static_cast<int>(sizeof(Shared<S>))}, stream, "gradients token by token", of);
    });
}

}  // namespace softdelta::cuda
