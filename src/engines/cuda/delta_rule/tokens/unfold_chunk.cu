// The gradients of chunks that go token by token, in f64. A block takes a chunk and key head. For each of its value
// heads it walks over the tokens three times, with S or dS in shared memory (tokens/walk_back.cu):
//
//     forward        e = v − Sᵀ p     w = βe             S ← e^g∘S + k wᵀ
//     backward       dS += q doᵀ      dw = dSᵀ k         dk = dS w              dS ← e^g∘(dS − p (β dw)ᵀ)
//     forward again  dq = S do        dp = −S (β dw)
//
//     dg_t = rowsum(S∘dS')_end + Σ_(s ≥ t) (q∘dq − k∘dk + p∘dp)_s
//
// Rare, and slow.
#include "engines/cuda/delta_rule/gate.h"
#include "engines/cuda/delta_rule/saved.h"
#include "engines/cuda/device/grid.h"
#include "engines/cuda/tile/lanes.h"

namespace softdelta::cuda {

namespace {

constexpr int C = chunk_rows, D = 128, threads = 256, warps = threads / 32;

struct Shared {
    double state[D * D];  // [K, V]
    double q[D], k[D], p[D], decay[D];
    double sums[2][D];  // of columns, each over half of the rows
    double end[D];      // rowsum(S∘dS') after the chunk
    double written[C], erased[C];
    double beta;
    int found[threads];
};

template <class T>
class TokenUnfold {
  public:
    __device__ TokenUnfold(const DeltaCall& call, const ChunkSequences& sequences, const GradientViews& grad,
                           const SavedChunks& saved)
        : call_(call), sequences_(sequences), grad_(grad), saved_(saved) {
        double* scratch = saved.scratch + Index(blockIdx.x) * token_scratch;
        for (double** x : {&e_, &dw_, &dq_, &dk_, &dp_, &written_, &erased_}) {
            *x = scratch;
            scratch += C * D;
        }
    }

    // Every thread looks at a chunk; the block takes those found, one after the other.
    __device__ void run() {
        const int key_heads = call_.key_heads();
        const Index all = sequences_.all_chunks() * key_heads;
        for (Index first = Index(blockIdx.x) * threads; first < all; first += Index(token_blocks) * threads) {
            const bool found = first + thread_ < all && is_by_token(first + thread_, key_heads);
            m_.found[thread_] = found;
            if (!ptx::any(1, threads, found)) continue;
            for (int i = 0; i < threads; ++i) {
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
        s_ = at.s;
        c_ = at.c;
        rows_ = at.rows();
        slot_ = s_.first_slot + c_;
    }
    __device__ bool is_by_token(Index i, int key_heads) {
        find(i, key_heads);
        if (rows_ <= 0) return false;
        for (int v = 0; v < call_.group; ++v)
            if (saved_.goes_by_token(slot_, call_.value_head(h_, v))) return true;
        return false;
    }

    __device__ void take_chunk() {
        for (int i = 0; i < call_.group; ++i) {
            hv_ = call_.value_head(h_, i);
            load_state(saved_.state(slot_, hv_));
            for (int t = 0; t < rows_; ++t) write_token(t);
            sum_end();
            load_state(saved_.dstate(slot_, hv_));
            for (int t = rows_; t-- > 0;) step_back(t, i == 0);
            load_state(saved_.state(slot_, hv_));
            for (int t = 0; t < rows_; ++t) step_again(t, i == 0);
            unfold_gates();
            if (grad_.dbeta) unfold_beta();
            __syncthreads();
        }
        for (int t = warp_; t < rows_; t += warps) {
            store_row(t, call_.q, grad_.dq, dq_);
            store_row(t, call_.k, grad_.dk, dk_);
            if (call_.own_p) store_row(t, call_.p, grad_.dp, dp_);
        }
        __syncthreads();
    }

    // --- states: a thread has half of a column, a warp some rows

    __device__ void load_state(const char* from) const {
        const auto use = [&](int size, auto tile) {
            for (int i = thread_; i < D * D; i += threads) {
                const int m = i / D, j = i % D;
                const bool inside = m < size && j < size;
                const auto at = inside ? tile.unit(j, m / 8) : 0;
                m_.state[i] =
                    inside ? static_cast<double>(to_float(reinterpret_cast<const T*>(from + at)[m % 8])) : 0.0;
            }
        };
        if (saved_.size == 64)
            use(64, Tile<T, 64>{0});
        else
            use(128, Tile<T, 128>{0});
        __syncthreads();
    }
    template <class Visit>  // visit(key channel, element)
    __device__ void for_each_of_column(Visit&& visit) const {
        const int j = thread_ % D, first = thread_ / D * (D / 2);
        for (int m = first; m < first + D / 2; ++m) visit(m, m_.state[m * D + j]);
    }
    // Σ over the column, in both of its threads.
    __device__ double sum_of_column(double own) const {
        m_.sums[thread_ / D][thread_ % D] = own;
        __syncthreads();
        return m_.sums[0][thread_ % D] + m_.sums[1][thread_ % D];
    }
    template <class Use>  // use(key channel, Σ_j S_mj x_j), in the lane that keeps it
    __device__ void for_each_row(const double* x, Use&& use) const {
        for (int m = warp_; m < D; m += warps) {
            double sum = 0;
            for (int j = lane_; j < D; j += 32) sum = fma(m_.state[m * D + j], x[j], sum);
            sum = sum_of_warp(sum);
            if (lane_ == 0) use(m, sum);
        }
    }

    // --- a token

    __device__ Index row_of(const View& v, int t, int head) const { return s_.row(v, c_ * C + t, head); }
    __device__ double value(const View& v, int t) const {
        const int j = thread_ % D;
        return v && j < call_.value_size ? static_cast<double>(load(v, row_of(v, t, hv_) + j * v.stride[3])) : 0.0;
    }
    __device__ double norm(const View& v, int t) const {
        if (!call_.l2norm) return 1;
        double sum = 0;
        for (int m = lane_; m < call_.key_size; m += 32) {
            const auto x = static_cast<double>(load(v, row_of(v, t, h_) + m * v.stride[3]));
            sum = fma(x, x, sum);
        }
        return 1 / sqrt(sum_of_warp(sum) + 1e-6);
    }
    __device__ const View& p() const { return call_.own_p ? call_.p : call_.k; }
    __device__ float given_gate(int t, int m) const {
        if (!call_.g) return 0;
        return load(call_.g, row_of(call_.g, t, hv_) + (call_.gate == core::Gate::channel ? m * call_.g.stride[3] : 0));
    }
    // q, k, p, e^g and β of token t.
    __device__ void load_token(int t) const {
        if (warp_ < 3) {
            const View& v = warp_ == 0 ? call_.q : warp_ == 1 ? call_.k : p();
            double* to = warp_ == 0 ? m_.q : warp_ == 1 ? m_.k : m_.p;
            const double factor = norm(v, t) * (warp_ == 0 ? static_cast<double>(call_.scale) : 1.0);
            for (int m = lane_; m < D; m += 32)
                to[m] = m < call_.key_size ? factor * static_cast<double>(load(v, row_of(v, t, h_) + m * v.stride[3]))
                                           : 0.0;
        } else if (warp_ == 3) {
            const HeadGate head(call_, hv_);
            for (int m = lane_; m < D; m += 32) {
                double g = 0;
                if (call_.gate != core::Gate::none && m < call_.key_size)
                    g = head.gate(call_, given_gate(t, m), head.bias_of(call_, hv_, m));
                m_.decay[m] = HeadGate::decay(g);
            }
        } else if (warp_ == 4 && lane_ == 0) {
            m_.beta = call_.beta && erases_ ? exact_beta(call_, load(call_.beta, row_of(call_.beta, t, hv_))) : 1.0;
        }
        __syncthreads();
    }

    __device__ void decay_state() const {
        for_each_of_column([&](int m, double& x) { x *= m_.decay[m]; });
    }
    __device__ void write_token(int t) const {
        load_token(t);
        double erased = 0;
        if (!before_decay_) decay_state();
        if (erases_) for_each_of_column([&](int m, double x) { erased = fma(m_.p[m], x, erased); });
        const double e = value(call_.v, t) - sum_of_column(erased), w = m_.beta * e;
        if (before_decay_) decay_state();
        for_each_of_column([&](int m, double& x) { x = fma(m_.k[m], w, x); });
        if (thread_ < D) e_[t * D + thread_] = e;
        __syncthreads();
    }
    // rowsum(S∘dS') after the chunk.
    __device__ void sum_end() const {
        const char* from = saved_.dstate(slot_, hv_);
        const auto use = [&](int size, auto tile) {
            for (int m = warp_; m < D; m += warps) {
                double sum = 0;
                for (int j = lane_; j < size && m < size; j += 32) {
                    const float x = to_float(reinterpret_cast<const T*>(from + tile.unit(j, m / 8))[m % 8]);
                    sum = fma(m_.state[m * D + j], static_cast<double>(x), sum);
                }
                sum = sum_of_warp(sum);
                if (lane_ == 0) m_.end[m] = sum;
            }
        };
        if (saved_.size == 64)
            use(64, Tile<T, 64>{0});
        else
            use(128, Tile<T, 128>{0});
        __syncthreads();
    }
    __device__ void step_back(int t, bool first) const {
        load_token(t);
        const double d_o = value(grad_.d_o, t);
        double dw = 0;
        for_each_of_column([&](int m, double& x) {
            x = fma(m_.q[m], d_o, x);
            dw = fma(m_.k[m], x, dw);
        });
        dw = sum_of_column(dw);
        const int j = thread_ % D;
        if (thread_ < D) {
            dw_[t * D + j] = dw;
            if (grad_.dv && j < call_.value_size)
                store(grad_.dv, row_of(grad_.dv, t, hv_) + j * grad_.dv.stride[3], static_cast<float>(m_.beta * dw));
        }
        __syncthreads();
        for_each_row(e_ + t * D, [&](int m, double sum) {
            const double dk = m_.beta * sum;
            add(dk_, t, m, first, dk);
            written_[t * D + m] = -m_.k[m] * dk;
        });
        __syncthreads();
        const double de = erases_ ? m_.beta * dw : 0.0;
        for_each_of_column([&](int m, double& x) {
            x = before_decay_ ? fma(-m_.p[m], de, m_.decay[m] * x) : m_.decay[m] * fma(-m_.p[m], de, x);
        });
        __syncthreads();
    }
    __device__ void step_again(int t, bool first) const {
        load_token(t);
        if (!before_decay_) decay_state();
        __syncthreads();
        if (erases_)
            for_each_row(dw_ + t * D, [&](int m, double sum) {
                const double dp = -m_.beta * sum;
                if (call_.own_p)
                    add(dp_, t, m, first, dp);
                else
                    add(dk_, t, m, false, dp);
                erased_[t * D + m] = m_.p[m] * dp;
            });
        __syncthreads();
        if (before_decay_) decay_state();
        const double w = m_.beta * e_[t * D + thread_ % D];
        for_each_of_column([&](int m, double& x) { x = fma(m_.k[m], w, x); });
        if (thread_ < D) m_.sums[0][thread_] = value(grad_.d_o, t);
        __syncthreads();
        for_each_row(m_.sums[0], [&](int m, double sum) {
            add(dq_, t, m, first, static_cast<double>(call_.scale) * sum);
            written_[t * D + m] = fma(m_.q[m], sum, written_[t * D + m]);
        });
        __syncthreads();
    }
    __device__ static void add(double* to, int t, int m, bool first, double x) {
        to[t * D + m] = first ? x : to[t * D + m] + x;
    }

    // --- gates, β, rows

    __device__ void unfold_gates() const {
        if (call_.gate == core::Gate::none) return;
        const bool channel = call_.gate == core::Gate::channel;
        if (!channel)
            for (int t = warp_; t < rows_; t += warps) {
                double written = 0, erased = 0;
                for (int m = lane_; m < D; m += 32) {
                    written += written_[t * D + m];
                    if (erases_) erased += erased_[t * D + m];
                }
                written = sum_of_warp(written);
                erased = sum_of_warp(erased);
                if (lane_ == 0) {
                    m_.written[t] = written;
                    m_.erased[t] = erased;
                }
            }
        __syncthreads();
        const int m = thread_, channels = channel ? call_.key_size : 1;
        if (m >= channels) return;
        const HeadGate head(call_, hv_);
        const double dt = head.bias_of(call_, hv_, m);
        GateSweep of{m_.end[m]};
        for (int i = 1; i < D && !channel; ++i) of.dg += m_.end[i];
        for (int t = rows_; t-- > 0;) {
            const double written = channel ? written_[t * D + m] : m_.written[t];
            const double erased = !erases_ ? 0.0 : channel ? erased_[t * D + m] : m_.erased[t];
            const double dx = of.take(call_, head, given_gate(t, m), dt, written, erased);
            if (const View& v = grad_.dg; v && call_.g)
                store(v, row_of(v, t, hv_) + (channel ? m * v.stride[3] : 0), static_cast<float>(dx));
        }
        if (!saved_.shares) return;
        const Index share = ((saved_.first_slot + slot_) * saved_.heads + hv_) * channels + m;
        saved_.shares[share] = of.sum;
        saved_.shares[saved_.all_slots * saved_.heads * channels + share] = of.dA_log;
    }
    __device__ void unfold_beta() const {
        for (int t = warp_; t < rows_; t += warps) {
            double dbeta = 0;
            for (int j = lane_; j < D; j += 32) dbeta = fma(dw_[t * D + j], e_[t * D + j], dbeta);
            dbeta = beta_adjoint(call_, load(call_.beta, row_of(call_.beta, t, hv_)), sum_of_warp(dbeta));
            if (lane_ == 0) store(grad_.dbeta, row_of(grad_.dbeta, t, hv_), static_cast<float>(dbeta));
        }
    }
    // y = x r: dx = r (dy − y Σ dy∘y)
    __device__ void store_row(int t, const View& from, const View& to, const double* d) const {
        if (!to) return;
        const double r = norm(from, t);
        double along = 0;
        const auto y = [&](int m) {
            return r * static_cast<double>(load(from, row_of(from, t, h_) + m * from.stride[3]));
        };
        for (int m = lane_; m < call_.key_size && call_.l2norm; m += 32) along = fma(d[t * D + m], y(m), along);
        along = sum_of_warp(along);
        for (int m = lane_; m < call_.key_size; m += 32) {
            double dx = d[t * D + m];
            if (call_.l2norm) dx = r * (dx - y(m) * along);
            store(to, row_of(to, t, h_) + m * to.stride[3], static_cast<float>(dx));
        }
    }

    const DeltaCall& call_;
    const ChunkSequences& sequences_;
    const GradientViews& grad_;
    const SavedChunks& saved_;
    const bool erases_ = call_.erase != core::Erase::nothing,
               before_decay_ = call_.erase == core::Erase::from_previous_state;
    const int thread_ = static_cast<int>(threadIdx.x), warp_ = thread_ / 32, lane_ = thread_ % 32;
    Shared& m_ = *reinterpret_cast<Shared*>(ptx::shared_memory());
    double *e_, *dw_, *dq_, *dk_, *dp_, *written_, *erased_;  // [C, D]
    DeltaSequence s_{};
    Index c_ = 0, slot_ = 0;
    int h_ = 0, hv_ = 0, rows_ = 0;
};

template <class T>
__global__ void __launch_bounds__(threads)
    unfold_by_token_kernel(const __grid_constant__ DeltaCall call, const __grid_constant__ ChunkSequences sequences,
                           const __grid_constant__ SavedChunks saved, const __grid_constant__ GradientViews grad) {
    TokenUnfold<T>(call, sequences, grad, saved).run();
}

}  // namespace

void launch_unfold_by_token(const DeltaCall& call, const ChunkSequences& sequences, const GradientViews& grad,
                            const SavedChunks& saved, cudaStream_t stream) {
    launch(unfold_by_token_kernel<SavedElement>, {dim3(token_blocks), threads, static_cast<int>(sizeof(Shared))},
           stream, "gradients token by token", call, sequences, saved, grad);
}

}  // namespace softdelta::cuda
