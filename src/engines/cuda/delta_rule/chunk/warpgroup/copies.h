// The warpgroup that has chunks copied, one after the other; where others fold them meanwhile, as soon as they are
// there.
#pragma once

#include "engines/cuda/delta_rule/chunk/warpgroup/stages.h"

namespace softdelta::cuda::chunk_scan {

// Rows of a head.
template <class T, int columns>
class RowCopies {
    static constexpr int units = columns / 8, rows_at_once = group / units;

  public:
    __device__ RowCopies(const View& view, const DeltaSequence& s, int head, int first, int size, int thread)
        : data_(static_cast<const T*>(view.data)),
          from_(data_ + s.batch * view.stride[0] + (s.begin + thread / units) * view.stride[1] + head * view.stride[2] +
                first + 8 * (thread % units)),
          step_(rows_at_once * view.stride[1]),
          row_(thread / units),
          unit_(thread % units),
          inside_(first + 8 * unit_ < size) {}

    // The next chunk, of which so many rows exist: zeros where there are none.
    template <int panel_rows>
    __device__ void copy(const Tile<T, columns, panel_rows>& tile, Index rows) {
        const std::uint32_t to = tile.unit(row_, unit_);
        constexpr int step_bytes = rows_at_once * 128;
        if (rows >= C && inside_) {
#pragma unroll
            for (int i = 0; i < C / rows_at_once; ++i, from_ += step_)
                ptx::copy_async(to + i * step_bytes, from_, true);
            return;
        }
#pragma unroll 1
        for (int i = 0; i < C / rows_at_once; ++i, from_ += step_) {
            const bool take = inside_ && row_ + i * rows_at_once < rows;
            ptx::copy_async(to + static_cast<std::uint32_t>(i * step_bytes), take ? from_ : data_, take);
        }
    }

  private:
    const T* data_;
    const T* from_;
    Index step_;
    int row_, unit_;
    bool inside_;
};

template <class T, int K, Keys keys, bool beside>
class Copies {
    using Layout = Shared<T, K, keys>;
    static constexpr bool channel = Layout::channel;
    static constexpr int record_bytes = Layout::scored ? Layout::Record::bytes : SolvedChunk::bytes;

  public:
    __device__ Copies(const DeltaCall& call, const DeltaSequences& sequences, const DeltaSequence& s,
                      const FoldedChunks& folded, const FoldFlags& flags, const Layout& shared, const ScanPlace& place,
                      int thread)
        : shared_(shared),
          q_(call.q, s, call.key_head(place.hv), 0, call.key_size, thread),
          k_(call.k, s, call.key_head(place.hv), 0, call.key_size, thread),
          p_(keys == Keys::own_p ? call.p : call.k, s, call.key_head(place.hv), 0, call.key_size, thread),
          v_(call.v, s, place.hv, place.first_column, call.value_size, thread),
          record_(folded.record(folded.slot(s, sequences.first + place.sequence, 0, sequences.packed), place.hv,
                                record_bytes)),
          flag_(flags.of(folded.slot(s, sequences.first + place.sequence, 0, sequences.packed), place.hv)),
          heads_(folded.heads),
          thread_(thread),
          count_(s.count) {}

    __device__ void run(int chunks) {
        for (int c = 0; c < chunks; ++c) {
            const Index rows = count_ - Index(c) * C;
            if constexpr (beside) ptx::wait_for_flag(flag_ + Index(c) * heads_);
            shared_.stages().wait_until_free(c);
            if (thread_ == 0) shared_.odd_of(c) = 0;
            if constexpr (!channel) {
                q_.copy(shared_.read(c), rows);
                k_.copy(shared_.write(c), rows);
                if (keys == Keys::own_p) p_.copy(shared_.erase(c), rows);
            }
            v_.copy(shared_.values_of(c), rows);
            if constexpr (channel) {
                using Record = typename Layout::Record;
                copy_record<3 * Record::key_bytes>(shared_.read(c).base, Record::read);
                copy_record<Record::small_bytes>(shared_.record_of(c), 0);
            } else {
                constexpr int from = keys == Keys::only_written ? SolvedChunk::factors : 0;
                copy_record<record_bytes - from>(shared_.record_of(c) + from, from);
            }
            shared_.stages().fill(c);
            record_ += Index(heads_) * record_bytes;
        }
    }

  private:
    template <int bytes>
    __device__ void copy_record(std::uint32_t to, int from) const {
        const char* const data = record_ + from + 16 * thread_;
        to += 16u * static_cast<std::uint32_t>(thread_);
#pragma unroll
        for (int i = 0; i < bytes; i += 16 * group)
            if (i + 16 * group <= bytes || i + 16 * thread_ < bytes)
                ptx::copy_async(to + static_cast<std::uint32_t>(i), data + i, true);
    }

    const Layout shared_;
    RowCopies<T, K> q_, k_, p_;
    RowCopies<T, slab> v_;
    const char* record_;
    const int* const flag_;
    const int heads_, thread_;
    const Index count_;
};

}  // namespace softdelta::cuda::chunk_scan
