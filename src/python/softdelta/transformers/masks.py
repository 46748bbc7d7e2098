"""The masks of attn_implementation="softdelta": those of eager attention, floats to add, but not in memory until a
model looks. Attention asks what they mean instead: a causal one of 32768 tokens would take 4 GB.
"""
import torch
from torch.utils import _pytree

_ALIAS = torch.ops.aten.detach.default, torch.ops.aten.alias.default


class Mask(torch.Tensor):
    """[B,1,Lq,Lk] floats: 0 keeps a key, the lowest number masks it. kept [.., Lq,Lk], bool; or None: all keys, or with
    causal those up to the query's own place; a single query sees all."""

    @staticmethod
    def __new__(cls, shape, kept, causal, dtype, device):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, shape, kept, causal, dtype, device):
        self.kept, self.causal, self._floats, self._shown = kept, causal, None, False

    def __repr__(self):
        return f"Mask({tuple(self.shape)}, kept={self.kept}, causal={self.causal})"

    def floats(self):
        """The same as an ordinary tensor, always the same one."""
        if self._floats is None:
            kept, (Lq, Lk) = self.kept, self.shape[2:]
            if kept is None:
                kept = torch.ones(Lq, Lk, dtype=torch.bool, device=self.device)
                kept = kept.tril() if self.causal and Lq > 1 else kept
            self._floats = additive(kept, self.dtype).expand(self.shape).contiguous()
        return self._floats

    def meaning(self):
        """mask, causal: as attention takes them; the floats where a model may have written to them."""
        return (self._floats, False) if self._shown else (self.kept, self.causal)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in _ALIAS and not args[0]._shown:  # reentrant checkpoints detach
            m, = args
            return Mask(m.shape, m.kept, m.causal, m.dtype, m.device)
        given = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Mask)]
        result = function(*_pytree.tree_map_only(Mask, Mask.floats, args),
                          **_pytree.tree_map_only(Mask, Mask.floats, kwargs or {}))
        for m in given:
            m._shown |= any(isinstance(x, torch.Tensor) and x.untyped_storage()._cdata == m._floats.untyped_storage()._cdata
                            for x in _pytree.tree_leaves(result))  # changed in place, or a view that may be
        return result


def additive(kept, dtype):
    """0 where kept [..] is true, else the lowest number."""
    return torch.zeros(kept.shape, dtype=dtype, device=kept.device).masked_fill(~kept, torch.finfo(dtype).min)


def make(_):
    """The function of the AttentionMaskInterface. It never answers None: models take that for what they like, some of
    them for causal, some for nothing masked."""
    from transformers.masking_utils import eager_mask, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    def softdelta_mask(batch_size, q_length, kv_length, *args, attention_mask=None, allow_is_causal_skip=True,
                       allow_is_bidirectional_skip=False, dtype=torch.float32, device="cpu", **kwargs):
        kwargs |= dict(attention_mask=attention_mask, device=device)
        kept = sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs, allow_is_causal_skip=allow_is_causal_skip,
                         allow_is_bidirectional_skip=allow_is_bidirectional_skip and not allow_is_causal_skip)
        causal = kept is None and allow_is_causal_skip
        if not is_tracing(attention_mask):
            return Mask((batch_size, 1, q_length, kv_length), kept, causal, dtype, torch.device(device))
        floats = eager_mask(batch_size, q_length, kv_length, *args, **kwargs, dtype=dtype)
        floats.softdelta_meaning = kept, causal  # a graph drops the floats that nobody reads
        return floats

    return softdelta_mask


def meaning(mask, causal):
    """mask, causal: what a mask says of both, where it is one of these."""
    return mask.meaning() if isinstance(mask, Mask) else getattr(mask, "softdelta_meaning", (mask, causal))
