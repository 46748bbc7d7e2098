"""The lightning attention of MiniMax: simple GLA whose heads have constant gates. Projections, norm and output gate are the
layer's own; the state [B,H,K,V] is in the cache."""
import functools
import inspect

import torch

import softdelta.torch

from .fallback import outside, warn_once
from .packed import sequence_bounds


def forward(original):
    mask_padding = inspect.unwrap(original).__globals__.get("apply_mask_to_padding_states")

    @functools.wraps(original)
    def lightning_forward(self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs):
        cache = kwargs.pop("past_key_values", cache)
        reason = outside(hidden_states, gpu=True)
        if not reason:
            state = None if cache is None else cache.get_linear_cache(self.layer_idx)
            qkv = self.act_fn(self.qkv_proj(hidden_states))
            if mask_padding is not None:
                qkv = mask_padding(qkv, attention_mask)
            qkv = qkv.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim))
            gates = -self.slope_rate.flatten().to(torch.promote_types(qkv.dtype, torch.float32))
            try:
                o, last = softdelta.torch.chunk_simple_gla(
                    *qkv.split(self.head_dim, dim=-1), g_gamma=gates, scale=1.0, initial_state=state,
                    output_final_state=True, cu_seqlens=sequence_bounds(kwargs) if state is None else None)
            except (ValueError, NotImplementedError) as error:
                reason = error
        if reason:
            warn_once(original, reason)
            return original(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        o = self.norm(o.flatten(-2))
        o = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * o)
        last = last.to(qkv.dtype)
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, last)
        return o, last

    return lightning_forward
