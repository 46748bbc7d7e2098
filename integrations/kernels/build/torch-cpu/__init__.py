"""softdelta in the layout that the package `kernels` loads from a folder. The package softdelta is installed beside it."""
from softdelta.torch import (causal_conv1d, chunk_gated_delta_rule, chunk_kda, flash_attn_func, flash_attn_varlen_func,
                             fused_recurrent_gated_delta_rule, fused_recurrent_kda, rms_norm_gated)

from . import layers

__all__ = [
    "causal_conv1d", "chunk_gated_delta_rule", "chunk_kda", "flash_attn_func", "flash_attn_varlen_func",
    "fused_recurrent_gated_delta_rule", "fused_recurrent_kda", "layers", "rms_norm_gated"
]
