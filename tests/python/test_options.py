"""Scalars of NumPy are options like any other; what does not fit is one error that names it."""
import numpy as np
import pytest

import softdelta

Q = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype(np.float32)
BETA = np.full((1, 5, 2), 0.5, np.float32)
EMPTY = np.zeros(0, np.int64)


def attend(**options):
    return softdelta.attention_forward(Q, Q, Q, **options)[0]


def delta(**options):
    return softdelta.delta_forward("delta_rule", Q, Q, Q, beta=BETA, **options)[0]


@pytest.mark.parametrize("function, name, value, plain", [
    (attend, "scale", 1 / np.sqrt(64), 0.125), (attend, "scale", np.float32(0.25), 0.25),
    (attend, "scale", np.array(0.25), 0.25), (attend, "softcap", np.float64(2), 2.0),
    (attend, "window_left", np.int64(2), 2), (attend, "window_right", np.int32(0), 0), (attend, "threads", np.int8(1), 1),
    (delta, "scale", np.float16(0.25), 0.25), (delta, "use_qk_l2norm_in_kernel", np.bool_(True), True),
    (delta, "state_v_first", np.bool_(False), False), (delta, "use_beta_sigmoid_in_kernel", np.array(True), True),
    (delta, "state_interval", np.int64(3), 3)])
def test_scalars_of_numpy(function, name, value, plain):
    assert np.array_equal(function(**{name: value}), function(**{name: plain}))


@pytest.mark.parametrize("call, message", [
    (lambda: attend(scale="wide"), "scale is 'wide', expected a number"),
    (lambda: attend(scale="1"), "scale is '1', expected a number"),
    (lambda: attend(scale=np.nan), "scale is nan, expected a number"),
    (lambda: attend(window_left=1.5), "window_left is 1.5, expected a whole number"),
    (lambda: attend(window_right=2**70), "window_right is 1180591620717411303424, expected a number of 64 bits"),
    (lambda: attend(threads=2.0), "threads is 2.0, expected 0"),
    (lambda: attend(threads=2**40), "threads is 1099511627776, expected 0"),
    (lambda: softdelta.set_num_threads(2**40), "n is 1099511627776, expected 0"),
    (lambda: softdelta.set_num_threads(-1), "n is -1, expected 0"),
    (lambda: delta(use_qk_l2norm_in_kernel="no"), "use_qk_l2norm_in_kernel is 'no', expected True or False"),
    (lambda: delta(allow_neg_eigval=1), "allow_neg_eigval is 1, expected True or False"),
    (lambda: delta(state_interval=0, return_states=True), "state_interval is 0, expected a number of rows"),
    (lambda: delta(cu_seqlens=EMPTY), r"cu_seqlens has shape \[0\], expected \[N\+1\]"),
    (lambda: delta(cu_seqlens=EMPTY, return_states=True), r"cu_seqlens has shape \[0\], expected \[N\+1\]"),
    (lambda: delta(cu_seqlens=np.zeros((), np.int64)), r"cu_seqlens has 0 dimensions, expected 1: \[N\+1\]"),
    (lambda: attend(cu_seqlens_q=EMPTY, cu_seqlens_k=EMPTY), "cu_seqlens_q: dimension 0 is 0, expected sequences"),
    (lambda: attend(scale=1e300), "scale"),
    (lambda: delta(scale=1e300), "scale"),
    (lambda: softdelta.delta_forward("kda", Q, Q, Q, beta=BETA, g=-np.ones_like(Q), A_log=np.zeros(2, np.float32),
                                     use_gate_in_kernel=True, lower_bound=5.0), "lower_bound"),
    (lambda: attend(cache_seqlens=np.array([3]), causal="bottom_right"), "cache_seqlens"),
    (lambda: softdelta.delta_step("delta_rule", Q, Q, Q, None, beta=BETA), "state is None, expected a writable array"),
])
def test_what_does_not_fit_is_named(call, message):
    before = softdelta.get_num_threads()
    with pytest.raises(ValueError, match=message):
        call()
    assert softdelta.get_num_threads() == before
