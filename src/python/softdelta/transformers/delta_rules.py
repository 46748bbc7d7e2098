"""The gated delta rule and Kimi delta attention, under the signatures of transformers' torch functions.

query, key [B,T,H,K], value [B,T,HV,V], beta [B,T,HV], g [B,T,HV] (gated delta rule) or [B,T,HV,K] (Kimi), natural
logarithms; initial_state [B,HV,K,V] or one for each packed sequence. Result: output [B,T,HV,V] and the final state
or None. chunk_size names a method of the torch functions and changes nothing here.
"""
import functools
import math

import torch

import softdelta.torch
from softdelta import _native, _options
from softdelta.torch import _calls, _ops

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
    @functools.wraps(original)
    def recurrent(query, key, value, g, beta, initial_state=None, output_final_state=False,
                  use_qk_l2norm_in_kernel=False, **kwargs):
        step = operator
        tensors = query, key, value, g, beta, initial_state
        if initial_state is not None and output_final_state and not _ops.traced(tensors) and not _ops.needs_gradient(tensors):
            step = functools.partial(_step, rule)
        return _call(original, step, query, key, value, g, beta, kwargs, initial_state=initial_state,
                     output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    return recurrent


def _step(rule, query, key, value, g, beta, cu_seqlens, initial_state, output_final_state, use_qk_l2norm_in_kernel):
    """One token, decode: the state that is given is updated in place and returned.

    It is the cache's own, and the modeling files copy what is returned into the cache, so nothing is left to copy.
    """
    o = torch.empty(value.shape, dtype=value.dtype)
    _native.delta_forward(
        rule=_options.RULES[rule], q=query, k=key, v=value, g=g, g_gamma=None, beta=beta, p=None,
        initial_state=initial_state, A_log=None, dt_bias=None, cu_seqlens=cu_seqlens, state_indices=None,
        scale=math.nan, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=False,
        lower_bound=math.nan, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
        state_interval=64, o=o, final_state=initial_state, states=None, engine=_calls.AUTOMATIC,
        threads=_calls.threads(), bf16=False)
    return o, initial_state


def _call(original, operator, query, key, value, g, beta, others, **options):
    reason = outside(query, key, value, g, beta)
    if not reason:
        try:
            output, state = operator(query, key, value, g=g, beta=beta, cu_seqlens=sequence_bounds(others), **options)
            return output.to(query.dtype), state
        except (ValueError, NotImplementedError) as error:
            reason = error
    warn_once(original, reason)
    return original(query, key, value, g=g, beta=beta, **options, **others)
