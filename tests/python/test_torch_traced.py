"""Tensors without memory, and torch.jit.trace: both see ops alone."""
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import softdelta.torch as sd
from softdelta import _native
from drawing import delta_call
from torch_calls import FUNCTIONS, differentiable, gradients, loss


def on_meta(call):
    return {n: torch.empty_like(x, device="meta", requires_grad=x.requires_grad) for n, x in call.items()}


def same_shapes(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.is_meta and a.shape == e.shape and a.dtype == e.dtype and a.requires_grad == e.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_without_memory_give_shapes(name, dtype):
    draw, run = FUNCTIONS[name]
    call = draw(dtype)
    meta = on_meta(call)
    actual, expected = run(meta), run(call)
    same_shapes(actual, expected)
    assert {n: g.shape for n, g in gradients(meta, loss(actual)).items()} == {n: call[n].shape for n in differentiable(call)}
    with torch.no_grad():
        same_shapes(run(meta), run({n: x.detach() for n, x in call.items()}))


def test_steps_layers_and_states_of_chunks_without_memory():
    c = delta_call("kda", tokens=70)
    meta = on_meta(c)
    with pytest.raises(ValueError, match="expected False where gradients are recorded"):
        sd.chunk_kda(**{**meta, "q": meta["q"].requires_grad_()}, return_intermediate_states=True)
    meta["q"].requires_grad_(False)
    for a, e in zip(*(sd.chunk_kda(**x, output_final_state=True, return_intermediate_states=True) for x in (meta, c))):
        same_shapes([a], [e])
    state, meta_state = c.pop("initial_state"), meta.pop("initial_state")
    same_shapes(sd.delta_step("kda", state=meta_state, return_states=True, **meta),
                sd.delta_step("kda", state=state, return_states=True, **c))
    x, weight, state = (torch.empty(*shape, device="meta") for shape in ((2, 5, 8), (8, 4), (2, 8, 4)))
    y, final = sd.causal_conv1d(x, weight, output_final_state=True)
    assert y.is_meta and y.shape == x.shape and final.is_meta and final.shape == state.shape
    assert sd.causal_conv1d_update(x[:, 0], state, weight).shape == (2, 8)
    norm = sd.FusedRMSNormGated(8, device="meta")
    assert norm(x, x).is_meta and norm(x, x).requires_grad


def test_an_operand_without_memory_among_others_is_named():
    c = delta_call("kda")
    with pytest.raises(ValueError, match="^k cannot be read: Cannot pack tensors on meta$"):
        sd.chunk_kda(**{**c, "k": c["k"].to("meta")})


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_jit_traced_computes_its_results(name, recorded):
    draw, run = FUNCTIONS[name]
    call = {n: x.detach().requires_grad_(recorded and x.requires_grad) for n, x in draw(torch.float32).items()}

    def f(*tensors):
        return tuple(run(dict(zip(call, tensors))))

    traced = torch.jit.trace(f, tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in call.values()))
    call = {n: x if x.dtype == torch.bool else (0.5 * x.detach()).requires_grad_(x.requires_grad) for n, x in call.items()}
    actual, expected = traced(*call.values()), f(*call.values())
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    if recorded:
        by = gradients(call, loss(expected))
        for n, g in gradients(call, loss(actual)).items():
            assert torch.equal(g, by[n]), n


def test_steps_and_layers_that_jit_traced():
    c = delta_call("gated_delta_rule", tokens=2)
    state = c.pop("initial_state")

    def step(state, *tensors):
        return sd.delta_step("gated_delta_rule", state=state, **dict(zip(c, tensors)))

    traced = torch.jit.trace(step, (state.clone(), *c.values()))
    moved = state.clone()
    assert torch.equal(traced(moved, *c.values()), step(state, *c.values())) and torch.equal(moved, state)

    x, weight, norm = torch.randn(2, 5, 8), torch.randn(8, 4), sd.FusedRMSNormGated(8)

    norm.requires_grad_(False)  # torch.jit.trace has no parameters of a function

    def layers(x):
        y, _ = sd.causal_conv1d(x, weight, activation="silu")
        return norm(y, x)

    traced = torch.jit.trace(layers, (x,))
    assert torch.equal(traced(2 * x), layers(2 * x))
    state = torch.randn(2, 8, 4)

    def update(x, state):
        return sd.causal_conv1d_update(x, state, weight)

    traced, moved = torch.jit.trace(update, (x[:, 0], state.clone())), state.clone()
    assert torch.equal(traced(x[:, 1], moved), update(x[:, 1], state)) and torch.equal(moved, state)


def test_states_of_chunks_are_refused_by_jit():
    c = delta_call("kda")
    with pytest.raises(ValueError, match="return_intermediate_states is True, expected False within torch.jit.trace"):
        torch.jit.trace(lambda *x: sd.chunk_kda(**dict(zip(c, x)), return_intermediate_states=True), tuple(c.values()))


def test_whatever_is_made_lies_on_the_gpu_of_the_operands(monkeypatch):
    """On fake tensors, which no GPU needs."""
    asked = []
    monkeypatch.setattr(_native, "delta_forward", lambda inputs, options, outputs, *_: asked.append(outputs))
    with FakeTensorMode():
        q, rows = torch.empty(1, 70, 4, 8, device="cuda"), torch.empty(1, 70, 4, device="cuda")
        results = [sd.flash_attn_func(q, q, q, alibi_slopes=torch.empty(1, 4, device="cuda")),
                   *sd.parallel_simple_gla(q, q, q, g=rows, output_attentions=True),
                   *sd.chunk_kda(q, q, q, g=q, beta=rows, return_intermediate_states=True, output_final_state=True)]
        assert len(asked[0]) == 3 and results[-1].shape == (1, 2, 4, 8, 8)
        assert all(x.is_cuda for x in (*results, *asked[0]))
