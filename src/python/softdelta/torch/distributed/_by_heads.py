"""A delta rule by all to all: each rank computes all tokens of some heads. It computes them in batches. While one batch is
computed, the operands of the next are received and the results of the previous one are sent.

    heads 0 1 of a rank   receive   compute   send
    heads 2 3                       receive   compute   send
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..._records import DELTA_ROWS, DELTA_SUMS, DELTA_WANTED, DeltaInputs, DeltaOptions
from .. import _calls
from .._flat import DELTA
from ._all_to_all import Cut, begin_to_heads, begin_to_rows
from ._plan import Heads, heads_of
from ._ranks import Ranks, parts_of

KEY_ROWS = ("q", "k", "p")
MOST_BATCHES = 4


class Call(NamedTuple):
    """What all ranks have agreed on."""
    ranks: Ranks
    options: DeltaOptions
    lengths: list[int]  # tokens of each rank
    has_initial_state: bool
    has_final_state: bool
    wanted: frozenset[str]  # whose gradients some rank wants
    cu_seqlens: Tensor | None
    batches: list[tuple[Heads, ...]]  # the heads of each rank


def batches_of(ranks: Ranks, key_heads: int, group: int, threads: int) -> list[tuple[Heads, ...]]:
    """A rank computes as many heads at once as it has threads, in a few batches. A GPU has one batch: it waits
    for a chain of chunks, and more heads hardly make that longer."""
    own = parts_of(key_heads, ranks.size)
    count = max(1, min(MOST_BATCHES, min(h.stop - h.start for h in own) // threads))
    parts = [[slice(h.start + p.start, h.start + p.stop) for p in parts_of(h.stop - h.start, count)] for h in own]
    return [tuple(Heads(p[i], slice(p[i].start * group, p[i].stop * group)) for p in parts) for i in range(count)]


def by_heads(call: Call, inputs: DeltaInputs):
    """Returns o [B, T, HV, V] of this rank, and on the last rank the final state; otherwise None."""
    return ByHeads.apply(call, *inputs)


class ByHeads(Function):
    @staticmethod
    def forward(ctx, call: Call, *inputs):
        ranks, inputs = call.ranks, DeltaInputs(*inputs)
        names = [n for n in DELTA_ROWS if getattr(inputs, n) is not None]
        tensors = [getattr(inputs, n) for n in names]
        if call.has_initial_state:  # as rows: initial states of the first rank, final states of the last
            names.append("initial_state")
            tensors.append(_states(call, inputs, inputs.initial_state))
        coming = [begin_to_heads(ranks, [_cut(call, inputs, n, heads) for n in names], tensors) for heads in call.batches]
        o = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
        state = _states(call, inputs, None, ranks.rank == ranks.size - 1) if call.has_final_state else None
        going, moved = [], []
        for heads, wait in zip(call.batches, coming):
            shared = heads_of(inputs, heads[ranks.rank], inputs.v.shape[2])
            own = dict(zip(names, wait()))
            if call.has_initial_state:
                own["initial_state"] = own["initial_state"].squeeze(0)
            moved.append(DeltaInputs(**own, **{n: getattr(shared, n) for n in DELTA_SUMS}, cu_seqlens=call.cu_seqlens))
            part, last = _calls.delta_forward(moved[-1], call.options._replace(output_final_state=call.has_final_state))
            results = [part] if last is None else [part, last.unsqueeze(0)]
            going.append(begin_to_rows(ranks, _result_cuts(call, inputs, heads), results))
        for heads, wait in zip(call.batches, going):
            for to, parts in zip((o, state), wait()):
                _fill(to, [h.values for h in heads], parts)
        ctx.call, ctx.names = call, names
        ctx.save_for_backward(*inputs, *(t for own in moved for t in own))
        return o, state.squeeze(0) if call.has_final_state and ranks.rank == ranks.size - 1 else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal_state):
        call, ranks, count = ctx.call, ctx.call.ranks, len(DeltaInputs._fields)
        saved = ctx.saved_tensors
        inputs, *moved = (DeltaInputs(*saved[i:i + count]) for i in range(0, len(saved), count))
        wanted = DELTA.wanted_of(ctx.needs_input_grad[1:])
        grads = dict(zip(DELTA_WANTED, _calls.empty_gradients(inputs, DELTA_WANTED, wanted)))
        incoming = [do] + [_states(call, inputs, dfinal_state)] * call.has_final_state
        coming = [begin_to_heads(ranks, _result_cuts(call, inputs, heads), incoming) for heads in call.batches]
        back = [n for n in ctx.names if n in call.wanted]
        each = [n in call.wanted for n in DELTA_WANTED]
        going = []
        for name in DELTA_SUMS:  # other ranks compute the gradients of their heads
            if grads[name] is not None:
                grads[name].zero_()
        for heads, own, wait in zip(call.batches, moved, coming):
            d_o, *d_state = wait()
            results = dict(zip(DELTA_WANTED, _calls.delta_backward(
                own, call.options, (), (d_o, d_state[0].squeeze(0) if d_state else None), each)))
            for name in DELTA_SUMS:
                if grads[name] is not None:
                    here = heads_of(DeltaInputs(**{name: grads[name]}), heads[ranks.rank], inputs.v.shape[2])
                    getattr(here, name).copy_(results[name])
            if "initial_state" in back:
                results["initial_state"] = results["initial_state"].unsqueeze(0)
            going.append(begin_to_rows(ranks, [_cut(call, inputs, n, heads) for n in back], [results[n] for n in back]))
        for heads, wait in zip(call.batches, going):
            for name, parts in zip(back, wait()):
                to = grads[name]
                if to is not None:
                    _fill(to.unsqueeze(0) if name == "initial_state" else to,
                          [h.keys if name in KEY_ROWS else h.values for h in heads], parts)
        return None, *DELTA.gradients([grads[n] for n in DELTA_WANTED])


def _cut(call: Call, inputs: DeltaInputs, name: str, heads: tuple[Heads, ...]) -> Cut:
    rows, B, P = call.lengths, inputs.q.shape[0], call.ranks.size
    if name == "initial_state":
        rows = [B if r == 0 else 0 for r in range(P)]
    elif name == "final_state":
        rows = [B if r == P - 1 else 0 for r in range(P)]
    return Cut(tuple(rows), tuple(h.keys if name in KEY_ROWS else h.values for h in heads))


def _result_cuts(call: Call, inputs: DeltaInputs, heads) -> list[Cut]:
    return [_cut(call, inputs, n, heads) for n in ("o", "final_state")[:1 + call.has_final_state]]


def _states(call: Call, inputs: DeltaInputs, given: Tensor | None, new: bool = False) -> Tensor:
    """States as rows [1, B, HV, K, V] on the rank that has them; other ranks have no rows."""
    wide = _calls.wide(inputs.q)
    if given is not None:
        return given.to(wide).unsqueeze(0)
    B, *sizes = _calls.state_shape(inputs.q, inputs.v, None, call.options.state_v_first)
    return inputs.q.new_empty((1, B if new else 0, *sizes), dtype=wide)


def _fill(to: Tensor, heads: list[slice], parts: list[Tensor]) -> None:
    for which, part in zip(heads, parts):
        to[:, :, which].copy_(part)
