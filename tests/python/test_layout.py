"""layout="bhtd" gives the bits of "bthd"; and what is said where rows and heads look exchanged."""
import warnings

import numpy as np
import pytest

import softdelta

torch = pytest.importorskip("torch")
sd = pytest.importorskip("softdelta.torch")
from drawing import attention_call, delta_call  # noqa: E402

ROWS = "q", "k", "v", "p", "g", "gk", "beta", "query", "key", "value"
RULES = {name: rule for name in sd.__all__ if name.startswith(("chunk_", "fused_r"))
         and (rule := name.replace("fused_", "").partition("_")[2]) in softdelta._options.FACTS
         and name not in ("chunk_gdn2", "fused_recurrent_gdn2", "fused_recurrent_gla", "chunk_gated_delta_product")}


def swapped(call):
    return {n: t.swapaxes(1, 2) if n in ROWS else t for n, t in call.items()}


def same(got, want, of_rows=("o",)):
    for name in want:
        other = want[name].swapaxes(1, 2) if name in of_rows else want[name]
        assert got[name].shape == other.shape and (got[name] == other).all(), name


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda", "comba"])
def test_delta_rules_on_arrays(rule):
    call = {n: t.numpy() for n, t in delta_call(rule).items()}
    want = dict(zip(("o", "state"), softdelta.delta_forward(rule, **call)))
    same(dict(zip(("o", "state"), softdelta.delta_forward(rule, **swapped(call), layout="bhtd"))), want)
    o = np.full(want["o"].swapaxes(1, 2).shape, np.nan, np.float32)
    assert softdelta.delta_forward(rule, **swapped(call), layout="bhtd", o=o)[0] is o
    same({"o": o}, {"o": want["o"]})
    state = call.pop("initial_state").copy()
    again = state.copy()
    same({"o": softdelta.delta_step(rule, state=again, **swapped(call), layout="bhtd")},
         {"o": softdelta.delta_step(rule, state=state, **call)})
    assert (again == state).all()
    want = softdelta.delta_backward(rule, **call, do=np.cos(want["o"]))
    got = softdelta.delta_backward(rule, **swapped(call), do=np.cos(o), layout="bhtd")
    same(got, want, ["d" + n for n in ROWS])


def test_attention_on_arrays():
    call = {n: t.numpy() for n, t in attention_call().items()}
    want = dict(zip(("o", "lse"), softdelta.attention_forward(**call)))
    got = dict(zip(("o", "lse"), softdelta.attention_forward(**swapped(call), layout="bhtd")))
    same(got, want)
    gradients = softdelta.attention_backward(**swapped(call), do=np.cos(got["o"]), **got, layout="bhtd")
    same(gradients, softdelta.attention_backward(**call, do=np.cos(want["o"]), **want), ("dq", "dk", "dv"))


@pytest.mark.parametrize("name", RULES)
def test_delta_rules(name):
    call = delta_call(RULES[name], requires_grad=True)
    options = {"output_final_state": True, **({"reverse": True} if name == "fused_recurrent_simple_gla" else {})}
    results = []
    for layout, operands in (("bthd", call), ("bhtd", swapped(call))):
        o, state = getattr(sd, name)(**operands, **options, layout=layout)
        o = o if layout == "bthd" else o.transpose(1, 2)
        results.append((o, state, *torch.autograd.grad(o.sin().sum() + state.sin().sum(), list(call.values()))))
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_steps_and_scores():
    call = {n: t.detach() for n, t in delta_call("kda").items()}
    state = call.pop("initial_state")
    again = state.clone()
    want = sd.delta_step("kda", state=state, **call)
    assert torch.equal(sd.delta_step("kda", state=again, **swapped(call), layout="bhtd").transpose(1, 2), want)
    assert torch.equal(again, state)
    call = {n: t for n, t in delta_call("simple_gla").items() if n in ("q", "k", "v", "g")}
    want, other = sd.parallel_simple_gla(**call, output_attentions=True)
    got, scores = sd.parallel_simple_gla(**swapped(call), output_attentions=True, layout="bhtd")
    assert torch.equal(got.transpose(1, 2), want) and torch.equal(scores, other)


def test_attention():
    c = attention_call(requires_grad=True)
    q, k, v = qkv = c["q"], c["k"], c["v"]
    turned = [t.transpose(1, 2) for t in qkv]
    slopes = torch.rand(2, 4)
    for run in (lambda layout, *x: sd.flash_attn_func(*x, alibi_slopes=slopes, causal=True, layout=layout),
                lambda layout, *x: sd.flash_sparse_attn_func(*x, attn_bias=c["bias"], layout=layout),
                lambda layout, *x: sd.scaled_dot_product_attention(*x, c["mask"], bias=c["bias"], enable_gqa=True, layout=layout)):
        want, got = run("bthd", *qkv), run("bhtd", *turned).transpose(1, 2)
        assert torch.equal(got, want)
        for a, b in zip(*(torch.autograd.grad(o.sin().sum(), qkv) for o in (got, want))):
            assert torch.equal(a, b)
    q, k, v = (t.detach() for t in qkv)
    caches = [torch.zeros(2, 9, 2, n) for n in (3, 4)]
    turned = [t.transpose(1, 2).contiguous() for t in caches]
    want = sd.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=2, causal=True)
    got = sd.flash_attn_with_kvcache(q.transpose(1, 2), *turned, k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=2,
                                     causal=True, layout="bhtd")
    assert torch.equal(got.transpose(1, 2), want)
    for a, b in zip(turned, caches):
        assert torch.equal(a.transpose(1, 2), b)


def test_wrong_layouts():
    q = torch.zeros(1, 2, 3, 4)
    for run in (lambda: sd.flash_attn_func(q, q, q, layout="bhld"), lambda: sd.chunk_simple_gla(q, q, q, layout="BHTD"),
                lambda: softdelta.attention_forward(q, q, q, layout="thd"), lambda: softdelta.delta_forward("kda", q, q, q, layout=1)):
        with pytest.raises(ValueError, match="layout is .*, expected one of bthd, bhtd"):
            run()
    with pytest.raises(ValueError, match="expected 'bthd' with k_scale or v_scale"):
        sd.flash_attn_func(q, q, q, k_scale=q, layout="bhtd")
    with pytest.raises(ValueError, match="query has 3 dimensions, expected 4 with layout 'bthd'"):
        sd.scaled_dot_product_attention(q[0], q[0], q[0], layout="bthd")


def test_rows_and_heads_that_look_exchanged():
    """More heads than any model has, of fewer rows. A prompt of 3 tokens for 64 heads, or one token for 300, is neither."""
    def tensor(*shape):
        return torch.zeros(*shape)

    x, message = tensor(1, 3, 300, 4), "300 heads of 3 rows, as layout 'bthd' reads it; if these are 3 heads of 300 rows"
    for run in (lambda: sd.flash_attn_func(x, x, x), lambda: sd.chunk_delta_rule(x, x, x, x[..., 0]),
                lambda: softdelta.attention_forward(x, x, x), lambda: softdelta.delta_forward("delta_rule", x, x, x)):
        with pytest.warns(UserWarning, match=message):
            run()
    turned = x.transpose(1, 2)
    with pytest.warns(UserWarning, match="300 heads of 3 rows, as layout 'bhtd' reads it.*say layout='bthd'"):
        sd.scaled_dot_product_attention(turned, turned, turned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (tensor(1, 3, 64, 4), tensor(1, 1, 300, 4), tensor(1, 400, 300, 4)[:, :, :, :1]):
            sd.flash_attn_func(x, x, x)
        sd.flash_attn_func(turned, turned, turned)
