"""The causal convolution and the gated norm with gradients. Eager calls use an autograd function that calls the library
directly. torch.compile and torch.func use custom ops (softdelta::causal_convolution_forward and so on). Gradients of
gradients are torch's: it computes the same formula with its own functions."""
from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch.autograd import Function

from . import _calls, _custom_ops, _vmap
from ._flat import CONVOLUTION, NORM, Flat
from ._route import (GRADIENT, PLAIN, TRACED, TRANSFORMED, autocast, refuse_forward_mode, refuse_second_derivative, route,
                     route_back, route_below, without_autocast)


class Family(NamedTuple):
    name: str
    flat: Flat
    forward: Callable   # inputs, options → results; None where not wanted
    backward: Callable  # inputs, options, gradients of results, wanted → gradients of flat.wanted
    fake: Callable      # inputs, options → results of the op
    by_torch: Callable  # inputs, options → results, by torch's functions
    incoming: tuple[str, ...]  # gradients of results
    shared: tuple[str, ...]    # inputs without a batch dimension
    casts: tuple[int, ...]     # what torch.autocast casts

    def op(self, inputs, options):
        results = getattr(torch.ops.softdelta, f"{self.name}_forward")(*self.flat.to_op(inputs, options))
        return results if isinstance(results, (tuple, list)) else (results,)

    def vmap(self, call, size, dims, tensors, wanted=()):
        """call(*tensors) over a batch. tensors: the inputs, and other tensors whose first dimension is B or N. wanted: which
        gradients are among the results."""
        packed = any(n == "cu_seqlens" and x is not None for n, x in zip(self.flat.inputs._fields, tensors))
        sums = any(w and n in self.shared for n, w in zip(self.flat.wanted, wanted))
        return _vmap.layer(call, size, dims, tensors, self.flat.places(*self.shared), packed or sums)

    def gradient_op(self, inputs, options, incoming, wanted) -> list:
        op = getattr(torch.ops.softdelta, f"{self.name}_backward")
        grads = op(*self.flat.to_op(inputs, options), *incoming, list(wanted))
        return [x if w else None for x, w in zip(grads, wanted)]


def call(family: Family, inputs, options) -> tuple:
    """The results, with gradients; None or an empty tensor for a result that is not wanted."""
    inputs = autocast(inputs, family.casts)
    way = route(inputs)
    if way == PLAIN:
        return family.forward(inputs, options)
    if way == GRADIENT:
        return Layer.apply(family, options, *inputs)
    if way == TRANSFORMED:
        return TransformedLayer.apply(family, options, *inputs)
    with without_autocast(inputs.x):
        return family.op(inputs, options)


class Layer(Function):
    @staticmethod
    def forward(ctx, family, options, *inputs):
        _save(ctx, (family, options, *inputs))
        return family.forward(family.flat.inputs(*inputs), options)

    @staticmethod
    def backward(ctx, *incoming):
        family, inputs = ctx.family, ctx.family.flat.inputs(*ctx.saved_tensors)
        wanted = family.flat.wanted_of(ctx.needs_input_grad[2:])
        way = route_back(inputs, *incoming)
        if all(t is None for t in incoming):
            grads = [None] * len(wanted)
        elif way == PLAIN:
            grads = family.backward(inputs, ctx.options, incoming, wanted)
        elif way == GRADIENT:
            grads = _differentiable_gradients(family, inputs, ctx.options, incoming, wanted)
        elif way == TRACED:
            grads = family.gradient_op(inputs, ctx.options, incoming, wanted)
        else:
            grads = LayerGradients.apply(family, ctx.options, wanted, *inputs, *incoming)
        return None, None, *family.flat.gradients(grads)


def _save(ctx, inputs, output=None):
    ctx.family, ctx.options = inputs[:2]
    ctx.save_for_backward(*inputs[2:])
    ctx.set_materialize_grads(False)


class TransformedLayer(Function):
    """The same for torch.func, which needs forward and setup_context as two functions."""

    @staticmethod
    def forward(family, options, *inputs):
        below = family.forward if route_below(inputs) != TRACED else family.op
        return below(family.flat.inputs(*inputs), options)

    setup_context = staticmethod(_save)
    backward = staticmethod(Layer.backward)
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def vmap(info, dims, family, options, *inputs):
        return family.vmap(lambda *x: TransformedLayer.apply(family, options, *x), info.batch_size, dims[2:], inputs)


class LayerGradients(Function):
    """The backward pass under torch.func's transforms."""

    @staticmethod
    def forward(family, options, wanted, *tensors):
        inputs, incoming = family.flat.inputs(*tensors[:-len(family.incoming)]), tensors[-len(family.incoming):]
        below = family.backward if route_below(tensors) != TRACED else family.gradient_op
        return tuple(below(inputs, options, incoming, wanted))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = jvp = staticmethod(refuse_second_derivative)

    @staticmethod
    def vmap(info, dims, family, options, wanted, *tensors):
        return family.vmap(lambda *x: LayerGradients.apply(family, options, wanted, *x), info.batch_size, dims[3:],
                           tensors, wanted)


def _differentiable_gradients(family, inputs, options, incoming, wanted) -> list:
    """Gradients that can be differentiated again."""
    results = family.by_torch(inputs, options)
    results, incoming = zip(*((y, dy) for y, dy in zip(results, incoming) if dy is not None))
    leaves = [getattr(inputs, n) for n, w in zip(family.flat.wanted, wanted) if w]
    found = iter(torch.autograd.grad(results, leaves, incoming, create_graph=True, allow_unused=True))
    return [next(found) if w else None for w in wanted]


def _define(family: Family) -> None:
    flat = family.flat
    results = ", ".join(["Tensor"] * len(family.incoming))
    results = f"({results})" if len(family.incoming) > 1 else results

    def one_or_all(tensors: tuple):
        return tensors if len(tensors) > 1 else tensors[0]

    @_custom_ops._op(f"{family.name}_forward", f"({flat.schema()}) -> {results}")
    def forward(*args):
        inputs, options, _ = flat.from_op(args)
        return one_or_all(_custom_ops._none_is_empty(family.forward(inputs, options), inputs.x))

    @forward.register_fake
    def _(*args):
        inputs, options, _ = flat.from_op(args)
        return one_or_all(family.fake(inputs, options))

    given = ", ".join(f"Tensor? {n}" for n in family.incoming)
    gradients = ", ".join(["Tensor"] * len(flat.wanted))

    @_custom_ops._op(f"{family.name}_backward", f"({flat.schema()}, {given}, bool[] wanted) -> ({gradients})")
    def backward(*args):
        inputs, options, (*incoming, wanted) = flat.from_op(args)
        return _custom_ops._none_is_empty(family.backward(inputs, options, incoming, wanted), inputs.x)

    @backward.register_fake
    def _(*args):
        inputs, _, (*_, wanted) = flat.from_op(args)
        return _custom_ops._none_is_empty(_calls.empty_gradients(inputs, flat.wanted, wanted), inputs.x)

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:flat.tensor_count])
        _, ctx.options, _ = flat.from_op(inputs)
        ctx.set_materialize_grads(False)

    def differentiate(ctx, *incoming):
        incoming = [None if t is not None and t.dim() == 1 else t for t in incoming]  # of a result that is not wanted
        if all(t is None for t in incoming):
            return (None,) * flat.count
        inputs, needs = flat.tensors_from_op(ctx.saved_tensors), flat.tensors_from_op(ctx.needs_input_grad)
        grads = family.gradient_op(inputs, ctx.options, incoming, [bool(w) for w in flat.wanted_of(needs)])
        return *flat.shown(flat.gradients(grads)), *(None,) * (flat.count - flat.tensor_count)

    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(refuse_second_derivative)
    _custom_ops.cast(getattr(torch.ops.softdelta, f"{family.name}_forward").default, family.casts)

    @forward.register_vmap
    def _(info, dims, *args):
        inputs, options, _ = flat.from_op(args)
        found, at = family.vmap(lambda *x: family.op(flat.inputs(*x), options), info.batch_size,
                                flat.tensors_from_op(dims), inputs)
        return one_or_all(found), one_or_all(at)

    @backward.register_vmap
    def _(info, dims, *args):
        inputs, options, (*incoming, wanted) = flat.from_op(args)
        n = len(incoming)
        dims = *flat.tensors_from_op(dims), *dims[flat.count:flat.count + n]
        op = getattr(torch.ops.softdelta, f"{family.name}_backward")
        return family.vmap(lambda *x: op(*flat.to_op(flat.inputs(*x[:-n]), options), *x[-n:], wanted), info.batch_size,
                           dims, (*inputs, *incoming), wanted)


# ----------------------------------------------------------------------------------------------------------------------


def _activate(activation: int, x):
    return (lambda t: t, torch.nn.functional.silu, torch.sigmoid)[activation](x)


def _convolution_by_torch(inputs, options):
    x, weight, bias, state = inputs.x, inputs.weight, inputs.bias, inputs.initial_state
    if inputs.cu_seqlens is not None:
        refuse_second_derivative()
    T, W = x.shape[1], weight.shape[1]
    before = x.new_zeros(x.shape[0], max(W - 1, options.kept), x.shape[2])
    if state is not None:
        before = state.transpose(1, 2)
    every = torch.cat([before, x], dim=1)
    start = before.shape[1] - W + 1
    wide = torch.promote_types(x.dtype, torch.float32)
    z = sum(every[:, start + i:start + i + T].to(wide) * weight[:, i].to(wide) for i in range(W))
    y = _activate(options.activation, z if bias is None else z + bias.to(wide)).to(x.dtype)
    return y, every[:, every.shape[1] - max(options.kept, 0):].transpose(1, 2)


def _norm_by_torch(inputs, options):
    x, wide = inputs.x, torch.promote_types(inputs.x.dtype, torch.float32)
    y = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + options.epsilon)
    if inputs.weight is not None:
        y = y * inputs.weight.to(wide)
    if inputs.z is not None:
        y = y * _activate(options.gate, inputs.z.to(wide))
    return y.to(x.dtype),


def _convolution_fake(inputs, options):
    x = inputs.x
    state = _calls.final_state_shape(inputs, options) if options.kept >= 0 else (0,)
    return x.new_empty(x.shape), x.new_empty(state)


CAUSAL_CONVOLUTION = Family(
    "causal_convolution", CONVOLUTION, _calls.convolution_forward, _calls.convolution_backward, _convolution_fake,
    _convolution_by_torch, ("dy", "dfinal_state"), ("weight", "bias", "cu_seqlens"), CONVOLUTION.places("x"))
GATED_NORM = Family(
    "gated_norm", NORM, _calls.norm_forward, _calls.norm_backward, lambda inputs, _: (inputs.x.new_empty(inputs.x.shape),),
    _norm_by_torch, ("dy",), ("weight",), ())

_define(CAUSAL_CONVOLUTION)
_define(GATED_NORM)
