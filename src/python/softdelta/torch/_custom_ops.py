"""The operations as torch custom ops (softdelta::delta_forward and so on), for torch.compile and everything that
traces: fake results, gradients, torch.vmap and torch.autocast of each."""
from __future__ import annotations

import torch
from torch import Tensor

from . import _calls, _route, _vmap
from ._flat import ATTENTION, DELTA

# What torch.autocast casts, by its place among the inputs
DELTA_CASTS, ATTENTION_CASTS = DELTA.places("q", "k", "v", "p"), ATTENTION.places("q", "k", "v", "bias")

DEVICES = "cpu", "cuda"  # where ops have kernels

_library = torch.library.Library("softdelta", "FRAGMENT")


def cast(op, which) -> None:
    """torch.autocast of an op: which of its arguments."""

    def of_device(device):
        def cast(*args):
            args = _route.autocast(args, which)
            with torch.autocast(device, enabled=False):
                return op(*args)

        return cast

    _library.impl(op, of_device("cpu"), "AutocastCPU")
    _library.impl(op, of_device("cuda"), "AutocastCUDA")


def _op(name: str, schema: str):
    """A custom op whose arguments are those of a record."""
    return lambda function: torch.library.custom_op(f"softdelta::{name}", function, mutates_args=(), device_types=DEVICES,
                                                    schema=schema)


def _none_is_empty(gradients: list, example: Tensor) -> tuple:
    """Ops return tensors, however many are wanted."""
    return tuple(example.new_empty(0) if x is None else x for x in gradients)


# ----------------------------------------------------------------------------------------------------------------------
# Delta rules


def delta_rule(inputs, options, output_final_state: bool):
    """_calls.delta_forward as an op."""
    o, state = torch.ops.softdelta.delta_forward(*DELTA.to_op(inputs, options), output_final_state,
                                                 options.float_products)
    return o, state if output_final_state else None


def delta_gradients(inputs, options, do, dfinal_state, wanted) -> list:
    """_calls.delta_backward as an op."""
    grads = torch.ops.softdelta.delta_backward(*DELTA.to_op(inputs, options), do, dfinal_state, list(wanted),
                                               options.float_products)
    return [x if w else None for x, w in zip(grads, wanted)]


def _from_delta_op(args, own: int):
    """DELTA.from_op of an op with so many arguments of its own. float_products came later: saved graphs lack it."""
    inputs, options, rest = DELTA.from_op(args)
    return inputs, options._replace(float_products=any(rest[own:])), rest[:own]


@_op("delta_forward", f"({DELTA.schema()}, bool output_final_state, bool float_products=False) -> (Tensor, Tensor)")
def delta_forward_op(*args):
    inputs, options, (output_final_state,) = _from_delta_op(args, 1)
    o, state = _calls.delta_forward(inputs, options, output_final_state)
    return o, inputs.q.new_empty(0, dtype=_calls.wide(inputs.q)) if state is None else state


@delta_forward_op.register_fake
def _(*args):
    inputs, options, (output_final_state,) = _from_delta_op(args, 1)
    q, v = inputs.q, inputs.v
    shape = _calls.state_shape(q, v, inputs.cu_seqlens, options.state_v_first) if output_final_state else (0,)
    return v.new_empty(v.shape), q.new_empty(shape, dtype=_calls.wide(q))


@_op("delta_backward", f"({DELTA.schema()}, Tensor? do, Tensor? dfinal_state, bool[] wanted, "
     f"bool float_products=False) -> ({', '.join(['Tensor'] * len(DELTA.wanted))})")
def delta_backward_op(*args):
    inputs, options, (do, dfinal_state, wanted) = _from_delta_op(args, 3)
    return _none_is_empty(_calls.delta_backward(inputs, options, do, dfinal_state, wanted), inputs.q)


@delta_backward_op.register_fake
def _(*args):
    inputs, _, (_, _, wanted) = _from_delta_op(args, 3)
    return _none_is_empty(_calls.empty_gradients(inputs, DELTA.wanted, wanted), inputs.q)


def _save_delta(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:DELTA.tensor_count])
    _, ctx.options, (ctx.output_final_state,) = _from_delta_op(inputs, 1)
    ctx.set_materialize_grads(False)


def _differentiate_delta(ctx, do, dfinal_state):
    count = len(ctx.needs_input_grad)
    if not ctx.output_final_state:
        dfinal_state = None
    if do is None and dfinal_state is None:
        return (None,) * count
    inputs, needs = DELTA.tensors_from_op(ctx.saved_tensors), DELTA.tensors_from_op(ctx.needs_input_grad)
    grads = delta_gradients(inputs, ctx.options, do, dfinal_state, [bool(w) for w in DELTA.wanted_of(needs)])
    return *DELTA.shown(DELTA.gradients(grads)), *(None,) * (count - DELTA.tensor_count)


delta_forward_op.register_autograd(_differentiate_delta, setup_context=_save_delta)
delta_backward_op.register_autograd(_route.refuse_second_derivative)
cast(torch.ops.softdelta.delta_forward.default, DELTA_CASTS)


@delta_forward_op.register_vmap
def _(info, dims, *args):
    inputs, options, (output_final_state,) = _from_delta_op(args, 1)
    dims = DELTA.tensors_from_op(dims)

    def call(*x):
        return torch.ops.softdelta.delta_forward(*DELTA.to_op(x, options), output_final_state, options.float_products)

    return _vmap.delta_rule(call, info.batch_size, dims, inputs)


@delta_backward_op.register_vmap
def _(info, dims, *args):
    inputs, options, (do, dfinal_state, wanted) = _from_delta_op(args, 3)
    dims = *DELTA.tensors_from_op(dims), *dims[DELTA.count:DELTA.count + 2]

    def call(*x):
        *x, do, dfinal_state = x
        return torch.ops.softdelta.delta_backward(*DELTA.to_op(x, options), do, dfinal_state, wanted,
                                                  options.float_products)

    return _vmap.delta_rule(call, info.batch_size, dims, (*inputs, do, dfinal_state), wanted)


# ----------------------------------------------------------------------------------------------------------------------
# Attention


def _swapped(x):
    """[B, H, L, D] as the library wants it, [B, L, H, D], and back."""
    return x if x is None else x.transpose(1, 2)


def attention(inputs, options, with_lse: bool, heads_first: bool = False):
    """_calls.attention_forward as an op."""
    if heads_first:
        inputs = _heads_second(inputs)
    o, lse = torch.ops.softdelta.attention_forward(*ATTENTION.to_op(inputs, options), *ATTENTION.late(inputs))
    return _swapped(o) if heads_first else o, lse if with_lse else None


def attention_gradients(inputs, options, o, lse, do, dlse, wanted, heads_first: bool = False) -> list:
    """_calls.attention_backward as an op."""
    if heads_first:
        inputs, o, do = _heads_second(inputs), _swapped(o), _swapped(do)
    grads = torch.ops.softdelta.attention_backward(*ATTENTION.to_op(inputs, options), o, lse, do, dlse, list(wanted),
                                                   *ATTENTION.late(inputs))
    grads = [x if w else None for x, w in zip(grads, wanted)]
    if not heads_first:
        return grads
    return [_swapped(x) if n in ("q", "k", "v") else x for n, x in zip(ATTENTION.wanted, grads)]


def _heads_second(inputs):
    return inputs._replace(**{n: _swapped(getattr(inputs, n)) for n in ("q", "k", "v", "k_scale", "v_scale")})


BACKWARD_OWN = 5  # o, lse, do, dlse, wanted


@_op("attention_forward", f"({ATTENTION.schema()}{ATTENTION.late_schema()}) -> (Tensor, Tensor)")
def attention_forward_op(*args):
    inputs, options, _ = ATTENTION.from_op(args, 0)
    return _calls.attention_forward(inputs, options, True)


@attention_forward_op.register_fake
def _(*args):
    inputs, _, _ = ATTENTION.from_op(args, 0)
    q, v = inputs.q, inputs.v
    batch, rows, heads, _ = q.shape
    scaled = inputs.k_scale is not None or inputs.v_scale is not None
    size = _calls.quantised_value_size(inputs) if scaled else v.shape[3]
    o = (q if scaled else v).new_empty((batch, rows, heads, size))
    return o, q.new_empty((batch, heads, rows), dtype=_calls.wide(q))


@_op("attention_backward", f"({ATTENTION.schema()}, Tensor o, Tensor lse, Tensor? do, Tensor? dlse, bool[] wanted"
     f"{ATTENTION.late_schema()}) -> ({', '.join(['Tensor'] * len(ATTENTION.wanted))})")
def attention_backward_op(*args):
    inputs, options, (o, lse, do, dlse, wanted) = ATTENTION.from_op(args, BACKWARD_OWN)
    return _none_is_empty(_calls.attention_backward(inputs, options, o, lse, do, dlse, wanted), inputs.q)


@attention_backward_op.register_fake
def _(*args):
    inputs, _, (*_, wanted) = ATTENTION.from_op(args, BACKWARD_OWN)
    return _none_is_empty(_calls.empty_gradients(inputs, ATTENTION.wanted, wanted), inputs.q)


def _save_attention(ctx, inputs, output):
    tensors, ctx.options, _ = ATTENTION.from_op(inputs, 0)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate_attention(ctx, do, dlse):
    *inputs, o, lse = ctx.saved_tensors
    count = len(ctx.needs_input_grad)
    if do is None and dlse is None:
        return (None,) * count
    inputs, needs = ATTENTION.inputs(*inputs), ATTENTION.tensors_from_op(ctx.needs_input_grad)
    grads = attention_gradients(inputs, ctx.options, o, lse, do, dlse, [bool(w) for w in ATTENTION.wanted_of(needs)])
    return *ATTENTION.shown(ATTENTION.gradients(grads)), *(None,) * (count - ATTENTION.tensor_count)


attention_forward_op.register_autograd(_differentiate_attention, setup_context=_save_attention)
attention_backward_op.register_autograd(_route.refuse_second_derivative)
cast(torch.ops.softdelta.attention_forward.default, ATTENTION_CASTS)


@attention_forward_op.register_vmap
def _(info, dims, *args):
    inputs, options, _ = ATTENTION.from_op(args, 0)

    def call(*x):
        return torch.ops.softdelta.attention_forward(*ATTENTION.to_op(x, options), *ATTENTION.late(x))

    return _vmap.attention(call, info.batch_size, ATTENTION.tensors_from_op(dims), inputs)


@attention_backward_op.register_vmap
def _(info, dims, *args):
    inputs, options, (o, lse, do, dlse, wanted) = ATTENTION.from_op(args, BACKWARD_OWN)
    dims = *ATTENTION.tensors_from_op(dims, BACKWARD_OWN), *dims[ATTENTION.count:ATTENTION.count + 4]

    def call(*x):
        return torch.ops.softdelta.attention_backward(*ATTENTION.to_op(x, options), *x[-4:], wanted,
                                                      *ATTENTION.late(x))

    return _vmap.attention(call, info.batch_size, dims, (*inputs, o, lse, do, dlse), wanted)
