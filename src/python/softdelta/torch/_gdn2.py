"""Gated DeltaNet-2 under the names and signatures of flash-linear-attention."""
from __future__ import annotations

import torch
from torch import Tensor

from .._records import DeltaInputs
from . import _calls
from ._delta_rules import GDN2, _flag, _gate, _old_layout, _refuse_rest, _run


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2: S ← diag(e^g) S, S ← S + k (w∘v − Sᵀ(b∘k))ᵀ. b, as k, erases by channel, w, as v, writes. The raw
    gate and the intermediate states are chunk_kda's."""
    state_v_first = _old_layout(kwargs, state_v_first)
    gate = _gate(use_gate_in_kernel, g, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None), lower_bound)
    _refuse_rest("chunk_gdn2", kwargs, cu_seqlens, cu_seqlens_cpu, (64,))
    return _run(GDN2, _inputs(q, k, v, g, b, w, initial_state, cu_seqlens, use_qk_l2norm_in_kernel), scale,
                output_final_state, gate=gate, v_first=state_v_first,
                state_interval=64 if return_intermediate_states else None,
                whatever_kept=_flag("disable_recompute", disable_recompute), layout=layout)


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """As chunk_gdn2, for decode; differentiable too."""
    state_v_first = _old_layout(kwargs, state_v_first)
    _refuse_rest("fused_recurrent_gdn2", kwargs)
    gate = _gate(use_gate_in_kernel, g, A_log, dt_bias, lower_bound)
    return _run(GDN2, _inputs(q, k, v, g, b, w, initial_state, cu_seqlens, use_qk_l2norm_in_kernel), scale,
                output_final_state, gate=gate, v_first=state_v_first, float_products=True, layout=layout)


def _inputs(q, k, v, g, b, w, initial_state, cu_seqlens, l2norm):
    """b∘k is of the normalised k, and has another norm: so rows are normalised here."""
    for name, x, like in (("b", b, k), ("w", w, v)):
        if x.shape != like.shape:
            raise ValueError(f"{name} has shape {list(x.shape)}, expected {list(like.shape)}")
    if _flag("use_qk_l2norm_in_kernel", l2norm):
        q, k = _normalised(q), _normalised(k)
    return DeltaInputs(q, k, (w * v).to(v.dtype), g=g, p=(b * k).to(k.dtype), initial_state=initial_state,
                       cu_seqlens=cu_seqlens)


def _normalised(x: Tensor) -> Tensor:
    wide = x.to(_calls.wide(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
