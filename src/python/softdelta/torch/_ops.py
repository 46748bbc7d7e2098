"""The operations with gradients: as autograd functions that call the library at once, and for everything that traces as
the ops of _custom_ops. Gradients of gradients are refused wherever somebody would need one."""
from __future__ import annotations

from torch.autograd import Function

from . import _calls, _custom_ops, _vmap
from ._flat import ATTENTION, DELTA
from ._route import (GRADIENT, PLAIN, TRACED, TRANSFORMED, autocast, is_transformed, needs_gradient,
                     refuse_forward_mode, refuse_second_derivative, route, route_back, route_below)

# What torch.autocast casts
DELTA_CASTS = _custom_ops.DELTA_CASTS
ATTENTION_CASTS = _custom_ops.ATTENTION_CASTS

# ----------------------------------------------------------------------------------------------------------------------
# Delta rules


def delta_rule(inputs, options, output_final_state: bool, whatever_kept: bool = False):
    """o and the final state or None, differentiable. Arguments as those of _calls.delta_forward; whatever_kept: where
    the backward pass has use for it, as much is kept as can be."""
    inputs = autocast(inputs, DELTA_CASTS)
    way = route(inputs)
    if way == PLAIN:
        return _calls.delta_forward(inputs, options, output_final_state)
    if way == GRADIENT:
        return DeltaRule.apply(options, output_final_state, whatever_kept, *inputs)
    if way == TRANSFORMED:
        return TransformedDeltaRule.apply(options, output_final_state, *inputs)
    return _custom_ops.delta_rule(inputs, options, output_final_state)


class DeltaRule(Function):
    @staticmethod
    def forward(ctx, options, output_final_state, whatever_kept, *inputs):
        o, state, kept = _calls.delta_forward_keeping(DELTA.inputs(*inputs), options, output_final_state, whatever_kept)
        _save_delta(ctx, options, (*inputs, kept))
        return o, state

    @staticmethod
    def backward(ctx, do, dfinal_state):
        return None, None, None, *_delta_backward(ctx, do, dfinal_state, ctx.needs_input_grad[3:])


def _save_delta(ctx, options, tensors):
    ctx.save_for_backward(*tensors)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _delta_backward(ctx, do, dfinal_state, need):
    *inputs, kept = ctx.saved_tensors
    inputs, wanted = DELTA.inputs(*inputs), DELTA.wanted_of(need)
    way = route_back(inputs, do, dfinal_state)
    if way == PLAIN:
        grads = _calls.delta_backward(inputs, ctx.options, do, dfinal_state, wanted, kept)
    elif way == TRACED:
        grads = _custom_ops.delta_gradients(inputs, ctx.options, do, dfinal_state, wanted)
    else:
        grads = DeltaGradients.apply(ctx.options, wanted, *inputs, do, dfinal_state)
    return DELTA.gradients(grads)


class TransformedDeltaRule(Function):
    """The same for torch.func, which wants forward and context apart. Costs torch longer than DeltaRule."""

    @staticmethod
    def forward(options, output_final_state, *inputs):
        below = _calls.delta_forward if route_below(inputs) != TRACED else _custom_ops.delta_rule
        return below(DELTA.inputs(*inputs), options, output_final_state)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save_delta(ctx, inputs[0], (*inputs[2:], None))

    @staticmethod
    def backward(ctx, do, dfinal_state):
        return None, None, *_delta_backward(ctx, do, dfinal_state, ctx.needs_input_grad[2:])

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def vmap(info, dims, options, output_final_state, *inputs):
        return _vmap.delta_rule(lambda *x: TransformedDeltaRule.apply(options, output_final_state, *x),
                                info.batch_size, dims[2:], inputs)


class DeltaGradients(Function):
    """The backward pass where somebody records or transforms it."""

    @staticmethod
    def forward(options, wanted, *tensors):
        *inputs, do, dfinal_state = tensors
        below = _calls.delta_backward if route_below(tensors) != TRACED else _custom_ops.delta_gradients
        return tuple(below(DELTA.inputs(*inputs), options, do, dfinal_state, wanted))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = jvp = staticmethod(refuse_second_derivative)

    @staticmethod
    def vmap(info, dims, options, wanted, *tensors):
        return _vmap.delta_rule(lambda *x: DeltaGradients.apply(options, wanted, *x), info.batch_size, dims[2:], tensors,
                                wanted)


# ----------------------------------------------------------------------------------------------------------------------
# Attention


def attention(inputs, options, with_lse: bool, heads_first: bool = False):
    """o and lse or None, differentiable. Arguments as those of _calls.attention_forward; with heads_first q, k, v and o
    are [B, H, L, D]."""
    inputs = autocast(inputs, ATTENTION_CASTS)
    way = route(inputs)
    if way == PLAIN:
        return _calls.attention_forward(inputs, options, with_lse, heads_first)
    if way == GRADIENT:
        return Attention.apply(options, with_lse, heads_first, *inputs)
    if way == TRANSFORMED:
        o, lse = TransformedAttention.apply(options, heads_first, *inputs)
        return o, lse if with_lse else None
    return _custom_ops.attention(inputs, options, with_lse, heads_first)


class Attention(Function):
    @staticmethod
    def forward(ctx, options, with_lse, heads_first, *inputs):
        o, lse = _calls.attention_forward(ATTENTION.inputs(*inputs), options, True, heads_first)
        ctx.save_for_backward(*inputs, o, lse)
        ctx.options, ctx.heads_first = options, heads_first
        ctx.set_materialize_grads(False)
        return o, lse if with_lse else None

    @staticmethod
    def backward(ctx, do, dlse):
        return None, *_attention_backward(ctx, do, dlse, ctx.needs_input_grad[3:])


def _attention_backward(ctx, do, dlse, need):
    *inputs, o, lse = ctx.saved_tensors
    inputs, wanted = ATTENTION.inputs(*inputs), ATTENTION.wanted_of(need)
    way = route_back((*inputs, o, lse), do, dlse)
    if way == PLAIN:
        grads = _calls.attention_backward(inputs, ctx.options, o, lse, do, dlse, wanted, ctx.heads_first)
    elif way == TRACED:
        grads = _custom_ops.attention_gradients(inputs, ctx.options, o, lse, do, dlse, wanted, ctx.heads_first)
    else:
        grads = AttentionGradients.apply(ctx.options, wanted, ctx.heads_first, *inputs, o, lse, do, dlse)
    return None, None, *ATTENTION.gradients(grads)


class TransformedAttention(Function):
    """As TransformedDeltaRule."""

    @staticmethod
    def forward(options, heads_first, *inputs):
        below = _calls.attention_forward if route_below(inputs) != TRACED else _custom_ops.attention
        return below(ATTENTION.inputs(*inputs), options, True, heads_first)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, ctx.heads_first = inputs[:2]
        ctx.save_for_backward(*inputs[2:], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, do, dlse):
        return _attention_backward(ctx, do, dlse, ctx.needs_input_grad[2:])

    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def vmap(info, dims, options, heads_first, *inputs):
        return _vmap.attention(lambda *x: TransformedAttention.apply(options, heads_first, *x), info.batch_size, dims[2:],
                               inputs)


class AttentionGradients(Function):
    """As DeltaGradients."""

    @staticmethod
    def forward(options, wanted, heads_first, *tensors):
        *inputs, o, lse, do, dlse = tensors
        below = _calls.attention_backward if route_below(tensors) != TRACED else _custom_ops.attention_gradients
        return tuple(below(ATTENTION.inputs(*inputs), options, o, lse, do, dlse, wanted, heads_first))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = jvp = staticmethod(refuse_second_derivative)

    @staticmethod
    def vmap(info, dims, options, wanted, heads_first, *tensors):
        return _vmap.attention(lambda *x: AttentionGradients.apply(options, wanted, heads_first, *x), info.batch_size,
                               dims[3:], tensors, wanted)
