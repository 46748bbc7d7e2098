"""What softdelta.transformers replaces, and that it puts it back; softmax attention; calls that go back."""
import pathlib
import re
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

import softdelta.transformers  # noqa: E402
import transformers_architectures as architectures  # noqa: E402
import transformers_tiny as tiny  # noqa: E402
from transformers_tiny import disabled_after, logits, name  # noqa: E402, F401

transformers.logging.set_verbosity_error()


def functions(name):
    """The functions of a modeling file that are replaced, as they are now, and the forward of its gated norm."""
    namespace = vars(softdelta.transformers._modeling(name))
    found = {function: namespace[function] for function in softdelta.transformers.REPLACEMENTS if function in namespace}
    norm, = (c for n, c in namespace.items() if n.endswith("RMSNormGated"))
    return found | {"forward": norm.forward}


def attention_functions():
    return dict(transformers.AttentionInterface._global_mapping)


def test_disable_restores_everything(name):
    model, ids = tiny.build(name), tiny.draw(1, 20)
    plain, before, attention = logits(model, ids, use_cache=False), functions(name), attention_functions()
    softdelta.transformers.enable()
    assert not any(functions(name)[f] is before[f] for f in before)
    assert not torch.equal(logits(model, ids, use_cache=False), plain)
    softdelta.transformers.disable()
    assert functions(name) == before and attention_functions() == attention
    assert torch.equal(logits(model, ids, use_cache=False), plain)


def test_enabled_before_and_after_building(name):
    """A model built without uses the kernels, and one built with loses them."""
    ids, built_before = tiny.draw(1, 20), tiny.build(name)
    plain = logits(built_before, ids, use_cache=False)
    with softdelta.transformers.enable():
        built_inside = tiny.build(name)
        ours = logits(built_before, ids, use_cache=False)
        assert torch.equal(logits(built_inside, ids, use_cache=False), ours) and not torch.equal(ours, plain)
    assert torch.equal(logits(built_inside, ids, use_cache=False), plain)


def test_report_and_nesting():
    assert "nothing" not in str(softdelta.transformers.enable())
    inner = softdelta.transformers.enable()
    with inner:
        assert not inner.replaced and "nothing" in str(inner)
    report = "chunk_kimi_delta_attention"
    assert functions("kimi_linear")[report] is not functions("kimi_linear")[report].__wrapped__, "inner undid outer"
    softdelta.transformers.disable()
    with softdelta.transformers.enable(models="kimi_linear", attention=False) as enabled:
        assert {r.name for r in enabled.replaced} == set(functions("kimi_linear"))
        assert report in str(enabled) and "sdpa" not in str(enabled)


@pytest.mark.parametrize("models, message", [
    (["qwen3_next", "kimi_linea"], r"models contains 'kimi_linea', expected names of folders in transformers.models: "
                                   r"'kimi_linear'\?"),
    ("qwen3-next", "models contains 'qwen3-next', .*'qwen3_next'"),
    ([None], "models contains None, expected names"), (5, "models contains 5, expected names"),
])
def test_refuses_a_name_that_is_no_model(models, message):
    before = functions("qwen3_next"), attention_functions()
    with pytest.raises(ValueError, match=message):
        softdelta.transformers.enable(models)
    assert (functions("qwen3_next"), attention_functions()) == before


def test_passes_over_a_model_that_this_transformers_lacks(monkeypatch):
    monkeypatch.setattr(softdelta.transformers, "MODELS", (*softdelta.transformers.MODELS, "a_model_of_the_future"))
    with softdelta.transformers.enable(["a_model_of_the_future", "kimi_linear"], attention=False) as enabled:
        assert {r.name for r in enabled.replaced} == set(functions("kimi_linear"))


@pytest.mark.parametrize("model", softdelta.transformers.MAMBA2)
def test_replaces_convolution_scan_and_norms_of_mamba(model):
    built, ids = architectures.build(model), architectures.draw(2, 20)
    with torch.no_grad():
        plain = logits(built, ids, use_cache=False)
        with softdelta.transformers.enable([model], attention=False) as enabled:
            ours = logits(built, ids, use_cache=False)
    assert {r.name for r in enabled.replaced} == {"causal_conv1d_fn", "causal_conv1d_update", "mamba2_chunk_scan",
                                                  "mamba2_selective_state_update", "forward"}
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


# What asks for a kernel of fla, mamba_ssm or causal_conv1d, and layers that keep a state under other names.
DOOR = re.compile(r'use_kernel_func_from_hub\w*\(\s*"(?:causal_conv1d|chunk|fused|mamba|recurrent|selective)\w*"|^class \w*(?:'
                  r"DeltaAttention|DeltaNet|LightningAttention|Mamba|mLSTM|Retention|Rglru|Rwkv|xLSTM)\w*\(", re.MULTILINE)
UNSERVED = {"recurrent_gemma": "a state is a vector, without keys",
            "rwkv": "RWKV-4: a state is two vectors, without keys",
            "xlstm": "sums over tokens are divided by the sum of their gates"}


def test_every_model_with_a_linear_attention_is_served_or_has_a_reason():
    found = {path.parent.name for path in pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
             if DOOR.search(path.read_text())}
    assert found - set(softdelta.transformers.MODELS) == UNSERVED.keys()


def test_restored_after_an_error():
    before = functions("qwen3_next")
    with pytest.raises(KeyError), softdelta.transformers.enable():
        raise KeyError
    assert functions("qwen3_next") == before


def attend(attention, *shapes, mask=None, **arguments):
    """One call as a layer makes it, on given shapes of query, key, value [B,H,L,D]; result and gradients."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = shapes[0][1] // shapes[1][1], arguments.pop("module_is_causal", True)
    o = attention(module, q, k, v, mask, scaling=0.3, **arguments)[0]
    return o, *torch.autograd.grad(o, (q, k, v), torch.randn(o.shape, generator=generator))


ATTENTION = {
    "causal": dict(shapes=[(2, 4, 33, 16)] * 3),
    "not causal": dict(shapes=[(2, 4, 33, 16)] * 3, is_causal=False),
    "not causal by its module": dict(shapes=[(2, 4, 33, 16)] * 3, module_is_causal=False),
    "grouped": dict(shapes=[(2, 6, 33, 16), (2, 2, 33, 16), (2, 2, 33, 16)]),
    "latent": dict(shapes=[(1, 4, 33, 24), (1, 4, 33, 24), (1, 4, 33, 16)]),
    "one query": dict(shapes=[(2, 4, 1, 16), (2, 2, 40, 16), (2, 2, 40, 16)]),
    "cache longer than queries": dict(shapes=[(1, 4, 20, 16), (1, 4, 64, 16), (1, 4, 64, 16)]),
    "mask": dict(shapes=[(2, 4, 20, 16), (2, 2, 33, 16), (2, 2, 33, 16)],
                 mask=torch.rand(2, 1, 20, 33, generator=torch.Generator().manual_seed(1)) < 0.5),
    "additive mask": dict(shapes=[(2, 4, 20, 16), (2, 2, 33, 16), (2, 2, 33, 16)],
                          mask=torch.randn(2, 1, 20, 33, generator=torch.Generator().manual_seed(1))),
    "position bias": dict(shapes=[(2, 4, 20, 16)] * 3,
                          position_bias=torch.randn(1, 4, 20, 20, generator=torch.Generator().manual_seed(1))),
    "position bias, not causal": dict(shapes=[(2, 4, 20, 16)] * 3, is_causal=False,
                                      position_bias=torch.randn(1, 4, 20, 20, generator=torch.Generator().manual_seed(1))),
    "position bias and mask": dict(shapes=[(2, 4, 20, 16), (2, 4, 33, 16), (2, 4, 33, 16)],
                                   position_bias=torch.randn(1, 4, 20, 33, generator=torch.Generator().manual_seed(1)),
                                   mask=torch.rand(2, 1, 20, 33, generator=torch.Generator().manual_seed(1)) < 0.5),
    "position bias and additive mask": dict(
        shapes=[(2, 4, 20, 16), (2, 4, 33, 16), (2, 4, 33, 16)],
        position_bias=torch.randn(1, 4, 20, 33, generator=torch.Generator().manual_seed(1)),
        mask=torch.randn(2, 1, 20, 33, generator=torch.Generator().manual_seed(2))),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_interface(case):
    arguments = dict(ATTENTION[case])
    shapes = arguments.pop("shapes")
    expected = attend(transformers.AttentionInterface._global_mapping["sdpa"], *shapes, **arguments)
    with softdelta.transformers.enable(models=[]), warnings.catch_warnings():
        warnings.simplefilter("error")  # no way back
        actual = attend(transformers.AttentionInterface._global_mapping["sdpa"], *shapes, **arguments)
    for x, y in zip(actual, expected):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    assert actual[0].is_contiguous()


def test_packed_attention():
    """Bounds without a mask keep sequences apart."""
    bounds = torch.tensor([0, 5, 6, 20], dtype=torch.int32)
    q, k, v = (torch.randn(1, 4, 20, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    with softdelta.transformers.enable(models=[]):
        attention = transformers.AttentionInterface._global_mapping["sdpa"]
        o, _ = attention(torch.nn.Module(), q, k, v, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
        for begin, end in zip(bounds, bounds[1:]):
            alone, _ = attention(torch.nn.Module(), *(x[:, :, begin:end] for x in (q, k, v)), None)
            torch.testing.assert_close(o[:, begin:end], alone, atol=1e-5, rtol=0)


def test_rows_without_a_key():
    """They are 0, and nothing becomes NaN."""
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    mask[:, :, :3] = False
    with softdelta.transformers.enable(models=[]):
        o, *gradients = attend(transformers.AttentionInterface._global_mapping["sdpa"], *[(1, 2, 8, 16)] * 3, mask=mask)
    assert not o[:, :3].any() and all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 40])
def test_short_convolution(length, bias, activation):
    """Values and gradients are those of transformers, in f64; channels that come innermost leave so."""
    generator = torch.Generator().manual_seed(11)
    x, weight, b = (torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
                    for shape in ((1, length, 6), (6, 4), (6,)))
    leaves = (x, weight, b) if bias else (x, weight)

    def run(x):
        y = functions("qwen3_next")["causal_conv1d_fn"](x, weight, b if bias else None, activation=activation)
        return y, *torch.autograd.grad(y, leaves, torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))

    expected = run(x.transpose(1, 2))
    with softdelta.transformers.enable(models=["qwen3_next"]):
        y, *gradients = run(x.transpose(1, 2))
        odd_stride = run(x.transpose(1, 2).view(1, 6, length))[0]  # the stride of the only row is any number
    for actual, true in zip((y, *gradients), expected):
        torch.testing.assert_close(actual, true, atol=1e-12, rtol=0)
    assert length == 1 or y.stride(1) == odd_stride.stride(1) == 1


def convolve_token(weight, bias, x, state, activation="silu"):
    """One token by the function of qwen3_next as it is now: y, and the state after it."""
    state = state.clone()
    return functions("qwen3_next")["causal_conv1d_update"](x, state, weight, bias, activation), state


def convolution_operands(W=4, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(13)
    shapes = (6, W), (6,), (3, 6, 1), (3, 6, width)  # weight, bias, x, state
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("W, width", [(4, 4), (2, 2), (4, 7)])  # a state that records the past is longer
def test_short_convolution_of_a_token(W, width, bias, activation):
    weight, b, x, state = convolution_operands(W, width)
    b = b if bias else None
    expected, state_after = convolve_token(weight, b, x, state, activation)
    with softdelta.transformers.enable(models=["qwen3_next"]):
        y, ours_after = convolve_token(weight, b, x, state, activation)
    torch.testing.assert_close(y, expected, atol=1e-14, rtol=0)
    assert torch.equal(ours_after, state_after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_short_convolution_of_a_token_rounds_once(dtype):
    weight, bias, x, state = convolution_operands(dtype=dtype)
    expected, _ = convolve_token(*(t.double() for t in (weight, bias, x, state)), None)
    with softdelta.transformers.enable(models=["qwen3_next"]), torch.no_grad():
        y, _ = convolve_token(weight, bias, x, state, None)
    assert y.dtype == dtype
    sum_of_sizes = (state.double().abs().amax(-1, keepdim=True) * weight.double().abs().sum(-1)[:, None]).max()
    roundings = torch.finfo(dtype).eps / 2 * expected.abs() + 8 * torch.finfo(torch.float32).eps * sum_of_sizes
    assert ((y.double() - expected).abs() <= roundings).all()


def test_short_convolution_of_a_token_with_gradients_recorded():
    weight, bias, x, state = convolution_operands()

    def run():
        leaves = [t.clone().requires_grad_() for t in (weight, bias, x)]
        return torch.autograd.grad(convolve_token(*leaves, state)[0].sum(), leaves)

    expected = run()
    with softdelta.transformers.enable(models=["qwen3_next"]):
        assert all(torch.equal(a, b) for a, b in zip(run(), expected))


@pytest.mark.parametrize("name, function, gate", [("qwen3_next", "torch_recurrent_gated_delta_rule", ()),
                                                  ("kimi_linear", "recurrent_kimi_delta_attention", (16,))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_step_in_place(name, function, gate, dtype):
    """The state that is given is the one that comes back, unless a gradient is recorded."""
    generator = torch.Generator().manual_seed(17)
    q, k, v = (torch.randn(2, 1, 4, 16, generator=generator).to(dtype) for _ in range(3))
    g, beta = -torch.rand(2, 1, 4, *gate, generator=generator), torch.rand(2, 1, 4, generator=generator)
    if dtype == torch.float64:
        g, beta = g.double(), beta.double()
    state = torch.randn(2, 4, 16, 16, generator=generator)

    def run(q, state, **others):
        return functions(name)[function](q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
                                         use_qk_l2norm_in_kernel=True, **others)

    with torch.no_grad():
        expected, expected_state = run(q, state)
    with softdelta.transformers.enable(models=[name], attention=False):
        given = state.clone()
        with torch.no_grad():
            o, after = run(q, given)
        assert after is given and o.dtype == q.dtype and o.shape == v.shape
        recorded = q.clone().requires_grad_()
        given = state.clone()
        o_recorded, after_recorded = run(recorded, given)
        assert torch.equal(given, state) and after_recorded is not given and o_recorded.requires_grad
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for y, new in ((o, after), (o_recorded, after_recorded)):
        torch.testing.assert_close(y, expected, atol=tolerance, rtol=0)
        torch.testing.assert_close(new, expected_state, atol=1e-5, rtol=0, check_dtype=False)


def delta_rule_token(name, function, gate):
    q, k, v = (torch.rand(2, 1, 4, 16) for _ in range(3))
    g, beta = -torch.rand(2, 1, 4, *gate), torch.rand(2, 1, 4)
    return torch.rand(2, 4, 16, 16), lambda state: functions(name)[function](
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)


def convolution_token():
    weight, bias, x, state = convolution_operands(dtype=torch.float32)
    return state, lambda state: functions("qwen3_next")["causal_conv1d_update"](x, state, weight, bias, "silu")


@pytest.mark.parametrize("token", [
    lambda: delta_rule_token("qwen3_next", "torch_recurrent_gated_delta_rule", ()),
    lambda: delta_rule_token("kimi_linear", "recurrent_kimi_delta_attention", (16,)),
    convolution_token,
], ids=["gated delta rule", "kda", "convolution"])
def test_autograd_knows_that_a_step_changed_its_state(token):
    """What kept the state for its backward pass refuses to go on from another one; inference tensors have no version."""
    with softdelta.transformers.enable(models=["qwen3_next", "kimi_linear"], attention=False):
        state, step = token()
        before, factor = state.clone(), torch.ones((), requires_grad=True)
        y = (state * factor).sum()
        with torch.no_grad():
            step(state)
        assert not torch.equal(state, before)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        with torch.inference_mode():
            state = before.clone()
            step(state)
        assert not torch.equal(state, before)


@pytest.fixture
def never_warned():
    softdelta.transformers.fallback._warned.clear()


def test_falls_back_with_one_warning(never_warned):
    """Dropout is outside; the model goes on as without."""
    model, ids = tiny.build("qwen3_next", attention_dropout=0.5).train(), tiny.draw(1, 20)

    def run():
        torch.manual_seed(0)
        return logits(model, ids, use_cache=False)

    with softdelta.transformers.enable(models=[]):
        with pytest.warns(RuntimeWarning, match="sdpa_attention_forward.*dropout") as seen:
            ours = run()
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run()
    assert torch.equal(ours, run())


def test_falls_back_from_other_devices_and_types(never_warned):
    """The functions of transformers answer; for integers that is their error."""
    q, beta = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2)
    with softdelta.transformers.enable(models=["qwen3_next"]):
        rule = functions("qwen3_next")["torch_chunk_gated_delta_rule"]
        with pytest.warns(RuntimeWarning, match="torch_chunk_gated_delta_rule .* tensors on meta"):
            o, _ = rule(*(x.to("meta") for x in (q, q, q)), g=beta.to("meta"), beta=beta.to("meta"))
        assert o.shape == q.shape and o.device.type == "meta"
        with pytest.warns(RuntimeWarning, match="tensors of torch.int32"):
            rule(*(x.to(torch.int32) for x in (q, q, q)), g=beta, beta=beta)


def test_falls_back_when_refused(never_warned):
    """A refusal of the library is the reason that is named."""
    with softdelta.transformers.enable(models=[]):
        attention = transformers.AttentionInterface._global_mapping["sdpa"]
        mask = torch.ones(1, 1, 8, 5, dtype=torch.bool)
        with pytest.warns(RuntimeWarning, match="mask"), pytest.raises(RuntimeError):
            attend(attention, *[(1, 2, 8, 16)] * 3, mask=mask)


@pytest.mark.parametrize("model, name", [("qwen3_next", "Qwen3NextRMSNormGated"), ("kimi_linear", "KimiLinearRMSNormGated")])
def test_gated_norm(model, name, never_warned):
    """Values and gradients are those of transformers; a call outside goes back."""
    norm = getattr(softdelta.transformers._modeling(model), name)(24, eps=1e-5)
    generator = torch.Generator().manual_seed(19)
    x, gate = (torch.randn(2, 5, 24, generator=generator).requires_grad_() for _ in range(2))
    leaves = (x, gate, norm.weight)
    torch.nn.init.normal_(norm.weight, generator=generator)

    def run():
        y = norm(x, gate)
        return y, *torch.autograd.grad(y.sin().sum(), leaves)

    expected, before = run(), type(norm).forward
    with softdelta.transformers.enable(models=[model], attention=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = run()
        assert type(norm).forward.__wrapped__ is before
        assert actual[0].grad_fn is not expected[0].grad_fn and not torch.equal(actual[0], expected[0])
        with pytest.warns(RuntimeWarning, match="forward .* tensors on meta"):
            norm.to("meta")(x.to("meta"), gate.to("meta"))
    assert type(norm).forward is before
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", softdelta.transformers.NORMED)
def test_norms(model, never_warned):
    """Of every class whose forward is replaced: values and gradients are those of transformers, a gate before the norm and
    groups included. A weight of another type goes back, and gives the type that transformers gives."""
    generator = torch.Generator().manual_seed(23)
    with softdelta.transformers.enable(models=[model], attention=False) as enabled, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert any(r.where.endswith("RMSNorm") for r in enabled.replaced)
        for r in enabled.replaced:
            first = r.where.endswith("RMSNormGated") and "group_size" in r.namespace.of.__init__.__code__.co_names
            if not first and not r.where.endswith("RMSNorm"):
                continue
            for more, gated in (((8,), True), ((24,), True), ((24,), False)) if first else (((), False),):
                norm = r.namespace.of(24, *more, eps=1e-3)
                torch.nn.init.normal_(norm.weight, generator=generator)
                operands = [torch.randn(2, 5, 24, generator=generator).requires_grad_() for _ in range(1 + gated)]
                leaves, results = (*operands, norm.weight), []
                for forward in (r.replacement, r.original):
                    y = forward(norm, *operands)
                    results.append((y, *torch.autograd.grad(y.sin().sum(), leaves)))
                    with torch.no_grad():
                        assert torch.equal(forward(norm, *operands), y)
                assert not torch.equal(*(y.detach() for y, *_ in results))
                for a, b in zip(*results):
                    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
                half = [x.detach().bfloat16() for x in operands]
                assert torch.equal(r.replacement(norm, *half), r.original(norm, *half))
                norm.bfloat16()
                torch.testing.assert_close(r.replacement(norm, *half), r.original(norm, *half), atol=1e-2, rtol=1.6e-2)


def test_short_convolution_of_several_tokens_in_place():
    """Speculative decode; the cache's state moves on, whatever its width, and takes what another type has."""
    weight, bias, _, state = convolution_operands(dtype=torch.float32)
    x = torch.randn(3, 6, 3, generator=torch.Generator().manual_seed(5))
    for width in (4, 7):
        long = torch.nn.functional.pad(state, (width - 4, 0))
        expected, state_after = convolve_token(weight, bias, x, long)
        with softdelta.transformers.enable(models=["qwen3_next"]), torch.no_grad():
            y, ours_after = convolve_token(weight, bias, x, long)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(ours_after, state_after)
