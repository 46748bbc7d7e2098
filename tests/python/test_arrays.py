"""The package without torch: NumPy, bf16 as uint16, JAX; results given, in place, strided; errors."""
import math
import subprocess
import sys

import numpy as np
import pytest

import softdelta
from softdelta import _native
from softdelta._options import FACTS

RULES = list(_native.RULES)
ALL_RULES = RULES + [facts for name, facts in FACTS.items() if name.startswith("rule:")]


def delta_call(rule, seed=0, B=2, T=9, H=1, HV=2, K=4, V=3):
    r = np.random.default_rng(seed)
    call = {"q": r.standard_normal((B, T, H, K)), "k": r.standard_normal((B, T, H, K)) / 2,
            "v": r.standard_normal((B, T, HV, V)), "initial_state": r.standard_normal((B, HV, K, V))}
    facts = FACTS.get(rule, rule)
    if "g" in facts.operands:
        call["g"] = -r.random((B, T, HV, K) if facts.gate == "channel" else (B, T, HV))
    if "beta" in facts.operands:
        call["beta"] = r.random((B, T, HV))
    if "p" in facts.operands:
        call["p"] = r.standard_normal((B, T, H, K)) / 2
    return call


def recurrence(rule, q, k, v, initial_state, g=None, beta=None, p=None):
    """Token by token, as the tables of softdelta.h say."""
    group = v.shape[2] // q.shape[2]
    facts = FACTS.get(rule, rule)
    q, k, p = (x if x is None else np.repeat(x, group, 2) for x in (q, k, k if p is None else p))
    S, rows = initial_state.copy(), []
    for t in range(q.shape[1]):
        decay = 1.0 if g is None else np.exp(g[:, t])[..., None] if facts.gate == "channel" else np.exp(g[:, t])[..., None, None]
        before = S
        S = S * decay
        if facts.erases == "nothing":
            d = v[:, t]
        else:
            seen = before if facts.erases == "previous" else S
            d = beta[:, t, :, None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", seen, p[:, t]))
        S = S + k[:, t, :, :, None] * d[:, :, None]
        rows.append(np.einsum("bhkv,bhk->bhv", S, q[:, t]) / math.sqrt(q.shape[3]))
    return np.stack(rows, 1), S


def as_bf16(x):
    """uint16, rounded to nearest even, and the value it stands for."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("rule", ALL_RULES, ids=str)
def test_rules_are_the_recurrence(rule):
    call = delta_call(rule)
    o, S = softdelta.delta_forward(rule, **call)
    want_o, want_S = recurrence(rule, **call)
    assert o.dtype == np.float64 and S.dtype == np.float64
    np.testing.assert_allclose(o, want_o, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(S, want_S, rtol=1e-12, atol=1e-13)
    single = {n: x.astype(np.float32) for n, x in call.items()}
    o, S = softdelta.delta_forward(rule, **single)
    assert o.dtype == np.float32 and S.dtype == np.float32
    np.testing.assert_allclose(o, want_o, rtol=0, atol=2e-5)  # nine tokens of sums near 1: some 100 roundings of 2^-24
    np.testing.assert_allclose(S, want_S, rtol=0, atol=2e-5)


@pytest.mark.parametrize("rule", ALL_RULES, ids=str)
def test_gradients_are_the_slope(rule):
    call = delta_call(rule, seed=1)
    r = np.random.default_rng(2)
    o, S = softdelta.delta_forward(rule, **call)
    do, dS = r.standard_normal(o.shape), r.standard_normal(S.shape)
    d = softdelta.delta_backward(rule, do=do, dfinal_state=dS, **call)
    assert set(d) == {"d" + n for n in call}
    for name, x in call.items():
        step = r.standard_normal(x.shape)
        loss = [sum((y * dy).sum() for y, dy in zip(recurrence(rule, **{**call, name: x + h * step}), (do, dS)))
                for h in (1e-6, -1e-6)]
        assert (d["d" + name] * step).sum() == pytest.approx((loss[0] - loss[1]) / 2e-6, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("rule", ALL_RULES, ids=str)
def test_steps_in_place_are_the_sequence(rule):
    call = delta_call(rule)
    want, S = softdelta.delta_forward(rule, **call)
    state = call.pop("initial_state").copy()
    pool = np.zeros((5, *state.shape[1:]))
    pool[[3, 1]] = state
    for t in range(want.shape[1]):
        token = {n: x[:, t:t + 1] for n, x in call.items()}
        o = softdelta.delta_step(rule, state=state, **token)
        np.testing.assert_allclose(o[:, 0], want[:, t], rtol=1e-12, atol=1e-13)
        softdelta.delta_step(rule, state=pool, state_indices=np.array([3, 1]), **token)
    np.testing.assert_allclose(state, S, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(pool[[3, 1]], state)
    assert not pool[[0, 2, 4]].any()
    o = softdelta.delta_step(rule, state=pool, state_indices=np.array([-1, 1]), **token)
    assert not o[0].any() and o[1].any()
    np.testing.assert_array_equal(pool[3], state[0])


def test_facts_that_are_none_of_a_rule_are_named():
    call = delta_call("kda")
    for facts in softdelta.Rule("tokens"), softdelta.Rule("none", "nothing", True):
        with pytest.raises(ValueError, match="rule is Rule.*, expected a gate of none, head or channel"):
            softdelta.delta_forward(facts, **call)
    with pytest.raises(ValueError, match="p is missing, expected a tensor: rule:channel:previous:p erases along it"):
        softdelta.delta_forward(softdelta.Rule("channel", "previous", True), **call)


def test_a_case_of_facts_is_judged(tmp_path):
    rule = softdelta.Rule("channel", "previous")
    call = {n: x.astype(np.float32) for n, x in delta_call(rule).items()}
    o, S = softdelta.delta_forward(rule, **call)
    softdelta.dump(tmp_path / "right.safetensors", rule, **call, o=o, final_state=S)
    report = softdelta.verify(tmp_path / "right.safetensors")
    assert report.op == str(rule) == "rule:channel:previous:k" and report.right
    assert not softdelta.judge({"o": 1.1 * o}, dict(op=rule, **call)).right


@pytest.mark.parametrize("rule", RULES)
def test_states_come_from_one_entry_and_go_to_another(rule):
    call = delta_call(rule)
    S = call.pop("initial_state")
    want, last, states = softdelta.delta_forward(rule, **call, initial_state=np.stack([S[0], 0 * S[0]]),
                                                 return_states=True, state_interval=2)
    pool = np.zeros((6, *S.shape[1:]))
    pool[2] = S[0]
    places = dict(state_indices=np.array([2, 2]), final_state_indices=np.array([4, 0]),
                  has_initial_state=np.array([True, False]))
    kept = np.full(states.shape[:2], -1)
    kept[1, 1] = 5
    o, _ = softdelta.delta_forward(rule, **call, initial_state=pool, final_state=pool, **places, snapshot_indices=kept,
                                   state_interval=2)
    np.testing.assert_array_equal(o, want)
    np.testing.assert_array_equal(pool[[4, 0, 5, 2]], [*last, states[1, 1], S[0]])
    assert not pool[[1, 3]].any()
    with pytest.raises(ValueError, match="final_state is not given, .* final_state_indices says where in it"):
        softdelta.delta_forward(rule, **call, final_state_indices=np.array([4, 0]))


def attention_truth(q, k, v, bias=None, mask=None):
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[3]) + (0 if bias is None else bias)
    s = s if mask is None else np.where(mask, s, -np.inf)
    lse = np.log(np.exp(s).sum(-1))
    return np.einsum("bhij,bjhd->bihd", np.exp(s - lse[..., None]), v), lse


def test_keys_and_values_of_few_bits():
    r = np.random.default_rng(4)
    q = r.standard_normal((2, 3, 4, 64)).astype("f4")
    k, v = r.integers(-127, 128, (2, 7, 2, 2, 32), "i1"), r.integers(0, 256, (2, 7, 2, 1, 16), "u1")
    k_scale, v_scale = (r.random((2, 7, 2, n)).astype("f2") / s for n, s in ((2, 100), (1, 5)))
    halves = np.concatenate([v & 15, v >> 4], -1).astype("f4") - 8
    meant = [(x * s.astype("f4")[..., None]).reshape(2, 7, 2, -1) for x, s in ((k, k_scale), (halves, v_scale))]
    want, want_lse = attention_truth(q, *meant)
    o, lse = softdelta.attention_forward(q, k, v, k_scale=k_scale, v_scale=v_scale)
    assert o.dtype == q.dtype and o.shape == (2, 3, 4, 32)
    np.testing.assert_allclose(o, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)
    softdelta.testing.assert_close({"o": o, "lse": lse},
                                   dict(op="attention", q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale))
    rows = r.integers(-127, 128, (2, 7, 2, 64), "i1")
    o, _ = softdelta.attention_forward(q, rows, rows, k_scale=np.full((1, 1, 2, 1), 0.01, "f4"),
                                       v_scale=np.full((1, 1, 1, 1), 0.02, "f4"))
    np.testing.assert_allclose(o, attention_truth(q, 0.01 * rows, 0.02 * rows)[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="k_scale is missing"):
        softdelta.attention_forward(q, rows, rows)


def test_attention_is_the_formula_on_any_strides():
    r = np.random.default_rng(3)
    q, k, v = r.standard_normal((2, 4, 5, 3)), r.standard_normal((2, 2, 6, 3)), r.standard_normal((2, 2, 6, 4))
    q, k, v = (x.swapaxes(1, 2)[:, ::-1] for x in (q, k, v))
    bias = np.broadcast_to(r.standard_normal((1, 4, 1, 6)), (2, 4, 5, 6))
    mask = r.random((2, 1, 5, 6)) > 0.3
    want, want_lse = attention_truth(q, k, v, bias, mask)
    out = np.zeros((2, 5, 4, 8))[..., ::2]
    o, lse = softdelta.attention_forward(q, k, v, bias=bias, mask=mask, o=out)
    assert o is out
    np.testing.assert_allclose(o, want, rtol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12)
    halves, none = np.full(q.shape[2], 0.5, "f4"), np.zeros(q.shape[2], "f4")
    sloped = softdelta.attention_forward(q, k, v, bias=2 * bias, bias_slopes=halves, alibi_slopes=none, mask=mask)
    np.testing.assert_allclose(sloped[0], o, rtol=1e-12)
    d = softdelta.attention_backward(q, k, v, np.ones_like(want), bias=bias, mask=mask, o=o, lse=lse, wanted=["v"])
    assert list(d) == ["dv"]
    np.testing.assert_allclose(d["dv"].sum(), want.size, rtol=1e-12)  # rows of p sum to 1


def test_plan_of_layers():
    r = np.random.default_rng(5)
    lengths, table = np.array([5, 8], "i4"), np.array([[3, 0], [1, 2]], "i4")

    def layer():
        return [as_bf16(r.standard_normal(shape))[0] for shape in ((2, 1, 4, 16), (4, 4, 2, 16), (4, 4, 2, 16))]

    paged = dict(cache_seqlens=lengths, block_table=table, causal="bottom_right", dtype="bf16")
    layers = [layer() for _ in range(3)]
    want = [softdelta.attention_forward(*x, **paged) for x in layers]
    plan = softdelta.AttentionPlan(*layers[0], **paged)
    lengths[:], table[:] = -1, 99  # the plan has copies
    for x, (o, lse) in zip(layers, want):
        got = plan.forward(*x)
        np.testing.assert_array_equal(got[0], o)
        np.testing.assert_array_equal(got[1], lse)
    out = np.empty_like(want[0][0])
    assert plan.forward(*layers[1], o=out)[0] is out
    np.testing.assert_array_equal(out, want[1][0])
    q, k, v = layers[0]
    with pytest.raises(ValueError, match=r"q: shape is \[1, 1, 4, 16\], expected \[2, 1, 4, 16\], as in the plan"):
        plan.forward(q[:1], k, v)
    with pytest.raises(TypeError, match="cache_seqlens"):
        plan.forward(q, k, v, cache_seqlens=lengths)
    with pytest.raises(softdelta.Unsupported, match="engine reference has no plans"):
        softdelta.AttentionPlan(*[np.zeros((1, 2, 1, 8), "f4")] * 3, engine="reference")
    heads_first = softdelta.AttentionPlan(*[np.ones((1, 2, 3, 8), "f4")] * 3, layout="bhtd")
    assert heads_first.forward(*[np.ones((1, 2, 3, 8), "f4")] * 3)[0].shape == (1, 2, 3, 8)


def test_bf16_as_uint16_and_of_ml_dtypes():
    r = np.random.default_rng(4)
    bits, values = zip(*(as_bf16(r.standard_normal((1, 40, 2, 16))) for _ in range(3)))
    want, _ = attention_truth(*(x.astype(np.float64) for x in values))
    o, lse = softdelta.attention_forward(*bits, dtype="bf16")
    assert o.dtype == np.uint16 and lse.dtype == np.float32
    np.testing.assert_allclose((o.astype(np.uint32) << 16).view(np.float32), want, rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="q"):
        softdelta.attention_forward(*bits)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    same, _ = softdelta.attention_forward(*(x.view(ml_dtypes.bfloat16) for x in bits))
    assert same.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(same.view(np.uint16), o)


def test_jax():
    jax = pytest.importorskip("jax")
    r = np.random.default_rng(5)
    numpy_arrays = [r.standard_normal((1, 5, 2, 4)).astype(np.float32) for _ in range(3)]
    want, want_lse = softdelta.attention_forward(*numpy_arrays)
    arrays = [jax.numpy.asarray(x) for x in numpy_arrays]
    o, lse = softdelta.attention_forward(*arrays)
    assert isinstance(o, jax.Array)
    np.testing.assert_array_equal(np.asarray(o), want)
    np.testing.assert_array_equal(np.asarray(lse), want_lse)
    o, _ = softdelta.attention_forward(*(x.astype(jax.numpy.bfloat16) for x in arrays))
    assert o.dtype == jax.numpy.bfloat16
    np.testing.assert_allclose(np.asarray(o.astype(jax.numpy.float32)), want, atol=0.05)
    with pytest.raises(ValueError, match="o is a JAX array"):
        softdelta.attention_forward(*arrays, o=o)


def test_jax_gradients_masks_and_cases():
    jax = pytest.importorskip("jax")
    call = {n: x.astype(np.float32) for n, x in delta_call("kda", seed=6).items()}
    arrays = {n: jax.numpy.asarray(x) for n, x in call.items()}
    want_o, want_state = softdelta.delta_forward("kda", **call)
    o, state = softdelta.delta_forward("kda", **arrays)
    np.testing.assert_array_equal(np.asarray(o), want_o)
    np.testing.assert_array_equal(np.asarray(state), want_state)
    want, got = (softdelta.delta_backward("kda", do=c["v"], **c) for c in (call, arrays))
    assert all(isinstance(got[n], jax.Array) for n in want) and set(got) == set(want)
    for name in want:
        np.testing.assert_array_equal(np.asarray(got[name]), want[name])
    softdelta.testing.assert_close({"o": o, "final_state": state}, dict(op="kda", **arrays))
    half = {n: x.astype(jax.numpy.bfloat16) for n, x in arrays.items()}
    q, k, v = (half[n] for n in ("q", "k", "v"))
    mask = jax.numpy.arange(81).reshape(1, 1, 9, 9) % 3 != 0
    o, lse = softdelta.attention_forward(q, k, v[:, :, :1], mask=mask)
    softdelta.testing.assert_close({"o": o, "lse": lse}, dict(op="attention", q=q, k=k, v=v[:, :, :1], mask=mask))
    with pytest.raises(AssertionError):
        softdelta.testing.assert_close({"o": o, "lse": lse}, dict(op="attention", q=q, k=k, v=v[:, :, :1]))
    with pytest.raises(ValueError, match="final_state is a JAX array"):
        softdelta.delta_step("kda", q=arrays["q"], k=arrays["k"], v=arrays["v"], state=arrays["initial_state"],
                             g=arrays["g"], beta=arrays["beta"])


def test_errors_name_the_argument():
    q = np.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match="k: dimension 3 is 6, expected 8"):
        softdelta.attention_forward(q, q[..., :6], q)
    with pytest.raises(ValueError, match="causal is 'left'"):
        softdelta.attention_forward(q, q, q, causal="left")
    with pytest.raises(ValueError, match="q has 3 dimensions"):
        softdelta.attention_forward(q[0], q, q)
    with pytest.raises(ValueError, match="rule is 'mamba'"):
        softdelta.delta_forward("mamba", q, q, q)
    with pytest.raises(ValueError, match="g: missing|g is missing"):
        softdelta.delta_forward("kda", q, q, q)
    with pytest.raises(TypeError, match="k is list"):
        softdelta.attention_forward(q, [1, 2], q)
    with pytest.raises(ValueError, match="o is read-only"):
        softdelta.attention_forward(q, q, q, o=np.broadcast_to(q, q.shape))
    with pytest.raises(ValueError, match="wanted names 'bias', which is not given"):
        softdelta.attention_backward(q, q, q, q, wanted=["bias"])
    with pytest.raises(ValueError, match="complex|format|q is"):
        softdelta.attention_forward(q.astype(complex), q, q)
    with pytest.raises(softdelta.Unsupported, match="f64"):
        softdelta.attention_forward(*[q.astype(float)] * 3, engine="fast")


def test_one_operand_in_f64_is_refused_by_name():
    """Numbers that NumPy makes are f64. A whole call must not go to the reference for one of them."""
    call = {n: x.astype("f4") for n, x in delta_call("kda").items()}
    want, _ = softdelta.delta_forward("kda", **call)
    for name in ("g", "beta", "k", "initial_state"):
        mixed = {**call, name: call[name].astype("f8")}
        with pytest.raises((ValueError, softdelta.Unsupported), match=f"{name}.*f64"):
            softdelta.delta_forward("kda", **mixed)
        with pytest.raises((ValueError, softdelta.Unsupported), match=f"{name}.*f64"):
            softdelta.delta_backward("kda", do=call["v"], **mixed)
        o, _ = softdelta.delta_forward("kda", **mixed, engine="reference")
        np.testing.assert_allclose(o, want, rtol=0, atol=2e-5)
    q, bias = call["q"], np.zeros((1, 1, 9, 9))
    with pytest.raises((ValueError, softdelta.Unsupported), match="bias.*f64"):
        softdelta.attention_forward(q, q, q, bias=bias)
    softdelta.attention_forward(q, q, q, bias=bias.astype("f4"))
    x = q[:, :, 0]
    for weight in (np.ones((4, 3)), np.ones((4, 9), "f4")):
        with pytest.raises((ValueError, softdelta.Unsupported), match="weight"):
            softdelta.causal_convolution_forward(x, weight)
        softdelta.causal_convolution_forward(x, weight, engine="reference")
    with pytest.raises((ValueError, softdelta.Unsupported), match="weight.*f64"):
        softdelta.gated_norm_forward(q, q, np.ones(4))


def test_tensors_whose_gradients_are_recorded_are_refused():
    torch = pytest.importorskip("torch")
    call = {n: torch.from_numpy(x.astype("f4")) for n, x in delta_call("gated_delta_rule").items()}
    x, weight = torch.randn(2, 5, 3), torch.randn(3, 4)
    functions = [
        (lambda **c: softdelta.delta_forward("gated_delta_rule", **c), call, "chunk_gated_delta_rule"),
        (lambda **c: softdelta.delta_backward("gated_delta_rule", **c), {**call, "do": call["v"]}, "chunk_gated_delta_rule"),
        (softdelta.attention_forward, {n: call["q"] for n in "qkv"}, "flash_attn_func"),
        (softdelta.attention_backward, {n: call["q"] for n in ("q", "k", "v", "do")}, "flash_attn_func"),
        (softdelta.causal_convolution_forward, {"x": x, "weight": weight}, "causal_conv1d"),
        (softdelta.causal_convolution_backward, {"x": x, "weight": weight, "dy": x}, "causal_conv1d"),
        (softdelta.gated_norm_forward, {"x": x[None], "z": x[None]}, "rms_norm_gated"),
        (softdelta.gated_norm_backward, {"x": x[None], "z": x[None], "dy": x[None]}, "rms_norm_gated")]
    for function, operands, recording in functions:
        assert hasattr(pytest.importorskip("softdelta.torch"), recording)
        for name in operands:
            recorded = {**operands, name: operands[name].clone().requires_grad_()}
            with pytest.raises(ValueError, match=f"^{'d_o' if name == 'do' else name} requires a gradient, and this function "
                               rf"records none: expected softdelta.torch.{recording}, or .*detach\(\)$"):
                function(**recorded)
            with torch.no_grad():
                function(**recorded)
    o = torch.zeros_like(call["v"]).requires_grad_()
    with pytest.raises(ValueError, match="^o requires a gradient"):
        softdelta.delta_forward("gated_delta_rule", **call, o=o)


def test_a_graph_notices_that_a_step_changed_its_state():
    torch = pytest.importorskip("torch")
    call = {n: torch.from_numpy(x.astype("f4")) for n, x in delta_call("gated_delta_rule").items()}
    state = call.pop("initial_state")
    loss = (torch.ones((), requires_grad=True) * state).sum()
    softdelta.delta_step("gated_delta_rule", state=state, **call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_operand_of_a_call_at_once():
    from softdelta import _native, _records
    q, rows, state = (np.zeros(shape, np.float32) for shape in ((1, 4, 1, 8), (1, 4, 1), (1, 1, 8, 8)))
    one, bounds, entry = np.zeros(1, np.float32), np.array([0, 4]), np.zeros(1, np.int64)
    inputs = _records.DeltaInputs(q, q, q, rows, one, rows, q, state, one, one, bounds, entry, entry,
                                  np.ones(1, bool), entry[None])
    given = {n: np.zeros_like(getattr(inputs, n[1:])) for n in _records.DeltaGradients._fields if n[1:] in inputs._fields}
    gradients = _records.DeltaGradients(**given, d_o=q.copy(), dfinal_state=state.copy(), states=state[None], u=q.copy())
    operands = [*inputs, *gradients]
    assert len(operands) == 29 and all(x is not None for x in operands)
    options = _records.DeltaOptions(_native.RULES.index("simple_gla"))
    for _ in range(10):
        with pytest.raises((ValueError, softdelta.Unsupported), match="A_log is given"):
            _native.delta_backward(inputs, options, gradients, "automatic", 1, False)


def test_results_do_not_depend_on_threads():
    r = np.random.default_rng(6)
    q, k, v = (r.standard_normal((1, 300, 2, 32)).astype(np.float32) for _ in range(3))
    one, _ = softdelta.attention_forward(q, k, v, threads=1)
    softdelta.set_num_threads(3)
    try:
        assert softdelta.get_num_threads() == 3
        np.testing.assert_array_equal(softdelta.attention_forward(q, k, v)[0], one)
    finally:
        softdelta.set_num_threads(0)
    with pytest.raises(ValueError, match="n is -1"):
        softdelta.set_num_threads(-1)


def test_torch_is_not_imported():
    code = "import sys, softdelta; assert not {'torch', 'numpy', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_levels_and_version():
    assert sum(level["selected"] for level in softdelta.isa_levels()) == 1
    assert softdelta.__version__.count(".") == 2


def test_a_call_of_f64_says_once_who_computes_it():
    code = """
import warnings
import numpy, softdelta
warnings.simplefilter("always")
x = numpy.ones((1, 2, 1, 4))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    softdelta.attention_forward(*[x.astype("f4")] * 3)
    softdelta.attention_forward(x, x, x, engine="reference")
    assert not said, said
    for _ in range(2):
        softdelta.attention_forward(x, x, x)
print(*[w.message for w in said], sep="\\n")
"""
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert text.splitlines() == ["all main operands are f64, so the reference computes this call, slowly: convert them to f32, "
                                 'or say engine="reference"']
