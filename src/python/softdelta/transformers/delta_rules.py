"""The gated delta rule and Kimi delta attention, under the signatures of transformers' torch functions.

query, key [B,T,H,K], value [B,T,HV,V], beta [B,T,HV], g [B,T,HV] (gated delta rule) or [B,T,HV,K] (Kimi), natural
logarithms; initial_state [B,HV,K,V] or one for each packed sequence. Result: output [B,T,HV,V] and the final state
or None. chunk_size names a method of the torch functions and changes nothing here.
"""
import functools

import softdelta.torch

from .fallback import outside, warn_once
from .packed import sequence_bounds


def chunk_gated_delta_rule(original):
    return _chunk(original, softdelta.torch.chunk_gated_delta_rule)


def recurrent_gated_delta_rule(original):
    return _recurrent(original, softdelta.torch.fused_recurrent_gated_delta_rule)


def chunk_kda(original):
    return _chunk(original, softdelta.torch.chunk_kda)


def recurrent_kda(original):
    return _recurrent(original, softdelta.torch.fused_recurrent_kda)


def _chunk(original, operator):
    @functools.wraps(original)
    def chunk(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
              use_qk_l2norm_in_kernel=False, **kwargs):
        return _call(original, operator, query, key, value, g, beta, kwargs, initial_state=initial_state,
                     output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    return chunk


def _recurrent(original, operator):
    @functools.wraps(original)
    def recurrent(query, key, value, g, beta, initial_state=None, output_final_state=False,
                  use_qk_l2norm_in_kernel=False, **kwargs):
        return _call(original, operator, query, key, value, g, beta, kwargs, initial_state=initial_state,
                     output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    return recurrent


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
