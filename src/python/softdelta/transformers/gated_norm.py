"""The gated norm behind a delta rule: weight · x / √(mean x² + ε) · act(gate), rounded once. Mamba's takes x · silu(gate) for x,
and norms between layers have no gate."""
import functools

import torch

from softdelta.torch import _norm, _route

from .fallback import outside, warn_once

_GATES = {"silu": 1, "swish": 1, "sigmoid": 2}  # as the C interface numbers them


def forward(original):
    @functools.wraps(original)
    def forward(self, hidden_states, gate=None):
        """hidden_states, gate [.., D] → as hidden_states"""
        activation = _GATES.get(self.activation)
        if gate is None or activation is None or gate.shape != hidden_states.shape or _route.is_transformed():
            return original(self, hidden_states, gate)
        reason = outside(hidden_states, gate, self.weight, gpu=True)
        if reason:
            warn_once(original, reason)
            return original(self, hidden_states, gate)
        return _norm.gated_norm(hidden_states, gate, self.weight, activation, self.variance_epsilon)

    return forward


def gate_first(original):
    @functools.wraps(original)
    def forward(self, hidden_states, gate=None):
        """hidden_states, gate [.., D] → as hidden_states; the mean is that of each group_size of D"""
        if not _fits(self, original, hidden_states, gate):
            return original(self, hidden_states, gate)
        x = hidden_states.float()
        if gate is not None:
            gate = torch.nn.functional.silu(gate.float())
            x = gate * x if torch.is_grad_enabled() else gate.mul_(x)
        if self.group_size == x.shape[-1]:
            y = _norm.gated_norm(x, None, self.weight, 0, self.variance_epsilon)
        else:
            groups = x.unflatten(-1, (-1, self.group_size))
            y = _norm.gated_norm(groups, None, None, 0, self.variance_epsilon).flatten(-2) * self.weight
        return y.to(hidden_states.dtype)

    return forward


def ungated(original):
    @functools.wraps(original)
    def forward(self, hidden_states):
        """hidden_states [.., D] → as hidden_states"""
        if not _fits(self, original, hidden_states):
            return original(self, hidden_states)
        return _norm.gated_norm(hidden_states, None, self.weight, 0, self.variance_epsilon)

    return forward


def _fits(norm, original, x, gate=None):
    """Whether this is for the kernels. Of a weight of another type the result has another type in most models."""
    if norm.weight.dtype != x.dtype or gate is not None and gate.shape != x.shape or _route.is_transformed():
        return False
    reason = outside(*(tensor for tensor in (x, gate, norm.weight) if tensor is not None), gpu=True)
    if reason:
        warn_once(original, reason)
    return not reason
