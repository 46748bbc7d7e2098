"""Mamba-2 under the signatures of transformers' torch functions: hidden_states [B,T,H,P], dt [B,T,H], A [H], B and C
[B,T,G,N], states [B,H,P,N]; of one token [B,H,P] and so on, its state updated in place."""
import functools

import softdelta.torch

from .fallback import outside, warn_once
from .packed import sequence_bounds


def chunk_scan(original):
    @functools.wraps(original)
    def mamba2_chunk_scan(hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None,
                          dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, z=None, **kwargs):
        options = dict(D=D, dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus, dt_limit=dt_limit,
                       return_final_states=return_final_states, z=z)
        reason = outside(hidden_states, dt, B, C, gpu=True)
        if not reason:
            try:
                bounds = sequence_bounds({name: x for name, x in kwargs.items() if name != "seq_idx"})
                return softdelta.torch.mamba_chunk_scan_combined(hidden_states, dt, A, B, C, chunk_size, **options,
                                                                 seq_idx=kwargs.get("seq_idx"), cu_seqlens=bounds)
            except (ValueError, NotImplementedError) as error:
                reason = error
        warn_once(original, reason)
        return original(hidden_states, dt, A, B, C, chunk_size, **options, **kwargs)

    return mamba2_chunk_scan


def state_update(original):
    @functools.wraps(original)
    def mamba2_selective_state_update(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None,
                                      **kwargs):
        reason = outside(state, hidden_states, dt, B, C, gpu=True)
        if not reason:
            try:
                return softdelta.torch.selective_state_update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
            except (ValueError, NotImplementedError) as error:
                reason = error
        warn_once(original, reason)
        return original(state, hidden_states, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **kwargs)

    return mamba2_selective_state_update
