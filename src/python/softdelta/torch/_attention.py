"""Softmax attention under the signatures of torch and flash-attention."""
from __future__ import annotations

import torch
from torch import Tensor

from .. import _options
from .._records import AttentionInputs, AttentionOptions
from . import _ops
from ._families import SOFTMAX_ATTENTION
from ._route import expect_tensors

NONE, TOP_LEFT, BOTTOM_RIGHT = _options.CAUSAL.values()
MINUS_INFINITY, PLUS_INFINITY, ZERO = _options.EMPTY_ROW.values()
WHOLE = -1, -1  # the default window


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    bias: Tensor | None = None,
    window: tuple[int, int] = WHOLE,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    return_lse: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "bhtd",
) -> Tensor | tuple[Tensor, Tensor]:
    """torch.nn.functional.scaled_dot_product_attention, with gradients of the bias too, and more options.

    query [B, H, Lq, D], key [B, Hk, Lk, D], value [B, Hk, Lk, Dv]; B and H may be absent together or B alone. Hk may
    divide H with enable_gqa. attn_mask broadcasts to [B, H, Lq, Lk]: bool (True keeps) or a float bias. Both at once:
    the bool as attn_mask, the floats as bias. is_causal aligns top-left, as torch does, and may come with a mask.
    window (left, right): query i sees keys i−left … i+right of its diagonal (top-left with is_causal, else
    bottom-right), −1 is unbounded. softcap c: scores become c·tanh(s/c) before the bias. sink [H]: a logit that joins
    the softmax sum and has no value. A row that sees no key is 0. k_scale, v_scale [B|1, Hk|1, Lk|1, ·], for query
    [B, H, Lq, D]: key and value are numbers of 8 or 4 bits, as flash_attn_func has them but heads first; no gradients.
    layout="bthd": query, key, value and o are [B, L, H, ·], all of four dimensions.
    Returns o [B, H, Lq, Dv], and with return_lse lse [B, H, Lq], the natural logarithm of the sum of exponentials.
    """
    _refuse_dropout("dropout_p", dropout_p)
    _expect_operands(query, key, value)
    mask = None
    if bias is not None:
        expect_tensors(bias=bias)
    if attn_mask is not None:
        expect_tensors(attn_mask=attn_mask)
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        elif bias is not None:
            raise ValueError("attn_mask holds floats and bias is given, expected one of them")
        else:
            bias = attn_mask
    rank = query.dim()
    quantised = k_scale is not None or v_scale is not None
    if quantised and rank != 4:
        raise ValueError(f"query has {rank} dimensions, expected 4 with k_scale or v_scale: [B, H, Lq, D]")
    if not quantised and max(rank, key.dim(), value.dim()) > 4:
        raise ValueError(f"query, key and value have {rank}, {key.dim()} and {value.dim()} dimensions, expected 4 at most, "
                         "[B, H, L, D]: flatten what stands before H, as query.flatten(0, -4), and attn_mask too")
    if not quantised and (rank < 2 or key.dim() != rank or value.dim() != rank):
        raise ValueError(f"query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions, "
                         "expected 4 ([B, H, L, D]) or as many less, 2 at least")
    heads_first = _options.number_of(_options.LAYOUT, "layout", layout)
    if not heads_first and (rank != 4 or quantised):
        raise ValueError("layout is 'bthd', expected 'bhtd' with k_scale or v_scale" if quantised else
                         f"query has {rank} dimensions, expected 4 with layout 'bthd': [B, L, H, D]")
    for _ in range(4 - rank):
        query, key, value = query.unsqueeze(rank - 2), key.unsqueeze(rank - 2), value.unsqueeze(rank - 2)
        mask, bias = _with_head(mask), _with_head(bias)
    at = 1 if heads_first else 2
    heads, key_heads = query.shape[at], key.shape[at]
    if heads != key_heads and not enable_gqa:
        raise ValueError(f"key has {key_heads} heads, expected {heads} as query, or enable_gqa=True")
    inputs = AttentionInputs(query, key, value)
    if mask is not None or bias is not None or sink is not None:
        inputs = inputs._replace(mask=_to_rank_4(mask), bias=_to_rank_4(bias), sink=sink)
    left, right = _window(window)
    options = AttentionOptions(scale=_options.number("scale", scale), causal=TOP_LEFT if is_causal else NONE,
                               window_left=left, window_right=right, softcap=_options.number("softcap", softcap),
                               empty_row=MINUS_INFINITY, with_lse=bool(return_lse), heads_first=bool(heads_first) and not quantised)
    if quantised:
        q, k, v, k_scale, v_scale = (x if x is None else x.transpose(1, 2) for x in (query, key, value, k_scale, v_scale))
        o, lse = _quantised(inputs._replace(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale), options)
        o = o.transpose(1, 2)
    else:
        o, lse = _ops.call(SOFTMAX_ATTENTION, inputs, options)
    for _ in range(4 - rank):
        o, lse = o.squeeze(rank - 2), lse if lse is None else lse.squeeze(rank - 2)
    return (o, lse) if return_lse else o


def _with_head(t: Tensor | None) -> Tensor | None:
    """A mask for scores [B, Lq, Lk], for scores [B, 1, Lq, Lk]."""
    return t if t is None or t.dim() <= 2 else t.unsqueeze(-3)


def _to_rank_4(t: Tensor | None) -> Tensor | None:
    if t is None or t.dim() == 4:
        return t
    if t.dim() > 4:
        raise ValueError(f"attn_mask has {t.dim()} dimensions, expected 4 at most: [B, H, Lq, Lk]")
    return t[(None,) * (4 - t.dim())]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = WHOLE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "bthd",
):
    """flash-attention 2. q [B, Lq, H, D], k [B, Lk, Hk, D], v [B, Lk, Hk, Dv]; causal aligns bottom-right, and so does
    window_size (left, right). alibi_slopes [H] or [B, H] adds −slope·|i + Lk − Lq − j|; it has no gradient. Returns
    o [B, Lq, H, Dv]; with return_attn_probs (o, lse [B, H, Lq], None), where the lse of a row without keys is +∞. Always
    deterministic. dropout is refused.

    k_scale, v_scale, ours, floats [B|1, Lk|1, Hk|1, ·]: k, v are numbers of 8 or 4 bits, without gradients, and o is as
    q. int8 or float8_e4m3fn [.., D] with a scale for each row, head or tensor, [.., 1]; or blocks of 32 with a scale
    each, [.., D/32]: int8 [.., D/32, 32] (ggml's q8_0), or uint8 [.., D/32, 16] (its q4_0): byte b holds element b in
    its low half and element b + 16 in its high half, each plus 8. layout="bhtd", ours: q, k, v and o are [B, H, L, ·],
    without k_scale and v_scale."""
    _refuse_dropout("dropout_p", dropout_p)
    options = flash_options(softmax_scale, causal, window_size, softcap, return_attn_probs, layout)
    if options.heads_first and (k_scale is not None or v_scale is not None):
        raise ValueError("layout is 'bhtd', expected 'bthd' with k_scale or v_scale")
    inputs = AttentionInputs(q, k, v, alibi_slopes=alibi_slopes)
    if alibi_slopes is not None:
        expect_tensors(alibi_slopes=alibi_slopes)
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        inputs = inputs._replace(alibi_slopes=None, bias=_alibi_bias(alibi_slopes, q, k, options.heads_first))
    if k_scale is not None or v_scale is not None:
        o, lse = _quantised(inputs._replace(k_scale=k_scale, v_scale=v_scale), options)
    else:
        o, lse = _ops.call(SOFTMAX_ATTENTION, inputs, options)
    return (o, lse, None) if return_attn_probs else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = WHOLE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
):
    """flash-attention 2 for packed sequences. q [ΣLq, H, D], k [ΣLk, Hk, D], v [ΣLk, Hk, Dv], cu_seqlens [N+1].

    With block_table [N, max blocks] (int32) keys lie in a paged cache, k [blocks, block rows, Hk, D], v with Dv. Queries
    of prefill and decode may be packed side by side. There are no gradients. cu_seqlens_k tells how many keys each
    sequence has, or seqused_k [N] as vLLM has it. max_seqlen_q and max_seqlen_k are not needed here. alibi_slopes
    [H], not one for each sequence. k_scale, v_scale as flash_attn_func's, without its first dimension; those of a paged
    cache [blocks|1, block rows|1, Hk|1, ·]. Returns o [ΣLq, H, Dv]; with return_attn_probs (o, lse [H, ΣLq], None)."""
    _refuse_dropout("dropout_p", dropout_p)
    _expect_operands(q, k, v, ("q", "k", "v"))
    if (cu_seqlens_k is None) == (seqused_k is None):
        raise ValueError("expected one of cu_seqlens_k and seqused_k")
    if block_table is None and seqused_k is not None:
        raise ValueError("seqused_k is given, expected None without block_table: packed keys have cu_seqlens_k")
    options = flash_options(softmax_scale, causal, window_size, softcap, return_attn_probs)
    if block_table is None:
        inputs = AttentionInputs(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), cu_seqlens_q=cu_seqlens_q,
                                 cu_seqlens_k=cu_seqlens_k, alibi_slopes=alibi_slopes)
    else:
        expect_tensors(cu_seqlens_k=cu_seqlens_k)
        used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        inputs = AttentionInputs(q.unsqueeze(0), k, v, cu_seqlens_q=cu_seqlens_q, cache_seqlens=used,
                                 block_table=block_table, alibi_slopes=alibi_slopes)
    if k_scale is not None or v_scale is not None:
        if block_table is None:
            k_scale, v_scale = (x if x is None else x.unsqueeze(0) for x in (k_scale, v_scale))
        o, lse = _quantised(inputs._replace(k_scale=k_scale, v_scale=v_scale), options)
    else:
        o, lse = _ops.call(SOFTMAX_ATTENTION, inputs, options)
    return (o.squeeze(0), lse.squeeze(0), None) if return_attn_probs else o.squeeze(0)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux=None,
    scale: float | None = None,
    window_size: tuple[int, int] = WHOLE,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """torch.nn.attention.varlen.varlen_attn: flash_attn_varlen_func with torch's names. window_size (−1, 0) is causal, from
    the last key. Hk may divide H with enable_gqa. With block_table [N, max blocks] key and value are pages, and seqused_k
    says how many keys a sequence has. num_splits, max_q and max_k change nothing. Returns o [ΣLq, H, Dv], and with
    return_aux=AuxRequest(lse=True) lse [H, ΣLq]."""
    _expect_operands(query, key, value)
    if query.shape[-2] != key.shape[-2] and not enable_gqa:
        raise ValueError(f"key has {key.shape[-2]} heads, expected {query.shape[-2]} as query, or enable_gqa=True")
    if (block_table is None) != (seqused_k is None):
        raise ValueError("seqused_k or block_table is given alone, expected both or neither: slots of a cache are pages too, "
                         "key [N, slot rows, Hk, D] and block_table [[0], [1], …]")
    if block_table is None and cu_seq_k is None:
        raise ValueError("cu_seq_k is None, expected [N+1], or block_table and seqused_k")
    with_lse = bool(getattr(return_aux, "lse", False))
    results = flash_attn_varlen_func(query, key, value, cu_seq_q, cu_seq_k if block_table is None else None, max_q, max_k,
                                     softmax_scale=scale, window_size=window_size, return_attn_probs=with_lse,
                                     block_table=block_table, seqused_k=seqused_k)
    return results[:2] if with_lse else results


def flash_sparse_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    *,
    keep: int | None = None,
    layout: str = "bthd",
):
    """flash-dmattn (flash_dmattn_func), later called flash_sparse_attn_func: attention with a mask and a bias.

    query [B, Lq, H, D], key [B, Lk, Hk, D], value [B, Lk, Hk, Dv]; attn_mask bool and attn_bias float
    [B|1, H|Hk|1, Lq|1, Lk|1]. A float has a gradient. is_causal aligns bottom-right. keep, ours:
    each row keeps the `keep` largest biases among its allowed keys (dynamic masks, Shi et al. 2025). Returns
    o [B, Lq, H, Dv]; with return_attn_probs (o, lse [B, H, Lq], None), where the lse of a row without keys is +∞. Keys
    whose mask is false are not touched. layout as flash_attn_func's. Always deterministic."""
    expect_tensors(attn_mask=attn_mask)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise ValueError(f"attn_mask holds {attn_mask.dtype}, expected bool; floats to add are attn_bias")
    options = AttentionOptions(
        scale=_options.number("softmax_scale", softmax_scale), causal=BOTTOM_RIGHT if is_causal else NONE,
        softcap=_options.number("softcap", softcap or 0.0), empty_row=PLUS_INFINITY,
        top_w=-1 if keep is None else _options.whole("keep", keep), with_lse=bool(return_attn_probs),
        heads_first=bool(_options.number_of(_options.LAYOUT, "layout", layout)))
    inputs = AttentionInputs(query, key, value, mask=attn_mask, bias=attn_bias)
    o, lse = _ops.call(SOFTMAX_ATTENTION, inputs, options)
    return (o, lse, None) if return_attn_probs else o


# ----------------------------------------------------------------------------------------------------------------------


def flash_options(softmax_scale, causal, window_size, softcap, with_lse, layout="bthd") -> AttentionOptions:
    left, right = _window(window_size)
    return AttentionOptions(scale=_options.number("softmax_scale", softmax_scale),
                            causal=BOTTOM_RIGHT if causal else NONE, window_left=left, window_right=right,
                            softcap=_options.number("softcap", softcap), empty_row=PLUS_INFINITY,
                            with_lse=bool(with_lse),
                            heads_first=bool(_options.number_of(_options.LAYOUT, "layout", layout)))


def _quantised(inputs: AttentionInputs, options: AttentionOptions):
    """Attention to keys or values with scales."""
    for name, t in zip(inputs._fields, inputs):
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, expected none with k_scale or v_scale")
    return _ops.call(SOFTMAX_ATTENTION, inputs, options)


def _expect_operands(q, k, v, names=("query", "key", "value")) -> None:
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        return
    for name, t in zip(names, (q, k, v)):
        if t is None:
            raise ValueError(f"{name} is None, expected a tensor")
        expect_tensors(**{name: t})


def _window(window) -> tuple[int, int]:
    if window is WHOLE:
        return window
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window is {window!r}, expected two whole numbers (left, right), -1 where there is no end")
    left, right = window
    left = -1 if left is None else _options.whole("window", left)
    return left, -1 if right is None else _options.whole("window", right)


def _refuse_dropout(name: str, p: float) -> None:
    if p != 0.0:
        raise ValueError(f"{name} is {p}, expected 0: there is no dropout (drop elements of o, or call torch's own)")


def _alibi_bias(slopes: Tensor, q: Tensor, k: Tensor, heads_first: bool) -> Tensor:
    """Slopes [B, H] of each batch row as a bias [B, H, Lq, Lk]."""
    if heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    rows, keys = q.shape[1], k.shape[1]
    if slopes.shape != (q.shape[0], q.shape[2]):
        raise ValueError(f"alibi_slopes has shape {tuple(slopes.shape)}, expected ({q.shape[2]},) or "
                         f"({q.shape[0]}, {q.shape[2]}): a slope for each head, or for each batch row and head")
    keys_at = torch.arange(keys, device=q.device)
    distance = (torch.arange(keys - rows, keys, device=q.device)[:, None] - keys_at).abs()
    return -slopes.detach()[:, :, None, None] * distance
