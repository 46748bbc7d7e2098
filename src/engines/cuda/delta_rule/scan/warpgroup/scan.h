// The scan over folded chunks by warpgroups, sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include "engines/cuda/delta_rule/chunk.h"

namespace softdelta::cuda {
// early: as launch_chunk_scan() has it.
void launch_warpgroup_scan(const DeltaCall& call, core::DType type, const ChunkSequences& sequences,
                           const FoldedChunks& folded, const ChunkOutputs& out, bool early, cudaStream_t stream);

// Calls with so few heads that their scan leaves half of the card idle are folded there meanwhile: by so many blocks; 0
// of others.
int folding_blocks(Level level, const DeltaCall& call, Index sequences, bool keeps, core::Device device);
void launch_fold_and_scan(const DeltaCall& call, core::DType type, const ChunkSequences& sequences,
                          const FoldedChunks& folded, const FoldFlags& flags, const ChunkOutputs& out, int folding,
                          cudaStream_t stream);
constexpr int scored_record_bytes = FoldedChunk<128, false>::bytes;  // theirs, whatever the number of channels

}  // namespace softdelta::cuda
