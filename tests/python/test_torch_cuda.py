"""Torch tensors on a GPU: the same functions, judged by the f64 reference on the CPU. Skipped without a GPU."""
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import softdelta
import softdelta.torch as sd
import training_step
from softdelta import _native
from softdelta._delta_rule import options_of
from softdelta._records import DeltaInputs
from drawing import attention_call, delta_call
from torch_calls import FUNCTIONS, RULE, gradients, loss, with_strides_of_0

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or "cuda" not in _native.engines(),
                                reason="no GPU, or a package without the engine for it")


def on(call, device, dtype=None):
    """The same operands on another device, as another type."""
    moved = {n: None if x is None else x.detach().to(device, dtype if dtype and x.is_floating_point() else x.dtype)
             for n, x in call.items()}
    return {n: x if x is None else x.requires_grad_(call[n].requires_grad) for n, x in moved.items()}


def error(actual, expected):
    expected = expected.cpu().double()
    return ((actual.cpu().double() - expected).norm() / expected.norm().clamp(min=1e-6)).item()


@pytest.mark.parametrize("name", RULE)
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_results_and_gradients_are_those_of_the_reference(name, dtype, limit):
    draw, run = FUNCTIONS[name]
    call = draw(dtype)
    exact = on(call, "cpu", torch.float64)
    expected = run(exact)
    gpu = on(call, "cuda")
    actual = run(gpu)
    assert all(x.is_cuda for x in actual)
    assert all(error(a, e) < limit for a, e in zip(actual, expected))
    by = gradients(exact, loss(expected))
    for n, g in gradients(gpu, loss(actual)).items():
        assert g.is_cuda and error(g, by[n]) < 2 * limit, n


def test_a_process_forked_after_the_import_has_the_gpu():
    code = ("import os, softdelta.transformers, softdelta.torch as sd, torch\n"
            "if child := os.fork():\n"
            "    raise SystemExit(os.waitpid(child, 0)[1])\n"
            "x = torch.ones(1, 4, 1, 8, device='cuda')\n"
            "sd.flash_attn_func(x, x, x).cpu()")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def _gdn(T=192, dtype=torch.bfloat16, requires_grad=False):
    torch.manual_seed(0)
    x = {n: torch.randn(2, T, 2, 64, device="cuda", dtype=dtype) for n in "qkv"}
    x |= {"g": -torch.rand(2, T, 2, device="cuda"), "beta": torch.rand(2, T, 2, device="cuda", dtype=dtype)}
    x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).to(dtype)
    return {n: t.requires_grad_(requires_grad) for n, t in x.items()}


def test_work_is_ordered_by_the_current_stream():
    x = _gdn(T=2048)
    expected, _ = sd.chunk_gated_delta_rule(**x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(stream):
            late = {n: t.clone() * 0 for n, t in x.items()}
            torch.cuda._sleep(10_000_000)
            for n, t in late.items():
                t.add_(x[n])  # a call on another stream would see zeros
            o, _ = sd.chunk_gated_delta_rule(**late)
            doubled = o * 2
        stream.synchronize()
        assert torch.equal(doubled, expected * 2)


def test_states_are_handed_on_by_events():
    x, options = _gdn(T=2048), options_of("gated_delta_rule", None, False, False, None, False, False, False)
    shape = 2, 2, 64, 64
    given = torch.randn(shape, device="cuda")
    o, final = sd.chunk_gated_delta_rule(**x, initial_state=given, output_final_state=True)
    late, taken, results = torch.zeros_like(given), torch.empty_like(given), (torch.empty_like(o), torch.zeros_like(given))
    side, ready, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    done.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(given)
        ready.record(side)
    _native.delta_forward(DeltaInputs(**x, initial_state=late), options, results, "automatic", 1, False, ready.cuda_event,
                          done.cuda_event)
    side.wait_event(done)
    with torch.cuda.stream(side):
        taken.copy_(results[1])
    torch.cuda.synchronize()
    assert torch.equal(results[0], o) and torch.equal(taken, final)
    with pytest.raises(ValueError, match="state_ready"):
        _native.delta_forward(DeltaInputs(**{n: t.cpu() for n, t in x.items()}), options, (o.cpu(), None), "automatic", 1,
                              False, ready.cuda_event)


def test_a_graph_is_captured_and_replayed():
    x = _gdn()
    sd.chunk_gated_delta_rule(**x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = sd.chunk_gated_delta_rule(**x)
    x["v"].copy_(torch.randn_like(x["v"]))
    graph.replay()
    expected, _ = sd.chunk_gated_delta_rule(**x)
    assert torch.equal(o, expected)


def test_what_a_call_needs_is_memory_of_torch():
    x = _gdn(T=4096, requires_grad=True)
    o, _ = sd.chunk_gated_delta_rule(**x)
    for call in (lambda: sd.chunk_gated_delta_rule(**x), lambda: torch.autograd.grad(o, list(x.values()), o, retain_graph=True)):
        results = call()
        own = sum(t.nbytes for t in results if t is not None)
        del results
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        assert torch.cuda.max_memory_allocated() - before > 2 * own
        assert torch.cuda.memory_allocated() == before


def _kda(T=300, requires_grad=True):
    torch.manual_seed(0)
    x = {n: torch.randn(3, T, 2, 128, device="cuda", dtype=torch.bfloat16) for n in "qkv"}
    x |= {"g": -torch.rand(3, T, 2, 128, device="cuda"), "beta": torch.rand(3, T, 2, device="cuda")}
    return {n: t.requires_grad_(requires_grad) for n, t in x.items()}


@pytest.fixture
def most_kept():
    yield sd.set_most_kept
    sd.set_most_kept(0)


def _kept_bytes(**options):
    """What a call of _kda leaves in memory besides its results, and what its backward pass gives."""
    x = _kda()
    before = torch.cuda.memory_allocated()
    o, _ = sd.chunk_kda(**x, use_qk_l2norm_in_kernel=True, **options)
    kept = torch.cuda.memory_allocated() - before - o.nbytes
    once, again = (torch.autograd.grad(o, list(x.values()), o.detach(), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again))
    return kept, once


def test_what_a_call_keeps_has_a_limit(most_kept):
    none, expected = _kept_bytes()
    most_kept(1 << 30)
    kept, by = _kept_bytes()
    assert none < 4096 < kept
    assert all(error(a, e) < 5e-3 for a, e in zip(by, expected))
    assert _kept_bytes(disable_recompute=True)[0] == kept
    most_kept(kept - 4096)
    assert _kept_bytes()[0] == none
    most_kept(kept)
    assert _kept_bytes()[0] == kept


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_nothing(most_kept, reentrant):
    most_kept(1 << 30)
    _, expected = _kept_bytes()
    x = _kda()
    before = torch.cuda.memory_allocated()
    o = checkpoint(lambda *t: sd.chunk_kda(*t, use_qk_l2norm_in_kernel=True)[0], *x.values(), use_reentrant=reentrant)
    assert torch.cuda.memory_allocated() - before - o.nbytes < 4096
    o.backward(o.detach())
    assert all(torch.equal(t.grad, e) for t, e in zip(x.values(), expected))


def test_compile_and_opcheck():
    x = _gdn(T=70, requires_grad=True)
    compiled = torch.compile(sd.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    expected, actual = (f(**x, output_final_state=True) for f in (sd.chunk_gated_delta_rule, compiled))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))
    by = torch.autograd.grad(loss(expected), list(x.values()))
    assert all(torch.equal(a, e) for a, e in zip(torch.autograd.grad(loss(actual), list(x.values())), by))
    tensors = x["q"], x["k"], x["v"], x["g"], None, x["beta"], None, None, None, None, None
    torch.library.opcheck(torch.ops.softdelta.delta_forward.default,
                          (*tensors, 1, 0.3, False, False, float("nan"), False, False, False, 1, False, True))


def test_autocast_casts_what_it_casts_on_the_cpu():
    x = _gdn(dtype=torch.float32, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        o, state = sd.chunk_gated_delta_rule(**x, output_final_state=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert sd.chunk_gated_delta_rule(**x)[0].dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(o.float().sum(), list(x.values())))


def test_a_step_updates_its_state_in_place():
    x = _gdn(T=1)
    state = torch.randn(2, 2, 64, 64, device="cuda")
    reference = {n: t.cpu().double() for n, t in x.items()}
    o, final = sd.chunk_gated_delta_rule(**reference, initial_state=state.cpu().double(), output_final_state=True)
    actual = sd.delta_step("gated_delta_rule", **x, state=state)
    assert error(actual, o) < 1e-2 and error(state, final) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_states_of_chunks_and_after_tokens(dtype, limit, packed):
    c = delta_call("kda", dtype, packed=packed, tokens=150, sizes=(64, 64))
    c |= {"cu_seqlens": torch.tensor([0, 30, 30, 150])} if packed else {}
    exact, gpu = on(c, "cpu", torch.float64), on(c, "cuda")
    options = dict(output_final_state=True, return_intermediate_states=True, chunk_size=32)
    for a, e in zip(sd.chunk_kda(**gpu, **options), sd.chunk_kda(**exact, **options), strict=True):
        assert a.is_cuda and error(a, e) < limit
    results = [sd.delta_step("kda", state=x.pop("initial_state"), return_states=True, **x) for x in (gpu, exact)]
    for a, e in zip(*results, strict=True):
        assert a.is_cuda and error(a, e) < limit


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_what_each_token_takes_of_each_before_it(dtype, limit):
    c = delta_call("simple_gla", dtype, tokens=150, heads=(2, 4), sizes=(64, 64))
    del c["initial_state"]
    results = [sd.parallel_simple_gla(**x, output_attentions=True) for x in (on(c, "cuda"), on(c, "cpu", torch.float64))]
    for a, e in zip(*results, strict=True):
        assert a.is_cuda and error(a, e) < limit


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_slopes_of_each_batch_row(dtype, limit, size):
    c = attention_call(dtype, requires_grad=True, rows=(130, 150), sizes=(size, size))
    c = {n: c[n] for n in "qkv"} | {"alibi_slopes": torch.rand(2, 4)}
    exact, gpu = on(c, "cpu", torch.float64), on(c, "cuda")
    expected, actual = (sd.flash_attn_func(**x, causal=True, return_attn_probs=True)[:2] for x in (exact, gpu))
    assert all(a.is_cuda and error(a, e) < limit for a, e in zip(actual, expected, strict=True))
    by = gradients(exact, loss(expected))
    for n, g in gradients(gpu, loss(actual)).items():
        assert g.is_cuda and error(g, by[n]) < 2 * limit, n


@pytest.mark.parametrize("sizes", [{}, dict(sizes=(64, 64), batch=1), dict(sizes=(128, 128), batch=1)])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operands_with_strides_of_0_are_their_copies(name, dtype, limit, sizes):
    if sizes:
        sizes = sizes | ({"tokens": 150} if name in RULE else {"rows": (130, 150)})
    for what, views, copies in with_strides_of_0(name, dtype, lambda call: on(call, "cuda"), **sizes):
        for a, e in zip(views, copies, strict=True):
            finite = e.isfinite()  # the lse of a row without keys is not
            assert a.is_cuda and torch.equal(a[~finite], e[~finite]) and error(a[finite], e[finite]) < limit, what


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_jit_traced_computes_its_results(name):
    draw, run = FUNCTIONS[name]
    call = on({n: x.detach() for n, x in draw(torch.bfloat16).items()}, "cuda")
    traced = torch.jit.trace(lambda *x: tuple(run(dict(zip(call, x)))), tuple(x.clone() for x in call.values()))
    call = {n: x if x.dtype == torch.bool else 0.5 * x for n, x in call.items()}
    assert all(torch.equal(a, e) for a, e in zip(traced(*call.values()), run(call), strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_a_convolution_and_a_norm_are_those_of_the_reference(dtype, limit, packed):
    torch.manual_seed(2)
    B, T, C, W = 1 if packed else 2, 300, 96, 4
    bounds = torch.tensor([0, 7, 7, 150, T]) if packed else None
    N = B if bounds is None else len(bounds) - 1
    call = {"x": torch.randn(B, T, C), "weight": torch.randn(C, W), "bias": torch.randn(C), "state": torch.randn(N, C, W),
            "z": torch.randn(B, T, C), "scale": torch.rand(32)}

    def run(x, bounds):
        y, state = sd.causal_conv1d(x["x"], x["weight"], x["bias"], initial_state=x["state"], output_final_state=True,
                                    activation="silu", cu_seqlens=bounds)
        heads = y.view(B, T, -1, 32)
        return sd.rms_norm_gated(heads, x["z"].view(heads.shape), x["scale"]), state

    call = {n: t.to(dtype).requires_grad_() for n, t in call.items()}
    exact, gpu = on(call, "cpu", torch.float64), on(call, "cuda")
    expected, actual = run(exact, bounds), run(gpu, None if bounds is None else bounds.cuda())
    assert all(a.is_cuda and error(a, e) < limit for a, e in zip(actual, expected))
    by = gradients(exact, loss(expected))
    for n, g in gradients(gpu, loss(actual)).items():
        assert g.is_cuda and error(g, by[n]) < 3 * limit, n


def test_a_step_of_the_convolution_moves_its_state_on():
    torch.manual_seed(3)
    x, weight, state = torch.randn(3, 40), torch.randn(40, 4), torch.randn(3, 40, 4)
    moved, on_gpu = state.clone(), state.cuda()
    expected = sd.causal_conv1d_update(x, moved, weight, activation="silu")
    actual = sd.causal_conv1d_update(x.cuda(), on_gpu, weight.cuda(), activation="silu")
    assert error(actual, expected) < 1e-6 and torch.equal(on_gpu.cpu(), moved)


def test_arrays_of_the_host_are_copied_where_the_engine_is_named():
    draw, run = FUNCTIONS["chunk_kda"]
    call = {n: x.detach() for n, x in draw(torch.float32).items() if n not in ("A_log", "dt_bias")}
    exact = softdelta.delta_forward("kda", **{n: x.double().numpy() for n, x in call.items()}, engine="reference")
    actual = softdelta.delta_forward("kda", **{n: x.numpy() for n, x in call.items()}, engine="cuda")
    for a, e in zip(actual, exact):
        if a is not None:
            assert error(torch.as_tensor(a), torch.as_tensor(e)) < 2e-5


def test_operands_of_two_devices_are_named():
    x = _gdn()
    with pytest.raises(ValueError, match="k: device is cpu, expected cuda:0, where q is"):
        sd.chunk_gated_delta_rule(**(x | {"k": x["k"].cpu()}))


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in RULE])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_attention_and_its_gradients_are_those_of_the_reference(name, dtype, limit):
    draw, run = FUNCTIONS[name]
    call = draw(dtype)
    exact, gpu = on(call, "cpu", torch.float64), on(call, "cuda")
    expected, actual = run(exact), run(gpu)
    assert all(x.is_cuda and error(x, e) < limit for x, e in zip(actual, expected))
    by = gradients(exact, loss(expected))
    for n, g in gradients(gpu, loss(actual)).items():
        assert g.is_cuda and error(g, by[n]) < 2 * limit, n


@pytest.mark.parametrize("shared", [(1, 8, 1, 200), (1, 1, 136, 200), (2, 1, 136, 200), (1, 1, 1, 200), (2, 1, 1, 200)])
@pytest.mark.parametrize("D, dtype", [(64, torch.float16), (128, torch.bfloat16), (192, torch.bfloat16)])
def test_an_expanded_bias_has_its_gradient(shared, D, dtype):
    torch.manual_seed(0)
    shapes = (2, 8, 136, D), (2, 4, 200, D), (2, 4, 200, D), shared
    tensors = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]

    def attention(q, k, v, bias):
        bias = bias.expand(2, 8, 136, 200)
        return sd.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)

    for actual, expected in zip(_step(attention, tensors), _step(attention, exact)):
        assert error(actual, expected) < 2e-2


@pytest.mark.parametrize("expanded", range(4))
def test_tokens_that_lie_in_one_place_are_read(expanded):
    torch.manual_seed(0)
    x = [torch.randn(2, 1 if i == expanded else 192, 2, 128, device="cuda", dtype=torch.bfloat16) for i in range(4)]
    views = [t.expand(2, 192, 2, 128) for t in x]
    g = -torch.rand(2, 192, 2, device="cuda")

    def results(q, k, v, d_o, g):
        q, k, v, g = (t.detach().requires_grad_() for t in (q, k, v, g))
        of_attention = sd.flash_attn_func(q, k, v)
        of_rule, _ = sd.chunk_gated_delta_rule(q, k, v, g, torch.ones_like(g), use_qk_l2norm_in_kernel=True)
        return [o.detach() for o in (of_attention, of_rule)] + [
            dx for o in (of_attention, of_rule) for dx in torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)]

    for actual, expected in zip(results(*views, g), results(*(t.contiguous() for t in views), g)):
        assert (actual - expected).norm() <= 1e-2 * expected.norm() + 0.05  # equal keys: dq is 0


def test_a_call_on_another_gpu_leaves_the_first_alone():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    code = ("import ctypes, torch, softdelta.torch as sd\n"
            "x = torch.ones(1, 40, 2, 64, device='cuda:1', dtype=torch.bfloat16)\n"
            "sd.flash_attn_func(x, x, x), sd.rms_norm_gated(x, x)\n"
            "flags, active, driver = ctypes.c_uint(), ctypes.c_int(), ctypes.CDLL('libcuda.so.1')\n"
            "assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0\n"
            "assert active.value == 0 and torch.cuda.current_device() == 0")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def _step(attention, tensors):
    """Results of attention and the gradients of a number made of them."""
    o = attention(*tensors)
    return o, *torch.autograd.grad(loss([o]), tensors)


@pytest.mark.parametrize("bias", [(1, 8, 300, 300), (1, 8, 1, 300), (1, 1, 300, 300)])
def test_twenty_runs_of_attention_on_three_streams_have_the_same_bits(bias):
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for shape in ((2, 8, 300, 64), (2, 4, 300, 64), (2, 4, 300, 64), bias)]

    def attention(q, k, v, bias):
        return sd.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)

    expected = _step(attention, tensors)
    torch.cuda.synchronize()
    streams, runs = [torch.cuda.Stream() for _ in range(3)], []
    for i in range(20):
        with torch.cuda.stream(streams[i % 3]):
            runs.append(_step(attention, tensors))
    torch.cuda.synchronize()
    assert all(torch.equal(a, e) for run in runs for a, e in zip(run, expected))


def test_a_graph_of_attention_takes_the_lengths_of_its_replay():
    torch.manual_seed(0)
    tensors = [torch.randn(300, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for heads in (4, 2, 2)]
    bounds = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def attention(q, k, v):
        return sd.flash_attn_varlen_func(q, k, v, bounds, bounds, causal=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before = _step(attention, tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(attention, tensors)
    bounds.copy_(torch.tensor([0, 37, 300]))
    graph.replay()
    expected = _step(attention, tensors)
    assert all(torch.equal(a, e) for a, e in zip(captured, expected))
    assert not torch.equal(before[0], expected[0])


@pytest.mark.parametrize("way, most", [("plain", 2e-3), ("fla", 2e-2)])  # fla's products of f32 are tf32
@pytest.mark.parametrize("name", training_step.WIDE)
def test_a_models_training_step_is_that_of_others(name, way, most, tmp_path):
    pytest.importorskip("transformers", minversion="5.20")
    others = training_step.run(name, way, "cpu" if way == "plain" else "cuda", tmp_path / "others")
    if others is None:
        pytest.skip(f"transformers without {name}, or without fla")
    loss, by = others
    value, grads = training_step.run(name, "softdelta", "cuda", tmp_path / "ours")
    assert abs(value - loss) < most / 20 * abs(loss)
    assert grads.keys() == by.keys()
    off = sum((grads[n] - by[n]).double().square().sum() for n in by).sqrt()
    assert off < most * sum(g.double().square().sum() for g in by.values()).sqrt()
