"""The part of a tensor that a rank has."""
from __future__ import annotations

import torch
from torch import Tensor

from ._ranks import Ranks, described

ORDERS = ("contiguous", "zigzag")


def segments(ranks: int, rank: int, lengths: list[int], order: str) -> list[tuple[int, int]]:
    """(first, count) of the rows of a rank among all rows. "zigzag": all rows in 2P chunks, rank r has chunks r and
    2P − 1 − r, so that causal attention costs every rank the same."""
    if order == "contiguous":
        return [(sum(lengths[:rank]), lengths[rank])]
    half = lengths[rank] // 2
    return [(rank * half, half), ((2 * ranks - 1 - rank) * half, half)]


def expect_order(order) -> None:
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}, expected one of {', '.join(ORDERS)}")


def expect_zigzag(lengths: list[int]) -> None:
    if len(set(lengths)) > 1 or lengths[0] % 2:
        raise ValueError(f"ranks have {lengths} rows, expected one even number on all of them: order is zigzag")


def shard(x: Tensor, group=None, dim: int = 1, order: str = "contiguous") -> Tensor:
    """This rank's part of a tensor that every rank has. "contiguous": the rows of dimension `dim` cut as evenly as it
    goes, in the order of ranks. "zigzag": rank r has chunks r and 2P − 1 − r of 2P, for attention; the rows must be a
    multiple of 2P."""
    ranks = Ranks(group)
    count = x.shape[dim]
    expect_order(order)
    if order == "zigzag":
        if count % (2 * ranks.size):
            raise ValueError(f"dimension {dim} has {count} rows, expected a multiple of {2 * ranks.size}: order is zigzag")
        lengths = [count // ranks.size] * ranks.size
    else:
        lengths = [(r + 1) * count // ranks.size - r * count // ranks.size for r in range(ranks.size)]
    parts = [x.narrow(dim, first, n) for first, n in segments(ranks.size, ranks.rank, lengths, order)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@torch.no_grad()
def unshard(x: Tensor, group=None, dim: int = 1, order: str = "contiguous") -> Tensor:
    """The whole tensor on every rank, from each rank's part; without gradients."""
    ranks = Ranks(group)

    def check():
        expect_order(order)
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"dim is {dim}, expected a dimension of x, which has {x.dim()}")
        return {"x": x}, (x.shape[dim],), described({"x": x}, {"x": (dim % x.dim(),)}) | {
            "dim": dim % x.dim(), "order": order}

    lengths, dim = [n[0] for n in ranks.agree("unshard", {"x": x}, check).numbers], dim % x.dim()
    if order == "zigzag":
        expect_zigzag(lengths)
    padded = x.new_zeros((*x.shape[:dim], max(lengths), *x.shape[dim + 1:]))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = ranks.all_gather(padded, "while parts were gathered")
    whole = x.new_empty((*x.shape[:dim], sum(lengths), *x.shape[dim + 1:]))
    for r, part in enumerate(parts):
        at = 0
        for first, n in segments(ranks.size, r, lengths, order):
            whole.narrow(dim, first, n).copy_(part.narrow(dim, at, n))
            at += n
    return whole
