"""What torch.vmap needs: a call over a batch of calls.

A batch joins the call's own batch dimension, so that one call has the work of all, unless something of the call is one
for its whole batch: parameters whose gradients are sums, packed sequences, pages. Those calls run one after the other.
"""
from __future__ import annotations

import torch

from .._records import DELTA_SUMS
from ._flat import ATTENTION, DELTA


_DELTA_ONCE = DELTA.places(*DELTA_SUMS, "cu_seqlens")  # there is one for the whole batch
_CU_SEQLENS, = DELTA.places("cu_seqlens")
_Q, _MASK, _BIAS, _SINK = ATTENTION.places("q", "mask", "bias", "sink")
_SLOPES = ATTENTION.places("alibi_slopes", "bias_slopes")
_SCALES = ATTENTION.places("k_scale", "v_scale")
_LENGTHS = ATTENTION.places("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "block_table")


def delta_rule(call, size: int, dims, tensors: tuple, wanted=()):
    """call(*tensors) over a batch: results and their batch dimensions. tensors: those of DeltaInputs, and what else begins
    with B or N. wanted: the gradients among the results, flags in the order of DELTA_WANTED."""
    sums = any(w and n in DELTA_SUMS for n, w in zip(DELTA.wanted, wanted))
    if sums or tensors[_CU_SEQLENS] is not None or any(dims[i] is not None for i in _DELTA_ONCE):
        return _one_by_one(call, size, dims, tensors)
    return _joined(call, size, dims, tensors, _DELTA_ONCE)


def attention(call, size: int, dims, tensors: tuple, wanted=()):
    """As delta_rule, of AttentionInputs. A mask or bias that has no batch of its own gets one."""
    sums = {n for n, w in zip(ATTENTION.wanted, wanted) if w}
    once = [_SINK, *_SLOPES]
    if ("sink" in sums or any(dims[i] is not None for i in once) or any(tensors[i] is not None for i in (*_LENGTHS, *_SCALES))
            or "bias" in sums and _batch(tensors[_BIAS], dims[_BIAS]) < _batch(tensors[_Q], dims[_Q])):
        return _one_by_one(call, size, dims, tensors)
    tensors, dims, batch = list(tensors), list(dims), _batch(tensors[_Q], dims[_Q])
    for i in (_MASK, _BIAS):
        x, d = tensors[i], dims[i]
        if x is None:
            continue
        if d is None and x.shape[0] == 1 and not (i == _BIAS and "bias" in sums):
            once.append(i)
        elif d is None:
            tensors[i] = x.expand(batch, *x.shape[1:])
        else:
            x = x.movedim(d, 0)
            tensors[i], dims[i] = x.expand(size, batch, *x.shape[2:]), 0
    return _joined(call, size, dims, tuple(tensors), once)


def layer(call, size: int, dims, tensors: tuple, once: tuple[int, ...], sums: bool):
    """As delta_rule, of a convolution or a norm. once: places of what has no batch; sums: whether gradients of those are
    wanted."""
    if sums or any(dims[i] is not None for i in once):
        return _one_by_one(call, size, dims, tensors)
    return _joined(call, size, dims, tensors, once)


def _batch(x, d) -> int:
    """The size of a tensor's own batch dimension."""
    return x.shape[1 if d == 0 else 0]


def _joined(call, size, dims, tensors, once):
    def join(x, d):
        x = x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
        return x.flatten(0, 1)

    results = call(*(x if x is None or i in once else join(x, d) for i, (x, d) in enumerate(zip(tensors, dims))))
    results = tuple(x if x is None else x.unflatten(0, (size, x.shape[0] // size)) for x in results)
    return results, _first(results)


def _one_by_one(call, size, dims, tensors):
    every = [call(*(x if d is None else x.select(d, i) for x, d in zip(tensors, dims))) for i in range(size)]
    results = tuple(x[0] if x[0] is None else torch.stack(x) for x in zip(*every))
    return results, _first(results)


def _first(results):
    return tuple(None if x is None else 0 for x in results)
