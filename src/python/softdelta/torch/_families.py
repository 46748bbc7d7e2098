"""The families of operations that have gradients: what _ops must know of each."""
from __future__ import annotations

from typing import Callable, NamedTuple

import torch

from .._records import DELTA_SUMS
from . import _calls, _vmap
from ._flat import ATTENTION, CONVOLUTION, DELTA, NORM, Flat
from ._route import refuse_second_derivative


class Family(NamedTuple):
    name: str              # of its ops
    flat: Flat
    empty: Callable        # inputs, options → results to be written; None where not wanted
    forward: Callable      # inputs, options → results
    keeping: Callable      # inputs, options → results, and tensors that the backward pass takes besides the inputs
    backward: Callable     # inputs, options, those tensors, gradients of results, wanted → gradients of flat.wanted
    saved: int             # so many results are those tensors wherever the call is an op
    incoming: tuple[str, ...]  # gradients of results
    casts: tuple[int, ...]     # what torch.autocast casts
    batched: Callable          # torch.vmap of it
    by_torch: Callable | None  # inputs, options → results, by torch's functions: for second derivatives

    def op(self, inputs, options) -> tuple:
        results = getattr(torch.ops.softdelta, f"{self.name}_forward")(*self.flat.to_op(inputs, options))
        return results if isinstance(results, (tuple, list)) else (results,)

    def gradient_op(self, inputs, options, saved, incoming, wanted) -> list:
        op = getattr(torch.ops.softdelta, f"{self.name}_backward")
        grads = op(*self.flat.to_op(inputs, options), *saved, *incoming, list(wanted))
        return [x if w else None for x, w in zip(grads, wanted)]


def _nothing_kept(forward):
    return lambda inputs, options: (forward(inputs, options), ())


# ----------------------------------------------------------------------------------------------------------------------
# The same by torch's functions


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


# ----------------------------------------------------------------------------------------------------------------------

DELTA_RULE = Family(
    name="delta", flat=DELTA, empty=_calls.empty_delta, forward=_calls.delta_forward,
    keeping=_calls.delta_forward_keeping, backward=_calls.delta_backward, saved=0, incoming=("do", "dfinal_state"),
    casts=DELTA.places("q", "k", "v", "p"), batched=_vmap.rows(DELTA, (*DELTA_SUMS, "cu_seqlens")), by_torch=None)
SOFTMAX_ATTENTION = Family(
    name="attention", flat=ATTENTION, empty=_calls.empty_attention, forward=_calls.attention_forward,
    keeping=_calls.attention_forward_keeping, backward=_calls.attention_backward, saved=2, incoming=("do", "dlse"),
    casts=ATTENTION.places("q", "k", "v", "bias"), batched=_vmap.attention, by_torch=None)
CAUSAL_CONVOLUTION = Family(
    name="causal_convolution", flat=CONVOLUTION, empty=_calls.empty_convolution, forward=_calls.convolution_forward,
    keeping=_nothing_kept(_calls.convolution_forward), backward=_calls.convolution_backward, saved=0,
    incoming=("dy", "dfinal_state"), casts=CONVOLUTION.places("x"),
    batched=_vmap.rows(CONVOLUTION, ("weight", "bias", "cu_seqlens")), by_torch=_convolution_by_torch)
GATED_NORM = Family(
    name="gated_norm", flat=NORM, empty=_calls.empty_norm, forward=_calls.norm_forward,
    keeping=_nothing_kept(_calls.norm_forward), backward=_calls.norm_backward, saved=0, incoming=("dy",), casts=(),
    batched=_vmap.rows(NORM, ("weight",)), by_torch=_norm_by_torch)

FAMILIES = DELTA_RULE, SOFTMAX_ATTENTION, CAUSAL_CONVOLUTION, GATED_NORM
