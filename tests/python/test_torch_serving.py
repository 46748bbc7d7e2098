"""Attention as servers and torch itself call it: caches that grow, packed sequences, torch's attention sent to ours."""
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import softdelta.torch as sd
from softdelta.torch import _calls

H, HK, D = 4, 2, 8


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# flash_attn_with_kvcache


KINDS = "own", "rows of a larger one", "paged"


def cache_of(kind, rows=12, batch=2):
    """A function from sequence to its rows of both caches, and arguments of flash_attn_with_kvcache."""
    if kind == "paged":
        k, v, table = draw(8, 4, HK, D), draw(8, 4, HK, D, seed=1), torch.tensor([[5, 0, 7], [2, 6, 1]], dtype=torch.int32)
        return k, v, lambda b: (k[table[b].long()].flatten(0, 1), v[table[b].long()].flatten(0, 1)), {"block_table": table}
    k, v = draw(3, rows, HK, D), draw(3, rows, HK, D, seed=1)
    if kind == "rows of a larger one":
        return k, v, lambda b: (k[2 - b], v[2 - b]), {"cache_batch_idx": torch.tensor([2, 1])}
    k, v = k[:batch], v[:batch]
    return k, v, lambda b: (k[b], v[b]), {}


@pytest.mark.parametrize("kind, new, compiled", [*((k, n, False) for k in KINDS for n in (0, 1, 3)), ("own", 0, True),
                                                 ("paged", 3, True)])
def test_a_cache_grows_and_is_read(kind, new, compiled):
    k_cache, v_cache, rows_of, how = cache_of(kind)
    used, q = torch.tensor([7, 4], dtype=torch.int32), draw(2, 2, H, D, seed=2)
    k, v = draw(2, new, HK, D, seed=3), draw(2, new, HK, D, seed=4)
    before, expected = [t.clone() for t in (k_cache, v_cache)], []
    for b in range(2):
        keys, values = (torch.cat([t[:used[b]], n[b]]) for t, n in zip(rows_of(b), (k, v)))
        n = len(keys)
        seen = torch.arange(n) <= torch.arange(n - 2, n)[:, None]
        expected.append(F.scaled_dot_product_attention(q[b].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1),
                                                       seen, enable_gqa=True).transpose(0, 1))
    if new:
        how |= {"k": k, "v": v}
    if compiled:
        torch._dynamo.reset()
    f = torch.compile(sd.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True) if compiled else \
        sd.flash_attn_with_kvcache
    o, lse = f(q, k_cache, v_cache, cache_seqlens=used, causal=True, return_softmax_lse=True, **how)
    torch.testing.assert_close(o, torch.stack(expected))
    assert lse.shape == (2, H, 2) and used.tolist() == [7, 4]
    for b in range(2):
        for cache, n in zip(rows_of(b), (k, v)):
            assert torch.equal(cache[used[b]:used[b] + new], n[b])
    changed = sum(int((a != b).any(-1).sum()) for a, b in zip((k_cache, v_cache), before))
    assert changed == 2 * 2 * new * HK  # and nothing else


def test_the_whole_cache_or_one_number():
    k, v, _, _ = cache_of("own")
    q = draw(2, 1, H, D)
    assert torch.equal(sd.flash_attn_with_kvcache(q, k, v), sd.flash_attn_func(q, k, v))
    torch.testing.assert_close(sd.flash_attn_with_kvcache(q, k, v, cache_seqlens=5), sd.flash_attn_func(q, k[:, :5], v[:, :5]))
    k, v, rows_of, how = cache_of("rows of a larger one")
    whole = torch.stack([torch.stack(rows_of(b)) for b in range(2)])
    torch.testing.assert_close(sd.flash_attn_with_kvcache(q, k, v, **how), sd.flash_attn_func(q, whole[:, 0], whole[:, 1]))


@pytest.mark.parametrize("given, message", [
    (dict(rotary_cos=torch.ones(1)), "rotary_cos is given, expected None: rotate q and k"),
    (dict(cache_leftpad=torch.ones(1)), "cache_leftpad is given"),
    (dict(v=None), "k or v is given alone"),
    (dict(cache_seqlens=None), "cache_seqlens is None, expected the keys in use"),
    (dict(cache_seqlens=torch.tensor([7, 12])), "cache_seqlens holds 12, expected 0 to 11"),
    (dict(cache_seqlens=torch.tensor([-1, 2])), "cache_seqlens holds -1, expected 0"),
    (dict(cache_seqlens=torch.tensor([2])), r"cache_seqlens has shape \[1\], expected \[2\]"),
    (dict(k=torch.zeros(2, 1, HK, D)), r"k is torch.float32 \[2, 1, 2, 8\], expected torch.float64"),
    (dict(block_table=torch.tensor([[0], [9]])), "block_table names page 9, expected 0 to 1"),
    (dict(alibi_slopes=torch.ones(2, H)), "alibi_slopes has 2 dimensions, expected 1"),
    (dict(q=torch.zeros(2, 1, H, D, dtype=torch.float64, requires_grad=True)), "requires a gradient"),
])
def test_a_wrong_call_changes_nothing(given, message):
    k_cache, v_cache, _, _ = cache_of("own")
    call = dict(q=draw(2, 1, H, D), k=draw(2, 1, HK, D), v=draw(2, 1, HK, D), cache_seqlens=torch.tensor([3, 4])) | given
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(ValueError, match=message):
        sd.flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **call)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


# ----------------------------------------------------------------------------------------------------------------------
# varlen_attn


def test_packed_sequences_as_torch_names_them():
    q, k, v = (draw(9, heads, D, seed=i).requires_grad_() for i, heads in enumerate((H, HK, HK)))
    bounds = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    aux = type("AuxRequest", (), {"lse": True})()  # torch.nn.attention.varlen has it since 2.10
    o, lse = sd.varlen_attn(q, k, v, bounds, bounds, 5, 5, window_size=(-1, 0), enable_gqa=True, return_aux=aux)
    assert lse.shape == (H, 9)
    expected = [F.scaled_dot_product_attention(*(t[a:b].transpose(0, 1) for t in (q, k, v)), is_causal=True,
                                               enable_gqa=True).transpose(0, 1) for a, b in ((0, 4), (4, 9))]
    torch.testing.assert_close(o, torch.cat(expected))
    do = draw(9, H, D, seed=5)
    for a, b in zip(*(torch.autograd.grad(t, (q, k, v), do) for t in (o, torch.cat(expected)))):
        torch.testing.assert_close(a, b)
    k_cache, v_cache, rows_of, how = cache_of("paged")
    used, q = torch.tensor([7, 4], dtype=torch.int32), q.detach()[:2]
    o = sd.varlen_attn(q, k_cache, v_cache, torch.tensor([0, 1, 2]), None, 1, 7, enable_gqa=True, seqused_k=used, **how)
    for b in range(2):
        keys, values = (t[:used[b]].transpose(0, 1) for t in rows_of(b))
        torch.testing.assert_close(o[b][:, None], F.scaled_dot_product_attention(q[b][:, None], keys, values, enable_gqa=True))
    for given, message in ((dict(), "enable_gqa"), (dict(enable_gqa=True, seqused_k=used), "given alone"),
                           (dict(enable_gqa=True, cu_seq_k=None), "cu_seq_k is None")):
        with pytest.raises(ValueError, match=message):
            sd.varlen_attn(q, k.detach(), v.detach(), **dict(cu_seq_q=bounds, cu_seq_k=bounds, max_q=5, max_k=5) | given)


# ----------------------------------------------------------------------------------------------------------------------
# sdpa_kernel


@pytest.fixture
def counted(monkeypatch):
    """A list that grows with each call of the library."""
    native, calls = _calls._native.attention_forward, []

    class Native:
        attention_backward = staticmethod(_calls._native.attention_backward)

        @staticmethod
        def attention_forward(*arguments):
            calls.append(1)
            native(*arguments)

    monkeypatch.setattr(_calls, "_native", Native)
    return calls


def operands(dtype=torch.float32):
    return [draw(2, H, 5, D, seed=i, dtype=dtype).requires_grad_() for i in range(3)]


def attend(*x):
    return F.scaled_dot_product_attention(*x, is_causal=True)


def test_torchs_attention_is_ours_within(counted):
    x = operands()
    with sd.sdpa_kernel():
        o = attend(*x)
        assert len(counted) == 1
        with sd.sdpa_kernel():
            again = F.scaled_dot_product_attention(query=x[0], key=x[1], value=x[2], is_causal=True)
        assert len(counted) == 2
        attend(*x)
        assert len(counted) == 3
    expected = attend(*x)
    assert len(counted) == 3
    assert torch.equal(o, sd.scaled_dot_product_attention(*x, is_causal=True)) and torch.equal(o, again)
    do = draw(2, H, 5, D, seed=7, dtype=torch.float32)
    for a, b in zip(*(torch.autograd.grad(t, x, do) for t in (o, expected))):
        torch.testing.assert_close(a, b)


def test_an_exception_and_another_thread(counted):
    x, others = operands(), []
    with pytest.raises(ValueError, match="dropout_p is 0.5"):
        with sd.sdpa_kernel():
            F.scaled_dot_product_attention(*x, dropout_p=0.5)
    with pytest.raises(ValueError, match="flatten what stands before H"):
        with sd.sdpa_kernel():
            F.scaled_dot_product_attention(*(t[None] for t in x))
    attend(*x)
    assert not counted
    with sd.sdpa_kernel():
        thread = threading.Thread(target=lambda: others.append(attend(*x)))
        thread.start()
        thread.join()
    assert len(others) == 1 and not counted


def test_models_checkpoints_and_compilers(counted):
    layer = torch.nn.MultiheadAttention(H * D, H, batch_first=True)
    x = draw(2, 5, H * D, dtype=torch.float32).requires_grad_()
    expected = layer(x, x, x, need_weights=False)[0]
    with sd.sdpa_kernel():
        torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)
        assert len(counted) == 1
    again = checkpoint(lambda t: layer(t, t, t, need_weights=False)[0], x, use_reentrant=False,
                       context_fn=lambda: (sd.sdpa_kernel(), sd.sdpa_kernel()))
    again.sum().backward()
    assert len(counted) == 3
    x = operands()
    expected = sd.scaled_dot_product_attention(*x, is_causal=True)

    @sd.sdpa_kernel()
    def within(*x):
        return attend(*x)

    counted.clear()
    assert torch.equal(within(*x), expected) and len(counted) == 1
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with sd.sdpa_kernel():
        assert torch.equal(compiled(*x), expected)
    assert len(counted) == 2
    torch.testing.assert_close(compiled(*x), expected)
    assert len(counted) == 2  # a guard knows the context
