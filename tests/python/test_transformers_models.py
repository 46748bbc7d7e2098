"""Models of an unmodified transformers with softdelta enabled, against themselves without.

The truth is transformers' own code in f64 throughout: where it turns to f32 on purpose it stays in f64 here. f32 is
right when its error is at most twice that of the unmodified f32 model: both are draws of the same roundings in another
order, and an error in a formula is larger than any of them. A draw for a parameter of two elements says little.
So errors are root mean squares over models of several seeds, and over the layers that have the parameter."""
import copy
import re
from collections import defaultdict
from contextlib import contextmanager
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

import softdelta.torch  # noqa: E402
import softdelta.transformers  # noqa: E402
from softdelta.transformers import delta_rules  # noqa: E402
import transformers_tiny as tiny  # noqa: E402
from transformers_tiny import disabled_after, logits, name  # noqa: E402, F401

transformers.logging.set_verbosity_error()

SEEDS = 6
TOLERANCE = 1e-4  # of logits of size 1 by two ways in f32; errors against f64 are below 1e-5
HEADLESS = ("glm5_next",)  # its text model has hidden states, no logits, and does not generate


@contextmanager
def exact():
    """float32 means float64."""
    with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def logits_and_gradients(model, ids):
    """Logits, and the gradient of a fixed weighting of them for every parameter, by name."""
    y = logits(model, ids, use_cache=False)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(y, parameters, weights, allow_unused=True)
    return {"logits": y.detach()} | {name: g for name, g in zip(names, gradients) if g is not None}


def error(actual, truth):
    return ((actual.double() - truth).norm() / truth.norm().clamp_min(1e-300)).item()


def root_mean_square(values):
    return (sum(x * x for x in values) / len(values)) ** 0.5


def test_logits_and_gradients_in_f32(name):
    """A small gradient is a sum that cancels, and one draw of many errs ten times as much as the others: where such a draw
    is among the first ones, more are drawn, until their root mean square says something."""
    plain_errors, our_errors = defaultdict(list), defaultdict(list)
    for seed in range(5 * SEEDS):
        model, ids = tiny.build(name, seed=seed), tiny.draw(1, 70, seed=seed)
        with exact():
            truth = logits_and_gradients(copy.deepcopy(model).double(), ids)
        plain = logits_and_gradients(model, ids)
        with softdelta.transformers.enable():
            ours = logits_and_gradients(model, ids)
        assert plain.keys() == ours.keys() == truth.keys()
        for what, true in truth.items():
            layerless = re.sub(r"layers\.\d+\.", "", what)
            plain_errors[layerless].append(error(plain[what], true))
            our_errors[layerless].append(error(ours[what], true))
        worse = []
        for what, errors in our_errors.items():
            ours, plain = root_mean_square(errors), root_mean_square(plain_errors[what])
            if ours > 2 * plain:
                worse.append(f"{what}: {ours:.2e}, the unmodified model {plain:.2e}")
        if seed + 1 in (SEEDS, 5 * SEEDS) and not worse:
            return
    raise AssertionError("; ".join(worse))


def test_logits_and_gradients_in_f64(name):
    """f64 goes to the reference engine; what is left is what transformers loses itself: it takes differences of sums
    of up to 1e3 in the exponents of a chunk, and small gradients are sums that cancel."""
    model, ids = tiny.build(name).double(), tiny.draw(2, 70)
    with exact():
        truth = logits_and_gradients(model, ids)
        with softdelta.transformers.enable():
            ours = logits_and_gradients(model, ids)
    for what, true in truth.items():
        assert error(ours[what], true) <= 1e-10, what


def test_kernels_are_called(name):
    """In prefill and decode: the delta rule in three layers, softmax attention in one."""
    model, ids = tiny.build(name), tiny.draw(1, 20)
    rule = "kda" if name in ("kimi_linear", "glm5_next", "bailing_hybrid") else "gated_delta_rule"
    with counted(softdelta.torch, f"chunk_{rule}") as chunk, counted(softdelta.torch, f"fused_recurrent_{rule}") as slow, \
            counted(delta_rules, "_delta_forward") as step, \
            counted(softdelta.torch, "scaled_dot_product_attention") as attention, \
            softdelta.transformers.enable(), torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        assert (chunk.call_count, step.call_count, attention.call_count) == (3, 0, 1)
        model(ids[:, :1], past_key_values=cache, use_cache=True)
        assert (chunk.call_count, step.call_count, attention.call_count) == (3, 3, 2)
        assert slow.call_count == 0, "a step went the longer way"


def counted(owner, name):
    return mock.patch.object(owner, name, wraps=getattr(owner, name))


def test_step_with_gradients_recorded(name):
    """The graph behind it ends at the cache, which transformers overwrites."""
    model, ids = tiny.build(name), tiny.draw(1, 20)
    with softdelta.transformers.enable():
        with torch.no_grad():
            cache = model(ids[:, :19], use_cache=True).past_key_values
        y = model(ids[:, 19:], past_key_values=cache, use_cache=True)[0]
        assert y.requires_grad
        torch.testing.assert_close(y, logits(model, ids, use_cache=False)[:, 19:], atol=TOLERANCE, rtol=0)


def generate(model, ids, tokens=24, **arguments):
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **arguments)


def test_greedy_generation(name):
    if name in HEADLESS:
        pytest.skip("does not generate")
    model = tiny.build(name)
    for length in (1, 2, 40):
        ids = tiny.draw(2, length)
        plain = generate(model, ids)
        with softdelta.transformers.enable():
            assert torch.equal(generate(model, ids), plain)


def left_padded(lengths):
    """Prompts of several lengths in one batch: ids, attention mask."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, max(lengths) - length:] = tiny.draw(length, seed=row)
    return ids, (ids != 0).long()


def test_left_padding(name):
    """A padded prompt has the logits it has alone."""
    model = tiny.build(name)
    ids, mask = left_padded((40, 9, 1))
    with softdelta.transformers.enable(), torch.no_grad():
        y = logits(model, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0), use_cache=False)
        for row in range(len(ids)):
            length = int(mask[row].sum())
            alone = logits(model, ids[row:row + 1, -length:], use_cache=False)
            torch.testing.assert_close(y[row, -length:], alone[0], atol=TOLERANCE, rtol=0)


def test_greedy_generation_from_left_padding(name):
    if name in HEADLESS:
        pytest.skip("does not generate")
    model = tiny.build(name)
    ids, mask = left_padded((40, 9, 1))
    plain = generate(model, ids, attention_mask=mask)
    with softdelta.transformers.enable():
        assert torch.equal(generate(model, ids, attention_mask=mask), plain)


def test_cache_between_prefill_and_decode(name):
    """Pieces of a text, of several tokens and of one, give the logits of the whole."""
    model, ids = tiny.build(name), tiny.draw(2, 48)
    with softdelta.transformers.enable(), torch.no_grad():
        whole = logits(model, ids, use_cache=False)
        cache, at = None, 0
        for tokens in (17, 5, 1, 1, 20, 1, 3):
            result = model(ids[:, at:at + tokens], past_key_values=cache, use_cache=True)
            cache, y = result.past_key_values, result[0]
            torch.testing.assert_close(y, whole[:, at:at + tokens], atol=TOLERANCE, rtol=0)
            at += tokens


def test_cache_filled_without_softdelta(name):
    """States mean the same on both sides, so a cache may cross."""
    model, ids = tiny.build(name), tiny.draw(1, 30)
    with torch.no_grad():
        whole = logits(model, ids, use_cache=False)
        cache = model(ids[:, :28], use_cache=True).past_key_values
        with softdelta.transformers.enable():
            one = model(ids[:, 28:29], past_key_values=cache, use_cache=True)[0]
        two = model(ids[:, 29:], past_key_values=cache, use_cache=True)[0]
    torch.testing.assert_close(torch.cat([one, two], 1), whole[:, 28:], atol=TOLERANCE, rtol=0)


def packed(lengths):
    """Sequences in one row, as transformers' DataCollatorWithFlattening describes them."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return dict(input_ids=tiny.draw(1, sum(lengths)), position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
                cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=max(lengths), max_length_k=max(lengths))


PACKED = (33, 1, 2, 64, 7)


def test_packed_sequences(name):
    """Each sequence has the logits it has alone, and the gradients are the sums."""
    # the indexer of glm5_next pools keys across sequences, with softdelta and without
    only_delta_rules = dict(layer_types=["linear_attention"] * 4) if name == "glm5_next" else {}
    model, batch = tiny.build(name, **only_delta_rules), packed(PACKED)
    weights = torch.randn(sum(PACKED), 1, generator=torch.Generator().manual_seed(5))
    parameters = list(model.parameters())

    def gradients(y, weights):
        found = torch.autograd.grad((y * weights).sum(), parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]

    with softdelta.transformers.enable():
        y = logits(model, **{"ids" if k == "input_ids" else k: v for k, v in batch.items()}, use_cache=False)[0]
        together = gradients(y, weights)
        apart, at = [torch.zeros_like(p) for p in parameters], 0
        for n in PACKED:
            alone = logits(model, batch["input_ids"][:, at:at + n], use_cache=False)[0]
            torch.testing.assert_close(y[at:at + n], alone, atol=TOLERANCE, rtol=0)
            apart = [a + b for a, b in zip(apart, gradients(alone, weights[at:at + n]))]
            at += n
    for a, b in zip(together, apart):
        torch.testing.assert_close(a, b, atol=1e-4 * max(b.abs().max().item(), 1e-3), rtol=0)


def test_packed_sequences_are_refused_without(name):
    """What unmodified transformers does, so that the test above says something."""
    if name in ("kimi_linear", "glm5_next", "bailing_hybrid"):
        pytest.skip("lets sequences run into each other without a word")
    with pytest.raises(ValueError, match="packed sequences"):
        tiny.build(name)(**packed(PACKED), use_cache=False)


def test_packed_by_sequence_numbers():
    """seq_idx alone says the same."""
    model, batch = tiny.build("qwen3_next"), packed(PACKED)
    numbers = torch.repeat_interleave(torch.arange(len(PACKED)), torch.tensor(PACKED)).to(torch.int32)[None]
    with softdelta.transformers.enable(), torch.no_grad():
        bounded = model(**batch, use_cache=False).logits
        numbered = model(batch["input_ids"], position_ids=batch["position_ids"], seq_idx=numbers, use_cache=False).logits
    assert torch.equal(bounded, numbered)


def test_bf16(name):
    """Errors of a bf16 model against f64 are at most twice those of the unmodified bf16 model."""
    plain_errors, our_errors = [], []
    for seed in range(SEEDS):
        model, ids = tiny.build(name, seed=seed).bfloat16(), tiny.draw(1, 70, seed=seed)
        with exact(), torch.no_grad():
            truth = logits(copy.deepcopy(model).double(), ids, use_cache=False)
        with torch.no_grad():
            plain_errors.append(error(logits(model, ids, use_cache=False), truth))
            with softdelta.transformers.enable():
                our_errors.append(error(logits(model, ids, use_cache=False), truth))
    assert root_mean_square(our_errors) <= 2 * root_mean_square(plain_errors)


def test_gradient_checkpointing(name):
    model, ids = tiny.build(name).train(), tiny.draw(1, 40)
    with softdelta.transformers.enable():
        expected = logits_and_gradients(model, ids)
        model.gradient_checkpointing_enable()
        for what, gradient in logits_and_gradients(model, ids).items():
            assert torch.equal(gradient, expected[what]), what


@pytest.mark.parametrize("name, fields", [("qwen3_5", {}), ("kimi_linear", dict(mlp_layer_types=["dense"] * 2))])
def test_compiled_in_one_graph(name, fields):
    """torch.compile sees the kernels as ops. Experts would break the graph, with softdelta or without."""
    if tiny.build(name) is None:
        pytest.skip(f"this transformers has no {name}")
    layers = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    model, ids = tiny.build(name, **layers, **fields), tiny.draw(1, 20)
    with softdelta.transformers.enable():
        expected = logits_and_gradients(model, ids)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        with counted(delta_rules._native, "delta_forward") as forward, \
                counted(delta_rules._native, "delta_backward") as backward:
            y = logits(compiled, ids, use_cache=False)
            weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
            names, parameters = zip(*model.named_parameters())
            gradients = dict(zip(names, torch.autograd.grad(y, parameters, weights, allow_unused=True)))
        assert (forward.call_count, backward.call_count) == (1, 1)
    torch.testing.assert_close(y.detach(), expected.pop("logits"), atol=1e-5, rtol=0)
    for what, gradient in expected.items():
        assert error(gradients[what], gradient.double()) <= 1e-4, what
