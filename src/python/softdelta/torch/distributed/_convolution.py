"""The short causal convolution before a delta rule. A rank needs the width − 1 rows before its own: its halo."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from ... import _native
from ..._records import ConvolutionInputs, ConvolutionOptions
from .. import _calls
from .._convolution import causal_conv1d
from .._families import CAUSAL_CONVOLUTION
from .._route import autocast
from ._ranks import Ranks, described, to_check, with_gradients

ACTIVATIONS = (None, "silu")


@torch.compiler.disable
def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group=None,
                      activation: str | None = None, cu_seqlens=None) -> Tensor:
    """y_t = activation(bias + Σ_i weight_i x_{t−W+1+i}) of each channel, on a sequence of which each rank has a part.

    x [B, T, C], T of this rank; weight [C, W] and bias [C], the same on every rank; activation None or "silu".
    cu_seqlens [N+1] where packed sequences begin in the tokens of all ranks (B = 1). Returns y [B, T, C] as
    softdelta.torch.causal_conv1d: the same bits however the rows are shared. Every rank raises the same error, as
    attention's.
    """
    ranks, inputs, state = Ranks(group), ConvolutionInputs(x, weight, bias), {}

    def check():
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}, expected None or 'silu'")
        state["bounds"] = bounds = None if cu_seqlens is None else [int(b) for b in cu_seqlens]
        state["inputs"] = given = autocast(inputs, CAUSAL_CONVOLUTION.casts)
        _calls.refuse_rank("x", given.x, 3, "[B, T, C]")
        empty = to_check(given._replace(x=given.x[:, :0]))
        _native.convolution_forward(empty, ConvolutionOptions(), (torch.empty_like(empty.x), None), _calls.AUTOMATIC, 1, False)
        common = described(given._asdict(), {"x": (1,)}) | {"activation": activation, "cu_seqlens": bounds}
        return given._asdict(), (given.x.shape[1],), common

    numbers, wanted = ranks.agree("short_convolution", inputs._asdict(), check)
    x, weight, bias, *_ = with_gradients(state["inputs"], wanted)
    bounds, lengths = state["bounds"], [n[0] for n in numbers]
    if bounds is not None and (bounds[:1] != [0] or sorted(bounds) != bounds or bounds[-1] != sum(lengths)):
        raise ValueError(f"cu_seqlens is {bounds}, expected numbers that ascend from 0 to {sum(lengths)}, the tokens of "
                         "all ranks")
    halo = Halo.apply(ranks, lengths, weight.shape[1] - 1, x)
    if bounds is not None:
        halo, bounds = _own_sequences(halo, bounds, sum(lengths[:ranks.rank]), x.shape[1])
    state = halo.transpose(1, 2) if weight.shape[1] > 1 else None
    return causal_conv1d(x, weight, bias, initial_state=state, activation=activation, cu_seqlens=bounds)[0]


def _own_sequences(halo: Tensor, bounds: list[int], first: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The states before the sequences among this rank's tokens [first, first + tokens), and their cu_seqlens. The first
    sequence may have begun on another rank: its state is the halo. The others begin here, with zeros."""
    inside = [b - first for b in bounds if first < b < first + tokens]
    begun = max((b for b in bounds if b <= first), default=0)
    unseen = max(halo.shape[1] - (first - begun), 0)
    own = torch.nn.functional.pad(halo[:, unseen:], (0, 0, unseen, 0))
    return (torch.cat([own, own.new_zeros((len(inside), *own.shape[1:]))]),
            torch.tensor([0, *inside, tokens], dtype=torch.int64))


class Halo(Function):
    """The `count` rows before those of this rank, [B, count, C]; zeros before the first row of all."""

    @staticmethod
    def forward(ctx, ranks: Ranks, lengths: list[int], count: int, x: Tensor):
        ctx.ranks, ctx.lengths, ctx.count = ranks, lengths, count
        ctx.save_for_backward(x)
        halo = x.new_zeros((x.shape[0], count, x.shape[2]))
        if count == 0:
            return halo
        tail = torch.zeros_like(halo)
        own = min(count, x.shape[1])
        tail[:, count - own:] = x[:, x.shape[1] - own:]
        tails = ranks.all_gather(tail, "while rows before were gathered")
        for at, rank, row in _sources(lengths, count, ranks.rank):
            halo[:, at] = tails[rank][:, row]
        return halo

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dhalo):
        ranks, count, (x,) = ctx.ranks, ctx.count, ctx.saved_tensors
        wide = _calls.wide(x)
        dx = torch.zeros_like(x, dtype=wide)
        if count > 0:
            halos = ranks.all_gather(dhalo, "while gradients of rows before were gathered")
            for later in range(ranks.rank + 1, ranks.size):
                for at, rank, row in _sources(ctx.lengths, count, later):
                    if rank == ranks.rank:
                        dx[:, x.shape[1] - count + row] += halos[later][:, at].to(wide)
        return None, None, None, dx.to(x.dtype)


def _sources(lengths: list[int], count: int, rank: int):
    """(row of the halo of `rank`, rank that has it, row of that one's tail)."""
    at = count
    for before in range(rank - 1, -1, -1):
        for back in range(min(count, lengths[before])):
            at -= 1
            if at < 0:
                return
            yield at, before, count - 1 - back
