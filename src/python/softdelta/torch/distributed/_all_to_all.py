"""All to all: from some tokens of all heads to all tokens of some heads, and back.

    rank 0   tokens 0…  heads 0 1 2 3        tokens 0 1 2 3…  heads 0 1
    rank 1   tokens 2…  heads 0 1 2 3   →    tokens 0 1 2 3…  heads 2 3

A rank then computes its heads as one process does: the same bits. Heads are in dimension 2, rows in dimension 1."""
from __future__ import annotations

import math
from typing import Callable, Iterator, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ._ranks import Ranks, parts_of


class Cut(NamedTuple):
    """How a tensor is cut: the rows of each rank before, the heads of each rank after. A tensor with a single head for all
    heads goes to every rank as a whole."""
    rows: tuple[int, ...]
    heads: tuple[slice, ...]
    shared: bool = False


def cut(ranks: Ranks, rows, heads: int) -> Cut:
    if heads == 1:
        return Cut(tuple(rows), (slice(0, 1),) * ranks.size, True)
    return Cut(tuple(rows), tuple(parts_of(heads, ranks.size)))


def to_heads(ranks: Ranks, cuts: list[Cut], *tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, own rows, all heads, ..] → [B, all rows, own heads, ..], differentiable."""
    return ToHeads.apply(ranks, cuts, *tensors)


def to_rows(ranks: Ranks, cuts: list[Cut], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inverse of to_heads."""
    return ToRows.apply(ranks, cuts, *tensors)


class ToHeads(Function):
    @staticmethod
    def forward(ctx, ranks, cuts, *tensors):
        ctx.ranks, ctx.cuts = ranks, cuts
        return begin_to_heads(ranks, cuts, tensors)()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        return None, None, *_to_rows(ctx.ranks, ctx.cuts, gradients)


class ToRows(Function):
    @staticmethod
    def forward(ctx, ranks, cuts, *tensors):
        ctx.ranks, ctx.cuts = ranks, cuts
        return _to_rows(ranks, cuts, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        return None, None, *begin_to_heads(ctx.ranks, ctx.cuts, gradients)()


def begin_to_heads(ranks: Ranks, cuts, tensors) -> Callable[[], tuple]:
    """Starts the exchange. Returns a function that waits for it and returns the tensors."""
    def parts(t: Tensor, c: Cut):  # for each rank: its heads of these rows; and of its rows the heads of this one
        own = c.heads[ranks.rank]
        return [t[:, :, h] for h in c.heads], [_shape(t, rows, own.stop - own.start) for rows in c.rows]

    begun = _begin(ranks, tensors, cuts, parts)
    return lambda: tuple(_rows_joined(received, row) for received, row in _finish(ranks, begun))


def begin_to_rows(ranks: Ranks, cuts, tensors) -> Callable[[], Iterator[list[Tensor]]]:
    """Starts the inverse exchange. The function that is returned gives, for every tensor, the heads of each rank."""
    def parts(t: Tensor, c: Cut):
        begins = [sum(c.rows[:r]) for r in range(ranks.size)]
        return ([t[:, begin:begin + rows] for begin, rows in zip(begins, c.rows)],
                [_shape(t, c.rows[ranks.rank], h.stop - h.start) for h in c.heads])

    begun = _begin(ranks, tensors, cuts, parts)
    return lambda: (row for _, row in _finish(ranks, begun))


def _to_rows(ranks: Ranks, cuts, tensors) -> tuple:
    return tuple(_sum(row) if c.shared else torch.cat(row, 2)
                 for row, c in zip(begin_to_rows(ranks, cuts, tensors)(), cuts))


def _shape(t: Tensor, rows: int, heads: int) -> tuple:
    return t.shape[0], rows, heads, *t.shape[3:]


def _begin(ranks: Ranks, tensors, cuts, parts) -> list:
    """parts(tensor, cut) returns the tensors for each rank, and the shapes of the tensors from each rank. One tensor is
    being sent while the next is packed."""
    begun = []
    for t, c in zip(tensors, cuts):
        sends, shapes = parts(t, c)
        sizes = [part.numel() for part in sends]
        if t.shape[0] == 1 and t.is_contiguous() and sum(sizes) == t.numel() and all(
                part.is_contiguous() for part in sends) and not c.shared:
            sent = t.view(-1)  # rows of one sequence are already in the order in which they are sent
        else:
            sent = t.new_empty(sum(sizes))
            for part, to in zip(sends, sent.split(sizes)):
                to.view(part.shape).copy_(part)
        counts = [math.prod(shape) for shape in shapes]
        begun.append((*ranks.all_to_all(sent, sizes, counts), sent, shapes, counts))
    return begun


def _finish(ranks: Ranks, begun: list):
    """For every tensor: what was received, as one vector, and the part of each rank. Buffers are kept until they are
    sent."""
    for received, transfer, _, shapes, counts in begun:
        with ranks.naming("while tokens and heads were exchanged"):
            transfer.wait()
        yield received, [part.view(shape) for part, shape in zip(received.split(counts), shapes)]


def _rows_joined(received: Tensor, parts: list[Tensor]) -> Tensor:
    B, rows = parts[0].shape[0], sum(part.shape[1] for part in parts)
    if B == 1:  # parts are already in the order of the sequence
        return received.view(B, rows, *parts[0].shape[2:])
    return torch.cat(parts, 1)


def _sum(parts: list[Tensor]) -> Tensor:
    """The sum in the order of ranks, rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)
