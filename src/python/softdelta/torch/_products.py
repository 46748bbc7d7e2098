"""Rules whose tokens have several steps, under the names and signatures of flash-linear-attention: the gated delta
product, the diagonal plus low rank transition (DPLR), and RWKV-7, which is one."""
from __future__ import annotations

import torch
from torch import Tensor

from .._records import DeltaInputs
from ._delta_rules import DPLR, GATED_DELTA_PRODUCT, _refuse_rest, _run


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaProduct (Siems et al. 2025): after its gate a token takes num_householder steps of the delta rule, each with
    a row of k, v and beta: k [B, n·T, H, K], step after step. cu_seqlens counts tokens."""
    _refuse_rest("chunk_gated_delta_product", {}, cu_seqlens, cu_seqlens_cpu)
    inputs = DeltaInputs(q, k, v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(GATED_DELTA_PRODUCT, inputs, scale, output_final_state, l2norm=use_qk_l2norm_in_kernel,
                steps=num_householder)


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context=None,
    lower_bound: float | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """S ← diag(e^gk) S + b (aᵀS) + k vᵀ, of the state before. gk, a, b, k [B, T, H, K]."""
    _refuse_rest("chunk_dplr_delta_rule", kwargs, cu_seqlens, cu_seqlens_cpu)
    if cp_context is not None:
        raise ValueError("cp_context is given, expected None: ranks do not share this rule")
    return _dplr(q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As chunk_dplr_delta_rule, for decode; differentiable too."""
    if reverse:
        raise ValueError("reverse is True, expected False")
    return _dplr(q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens, float_products=True)


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context=None,
    lower_bound: float | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """RWKV-7 (Peng et al. 2025): chunk_dplr_delta_rule with r for q and w for gk."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu,
                                 cp_context=cp_context, **kwargs)


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """As chunk_rwkv7, for decode; the scale is K^-1/2 by default."""
    _refuse_rest("fused_recurrent_rwkv7", kwargs)
    return fused_recurrent_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state,
                                           cu_seqlens=cu_seqlens)


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """fused_recurrent_rwkv7 with a = −kk and b = kk∘a."""
    _refuse_rest("fused_mul_recurrent_rwkv7", kwargs)
    return fused_recurrent_dplr_delta_rule(r, k, v, -kk, kk * a, w, scale, initial_state, output_final_state, reverse,
                                           cu_seqlens)


def _dplr(q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens, float_products=False):
    """Two steps: b takes in −pᵀS with p = −a; then k takes in v, and nothing is erased."""
    for name, x in (("a", a), ("b", b)):
        if x.shape != k.shape:
            raise ValueError(f"{name} has shape {list(x.shape)}, expected {list(k.shape)}")
    inputs = DeltaInputs(q, _steps(b.to(k.dtype), k), _steps(None, v), g=gk, p=_steps(-a.to(k.dtype), None),
                         initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(DPLR, inputs, scale, output_final_state, float_products=float_products, steps=2)


def _steps(first: Tensor | None, second: Tensor | None) -> Tensor:
    """[B, 2T, ..]: rows of both, alternating; None: zeros."""
    like = second if first is None else first
    pair = [torch.zeros_like(like) if x is None else x for x in (first, second)]
    return torch.stack(pair, 2).flatten(1, 2)
