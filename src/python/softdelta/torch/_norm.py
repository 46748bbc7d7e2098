"""The gated norm under the names and signatures of flash-linear-attention."""
from __future__ import annotations

import torch
from torch import Tensor

from .. import _options
from .._records import NormInputs, NormOptions
from . import _ops
from ._families import GATED_NORM
from ._route import expect_tensors

_GATES = {None: 0, "silu": 1, "swish": 1, "sigmoid": 2}


def rms_norm_gated(
    x: Tensor,
    g: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """flash-linear-attention: weight · x / √(mean x² + eps) · act(g), over the last dimension; the norm comes first.

    x, g [.., D], weight [D] (1 by default); activation "swish", "silu" or "sigmoid"; without g there is no gate. Sums are
    kept in f32, and the result is rounded once. Returns a tensor as x. Raises ValueError naming the argument; bias,
    residual and prenorm are refused.
    """
    for name, value in (("bias", bias), ("residual", residual)):
        if value is not None:
            raise ValueError(f"{name} is given, expected None: add it to x before, or to the result")
    if prenorm:
        raise ValueError("prenorm is True, expected False: there is no residual")
    return gated_norm(x, g, weight, _options.number_of(_GATES, "activation", activation), eps)


def gated_norm(x: Tensor, z: Tensor | None, weight: Tensor | None, gate: int, epsilon: float) -> Tensor:
    """gate as a number of the C interface; without z there is none."""
    expect_tensors(x=x, g=z)
    if x is None or x.dim() < 1:
        raise ValueError(f"x is {x}, expected a tensor [.., D]")
    if z is not None and z.shape != x.shape:
        raise ValueError(f"g has shape {list(z.shape)}, expected that of x, {list(x.shape)}")
    options = NormOptions(0 if z is None else gate, _options.number("eps", epsilon))
    y, = _ops.call(GATED_NORM, NormInputs(_rows(x), None if z is None else _rows(z), weight), options)
    return y.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """[.., D] as [B, T, H, D]."""
    if x.dim() > 4:
        return x.flatten(2, -2)
    return x if x.dim() == 4 else x[(None,) * (4 - x.dim())]


class FusedRMSNormGated(torch.nn.Module):
    """flash-linear-attention's layer: rms_norm_gated with a weight of its own.

    hidden_size D; elementwise_affine: whether there is a weight [D]; eps; activation "swish", "silu" or "sigmoid".
    """

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, activation: str = "swish",
                 device=None, dtype=None) -> None:
        super().__init__()
        _options.number_of(_GATES, "activation", activation)
        self.hidden_size, self.elementwise_affine, self.eps, self.activation = (hidden_size, elementwise_affine, eps,
                                                                                activation)
        self.register_parameter("weight", None)
        if elementwise_affine:
            self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, g: Tensor, residual: Tensor | None = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Tensor:
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, self.eps)
