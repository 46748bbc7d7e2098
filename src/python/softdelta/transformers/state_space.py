"""Mamba-2 under the signatures of transformers' torch functions: hidden_states [B,T,H,P], dt [B,T,H], A [H], B and C
[B,T,G,N], states [B,H,P,N]; of one token [B,H,P] and so on, its state updated in place."""
import functools
import inspect

import softdelta.torch

from .fallback import outside, warn_once
from .packed import sequence_bounds


def chunk_scan(original):
    known = inspect.signature(softdelta.torch.mamba_chunk_scan_combined).parameters.keys() - {"cu_seqlens"}

    @functools.wraps(original)
    def mamba2_chunk_scan(hidden_states, dt, A, B, C, chunk_size, D=None, **kwargs):
        reason = outside(hidden_states, dt, B, C, gpu=True)
        if not reason:
            try:
                bounds = sequence_bounds({name: x for name, x in kwargs.items() if name != "seq_idx"})
                options = {name: x for name, x in kwargs.items() if name in known}
                return softdelta.torch.mamba_chunk_scan_combined(hidden_states, dt, A, B, C, chunk_size, D, **options,
                                                                 cu_seqlens=bounds)
            except (ValueError, NotImplementedError) as error:
                reason = error
        warn_once(original, reason)
        return original(hidden_states, dt, A, B, C, chunk_size, D, **kwargs)

    return mamba2_chunk_scan


def state_update(original):
    known = inspect.signature(softdelta.torch.selective_state_update).parameters.keys()

    @functools.wraps(original)
    def mamba2_selective_state_update(state, hidden_states, dt, A, B, C, D=None, **kwargs):
        reason = outside(state, hidden_states, dt, B, C, gpu=True)
        if not reason:
            try:
                options = {name: x for name, x in kwargs.items() if name in known}
                return softdelta.torch.selective_state_update(state, hidden_states, dt, A, B, C, D, **options)
            except (ValueError, NotImplementedError) as error:
                reason = error
        warn_once(original, reason)
        return original(state, hidden_states, dt, A, B, C, D, **kwargs)

    return mamba2_selective_state_update
