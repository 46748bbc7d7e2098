"""softdelta for torch tensors on CPUs and NVIDIA GPUs, with autograd and torch.compile: the signatures that people know.

Delta rules as in flash-linear-attention 0.6, softmax attention as in torch, flash-attention 2 and flash-dmattn, and
delta_step, decode in place. Around the rules the causal convolution of flash-linear-attention and causal-conv1d, and the
gated norm.
"""
import torch as _torch

# The oldest torch with which tests pass, as pyproject.toml declares it.
OLDEST = (2, 10)
if tuple(map(int, _torch.__version__.split(".")[:2])) < OLDEST:
    raise ImportError(f"softdelta.torch needs torch {OLDEST[0]}.{OLDEST[1]} or later, and this is torch {_torch.__version__}")

from ._attention import (flash_attn_func, flash_attn_varlen_func, flash_sparse_attn_func, scaled_dot_product_attention,
                         varlen_attn)
from ._calls import set_most_kept
from ._convolution import causal_conv1d, causal_conv1d_fn, causal_conv1d_update
from ._delta_rules import (chunk_comba, chunk_delta_rule, chunk_gated_delta_rule, chunk_kda, delta_rule,
                           fused_recurrent_comba, fused_recurrent_delta_rule, fused_recurrent_gated_delta_rule, fused_recurrent_kda)
from ._gdn2 import chunk_gdn2, fused_recurrent_gdn2
from ._kv_cache import flash_attn_with_kvcache
from ._mamba import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, selective_state_update
from ._norm import FusedRMSNormGated, rms_norm_gated
from ._products import (chunk_dplr_delta_rule, chunk_gated_delta_product, chunk_rwkv7, fused_mul_recurrent_rwkv7,
                        fused_recurrent_dplr_delta_rule, fused_recurrent_rwkv7)
from ._sdpa_kernel import sdpa_kernel
from ._simple_gla import (chunk_gla, chunk_lightning_attn, chunk_simple_gla, fused_chunk_simple_gla, fused_recurrent_gla,
                          fused_recurrent_lightning_attn, fused_recurrent_simple_gla, parallel_simple_gla)
from ._step import delta_step

__all__ = [
    "FusedRMSNormGated", "causal_conv1d", "causal_conv1d_fn", "causal_conv1d_update",
    "chunk_comba", "chunk_delta_rule", "chunk_dplr_delta_rule", "chunk_gated_delta_product", "chunk_gated_delta_rule",
    "chunk_gdn2", "chunk_gla", "chunk_kda", "chunk_lightning_attn", "chunk_rwkv7", "chunk_simple_gla", "delta_rule", "delta_step",
    "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "flash_sparse_attn_func", "fused_chunk_simple_gla", "fused_mul_recurrent_rwkv7",
    "fused_recurrent_comba", "fused_recurrent_delta_rule", "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn2", "fused_recurrent_gla",
    "fused_recurrent_kda", "fused_recurrent_lightning_attn", "fused_recurrent_rwkv7", "fused_recurrent_simple_gla", "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined", "parallel_simple_gla",
    "rms_norm_gated", "scaled_dot_product_attention", "sdpa_kernel", "selective_state_update", "set_most_kept",
    "varlen_attn"
]
