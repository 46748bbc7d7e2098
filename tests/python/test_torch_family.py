"""GLA, lightning attention, GDN-2 and their like under flash-linear-attention's names, against its naive formulas rewritten."""
import pytest
import torch

import softdelta
import softdelta.torch as sd
from drawing import delta_call

B, T, H, K, V = 2, 40, 2, 5, 6


def draw(*names, packed=False):
    """f64, which goes to the reference."""
    g = torch.Generator().manual_seed(1)
    rows = 1 if packed else B
    shapes = {"v": (rows, T, H, V), "w": (rows, T, H, V), "initial_state": (3 if packed else B, H, K, V)}
    call = {}
    for name in names:
        x = torch.randn(shapes.get(name, (rows, T, H, K)), dtype=torch.float64, generator=g)
        x = -x.abs() if name in ("g", "gk") else x.sigmoid() if name in ("b", "w") else x * K**-0.5 if name == "k" else x
        call[name] = x.requires_grad_()
    return call


def same(got, want, call):
    torch.testing.assert_close(got, want)
    d = [torch.randn_like(t) for t in want]
    for a, b in zip(*(torch.autograd.grad(r, list(call.values()), d, retain_graph=True) for r in (got, want))):
        torch.testing.assert_close(a, b)


def recurrence(q, k, v, step, initial_state):
    S, rows = initial_state, []
    for t in range(q.shape[1]):
        S = step(S, t)
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * K**-0.5)
    return torch.stack(rows, 1), S


def outer(k, v):
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def gla(q, k, v, gk, initial_state):
    return recurrence(q, k, v, lambda S, t: S * gk[:, t].exp().unsqueeze(-1) + outer(k[:, t], v[:, t]), initial_state)


def gdn2(q, k, v, g, b, w, initial_state):
    def step(S, t):
        S = S * g[:, t].exp().unsqueeze(-1)
        erased = torch.einsum("bhkv,bhk->bhv", S, b[:, t] * k[:, t])
        return S + outer(k[:, t], w[:, t] * v[:, t] - erased)

    return recurrence(q, k, v, step, initial_state)


def test_gla():
    call = draw("q", "k", "v", "gk", "initial_state")
    want = gla(**call)
    same(sd.fused_recurrent_gla(**call, output_final_state=True), want, call)
    q, k, v, gk, state = call.values()
    same(sd.chunk_gla(q, k, v, gk, initial_state=state, output_final_state=True), want, call)
    turned = [t.flip(1) for t in (q, k, v, gk)]
    o, last = sd.fused_recurrent_gla(*turned, initial_state=state, output_final_state=True, reverse=True)
    same((o.flip(1), last), want, call)
    plain = sd.fused_recurrent_gla(q, k, v, initial_state=state)[0]
    torch.testing.assert_close(plain, gla(q, k, v, torch.zeros_like(gk), state)[0])
    with pytest.raises(ValueError, match="gv is given"):
        sd.fused_recurrent_gla(q, k, v, gk, gk)


def test_lightning_attention():
    call = draw("q", "k", "v", "initial_state")
    gates = -(8 / H * (1 - 3 / 7)) * torch.arange(H, dtype=torch.float64)
    gates = gates.float().double()[None, None, :, None].expand(B, T, H, K)
    want = gla(call["q"], call["k"], call["v"], gates, call["initial_state"])
    for function in (sd.chunk_lightning_attn, sd.fused_recurrent_lightning_attn):
        same(function(**call, layer_idx=3, num_layers=7, output_final_state=True), want, call)


@pytest.mark.parametrize("function", [sd.chunk_gdn2, sd.fused_recurrent_gdn2])
def test_gdn2(function):
    call = draw("q", "k", "v", "g", "b", "w", "initial_state")
    same(function(**call, output_final_state=True), gdn2(**call), call)
    normed = {n: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() if n in "qk" else x for n, x in call.items()}
    same(function(**call, output_final_state=True, use_qk_l2norm_in_kernel=True), gdn2(**normed), call)
    with pytest.raises(ValueError, match="b has shape"):
        function(**{**call, "b": call["b"][:, 1:]})


def test_gdn2_with_one_gate_is_kda():
    call = draw("q", "k", "v", "g", "initial_state")
    beta = torch.rand(B, T, H, dtype=torch.float64)
    b, w = (beta.unsqueeze(-1).expand(B, T, H, n) for n in (K, V))
    torch.testing.assert_close(sd.chunk_gdn2(**call, b=b, w=w)[0], sd.chunk_kda(**call, beta=beta)[0])


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_fast_results(dtype, limit):
    call = draw("q", "k", "v", "g", "b", "w", "initial_state", packed=True)
    exact = {n: t.detach().to(torch.float32 if n == "initial_state" else dtype).double().requires_grad_() for n, t in call.items()}
    fast = {n: t.detach().to(torch.float32 if n == "initial_state" else dtype).requires_grad_() for n, t in exact.items()}
    bounds = torch.tensor([0, 17, 17, T])
    for function, names in ((sd.chunk_gdn2, tuple(call)), (sd.chunk_gla, ("q", "k", "v", "g", "initial_state"))):
        results = []
        for operands in (fast, exact):
            some = {n: operands[n] for n in names}
            o, _ = function(**some, cu_seqlens=bounds)
            d = torch.ones_like(o)
            results.append((o, *torch.autograd.grad(o, list(some.values()), d)))
        for a, b in zip(*results):
            assert (a.double() - b).norm() <= limit * b.norm(), function.__name__


def test_a_rule_by_its_facts_has_the_gradients_of_its_name():
    call = delta_call("kda", requires_grad=True)
    wanted = [x for x in call.values() if x.requires_grad]
    results = []
    for rule in "kda", softdelta.Rule("channel"):
        o, state = sd.delta_rule(rule, **call, output_final_state=True)
        results.append([o, state, *torch.autograd.grad(o.square().sum() + state.sum(), wanted)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    rule = softdelta.Rule("channel", "previous")
    call = delta_call("kda", dtype=torch.float64, requires_grad=True, tokens=5)
    names = list(call)
    assert torch.autograd.gradcheck(lambda *x: sd.delta_rule(rule, **dict(zip(names, x)))[0], tuple(call.values()))


def dplr(q, k, v, a, b, gk, initial_state):
    def step(S, t):
        seen = torch.einsum("bhkv,bhk->bhv", S, a[:, t])
        return S * gk[:, t].exp().unsqueeze(-1) + outer(b[:, t], seen) + outer(k[:, t], v[:, t])

    return recurrence(q, k, v, step, initial_state)


def test_dplr_and_rwkv7():
    call = draw("q", "k", "v", "a", "b", "gk", "initial_state")
    with torch.no_grad():
        call["a"] *= K**-0.5
        call["b"] *= K**-0.5
    want = dplr(**call)
    for function in (sd.chunk_dplr_delta_rule, sd.fused_recurrent_dplr_delta_rule):
        same(function(**call, output_final_state=True), want, call)
    q, k, v, a, b, gk, state = call.values()
    for function in (sd.chunk_rwkv7, sd.fused_recurrent_rwkv7):
        same(function(q, gk, k, v, a, b, K**-0.5, state, True), want, call)
    kk = -a
    want = dplr(q, k, v, a, kk * b, gk, state)
    same(sd.fused_mul_recurrent_rwkv7(q, gk, k, v, kk, b, K**-0.5, state, True), want, call)
    with pytest.raises(ValueError, match="a has shape"):
        sd.chunk_rwkv7(q, gk, k, v, a[:, 1:], b)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_gated_delta_product(steps, gated):
    g = torch.Generator().manual_seed(2)
    call = draw("q", "initial_state")
    call |= {n: torch.randn(B, T * steps, H, size, dtype=torch.float64, generator=g) * K**-0.5 for n, size in (("k", K), ("v", V))}
    call["beta"] = torch.rand(B, T * steps, H, dtype=torch.float64, generator=g)
    call = {n: x.detach().requires_grad_() for n, x in call.items()}
    gate = -torch.rand(B, T, H, dtype=torch.float64, generator=g) if gated else None

    def step(S, t):
        S = S if gate is None else S * gate[:, t].exp()[..., None, None]
        for row in range(t * steps, (t + 1) * steps):
            k, v, beta = (call[n][:, row] for n in ("k", "v", "beta"))
            S = S + outer(k, beta.unsqueeze(-1) * (v - torch.einsum("bhkv,bhk->bhv", S, k)))
        return S

    want = recurrence(call["q"], None, None, step, call["initial_state"])
    same(sd.chunk_gated_delta_product(**call, g=gate, num_householder=steps, output_final_state=True), want, call)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_fast_steps(dtype, limit):
    call = draw("q", "k", "v", "a", "b", "gk")
    fast = {n: (x.detach() * (K**-0.5 if n in "ab" else 1)).to(dtype).requires_grad_() for n, x in call.items()}
    exact = {n: x.detach().double().requires_grad_() for n, x in fast.items()}
    results = []
    for operands in (fast, exact):
        o, _ = sd.chunk_dplr_delta_rule(**operands)
        results.append((o, *torch.autograd.grad(o, list(operands.values()), torch.ones_like(o))))
    for a, b in zip(*results):
        assert (a.double() - b).norm() <= limit * b.norm()
    state = torch.zeros(B, H, K, V)
    q, k, v, a, b, gk = (x.detach().float() for x in fast.values())
    rows = []
    for t in range(T):  # the decode of two steps a token
        steps = [torch.stack(pair, 2).flatten(1, 2)[:, 2 * t:2 * t + 2]
                 for pair in ((b, k), (torch.zeros_like(v), v), (-a, torch.zeros_like(a)))]
        rows.append(sd.delta_step("dplr", q[:, t:t + 1], *steps[:2], state, p=steps[2], g=gk[:, t:t + 1], steps=2))
    assert (torch.cat(rows, 1).double() - results[1][0]).norm() <= 1e-4 * results[1][0].norm() or dtype != torch.float32
