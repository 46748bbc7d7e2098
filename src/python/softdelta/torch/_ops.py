"""The operations with gradients, once for all families. Eager calls use an autograd function that calls the library
directly. Everything that traces uses custom ops (softdelta::delta_forward and so on), with fake results, gradients,
torch.vmap and torch.autocast. Gradients of gradients are torch's own, or refused wherever a caller would need one."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from . import _calls
from ._families import FAMILIES, Family
from ._route import (GRADIENT, PLAIN, TRACED, TRANSFORMED, autocast, refuse_forward_mode, refuse_second_derivative, route,
                     route_back, route_below)


def call(family: Family, inputs, options) -> tuple:
    """The results, differentiable; None or an empty tensor for a result that is not wanted."""
    inputs = autocast(inputs, family.casts)
    way = route(inputs)
    if way == PLAIN:
        return family.forward(inputs, options)
    if way == GRADIENT:
        return _apply(family, options, *family.flat.given(inputs))
    if way == TRANSFORMED:
        return TransformedCall.apply(family, family.flat.options_of_op(options), *inputs)
    return family.op(inputs, options)


class Call(Function):
    @staticmethod
    def forward(ctx, family, options, *inputs):
        results, saved = family.keeping(family.flat.inputs(*inputs), options)
        _save(ctx, family, options, (*inputs, *saved))
        return results

    @staticmethod
    def backward(ctx, *incoming):
        family, options, flat = ctx.family, ctx.options, ctx.family.flat
        needs, tensors = ctx.needs_input_grad[2:], ctx.saved_tensors
        count = len(needs)
        inputs, saved, wanted = flat.inputs(*tensors[:count]), tensors[count:], flat.wanted_of(needs)
        way = route_back(tensors, incoming)
        if incoming[0] is None and all(t is None for t in incoming):
            grads = [None] * len(wanted)
        elif way == PLAIN:
            grads = family.backward(inputs, options, saved, incoming, wanted)
        elif way == GRADIENT and family.by_torch is not None:
            grads = _differentiable_gradients(family, inputs, options, incoming, wanted)
        elif way == TRACED:
            grads = family.gradient_op(inputs, options, saved[:family.saved], incoming, wanted)
        else:
            grads = Gradients.apply(family, options, wanted, *inputs, *saved[:family.saved], *incoming)
        return None, None, *flat.gradients(grads, count)


_apply = super(Function, Call).apply  # Function's own looks for transforms, and route() has found none


def _save(ctx, family, options, tensors):
    ctx.family, ctx.options = family, options
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _apart(family: Family, tensors):
    """Inputs, what is saved besides them, and what follows if only results are saved."""
    count = len(family.flat.inputs._fields)
    return family.flat.inputs(*tensors[:count]), tensors[count:], tensors[count + family.saved:]


class TransformedCall(Function):
    """The same for torch.func, which wants forward and context apart. Costs torch longer than Call."""

    @staticmethod
    def forward(family, options, *inputs):
        below = family.forward if route_below(inputs) != TRACED else family.op
        return below(family.flat.inputs(*inputs), options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        family, options, *tensors = inputs
        _save(ctx, family, options, (*tensors, *output[:family.saved]))

    backward = staticmethod(Call.backward)
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def vmap(info, dims, family, options, *inputs):
        return family.batched(lambda *x: TransformedCall.apply(family, options, *x), info.batch_size, dims[2:], inputs)


class Gradients(Function):
    """The backward pass where it is recorded or transformed."""

    @staticmethod
    def forward(family, options, wanted, *tensors):
        inputs, saved, incoming = _apart(family, tensors)
        below = family.backward if route_below(tensors) != TRACED else family.gradient_op
        return tuple(below(inputs, options, saved[:family.saved], incoming, wanted))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = jvp = staticmethod(refuse_second_derivative)

    @staticmethod
    def vmap(info, dims, family, options, wanted, *tensors):
        return family.batched(lambda *x: Gradients.apply(family, options, wanted, *x), info.batch_size, dims[3:], tensors,
                              wanted)


def _differentiable_gradients(family, inputs, options, incoming, wanted) -> list:
    """Gradients that can be differentiated again."""
    results = family.by_torch(inputs, options)
    results, incoming = zip(*((y, dy) for y, dy in zip(results, incoming) if dy is not None))
    leaves = [getattr(inputs, n) for n, w in zip(family.flat.wanted, wanted) if w]
    found = iter(torch.autograd.grad(results, leaves, incoming, create_graph=True, allow_unused=True))
    return [next(found) if w else None for w in wanted]


# ----------------------------------------------------------------------------------------------------------------------
# Custom ops

DEVICES = "cpu", "cuda"  # where ops have kernels

_library = torch.library.Library("softdelta", "FRAGMENT")


def cast(op, which) -> None:
    """torch.autocast of an op: which of its arguments."""

    def of_device(device):
        def cast(*args):
            args = autocast(args, which)
            with torch.autocast(device, enabled=False):
                return op(*args)

        return cast

    _library.impl(op, of_device("cpu"), "AutocastCPU")
    _library.impl(op, of_device("cuda"), "AutocastCUDA")


def _define(family: Family) -> None:
    """softdelta::NAME_forward: tensors and options of the records → results. NAME_backward: the same, results that are
    saved, gradients of results, which are wanted → gradients. An op returns tensors, however many are wanted."""
    flat, saved = family.flat, family.incoming[:family.saved]

    def op(name, *more):
        *more, results = more
        schema = f"({', '.join((flat.schema(), *more))}) -> {results}"
        return lambda function: torch.library.custom_op(f"softdelta::{family.name}_{name}", function, mutates_args=(),
                                                        device_types=DEVICES, schema=schema)

    def tensors(count: int) -> str:
        return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"

    def one_or_all(found):
        return found if len(found) > 1 else found[0]

    def none_is_empty(found, inputs) -> tuple:
        return tuple(inputs[0].new_empty(0) if x is None else x for x in found)

    @op("forward", tensors(len(family.incoming)))
    def forward(*args):
        inputs, options, _ = flat.from_op(args)
        return one_or_all(none_is_empty(family.forward(inputs, options), inputs))

    @forward.register_fake
    def _(*args):
        inputs, options, _ = flat.from_op(args)
        return one_or_all(none_is_empty(family.empty(inputs, options), inputs))

    @op("backward", *(f"Tensor {n[1:]}" for n in saved), *(f"Tensor? {n}" for n in family.incoming), "bool[] wanted",
        tensors(len(flat.wanted)))
    def backward(*args):
        inputs, options, (*given, wanted) = flat.from_op(args)
        grads = family.backward(inputs, options, given[:family.saved], given[family.saved:], wanted)
        return none_is_empty(grads, inputs)

    @backward.register_fake
    def _(*args):
        inputs, _, (*_, wanted) = flat.from_op(args)
        return none_is_empty(_calls.empty_gradients(inputs, flat.wanted, wanted), inputs)

    def save(ctx, inputs, output):
        results = output if isinstance(output, tuple) else (output,)
        tensors, options, _ = flat.from_op(inputs)
        _save(ctx, family, options, (*tensors, *results[:family.saved]))

    def differentiate(ctx, *incoming):
        incoming = [None if t is not None and t.dim() == 1 else t for t in incoming]  # of a result that is not wanted
        if all(t is None for t in incoming):
            return (None,) * flat.count
        inputs, saved, _ = _apart(family, ctx.saved_tensors)
        wanted = [bool(w) for w in flat.wanted_of(flat.tensors_from_op(ctx.needs_input_grad))]
        grads = family.gradient_op(inputs, ctx.options, saved, incoming, wanted)
        return *flat.shown(flat.gradients(grads)), *(None,) * (flat.count - flat.tensor_count)

    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(refuse_second_derivative)
    cast(getattr(torch.ops.softdelta, f"{family.name}_forward").default, flat.places_in_op(family.casts))

    @forward.register_vmap
    def _(info, dims, *args):
        inputs, options, _ = flat.from_op(args)
        found, at = family.batched(lambda *x: family.op(x, options), info.batch_size, flat.tensors_from_op(dims), inputs)
        return one_or_all(found), one_or_all(at)

    @backward.register_vmap
    def _(info, dims, *args):
        inputs, options, (*given, wanted) = flat.from_op(args)
        dims = *flat.tensors_from_op(dims), *dims[flat.count:flat.count + len(given)]
        op = getattr(torch.ops.softdelta, f"{family.name}_backward")
        return family.batched(lambda *x: op(*flat.to_op(x, options), *x[-len(given):], wanted), info.batch_size, dims,
                              (*inputs, *given), wanted)


for _family in FAMILIES:
    _define(_family)
