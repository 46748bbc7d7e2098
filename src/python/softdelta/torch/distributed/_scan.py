"""Every rank computes a summary of its tokens; all ranks gather the summaries and fold them into the state that enters
them. So no rank waits for another rank's scan.

Some ranks know the state that leaves them without any other rank: rank 0, and a rank in which its last sequence begins.
Their M is 0 and their E is that state. The backward pass gathers R in the same way."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from ... import _native, _options
from ..._records import DeltaInputs
from .. import _calls
from ._plan import Plan, tokens_of
from ._walk import Gradients, Walk


def scan(plan: Plan, inputs: DeltaInputs):
    return Scan.apply(plan, *inputs)


class Scan(Function):
    @staticmethod
    def forward(ctx, plan: Plan, *inputs):
        inputs = DeltaInputs(*inputs)
        walk = Walk(plan, inputs)
        maps, entering = _fold_states(plan, inputs)
        o = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
        carries = walk.new_carries(entering)
        walk.forward(plan.all_heads(inputs), carries, o)
        ctx.plan = plan
        ctx.save_for_backward(*inputs, *carries[:-1], maps if plan.gradient else None)
        return o, (carries[-1] if plan.has_final_state else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal_state):
        plan, count = ctx.plan, len(DeltaInputs._fields)
        inputs, maps = DeltaInputs(*ctx.saved_tensors[:count]), ctx.saved_tensors[-1]
        walk = Walk(plan, inputs)
        leaving = dfinal_state if plan.has_final_state else walk.new_carry()
        leaving = leaving + _fold_gradients(plan, inputs, maps, do, leaving)
        gradients = Gradients(walk, ctx.needs_input_grad[1:])
        walk.backward(plan.all_heads(inputs), ctx.saved_tensors[count:-1], do, leaving, gradients)
        return None, *gradients.finish()


def _crossing(plan: Plan, inputs: DeltaInputs, last: bool) -> tuple[Plan, DeltaInputs, slice]:
    """This rank's tokens of one sequence alone: of the first, which the previous rank began, or of the last, which the next
    rank continues."""
    tokens = slice(None)
    if plan.local_bounds is not None:
        tokens = slice(*(plan.local_bounds[-2:] if last else plan.local_bounds[:2]))
    return plan.unpacked(), tokens_of(inputs._replace(initial_state=None), tokens), tokens


def _fold_states(plan: Plan, inputs: DeltaInputs) -> tuple[Tensor, Tensor | None]:
    """M of every rank [P, ..], and the state that enters this one."""
    ranks = plan.ranks
    own, part, _ = _crossing(plan, inputs, True)
    walk = Walk(own, part)
    map_inputs, map_options, first_map = _map_call(plan, part)
    E, M = walk.new_carry(), torch.zeros_like(first_map)
    if plan.leaves:
        E = _last_carry(walk, inputs.initial_state)  # rank 0 has the state before all tokens
        if plan.enters and (plan.local_bounds is None or len(plan.local_bounds) == 2):
            M = _last_carry(Walk(own, map_inputs, map_options), first_map)
    if _maps_by_number(plan):
        M = M[..., 0, 0]
    maps = torch.stack(ranks.all_gather(M, "while maps of states were gathered"))
    offsets = torch.stack(ranks.all_gather(E, "while offsets of states were gathered"))
    entering = inputs.initial_state
    if plan.enters:
        before = slice(0, ranks.rank)
        entering = _fold(_native.delta_fold, plan, maps[before], offsets[before])
    elif ranks.rank > 0:
        entering = None
    return maps, entering


def _map_call(plan: Plan, inputs: DeltaInputs):
    """The call whose final state is M: v is 0, and the initial state is the identity. For a rule that decays by a number M is
    one number, and one channel is enough."""
    (B, T, H, K), HV = inputs.q.shape, inputs.v.shape[2]
    zero = inputs.v.new_zeros(1)
    if _maps_by_number(plan):
        K = 1
        inputs = inputs._replace(q=zero.expand(B, T, H, K), k=zero.expand(B, T, H, K))
    identity = torch.eye(K, dtype=_calls.wide(inputs.q), device=inputs.q.device).repeat(B, HV, 1, 1)
    # The CUDA engine reads 16 bytes of a row at once, and no stride of 0.
    v = inputs.v.new_zeros(B, T, HV, K) if zero.is_cuda else zero.expand(B, T, HV, K)
    return inputs._replace(v=v), plan.options._replace(state_v_first=False), identity


def _maps_by_number(plan: Plan) -> bool:
    rule = _options.facts_of(plan.options.rule)
    return rule.erases == "nothing" and rule.gate != "channel"


def _last_carry(walk: Walk, first: Tensor | None) -> Tensor:
    carries = walk.new_carries(first)
    walk.forward(walk.plan.all_heads(walk.inputs), carries)
    return carries[-1]


def _fold(function, plan: Plan, maps: Tensor, offsets: Tensor) -> Tensor:
    state = torch.empty_like(offsets[0], device="cpu")
    function((maps.cpu(), offsets.cpu()), plan.options, (None, state), _calls.threads(), False)
    return state.to(offsets.device)


def _fold_gradients(plan: Plan, inputs: DeltaInputs, maps: Tensor, do: Tensor, leaving: Tensor) -> Tensor:
    """The part of the gradient of this rank's leaving state that comes from later ranks."""
    ranks = plan.ranks
    own, part, tokens = _crossing(plan, inputs, False)
    walk = Walk(own, part)
    R = walk.new_carry()
    if plan.enters:
        nothing = Gradients(walk, (False,) * len(DeltaInputs._fields))
        behind = leaving if plan.local_bounds is None else walk.new_carry()
        R = walk.backward(plan.all_heads(part), [None] * len(walk.segments), do[:, tokens], behind, nothing)
    offsets = torch.stack(ranks.all_gather(R, "while gradients of states were gathered"))
    if not plan.leaves:
        return torch.zeros_like(R)
    behind = slice(ranks.rank + 1, None)
    return _fold(_native.delta_fold_backward, plan, maps[behind], offsets[behind])
