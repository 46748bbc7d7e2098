"""The gated norm behind a delta rule: weight · x / √(mean x² + ε) · act(gate), rounded once."""
import functools

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
