"""What torch.vmap needs: a call over a batch of calls.

A batch joins the call's own batch dimension, so that one call has the work of all, unless something of the call is one
for its whole batch: parameters whose gradients are sums, packed sequences, pages. Those calls run one after the other.
"""
from __future__ import annotations

import torch


def delta_rule(call, size: int, dims, tensors: tuple, sums=False):
    """call(*tensors) over a batch: results and their batch dimensions. tensors: DELTA_INPUTS, and what else begins with
    B or N. sums: whether gradients of g_gamma, A_log or dt_bias are among the results."""
    once = 4, 8, 9, 10  # g_gamma, A_log, dt_bias, cu_seqlens
    if sums or tensors[10] is not None or any(dims[i] is not None for i in once):
        return _one_by_one(call, size, dims, tensors)
    return _joined(call, size, dims, tensors, once)


def attention(call, size: int, dims, tensors: tuple, bias_sums=False, sink_sums=False):
    """As delta_rule, of ATTENTION_INPUTS. A mask or bias that has no batch of its own gets one."""
    once = [5]  # sink
    if (sink_sums or dims[5] is not None or any(t is not None for t in tensors[6:10])
            or bias_sums and _batch(tensors[4], dims[4]) < _batch(tensors[0], dims[0])):
        return _one_by_one(call, size, dims, tensors)
    tensors, dims, batch = list(tensors), list(dims), _batch(tensors[0], dims[0])
    for i in (3, 4):
        x, d = tensors[i], dims[i]
        if x is None:
            continue
        if d is None and x.shape[0] == 1 and not (i == 4 and bias_sums):
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
