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
from ._plan import Plan, heads_of, tokens_of


def relay(plan: Plan, inputs: DeltaInputs):
    return Relay.apply(plan, *inputs)


# Tokens of a call. The backward pass of the library keeps a state of every few dozen tokens while it runs.
segment_tokens = 1 << 16
SUMMED = ("g_gamma", "A_log", "dt_bias")  # whose gradients are sums over tokens


class Relay(Function):
    @staticmethod
    def forward(ctx, plan: Plan, *inputs):
        inputs = DeltaInputs(*inputs)
        size = plan.size_of_gate(inputs)
        o = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
        segments = plan.segments(inputs.q.shape[1], segment_tokens)
        entering = plan.entering(inputs)
        states = [plan.new_states(inputs) for _ in segments]  # behind each segment
        transfers = _Transfers(plan)
        for heads in plan.head_groups(inputs):
            if plan.enters:
                transfers.receive(entering[plan.first, heads.values], plan.ranks.rank - 1)
            for tokens, before, behind in zip(segments, [entering, *states], states):
                part = heads_of(tokens_of(inputs._replace(initial_state=before), tokens), heads, size)
                _native.delta_forward(part, plan.options, (o[:, tokens, heads.values], behind[:, heads.values]),
                                      _calls.AUTOMATIC, _calls.threads(), False)
            if plan.leaves:
                transfers.send(states[-1][plan.last, heads.values], plan.ranks.rank + 1)
        transfers.finish()
        ctx.plan, ctx.segments = plan, segments
        ctx.save_for_backward(*inputs, entering, *states[:-1])
        return o, (states[-1] if plan.has_final_state else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal_state):
        plan, count = ctx.plan, len(DeltaInputs._fields)
        inputs, before = DeltaInputs(*ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        size = plan.size_of_gate(inputs)
        wanted = list(DELTA.wanted_of(ctx.needs_input_grad[1:]))
        grads = _calls.empty_gradients(inputs, DELTA_WANTED, wanted)
        results = DELTA.inputs(*DELTA.gradients(grads))
        several = len(ctx.segments) > 1
        sums = {n: torch.zeros_like(getattr(results, n)) for n in SUMMED if getattr(results, n) is not None}
        leaving = plan.leaving_gradient(inputs, dfinal_state if plan.has_final_state else None)
        d_before = [plan.new_states(inputs) for _ in range(min(2, len(ctx.segments)))]  # by turns
        transfers = _Transfers(plan)
        for heads in plan.head_groups(inputs):
            if plan.leaves:
                transfers.receive(leaving[plan.last, heads.values], plan.ranks.rank + 1)
            behind = leaving
            for i in range(len(ctx.segments) - 1, -1, -1):
                tokens, d_state = ctx.segments[i], d_before[i % len(d_before)]
                part = heads_of(tokens_of(inputs._replace(initial_state=before[i]), tokens), heads, size)
                of_part = heads_of(tokens_of(results._replace(initial_state=d_state), tokens), heads, size)
                _native.delta_backward(part, plan.options,
                                       (do[:, tokens, heads.values], behind[:, heads.values],
                                        *(getattr(of_part, n) for n in DELTA_WANTED)), _calls.AUTOMATIC,
                                       _calls.threads(), False)
                if several:
                    own = heads_of(DeltaInputs(v=inputs.v, **sums), heads, size)
                    for name in sums:
                        getattr(own, name).add_(getattr(of_part, name))
                behind = d_state
            if plan.enters:
                transfers.send(d_before[0][plan.first, heads.values], plan.ranks.rank - 1)
        transfers.finish()
        if several:
            for name, total in sums.items():
                getattr(results, name).copy_(total)
        plan.finish_gradients(grads, wanted, d_before[0])
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
