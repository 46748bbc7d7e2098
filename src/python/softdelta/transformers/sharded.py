"""The same functions where the ranks of a process group share every sequence: each calls its model with its tokens, the
first rank with the first ones. A prefill or a training step, without a cache. Nothing goes back to transformers: its
functions would see the tokens of one rank alone."""
import contextlib
import functools

import torch

import softdelta.torch.distributed as sdd
from softdelta.torch.distributed._ranks import Ranks

from . import masks
from .packed import sequence_bounds


def replacements(group, method):
    """name in a modeling file → maker of its replacement; as those of enable()."""
    return {
        "torch_chunk_gated_delta_rule": _chunk("gated_delta_rule", group, method),
        "torch_recurrent_gated_delta_rule": _refused(group),
        "chunk_kimi_delta_attention": _chunk("kda", group, method),
        "recurrent_kimi_delta_attention": _refused(group),
        "mamba2_chunk_scan": _refused(group, "no layer of Mamba-2"),
        "mamba2_selective_state_update": _refused(group),
        "causal_conv1d_fn": _convolution(group),
        "causal_conv1d_update": _refused(group),
    }


def classes(group):
    """The same of classes, where enable() has others."""
    return {("LightningAttention", "get_slope_rate"): _refused(group, "no lightning attention")}


def shard(input_ids, labels=None, group=None):
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)

    def own(x):
        return sdd.shard(x, group).contiguous()

    batch = {"input_ids": own(input_ids), "position_ids": own(positions), "use_cache": False}
    if labels is not None:
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        batch |= {"labels": own(labels), "shift_labels": own(shifted),
                  "num_items_in_batch": int((shifted != -100).sum())}
    return batch


def attention(group):
    """Maker of the attention function."""

    def make(original):
        def sharded_attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None,
                                      is_causal=None, **kwargs):
            """query [B,H,Lq,D], key [B,Hk,Lk,D], value [B,Hk,Lk,Dv] of this rank → [B,Lq,H,Dv]"""
            with _by_all(group, "attention"):
                mask, causal = masks.meaning(
                    attention_mask, is_causal if is_causal is not None else getattr(module, "is_causal", True))
                _expect(mask is None, "attention_mask is given, expected None: sequences of one length")
                _expect(dropout == 0.0, f"dropout is {dropout}, expected 0")
                for name in ("cache", "position_bias", "indices", "block_indices", "cu_seq_lens_q"):
                    _expect(kwargs.get(name) is None, f"{name} is given, expected none")
            window, sinks = kwargs.get("sliding_window"), kwargs.get("s_aux", kwargs.get("sinks"))
            o, _ = sdd.attention(*(x.transpose(1, 2) for x in (query, key, value)), group=group, scale=scaling,
                                 causal="top_left" if causal else "none", softcap=kwargs.get("softcap") or 0.0,
                                 sink=None if sinks is None else sinks.reshape(-1),
                                 window_left=-1 if window is None else window - 1,
                                 window_right=-1 if window is None or causal else window - 1)
            return o.to(query.dtype), None

        return sharded_attention_forward

    return make


def _chunk(rule, group, method):
    def make(original):
        @functools.wraps(original)
        def chunk(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                  use_qk_l2norm_in_kernel=False, **kwargs):
            with _by_all(group, "delta_rule"):
                _expect(initial_state is None and not output_final_state, "a cache is used, expected use_cache=False")
                _expect(sequence_bounds(kwargs) is None, "sequences are packed, expected one in each row")
            o, _ = sdd.delta_rule(rule, query, key, value, g=g, beta=beta, group=group, method=method,
                                  use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
            return o.to(query.dtype), None

        return chunk

    return make


def _convolution(group):
    def make(original):
        @functools.wraps(original)
        def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
            """hidden_states [B,C,T] of this rank, weight [C,W], bias [C] → [B,C,T]"""
            with _by_all(group, "short_convolution"):
                _expect(sequence_bounds(kwargs) is None, "sequences are packed, expected one in each row")
            y = sdd.short_convolution(hidden_states.transpose(1, 2), weight, bias, group=group,
                                      activation="silu" if activation == "swish" else activation)
            return y.transpose(1, 2)

        return causal_conv1d_fn

    return make


def _refused(group, expected="a prefill or a training step"):
    def make(original):
        @functools.wraps(original)
        def refused(*args, **kwargs):
            with _by_all(group, original.__name__):
                _expect(False, f"{original.__name__} is called, expected {expected}")

        return refused

    return make


@contextlib.contextmanager
def _by_all(group, call):
    """What is wrong on this rank is the same error on every rank: the others wait for it in their call."""
    try:
        yield
    except ValueError as e:
        failure = e

        def check():
            raise failure

        Ranks(group).agree(call, {}, check)


def _expect(holds, otherwise):
    if not holds:
        raise ValueError(f"{otherwise}; ranks share sequences")
