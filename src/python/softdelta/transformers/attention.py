"""Softmax attention as transformers' AttentionInterface asks for it under the name "sdpa"."""
import functools

import softdelta.torch

from .fallback import outside, warn_once


def sdpa(original):
    @functools.wraps(original)
    def sdpa_attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                               **kwargs):
        """query [B,H,Lq,D], key [B,Hk,Lk,D], value [B,Hk,Lk,Dv] → [B,Lq,H,Dv]"""
        reason = outside(query, key, value) or _unsupported(kwargs)
        if not reason:
            causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            try:
                return _attend(query, key, value, attention_mask, dropout, scaling, causal, kwargs), None
            except (ValueError, NotImplementedError) as error:
                reason = error
        warn_once(original, reason)
        return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                        is_causal=is_causal, **kwargs)

    return sdpa_attention_forward


def _unsupported(others):
    for name in ("position_bias", "softcap", "cache"):  # the last is the paged one of continuous batching
        if others.get(name) is not None:
            return name
    return None


def _attend(query, key, value, mask, dropout, scaling, causal, others):
    Lq, Lk = query.shape[2], key.shape[2]
    causal = causal and mask is None and Lq > 1  # a mask has the diagonal in it; one query is the last
    bounds = others.get("cu_seq_lens_q")
    if bounds is not None and mask is None and query.shape[0] == 1 and Lq > 1:
        bounds_k = others.get("cu_seq_lens_k", bounds)
        o = softdelta.torch.flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (query, key, value)), bounds, bounds_k, Lq, Lk, dropout, scaling, causal)
        return o.unsqueeze(0)
    o = softdelta.torch.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scaling,
                                                     enable_gqa=query.shape[1] != key.shape[1])
    return o.transpose(1, 2).contiguous()  # [B,Lq,H,Dv]
