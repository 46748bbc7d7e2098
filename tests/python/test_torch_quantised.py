"""Keys and values of 8 or 4 bits with scales, in torch, against the formula on the dequantised numbers."""
import math

import pytest
import torch

import softdelta.torch as sd
from drawing import quantised_call

KINDS = ["rows", "f8", "q8_0", "q4_0"]


def truth(q, k, v, causal=False):
    """o and lse in f64 of dequantised k and v."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k) / math.sqrt(q.shape[3])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(s.shape[3] - s.shape[2] + 1), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1)


def close(got, want):
    o, lse = got
    tolerance = 1e-2 if o.dtype == torch.bfloat16 else 3e-5
    torch.testing.assert_close(o.double(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want[1], rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_what_numbers_stand_for(kind, dtype):
    q, k, v, k_scale, v_scale, *meant = quantised_call(kind, dtype)
    o, lse, _ = sd.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, k_scale=k_scale, v_scale=v_scale)
    assert o.dtype == dtype and o.shape == q.shape
    close((o, lse), truth(q, *meant, causal=True))

    first = [x.transpose(1, 2) for x in (q, k, v, k_scale, v_scale)]
    o, lse = sd.scaled_dot_product_attention(*first[:3], enable_gqa=True, return_lse=True, k_scale=first[3],
                                             v_scale=first[4])
    close((o.transpose(1, 2), lse), truth(q, *meant))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind, paged):
    q, k, v, k_scale, v_scale, *meant = quantised_call(kind, rows=(3, 8))
    scales = dict(k_scale=k_scale, v_scale=v_scale)
    bounds = torch.tensor([0, 3, 6], dtype=torch.int32)
    if paged:  # blocks of 4 rows; those of sequence 1 first
        table = torch.tensor([[2, 3], [0, 1]], dtype=torch.int32)
        pages = [x.flip(0).unflatten(1, (2, 4)).flatten(0, 1) for x in (k, v)]
        scales = {n: x if x.shape[0] == 1 else x.flip(0).unflatten(1, (2, 4)).flatten(0, 1) for n, x in scales.items()}
        got = sd.flash_attn_varlen_func(q.flatten(0, 1), *pages, bounds, seqused_k=torch.tensor([8, 8]), causal=True,
                                        block_table=table, return_attn_probs=True, **scales)
    else:
        scales = {n: x.flatten(0, 1) for n, x in scales.items()}
        got = sd.flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bounds,
                                        torch.tensor([0, 8, 16]), causal=True, return_attn_probs=True, **scales)
    o, lse = truth(q, *meant, causal=True)
    close(got[:2], (o.flatten(0, 1), lse.transpose(0, 1).flatten(1)))


@pytest.mark.parametrize("kind", ["rows", "q8_0", "q4_0"])
def test_compiled_and_mapped(kind):
    q, k, v, k_scale, v_scale, *_ = quantised_call(kind)

    def f(q, k, v, k_scale, v_scale):
        return sd.flash_attn_func(q, k, v, causal=True, k_scale=k_scale, v_scale=v_scale)

    want = f(q, k, v, k_scale, v_scale)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, k_scale, v_scale), want)
    both = torch.vmap(f, in_dims=(0, None, None, None, None))(torch.stack([q, 2 * q]), k, v, k_scale, v_scale)
    assert torch.equal(both[0], want) and torch.equal(both[1], f(2 * q, k, v, k_scale, v_scale))


def test_autocast_leaves_numbers_of_8_bits():
    q, k, v, k_scale, v_scale, *meant = quantised_call("f8")
    with torch.autocast("cpu", torch.bfloat16):
        o = sd.flash_attn_func(q, k, v, k_scale=k_scale, v_scale=v_scale)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.double(), truth(q, *meant)[0], rtol=3e-2, atol=3e-2)


def test_what_does_not_fit_is_refused():
    q, k, v, k_scale, v_scale, *_ = quantised_call("q8_0")
    with pytest.raises(ValueError, match="q requires a gradient, expected none with k_scale or v_scale"):
        sd.flash_attn_func(q.requires_grad_(), k, v, k_scale=k_scale, v_scale=v_scale)
    q = q.detach()
    with pytest.raises(ValueError, match="k_scale"):
        sd.flash_attn_func(q, k, v, v_scale=v_scale)
    with pytest.raises(ValueError, match="k_scale"):
        sd.flash_attn_func(q, k, v, k_scale=k_scale[:, :3], v_scale=v_scale)
    with pytest.raises(ValueError, match="query has 3 dimensions, expected 4 with k_scale or v_scale"):
        sd.scaled_dot_product_attention(q[0], k, v, k_scale=k_scale, v_scale=v_scale)
