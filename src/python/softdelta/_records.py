"""What a call consists of: tensors and options, each as a tuple with names, in the order of softdelta.h. The names of
tensors are those of the library's own table."""
from __future__ import annotations

import math
from collections import namedtuple
from typing import NamedTuple

from . import _native


def _tensors(name: str, fields: tuple[str, ...]):
    return namedtuple(name, fields, defaults=(None,) * len(fields))


AttentionInputs = _tensors("AttentionInputs", _native.ATTENTION_INPUTS)
AttentionOutputs = _tensors("AttentionOutputs", _native.ATTENTION_OUTPUTS)
AttentionGradients = _tensors("AttentionGradients", _native.ATTENTION_GRADIENTS)
DeltaInputs = _tensors("DeltaInputs", _native.DELTA_INPUTS)
DeltaOutputs = _tensors("DeltaOutputs", _native.DELTA_OUTPUTS)
DeltaGradients = _tensors("DeltaGradients", _native.DELTA_GRADIENTS)

ConvolutionInputs = _tensors("ConvolutionInputs", _native.CONVOLUTION_INPUTS)
ConvolutionOutputs = _tensors("ConvolutionOutputs", _native.CONVOLUTION_OUTPUTS)
ConvolutionGradients = _tensors("ConvolutionGradients", _native.CONVOLUTION_GRADIENTS)
NormInputs = _tensors("NormInputs", _native.NORM_INPUTS)
NormOutputs = _tensors("NormOutputs", _native.NORM_OUTPUTS)
NormGradients = _tensors("NormGradients", _native.NORM_GRADIENTS)

# The inputs that have a gradient. A record of gradients ends with those of these, in this order.
ATTENTION_WANTED = tuple(n[1:] for n in AttentionGradients._fields if n[1:] in AttentionInputs._fields)
DELTA_WANTED = tuple(n[1:] for n in DeltaGradients._fields if n[1:] in DeltaInputs._fields)
CONVOLUTION_WANTED = tuple(n[1:] for n in ConvolutionGradients._fields if n[1:] in ConvolutionInputs._fields)
NORM_WANTED = tuple(n[1:] for n in NormGradients._fields if n[1:] in NormInputs._fields)

# Tensors of DeltaInputs that have a row for each token, and those whose gradients are sums over tokens.
DELTA_ROWS = ("q", "k", "v", "p", "g", "beta")
DELTA_SUMS = tuple(n for n in DELTA_WANTED if n not in (*DELTA_ROWS, "initial_state"))


class AttentionOptions(NamedTuple):
    scale: float = math.nan  # NaN: the default
    causal: int = 0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    empty_row: int = 0
    top_w: int = -1
    query_offset: int = 0
    key_offset: int = 0
    with_lse: bool = True      # ours: the library does not read what follows its own options
    heads_first: bool = False  # ours: q, k, v and o are [B, H, L, D]


class DeltaOptions(NamedTuple):
    rule: int
    scale: float = math.nan
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    lower_bound: float = math.nan
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    state_interval: int = 64
    head_order: int = 0
    steps: int = 1
    float_products: bool = False  # bf16 is multiplied as f32, as recurrent kernels do; of how, not of what
    output_final_state: bool = True  # ours
    whatever_kept: bool = False      # ours: where the backward pass has use for it, as much is kept as can be


class ConvolutionOptions(NamedTuple):
    activation: int = 0
    kept: int = -1  # ours: tokens of the final state; -1: none is wanted


class NormOptions(NamedTuple):
    gate: int = 1
    epsilon: float = 1e-6
