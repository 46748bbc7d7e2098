"""Mamba-2: the scan and the step against its recurrence, token by token in f64, and a state space model's own formula."""
import math

import pytest
import torch
import torch.nn.functional as F

import softdelta.torch as sd

T, H, P, G, N = 20, 4, 6, 2, 5


def draw(dtype=torch.float64, rows=2, options=("D", "z", "dt_bias", "initial_states"), P=P, N=N, T=T, requires_grad=True):
    g = torch.Generator().manual_seed(1)
    kind = dict(dtype=torch.float64, generator=g)
    call = {"x": torch.randn(rows, T, H, P, **kind), "dt": torch.randn(rows, T, H, **kind),
            "A": -torch.rand(H, **kind) - 0.1, "B": torch.randn(rows, T, G, N, **kind) / 2,
            "C": torch.randn(rows, T, G, N, **kind) / 2}
    more = {"D": torch.randn(H, P, **kind), "z": torch.randn(rows, T, H, P, **kind), "dt_bias": torch.randn(H, **kind) - 2,
            "initial_states": torch.randn(rows, H, P, N, **kind)}
    call |= {n: more[n] for n in options}
    wide = ("A", "D", "dt_bias", "initial_states")
    to = {n: torch.promote_types(dtype, torch.float32) if n in wide else dtype for n in call}
    return {n: t.to(to[n]).requires_grad_(requires_grad) for n, t in call.items()}


def recurrence(x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, dt_softplus=False,
               dt_limit=(0.0, math.inf)):
    """S ← e^(dt A) S + dt x Bᵀ, y = S C + D x, times silu(z); and the states after every token."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (t.repeat_interleave(H // B.shape[2], 2) for t in (B, C))
    S = x.new_zeros(len(x), H, x.shape[3], B.shape[3]) if initial_states is None else initial_states
    rows, states = [], []
    for t in range(x.shape[1]):
        if t > 0 and seq_idx is not None:
            S = S * (seq_idx[:, t] == seq_idx[:, t - 1]).view(-1, 1, 1, 1)
        S = S * (dt[:, t] * A).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        y = torch.einsum("bhpn,bhn->bhp", S, C[:, t])
        y = y if D is None else y + x[:, t] * (D if D.dim() == 2 else D[:, None])
        rows.append(y if z is None else y * F.silu(z[:, t]))
        states.append(S)
    return torch.stack(rows, 1), torch.stack(states, 1)


def same(got, want, call, **close):
    torch.testing.assert_close(got, want, **close)
    d = [torch.randn_like(t) for t in want]
    for a, b in zip(*(torch.autograd.grad(r, list(call.values()), d) for r in (got, want))):
        torch.testing.assert_close(a, b, **close)


def ssd_of_chunks(X, A, B, C, size):
    """Listing 1 of Dao and Gu 2024, ssd_minimal_discrete of mamba_ssm: X is dt·x, A is dt·A, one group of states."""
    X, A, B, C = (t.unflatten(1, (-1, size)) for t in (X, A, B, C))                # [B, chunks, size, ..]
    A = A.movedim(-1, 1)                                                           # [B, H, chunks, size]
    sums = A.cumsum(-1)
    within = (sums[..., :, None] - sums[..., None, :]).exp().tril()
    y = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", C, B, within, X)
    of_chunks = torch.einsum("bcln,bhcl,bclhp->bchpn", B, (sums[..., -1:] - sums).exp(), X)
    S, before = torch.zeros_like(of_chunks[:, 0]), []
    for c in range(of_chunks.shape[1]):
        before.append(S)
        S = S * sums[:, :, c, -1].exp()[..., None, None] + of_chunks[:, c]
    return (y + torch.einsum("bcln,bchpn,bhcl->bclhp", C, torch.stack(before, 1), sums.exp())).flatten(1, 2), S


def test_the_minimal_form_of_mamba_ssm():
    """What its test_correctness draws: 2048 tokens, 32 heads of 64, a state of 64, gates of softplus(N − 4)."""
    g = torch.Generator().manual_seed(42)
    rows, tokens, heads, size, state = 1, 2048, 32, 64, 64
    x = torch.randn(rows, tokens, heads, size, generator=g)
    dt = F.softplus(torch.randn(rows, tokens, heads, generator=g) - 4)
    A = -torch.rand(heads, generator=g).exp()
    B, C = (torch.randn(rows, tokens, 1, state, generator=g) for _ in range(2))
    call = [t.requires_grad_() for t in (x, dt, A, B, C)]
    X, d, a, b, c = (t.detach().double().requires_grad_() for t in call)
    want = ssd_of_chunks(X * d.unsqueeze(-1), a * d, b.squeeze(2), c.squeeze(2), 64)
    got = sd.mamba_chunk_scan_combined(*call, chunk_size=64, return_final_states=True)
    along = [torch.randn(t.shape, generator=g) for t in got]
    gradients = torch.autograd.grad(got, call, along)
    true_gradients = torch.autograd.grad(want, (X, d, a, b, c), [t.double() for t in along])
    for x, y in zip((*got, *gradients), (*want, *true_gradients)):
        assert (x - y).norm() < 2e-6 * y.norm()


def test_states_of_sequences_as_mamba_ssm_tests_them():
    """What its test_chunk_state_varlen draws, with fewer sequences and heads: lengths of 1 to 199, a state of 32."""
    g = torch.Generator().manual_seed(64 + 2)
    lengths = torch.randint(1, 200, (40,), generator=g)
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    tokens, heads = int(bounds[-1]), 8
    B = torch.randn(1, tokens, 2, 32, generator=g) / 5
    x = torch.randn(1, tokens, heads, 64, generator=g)
    A = -0.1 * torch.rand(heads, generator=g)
    dt = F.softplus(torch.randn(1, tokens, heads, generator=g) - 4)
    for dtype, limit in ((torch.float32, 2e-6), (torch.float16, 1e-2), (torch.bfloat16, 1e-2)):
        states = sd.mamba_chunk_scan_combined(x.to(dtype), dt, A, B.to(dtype), B.to(dtype), 64, cu_seqlens=bounds,
                                              return_varlen_states=True)[1]
        keys = B[0].to(dtype).double().repeat_interleave(heads // 2, 1)
        values = x[0].to(dtype).double() * dt[0].double().unsqueeze(-1)
        for n, (begin, end) in enumerate(zip(bounds, bounds[1:])):
            gates = dt[0, begin:end].double() * A.double()
            left = gates.flip(0).cumsum(0).flip(0) - gates  # of the tokens behind each
            want = torch.einsum("thn,th,thp->hpn", keys[begin:end], left.exp(), values[begin:end])
            assert (states[n] - want).norm() < limit * want.norm()


@pytest.mark.parametrize("options", [{}, dict(dt_softplus=True), dict(dt_softplus=True, dt_limit=(0.05, 0.3)),
                                     dict(dt_limit=(0.0, 1.0))])
def test_the_scan_is_the_recurrence(options):
    call = draw()
    y, states = recurrence(**call, **options)
    got = sd.mamba_chunk_scan_combined(**call, chunk_size=16, return_final_states=True, **options)
    same(got, (y, states[:, -1]), call)


def test_without_what_is_optional():
    call = draw(options=())
    y, _ = recurrence(**call, dt_softplus=True)
    same([sd.mamba_chunk_scan_combined(**call, chunk_size=16, dt_softplus=True)], [y], call)


def test_a_D_of_each_head():
    call = draw(options=("D",))
    call["D"] = call["D"][:, 0].detach().requires_grad_()
    y, _ = recurrence(**call, dt_softplus=True)
    same([sd.mamba_chunk_scan_combined(**call, chunk_size=16, dt_softplus=True)], [y], call)


def test_sequences_of_a_row_by_their_numbers():
    call = draw()
    seq_idx = torch.zeros(2, T, dtype=torch.int32)
    seq_idx[0, 7:], seq_idx[1, 1:], seq_idx[1, 15:] = 1, 3, 4
    y, states = recurrence(**call, seq_idx=seq_idx, dt_softplus=True)
    got = sd.mamba_chunk_scan_combined(**call, chunk_size=16, seq_idx=seq_idx, dt_softplus=True, return_final_states=True)
    same(got, (y, states[:, -1]), call)


def test_sequences_by_their_bounds():
    call, bounds = draw(rows=1), torch.tensor([0, 7, 8, T])
    seq_idx = torch.repeat_interleave(torch.arange(3), bounds.diff())[None]
    y, states = recurrence(**call, seq_idx=seq_idx, dt_softplus=True)
    got = sd.mamba_chunk_scan_combined(**call, chunk_size=16, cu_seqlens=bounds, dt_softplus=True, return_final_states=True,
                                       return_varlen_states=True)
    same(got, (y, states[:, -1], states[0, bounds[1:] - 1]), call)


def draw_layer(mlp=0, norm=True, project=True, heads_of_D=False, groups=1):
    g = torch.Generator().manual_seed(2)
    kind, inner, state = dict(dtype=torch.float64, generator=g), H * P, 2 * G * N
    call = {"zxbcdt": torch.randn(2, T, 2 * mlp + 2 * inner + state + H, **kind),
            "conv1d_weight": torch.randn(inner + state, 4, **kind), "conv1d_bias": torch.randn(inner + state, **kind),
            "dt_bias": torch.randn(H, **kind) - 2, "A": -torch.rand(H, **kind) - 0.1,
            "D": torch.randn(H, **kind) if heads_of_D else torch.randn(H, P, **kind),
            "initial_states": torch.randn(2, H, P, G * N // groups, **kind)}
    if norm:
        call["rmsnorm_weight"] = torch.randn(inner, **kind)
    if project:
        call |= {"outproj_weight": torch.randn(3, mlp + inner, **kind), "outproj_bias": torch.randn(3, **kind)}
    return {n: t.requires_grad_() for n, t in call.items()}


def layer(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, rmsnorm_weight=None, outproj_weight=None,
          outproj_bias=None, seq_idx=None, groups=1, norm_before_gate=True, mlp=0):
    """The formula of Dao and Gu's layer, by torch's own functions."""
    inner = H * P
    gate, up, z, xBC, dt = zxbcdt.split([mlp, mlp, inner, len(conv1d_weight), H], -1)
    rows = []
    for b in range(len(xBC)):  # a sequence by itself
        numbers = torch.zeros(T) if seq_idx is None else seq_idx[b]
        rows.append(torch.cat([F.conv1d(F.pad(part.T, (3, 0)), conv1d_weight[:, None], conv1d_bias, groups=len(conv1d_weight)).T
                               for part in xBC[b].split(torch.unique_consecutive(numbers, return_counts=True)[1].tolist())]))
    x, B, C = F.silu(torch.stack(rows)).split([inner, len(conv1d_weight[inner:]) // 2, len(conv1d_weight[inner:]) // 2], -1)
    y, states = recurrence(x.unflatten(-1, (H, P)), dt, A, B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1)), D, None,
                           dt_bias, initial_states, seq_idx, dt_softplus=True)
    y, gated = y.flatten(2), F.silu(z)
    if rmsnorm_weight is None:
        y = y * gated
    else:
        y = y if norm_before_gate else y * gated
        y = F.rms_norm(y.unflatten(-1, (groups, -1)), (inner // groups,), eps=1e-6).flatten(2) * rmsnorm_weight
        y = y * gated if norm_before_gate else y
    y = torch.cat((F.silu(gate) * up, y), -1)
    return (y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)), states[:, -1]


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("mlp, norm, project, groups, heads_of_D, packed", [
    (0, True, True, 1, False, False), (3, True, False, G, True, False), (0, False, True, G, False, True),
    (2, True, True, G, False, True)])
def test_the_layer_is_its_formula(mlp, norm, project, groups, heads_of_D, packed, norm_before_gate):
    call = draw_layer(mlp, norm, project, heads_of_D, groups)
    seq_idx = (torch.arange(T) // 7).expand(2, T).to(torch.int32).contiguous() if packed else None
    want = layer(**call, seq_idx=seq_idx, groups=groups, norm_before_gate=norm_before_gate, mlp=mlp)
    got = sd.mamba_split_conv1d_scan_combined(**call, chunk_size=16, seq_idx=seq_idx, return_final_states=True, ngroups=groups,
                                              headdim=P if heads_of_D else None, norm_before_gate=norm_before_gate)
    same(got, want, call)


def test_the_layer_in_bfloat16():
    call = draw_layer()
    rounded = {n: t.detach().to(torch.bfloat16).requires_grad_() for n, t in call.items()}
    got = sd.mamba_split_conv1d_scan_combined(**rounded, chunk_size=16)
    want = sd.mamba_split_conv1d_scan_combined(**{n: t.detach().double() for n, t in rounded.items()}, chunk_size=16)
    assert got.dtype == torch.bfloat16 and (got.double() - want).norm() <= 2e-2 * want.norm()
    got.sum().backward()
    assert all(t.grad.isfinite().all() for t in rounded.values() if t.grad is not None)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("channels", [16, 64, 128, 256])
def test_fast_results(dtype, limit, channels):
    call = draw(dtype, P=64, N=channels, T=70)
    exact = {n: t.detach().double().requires_grad_() for n, t in call.items()}
    want = sd.mamba_chunk_scan_combined(**exact, chunk_size=64, dt_softplus=True)  # f64 goes to the reference
    got = sd.mamba_chunk_scan_combined(**call, chunk_size=64, dt_softplus=True)
    assert got.dtype == dtype
    d = want.detach().to(dtype)  # sums over tokens do not cancel as they do with random numbers
    pairs = [(got, want), *zip(torch.autograd.grad(got, list(call.values()), d),
                               torch.autograd.grad(want, list(exact.values()), d.double()))]
    for a, b in pairs:
        assert (a.double() - b).norm() <= limit * b.norm()


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_steps_are_the_scan(dtype, limit):
    call = draw(dtype, requires_grad=False, P=16, N=32)
    want, states = recurrence(**{n: t.double() for n, t in call.items()}, dt_softplus=True)
    state = call.pop("initial_states").clone()
    pool = torch.zeros(4, *state.shape[1:], dtype=state.dtype)
    pool[[3, 1]] = state
    A, dt_bias = call["A"][:, None, None].expand(H, 16, 32), call["dt_bias"][:, None].expand(H, 16)
    for t in range(T):
        x, dt, B, C, z = (call[n][:, t] for n in ("x", "dt", "B", "C", "z"))
        token = (x, dt[..., None].expand(x.shape), A, B, C, call["D"], z, dt_bias, True)
        y = sd.selective_state_update(state, *token)
        assert (y.double() - want[:, t]).norm() <= limit * want[:, t].norm()
        pooled = sd.selective_state_update(pool, *token, state_batch_indices=torch.tensor([3, -1]))
        assert torch.equal(pooled[0], y[0]) and not pooled[1].any()
    assert (state.double() - states[:, -1]).norm() <= limit * states[:, -1].norm()
    assert torch.equal(pool[3], state[0]) and not pool[[0, 2]].any()


def test_errors_name_the_argument():
    call = draw(torch.float32)
    for change, message in ((dict(dt=call["dt"][:, 1:]), "dt has shape"), (dict(A=call["A"][:1]), r"A has shape \[1\]"),
                            (dict(B=call["B"][:, 1:], C=call["C"][:, 1:]), "B has shape"), (dict(C=call["C"][:1]), "C has shape"),
                            (dict(D=call["D"].T), "D has shape"), (dict(x=call["x"][0]), "x has 3 dimensions"),
                            (dict(cu_seqlens=torch.tensor([0, T])), "x has 2 rows, expected 1 with cu_seqlens"),
                            (dict(return_varlen_states=True), "expected cu_seqlens")):
        with pytest.raises(ValueError, match=message):
            sd.mamba_chunk_scan_combined(**{**call, **change}, chunk_size=16)
    state, x = torch.zeros(2, H, P, N), torch.randn(2, H, P)
    with pytest.raises(ValueError, match="A has 6 numbers along dimension 1, expected one for each head"):
        sd.selective_state_update(state, x, x, torch.rand(H, P, N), torch.rand(2, G, N), torch.rand(2, G, N))
    layer_call = draw_layer()
    for change, message in ((dict(D=layer_call["D"][:, 0]), "headdim is None"), (dict(zxbcdt=layer_call["zxbcdt"][..., 1:]), "zxbcdt has"),
                            (dict(ngroups=3), "conv1d_weight has"), (dict(zxbcdt=layer_call["zxbcdt"][0]), "zxbcdt has 2 dim"),
                            (dict(rmsnorm_weight=layer_call["rmsnorm_weight"][1:]), "rmsnorm_weight has shape")):
        with pytest.raises(ValueError, match=message):
            sd.mamba_split_conv1d_scan_combined(**{**layer_call, **change}, chunk_size=16)
