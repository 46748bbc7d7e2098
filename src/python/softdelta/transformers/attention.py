"""Softmax attention as transformers' AttentionInterface asks for it: in the place of "sdpa", and under a name of its own,
attn_implementation="softdelta", with what "sdpa" does not do: sinks, soft caps and windows, for models that are eager-only.
"""
import functools
import sys

import torch

import softdelta.torch

from . import masks
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
                return _attend(module, query, key, value, attention_mask, dropout, scaling, causal, kwargs), None
            except (ValueError, NotImplementedError) as error:
                reason = error
        warn_once(original, reason)
        return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                        is_causal=is_causal, **kwargs)

    return sdpa_attention_forward


def named(_):
    """The attention function of attn_implementation="softdelta"."""
    known = _known()

    def softdelta_attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None,
                                    is_causal=None, **kwargs):
        """As sdpa_attention_forward; among the others softcap, s_aux or sinks (of each head), position_bias, and what
        an indexer has chosen. A window is in the mask already. What is outside goes to the model's eager attention."""
        mask = _chosen(module, attention_mask, query, key, kwargs)
        seen, causal = masks.meaning(mask, is_causal if is_causal is not None else getattr(module, "is_causal", True))
        sinks = kwargs.get("s_aux", kwargs.get("sinks"))
        reason = outside(query, key, value, gpu=True) or _unknown(kwargs, known)
        if not reason and kwargs.get("output_attentions"):
            reason = "output_attentions"
        if not reason and sinks is not None and sinks.numel() != query.shape[1]:
            reason = "sinks of each token"
        if not reason:
            try:
                return _attend(module, query, key, value, seen, dropout, scaling, causal, kwargs,
                               softcap=kwargs.get("softcap") or 0.0, sink=None if sinks is None else sinks.reshape(-1)), None
            except (ValueError, NotImplementedError) as error:
                reason = error
        eager = _eager(module)
        if eager is None:
            raise ValueError(f"attn_implementation is 'softdelta', expected another: {reason}, and "
                             f"{type(module).__module__} has no eager_attention_forward to go back to")
        warn_once(eager, reason)
        return eager(module, query, key, value, _additive(mask, query, key, causal), dropout=dropout, scaling=scaling,
                     **kwargs)

    return softdelta_attention_forward


# Keywords of the attention function that are ours, and those of whole models that say nothing to it.
_OURS = {"softcap", "s_aux", "sinks", "position_bias", "sliding_window"}
_OF_MODELS = {"use_cache", "labels", "shift_labels", "logits_to_keep", "return_dict", "cache_position", "token_type_ids",
              "mm_token_type_ids"}


def _known():
    from transformers import GenerationConfig
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
    from transformers.utils import TransformersKwargs

    return (_OURS | _OF_MODELS | vars(GenerationConfig()).keys() | FlashAttentionKwargs.__annotations__.keys()
            | TransformersKwargs.__annotations__.keys())


def _unknown(arguments, known):
    """The first keyword that is given and may mean anything, or None."""
    return next((name for name, x in arguments.items() if x is not None and x is not False and name not in known), None)


def _chosen(module, mask, query, key, arguments):
    """The mask, without keys that an indexer has not chosen; the choice leaves the arguments. Models hide those keys
    themselves under the names "eager" and "sdpa" alone, so eager attention would see them all, too."""
    indices, blocks = arguments.pop("indices", None), arguments.pop("block_indices", None)
    if blocks is not None:  # [B, heads of the indexer, Lq, blocks]
        return module.indexer.build_block_mask(blocks, mask, key.shape[2], query.dtype, query.device,
                                               arguments.get("position_ids"))
    if indices is None:
        return mask
    Lk = key.shape[2]  # indices [B, Lq, keys]; one that is no key goes to a column of its own
    indices = torch.where((indices >= 0) & (indices < Lk), indices, Lk).long()
    chosen = torch.zeros(*indices.shape[:2], Lk + 1, dtype=torch.bool, device=key.device)
    chosen = chosen.scatter_(-1, indices, True)[:, None, :, :Lk]
    seen, causal = masks.meaning(mask, getattr(module, "is_causal", True))
    if seen is None:
        return chosen & _tril(query, key) if causal and query.shape[2] > 1 else chosen
    return seen & chosen if seen.dtype == torch.bool else seen.masked_fill(~chosen, torch.finfo(seen.dtype).min)


def _given(arguments, *names):
    """The first of the names that is given, or None; "cache" is the paged one of continuous batching."""
    return next((name for name in names if arguments.get(name) is not None), None)


def _eager(module):
    return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)


def _additive(mask, query, key, causal):
    """The mask as eager attention wants it: floats, with the diagonal in it."""
    if mask is None and causal and query.shape[2] > 1:
        mask = _tril(query, key)
    return masks.additive(mask, query.dtype) if mask is not None and mask.dtype == torch.bool else mask


def _tril(query, key):
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]


def _attend(module, query, key, value, mask, dropout, scaling, causal, others, softcap=0.0, sink=None):
    Lq, Lk = query.shape[2], key.shape[2]
    causal = causal and mask is None and Lq > 1  # a mask has the diagonal in it; one query is the last
    bounds, bias = others.get("cu_seq_lens_q"), others.get("position_bias")
    # A reentrant checkpoint calls twice, at first without a graph. The bits are the same where both ask for lse.
    with_lse = module.training and not torch.is_grad_enabled()
    if bounds is not None and mask is None and query.shape[0] == 1 and Lq > 1:
        if sink is not None or bias is not None:
            raise ValueError("sinks or a position bias are given, expected none beside cu_seq_lens_q")
        bounds_k = others.get("cu_seq_lens_k", bounds)
        o = softdelta.torch.flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (query, key, value)), bounds, bounds_k, Lq, Lk, dropout, scaling, causal,
            softcap=softcap, return_attn_probs=with_lse)
        return (o[0] if with_lse else o).unsqueeze(0)
    if bias is not None and mask is not None and mask.dtype != torch.bool:
        mask, bias = None, bias + mask
    o = softdelta.torch.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scaling,
                                                     enable_gqa=query.shape[1] != key.shape[1], bias=bias,
                                                     softcap=softcap, sink=sink, return_lse=with_lse)
    o = o[0] if with_lse else o
    return o.transpose(1, 2).contiguous()  # [B,Lq,H,Dv]
