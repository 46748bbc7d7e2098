"""The short causal convolution before a delta rule, with its activation.

Here channels stay innermost, as the projections before and the delta rule after have them, so nothing is transposed, and
packed sequences do not see each other. One token, or a few, moves the state on where the cache has it.
"""
import functools

import torch

from softdelta import _native, _records
from softdelta.torch import _calls, _ops, _route
from softdelta.torch._families import CAUSAL_CONVOLUTION

from .fallback import outside, warn_once
from .packed import sequence_bounds

_ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}  # as the C interface numbers them


def causal_conv1d(original):
    @functools.wraps(original)
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        """hidden_states [B,C,T], weight [C,W], bias [C] → [B,C,T]"""
        reason = outside(hidden_states, weight, gpu=True)
        if not reason and activation not in _ACTIVATIONS:
            reason = f"activation {activation}"
        if reason:
            warn_once(original, reason)
            return original(hidden_states, weight, bias, activation, **kwargs)
        if _route.is_transformed():  # torch's own has every rule of torch.func
            return original(hidden_states, weight, bias, activation, **kwargs)
        x, weight, bias = _route.autocast((hidden_states, weight, bias), (0, 1, 2))
        inputs = _records.ConvolutionInputs(x.transpose(1, 2), weight, bias,
                                            cu_seqlens=_bounds_in_row(x, sequence_bounds(kwargs)))
        options = _records.ConvolutionOptions(_ACTIVATIONS[activation])
        y, _ = _ops.call(CAUSAL_CONVOLUTION, inputs, options)
        y = y.transpose(1, 2).to(hidden_states.dtype)
        if y.requires_grad:  # a slice that a modeling file takes turns its gradient's strides around
            y.register_hook(_channels_innermost)
        return y

    return causal_conv1d_fn


def causal_conv1d_update(original):
    @functools.wraps(original)
    def update(hidden_states, conv_state, weight, bias=None, activation=None):
        """hidden_states [B,C,T], conv_state [B,C,S], which moves on by T tokens, weight [C,W], bias [C] → [B,C,T]

        Other calls, those whose gradient is recorded among them, go to the function of transformers.
        """
        tensors = hidden_states, conv_state, weight, bias
        if activation not in _ACTIVATIONS or _seen_by(tensors) != _PLAIN or outside(*tensors[:3], gpu=True):
            return original(hidden_states, conv_state, weight, bias, activation)
        x = hidden_states.transpose(1, 2)
        try:
            y = _empty(x.shape, dtype=x.dtype, device=x.device)
            _convolution_forward(_ConvolutionInputs(x, weight, bias, conv_state), (_ACTIVATIONS[activation],),
                                 (y, conv_state), _AUTOMATIC, _threads(), False)
        except (ValueError, RuntimeError):  # refused before anything is written
            return original(hidden_states, conv_state, weight, bias, activation)
        _changed(conv_state)
        return y.transpose(1, 2)

    return update


# A token is short, and the model's weights have pushed everything else out of the caches: what a step looks up are
# names of this file.
_seen_by, _PLAIN, _AUTOMATIC = _route.route, _route.PLAIN, _calls.AUTOMATIC
_ConvolutionInputs, _convolution_forward = _records.ConvolutionInputs, _native.convolution_forward
_empty, _threads, _changed = torch.empty, _calls.threads, torch.autograd.graph.increment_version


def _bounds_in_row(x, bounds):
    """Bounds of packed sequences among the tokens of x [1,C,T], or None. What a cache holds from earlier calls lies
    before the first sequence and belongs to it."""
    if bounds is None:
        return None
    before = x.shape[-1] - int(bounds[-1])
    if x.shape[0] != 1 or before < 0:
        raise ValueError(f"hidden_states {tuple(x.shape)} do not hold the {int(bounds[-1])} packed tokens in one row")
    return bounds if before == 0 else torch.cat([bounds[:1], bounds[1:] + before])


def _channels_innermost(x):
    """x [B,C,T], copied where channels are not innermost in memory; None for a gradient that nobody has."""
    return x if x is None else x.transpose(1, 2).contiguous().transpose(1, 2)
