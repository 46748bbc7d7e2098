"""flash-attention's function for decode: new keys and values go into a cache, then queries read it."""
from __future__ import annotations

import torch
from torch import Tensor

from .. import _options
from .._records import AttentionInputs
from . import _ops, _route
from ._attention import flash_options
from ._calls import refuse_rank
from ._families import SOFTMAX_ATTENTION


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    layout: str = "bthd",
):
    """flash-attention 2, decode. q [B, Lq, H, D]; k_cache [B, rows, Hk, D] and v_cache with Dv, or with block_table
    [B, max blocks] pages [blocks, block rows, Hk, ·]. With cache_batch_idx [B] they are rows of a larger cache. cache_seqlens [B]
    or one number: keys in use, all by default.

    k, v [B, new, Hk, ·] are written behind them, where the caches are, before q reads; cache_seqlens does not change.
    causal, window_size and alibi_slopes [H] count from the last key. num_splits changes nothing. No gradients. Rotary
    embeddings and cache_leftpad are refused. layout="bhtd", ours: all of these, o too, have heads before rows. Returns o [B, Lq, H, Dv]; with return_softmax_lse
    (o, lse [B, H, Lq])."""
    for name, t, instead in (("rotary_cos", rotary_cos, "rotate q and k before the call"),
                             ("rotary_sin", rotary_sin, "rotate q and k before the call"),
                             ("cache_leftpad", cache_leftpad, "let the keys of a sequence begin at row 0")):
        if t is not None:
            raise ValueError(f"{name} is given, expected None: {instead}")
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if t is not None or name not in "kv":
            refuse_rank(name, t, 4, "[B, L, H, D]")
    _route.expect_tensors(alibi_slopes=alibi_slopes, cache_batch_idx=cache_batch_idx, block_table=block_table)
    if (k is None) != (v is None):
        raise ValueError("k or v is given alone, expected both or neither")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None, expected the keys in use: k and v go behind them")
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        raise ValueError(f"alibi_slopes has {alibi_slopes.dim()} dimensions, expected 1: [H]")
    if cache_batch_idx is not None and block_table is not None:
        raise ValueError("cache_batch_idx is given, expected None with block_table")
    if _route.needs_gradient((q, k_cache, v_cache, k, v)):
        raise ValueError("a tensor requires a gradient, expected none: a cache has no gradients")
    if _options.number_of(_options.LAYOUT, "layout", layout):
        results = flash_attn_with_kvcache(
            *(t if t is None else t.transpose(1, 2) for t in (q, k_cache, v_cache, k, v)), None, None, cache_seqlens,
            cache_batch_idx, None, block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved,
            alibi_slopes, num_splits, return_softmax_lse)
        return (results[0].transpose(1, 2), results[1]) if return_softmax_lse else results.transpose(1, 2)
    options = flash_options(softmax_scale, causal, window_size, softcap, return_softmax_lse)
    if cache_batch_idx is not None:  # a row of the cache is a page
        block_table = cache_batch_idx.unsqueeze(1)
        if cache_seqlens is None:
            cache_seqlens = k_cache.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    used = cache_seqlens
    if k is not None:
        tensors = k_cache, v_cache, k, v, cache_seqlens, block_table
        way = _route.route(tensors)
        if way == _route.TRANSFORMED:
            raise ValueError("the call stands in a transform (torch.func, torch.vmap), expected none: it changes its caches "
                             "in place")
        (_append if way == _route.PLAIN else torch.ops.softdelta.append_to_cache)(*tensors)
        used = cache_seqlens + k.shape[1]
    o, lse = _ops.call(SOFTMAX_ATTENTION, AttentionInputs(q, k_cache, v_cache, cache_seqlens=used, block_table=block_table,
                                                          alibi_slopes=alibi_slopes), options)
    return (o, lse) if return_softmax_lse else o


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor,
            block_table: Tensor | None) -> None:
    """Writes k, v [B, new, Hk, ·] behind the keys in use, after all checks."""
    batch, new = k.shape[:2]
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if t.shape != (batch, new, *cache.shape[2:]) or t.dtype != cache.dtype:
            raise ValueError(f"{name} is {t.dtype} {list(t.shape)}, expected {cache.dtype} "
                             f"{[batch, new, *cache.shape[2:]]}, as {name}_cache has rows")
    if v_cache.shape[:2] != k_cache.shape[:2]:
        raise ValueError(f"v_cache has shape {list(v_cache.shape)}, expected {list(k_cache.shape[:2])} first, as k_cache")
    table = torch.arange(batch, device=k.device).unsqueeze(1) if block_table is None else block_table.long()
    for name, t, shape in (("cache_seqlens", cache_seqlens, [batch]), ("block_table", table, [batch, table.shape[-1]])):
        if list(t.shape) != shape:
            raise ValueError(f"{name} has shape {list(t.shape)}, expected {shape}")
    if block_table is None and k_cache.shape[0] != batch:
        raise ValueError(f"k_cache has {k_cache.shape[0]} sequences, expected {batch}, as k")
    rows = k_cache.shape[1]
    capacity = rows * table.shape[1]
    if k.is_cpu and batch:  # a GPU would have to be waited for: there torch's own assertions speak
        least, most = (int(n) for n in cache_seqlens.aminmax())
        if least < 0 or most + new > capacity:
            raise ValueError(f"cache_seqlens holds {least if least < 0 else most}, expected 0 to {capacity - new}: the cache "
                             f"has {capacity} rows for each sequence, and k brings {new}")
    at = cache_seqlens.long().unsqueeze(1) + torch.arange(new, device=k.device)
    pages = table.gather(1, at // rows)
    if k.is_cpu and pages.numel():
        least, most = (int(n) for n in pages.aminmax())
        if least < 0 or most >= k_cache.shape[0]:
            raise ValueError(f"block_table names page {least if least < 0 else most}, expected 0 to {k_cache.shape[0] - 1} "
                             "where k is written")
    for cache, t in ((k_cache, k), (v_cache, v)):
        cache.index_put_((pages, at % rows), t)


@torch.library.custom_op("softdelta::append_to_cache", mutates_args=("k_cache", "v_cache"), device_types=_ops.DEVICES)
def _append_op(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor,
               block_table: Tensor | None) -> None:
    _append(k_cache, v_cache, k, v, cache_seqlens, block_table)


_append_op.register_fake(lambda *_: None)
