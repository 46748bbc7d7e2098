"""The causal convolution under the signatures of flash-linear-attention and causal-conv1d."""
from __future__ import annotations

import torch
from torch import Tensor

from .. import _native, _options
from .._records import ConvolutionInputs, ConvolutionOptions
from . import _calls, _ops, _route
from ._families import CAUSAL_CONVOLUTION
from ._flat import CONVOLUTION_STEP

_ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """flash-linear-attention: y_t = act(bias + Σ_{i<W} weight_i · x_{t−W+1+i}) per channel, plus residual.

    x, residual [B, T, C], weight [C, W], W ≤ 8, bias [C], initial_state [N, C, W]: the tokens before the first, the newest
    last; 0 by default. activation None, "silu" or "swish". With cu_seqlens [N+1] B is 1 and holds N sequences one after
    the other. Sums are kept in f32; y is rounded once. Returns y [B, T, C] and the final state [N, C, W], as x (None
    unless output_final_state). backend, cu_seqlens_cpu and chunk_indices are a GPU kernel's and change nothing. Raises
    ValueError naming the argument.
    """
    kept = _width(weight) if output_final_state else -1
    inputs = ConvolutionInputs(x, weight, bias, initial_state=initial_state, cu_seqlens=cu_seqlens)
    y, state = _ops.call(CAUSAL_CONVOLUTION, inputs, ConvolutionOptions(_number(activation), kept))
    return y if residual is None else y + residual, state if output_final_state else None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """causal-conv1d: as causal_conv1d, with x [B, C, T]; quickest where channels are innermost in memory.

    weight [C, W], bias [C], initial_states [B, C, W−1]; seq_idx [B, T] numbers the sequence of each token, whose
    neighbours of other numbers are not seen. Returns y [B, C, T], channels innermost; with return_final_states also the
    last W − 1 tokens [B, C, W−1]. Raises ValueError naming the argument; for final_states_out with anything but None.
    """
    if final_states_out is not None:
        raise ValueError("final_states_out is given, expected None: final states are new tensors")
    _calls.refuse_rank("x", x, 3, "[B, C, T]")
    kept = max(_width(weight) - 1, 0) if return_final_states else -1
    batch, channels, tokens = x.shape
    rows, bounds = x.transpose(1, 2), None
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            raise ValueError("seq_idx is given, expected None beside initial_states and return_final_states")
        if tuple(seq_idx.shape) != (batch, tokens):
            raise ValueError(f"seq_idx has shape {list(seq_idx.shape)}, expected [{batch}, {tokens}]")
        rows, bounds = rows.reshape(1, batch * tokens, channels), bounds_of(seq_idx)
    inputs = ConvolutionInputs(rows, weight, bias, initial_state=initial_states, cu_seqlens=bounds)
    y, state = _ops.call(CAUSAL_CONVOLUTION, inputs, ConvolutionOptions(_number(activation), kept))
    y = y.view(batch, tokens, channels).transpose(1, 2)
    return (y, state) if return_final_states else y


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    final_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> Tensor:
    """causal-conv1d, decode: a token or a few; conv_state moves on in place. No gradients.

    x [B, C] or [B, C, T], weight [C, W], bias [C], conv_state [B, C, S] with S ≥ W − 1. With conv_state_indices [B] it is
    a pool [pool, C, S], of which each batch row has an entry of its own, or −1: none, y is 0. final_state_indices and
    has_initial_state [B] are ours, as softdelta.delta_forward's. Returns y as x. Raises ValueError naming the argument,
    for cache_seqlens too, and where a gradient would be recorded.
    """
    if cache_seqlens is not None:
        raise ValueError("cache_seqlens is given, expected None: a state holds its tokens in order")
    if conv_state is None:
        raise ValueError("conv_state is None, expected a tensor [B, C, S]")
    inputs = ConvolutionInputs(x, weight, bias, initial_state=conv_state, state_indices=conv_state_indices,
                               final_state_indices=final_state_indices, has_initial_state=has_initial_state)
    inputs = _route.autocast(inputs, CAUSAL_CONVOLUTION.casts)
    way, activation = _route.route(inputs), _number(activation)
    if way == _route.PLAIN:
        y = _update(inputs, activation)
        torch.autograd.graph.increment_version(conv_state)
        return y
    if way == _route.GRADIENT:
        raise ValueError("a tensor requires a gradient, expected none: a step changes its state in place")
    if way == _route.TRANSFORMED:
        raise ValueError("a step stands in a transform (torch.func, torch.vmap, forward mode), expected none: it changes "
                         "its state in place")
    return torch.ops.softdelta.causal_convolution_step(*CONVOLUTION_STEP.to_op(inputs, ConvolutionOptions(activation)))


def _update(inputs: ConvolutionInputs, activation: int) -> Tensor:
    x, state = inputs.x, inputs.initial_state
    one = x.dim() == 2
    if not one:
        _calls.refuse_rank("x", x, 3, "[B, C] or [B, C, T]")
    rows = x.unsqueeze(1) if one else x.transpose(1, 2)
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _native.convolution_forward(inputs._replace(x=rows), ConvolutionOptions(activation), (y, state), _calls.AUTOMATIC,
                                _calls.threads(), False)
    return y.squeeze(1) if one else y.transpose(1, 2)


@torch.library.custom_op("softdelta::causal_convolution_step", mutates_args=("initial_state",), device_types=_ops.DEVICES,
                         schema=f"({CONVOLUTION_STEP.schema()}) -> Tensor")
def _step_op(*args):
    inputs, options, _ = CONVOLUTION_STEP.from_op(args)
    return _update(inputs, options.activation)


@_step_op.register_fake
def _(x, *_):
    if x.dim() == 2:
        return x.new_empty(x.shape)
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1])).transpose(1, 2)


_ops.cast(torch.ops.softdelta.causal_convolution_step.default, CAUSAL_CONVOLUTION.casts)


def bounds_of(seq_idx: Tensor) -> Tensor:
    """cu_seqlens [N+1] of rows one after the other, where every number is a sequence of its row."""
    new = torch.ones_like(seq_idx, dtype=torch.bool)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = torch.nonzero(new.flatten()).flatten()
    return torch.cat([starts, starts.new_full((1,), seq_idx.numel())])


def _width(weight: Tensor) -> int:
    _calls.refuse_rank("weight", weight, 2, "[C, W]")
    return weight.shape[1]


def _number(activation: str | None) -> int:
    return _options.number_of(_ACTIVATIONS, "activation", activation)
