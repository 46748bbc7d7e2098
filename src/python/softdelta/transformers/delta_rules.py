"""The gated delta rule and Kimi delta attention, under the signatures of transformers' torch functions.

query, key [B,T,H,K], value [B,T,HV,V], beta [B,T,HV], g [B,T,HV] (gated delta rule) or [B,T,HV,K] (Kimi), natural
logarithms; initial_state [B,HV,K,V] or one for each packed sequence. Result: output [B,T,HV,V] and the final state
or None. chunk_size names a method of the torch functions and changes nothing here.
"""
import functools

import torch

import softdelta.torch
from softdelta import _native, _options, _records
from softdelta.torch import _calls, _route

from .fallback import outside, warn_once
from .packed import sequence_bounds


def chunk_gated_delta_rule(original):
    return _chunk(original, softdelta.torch.chunk_gated_delta_rule)


def recurrent_gated_delta_rule(original):
    return _recurrent(original, softdelta.torch.fused_recurrent_gated_delta_rule, "gated_delta_rule")


def chunk_kda(original):
    return _chunk(original, softdelta.torch.chunk_kda)


def recurrent_kda(original):
    return _recurrent(original, softdelta.torch.fused_recurrent_kda, "kda")


def _chunk(original, operator):
    @functools.wraps(original)
    def chunk(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
              use_qk_l2norm_in_kernel=False, **kwargs):
        return _call(original, operator, query, key, value, g, beta, kwargs, initial_state=initial_state,
                     output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    return chunk


def _recurrent(original, operator, rule):
    rule = _options.RULES[rule]

    @functools.wraps(original)
    def recurrent(query, key, value, g, beta, initial_state=None, output_final_state=False,
                  use_qk_l2norm_in_kernel=False, **kwargs):
        tensors = query, key, value, g, beta, initial_state
        if initial_state is not None and output_final_state and _seen_by(tensors) == _PLAIN:
            o = _step(rule, tensors, use_qk_l2norm_in_kernel, sequence_bounds(kwargs))
            if o is not None:
                return o, initial_state
        return _call(original, operator, query, key, value, g, beta, kwargs, initial_state=initial_state,
                     output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    return recurrent


# A token is short, and the model's weights have pushed everything else out of the caches: what a step looks up are
# names of this file, and what is wrong with a call is said on the longer way.
_seen_by, _PLAIN, _AUTOMATIC = _route.route, _route.PLAIN, _calls.AUTOMATIC
_DeltaInputs, _DeltaOptions = _records.DeltaInputs, _records.DeltaOptions
_empty_like, _threads, _delta_forward = torch.empty_like, _calls.threads, _native.delta_forward
_changed = torch.autograd.graph.increment_version


def _step(rule, tensors, use_qk_l2norm_in_kernel, cu_seqlens):
    """One token, decode: the state is updated in place; None for what the library refuses.

    The state is the cache's own, and the modeling files copy what is returned into the cache, so nothing is left to
    copy.
    """
    query, key, value, g, beta, state = tensors
    if query.dtype != value.dtype:
        return None
    try:
        o = _empty_like(value)
        inputs = _DeltaInputs(query, key, value, g=g, beta=beta, initial_state=state, cu_seqlens=cu_seqlens)
        options = _DeltaOptions(rule, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        _delta_forward(inputs, options, (o, state), _AUTOMATIC, _threads(), False)
    except (ValueError, RuntimeError):
        return None
    _changed(state)
    return o


def _call(original, operator, query, key, value, g, beta, others, **options):
    reason = outside(query, key, value, g, beta, gpu=True)
    if not reason:
        try:
            output, state = operator(query, key, value, g=g, beta=beta, cu_seqlens=sequence_bounds(others), **options)
            return output.to(query.dtype), state
        except (ValueError, NotImplementedError) as error:
            reason = error
    warn_once(original, reason)
    return original(query, key, value, g=g, beta=beta, **options, **others)
