"""The operations as torch custom ops (softdelta::delta_forward and so on), for torch.compile and everything that
traces, and as autograd functions that call the library at once, for everything else."""
from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _calls

_plain_types = (Tensor, torch.nn.Parameter)


PLAIN, GRADIENT, TRACED = range(3)

# Names of this file: in a model every look-up finds its dictionaries pushed out of the caches.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_dispatch_modes, _function_mode = torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
_functorch_level = torch._C._functorch.peek_interpreter_stack


def route(tensors) -> int:
    """TRACED when something wants to see the call as an op (a compiler, a dispatch mode, a functorch level, a
    subclass), else GRADIENT when gradients are recorded, else PLAIN."""
    if _is_compiling() or _dispatch_modes() or _functorch_level() is not None or _function_mode():
        return TRACED
    recorded, way = _is_grad_enabled(), PLAIN
    for t in tensors:
        if t is not None:
            if type(t) not in _plain_types:
                return TRACED
            if recorded and t.requires_grad:
                way = GRADIENT
    return way


def needs_gradient(tensors) -> bool:
    return route(tensors) == GRADIENT


def refuse_forward_mode() -> None:
    if not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError("softdelta has no forward-mode derivatives; use backward")


# ----------------------------------------------------------------------------------------------------------------------
# Delta rules


class DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, output_final_state, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return _calls.delta_forward(inputs, options, output_final_state)

    @staticmethod
    def backward(ctx, do, dfinal_state):
        return _once_delta(ctx, do, dfinal_state) if torch.is_grad_enabled() else _delta_gradients(ctx, do, dfinal_state)


def _delta_gradients(ctx, do, dfinal_state):
    grads = _calls.delta_backward(ctx.saved_tensors, ctx.options, do, dfinal_state, ctx.needs_input_grad[2:12])
    return None, None, *grads, None


# With create_graph: gradients of these gradients are an error when somebody asks for them. Costs a few microseconds.
_once_delta = once_differentiable(_delta_gradients)


def delta_rule(inputs: tuple, options: tuple, output_final_state: bool):
    """o and the final state or None, differentiable. Arguments as those of _calls.delta_forward."""
    refuse_forward_mode()
    way = route(inputs)
    if way == TRACED:
        o, state = torch.ops.softdelta.delta_forward(*inputs, *options, output_final_state)
        return o, state if output_final_state else None
    if way == GRADIENT:
        return DeltaRule.apply(options, output_final_state, *inputs)
    return _calls.delta_forward(inputs, options, output_final_state)


@torch.library.custom_op("softdelta::delta_forward", mutates_args=(), device_types="cpu")
def delta_forward_op(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None, beta: Tensor | None,
        p: Tensor | None, initial_state: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None,
        cu_seqlens: Tensor | None, rule: int, scale: float, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
        lower_bound: float, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, state_v_first: bool,
        output_final_state: bool) -> tuple[Tensor, Tensor]:
    inputs = (q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias, cu_seqlens)
    options = (rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel,
               allow_neg_eigval, state_v_first)
    o, state = _calls.delta_forward(inputs, options, output_final_state)
    return o, torch.empty(0, dtype=_calls.wide(q)) if state is None else state


@delta_forward_op.register_fake
def _(q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias, cu_seqlens, rule, scale, use_qk_l2norm_in_kernel,
      use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
      output_final_state):
    shape = _calls.state_shape(q, v, cu_seqlens, state_v_first) if output_final_state else (0,)
    return v.new_empty(v.shape), q.new_empty(shape, dtype=_calls.wide(q))


@torch.library.custom_op("softdelta::delta_backward", mutates_args=(), device_types="cpu")
def delta_backward_op(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None, beta: Tensor | None,
        p: Tensor | None, initial_state: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None,
        cu_seqlens: Tensor | None, rule: int, scale: float, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
        lower_bound: float, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, state_v_first: bool,
        do: Tensor | None, dfinal_state: Tensor | None, wanted: Sequence[bool]) -> list[Tensor]:
    inputs = (q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias, cu_seqlens)
    options = (rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel,
               allow_neg_eigval, state_v_first)
    return [t for t in _calls.delta_backward(inputs, options, do, dfinal_state, wanted) if t is not None]


@delta_backward_op.register_fake
def _(q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias, cu_seqlens, rule, scale, use_qk_l2norm_in_kernel,
      use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, do, dfinal_state,
      wanted):
    inputs = (q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias)
    return [torch.empty_like(t) for t, w in zip(inputs, wanted) if w]


def _save_delta(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:11])
    ctx.options = inputs[11:19]
    ctx.output_final_state = inputs[19]
    ctx.set_materialize_grads(False)


def _differentiate_delta(ctx, do, dfinal_state):
    wanted = list(ctx.needs_input_grad[:10])
    if do is None and (dfinal_state is None or not ctx.output_final_state):
        return (None,) * 20
    grads = iter(torch.ops.softdelta.delta_backward(*ctx.saved_tensors, *ctx.options, do,
                                                    dfinal_state if ctx.output_final_state else None, wanted))
    return *(next(grads) if w else None for w in wanted), *(None,) * 10


delta_forward_op.register_autograd(_differentiate_delta, setup_context=_save_delta)

# ----------------------------------------------------------------------------------------------------------------------
# Attention


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, with_lse, heads_first, *inputs):
        o, lse = _calls.attention_forward(inputs, options, True, heads_first)
        ctx.save_for_backward(*inputs, o, lse)
        ctx.options, ctx.heads_first = options, heads_first
        ctx.set_materialize_grads(False)
        return o, lse if with_lse else None

    @staticmethod
    def backward(ctx, do, dlse):
        return _once_attention(ctx, do, dlse) if torch.is_grad_enabled() else _attention_gradients(ctx, do, dlse)


def _attention_gradients(ctx, do, dlse):
    *inputs, o, lse = ctx.saved_tensors
    need = ctx.needs_input_grad
    wanted = (need[3], need[4], need[5], need[7], need[8])
    dq, dk, dv, dbias, dsink = _calls.attention_backward(inputs, ctx.options, o, lse, do, dlse, wanted,
                                                         ctx.heads_first)
    return None, None, None, dq, dk, dv, None, dbias, dsink, None, None, None, None


_once_attention = once_differentiable(_attention_gradients)


def _rows_first(inputs: tuple) -> tuple:
    """q, k, v [B, H, L, D] as the library wants them, [B, L, H, D]."""
    q, k, v = inputs[:3]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *inputs[3:]


def attention(inputs: tuple, options: tuple, with_lse: bool, heads_first: bool = False):
    """o and lse or None, differentiable. Arguments as those of _calls.attention_forward; with heads_first q, k, v and o
    are [B, H, L, D]."""
    refuse_forward_mode()
    way = route(inputs)
    if way == TRACED:
        o, lse = torch.ops.softdelta.attention_forward(*(_rows_first(inputs) if heads_first else inputs), *options)
        return o.transpose(1, 2) if heads_first else o, lse if with_lse else None
    if way == GRADIENT:
        return Attention.apply(options, with_lse, heads_first, *inputs)
    return _calls.attention_forward(inputs, options, with_lse, heads_first)


@torch.library.custom_op("softdelta::attention_forward", mutates_args=(), device_types="cpu")
def attention_forward_op(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sink: Tensor | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, cache_seqlens: Tensor | None,
        block_table: Tensor | None, scale: float, causal: int, window_left: int, window_right: int, softcap: float,
        empty_row: int, top_w: int) -> tuple[Tensor, Tensor]:
    inputs = (q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table)
    return _calls.attention_forward(inputs, (scale, causal, window_left, window_right, softcap, empty_row, top_w), True)


@attention_forward_op.register_fake
def _(q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, scale, causal, window_left,
      window_right, softcap, empty_row, top_w):
    batch, rows, heads, _ = q.shape
    return v.new_empty((batch, rows, heads, v.shape[3])), q.new_empty((batch, heads, rows), dtype=_calls.wide(q))


@torch.library.custom_op("softdelta::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward_op(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sink: Tensor | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, cache_seqlens: Tensor | None,
        block_table: Tensor | None, scale: float, causal: int, window_left: int, window_right: int, softcap: float,
        empty_row: int, top_w: int, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None,
        wanted: Sequence[bool]) -> list[Tensor]:
    inputs = (q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table)
    options = (scale, causal, window_left, window_right, softcap, empty_row, top_w)
    return [t for t in _calls.attention_backward(inputs, options, o, lse, do, dlse, wanted) if t is not None]


@attention_backward_op.register_fake
def _(q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, scale, causal, window_left,
      window_right, softcap, empty_row, top_w, o, lse, do, dlse, wanted):
    return [torch.empty_like(t) for t, w in zip((q, k, v, bias, sink), wanted) if w]


def _save_attention(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.options = inputs[10:]
    ctx.set_materialize_grads(False)


def _differentiate_attention(ctx, do, dlse):
    need = ctx.needs_input_grad
    wanted = [need[0], need[1], need[2], need[4], need[5]]
    *inputs, o, lse = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 17
    grads = iter(torch.ops.softdelta.attention_backward(*inputs, *ctx.options, o, lse, do, dlse, wanted))
    dq, dk, dv, dbias, dsink = (next(grads) if w else None for w in wanted)
    return dq, dk, dv, None, dbias, dsink, *(None,) * 11


attention_forward_op.register_autograd(_differentiate_attention, setup_context=_save_attention)
