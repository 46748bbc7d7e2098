"""States handed from rank to rank: rank r computes groups of heads in order and hands the states of one on while it
computes the next. The bits of one process, where ranks begin at multiples of 64 tokens.

    rank 0:  g0 g1 g2 g3
    rank 1:     g0 g1 g2 g3            idle: P − 1 of groups + P − 1 steps
    rank 2:        g0 g1 g2 g3

Backward runs from the last rank to the first."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from ... import _native
from ..._records import DELTA_WANTED, DeltaInputs
from .. import _calls
from .._flat import DELTA
from ._plan import Plan, heads_of


def relay(plan: Plan, inputs: DeltaInputs):
    return Relay.apply(plan, *inputs)


class Relay(Function):
    @staticmethod
    def forward(ctx, plan: Plan, *inputs):
        inputs = DeltaInputs(*inputs)
        state, o = plan.new_states(inputs), torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
        entering = plan.entering(inputs)
        transfers = _Transfers(plan)
        for heads in plan.head_groups(inputs):
            if plan.enters:
                transfers.receive(entering[plan.first, heads.values], plan.ranks.rank - 1)
            part = heads_of(inputs._replace(initial_state=entering), heads, plan.size_of_gate(inputs))
            _native.delta_forward(part, plan.options, (o[:, :, heads.values], state[:, heads.values]),
                                  _calls.AUTOMATIC, _calls.threads(), False)
            if plan.leaves:
                transfers.send(state[plan.last, heads.values], plan.ranks.rank + 1)
        transfers.finish()
        ctx.plan = plan
        ctx.save_for_backward(*inputs, entering)
        return o, (state if plan.has_final_state else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal_state):
        plan = ctx.plan
        *inputs, entering = ctx.saved_tensors
        inputs = DeltaInputs(*inputs)
        wanted = list(DELTA.wanted_of(ctx.needs_input_grad[1:]))
        grads = _calls.empty_gradients(inputs, DELTA_WANTED, wanted)
        d_entering = plan.new_states(inputs)
        leaving = plan.leaving_gradient(inputs, dfinal_state if plan.has_final_state else None)
        transfers = _Transfers(plan)
        for heads in plan.head_groups(inputs):
            if plan.leaves:
                transfers.receive(leaving[plan.last, heads.values], plan.ranks.rank + 1)
            size = plan.size_of_gate(inputs)
            part = heads_of(inputs._replace(initial_state=entering), heads, size)
            results = heads_of(DELTA.inputs(*DELTA.gradients(grads))._replace(initial_state=d_entering), heads, size)
            _native.delta_backward(part, plan.options,
                                   (do[:, :, heads.values], leaving[:, heads.values],
                                    *(getattr(results, n) for n in DELTA_WANTED)), _calls.AUTOMATIC, _calls.threads(),
                                   False)
            if plan.enters:
                transfers.send(d_entering[plan.first, heads.values], plan.ranks.rank - 1)
        transfers.finish()
        plan.finish_gradients(grads, wanted, d_entering)
        return None, *DELTA.gradients(grads)


class _Transfers:
    """States on their way. A buffer that is sent lives until it has arrived."""

    def __init__(self, plan: Plan):
        self._ranks = plan.ranks
        self._sent = []

    def receive(self, into: Tensor, source: int) -> None:
        buffer = torch.empty_like(into, memory_format=torch.contiguous_format)
        with self._ranks.naming(f"while the states of rank {source} were waited for"):
            self._ranks.receive(buffer, source).wait()
        into.copy_(buffer)

    def send(self, states: Tensor, to: int) -> None:
        buffer = states.contiguous()
        self._sent.append((self._ranks.send(buffer, to), buffer, to))

    def finish(self) -> None:
        for transfer, _, to in self._sent:
            with self._ranks.naming(f"while rank {to} took states"):
                transfer.wait()
