"""All to all: from some tokens of all heads to all tokens of some heads, and back.

    rank 0   tokens 0…  heads 0 1 2 3        tokens 0 1 2 3…  heads 0 1
    rank 1   tokens 2…  heads 0 1 2 3   →    tokens 0 1 2 3…  heads 2 3

A rank then computes its heads as one process does: the same bits. Heads are in dimension 2, rows in dimension 1."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ._ranks import Ranks, parts_of


class Cut(NamedTuple):
    """How a tensor is cut: the rows that each rank has before, the heads that it has after. A tensor with one head for
    all goes to every rank whole."""
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
    """The way back."""
    return ToRows.apply(ranks, cuts, *tensors)


class ToHeads(Function):
    @staticmethod
    def forward(ctx, ranks, cuts, *tensors):
        ctx.ranks, ctx.cuts = ranks, cuts
        return _to_heads(ranks, cuts, tensors)

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
        return None, None, *_to_heads(ctx.ranks, ctx.cuts, gradients)


def _to_heads(ranks: Ranks, cuts, tensors) -> tuple:
    sends = [[t[:, :, c.heads[r]] for t, c in zip(tensors, cuts)] for r in range(ranks.size)]
    own = [c.heads[ranks.rank] for c in cuts]
    shapes = [[((t.shape[0], c.rows[r], h.stop - h.start, *t.shape[3:]), t.dtype) for t, c, h in zip(tensors, cuts, own)]
              for r in range(ranks.size)]
    received = ranks.exchange(sends, shapes)
    return tuple(torch.cat([row[i] for row in received], 1) for i in range(len(tensors)))


def _to_rows(ranks: Ranks, cuts, tensors) -> tuple:
    sends, shapes = [], []
    for r in range(ranks.size):
        sends.append([])
        shapes.append([])
        for t, c in zip(tensors, cuts):
            begin, heads = sum(c.rows[:r]), c.heads[r]
            sends[-1].append(t[:, begin:begin + c.rows[r]])
            shapes[-1].append(((t.shape[0], c.rows[ranks.rank], heads.stop - heads.start, *t.shape[3:]), t.dtype))
    received = ranks.exchange(sends, shapes)
    return tuple(_sum([row[i] for row in received]) if c.shared else torch.cat([row[i] for row in received], 2)
                 for i, c in enumerate(cuts))


def _sum(parts: list[Tensor]) -> Tensor:
    """In the order of ranks, rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)
