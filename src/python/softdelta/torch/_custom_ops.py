"""The operations as torch custom ops (softdelta::delta_forward and so on), for torch.compile and everything that
traces: fake results, gradients, torch.vmap and torch.autocast of each."""
from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from . import _calls, _route, _vmap

# What torch.autocast casts: of DELTA_INPUTS q, k, v, p; of ATTENTION_INPUTS q, k, v, bias
DELTA_CASTS, ATTENTION_CASTS = (0, 1, 2, 6), (0, 1, 2, 4)

_library = torch.library.Library("softdelta", "FRAGMENT")


def cast(op, which) -> None:
    """torch.autocast of an op: which of its arguments."""

    def cast(*args):
        args = _route.autocast(args, which)
        with torch.autocast("cpu", enabled=False):
            return op(*args)

    _library.impl(op, cast, "AutocastCPU")


def _none_is_empty(gradients: list, example: Tensor) -> tuple:
    """Ops return tensors, however many are wanted."""
    return tuple(example.new_empty(0) if x is None else x for x in gradients)


# ----------------------------------------------------------------------------------------------------------------------
# Delta rules


def delta_rule(inputs, options: tuple, output_final_state: bool):
    """_calls.delta_forward as an op."""
    o, state = torch.ops.softdelta.delta_forward(*inputs, *options, output_final_state)
    return o, state if output_final_state else None


def delta_gradients(inputs, options: tuple, do, dfinal_state, wanted) -> list:
    """_calls.delta_backward as an op."""
    grads = torch.ops.softdelta.delta_backward(*inputs, *options, do, dfinal_state, list(wanted))
    return [x if w else None for x, w in zip(grads, wanted)]


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
        do: Tensor | None, dfinal_state: Tensor | None, wanted: Sequence[bool]) -> tuple[
            Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias, cu_seqlens)
    options = (rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel,
               allow_neg_eigval, state_v_first)
    return _none_is_empty(_calls.delta_backward(inputs, options, do, dfinal_state, wanted), q)


@delta_backward_op.register_fake
def _(q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias, cu_seqlens, rule, scale, use_qk_l2norm_in_kernel,
      use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, do, dfinal_state,
      wanted):
    inputs = (q, k, v, g, g_gamma, beta, p, initial_state, A_log, dt_bias)
    return _none_is_empty([torch.empty_like(t) if w else None for t, w in zip(inputs, wanted)], q)


def _save_delta(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:11])
    ctx.options = inputs[11:19]
    ctx.output_final_state = inputs[19]
    ctx.set_materialize_grads(False)


def _differentiate_delta(ctx, do, dfinal_state):
    if not ctx.output_final_state:
        dfinal_state = None
    if do is None and dfinal_state is None:
        return (None,) * 20
    return *delta_gradients(ctx.saved_tensors, ctx.options, do, dfinal_state, ctx.needs_input_grad[:10]), *(None,) * 10


delta_forward_op.register_autograd(_differentiate_delta, setup_context=_save_delta)
delta_backward_op.register_autograd(_route.refuse_second_derivative)
cast(torch.ops.softdelta.delta_forward.default, DELTA_CASTS)


@delta_forward_op.register_vmap
def _(info, dims, *args):
    return _vmap.delta_rule(lambda *x: torch.ops.softdelta.delta_forward(*x, *args[11:]), info.batch_size, dims, args[:11])


@delta_backward_op.register_vmap
def _(info, dims, *args):
    *inputs, do, dfinal_state = *args[:11], *args[19:21]
    wanted = args[21]

    def call(*x):
        return torch.ops.softdelta.delta_backward(*x[:11], *args[11:19], *x[11:], wanted)

    return _vmap.delta_rule(call, info.batch_size, (*dims[:11], *dims[19:21]), (*inputs, do, dfinal_state),
                            sums=wanted[4] or wanted[8] or wanted[9])


# ----------------------------------------------------------------------------------------------------------------------
# Attention


def _swapped(x):
    """[B, H, L, D] as the library wants it, [B, L, H, D], and back."""
    return x if x is None else x.transpose(1, 2)


def attention(inputs, options: tuple, with_lse: bool, heads_first: bool = False):
    """_calls.attention_forward as an op."""
    if heads_first:
        inputs = *map(_swapped, inputs[:3]), *inputs[3:]
    o, lse = torch.ops.softdelta.attention_forward(*inputs, *options)
    return _swapped(o) if heads_first else o, lse if with_lse else None


def attention_gradients(inputs, options: tuple, o, lse, do, dlse, wanted, heads_first: bool = False) -> list:
    """_calls.attention_backward as an op."""
    if heads_first:
        inputs, o, do = (*map(_swapped, inputs[:3]), *inputs[3:]), _swapped(o), _swapped(do)
    grads = torch.ops.softdelta.attention_backward(*inputs, *options, o, lse, do, dlse, list(wanted))
    grads = [x if w else None for x, w in zip(grads, wanted)]
    return [*map(_swapped, grads[:3]), *grads[3:]] if heads_first else grads


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
        wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table)
    options = (scale, causal, window_left, window_right, softcap, empty_row, top_w)
    return _none_is_empty(_calls.attention_backward(inputs, options, o, lse, do, dlse, wanted), q)


@attention_backward_op.register_fake
def _(q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, scale, causal, window_left,
      window_right, softcap, empty_row, top_w, o, lse, do, dlse, wanted):
    return _none_is_empty([torch.empty_like(t) if w else None for t, w in zip((q, k, v, bias, sink), wanted)], q)


def _save_attention(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.options = inputs[10:]
    ctx.set_materialize_grads(False)


def _differentiate_attention(ctx, do, dlse):
    need = ctx.needs_input_grad
    *inputs, o, lse = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 17
    dq, dk, dv, dbias, dsink = attention_gradients(inputs, ctx.options, o, lse, do, dlse, (*need[:3], *need[4:6]))
    return dq, dk, dv, None, dbias, dsink, *(None,) * 11


attention_forward_op.register_autograd(_differentiate_attention, setup_context=_save_attention)
attention_backward_op.register_autograd(_route.refuse_second_derivative)
cast(torch.ops.softdelta.attention_forward.default, ATTENTION_CASTS)


@attention_forward_op.register_vmap
def _(info, dims, *args):
    return _vmap.attention(lambda *x: torch.ops.softdelta.attention_forward(*x, *args[10:]), info.batch_size, dims,
                           args[:10])


@attention_backward_op.register_vmap
def _(info, dims, *args):
    wanted = args[21]

    def call(*x):
        return torch.ops.softdelta.attention_backward(*x[:10], *args[10:17], *x[10:], wanted)

    return _vmap.attention(call, info.batch_size, (*dims[:10], *dims[17:21]), (*args[:10], *args[17:21]),
                           bias_sums=wanted[3], sink_sums=wanted[4])
