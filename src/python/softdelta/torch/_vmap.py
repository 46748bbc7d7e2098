"""What torch.vmap needs: a call over a batch of calls.

A batch joins the call's own batch dimension, so that one call has the work of all, unless something of the call is one
for its whole batch: parameters whose gradients are sums, packed sequences, pages. Those calls run one after the other.
"""
from __future__ import annotations

import torch

from ._flat import ATTENTION, Flat

_Q, _MASK, _BIAS, _SINK = ATTENTION.places("q", "mask", "bias", "sink")
_SLOPES = ATTENTION.places("alibi_slopes", "bias_slopes")
_SCALES = ATTENTION.places("k_scale", "v_scale")
_LENGTHS = ATTENTION.places("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "block_table")


def rows(flat: Flat, shared: tuple[str, ...]):
    """batched(call, size, dims, tensors, wanted), which is call(*tensors) over a batch: results and their batch dimensions.
    tensors: the inputs, and what else begins with B or N. wanted: flags of flat.wanted, the gradients among the results.
    shared: inputs without a batch dimension."""
    once, packed = flat.places(*shared), flat.places(*(n for n in shared if n == "cu_seqlens"))

    def batched(call, size: int, dims, tensors: tuple, wanted=()):
        sums = any(w and n in shared for n, w in zip(flat.wanted, wanted))
        if sums or any(tensors[i] is not None for i in packed) or any(dims[i] is not None for i in once):
            return _one_by_one(call, size, dims, tensors)
        return _joined(call, size, dims, tensors, once)

    return batched


def attention(call, size: int, dims, tensors: tuple, wanted=()):
    """As rows, of AttentionInputs. A mask or bias that has no batch of its own gets one."""
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
