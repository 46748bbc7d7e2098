// Threads that have chunks copied, one after the other; where others fold them meanwhile, as soon as they are there.
// Others look whether there is Inf or NaN in a chunk before it is gone on with.
#pragma once

#include "engines/cuda/delta_rule/fold/norms.h"
#include "engines/cuda/delta_rule/rows.h"
#include "engines/cuda/delta_rule/scan/warpgroup/stages.h"

namespace softdelta::cuda::chunk_scan {
// kept: scores lie where they are kept.
template <class T, int K, Keys keys, int slabs, int copying, bool kept, bool beside>
class Copies {
    using Layout = Shared<T, K, keys, slabs>;
    static constexpr bool channel = Layout::channel, apart = kept && Layout::scored && !channel;
    static constexpr int record_bytes = Layout::scored ? Layout::Record::bytes : SolvedChunk::bytes;

  public:
    __device__ Copies(const ChunkForward& of, const DeltaSequence& s, const Layout& shared, const ScanPlace& place,
                      int thread)
        : shared_(shared),
          q_(of.call.q, s, of.call.key_head(place.hv), 0, of.call.key_size, thread),
          k_(of.call.k, s, of.call.key_head(place.hv), 0, of.call.key_size, thread),
          p_(keys == Keys::own_p ? of.call.p : of.call.k, s, of.call.key_head(place.hv), 0, of.call.key_size, thread),
          v_(of.call.v, s, place.hv, place.first_column, of.call.value_size, thread),
          slot_(s.first_slot),
          record_(of.folded.record(slot_, place.hv, record_bytes)),
          score_(apart ? of.out.kept.record(slot_ * of.folded.heads + place.hv) : nullptr),
          flag_(of.flags.of(slot_, place.hv)),
          heads_(of.folded.heads),
          thread_(thread),
          count_(s.count) {}

    __device__ void run(int chunks) {
        if constexpr (!beside) ptx::wait_for_launch_before();
        for (int c = 0; c < chunks; ++c) {
            const int rows = static_cast<int>(min(count_ - Index(c) * C, Index(C)));
            int thread = thread_;
            ptx::forget(thread);  // few registers: places are made anew
            if constexpr (beside) ptx::wait_for_flag(flag_ + Index(c) * heads_);
            shared_.stages().acquire(c);
            if (thread == 0) shared_.by_token_of(c) = 0;
            if constexpr (!channel) {
                q_.copy(shared_.read(c), c, rows, thread);
                k_.copy(shared_.write(c), c, rows, thread);
                if (keys == Keys::own_p) p_.copy(shared_.erase(c), c, rows, thread);
            }
            v_.copy(shared_.values_of(c), c, rows, thread);
            if constexpr (channel) {
                using Record = typename Layout::Record;
                copy_record<3 * Record::key_bytes>(shared_.read(c).base, Record::read, thread);
                copy_record<Record::small_bytes>(shared_.record_of(c), 0, thread);
            } else {
                constexpr int from = keys == Keys::only_written ? SolvedChunk::factors
                                     : apart                    ? Layout::square_bytes
                                                                : 0;
                if constexpr (apart) copy_bytes<from, copying>(shared_.record_of(c), score_, thread);
                copy_record<record_bytes - from>(shared_.record_of(c) + from, from, thread);
            }
            shared_.stages().commit_copies(c);
            record_ += Index(heads_) * record_bytes;
            if constexpr (apart) score_ += Index(heads_) * ChunkRecord::bytes;
        }
    }

  private:
    template <int bytes>
    __device__ void copy_record(std::uint32_t to, int from, int thread) const {
        copy_bytes<bytes, copying>(to, record_ + from, thread);
    }

    const Layout shared_;
    const RowCopies<T, K, copying> q_, k_, p_;
    const RowCopies<T, slabs * slab, copying> v_;
    const Index slot_;
    const char *record_, *score_;
    const int* const flag_;
    const int heads_, thread_;
    const Index count_;
};

// Looks at what the fold has not seen.
template <class T, int K, Keys keys, int slabs, int threads>
class Looks {
    using Layout = Shared<T, K, keys, slabs>;

  public:
    Layout shared;
    int thread;
    bool l2norm;

    __device__ void run(int chunks) const {
        for (int c = 0; c < chunks; ++c) {
            shared.stages().wait_for_products(c);
            bool nonfinite = is_nonfinite(shared.values_of(c), false) || shared.factors_of(c).by_token != 0;
            if constexpr (!Layout::scored) nonfinite = is_nonfinite(shared.read(c), l2norm) || nonfinite;
            if constexpr (keys == Keys::only_written) nonfinite = is_nonfinite(shared.write(c), l2norm) || nonfinite;
            if (nonfinite) shared.by_token_of(c) = 1;
            shared.seen().commit(c, thread % 32);
        }
    }

  private:
    // normed: numbers that are far count, too.
    template <class Rows>
    __device__ bool is_nonfinite(const Rows& tile, bool normed) const {
        const char* const from = shared_at(tile.base + 16u * static_cast<std::uint32_t>(thread));
        const std::uint32_t step = normed ? far_step<T> : nonfinite_step<T>;
        bool nonfinite = false;
#pragma unroll 4
        for (int i = 0; i < C * Rows::units / threads; ++i) {
            const uint4 x = *reinterpret_cast<const uint4*>(from + 16 * threads * i);
            for (const std::uint32_t two : {x.x, x.y, x.z, x.w}) nonfinite = nonfinite | overflows<T>(two, step);
        }
        return nonfinite;
    }
};

}  // namespace softdelta::cuda::chunk_scan
