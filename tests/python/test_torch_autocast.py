"""torch.autocast: q, k, v, p and bias are cast, as torch casts for its own attention, and everything else keeps its type."""
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import softdelta.torch as sd
from drawing import attention_call, delta_call
from torch_calls import CAST, FUNCTIONS, differentiable, gradients, loss

TYPES = [torch.bfloat16, torch.float16]


def cast(call, dtype):
    """Operands cast by hand; gradients go through to the f32 ones."""
    return {n: x.to(dtype) if n in CAST else x for n, x in call.items()}


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        assert x.dtype == expected[name].dtype and torch.equal(x, expected[name]), name


def test_every_function_is_called():
    """A step is below; parallel_simple_gla is chunk_simple_gla without states; what stands around the rules is in
    test_torch_layer.py, what serves in test_torch_serving.py, Mamba-2 in test_torch_mamba.py, GLA and its like in
    test_torch_family.py; set_most_kept sets a number."""
    assert set(sd.__all__) - set(FUNCTIONS) <= {"delta_rule", "delta_step", "parallel_simple_gla", "causal_conv1d", "causal_conv1d_fn",
                                                "causal_conv1d_update", "rms_norm_gated", "FusedRMSNormGated",
                                                "set_most_kept", "flash_attn_with_kvcache", "varlen_attn",
                                                "sdpa_kernel", "mamba_chunk_scan_combined", "selective_state_update",
                                                "mamba_split_conv1d_scan_combined",
                                                "fused_recurrent_gla", "chunk_lightning_attn", "fused_recurrent_lightning_attn",
                                                "chunk_gdn2", "fused_recurrent_gdn2",
                                                "chunk_gated_delta_product", "chunk_dplr_delta_rule",
                                                "fused_recurrent_dplr_delta_rule", "chunk_rwkv7", "fused_recurrent_rwkv7",
                                                "fused_mul_recurrent_rwkv7"}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_it_is_the_cast_by_hand(function, dtype, backward):
    draw, run = function
    call = draw(torch.float32)
    by_hand = run(cast(call, dtype))
    expected = gradients(call, loss(by_hand))
    with autocast(dtype):
        results = run(call)
        value = loss(results)
        inside = gradients(call, value) if backward == "inside" else None
    actual = inside or gradients(call, value)
    for x, y in zip(results, by_hand):
        assert x.dtype == y.dtype and torch.equal(x, y)
    assert results[0].dtype == dtype and results[1].dtype == torch.float32
    same(actual, expected)
    assert all(actual[n].dtype == call[n].dtype for n in actual)


def test_without_gradients(function):
    draw, run = function
    call = draw(torch.float32)
    expected = run(cast(call, torch.bfloat16))
    with autocast(), torch.no_grad():
        assert all(torch.equal(x, y) for x, y in zip(run(call), expected))


def test_f64_stays(function):
    """As in torch: double is not cast."""
    draw, run = function
    call = draw(torch.float64)
    with autocast():
        results = run(call)
    assert all(x.dtype == torch.float64 for x in results)


def test_types_that_are_cast_already(function):
    draw, run = function
    call = draw(torch.bfloat16)
    expected = run(call)
    with autocast():
        assert all(torch.equal(x, y) for x, y in zip(run(call), expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(function, reentrant):
    """What is recomputed in the backward pass is cast as it was."""
    draw, run = function
    call = draw(torch.float32)

    def segment(*tensors):
        return tuple(run(dict(zip(call, tensors))))

    with autocast():
        expected = segment(*call.values())
        results = checkpoint(segment, *call.values(), use_reentrant=reentrant)
    names = differentiable(call)
    for x in (expected, results):  # a reentrant checkpoint has no autograd.grad
        for n in names:
            call[n].grad = None
        loss(x).backward()
        found = {n: call[n].grad for n in names}
        if x is expected:
            wanted = found
    same(found, wanted)


def test_grad_scaler(function):
    """A scaled loss has scaled gradients, and the scaler finds them finite."""
    draw, run = function
    call = draw(torch.float32)
    leaves = [call[n] for n in differentiable(call)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    optimizer = torch.optim.SGD(leaves, lr=0.125)
    before = [x.detach().clone() for x in leaves]
    with autocast():
        value = loss(run(call))
    expected = gradients(call, value)
    with autocast():
        value = loss(run(call))
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**6  # no overflow was found
    for name, x, start in zip(expected, leaves, before):
        torch.testing.assert_close(x.detach(), start - 0.125 * expected[name], rtol=1e-2, atol=1e-3, msg=name)
        assert not torch.equal(x, start), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    names = ("q", "k", "v", "g", "beta")
    c = delta_call("gated_delta_rule", requires_grad=True)
    inputs = [c[n] for n in names]

    def layer(q, k, v, g, beta):
        o, _ = sd.chunk_gated_delta_rule(q, k, v, g, beta)
        a = sd.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), is_causal=True)
        return o.float().sin().sum() + a.float().square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with autocast():
        want, got = layer(*inputs), compiled(*inputs)
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs)):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b)


def test_ops_are_cast_too():
    """torch.ops.softdelta, which graphs call."""
    c, nan = delta_call("comba"), float("nan")
    inputs = [c.get(n) for n in ("q", "k", "v", "g", "g_gamma", "beta", "p", "initial_state", "A_log", "dt_bias",
                                 "cu_seqlens")]
    with autocast():
        o, state = torch.ops.softdelta.delta_forward(*inputs, 3, nan, False, False, nan, False, False, False, 1, False,
                                                      True)
    low = cast(c, torch.bfloat16)
    expected, expected_state = sd.chunk_comba(**low, output_final_state=True)
    assert torch.equal(o, expected) and torch.equal(state, expected_state)
    a = attention_call()
    with autocast():
        o, _ = torch.ops.softdelta.attention_forward(*(a[n] for n in ("q", "k", "v", "mask", "bias", "sink")), *[None] * 8,
                                                     nan, 0, -1, -1, 0.0, 0, -1, False)
    assert o.dtype == torch.bfloat16


@pytest.mark.parametrize("as_op", [False, True])
def test_step(as_op):
    c = delta_call("gated_delta_rule", tokens=1)
    state = c.pop("initial_state")
    again = state.clone()
    expected = sd.delta_step("gated_delta_rule", state=again, **cast(c, torch.bfloat16))
    step = torch.compile(sd.delta_step, backend="eager") if as_op else sd.delta_step
    with autocast():
        o = step("gated_delta_rule", state=state, **c)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(o, expected) and torch.equal(state, again)


def test_states_of_chunks():
    c = delta_call("kda")
    expected = sd.chunk_kda(**cast(c, torch.bfloat16), output_final_state=True, return_intermediate_states=True)
    with autocast():
        actual = sd.chunk_kda(**c, output_final_state=True, return_intermediate_states=True)
    for x, y in zip(actual, expected):
        assert x.dtype == y.dtype and torch.equal(x, y)
