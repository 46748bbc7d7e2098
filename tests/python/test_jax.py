"""softdelta.jax against jax.nn.dot_product_attention and softdelta.torch: jit, grad, vmap."""
import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import softdelta  # noqa: E402
import softdelta.jax as sj  # noqa: E402
from softdelta import _native  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(jax, "ffi"), reason="this jax has no jax.ffi")


@pytest.fixture(params=["xla", "callback"], scope="module", autouse=True)
def way(request):
    if request.param == "xla" and not hasattr(_native, "xla_handler"):
        pytest.skip("built without XLA's header")
    before, sj._by_xla = sj._by_xla, request.param == "xla"
    jax.clear_caches()
    yield request.param
    sj._by_xla = before


@pytest.fixture
def once(way):
    """Of a test that both ways need not run."""
    if way == "callback" and hasattr(_native, "xla_handler"):
        pytest.skip("XLA's way ran it")


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def close(got, want, dtype=jnp.float32):
    limit = 2e-5 if dtype == jnp.float32 else 3e-2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=limit, atol=limit)


def operands(dtype=jnp.float32, rows=9, keys=9):
    return (draw(2, rows, 4, 16, dtype=dtype), draw(2, keys, 2, 16, seed=1, dtype=dtype), draw(2, keys, 2, 16, seed=2, dtype=dtype))


CALLS = {
    "plain": {}, "causal": dict(is_causal=True), "scale": dict(scale=0.3), "window": dict(local_window_size=(3, 1)),
    "causal window": dict(is_causal=True, local_window_size=2),
    "lengths": dict(key_value_seq_lengths=jnp.array([4, 9])),
    "mask": dict(mask=jnp.asarray(np.random.default_rng(3).random((2, 1, 9, 9)) > 0.2)),
    "bias": dict(bias=draw(1, 4, 9, 9, seed=4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_attention_is_that_of_jax(name, way):
    if way == "callback" and hasattr(_native, "xla_handler") and name not in ("mask", "bias"):
        pytest.skip("XLA's way ran it")
    q, k, v = operands()
    options = CALLS[name]
    others = [n for n in ("bias",) if n in options]

    def loss(attend):
        return lambda q, k, v, *more: jnp.sin(attend(q, k, v, **{**options, **dict(zip(others, more))})).sum()

    given = q, k, v, *(options[n] for n in others)
    places = tuple(range(len(given)))
    got, want = (jax.jit(jax.value_and_grad(loss(f), argnums=places))(*given)
                 for f in (sj.dot_product_attention, jax.nn.dot_product_attention))
    close(got, want)


def test_types_ranks_and_batches(once):
    q, k, v = operands(jnp.bfloat16)
    close(sj.dot_product_attention(q, k, v), jax.nn.dot_product_attention(q, k, v), jnp.bfloat16)
    q, k, v = operands()
    close(sj.dot_product_attention(q[0], k[0], v[0]), sj.dot_product_attention(q, k, v)[0])
    many = [jnp.stack([x, 2 * x, -x]) for x in (q, k, v)]
    close(jax.vmap(sj.dot_product_attention)(*many), jax.vmap(jax.nn.dot_product_attention)(*many))
    gradient = [jax.jit(jax.vmap(jax.grad(lambda *x: jnp.sin(f(*x)).sum(), argnums=(0, 1)), in_axes=(0, None, 0)))
                for f in (sj.dot_product_attention, jax.nn.dot_product_attention)]
    close(*(f(many[0], k, many[2]) for f in gradient))


def test_sink_and_lse_have_gradients(once):
    q, k, v = operands()
    sink = draw(4, seed=5)

    def by_jax(q, k, v, sink):
        s = jnp.einsum("btghd,bsgd->bghts", q.reshape(2, 9, 2, 2, 16), k) / 4
        s = jnp.concatenate([s, jnp.broadcast_to(sink.reshape(1, 2, 2, 1, 1), (2, 2, 2, 9, 1))], -1)
        o = jnp.einsum("bghts,bsgd->btghd", jax.nn.softmax(s)[..., :-1], v)
        return o.reshape(2, 9, 4, 16), jax.nn.logsumexp(s, -1).reshape(2, 4, 9)

    def ours(q, k, v, sink):
        return sj.dot_product_attention(q, k, v, sink=sink, return_lse=True)

    close(ours(q, k, v, sink), by_jax(q, k, v, sink))
    for loss in (lambda o, lse: jnp.sin(o).sum() + jnp.cos(lse).sum(), lambda o, lse: jnp.cos(lse).sum()):
        close(*(jax.jit(jax.grad(lambda *x: loss(*f(*x)), argnums=(0, 1, 2, 3)))(q, k, v, sink) for f in (ours, by_jax)))


@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla"])
def test_delta_rules_are_those_of_torch(rule, way):
    if way == "callback" and hasattr(_native, "xla_handler") and rule != "kda":
        pytest.skip("XLA's way ran it")
    torch = pytest.importorskip("torch")
    import softdelta.torch as sd
    from drawing import delta_call
    call = delta_call(rule, tokens=70, sizes=(16, 16), requires_grad=True)
    o, state = getattr(sd, f"chunk_{rule}")(**call, output_final_state=True)
    want = torch.autograd.grad(o.sin().sum() + state.cos().sum(), list(call.values()))
    arrays = {n: jnp.asarray(t.detach().numpy()) for n, t in call.items()}

    def loss(x):
        o, state = sj.delta_rule(rule, **x)
        return jnp.sin(o).sum() + jnp.cos(state).sum(), (o, state)

    got, results = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    close(results, [jnp.asarray(t.detach().numpy()) for t in (o, state)])
    close([got[n] for n in call], [jnp.asarray(t.numpy()) for t in want])
    if rule != "kda":
        return
    many = {n: jnp.stack([x, x * 0.5]) for n, x in arrays.items()}
    batched = jax.jit(jax.vmap(jax.grad(lambda x: loss(x)[0])))(many)
    close(jax.tree.map(lambda x: x[0], batched), got)


def test_packed_sequences_and_gates_in_the_kernel(once):
    torch = pytest.importorskip("torch")
    import softdelta.torch as sd
    from drawing import delta_call
    call = delta_call("kda", packed=True)
    more = dict(A_log=torch.rand(2), dt_bias=torch.rand(6))
    flags = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)
    want = sd.chunk_kda(**call, **more, **flags, output_final_state=True)
    arrays = {n: jnp.asarray(t.numpy()) for n, t in {**call, **more}.items()}
    close(jax.jit(lambda x: sj.delta_rule("kda", **x, **flags))(arrays), [jnp.asarray(t.numpy()) for t in want])


def test_a_layer_is_that_of_torch(once):
    """A Gated DeltaNet layer: projections, convolution, rule with gate and norms inside, gated norm; gradients of all its weights."""
    torch = pytest.importorskip("torch")
    import softdelta.torch as sd
    heads, size, model, taps = 2, 8, 12, 4
    shapes = dict(x=(2, 40, model), qkv=(model, 3 * heads * size), conv=(3 * heads * size, taps), a=(model, heads), b=(model, heads),
                  z=(model, heads * size), A_log=(heads,), dt_bias=(heads,), norm=(size,), out=(heads * size, model))
    w = {n: 0.5 * draw(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}

    def by_jax(x, qkv, conv, a, b, z, A_log, dt_bias, norm, out):
        y = jnp.pad(x @ qkv, ((0, 0), (taps - 1, 0), (0, 0)))
        y = jax.nn.silu(sum(y[:, i:i + x.shape[1]] * conv[:, i] for i in range(taps)))
        q, k, v = (part.reshape(*x.shape[:2], heads, size) for part in jnp.split(y, 3, -1))
        o, _ = sj.delta_rule("gated_delta_rule", q, k, v, g=x @ a, beta=jax.nn.sigmoid(x @ b), A_log=A_log, dt_bias=dt_bias,
                             use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)
        o = o * jax.lax.rsqrt((o * o).mean(-1, keepdims=True) + 1e-6) * norm * jax.nn.silu((x @ z).reshape(o.shape))
        return o.reshape(*x.shape[:2], -1) @ out

    def by_torch(x, qkv, conv, a, b, z, A_log, dt_bias, norm, out):
        y = sd.causal_conv1d_fn((x @ qkv).mT, conv, activation="silu").mT
        q, k, v = (part.unflatten(-1, (heads, size)) for part in y.chunk(3, -1))
        o, _ = sd.chunk_gated_delta_rule(q, k, v, x @ a, (x @ b).sigmoid(), A_log=A_log, dt_bias=dt_bias,
                                         use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)
        return sd.rms_norm_gated(o, (x @ z).view(o.shape), norm, eps=1e-6).flatten(-2) @ out

    leaves = [torch.tensor(np.asarray(x), requires_grad=True) for x in w.values()]
    want = by_torch(*leaves)
    gradients = torch.autograd.grad(want.sin().sum(), leaves)
    close(jax.jit(by_jax)(*w.values()), jnp.asarray(want.detach().numpy()))
    got = jax.jit(jax.grad(lambda *x: jnp.sin(by_jax(*x)).sum(), argnums=tuple(range(len(w)))))(*w.values())
    close(got, [jnp.asarray(g.numpy()) for g in gradients])


def test_wrong_calls_are_named():
    q, k, v = operands()
    for run, message in ((lambda: sj.dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, 9, 9))), "mask holds float32"),
                         (lambda: sj.dot_product_attention([1], k, v), "query is list, expected an array"),
                         (lambda: sj.dot_product_attention(q, k, v, local_window_size=(1, 2, 3)), "expected a whole number or two"),
                         (lambda: sj.dot_product_attention(q[0, 0], k, v), "query has 2 dimensions"),
                         (lambda: sj.delta_rule("mamba", q, k, v), "rule is 'mamba'"),
                         (lambda: sj.dot_product_attention(q, k[:, :4], v[:, :4], local_window_size=3), "local_window_size")):
        with pytest.raises((TypeError, ValueError), match=message):
            run()
    with pytest.raises(Exception, match="v: dimension 1 is 5, expected 9"):
        jax.block_until_ready(jax.jit(sj.dot_product_attention)(q, k, v[:, :5]))
    with pytest.raises(Exception):  # second derivatives, as a clear error of jax
        jax.hessian(lambda q: sj.dot_product_attention(q, k, v).sum())(q)
