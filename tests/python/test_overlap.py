"""Results that share memory with inputs or with each other are refused, but for the state of a step, changed in place."""
import numpy as np
import pytest

import softdelta

SHAPE, STATE = (1, 6, 2, 8), (1, 2, 8, 8)


def arrays(*shapes, seed=0):
    r = np.random.default_rng(seed)
    return [r.standard_normal(shape).astype(np.float32) for shape in shapes]


def shifted(shape):
    """Two arrays of one memory, the second begins in the middle of the first."""
    size = int(np.prod(shape))
    memory, = arrays((size + size // 2,))
    return memory[:size].reshape(shape), memory[size // 2:].reshape(shape)


def attention(q, k, v, **given):
    return softdelta.attention_forward(q, k, v, **given)


def overlaps():
    """name → a call, the array that it may not change"""
    q, k, v, do, beta, state = arrays(SHAPE, SHAPE, SHAPE, SHAPE, (1, 6, 2), STATE)
    a, b = shifted(SHAPE)
    one, other = shifted(STATE)
    wide = np.broadcast_to(np.zeros((1, 1, 1, 1), np.float32), SHAPE).copy()
    same = np.lib.stride_tricks.as_strided(wide, SHAPE, (0, 0, 0, 4), writeable=True)
    pool, = arrays((2, *STATE[1:]))
    one_state = np.lib.stride_tricks.as_strided(pool, STATE, (0, 0, 32, 4), writeable=True)
    backward = dict(engine="automatic")

    def delta(q, k, v, **given):
        return softdelta.delta_forward("delta_rule", q, k, v, beta=beta, **given)

    def step(q, k, v, state, **given):
        return softdelta.delta_step("delta_rule", q, k, v, state, beta=beta, **given)

    def attention_gradients(**gradients):
        softdelta.attention_backward(q, k, v, do, gradients=gradients, wanted=[n[1:] for n in gradients], **backward)

    def delta_gradients(**gradients):
        softdelta.delta_backward("delta_rule", q, k, v, do, beta=beta, gradients=gradients,
                                 wanted=[n[1:] for n in gradients], **backward)

    return {
        "o is q": (lambda: attention(q, k, v, o=q), q),
        "o is k": (lambda: attention(q, k, v, o=k), k),
        "o is v": (lambda: attention(q, k, v, o=v), v),
        "o begins in k": (lambda: attention(q, a, v, o=b), a),
        "lse lies in q": (lambda: attention(q, k, v, lse=q.reshape(-1)[:12].reshape(1, 2, 6)), q),
        "lse lies in o": (lambda: attention(q, k, v, o=do, lse=do.reshape(-1)[:12].reshape(1, 2, 6)), do),
        "o overlaps itself": (lambda: attention(q, k, v, o=same), same),
        "dq is q": (lambda: attention_gradients(dq=q), q),
        "dk is v": (lambda: attention_gradients(dk=v), v),
        "dv is do": (lambda: attention_gradients(dv=do), do),
        "dk is dv": (lambda: attention_gradients(dk=wide, dv=wide), wide),
        "dq begins in dk": (lambda: attention_gradients(dq=a, dk=b), a),
        "o of a rule is q": (lambda: delta(q, k, v, o=q), q),
        "o of a rule is v": (lambda: delta(q, k, v, o=v), v),
        "final state begins in the first": (lambda: delta(q, k, v, initial_state=one, final_state=other), one),
        "final state is the first, turned": (lambda: delta(q, k, v, initial_state=state, final_state=state.swapaxes(2, 3)),
                                             state),
        "dq of a rule is q": (lambda: delta_gradients(dq=q), q),
        "dbeta is beta": (lambda: delta_gradients(dbeta=beta), beta),
        "dk of a rule is dv": (lambda: delta_gradients(dk=wide, dv=wide), wide),
        "q of a step lies in its state": (lambda: step(state.reshape(-1)[:96].reshape(SHAPE), k, v, state), state),
        "o of a step lies in its state": (lambda: step(q, k, v, state, o=state.reshape(-1)[:96].reshape(SHAPE)), state),
        "heads of a state are one": (lambda: step(q, k, v, one_state), pool),
    }


@pytest.mark.parametrize("name", overlaps())
def test_overlap_is_refused(name):
    call, memory = overlaps()[name]
    before = memory.copy()
    with pytest.raises(ValueError, match="overlap|share"):
        call()
    assert np.array_equal(memory, before), "something was written"


def test_inputs_may_overlap():
    q, v = arrays(SHAPE, SHAPE)
    o, _ = softdelta.attention_forward(q, q, v)
    expected, _ = softdelta.attention_forward(q, q.copy(), v)
    assert np.array_equal(o, expected)


def test_results_may_lie_beside_inputs_in_one_memory():
    """As in an array in which q and o alternate."""
    both, k, v = arrays((1, 6, 2, 2, 8), SHAPE, SHAPE)
    expected, _ = softdelta.attention_forward(both[:, :, :, 0].copy(), k, v)
    o, _ = softdelta.attention_forward(both[:, :, :, 0], k, v, o=both[:, :, :, 1])
    assert o.base is both and np.array_equal(o, expected)


def test_a_state_in_place():
    q, k, v, beta, state = arrays(SHAPE, SHAPE, SHAPE, (1, 6, 2), STATE)
    o, after = softdelta.delta_forward("delta_rule", q, k, v, beta=beta, initial_state=state)
    same = state.copy()
    assert np.array_equal(softdelta.delta_forward("delta_rule", q, k, v, beta=beta, initial_state=same,
                                                  final_state=same)[0], o)
    pool = np.concatenate([np.zeros(STATE, np.float32), state])
    assert np.array_equal(softdelta.delta_step("delta_rule", q, k, v, pool, beta=beta, state_indices=np.array([1])), o)
    assert np.array_equal(softdelta.delta_step("delta_rule", q, k, v, state, beta=beta), o)
    for x in (same, state, pool[1:]):
        assert np.array_equal(x, after)


def test_torch_steps_on_views_of_one_memory():
    torch = pytest.importorskip("torch")
    import softdelta.torch as sd
    q, k, v, beta = (torch.tensor(x) for x in arrays(SHAPE, SHAPE, SHAPE, (1, 6, 2)))
    cache = torch.randn(2, 2, 8, 8)
    before = cache.clone()
    for state in (cache[:1, :1].expand(1, 2, 8, 8), cache[:1, :, :1].expand(1, 2, 8, 8)):
        with pytest.raises(ValueError, match="overlap|share"):
            sd.delta_step("delta_rule", q, k, v, state, beta=beta)
    with pytest.raises(ValueError, match="overlap|share"):
        sd.delta_step("delta_rule", cache.view(-1)[:96].view(1, 6, 2, 8), k, v, cache[:1], beta=beta)
    assert torch.equal(cache, before)
    alone = cache[1:].clone()
    expected = sd.delta_step("delta_rule", q, k, v, alone, beta=beta)
    assert torch.equal(sd.delta_step("delta_rule", q, k, v, cache[1:], beta=beta), expected)
    assert torch.equal(cache[1:], alone) and torch.equal(cache[:1], before[:1])
