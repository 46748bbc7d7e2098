"""Rules that erase nothing, under the names and signatures of flash-linear-attention 0.6: simple GLA (retention,
Mamba-2's rule), lightning attention, and GLA.

Shapes and types as in _delta_rules.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from .._records import DeltaInputs
from . import _calls
from ._delta_rules import GLA, SIMPLE_GLA, _old_layout, _refuse_rest, _run


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA (retention, Mamba-2's rule): S ← e^g S + k vᵀ. g [B, T, HV], or g_gamma [HV], one gate for all tokens;
    without both nothing decays."""
    chunk_size = kwargs.pop("chunk_size", None)
    if chunk_size is not None and (chunk_size < 1 or chunk_size & chunk_size - 1):
        raise ValueError(f"`chunk_size` must be a power of 2, got {chunk_size}")
    _refuse_rest("chunk_simple_gla", kwargs, cu_seqlens, cu_seqlens_cpu)
    inputs = DeltaInputs(q, k, v, g=g, g_gamma=g_gamma, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(SIMPLE_GLA, inputs, scale, output_final_state, v_first=state_v_first, layout=layout)


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: str = "bthd",
) -> tuple[Tensor, Tensor | None]:
    """chunk_simple_gla under its other name."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens,
                            layout=layout)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """As chunk_simple_gla, for decode; differentiable too. reverse: each sequence from its last token to its first, the
    final state is that after the first."""
    state_v_first = _old_layout(kwargs, state_v_first)
    _refuse_rest("fused_recurrent_simple_gla", kwargs)
    inputs = DeltaInputs(q, k, v, g=g, g_gamma=g_gamma, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _recurrent(SIMPLE_GLA, inputs, scale, output_final_state, reverse, state_v_first, layout)


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    layout: str = "bthd",
) -> tuple[Tensor, Tensor | None]:
    """chunk_simple_gla without states. With output_attentions also what each token takes of each before it
    [B, HV, T, T], as q, without a gradient."""
    _refuse_rest("parallel_simple_gla", {}, cu_seqlens, cu_seqlens_cpu)
    if output_attentions and cu_seqlens is not None:
        raise ValueError("output_attentions is True, expected False with cu_seqlens")
    o, _ = _run(SIMPLE_GLA, DeltaInputs(q, k, v, g=g, cu_seqlens=cu_seqlens), scale, False, layout=layout)
    if not output_attentions:
        return o, None
    if layout == "bhtd":
        q, k, v, g = (t if t is None else t.transpose(1, 2) for t in (q, k, v, g))
    return o, _scores(q, k, v, g, scale)


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention (Qin et al. 2024): simple GLA whose constant gates head and layer give."""
    g_gamma = _lightning_gates(q, q.shape[1 if layout == "bhtd" else 2], layer_idx, num_layers)
    return chunk_simple_gla(q, k, v, None, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens,
                            layout=layout, **kwargs)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """As chunk_lightning_attn, for decode."""
    _refuse_rest("fused_recurrent_lightning_attn", kwargs)
    g_gamma = _lightning_gates(q, q.shape[2], layer_idx, num_layers)
    return fused_recurrent_simple_gla(q, k, v, g_gamma=g_gamma, scale=scale, initial_state=initial_state,
                                      output_final_state=output_final_state, reverse=reverse, cu_seqlens=cu_seqlens)


def _lightning_gates(q: Tensor, heads: int, layer: int, layers: int) -> Tensor:
    return -8 / heads * (1 - layer / layers) * torch.arange(heads, dtype=torch.float32, device=q.device)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    layout: str = "bthd",
) -> tuple[Tensor, Tensor | None]:
    """GLA (Yang et al. 2024): S ← diag(e^g) S + k vᵀ. g [B, T, HV, K]."""
    _refuse_rest("chunk_gla", {}, cu_seqlens, cu_seqlens_cpu)
    inputs = DeltaInputs(q, k, v, g=g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(GLA, inputs, scale, output_final_state, v_first=state_v_first, layout=layout)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """As chunk_gla, for decode; differentiable too. Without gk nothing decays; gv is refused. reverse as in
    fused_recurrent_simple_gla."""
    state_v_first = _old_layout(kwargs, state_v_first)
    _refuse_rest("fused_recurrent_gla", kwargs)
    if gv is not None:
        raise ValueError("gv is given, expected None: no rule here gates value channels")
    inputs = DeltaInputs(q, k, v, g=gk, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _recurrent(SIMPLE_GLA if gk is None else GLA, inputs, scale, output_final_state, reverse, state_v_first, layout)


def _recurrent(rule, inputs, scale, output_final_state, reverse, state_v_first, layout):
    tokens, cu_seqlens = 2 if layout == "bhtd" else 1, inputs.cu_seqlens
    if reverse:  # sequences and tokens from the last to the first, and back
        inputs = inputs._replace(**{n: t.flip(tokens) for n in "qkvg" if (t := getattr(inputs, n)) is not None})
        if cu_seqlens is not None:
            state = inputs.initial_state
            inputs = inputs._replace(cu_seqlens=cu_seqlens[-1] - cu_seqlens.flip(0),
                                     initial_state=state if state is None else state.flip(0))
    o, state = _run(rule, inputs, scale, output_final_state, v_first=state_v_first, float_products=True, layout=layout)
    if reverse:
        o, state = o.flip(tokens), state if state is None or cu_seqlens is None else state.flip(0)
    return o, state


@torch.no_grad()
def _scores(q, k, v, g, scale):
    """scale · q_i k_j e^(G_i − G_j) for i ≥ j, [B, HV, T, T], as q."""
    kind, tokens, group = q.dtype, q.shape[1], v.shape[2] // q.shape[2]
    q, k = (t.to(_calls.wide(q)).repeat_interleave(group, 2).transpose(1, 2) for t in (q, k))
    scores = q @ k.mT * (q.shape[3]**-0.5 if scale is None else scale)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    if g is not None:
        sums = g.transpose(1, 2).double().clamp(min=-750).cumsum(2)  # e^-750 is 0
        differences = sums.unsqueeze(3) - sums.unsqueeze(2)
        scores *= differences.masked_fill_(later, -math.inf).to(scores.dtype).exp_()
    return scores.masked_fill_(later, 0).to(kind)
