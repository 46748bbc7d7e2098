// A block of 16 warps with the tiles of a chunk and head whose gates are of channels, for its gradients (channel.cu).
#pragma once

#include "engines/cuda/delta_rule/chunk_backward/saved.h"
#include "engines/cuda/delta_rule/gate.h"

namespace softdelta::cuda {

constexpr int channel_threads = 512, channels = 128, blocks = 4, rows_of_block = chunk_rows / blocks;
constexpr int sum_row = channels + 8;  // floats; rows in different banks

struct PairCoefficients {
    float read, erase;  // P·scale, Q
};

struct ChannelNumbers {
    float q_norm[chunk_rows], k_norm[chunk_rows], beta[chunk_rows];
    float of_values[chunk_rows];            // rowsum(dR∘v)
    float own[blocks][channels];            // e^t
    float later[blocks][blocks][channels];  // [I][b]: Σ over rows of I of q∘dq + βk∘e, from S and blocks before b
    float earlier[blocks][channels];        // Σ over rows of k∘dk, from dS'
    float through[channel_threads / 32][channels];  // rowsum(S∘dS'), parts
    float rows[3][blocks][chunk_rows];              // q∘dq, k∘dk, k∘e of each row, over 32 channels
    double shares[2][blocks][channels];
};

template <class T>
struct ChannelMemory {
    using Rows = Tile<T, channels>;
    static constexpr int rows_bytes = Rows::bytes(chunk_rows), state_bytes = Rows::bytes(channels),
                         sums_bytes = chunk_rows * sum_row * 4;
    static constexpr int q = 0, k = rows_bytes, k_later = 2 * rows_bytes, d_o = 3 * rows_bytes, d_r = d_o + rows_bytes,
                         state = d_r + rows_bytes, u = state + state_bytes, dstate = u + rows_bytes,
                         pairs = dstate + state_bytes, diagonal = pairs + 2 * ChunkRecord::square_bytes,
                         small = diagonal +
                                 blocks * rows_of_block * rows_of_block * static_cast<int>(sizeof(PairCoefficients)),
                         bytes = small + static_cast<int>(sizeof(ChannelNumbers));
    static_assert(d_o + 3 * sums_bytes <= pairs);  // then the sums x of q and k, and y
};

template <class T>
class ChannelTiles {
  public:
    static constexpr int C = chunk_rows, D = channels, threads = channel_threads;
    using Layout = ChannelMemory<T>;
    using Rows = Tile<T, D>;
    using Square = Tile<T, C>;

    __device__ ChannelTiles(const DeltaCall& call, const DeltaSequences& sequences, const GradientViews& grad,
                            const SavedChunks& saved)
        : call_(call),
          grad_(grad),
          saved_(saved),
          s_(sequences[static_cast<int>(blockIdx.z)]),
          c_(static_cast<Index>(blockIdx.x)),
          hv_(static_cast<int>(blockIdx.y)),
          h_(call.key_head(hv_)),
          thread_(static_cast<int>(threadIdx.x)),
          lane_(static_cast<int>(threadIdx.x) % 32),
          block_(static_cast<int>(threadIdx.x) / 32 % 4),
          quarter_(static_cast<int>(threadIdx.x) / 128),
          rows_(static_cast<int>(min(s_.count - c_ * C, Index(C)))),
          slot_(saved.slot(s_, sequences.first + static_cast<int>(blockIdx.z), c_, sequences.packed)),
          memory_(ptx::shared_memory()),
          base_(ptx::shared_address(memory_)),
          small_(*reinterpret_cast<ChannelNumbers*>(memory_ + Layout::small)) {}

    __device__ Rows tile(int at) const { return {base_ + at}; }
    __device__ Square pairs(int which) const { return {base_ + Layout::pairs + which * ChunkRecord::square_bytes}; }
    __device__ PairCoefficients* diagonal(int block) const {
        return reinterpret_cast<PairCoefficients*>(memory_ + Layout::diagonal) + block * rows_of_block * rows_of_block;
    }
    __device__ float* sums(int which) const {
        return reinterpret_cast<float*>(memory_ + Layout::d_o + which * Layout::sums_bytes);
    }
    __device__ int row(int half_of_block) const { return 16 * block_ + lane_ / 4 + 8 * half_of_block; }
    __device__ Index row_of(const View& v, int i, int head) const {
        return s_.batch * v.stride[0] + (s_.begin + c_ * C + i) * v.stride[1] + head * v.stride[2];
    }
    __device__ static float sum_of_eight(float x) {
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
        return x;
    }

    // The gates of a channel in 16 rows.
    struct Gates {
        float g[rows_of_block], dt;
    };
    __device__ float given_gate(const HeadGate& head, int r, int m) const {
        return call_.g ? load(call_.g, row_of(call_.g, r, hv_) + m * call_.g.stride[3]) : head.constant;
    }
    __device__ void load_gates(int block, int m, Gates& out) const {
        const HeadGate head(call_, hv_);
        const bool inside = m < call_.key_size, bounded = call_.raw_gate == core::RawGate::lower_bound;
        out.dt = call_.dt_bias && inside
                     ? load(call_.dt_bias, (Index(hv_) * call_.key_size + m) * call_.dt_bias.stride[0])
                     : 0.0F;
        float given[rows_of_block] = {};
        if (inside && call_.g) {
            const int first = rows_of_block * block;
            const Index offset = row_of(call_.g, first, hv_) + m * call_.g.stride[3];
            with_type(call_.g, [&](const auto* data) {
#pragma unroll
                for (int i = 0; i < rows_of_block; ++i)
                    if (first + i < rows_) given[i] = to_float(data[offset + i * call_.g.stride[1]]);
            });
        }
#pragma unroll
        for (int i = 0; i < rows_of_block; ++i) {
            const int r = rows_of_block * block + i;
            const bool gated = inside && r < rows_;
            float g = call_.g ? given[i] : head.constant;
            if (call_.raw_gate != core::RawGate::none)
                g = bounded ? static_cast<float>(call_.lower_bound) * sigmoid(head.rate * (g + out.dt))
                            : -head.rate * softplus(g + out.dt);
            out.g[i] = gated ? fmaxf(g, -100.0F) : 0.0F;
        }
    }
    __device__ float key(const View& v, const float* norm, int r, int m) const {
        if (r >= rows_ || m >= call_.key_size) return 0;
        return norm[r] * to_float(static_cast<const T*>(v.data)[row_of(v, r, h_) + m]);
    }

    const DeltaCall& call_;
    const GradientViews& grad_;
    const SavedChunks& saved_;
    const DeltaSequence s_;
    const Index c_;
    const int hv_, h_, thread_, lane_, block_, quarter_, rows_;
    const Index slot_;
    char* memory_;
    std::uint32_t base_;
    ChannelNumbers& small_;
};

}  // namespace softdelta::cuda
