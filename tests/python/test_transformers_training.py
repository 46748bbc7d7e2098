"""Training of transformers' models with softdelta enabled: torch.autocast, the Trainer, gradient checkpointing."""
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

import softdelta.transformers  # noqa: E402
import transformers_tiny as tiny  # noqa: E402
from transformers_tiny import disabled_after, logits, name  # noqa: E402, F401

transformers.logging.set_verbosity_error()


def gradients(model, ids, backward_inside=False, dtype=torch.bfloat16):
    """Gradients of a fixed weighting of the logits, the forward pass under autocast, by name; f32 without a dtype."""
    context = torch.autocast("cpu", dtype, enabled=dtype is not None)
    names, parameters = zip(*model.named_parameters())
    with context:
        y = logits(model, ids, use_cache=False)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        loss = (y.float() * weights).sum()
        if backward_inside:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
    if not backward_inside:
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: g for name, g in zip(names, found) if g is not None}


def distance(actual, expected):
    """Of all gradients together, as a part of their size."""
    off = sum((actual[n] - expected[n]).double().square().sum() for n in expected)
    return (off / sum(x.double().square().sum() for x in expected.values())).sqrt().item()


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(name, backward_inside):
    """Gradients are as near to those in f32 as the unmodified model's under autocast, twice that at most."""
    model, ids = tiny.build(name).train(), tiny.draw(1, 40)
    expected = gradients(model, ids, dtype=None)
    plain = gradients(model, ids, backward_inside)
    with softdelta.transformers.enable():
        ours = gradients(model, ids, backward_inside)
    assert ours.keys() == expected.keys() and all(g.dtype == torch.float32 for g in ours.values())
    assert distance(ours, expected) <= 2 * distance(plain, expected)


def backward(model, ids, autocast, use_cache=False, **checkpointing):
    """The same by backward(), which reentrant checkpoints want; use_reentrant among the keywords turns them on."""
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable(checkpointing)
        model.enable_input_require_grads()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = logits(model, ids, use_cache=use_cache)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        loss = (y.float() * weights).sum()
    loss.backward()
    model.gradient_checkpointing_disable()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing(name, autocast, use_reentrant):
    """The same bits as without, or as near as 1e-6. Under autocast as near as unmodified transformers comes, for torch
    sums residuals in another order where a reentrant checkpoint is under autocast."""
    model, ids = tiny.build(name).train(), tiny.draw(1, 70)

    def both():
        return backward(model, ids, autocast), backward(model, ids, autocast, use_reentrant=use_reentrant)

    with softdelta.transformers.enable():
        expected, ours = both()
    if all(torch.equal(ours[n], g) for n, g in expected.items()):
        return
    if autocast:
        plain_expected, plain = both()
        assert distance(ours, expected) <= 2 * distance(plain, plain_expected)
    else:
        for n, g in expected.items():  # of A_log among others, a sum that cancels
            assert (ours[n] - g).norm() <= 1e-6 * g.norm(), n


@pytest.mark.parametrize("tokens, rows", [(1, 2), (64, 1), (200, 2)])
@pytest.mark.parametrize("use_cache", [False, True])
def test_gradient_of_A_log_with_checkpointing(tokens, rows, use_cache):
    """Also beside a run that fills a cache, which transformers leaves out with checkpoints, and in whole chunks."""
    if tiny.build("qwen3_next") is None:
        pytest.skip("this transformers has no qwen3_next")
    model, ids = tiny.build("qwen3_next").train(), tiny.draw(rows, tokens)
    with softdelta.transformers.enable(models=["qwen3_next"]):
        expected = backward(model, ids, False, use_cache=use_cache)
        for use_reentrant in (False, True):
            ours = backward(model, ids, False, use_reentrant=use_reentrant)
            for n, g in expected.items():
                assert (ours[n] - g).norm() <= 1e-6 * g.norm(), n


@pytest.mark.parametrize("model_name", ["qwen3_next", "kimi_linear", "olmo_hybrid"])
def test_trainer(model_name, tmp_path):
    """A few steps of transformers' Trainer: losses are those without softdelta, in f32 closely. In bf16 as far as it
    goes, where a token near two experts may take the other one (test_autocast holds gradients to f32)."""
    if tiny.build(model_name) is None:
        pytest.skip(f"this transformers has no {model_name}")
    texts = [{"input_ids": row, "labels": row} for row in tiny.draw(8, 24)]

    def train(bf16, **more):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), bf16=bf16, use_cpu=True, max_steps=3, per_device_train_batch_size=2,
            learning_rate=1e-4, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=1, **more)
        trainer = transformers.Trainer(tiny.build(model_name), arguments, train_dataset=texts)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    plain = train(bf16=False)
    with softdelta.transformers.enable():
        exact, ours, checkpointed = train(bf16=False), train(bf16=True), train(bf16=True, gradient_checkpointing=True)
    assert len(ours) == 3
    torch.testing.assert_close(exact, plain, rtol=1e-4, atol=0)
    torch.testing.assert_close(ours, plain, rtol=2e-2, atol=0)
    torch.testing.assert_close(checkpointed, ours, rtol=1e-6, atol=0)


# --- the short convolution before the rules


def convolution(x, weight, bias):
    from transformers.models.qwen3_next import modeling_qwen3_next

    return modeling_qwen3_next.causal_conv1d_fn(x, weight, bias, activation="silu")


def convolution_operands(dtype):
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in ((1, 6, 9), (6, 4), (6,))]


@pytest.mark.parametrize("backward_inside", [False, True])
def test_short_convolution_under_autocast(backward_inside):
    """Operands are cast as torch casts them, and the result is rounded to bf16 once; gradients are f32 as their operands."""
    operands = convolution_operands(torch.float32)

    weights = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(12))  # gradients do not see y's rounding

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            y = convolution(*operands)
            if backward_inside:
                return y, torch.autograd.grad(y, operands, weights.to(y.dtype))
        return y, torch.autograd.grad(y, operands, weights.to(y.dtype))

    expected = run()
    with softdelta.transformers.enable(models=["qwen3_next"]):
        y, found = run()
    assert y.dtype == expected[0].dtype
    truth = convolution(*(x.detach().bfloat16().double() for x in operands))
    assert ((y.double() - truth).abs() <= 0.51 * torch.finfo(torch.bfloat16).eps * truth.abs() + 1e-6).all()
    assert ((expected[0].double() - truth).abs() <= 2 * torch.finfo(torch.bfloat16).eps * truth.abs() + 1e-2).all()
    for a, b in zip(found, expected[1]):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_short_convolution_has_second_derivatives():
    """They are those of torch, and so are transforms of torch.func."""
    operands = convolution_operands(torch.float64)
    f = lambda *x: convolution(*x).sin().sum()  # noqa: E731
    hessian = torch.func.hessian(f, argnums=(0, 1, 2))
    detached = [x.detach() for x in operands]
    expected = hessian(*detached)
    with softdelta.transformers.enable(models=["qwen3_next"]):
        assert torch.autograd.gradgradcheck(f, operands)
        found = hessian(*detached)
    for a, b in zip(found, expected):
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y)


def test_a_model_under_torch_func():
    """Gradients of samples one by one, as for differential privacy."""
    model, ids = tiny.build("qwen3_5"), tiny.draw(2, 12)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None],), dict(use_cache=False)).logits.square().mean()

    with softdelta.transformers.enable():
        found = torch.func.grad(loss)(parameters, ids[0])
        model.zero_grad()
        model(ids[:1], use_cache=False).logits.square().mean().backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(found[n], p.grad, rtol=1e-4, atol=1e-6, msg=n)
