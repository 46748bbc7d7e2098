"""States are handed from rank to rank. A rank computes its heads group by group, and sends the states of one group while
it computes the next. Results have the bits of one process where ranks begin at multiples of 64 tokens.

    rank 0:  g0 g1 g2 g3
    rank 1:     g0 g1 g2 g3            idle: P − 1 of groups + P − 1 steps
    rank 2:        g0 g1 g2 g3

Backward runs from the last rank to the first."""
from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.autograd import Function

from ..._records import DeltaInputs
from ._plan import Plan
from ._walk import Gradients, Handover, Walk


def relay(plan: Plan, inputs: DeltaInputs):
    return Relay.apply(plan, *inputs)


class Relay(Function):
    @staticmethod
    def forward(ctx, plan: Plan, *inputs):
        inputs = DeltaInputs(*inputs)
        walk = Walk(plan, inputs)
        o = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
        carries = walk.new_carries(walk.new_carry() if plan.enters else inputs.initial_state)
        transfers = _Transfers(plan, o.device, plan.enters, plan.leaves)
        for heads in plan.head_groups(inputs):
            if plan.enters:
                transfers.receive(carries[0][:, heads.values], plan.ranks.rank - 1)
            walk.forward(heads, carries, o, transfers.handover)
            if plan.leaves:
                transfers.send(carries[-1][:, heads.values], plan.ranks.rank + 1)
        transfers.finish()
        ctx.plan = plan
        ctx.save_for_backward(*inputs, *carries[:-1])
        return o, (carries[-1] if plan.has_final_state else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal_state):
        plan, count = ctx.plan, len(DeltaInputs._fields)
        inputs, carries = DeltaInputs(*ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        walk = Walk(plan, inputs)
        gradients = Gradients(walk, ctx.needs_input_grad[1:])
        leaving = dfinal_state if plan.has_final_state else walk.new_carry()
        transfers = _Transfers(plan, do.device, plan.leaves, plan.enters)
        for heads in plan.head_groups(inputs):
            if plan.leaves:
                transfers.receive(leaving[:, heads.values], plan.ranks.rank + 1)
            entering = walk.backward(heads, carries, do, leaving, gradients, transfers.handover)
            if plan.enters:
                transfers.send(entering[:, heads.values], plan.ranks.rank - 1)
        transfers.finish()
        return None, *gradients.finish()


class _Transfers:
    """States that travel. A buffer is kept until it has arrived. On a GPU they travel beside the computation: what a rank
    computes without the states of others goes on meanwhile, and its own leave as soon as they are there.

        rank 0, forward     chunks  scan → send            the scan alone needs a state
        rank 1              chunks  ......  scan
        rank 1, backward    chunks  scan → send  gradients
        rank 0              chunks  ......       scan  gradients"""

    def __init__(self, plan: Plan, device: torch.device, receives: bool, sends: bool):
        self._ranks = plan.ranks
        self._sent = []
        self._own, self._side, self.handover = None, None, None
        if device.type == "cuda":
            plan.ranks.give_priority()
            self._own, self._side = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=-1)
            self.handover = Handover(self._event() if receives else None, self._event() if sends else None)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._own)  # it begins to exist when it is recorded
        return event

    def _beside(self):
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def receive(self, into: Tensor, source: int) -> None:
        buffer = torch.empty_like(into, memory_format=torch.contiguous_format)
        if self._side is not None:
            self._side.wait_stream(self._own)  # the memory may have been another tensor's
        with self._beside():
            with self._ranks.naming(f"while the states of rank {source} were waited for"):
                self._ranks.receive(buffer, source).wait()
            into.copy_(buffer)
            if self._side is not None:
                self.handover.ready.record(self._side)
                self._sent.append((None, buffer, source))

    def send(self, states: Tensor, to: int) -> None:
        if self._side is not None:
            self._side.wait_event(self.handover.done)
        with self._beside():
            buffer = states.contiguous()
            self._sent.append((self._ranks.send(buffer, to), buffer, to))

    def finish(self) -> None:
        with self._beside():
            for transfer, _, to in self._sent:
                if transfer is not None:
                    with self._ranks.naming(f"while rank {to} took states"):
                        transfer.wait()
        if self._side is not None:
            self._own.wait_stream(self._side)
