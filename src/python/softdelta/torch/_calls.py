"""Torch tensors to the library: results are allocated here and filled without a copy. No autograd.

A call's options are a tuple, so that autograd can keep them as one thing:

    DeltaOptions      (rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound,
                       use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first)
    AttentionOptions  (scale, causal, window_left, window_right, softcap, empty_row, top_w)

in the types of softdelta._native: rules and the like are numbers, NaN is a default.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .. import _native, _options
from .._arrays import bounds_of

DELTA_INPUTS = ("q", "k", "v", "g", "g_gamma", "beta", "p", "initial_state", "A_log", "dt_bias", "cu_seqlens")
DELTA_GRADIENTS = DELTA_INPUTS[:-1]  # in the order of delta_backward's `wanted`
ATTENTION_INPUTS = ("q", "k", "v", "mask", "bias", "sink", "cu_seqlens_q", "cu_seqlens_k", "cache_seqlens",
                    "block_table")
ATTENTION_GRADIENTS = ("q", "k", "v", "bias", "sink")

AUTOMATIC = "automatic"


_torch_threads = torch.get_num_threads


def threads() -> int:
    return _options.threads or _torch_threads()


def wide(t: Tensor) -> torch.dtype:
    """The type of what is kept in f32: f64 for f64."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def state_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, v_first: bool) -> tuple:
    n = q.shape[0] if cu_seqlens is None else bounds_of("cu_seqlens", cu_seqlens) - 1
    sizes = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
    return (n, v.shape[2], *sizes)


def new_state(q: Tensor, shape: tuple) -> Tensor:
    dtype = wide(q)
    return q.new_empty(shape) if q.dtype == dtype else torch.empty(shape, dtype=dtype)  # the first is quicker


def delta_forward(inputs: tuple, options: tuple, output_final_state: bool):
    """o [B, T, HV, V] and the final state, or None. inputs as DELTA_INPUTS."""
    q, v, cu_seqlens = inputs[0], inputs[2], inputs[10]
    if q is None or v is None or q.dim() != 4 or v.dim() != 4:
        refuse_ranks(q, v)
    o = v.new_empty(v.shape)
    state = new_state(q, state_shape(q, v, cu_seqlens, options[7])) if output_final_state else None
    _native.delta_forward(options[0], *inputs, None, *options[1:], 64, o, state, None, AUTOMATIC, threads(), False)
    return o, state


def delta_backward(inputs: tuple, options: tuple, do: Tensor | None, dfinal_state: Tensor | None, wanted) -> list:
    """Gradients of DELTA_GRADIENTS, None where not wanted."""
    grads = [torch.empty_like(t) if w else None for t, w in zip(inputs, wanted)]
    dq, dk, dv, dg, dg_gamma, dbeta, dp, dinitial_state, dA_log, ddt_bias = grads
    if do is None and dfinal_state is None:
        return [g if g is None else g.zero_() for g in grads]
    _native.delta_backward(options[0], *inputs, *options[1:], do, dfinal_state, dq, dk, dv, dg, dg_gamma, dbeta, dp,
                           dinitial_state, dA_log, ddt_bias, AUTOMATIC, threads(), False)
    return grads


def attention_forward(inputs: tuple, options: tuple, with_lse: bool, heads_first: bool = False):
    """o [B, Lq, H, Dv] and lse [B, H, Lq], or None. inputs as ATTENTION_INPUTS. With heads_first q, k, v and o are
    [B, H, L, D], o in the memory layout of [B, L, H, D]."""
    q, v = inputs[0], inputs[2]
    if q is None or v is None or q.dim() != 4 or v.dim() != 4:
        _refuse_rank("q", q, "[B, Lq, H, D]")
        _refuse_rank("v", v, "[B, Lk, Hk, Dv]")
    if heads_first:
        batch, heads, rows, _ = q.shape
        size = v.shape[3]
        o = torch.empty_strided((batch, heads, rows, size), (rows * heads * size, size, heads * size, 1), dtype=v.dtype)
    else:
        batch, rows, heads, _ = q.shape
        o = torch.empty((batch, rows, heads, v.shape[3]), dtype=v.dtype)
    lse = torch.empty((batch, heads, rows), dtype=wide(q)) if with_lse else None
    _native.attention_forward(*inputs, *options, o, lse, AUTOMATIC, threads(), False, heads_first)
    return o, lse


def attention_backward(inputs: tuple, options: tuple, o: Tensor | None, lse: Tensor | None, do: Tensor | None,
                       dlse: Tensor | None, wanted, heads_first: bool = False) -> list:
    """Gradients of ATTENTION_GRADIENTS, None where not wanted."""
    q, k, v, _, bias, sink = inputs[:6]
    grads = [torch.empty_like(t) if w else None for t, w in zip((q, k, v, bias, sink), wanted)]
    if do is None:
        do = torch.zeros((*q.shape[:3], v.shape[3]), dtype=v.dtype)
    _native.attention_backward(*inputs, *options, o, lse, do, dlse, *grads, AUTOMATIC, threads(), False, heads_first)
    return grads


def refuse_ranks(q: Tensor, v: Tensor) -> None:
    _refuse_rank("q", q, "[B, T, H, K]")
    _refuse_rank("v", v, "[B, T, HV, V]")


def _refuse_rank(name: str, t: Tensor, shape: str) -> None:
    if t is None:
        raise ValueError(f"{name} is None, expected a tensor {shape}")
    if t.dim() != 4:
        raise ValueError(f"{name} has {t.dim()} dimensions, expected 4: {shape}")
