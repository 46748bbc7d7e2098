"""Softmax attention as transformers' AttentionInterface asks for it: in the place of "sdpa", and under a name of its own,
attn_implementation="softdelta", with what "sdpa" does not do: sinks, soft caps and windows, for models that are eager-only.
"""
import functools
import sys

import torch

import softdelta.torch

from .fallback import outside, warn_once


def sdpa(original):
    @functools.wraps(original)
    def sdpa_attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                               **kwargs):
        """query [B,H,Lq,D], key [B,Hk,Lk,D], value [B,Hk,Lk,Dv] → [B,Lq,H,Dv]"""
        reason = outside(query, key, value) or _given(kwargs, "softcap", "cache")
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


def named(_):
    """The attention function of attn_implementation="softdelta"."""

    def softdelta_attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None,
                                    is_causal=None, **kwargs):
        """As sdpa_attention_forward; among the others softcap, s_aux (sinks, [H]), position_bias, sliding_window. What
        is outside goes to the model's eager attention."""
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        reason = outside(query, key, value, gpu=True) or _given(kwargs, "cache", "block_indices")
        if not reason and kwargs.get("output_attentions"):
            reason = "output_attentions"
        if not reason:
            sinks = kwargs.get("s_aux", kwargs.get("sinks"))
            try:
                return _attend(query, key, value, attention_mask, dropout, scaling, causal, kwargs,
                               softcap=kwargs.get("softcap") or 0.0, sink=None if sinks is None else sinks.reshape(-1),
                               window=kwargs.get("sliding_window")), None
            except (ValueError, NotImplementedError) as error:
                reason = error
        eager = _eager(module)
        if eager is None:
            raise ValueError(f"attn_implementation is 'softdelta', expected another: {reason}, and "
                             f"{type(module).__module__} has no eager_attention_forward to go back to")
        warn_once(eager, reason)
        return eager(module, query, key, value, _additive(attention_mask, query, key, causal), dropout=dropout,
                     scaling=scaling, **kwargs)

    return softdelta_attention_forward


def named_mask(_):
    """The mask of attn_implementation="softdelta": bool [B,1,Lq,Lk], true keeps, or None where causal says it all."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask


def _given(arguments, *names):
    """The first of the names that is given, or None; "cache" is the paged one of continuous batching."""
    return next((name for name in names if arguments.get(name) is not None), None)


def _eager(module):
    return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)


def _additive(mask, query, key, causal):
    """The mask as eager attention wants it: floats, with the diagonal in it."""
    if mask is None and causal and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)


def _attend(query, key, value, mask, dropout, scaling, causal, others, softcap=0.0, sink=None, window=None):
    Lq, Lk = query.shape[2], key.shape[2]
    causal = causal and mask is None and Lq > 1  # a mask has the diagonal in it; one query is the last
    window = (-1, -1) if window is None or mask is not None else (window - 1, window - 1)  # and the window
    bounds, bias = others.get("cu_seq_lens_q"), others.get("position_bias")
    if bounds is not None and mask is None and query.shape[0] == 1 and Lq > 1:
        if sink is not None or bias is not None:
            raise ValueError("sinks or a position bias are given, expected none beside cu_seq_lens_q")
        bounds_k = others.get("cu_seq_lens_k", bounds)
        o = softdelta.torch.flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (query, key, value)), bounds, bounds_k, Lq, Lk, dropout, scaling, causal,
            window, softcap)
        return o.unsqueeze(0)
    if bias is not None and mask is not None and mask.dtype != torch.bool:
        mask, bias = None, bias + mask
    o = softdelta.torch.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scaling,
                                                     enable_gqa=query.shape[1] != key.shape[1], bias=bias,
                                                     window=window, softcap=softcap, sink=sink)
    return o.transpose(1, 2).contiguous()  # [B,Lq,H,Dv]
