"""Mamba-2 (Dao and Gu 2024) under the names and signatures of mamba_ssm 2.3. It is simple GLA:

    q = C, k = B, whose groups are key heads; v = dt·x, g = dt·A, scale 1; D and z stand outside

x, z [B, T, H, P]; dt [B, T, H]; A, dt_bias [H]; B, C [B, T, G, N]; D [H] or [H, P]; states [B, H, P, N].
"""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _calls
from ._convolution import causal_conv1d_fn
from ._norm import rms_norm_gated
from ._route import expect_tensors
from ._simple_gla import chunk_simple_gla
from ._step import delta_step


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
):
    """S ← e^(dt A) S + dt x Bᵀ, y = S C + D x, times silu(z). All tensors have gradients.

    seq_idx [B, T] numbers the sequence of every token: initial states belong to the first one of a row, final states to
    the last. cu_seqlens [N+1], ours also without return_varlen_states: N sequences in a row, B = 1; initial states are
    theirs if there are N. chunk_size and state_dtype change nothing.

    Returns y [B, T, H, P], as x. With return_final_states also the states after the last token of each row; with
    return_varlen_states also those after each sequence of cu_seqlens. States are f32.
    """
    expect_tensors(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
                   cu_seqlens=cu_seqlens)
    if x.dim() != 4:
        raise ValueError(f"x has {x.dim()} dimensions, expected 4: [B, T, H, P]")
    rows, tokens, heads, size = x.shape
    for name, t, shape in (("dt", dt, (rows, tokens, heads)), ("A", A, (heads,)), ("z", z, x.shape),
                           ("dt_bias", dt_bias, (heads,)), ("seq_idx", seq_idx, (rows, tokens)), ("C", C, B.shape)):
        _expect_shape(name, t, shape)
    if B.dim() != 4 or B.shape[:2] != (rows, tokens) or B.shape[2] < 1 or heads % B.shape[2]:
        raise ValueError(f"B has shape {list(B.shape)}, expected [{rows}, {tokens}, G, N] with {heads} heads a multiple of G")
    if D is not None and D.shape not in ((heads,), (heads, size)):
        raise ValueError(f"D has shape {list(D.shape)}, expected [{heads}] or [{heads}, {size}]")
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("return_varlen_states is True, expected cu_seqlens with it")
    if cu_seqlens is not None and rows != 1:
        raise ValueError(f"x has {rows} rows, expected 1 with cu_seqlens")
    dt = _time_steps(dt, dt_bias, dt_softplus, _calls.wide(x))
    if tuple(dt_limit) != (0.0, math.inf) or not dt_softplus:
        dt = dt.clamp(*dt_limit)
    v, g = (x * dt.unsqueeze(-1)).to(x.dtype), dt * A.to(dt.dtype)
    bounds, states = cu_seqlens, initial_states
    if cu_seqlens is None and seq_idx is not None:
        begins = torch.ones_like(seq_idx, dtype=torch.bool)
        begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        begins = begins.flatten().nonzero().flatten()
        bounds = F.pad(begins, (0, 1), value=rows * tokens)
        C, B, v, g = (t.reshape(1, rows * tokens, *t.shape[2:]) for t in (C, B, v, g))
    if states is not None and bounds is not None and len(states) != len(bounds) - 1:
        first = torch.searchsorted(bounds, torch.arange(rows, device=bounds.device) * tokens)
        states = states.new_zeros(len(bounds) - 1, *states.shape[1:]).index_copy(0, first, states)
    y, last = chunk_simple_gla(C, B, v, g, scale=1.0, initial_state=states, state_v_first=True, cu_seqlens=bounds,
                               output_final_state=return_final_states or return_varlen_states)
    y = _skip_and_gate(y.view(x.shape), x, D if D is None or D.dim() == 2 else D.unsqueeze(-1), z)
    results = [y]
    if return_final_states:
        ends = torch.arange(1, rows + 1, device=x.device) * tokens
        results.append(last if bounds is None else last[torch.searchsorted(bounds, ends) - 1])
    if return_varlen_states:
        results.append(last)
    return y if len(results) == 1 else tuple(results)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor | None,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
):
    """All of a Mamba-2 layer behind its first projection: convolution of x, B and C, the scan with softplus(dt + dt_bias),
    the gate z, the norm of each group where rmsnorm_weight [H·P] is given (norm_before_gate: norm(y) · silu(z), else
    norm(y · silu(z))), and a product with outproj_weight [E, H·P]. All tensors have gradients.

    zxbcdt [B, T, 2 M + 2 H·P + 2 G·N + H] holds two halves of a gated MLP (M is mostly 0), z, x, B, C and dt.
    conv1d_weight is [H·P + 2 G·N, W], D [H, P], or [H] with headdim = P. chunk_size changes nothing.

    Returns [B, T, M + H·P], or [.., E]; with return_final_states also the states [B, H, P, N] in f32.
    """
    expect_tensors(zxbcdt=zxbcdt, conv1d_weight=conv1d_weight, D=D)
    if D.dim() == 1 and headdim is None:
        raise ValueError("headdim is None, expected the size of a head beside D [H]")
    heads, size = D.shape if D.dim() == 2 else (len(D), headdim)
    inner = heads * size
    of_states = len(conv1d_weight) - inner
    if of_states < 2 * ngroups or of_states % (2 * ngroups):
        raise ValueError(f"conv1d_weight has {len(conv1d_weight)} channels, expected {inner} and twice {ngroups} groups of states")
    _calls.refuse_rank("zxbcdt", zxbcdt, 3, "[B, T, channels]")
    mlp = zxbcdt.shape[-1] - 2 * inner - of_states - heads
    if mlp < 0 or mlp % 2:
        raise ValueError(f"zxbcdt has {zxbcdt.shape[-1]} channels, expected {2 * inner + of_states + heads}, or an even number more")
    gate, up, z, xBC, dt = zxbcdt.split([mlp // 2, mlp // 2, inner, inner + of_states, heads], -1)
    xBC = causal_conv1d_fn(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation).transpose(1, 2)
    x, B, C = xBC.split([inner, of_states // 2, of_states // 2], -1)
    x, B, C = x.unflatten(-1, (heads, size)), B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))
    y, states = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, None if rmsnorm_weight is not None else z.unflatten(-1, (heads, size)), dt_bias,
        initial_states, seq_idx, dt_softplus=True, dt_limit=dt_limit, return_final_states=True)
    y = y.flatten(2)
    if rmsnorm_weight is not None:
        y = _norm_of_groups(y, z, rmsnorm_weight, rmsnorm_eps, ngroups, norm_before_gate)
    if mlp:
        y = torch.cat((F.silu(gate) * up, y), -1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight.to(y.dtype), None if outproj_bias is None else outproj_bias.to(y.dtype))
    return (y, states) if return_final_states else y


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token: state [B, H, P, N] is changed where it is, or entries state_batch_indices [B] of a pool; −1: no
    sequence. x, z [B, H, P]; B, C [B, G, N]; D [H, P]. Of dt [B, H, P], A [H, P, N] and dt_bias [H, P] a head has one
    number, expanded, as Mamba-2 gives them; others are refused. Without heads all tensors lack the dimension H.
    No gradients.
    """
    expect_tensors(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    has_heads = state.dim() == 4
    if not has_heads:
        if state.dim() != 3:
            raise ValueError(f"state has {state.dim()} dimensions, expected 4: [B, H, P, N]")
        state, x, dt, B, C = (t.unsqueeze(1) for t in (state, x, dt, B, C))
        A, D, dt_bias = (t if t is None else t.unsqueeze(0) for t in (A, D, dt_bias))
        z = z if z is None else z.unsqueeze(1)
    _, heads, size, channels = state.shape
    for name, t, shape in (("x", x, (len(x), heads, size)), ("dt", dt, x.shape), ("A", A, (heads, size, channels)),
                           ("C", C, B.shape), ("D", D, (heads, size)), ("z", z, x.shape), ("dt_bias", dt_bias, (heads, size))):
        _expect_shape(name, t, shape)
    if B.dim() != 3 or B.shape[1] < 1 or heads % B.shape[1]:
        raise ValueError(f"B has shape {list(B.shape)}, expected [{len(x)}, G, {channels}] with {heads} heads a multiple of G")
    A, dt, dt_bias = _of_head("A", A, 2), _of_head("dt", dt, 1), _of_head("dt_bias", dt_bias, 1)
    dt = _time_steps(dt, dt_bias, dt_softplus, _calls.wide(x))
    v, g = (x * dt.unsqueeze(-1)).to(x.dtype), dt * A.to(dt.dtype)
    y = delta_step("simple_gla", *(t.unsqueeze(1) for t in (C, B, v)), state, g=g.unsqueeze(1), scale=1.0,
                   state_v_first=True, state_indices=state_batch_indices).squeeze(1)
    if D is not None and state_batch_indices is not None:
        x = x.masked_fill((state_batch_indices < 0).view(-1, 1, 1), 0)
    y = _skip_and_gate(y, x, D, z)
    return y if has_heads else y.squeeze(1)


def _time_steps(dt, bias, softplus, dtype):
    dt = dt.to(dtype)
    if bias is not None:
        dt = dt + bias.to(dtype)
    return F.softplus(dt) if softplus else dt


def _skip_and_gate(y, x, D, z):
    if D is not None:
        y = torch.addcmul(y, x, D).to(x.dtype)
    return y if z is None else (y * F.silu(z.to(_calls.wide(z)))).to(x.dtype)


def _norm_of_groups(y, z, weight, eps, groups, norm_before_gate):
    _expect_shape("rmsnorm_weight", weight, y.shape[-1:])
    if groups == 1 and norm_before_gate:
        return rms_norm_gated(y, z, weight, eps=eps)
    wide = _calls.wide(y)
    gate = F.silu(z.to(wide))
    rows = (y.to(wide) if norm_before_gate else y.to(wide) * gate).unflatten(-1, (groups, -1))
    rows = (rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight.to(wide)
    return (rows * gate if norm_before_gate else rows).to(y.dtype)


def _of_head(name, t, dims):
    """The number that stands in all places of a head's last dimensions."""
    if t is None:
        return None
    for dim in range(t.dim() - dims, t.dim()):
        if t.shape[dim] > 1 and t.stride(dim) != 0:
            raise ValueError(f"{name} has {t.shape[dim]} numbers along dimension {dim}, expected one for each head, expanded")
    return t[(..., *[0] * dims)]


def _expect_shape(name, t, shape):
    if t is not None and t.shape != tuple(shape):
        raise ValueError(f"{name} has shape {list(t.shape)}, expected {list(shape)}")
