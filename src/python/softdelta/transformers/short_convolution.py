"""The short causal convolution before a delta rule.

For whole sequences it is torch's own; here channels stay innermost, as the projections before and the delta rule after
have them, so nothing is transposed, and packed sequences are kept apart. For one token it is a product and a sum: a
convolution of one output takes longer to set up than to compute.
"""
import functools

import torch
import torch.nn.functional as F

from softdelta.torch import _ops

from .fallback import outside, warn_once
from .packed import sequence_bounds


def causal_conv1d(original):
    from transformers.activations import ACT2FN

    @functools.wraps(original)
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        """hidden_states [B,C,T], weight [C,W], bias [C] → [B,C,T]"""
        reason = outside(hidden_states, weight)
        if reason:
            warn_once(original, reason)
            return original(hidden_states, weight, bias, activation, **kwargs)
        if _ops.is_transformed():  # torch's own has every rule of torch.func
            return original(hidden_states, weight, bias, activation, **kwargs)
        x, weight, bias = _ops.autocast((hidden_states.to(weight.dtype), weight, bias), (0, 1, 2))
        bounds = sequence_bounds(kwargs)
        y = _Convolution.apply(x, weight, bias) if bounds is None else _convolve_packed(x, weight, bias, bounds)
        y = (y if activation is None else ACT2FN[activation](y)).to(hidden_states.dtype)
        if y.requires_grad:  # a slice that a modeling file takes turns its gradient's strides around
            y.register_hook(_channels_innermost)
        return y

    return causal_conv1d_fn


def causal_conv1d_update(original):
    from transformers.activations import ACT2FN

    @functools.wraps(original)
    def update(hidden_states, conv_state, weight, bias=None, activation=None):
        """hidden_states [B,C,1], conv_state [B,C,W], which moves on by a token, weight [C,W], bias [C] → [B,C,1]

        Other calls, those whose gradient is recorded among them, go to the function of transformers.
        """
        tensors = hidden_states, conv_state, weight, bias
        W = weight.shape[-1]
        if (hidden_states.shape[-1] != 1 or conv_state.shape[-1] != W or not conv_state.is_contiguous()
                or not hidden_states.dtype == conv_state.dtype == weight.dtype
                or _ops.route(tensors) != _ops.PLAIN or outside(*tensors[:3])):
            return original(hidden_states, conv_state, weight, bias, activation)
        conv_state.copy_(conv_state.roll(-1))  # as one row of numbers; the last of each channel is the new one
        conv_state[:, :, -1:] = hidden_states
        products = conv_state * weight if weight.dtype in _WIDE else conv_state.float() * weight
        y = torch.mv(products.view(-1, W), _ones(W, products.dtype)).view(hidden_states.shape)
        if bias is not None:
            y = y + bias.unsqueeze(-1)
        y = y.to(hidden_states.dtype)
        return y if activation is None else ACT2FN[activation](y)

    return update


_WIDE = (torch.float32, torch.float64)


@functools.cache
def _ones(W, dtype):
    return torch.ones(W, dtype=dtype)


class _Convolution(torch.autograd.Function):
    """y[t] = Σ_j weight[W-1-j] x[t-j] + bias, as an image of height 1 whose channels may be innermost in memory.

    The backward pass of torch's own transposes and takes longer than both convolutions and the sums here, which torch
    can differentiate again. Operands are cast before they come here, for forward and backward alike.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        """x [B,C,T], weight [C,W], bias [C] or None"""
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        with torch.autocast("cpu", enabled=False):
            return _correlate(x, weight, bias)[:, :, :x.shape[-1]]

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        T, W = x.shape[-1], weight.shape[-1]
        dx = dweight = dbias = None
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                dx = _correlate(dy, weight.flip(-1))[:, :, W - 1:]
            if ctx.needs_input_grad[1]:
                wide = torch.promote_types(x.dtype, torch.float32)
                x, g = x.to(wide), dy.to(wide)
                taps = [(g[:, :, j:] * x[:, :, :max(T - j, 0)]).sum((0, 2)) for j in reversed(range(W))]
                dweight = torch.stack(taps, dim=-1).to(weight.dtype)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                dbias = dy.sum((0, 2))
        return dx, dweight, dbias


def _correlate(x, weight, bias=None):
    """x [B,C,T] with W-1 zeros at both ends → [B,C,T+W-1]"""
    B, C, T = x.shape
    # Strides are said in full: torch tells channels that are innermost by all of them, of a single row's batch too.
    image = _channels_innermost(x).as_strided((B, C, 1, T), (T * C, 1, T * C, C))
    return F.conv2d(image, weight.view(C, 1, 1, -1), bias, padding=(0, weight.shape[1] - 1), groups=C)[:, :, 0]


def _channels_innermost(x):
    """x [B,C,T], copied where channels are not innermost in memory; None for a gradient that nobody has."""
    return x if x is None else x.transpose(1, 2).contiguous().transpose(1, 2)


def _convolve_packed(x, weight, bias, bounds):
    """One row of sequences: W-1 zeros go between neighbours, and come out again."""
    B, C, T = x.shape
    bounds = bounds.to(torch.long)
    N, gap = len(bounds) - 1, weight.shape[-1] - 1
    before = T - int(bounds[-1])  # what a cache holds from earlier calls belongs to the first sequence
    if B != 1 or before < 0:
        raise ValueError(f"hidden_states {tuple(x.shape)} do not hold the {int(bounds[-1])} packed tokens in one row")
    sequence = torch.repeat_interleave(torch.arange(N), bounds.diff())
    at = torch.arange(T) + gap * F.pad(sequence, (before, 0))
    apart = x.new_zeros(1, T + gap * (N - 1) if N else T, C).index_copy(1, at, x.transpose(1, 2))
    return _Convolution.apply(apart.transpose(1, 2), weight, bias).index_select(2, at)
