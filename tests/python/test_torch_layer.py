"""The causal convolution and the gated norm of softdelta.torch: results by the formula, gradients, ops, autocast, torch.func,
decode."""
import pytest
import torch
import torch.nn.functional as F

import softdelta
import softdelta.torch as sd
from drawing import expanded

BOUNDS = torch.tensor([0, 3, 3, 9], dtype=torch.int32)


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def convolution_operands(dtype=torch.float64, B=2, T=9, C=5, W=4, bias=True, state=True):
    x, weight = drawn(B, T, C, seed=1, dtype=dtype), drawn(C, W, seed=2, dtype=dtype)
    return (x, weight, drawn(C, seed=3, dtype=dtype) if bias else None,
            drawn(B, C, W, seed=4, dtype=dtype) if state else None)


def convolved(x, weight, bias, state, activation=None):
    """y and the last W tokens of x [B, T, C], computed by torch."""
    W = weight.shape[1]
    before = x.new_zeros(x.shape[0], x.shape[2], W) if state is None else state
    every = torch.cat([before, x.transpose(1, 2)], -1)
    y = F.conv1d(every, weight[:, None], bias, groups=x.shape[2])[:, :, 1:].transpose(1, 2)
    return (F.silu(y) if activation else y), every[:, :, -W:]


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("T", [0, 1, 2, 9])
def test_causal_conv1d_is_its_formula(activation, bias, state, T):
    x, weight, b, s = convolution_operands(T=T, bias=bias, state=state)
    y, final = sd.causal_conv1d(x, weight, b, initial_state=s, output_final_state=True, activation=activation)
    expected, last = convolved(x, weight, b, s, activation)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)
    assert torch.equal(final, last)
    assert sd.causal_conv1d(x, weight, b, activation=activation)[1] is None


@pytest.mark.parametrize("dtype, roundings", [(torch.float32, 8), (torch.bfloat16, 0.51), (torch.float16, 0.51)])
def test_results_are_rounded_once(dtype, roundings):
    """Weights may be f32 beside 16-bit tokens."""
    x, weight, bias, _ = convolution_operands(torch.float32, T=40, C=70)
    y, _ = sd.causal_conv1d(x.to(dtype), weight, bias, activation="silu")
    expected, _ = convolved(x.to(dtype).double(), weight.double(), bias.double(), None, "silu")
    assert y.dtype == dtype
    assert ((y.double() - expected).abs() <= roundings * torch.finfo(dtype).eps * expected.abs() + 1e-6).all()
    g, w = drawn(2, 40, 70, seed=5, dtype=dtype), drawn(70, seed=6, dtype=torch.float32)
    y = sd.rms_norm_gated(x.to(dtype), g, w)
    n = x.to(dtype).double() * (x.to(dtype).double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = n * w.double() * F.silu(g.double())
    assert ((y.double() - expected).abs() <= roundings * torch.finfo(dtype).eps * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_with_strides_of_0_are_their_copies(dtype):
    def results(call, dy):
        call = {n: t.detach().requires_grad_() for n, t in call.items()}
        if "z" in call:
            y = [sd.rms_norm_gated(call["x"], call["z"], call["weight"])]
        else:
            y = sd.causal_conv1d(*call.values(), output_final_state=True, activation="silu")
        incoming = [d.expand_as(t) for t, d in zip(y, (dy, torch.ones((), dtype=dtype)))]
        return *y, *torch.autograd.grad(y, list(call.values()), incoming)

    x, weight, bias, state = convolution_operands(dtype, T=20, C=70)
    convolution = dict(x=x, weight=weight, bias=bias, residual=drawn(2, 20, 70, seed=5, dtype=dtype), initial_state=state)
    norm = dict(x=x, z=drawn(2, 20, 70, seed=6, dtype=dtype), weight=bias)
    for call in (convolution, norm):
        for n, t in call.items():
            for view in expanded(t):
                for a, b in zip(results({**call, n: view}, x), results({**call, n: view.contiguous()}, x), strict=True):
                    assert torch.equal(a, b), (n, view.stride())
        for dy in expanded(x):
            for a, b in zip(results(call, dy), results(call, dy.contiguous()), strict=True):
                assert torch.equal(a, b), dy.stride()


def test_packed_sequences_restart():
    x, weight, bias, _ = convolution_operands(B=1)
    state = drawn(3, 5, 4, seed=8)
    y, final = sd.causal_conv1d(x, weight, bias, initial_state=state, output_final_state=True, activation="silu",
                                cu_seqlens=BOUNDS)
    for n, (begin, end) in enumerate(zip(BOUNDS, BOUNDS[1:])):
        alone, last = convolved(x[:, begin:end], weight, bias, state[n:n + 1], "silu")
        torch.testing.assert_close(y[:, begin:end], alone, atol=1e-12, rtol=0)
        assert torch.equal(final[n:n + 1], last)


def test_causal_conv1d_fn():
    """causal-conv1d: x [B, C, T], states of W − 1 tokens, a number of its sequence for each token."""
    x, weight, bias, state = convolution_operands()
    expected, last = convolved(x, weight, bias, state, "silu")
    y, final = sd.causal_conv1d_fn(x.transpose(1, 2), weight, bias, initial_states=state[:, :, 1:],
                                   return_final_states=True, activation="silu")
    torch.testing.assert_close(y, expected.transpose(1, 2), atol=1e-12, rtol=0)
    assert torch.equal(final, last[:, :, 1:])
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 4 + [1] * 5], dtype=torch.int32)
    y = sd.causal_conv1d_fn(x.transpose(1, 2).contiguous(), weight, bias, seq_idx=seq_idx)
    for row, bounds in ((0, (0, 3, 5, 9)), (1, (0, 4, 9))):
        for begin, end in zip(bounds, bounds[1:]):
            alone, _ = convolved(x[row:row + 1, begin:end], weight, bias, None)
            torch.testing.assert_close(y[row:row + 1, :, begin:end], alone.transpose(1, 2), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [None, 1, 3])
@pytest.mark.parametrize("width", [3, 4, 6])
def test_update_in_place(dtype, T, width):
    """Tokens one by one give what the whole gives; the caller's state is updated in place."""
    x, weight, bias, _ = convolution_operands(dtype, T=9)
    state = drawn(2, 5, width, seed=4, dtype=dtype)
    whole, last = sd.causal_conv1d_fn(x.transpose(1, 2), weight, bias, initial_states=state[:, :, width - 3:],
                                      return_final_states=True, activation="silu")
    pieces = []
    for t in range(0, 9, T or 1):
        part = x[:, t] if T is None else x[:, t:t + T].transpose(1, 2)
        y = sd.causal_conv1d_update(part, state, weight, bias, "silu")
        assert y.shape == part.shape
        pieces.append(y.unsqueeze(-1) if T is None else y)
    assert torch.equal(torch.cat(pieces, -1), whole) and torch.equal(state[:, :, width - 3:], last)


def test_update_of_a_pool():
    x, weight, bias, _ = convolution_operands(torch.float32, T=1)
    pool = drawn(4, 5, 4, seed=9, dtype=torch.float32)
    before, alone = pool.clone(), pool[2:3].clone()
    y = sd.causal_conv1d_update(x[:, 0], pool, weight, bias, conv_state_indices=torch.tensor([2, -1]))
    expected = sd.causal_conv1d_update(x[:1, 0], alone, weight, bias)
    assert torch.equal(y[0], expected[0]) and not y[1].any()
    assert torch.equal(pool[2:3], alone) and torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("activation", ["swish", "sigmoid", None])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 3, 4, 7), (2, 1, 3, 4, 7), (0, 7), (2, 0, 3, 7), (2, 0, 3, 4, 7),
                                   (2, 1, 3, 0, 7)])
def test_rms_norm_gated_is_its_formula(activation, shape):
    x, g, w = drawn(*shape, seed=1), drawn(*shape, seed=2) if activation else None, drawn(7, seed=3)
    gate = {"swish": F.silu, "sigmoid": torch.sigmoid, None: None}[activation]
    expected = F.rms_norm(x, (7,), w, 1e-5) * (1 if gate is None else gate(g))
    torch.testing.assert_close(sd.rms_norm_gated(x, g, w, activation=activation, eps=1e-5), expected, atol=1e-12, rtol=0)
    layer = sd.FusedRMSNormGated(7, activation=activation or "swish", dtype=torch.float64)
    torch.testing.assert_close(layer(x, g), F.rms_norm(x, (7,), None, 1e-5) * (1 if gate is None else gate(g)),
                               atol=1e-12, rtol=0)


def convolution_call(packed=False):
    def f(x, weight, bias, state):
        return sd.causal_conv1d(x, weight, bias, initial_state=state, output_final_state=True, activation="silu",
                                cu_seqlens=BOUNDS if packed else None)
    x, weight, bias, _ = convolution_operands(B=1 if packed else 2)
    return f, (x, weight, bias, drawn(3 if packed else 2, 5, 4, seed=4))


def norm_call():
    return (lambda x, g, w: (sd.rms_norm_gated(x, g, w),)), (drawn(2, 3, 7, seed=1), drawn(2, 3, 7, seed=2), drawn(7, seed=3))


CALLS = {"convolution": convolution_call, "packed": lambda: convolution_call(True), "norm": norm_call}


@pytest.fixture(params=CALLS)
def call(request):
    """A function and its operands, in f64."""
    f, operands = CALLS[request.param]()
    return f, tuple(x.requires_grad_() for x in operands)


def test_gradcheck(call):
    assert torch.autograd.gradcheck(*call)


def test_some_gradients(call):
    """Asking for some gradients gives the same numbers as asking for all."""
    f, operands = call
    value = f(*operands)[0].sin().sum()
    every = torch.autograd.grad(value, operands)
    for i, x in enumerate(operands):
        alone = [t if j == i else t.detach() for j, t in enumerate(operands)]
        assert torch.equal(torch.autograd.grad(f(*alone)[0].sin().sum(), x)[0], every[i])


def test_second_derivatives():
    for make in (convolution_call, norm_call):
        f, operands = make()
        assert torch.autograd.gradgradcheck(f, tuple(x.requires_grad_() for x in operands))
    f, operands = convolution_call(True)
    x = operands[0].requires_grad_()
    with pytest.raises(softdelta.Unsupported, match="no second derivatives"):
        torch.autograd.grad(f(*operands)[0].sum(), x, create_graph=True)


def test_transforms(call):
    f, operands = call
    loss = lambda *x: sum(y.sin().sum() for y in f(*x))  # noqa: E731
    expected = torch.autograd.grad(loss(*operands), operands)
    detached = [x.detach() for x in operands]
    for a, b in zip(torch.func.grad(loss, argnums=tuple(range(len(operands))))(*detached), expected):
        torch.testing.assert_close(a, b)
    for batched in range(len(operands)):  # one operand of a batch, the others shared
        xs = [torch.stack([x, 2 * x]) if i == batched else x for i, x in enumerate(detached)]
        dims = tuple(0 if i == batched else None for i in range(len(xs)))
        got = torch.vmap(torch.func.grad(loss, argnums=tuple(range(len(xs)))), in_dims=dims)(*xs)
        for j in range(2):
            one = [x[j] if i == batched else x for i, x in enumerate(xs)]
            one = [x.clone().requires_grad_() for x in one]
            for a, b in zip(got, torch.autograd.grad(loss(*one), one)):
                torch.testing.assert_close(a[j], b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    x, weight, bias, state = (t.requires_grad_() for t in convolution_operands(dtype))
    for kept in (-1, 4):
        torch.library.opcheck(torch.ops.softdelta.causal_convolution_forward.default,
                              (x, weight, bias, state, None, 1, kept))
    torch.library.opcheck(torch.ops.softdelta.gated_norm_forward.default,
                          (*(drawn(2, 3, 4, 7, seed=n, dtype=dtype).requires_grad_() for n in (1, 2)),
                           drawn(7, seed=3, dtype=dtype).requires_grad_(), 1, 1e-6))
    pool = torch.tensor([3, -1])
    torch.library.opcheck(torch.ops.softdelta.causal_convolution_step.default,
                          (x.detach()[:, :2].transpose(1, 2), weight.detach(), bias.detach(),
                           drawn(4, 5, 4, seed=5, dtype=dtype), pool, None, None, 1))


def test_schemas_are_kept():
    """Saved graphs call the ops with these arguments in this order."""
    convolution = ("Tensor x, Tensor? weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, SymInt activation, "
                   "SymInt kept")
    norm = "Tensor x, Tensor? z, Tensor? weight, SymInt gate, float epsilon"
    for name, schema in (
            ("causal_convolution_forward", f"({convolution}) -> (Tensor, Tensor)"),
            ("causal_convolution_backward", f"({convolution}, Tensor? dy, Tensor? dfinal_state, bool[] wanted) -> "
             "(Tensor, Tensor, Tensor, Tensor)"),
            ("gated_norm_forward", f"({norm}) -> Tensor"),
            ("gated_norm_backward", f"({norm}, Tensor? dy, bool[] wanted) -> (Tensor, Tensor, Tensor)")):
        assert str(getattr(torch.ops.softdelta, name).default._schema) == f"softdelta::{name}{schema}"


def test_compiled(call):
    f, operands = call
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(*operands), f(*operands)):
        torch.testing.assert_close(x, y)
    for a, b in zip(*(torch.autograd.grad(sum(y.sin().sum() for y in g(*operands)), operands) for g in (compiled, f))):
        torch.testing.assert_close(a, b)


def test_autocast():
    """autocast casts tokens, not weights, and nothing of a norm. Gradients have the types of their operands."""
    x, weight, bias, _ = (t if t is None else t.requires_grad_() for t in convolution_operands(torch.float32, state=False))
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = sd.causal_conv1d(x, weight, bias)
        norm = sd.rms_norm_gated(x, x, None)
    by_hand, _ = sd.causal_conv1d(x.bfloat16(), weight, bias)
    assert y.dtype == torch.bfloat16 and torch.equal(y, by_hand) and norm.dtype == torch.float32
    found, expected = (torch.autograd.grad(t.float().sin().sum(), (x, weight, bias)) for t in (y, by_hand))
    for a, b in zip(found, expected):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("run, message", [
    (lambda x, w: sd.causal_conv1d(x, w, activation="gelu"), "activation is 'gelu', expected one of"),
    (lambda x, w: sd.causal_conv1d(x, w[0]), "weight"),
    (lambda x, w: sd.causal_conv1d(x[0], w), "x has 2 dimensions, expected 3"),
    (lambda x, w: sd.causal_conv1d(x, w, drawn(4)), "bias: dimension 0 is 4, expected 5"),
    (lambda x, w: sd.causal_conv1d_fn(x, w, final_states_out=x), "final_states_out is given"),
    (lambda x, w: sd.causal_conv1d_update(x[:, 0], drawn(2, 5, 2), w), "dimension 2 is 2, expected 3 or more"),
    (lambda x, w: sd.causal_conv1d_update(x[:, 0], drawn(2, 5, 4), w.clone().requires_grad_()), "requires a gradient"),
    (lambda x, w: sd.causal_conv1d_update(x[:, 0], drawn(2, 5, 4), w, cache_seqlens=x), "cache_seqlens is given"),
    (lambda x, w: sd.rms_norm_gated(x, x, None, bias=w), "bias is given"),
    (lambda x, w: sd.rms_norm_gated(x, x[0]), "g has shape"),
    (lambda x, w: sd.rms_norm_gated(x, x, prenorm=True), "prenorm is True"),
])
def test_wrong_arguments(run, message):
    with pytest.raises(ValueError, match=message):
        run(drawn(2, 9, 5), drawn(5, 4))


def test_arrays():
    """On arrays of NumPy in f32: forward, a step and gradients agree with the torch functions."""
    numpy = pytest.importorskip("numpy")
    x, weight, bias, state = convolution_operands(torch.float32)
    arrays = [t.numpy() for t in (x, weight, bias)]
    y, final = softdelta.causal_convolution_forward(*arrays, initial_state=state.numpy(), activation="silu")
    leaves = [t.requires_grad_() for t in (x, weight, bias, state)]
    expected, last = sd.causal_conv1d(*leaves[:3], initial_state=state, output_final_state=True, activation="silu")
    numpy.testing.assert_array_equal(y, expected.detach().numpy())
    numpy.testing.assert_array_equal(final, last.detach().numpy())
    moved = state.detach().clone().numpy()
    numpy.testing.assert_array_equal(
        softdelta.causal_convolution_step(arrays[0], arrays[1], moved, arrays[2], activation="silu"), y)
    numpy.testing.assert_array_equal(moved, final)
    dy = drawn(2, 9, 5, seed=7, dtype=torch.float32)
    found = softdelta.causal_convolution_backward(arrays[0], arrays[1], dy.numpy(), arrays[2],
                                                  initial_state=state.detach().numpy(), activation="silu")
    for a, b in zip((found[n] for n in ("dx", "dweight", "dbias", "dinitial_state")),
                    torch.autograd.grad(expected, leaves, dy)):
        numpy.testing.assert_array_equal(a, b.numpy())
    x, z, w = (drawn(*shape, seed=n, dtype=torch.float32).requires_grad_()
               for n, shape in enumerate(((2, 3, 4, 7), (2, 3, 4, 7), (7,))))
    arrays = [t.detach().numpy() for t in (x, z, w)]
    y = sd.rms_norm_gated(x, z, w)
    numpy.testing.assert_array_equal(softdelta.gated_norm_forward(*arrays), y.detach().numpy())
    dy = drawn(2, 3, 4, 7, seed=7, dtype=torch.float32)
    found = softdelta.gated_norm_backward(arrays[0], dy.numpy(), arrays[1], arrays[2])
    for a, b in zip((found[n] for n in ("dx", "dz", "dweight")), torch.autograd.grad(y, (x, z, w), dy)):
        numpy.testing.assert_array_equal(a, b.numpy())
