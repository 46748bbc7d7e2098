"""Summaries of all ranks gathered, the state that enters each rank folded from them: no rank waits for another's scan.

Rank 0 and a rank in which the last sequence begins know the state that leaves them: their M is 0 and their E that
state. Backward likewise with R, whose ranks know the gradient of the state that enters them."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from ... import _native
from ..._records import DELTA_WANTED, DeltaInputs
from .. import _calls
from .._flat import DELTA
from ._plan import Plan


def scan(plan: Plan, inputs: DeltaInputs):
    return Scan.apply(plan, *inputs)


class Scan(Function):
    @staticmethod
    def forward(ctx, plan: Plan, *inputs):
        inputs = DeltaInputs(*inputs)
        maps, entering = _fold_states(plan, inputs)
        o = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
        state = plan.new_states(inputs) if plan.has_final_state else None
        _native.delta_forward(inputs._replace(initial_state=entering), plan.options, (o, state), _calls.AUTOMATIC,
                              _calls.threads(), False)
        ctx.plan = plan
        ctx.save_for_backward(*inputs, entering, maps if plan.gradient else None)
        return o, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal_state):
        plan = ctx.plan
        *inputs, entering, maps = ctx.saved_tensors
        inputs = DeltaInputs(*inputs)
        wanted = list(DELTA.wanted_of(ctx.needs_input_grad[1:]))
        grads = _calls.empty_gradients(inputs, DELTA_WANTED, wanted)
        leaving = plan.leaving_gradient(inputs, dfinal_state if plan.has_final_state else None)
        _fold_gradients(plan, inputs, maps, do, leaving)
        _native.delta_backward(inputs._replace(initial_state=entering), plan.options, (do, leaving, *grads),
                               _calls.AUTOMATIC, _calls.threads(), False)
        return None, *DELTA.gradients(grads)


def _tokens(plan: Plan, inputs: DeltaInputs, which: slice) -> tuple[DeltaInputs, slice]:
    """The sequences of this rank whose states enter, or leave, and their tokens."""
    if plan.local_bounds is None:
        return inputs, slice(None)
    n = which.start
    tokens = slice(plan.local_bounds[n], plan.local_bounds[n + 1])
    cut = {x: getattr(inputs, x)[:, tokens] for x in ("q", "k", "v", "p", "g", "beta")
           if getattr(inputs, x) is not None}
    return inputs._replace(cu_seqlens=None, **cut), tokens


def _fold_states(plan: Plan, inputs: DeltaInputs) -> tuple[Tensor, Tensor | None]:
    """M of every rank [P, ..], and the states that enter this one."""
    ranks, rule = plan.ranks, plan.options
    part, _ = _tokens(plan, inputs, plan.last)
    E = plan.new_states(part)
    N, HV, K = E.shape[0], E.shape[1], inputs.q.shape[3]
    number = _native.RULES[rule.rule] == "simple_gla"
    M = torch.zeros((N, HV) if number else (N, HV, K, K), dtype=E.dtype, device=E.device)
    through = plan.enters and (plan.local_bounds is None or len(plan.local_bounds) == 2)
    if not plan.leaves:
        E.zero_()
    elif through:
        _native.delta_summary(part._replace(initial_state=None), rule, (M, E), _calls.AUTOMATIC, _calls.threads(),
                              False)
    else:
        _native.delta_forward(part, rule, (None, E), _calls.AUTOMATIC, _calls.threads(), False)
    maps = torch.stack(ranks.all_gather(M, "while maps of states were gathered"))
    offsets = torch.stack(ranks.all_gather(E, "while offsets of states were gathered"))
    entering = inputs.initial_state
    if plan.enters:
        entering = plan.new_states(inputs).zero_()
        before = slice(0, ranks.rank)
        state = torch.empty_like(E)
        _native.delta_fold((maps[before], offsets[before]), rule, (None, state), _calls.threads(), False)
        entering[plan.first] = state
    return maps, entering


def _fold_gradients(plan: Plan, inputs: DeltaInputs, maps: Tensor, do: Tensor, leaving: Tensor) -> None:
    """Adds to `leaving` the gradient of the states that leave this rank."""
    ranks, rule = plan.ranks, plan.options
    part, tokens = _tokens(plan, inputs, plan.first)
    R = plan.new_states(part).zero_()
    if plan.enters:
        dfinal_state = leaving if plan.local_bounds is None else None
        grads = [None] * len(DELTA_WANTED)
        grads[DELTA_WANTED.index("initial_state")] = R
        _native.delta_backward(part._replace(initial_state=None), rule, (do[:, tokens], dfinal_state, *grads),
                               _calls.AUTOMATIC, _calls.threads(), False)
    offsets = torch.stack(ranks.all_gather(R, "while gradients of states were gathered"))
    if plan.leaves:
        behind = slice(ranks.rank + 1, None)
        state = torch.empty_like(R)
        _native.delta_fold_backward((maps[behind], offsets[behind]), rule, (None, state), _calls.threads(), False)
        leaving[plan.last] += state
