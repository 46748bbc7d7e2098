"""delta_step: tokens one by one and a few at a time are the whole sequence; states in place, in a pool, after tokens."""
import pytest
import torch

import softdelta
import softdelta.torch as sd
from softdelta import _native
from drawing import delta_call

RULES = list(_native.RULES)


def steps(rule, call, state, sizes, **options):
    """o of the whole sequence, some tokens at a time."""
    rows, t = [], 0
    for n in sizes:
        token = {name: x[:, t:t + n] for name, x in call.items()}
        rows.append(sd.delta_step(rule, state=state, **token, **options))
        t += n
    return torch.cat(rows, 1)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_the_sequence(rule, v_first):
    c = delta_call(rule, tokens=12, heads=(2, 4), sizes=(16, 8), v_first=v_first)
    state = c.pop("initial_state")
    truth = {n: x.double() for n, x in c.items()}
    want, want_state = softdelta.delta_forward(rule, **truth, initial_state=state.double(), state_v_first=v_first)
    pool = torch.randn(5, *state.shape[1:])
    before = pool.clone()
    pool[[3, 1]] = state
    o = steps(rule, c, state, (1, 8, 2, 1), state_v_first=v_first)
    torch.testing.assert_close(o.double(), want, rtol=0, atol=2e-5)  # twelve tokens of sums near 1
    torch.testing.assert_close(state.double(), want_state, rtol=0, atol=2e-5)
    again = steps(rule, c, pool, (1, 8, 2, 1), state_v_first=v_first, state_indices=torch.tensor([3, 1]))
    assert torch.equal(again, o) and torch.equal(pool[[3, 1]], state)
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


def test_a_step_leaves_out_sequences_that_are_not_there():
    c = delta_call("kda", tokens=2)
    state = c.pop("initial_state")
    want, states = sd.delta_step("kda", state=(whole := state.clone()), return_states=True, **c)
    pool = torch.cat([state[1:], state[:1]])
    o, some = sd.delta_step("kda", state=pool, state_indices=torch.tensor([-1, 0]), return_states=True, **c)
    assert not o[0].any() and not some[0].any()
    assert torch.equal(o[1], want[1]) and torch.equal(some[1], states[1])
    assert torch.equal(pool[0], whole[1]) and torch.equal(pool[1], state[0])


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_states_after_each_token(packed, pooled):
    c = delta_call("kda", tokens=7, packed=packed)  # packed: lengths 3, 0, 4
    state, cu = c.pop("initial_state"), c.pop("cu_seqlens", None)
    pool, more = (torch.cat([torch.zeros_like(state), state]), dict(state_indices=torch.arange(3, 6) if packed else
                                                                    torch.arange(2, 4))) if pooled else (state, {})
    start = state.clone()
    o, states = sd.delta_step("kda", state=pool, cu_seqlens=cu, return_states=True, **c, **more)
    assert states.shape == (*c["q"].shape[:2], *state.shape[1:])
    bounds = [(b, b, 0, 7) for b in range(2)] if cu is None else [(0, 0, 0, 3), (0, 2, 3, 7)]
    for row, n, begin, end in bounds:
        for t in range(begin, end):
            until = {name: x[row:row + 1, begin:t + 1] for name, x in c.items()}
            want_o, want = softdelta.delta_forward("kda", initial_state=start[n:n + 1], **until)
            torch.testing.assert_close(states[row, t], want[0], rtol=0, atol=2e-6)
            torch.testing.assert_close(o[row, t], want_o[0, -1], rtol=0, atol=2e-6)
    final = pool[more["state_indices"]] if pooled else pool
    for row, n, _, end in bounds:
        assert torch.equal(states[row, end - 1], final[n])
    if packed:
        assert torch.equal(final[1], start[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_reach_the_kernel(dtype):
    c = delta_call("gated_delta_rule", dtype, tokens=3, heads=(2, 4), sizes=(16, 8))
    state = c.pop("initial_state")
    options = dict(A_log=torch.rand(4), dt_bias=torch.rand(4), use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
                   use_beta_sigmoid_in_kernel=True, allow_neg_eigval=dtype == torch.float32, scale=0.3)
    case = dict(op="gated_delta_rule", initial_state=state.clone(), **c, **options)
    o = sd.delta_step("gated_delta_rule", state=state, **c, **options)
    assert o.dtype == dtype
    softdelta.testing.assert_close({"o": o, "final_state": state}, case)


def test_value_heads_read_key_heads_in_either_order():
    c = delta_call("gated_delta_rule", tokens=3, heads=(2, 4), sizes=(16, 8))
    state = c.pop("initial_state")
    spread = {**c, **{n: c[n].repeat(1, 1, 2, 1) for n in ("q", "k")}}  # a key head of its own for each value head
    want = sd.delta_step("gated_delta_rule", state=(want_state := state.clone()), **spread)
    o = sd.delta_step("gated_delta_rule", state=state, head_order="tiled", **c)
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(state, want_state)
    with pytest.raises(ValueError, match="head_order is 'round'"):
        sd.delta_step("gated_delta_rule", state=state, head_order="round", **c)


def test_a_state_is_read_from_one_entry_and_goes_to_another():
    c = delta_call("kda", tokens=4, batch=3)
    states = c.pop("initial_state")
    pool = torch.cat([states, states + 1, torch.zeros_like(states)])
    before, index = pool.clone(), torch.tensor
    kept = index([[-1, -1], [-1, 8], [-1, -1]])
    o = sd.delta_step("kda", state=pool, state_indices=index([0, 0, 2]), final_state_indices=index([3, 6, -1]),
                      has_initial_state=index([True, False, True]), snapshot_indices=kept, state_interval=2, **c)
    alone = torch.stack([states[0], torch.zeros_like(states[0]), states[2]])
    want, after = sd.delta_step("kda", state=alone, return_states=True, **c)
    torch.testing.assert_close(o, want)
    expected = before.clone()
    expected[3], expected[6], expected[8] = alone[0], alone[1], after[1, 1]
    torch.testing.assert_close(pool, expected)
    assert torch.equal(pool[[0, 1, 2, 4, 5, 7]], before[[0, 1, 2, 4, 5, 7]])
    with pytest.raises(ValueError, match="final_state_indices is given, expected None beside return_states"):
        sd.delta_step("kda", state=pool, final_state_indices=index([0, 1, 2]), return_states=True, **c)


def test_it_is_a_torch_op():
    c = delta_call("gated_delta_rule", tokens=2)
    state = c.pop("initial_state")
    inputs = tuple(c.get(n) for n in ("q", "k", "v", "g", "g_gamma", "beta", "p"))
    nan = float("nan")
    for with_states in (False, True):
        torch.library.opcheck(torch.ops.softdelta.delta_step.default,
                              (*inputs, state, *[None] * 7, 1, nan, True, False, nan, False, False, False,
                               64, int(with_states), 1, with_states))
    copy = state.clone()

    def two(q, k, v, g, beta, state):
        o = sd.delta_step("gated_delta_rule", q, k, v, state, g=g, beta=beta)
        return o + sd.delta_step("gated_delta_rule", q, k, v, state, g=g, beta=beta)

    tensors = [c[n] for n in ("q", "k", "v", "g", "beta")]
    want = two(*tensors, state)
    got = torch.compile(two, fullgraph=True, backend="aot_eager")(*tensors, copy)
    assert torch.equal(got, want) and torch.equal(copy, state)


def test_what_does_not_fit_is_refused():
    c = delta_call("gated_delta_rule", requires_grad=True)
    state = c.pop("initial_state").detach()
    before = state.clone()
    with pytest.raises(ValueError, match="requires a gradient"):
        sd.delta_step("gated_delta_rule", state=state, **c)
    c = {n: x.detach() for n, x in c.items()}
    with pytest.raises(ValueError, match="initial_state"):
        sd.delta_step("gated_delta_rule", state=state[:1], **c)
    with pytest.raises(ValueError, match="rule is 'mamba'"):
        sd.delta_step("mamba", state=state, **c)
    with pytest.raises(ValueError, match="q has 3 dimensions"):
        sd.delta_step("gated_delta_rule", **{**c, "q": c["q"][0]}, state=state)
    with pytest.raises(ValueError, match="state_indices"):
        sd.delta_step("gated_delta_rule", state=state, state_indices=torch.tensor([0, 7]), **c)
    assert torch.equal(state, before)
    saved = state.requires_grad_().square()
    with torch.no_grad():
        sd.delta_step("gated_delta_rule", state=state, **c)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
