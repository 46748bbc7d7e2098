"""Softmax attention on sequences that ranks share."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import _native, _options
from ..._records import AttentionInputs, AttentionOptions
from .. import _calls, _ops
from .._families import SOFTMAX_ATTENTION
from .._route import autocast
from ._all_to_all import cut, to_heads, to_rows
from ._ranks import Ranks, described, parts_of, to_check, with_gradients
from ._ring import ring
from ._shards import ORDERS, expect_zigzag, segments

METHODS = ("auto", "ring", "heads")
_ROWS = {"q": (1,), "k": (1,), "v": (1,), "mask": (2, 3), "bias": (2, 3)}  # dimensions that ranks share, or have either way


class Rows(NamedTuple):
    """The rows of every rank: (first, count) of each of its segments, in the order in which its tensors hold them."""
    queries: list[list[tuple[int, int]]]
    keys: list[list[tuple[int, int]]]

    @staticmethod
    def total(of) -> int:
        return sum(n for rank in of for _, n in rank)


@torch.compiler.disable
def attention(q: Tensor, k: Tensor, v: Tensor, *, group=None, method: str = "auto", order: str = "contiguous",
              mask: Tensor | None = None, bias: Tensor | None = None, sink: Tensor | None = None,
              scale: float | None = None, causal: str = "none", window_left: int = -1, window_right: int = -1,
              softcap: float = 0.0, top_w: int = -1) -> tuple[Tensor, Tensor]:
    """softdelta.attention_forward with gradients, on sequences of which each rank of `group` has a part.

    group       a ProcessGroup, a DeviceMesh of one dimension, or None, which is all processes
    q           [B, Lq, H, D], Lq of this rank; k [B, Lk, Hk, D]; v [B, Lk, Hk, Dv]
    mask, bias  [B|1, H|Hk|1, Lq|1, Lk|1]: this rank's queries, the keys of all ranks in the order of the sequence
    sink        [H], the same on every rank
    order       "contiguous": rank 0 has the first rows, the next rank those that follow
                "zigzag": rank r has chunks r and 2P − 1 − r of 2P (shard(…, order="zigzag")): causal attention then
                costs every rank the same
    method      "ring"   keys travel from rank to rank, each adds what its queries take of them (f32, in one order)
                "heads"  all to all: each rank computes all rows of some heads. The bits of one process; Hk ≥ P
                "auto"   heads where P ≤ Hk or top_w is used, else ring
    scale, causal, window_left, window_right, softcap, top_w  as attention_forward's, in positions of the whole sequence

    Returns o [B, Lq, H, Dv] and lse [B, H, Lq] of this rank. The ring refuses top_w, and rows whose |lse| is beyond
    1024, where f32 no longer tells what each rank adds: expected there is "heads". Every rank raises the same error,
    which names a rank whose arguments do not fit: a ValueError, or of the class that its checks raised. After Liu et al.
    2023 (ring attention), Jacobs et al. 2023 (heads), Brandon et al. 2023 (striped orders).
    """
    ranks = Ranks(group)
    inputs = AttentionInputs(q=q, k=k, v=v, mask=mask, bias=bias, sink=sink)
    state: dict = {}

    def check():
        state["options"] = options = AttentionOptions(
            scale=_options.number("scale", scale), causal=_options.number_of(_options.CAUSAL, "causal", causal),
            window_left=_options.whole("window_left", window_left),
            window_right=_options.whole("window_right", window_right), softcap=_options.number("softcap", softcap),
            top_w=_options.whole("top_w", top_w))
        state["inputs"] = x = autocast(inputs, SOFTMAX_ATTENTION.casts)
        return x._asdict(), *_check(x, options, method, order)

    numbers, wanted = ranks.agree("attention", inputs._asdict(), check)
    options, x = state["options"], with_gradients(state["inputs"], wanted)
    query_counts, key_counts = [n[0] for n in numbers], [n[1] for n in numbers]
    if order == "zigzag":
        expect_zigzag(query_counts)
        expect_zigzag(key_counts)
    rows = Rows(*([segments(ranks.size, r, counts, order) for r in range(ranks.size)]
                  for counts in (query_counts, key_counts)))
    planes = _check_planes(numbers, query_counts, sum(key_counts))
    by_heads = ranks.size <= x.k.shape[2]
    if method == "heads" and not by_heads:
        raise ValueError(f"k has {x.k.shape[2]} heads, expected {ranks.size} at least, one for each rank: method is "
                         "heads")
    if method == "ring" and options.top_w >= 0:
        raise _native.Unsupported("top_w selects among all keys, expected method heads")
    if method == "heads" or method == "auto" and (by_heads or options.top_w >= 0):
        if not by_heads:
            raise _native.Unsupported(f"top_w selects among all keys, expected as many key heads as ranks, "
                                      f"{ranks.size}")
        return _by_heads(ranks, x, options, rows, planes)
    return ring(ranks, rows, options, x)


def _check(x: AttentionInputs, options: AttentionOptions, method, order):
    """Checks this rank's arguments. Returns its numbers, and what must be equal on all ranks."""
    for name, value, names in (("method", method, METHODS), ("order", order, ORDERS)):
        if value not in names:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(names)}")
    for name in ("q", "k", "v"):
        t = getattr(x, name)
        if t is None or t.dim() != 4:
            raise ValueError(f"{name} has shape {None if t is None else list(t.shape)}, expected 4 dimensions")
    if x.v.shape[1] != x.k.shape[1]:
        raise ValueError(f"v has {x.v.shape[1]} rows, expected {x.k.shape[1]}, as k")
    queries = x.q.shape[1]
    for name in ("mask", "bias"):
        t = getattr(x, name)
        if t is not None and (t.dim() != 4 or t.shape[2] not in (1, queries)):
            raise ValueError(f"{name} has shape {list(t.shape)}, expected 1 or {queries} rows in dimension 2, as q")
    empty = x._replace(q=x.q[:, :0], k=x.k[:, :0], v=x.v[:, :0], mask=_without_rows(x.mask), bias=_without_rows(x.bias))
    empty = to_check(empty)
    o = torch.empty((*empty.q.shape[:3], x.v.shape[3]), dtype=x.v.dtype)
    _native.attention_forward(empty, options, (o,), _calls.AUTOMATIC, 1, False)  # its checks
    common = described(x._asdict(), _ROWS) | {n: str(o) for n, o in options._asdict().items()}
    planes = [n for t in (x.mask, x.bias) for n in ((-1, -1) if t is None else t.shape[2:])]
    return (queries, x.k.shape[1], *planes), common | {"order": order, "method": method}


class _Plane(NamedTuple):
    """What ranks have of a mask or bias."""
    own_rows: bool  # each has the rows of its own queries; otherwise all have the same single row
    columns: int    # 1, or the keys of all ranks; where own rows may be narrower on some ranks, the wider


def _check_planes(numbers, queries: list[int], keys: int) -> dict[str, _Plane]:
    found = {}
    for name, at in (("mask", 2), ("bias", 4)):
        planes = [n[at:at + 2] for n in numbers]
        own = [rows for rows, _ in planes] == queries
        for r, (rows, columns) in enumerate(planes):
            if columns not in (-1, 1, keys):
                raise ValueError(f"rank {r}: {name} has {columns} keys, expected 1 or {keys}, those of all ranks")
            if rows not in (-1, 1) and not own:
                raise ValueError(f"rank {r}: {name} has {rows} rows, expected {queries[r]} on it and as many as queries "
                                 "on every other rank, or 1 everywhere")
            if columns != planes[0][1] and not own:
                raise ValueError(f"rank {r}: {name} has {columns} keys, expected {planes[0][1]}, as on rank 0: all ranks have "
                                 "the same row")
        found[name] = _Plane(own, keys if any(columns == keys for _, columns in planes) else 1)
    return found


def _without_rows(t: Tensor | None) -> Tensor | None:
    if t is None:
        return None
    return t[:, :, :1 if t.shape[2] == 1 else 0, :1 if t.shape[3] == 1 else 0]


def _by_heads(ranks: Ranks, x: AttentionInputs, options: AttentionOptions, rows: Rows, shared: dict[str, _Plane]):
    H, Hk = x.q.shape[2], x.k.shape[2]
    key_heads = parts_of(Hk, ranks.size)
    counts = [[sum(n for _, n in rank) for rank in of] for of in rows]

    def with_heads(of, heads: int):
        whole = cut(ranks, of, heads)
        if heads == 1 and Hk > 1:
            return whole
        return whole._replace(shared=False, heads=tuple(slice(h.start * heads // Hk, h.stop * heads // Hk)
                                                         for h in key_heads))

    tensors, cuts = [x.q, x.k, x.v], [with_heads(counts[0], H), with_heads(counts[1], Hk), with_heads(counts[1], Hk)]
    planes = {}
    for name in ("mask", "bias"):
        t = getattr(x, name)
        if t is None:
            continue
        if not shared[name].own_rows:
            planes[name] = t[:, with_heads(counts[0], t.shape[1]).heads[ranks.rank]]
        else:
            planes[name] = len(tensors)
            tensors.append(t.expand(*t.shape[:3], shared[name].columns).transpose(1, 2))
            cuts.append(with_heads(counts[0], t.shape[1]))
    moved = to_heads(ranks, cuts, *tensors)
    to_sequence = [_order(of) for of in rows]
    q = _permuted(moved[0], to_sequence[0])
    k, v = (_permuted(t, to_sequence[1]) for t in moved[1:3])
    for name, at in planes.items():
        if isinstance(at, int):
            planes[name] = _permuted(moved[at], to_sequence[0]).transpose(1, 2)
    own = key_heads[ranks.rank]
    sink = None if x.sink is None else x.sink[own.start * H // Hk:own.stop * H // Hk]
    o, lse = _ops.call(SOFTMAX_ATTENTION, AttentionInputs(q=q, k=k, v=v, sink=sink, **planes), options)
    back = None if to_sequence[0] is None else torch.argsort(to_sequence[0])
    o, lse = to_rows(ranks, [with_heads(counts[0], H)] * 2, _permuted(o, back),
                     _permuted(lse.transpose(1, 2), back))
    return o, lse.transpose(1, 2)


def _order(of) -> Tensor | None:
    """For each row of the sequence its place among the rows of rank 0, rank 1 and so on; None: the order is the same."""
    rows = [i for rank in of for first, n in rank for i in range(first, first + n)]
    return None if rows == list(range(len(rows))) else torch.argsort(torch.tensor(rows))


def _permuted(t: Tensor, order: Tensor | None) -> Tensor:
    return t if order is None else t.index_select(1, order.to(t.device))
