"""Decode: one token or a few, the state updated in place."""
from __future__ import annotations

import torch
from torch import Tensor

from .. import _native, _options
from .._records import DeltaInputs, DeltaOptions
from . import _calls, _ops, _route
from ._delta_rules import rows_and_heads_swapped
from ._families import DELTA_RULE
from ._flat import DELTA_STEP


def delta_step(rule: str | _options.Rule, q: Tensor, k: Tensor, v: Tensor, state: Tensor, *, g: Tensor | None = None,
               g_gamma: Tensor | None = None, beta: Tensor | None = None, p: Tensor | None = None,
               A_log: Tensor | None = None, dt_bias: Tensor | None = None, cu_seqlens: Tensor | None = None,
               state_indices: Tensor | None = None, final_state_indices: Tensor | None = None,
               has_initial_state: Tensor | None = None, snapshot_indices: Tensor | None = None,
               state_interval: int = 64, scale: float | None = None,
               use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
               lower_bound: float | None = None, use_beta_sigmoid_in_kernel: bool = False,
               allow_neg_eigval: bool = False, state_v_first: bool = False,
               return_states: bool = False, head_order: str = "grouped", steps: int = 1, layout: str = "bthd") -> Tensor | tuple[Tensor, Tensor]:
    """T tokens, usually one, of each sequence; up to eight (speculative decode) stay on the quick way. No gradients.

    rule, shapes and options as softdelta.delta_forward's: q, k, p [B, T, H, K]; v [B, T, HV, V]; beta, g [B, T, HV] or
    g [B, T, HV, K].
    state          [N, HV, K, V] (or [.., V, K] with state_v_first), f32: changed where it is
    state_indices  [N] i32 or i64: state is a pool [pool, HV, K, V], sequence n has entry state_indices[n]; entries must
                   differ, or be -1 where there is no sequence: o and its states are 0, no entry changes
    final_state_indices, has_initial_state, snapshot_indices, state_interval  as softdelta.delta_forward's, of the pool
    cu_seqlens     [N+1]: N sequences one after the other, B = 1
    layout         "bthd", or "bhtd": q, k, v, p, g, beta and o have heads before tokens
    steps          rank-one updates of a token, as delta_forward's
    head_order     which key head value head h reads: "grouped", h // (HV // H), or "tiled", h % H

    Returns o [B, T, HV, V], as v. With return_states also the states after each token [B, T, HV, K, V]: the one after
    the last accepted token can be put back. Raises ValueError naming the argument, also where a gradient would be
    recorded.
    """
    inputs = DeltaInputs(q, k, v, g=g, g_gamma=g_gamma, beta=beta, p=p, initial_state=state, A_log=A_log, dt_bias=dt_bias,
                         cu_seqlens=cu_seqlens, state_indices=state_indices, final_state_indices=final_state_indices,
                         has_initial_state=has_initial_state, snapshot_indices=snapshot_indices)
    number = _options.rule_number(rule)
    if state is None:
        raise ValueError("state is None, expected a tensor [N, HV, K, V]")
    for name, given in ("final_state_indices", final_state_indices), ("snapshot_indices", snapshot_indices):
        if return_states and given is not None:
            raise ValueError(f"{name} is given, expected None beside return_states")
    heads_first = _options.number_of(_options.LAYOUT, "layout", layout)
    if heads_first:
        inputs = rows_and_heads_swapped(inputs)
    options = DeltaOptions(
        number, _options.number("scale", scale), _options.flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        _options.flag("use_gate_in_kernel", use_gate_in_kernel), _options.number("lower_bound", lower_bound),
        _options.flag("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel),
        _options.flag("allow_neg_eigval", allow_neg_eigval), _options.flag("state_v_first", state_v_first),
        state_interval=_options.whole("state_interval", state_interval),
        head_order=_options.number_of(_options.HEAD_ORDER, "head_order", head_order), steps=_options.whole("steps", steps))
    inputs = _route.autocast(inputs, DELTA_RULE.casts)
    way = _route.route(inputs)
    if way == _route.PLAIN:
        o, states = _step(inputs, options, return_states)
        torch.autograd.graph.increment_version(state)
    elif way == _route.GRADIENT:
        raise ValueError("a tensor requires a gradient, expected none: a step changes its state in place")
    elif way == _route.TRANSFORMED:
        raise ValueError("a step stands in a transform (torch.func, torch.vmap, forward mode), expected none: it changes "
                         "its state in place")
    else:
        o, states = torch.ops.softdelta.delta_step(*DELTA_STEP.to_op(inputs, options), return_states)
    if heads_first:
        o = o.transpose(1, 2)
    return (o, states) if return_states else o


def _step(inputs: DeltaInputs, options: DeltaOptions, return_states: bool):
    q, v, state = inputs.q, inputs.v, inputs.initial_state
    if q is None or v is None or q.dim() != 4 or v.dim() != 4:
        _calls.refuse_ranks(q, v)
    o = v.new_empty((*q.shape[:2], *v.shape[2:]))
    if not return_states:
        _native.delta_forward(inputs, options, (o, state), _calls.AUTOMATIC, _calls.threads(), False)
        return o, None
    # The library writes the state before each row of a sequence. One row further on it is the state after one.
    cu_seqlens, state_indices = inputs.cu_seqlens, inputs.state_indices
    if cu_seqlens is not None:  # how many states there are is asked before the call
        cu_seqlens = cu_seqlens.cpu()
        inputs = inputs._replace(cu_seqlens=cu_seqlens)
    batch, tokens = q.shape[:2]
    states = state.new_empty((batch, tokens + 1, *state.shape[1:]))
    _native.delta_forward(inputs, options._replace(state_interval=1), (o, state, states[:, :-1]), _calls.AUTOMATIC,
                          _calls.threads(), False)
    states = states[:, 1:]
    last = state
    if state_indices is not None:
        there = (state_indices >= 0).view(-1, 1, 1, 1)
        last = torch.where(there, state[state_indices.clamp(min=0)], 0)
    if cu_seqlens is None:
        states[:, -1:] = last.unsqueeze(1)
    else:
        some = cu_seqlens.diff() > 0
        states[0, cu_seqlens[1:][some] - 1] = last[some]
    return o, states


@torch.library.custom_op("softdelta::delta_step", mutates_args=("initial_state",), device_types=_ops.DEVICES,
                         schema=f"({DELTA_STEP.schema()}, bool return_states) -> (Tensor, Tensor)")
def delta_step_op(*args):
    inputs, options, (return_states,) = DELTA_STEP.from_op(args)
    o, states = _step(inputs, options, return_states)
    return o, inputs.initial_state.new_empty(0) if states is None else states.contiguous()


@delta_step_op.register_fake
def _(*args):
    inputs, _, (return_states,) = DELTA_STEP.from_op(args)
    state = inputs.initial_state
    states = (*inputs.q.shape[:2], *state.shape[1:]) if return_states else (0,)
    return inputs.v.new_empty((*inputs.q.shape[:2], *inputs.v.shape[2:])), state.new_empty(states)


_ops.cast(torch.ops.softdelta.delta_step.default, DELTA_RULE.casts)
