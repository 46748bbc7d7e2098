"""torch.func and batched gradients; and that every second derivative is an error."""
import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import softdelta
import softdelta.torch as sd
from drawing import delta_call
from torch_calls import FUNCTIONS, differentiable, gradients, loss

SECOND, FORWARD = "no second derivatives", "no forward-mode derivatives"


@pytest.fixture(params=FUNCTIONS)
def function(request):
    """Operands in f64; the differentiable ones; the loss as a function of those."""
    draw, run = FUNCTIONS[request.param]
    call = draw(torch.float64)
    names = differentiable(call)

    def f(*leaves):
        return loss(run({**call, **dict(zip(names, leaves))}))

    return call, names, f, run


def leaves_of(call, names):
    return tuple(call[n].detach() for n in names)


def test_grad_and_vjp(function):
    call, names, f, _ = function
    expected = gradients(call, f(*(call[n] for n in names)))
    leaves = leaves_of(call, names)
    for actual in (grad(f, argnums=tuple(range(len(names))))(*leaves),
                   vjp(f, *leaves)[1](torch.ones((), dtype=torch.float64))):
        for n, x in zip(names, actual):
            torch.testing.assert_close(x, expected[n], rtol=1e-12, atol=1e-12, msg=n)


def test_jacrev_is_gradients_one_by_one(function):
    """Every result's every element by every operand, v only where this would take long."""
    call, names, f, run = function
    for name in ("q", "v"):
        def o(x):
            return run({**call, name: x})[0]

        actual = jacrev(o)(call[name].detach())
        x = call[name].detach().requires_grad_()
        y = o(x).reshape(-1)
        for i in range(0, len(y), 7):
            want, = torch.autograd.grad(y[i], x, retain_graph=True)
            torch.testing.assert_close(actual.reshape(len(y), *x.shape)[i], want, rtol=1e-12, atol=1e-12)


def test_vmap(function):
    """A batch of calls; gradients of each, of operands that all share among them."""
    call, names, f, run = function
    for batched in (names, names[:1], names[1:]):
        torch.manual_seed(1)
        dims = tuple(torch.randint(0, call[n].dim() + 1, ()).item() if n in batched else None for n in names)
        some = tuple(call[n].detach() if d is None else torch.stack([call[n].detach() * s for s in (1, 0.5, -0.7)], d)
                     for n, d in zip(names, dims))
        every = [tuple(x if d is None else x.select(d, i) for x, d in zip(some, dims)) for i in range(3)]
        results = vmap(lambda *x: run({**call, **dict(zip(names, x))}), dims)(*some)
        by_all = tuple(range(len(names)))
        grads = vmap(grad(f, argnums=by_all), dims)(*some)
        for i in range(3):
            for x, want in zip(results, run({**call, **dict(zip(names, every[i]))})):
                torch.testing.assert_close(x[i], want.detach(), rtol=1e-12, atol=1e-12)
            for n, x, want in zip(names, grads, grad(f, argnums=by_all)(*every[i])):
                torch.testing.assert_close(x[i], want, rtol=1e-12, atol=1e-12, msg=n)


def test_batched_gradients(function):
    call, names, _, run = function
    results = [x for x in run(call)]
    torch.manual_seed(1)
    ways = [torch.randn(3, *x.shape, dtype=x.dtype) for x in results]
    leaves = [call[n] for n in names]
    batched = torch.autograd.grad(results, leaves, ways, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(results, leaves, [w[i] for w in ways], retain_graph=True)
        for n, x, want in zip(names, batched, alone):
            torch.testing.assert_close(x[i], want, rtol=1e-12, atol=1e-12, msg=n)


def test_vectorized_jacobian():
    c = delta_call("gated_delta_rule", torch.float64)

    def f(v):
        return sd.chunk_gated_delta_rule(**{**c, "v": v})[0]

    actual = torch.autograd.functional.jacobian(f, c["v"], vectorize=True)
    torch.testing.assert_close(actual, torch.autograd.functional.jacobian(f, c["v"]))


# --- second derivatives


def test_gradient_of_a_gradient_is_refused(function):
    """By every operand, through every operand's gradient, with a loss that is linear in the results or not."""
    call, names, _, run = function
    for name in names:
        for value in (loss, lambda results: sum(x.sum() for x in results)):
            y = value(run(call))
            dx, = torch.autograd.grad(y, call[name], create_graph=True)
            assert dx.isfinite().all()  # the first derivative alone may be recorded
            for by in (name, names[0]):
                with pytest.raises(softdelta.Unsupported, match=SECOND):
                    torch.autograd.grad(dx.square().sum(), call[by], retain_graph=True)


def test_by_the_gradient_that_comes_in(function):
    """dq is linear in do; nobody says so to autograd either."""
    call, names, _, run = function
    o = run(call)[0]
    do = torch.ones_like(o).requires_grad_()
    dx, = torch.autograd.grad(o, call[names[0]], do, create_graph=True)
    with pytest.raises(softdelta.Unsupported, match=SECOND):
        torch.autograd.grad(dx.sum(), do)


@pytest.mark.parametrize("vectorize", [False, True])
def test_functional_hessian(function, vectorize):
    call, names, f, _ = function
    with pytest.raises(softdelta.Unsupported, match=SECOND):
        torch.autograd.functional.hessian(lambda x: f(x, *leaves_of(call, names)[1:]), call[names[0]],
                                          vectorize=vectorize)


def test_transforms_of_transforms(function):
    call, names, f, _ = function
    leaves = leaves_of(call, names)

    def g(x):
        return f(x, *leaves[1:])

    for twice in (lambda x: grad(lambda x: grad(g)(x).square().sum())(x), lambda x: jacrev(jacrev(g))(x),
                  lambda x: grad(lambda x: vjp(g, x)[1](torch.ones((), dtype=x.dtype))[0].sum())(x)):
        with pytest.raises(softdelta.Unsupported, match=SECOND):
            twice(leaves[0])
    for forward in (hessian(g), jacfwd(jacrev(g)), jacfwd(g), lambda x: jvp(g, (x,), (x,)), jacrev(jacfwd(g))):
        with pytest.raises(softdelta.Unsupported, match=f"{FORWARD}|{SECOND}"):
            forward(leaves[0])


def test_dual_numbers_are_refused_where_they_matter(function):
    call, names, f, _ = function
    leaves = leaves_of(call, names)
    with torch.autograd.forward_ad.dual_level():
        f(*leaves)  # no tangent, no derivative
        dual = torch.autograd.forward_ad.make_dual(leaves[0], torch.ones_like(leaves[0]))
        with pytest.raises(softdelta.Unsupported, match=FORWARD):
            f(dual, *leaves[1:])


def test_maml_is_refused():
    """A step of gradient descent inside, differentiated from outside."""
    layer = torch.nn.Linear(8, 8, dtype=torch.float64)
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)

    def inner_loss(parameters):
        y = functional_call(layer, parameters, (x,))
        return sd.scaled_dot_product_attention(y, y, y, is_causal=True).square().sum()

    parameters = dict(layer.named_parameters())
    first = torch.autograd.grad(inner_loss(parameters), list(parameters.values()), create_graph=True)
    adapted = {n: p - 0.1 * d for (n, p), d in zip(parameters.items(), first)}
    with pytest.raises(softdelta.Unsupported, match=SECOND):
        inner_loss(adapted).backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradients_of_gradients_are_refused(backend):
    """By softdelta where the backward pass is ours, by torch.compile where it is compiled."""
    torch._dynamo.reset()
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: sd.flash_attn_func(x, x, x).sum(), backend=backend, fullgraph=True)
    dx, = torch.autograd.grad(compiled(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{SECOND}|does not currently support double backward"):
        torch.autograd.grad(dx.square().sum(), x)


def test_ops_refuse_second_derivatives_and_can_be_batched():
    """torch.ops.softdelta, which graphs call."""
    q = torch.randn(3, 1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    nan = float("nan")

    def attend(q):
        return torch.ops.softdelta.attention_forward(q, q, q, *[None] * 11, nan, 0, -1, -1, 0.0, 0, -1, False)[0]

    torch.testing.assert_close(vmap(attend)(q), torch.stack([attend(x) for x in q]))
    dq, = torch.autograd.grad(attend(q[0]).sum(), q, create_graph=True)
    with pytest.raises(softdelta.Unsupported, match=SECOND):
        dq.sum().backward()


def test_a_step_is_not_transformed():
    c = delta_call("gated_delta_rule", tokens=1)
    state = c.pop("initial_state")
    with pytest.raises(ValueError, match="a step stands in a transform"):
        vmap(lambda q: sd.delta_step("gated_delta_rule", state=state, **{**c, "q": q}))(torch.stack([c["q"]] * 2))
