"""Values: against torch's own attention, against the recurrence, and fast results against the f64 reference."""
import pytest
import torch
import torch.nn.functional as F

import softdelta
import softdelta.torch as sd
from softdelta import _native
from softdelta._records import AttentionOptions
from drawing import attention_call, delta_call
from softdelta.torch import _calls
from torch_calls import FUNCTIONS as CALLS
from torch_calls import RULE, with_strides_of_0

FUNCTIONS = {"delta_rule": [sd.chunk_delta_rule, sd.fused_recurrent_delta_rule],
             "gated_delta_rule": [sd.chunk_gated_delta_rule, sd.fused_recurrent_gated_delta_rule],
             "kda": [sd.chunk_kda, sd.fused_recurrent_kda], "comba": [sd.chunk_comba, sd.fused_recurrent_comba],
             "simple_gla": [sd.chunk_simple_gla, sd.fused_chunk_simple_gla, sd.fused_recurrent_simple_gla],
             "gla": [sd.chunk_gla]}


def heads_first(call):
    return [call[n].detach().transpose(1, 2).requires_grad_(call[n].requires_grad) for n in "qkv"]


def same_gradients(got, want, inputs):
    do = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, inputs, do), torch.autograd.grad(want, inputs, do)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(scale=0.3)])
def test_attention_is_that_of_torch(options):
    c = attention_call(torch.float64, requires_grad=True, heads=(4, 4))
    q, k, v = heads_first(c)
    inputs = [q, k, v]
    if not options:
        options = dict(attn_mask=c["bias"])
        inputs.append(c["bias"])
    got, want = (f(q, k, v, **options) for f in (sd.scaled_dot_product_attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(got, want)
    same_gradients(got, want, inputs)


def test_masks_of_fewer_dimensions_and_inputs_without_heads():
    c = attention_call(torch.float64, heads=(4, 4))
    q, k, v = heads_first(c)
    for mask in (c["mask"][0, 0], c["mask"], torch.randn(6, dtype=torch.float64)[None], torch.rand(4, 5, 6) > 0.3):
        torch.testing.assert_close(sd.scaled_dot_product_attention(q, k, v, mask),
                                   F.scaled_dot_product_attention(q, k, v, mask))
    q, k, v, mask = q[:, 0], k[:, 0], v[:, 0], c["mask"][:, 0]
    torch.testing.assert_close(sd.scaled_dot_product_attention(q, k, v, mask),
                               F.scaled_dot_product_attention(q, k, v, mask))
    o, lse = sd.scaled_dot_product_attention(q[0], k[0], v[0], mask[0], return_lse=True)
    torch.testing.assert_close(o, F.scaled_dot_product_attention(q[0], k[0], v[0], mask[0]))
    assert lse.shape == (5,)


def test_groups_mask_bias_window_and_lse():
    c = attention_call(torch.float64, requires_grad=True)
    q, k, v = heads_first(c)
    got, lse = sd.scaled_dot_product_attention(q, k, v, c["mask"], bias=c["bias"], window=(2, 1), enable_gqa=True,
                                               return_lse=True)
    i, j = torch.arange(5)[:, None], torch.arange(6)[None]
    seen = c["mask"] & (j >= i + 1 - 2) & (j <= i + 1 + 1)
    s = q @ k.repeat_interleave(2, 1).mT * 3**-0.5 + c["bias"]
    s = s.masked_fill(~seen, -torch.inf)
    alive = seen.any(-1, keepdim=True)
    p = s.masked_fill(~alive, 0).softmax(-1) * alive
    want = p @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(lse, s.logsumexp(-1))
    same_gradients(got, want, [q, k, v, c["bias"]])


def test_alibi_is_a_bias():
    c = attention_call(torch.float64, requires_grad=True)
    inputs = [c[n] for n in "qkv"]
    slopes = torch.rand(2, 4, dtype=torch.float64)
    distance = (torch.arange(5)[:, None] + 6 - 5 - torch.arange(6)).abs()
    for given in (slopes[0], slopes):
        recorded = given.clone().requires_grad_()  # and has no gradient
        alone = sd.flash_attn_func(*(c[n].detach() for n in "qkv"), alibi_slopes=recorded)
        assert not alone.requires_grad or torch.autograd.grad(alone.sum(), recorded, allow_unused=True) == (None,)
        bias = (-given[..., None, None] * distance).expand(2, 4, 5, 6)
        got, lse, _ = sd.flash_attn_func(*inputs, causal=True, alibi_slopes=given, return_attn_probs=True)
        want, want_lse, _ = sd.flash_sparse_attn_func(*inputs, attn_bias=bias, is_causal=True, return_attn_probs=True)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(lse, want_lse)
        same_gradients(got, want, inputs)
    packed = sd.flash_attn_varlen_func(*(x[1] for x in inputs), torch.tensor([0, 5]), torch.tensor([0, 6]),
                                       alibi_slopes=slopes[0])
    torch.testing.assert_close(packed, sd.flash_attn_func(*inputs, alibi_slopes=slopes[0])[1])


def test_flash_attention_packed_is_each_sequence():
    torch.manual_seed(0)
    q, k = torch.randn(9, 4, 8), torch.randn(12, 2, 8)
    cu_q, cu_k = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 7, 12], dtype=torch.int32)
    o, lse, _ = sd.flash_attn_varlen_func(q, k, k, cu_q, cu_k, 5, 7, causal=True, window_size=(4, -1),
                                          return_attn_probs=True)
    for n in range(2):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        want, want_lse, _ = sd.flash_attn_func(q[None, rows], k[None, keys], k[None, keys], causal=True,
                                               window_size=(4, -1), return_attn_probs=True)
        torch.testing.assert_close(o[rows], want[0])
        torch.testing.assert_close(lse[:, rows], want_lse[0])


def test_flash_attention_through_pages_is_each_sequence():
    """Prefill and decode in one batch, as vLLM makes them."""
    torch.manual_seed(0)
    rows, used, block = [6, 1, 0, 1, 3], [9, 17, 4, 2, 3], 4
    cu_q, seqused = torch.tensor([0, *rows]).cumsum(0).int(), torch.tensor(used).int()
    q = torch.randn(sum(rows), 4, 8, dtype=torch.float64)
    k, v = torch.randn(16, block, 2, 8, dtype=torch.float64), torch.randn(16, block, 2, 5, dtype=torch.float64)
    table = torch.randperm(16)[:15].reshape(3, 5)[[0, 1, 2, 0, 1]].int()
    table[2, 1:] = -1  # not used
    o, lse, _ = sd.flash_attn_varlen_func(q=q, k=k, v=v, cu_seqlens_q=cu_q, max_seqlen_q=6, max_seqlen_k=17,
                                          seqused_k=seqused, block_table=table, causal=True, window_size=(7, 0),
                                          return_attn_probs=True)
    cu_k = torch.tensor([0, *used]).cumsum(0).int()
    by_sums = sd.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 17, causal=True, window_size=(7, 0), block_table=table)
    assert torch.equal(by_sums, o)
    for n, length in enumerate(used):
        mine = slice(cu_q[n], cu_q[n + 1])
        pages = table[n, :-(-length // block)].long()
        keys, values = k[pages].flatten(0, 1)[None, :length], v[pages].flatten(0, 1)[None, :length]
        want, want_lse, _ = sd.flash_attn_func(q[None, mine], keys, values, causal=True, window_size=(7, 0),
                                               return_attn_probs=True)
        torch.testing.assert_close(o[mine], want[0])
        torch.testing.assert_close(lse[:, mine], want_lse[0])
    q.requires_grad_()
    o = sd.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 17, block_table=table)
    with pytest.raises(softdelta.Unsupported, match="no gradients through a paged cache"):
        o.sum().backward()


def test_causal_of_flash_attention_is_bottom_right():
    torch.manual_seed(0)
    q, k = torch.randn(1, 5, 2, 8, dtype=torch.float64), torch.randn(1, 2, 2, 8, dtype=torch.float64)
    o, lse, _ = sd.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert torch.equal(o[:, :3], torch.zeros(1, 3, 2, 8, dtype=torch.float64))
    assert (lse[..., :3] == torch.inf).all()
    torch.testing.assert_close(o[:, 3], k[:, 0])


def test_dynamic_mask_keeps_the_largest_biases():
    c = attention_call(torch.float64, requires_grad=True)
    got = sd.flash_sparse_attn_func(c["q"], c["k"], c["v"], c["mask"], c["bias"], keep=2)
    allowed = c["bias"].detach().expand(2, 4, 5, 6).masked_fill(~c["mask"], -torch.inf)
    kept = torch.zeros(2, 4, 5, 6, dtype=torch.bool).scatter(-1, allowed.topk(2).indices, True) & c["mask"]
    want = sd.flash_sparse_attn_func(c["q"], c["k"], c["v"], kept, c["bias"])
    torch.testing.assert_close(got, want)
    same_gradients(got, want, [c["q"], c["k"], c["v"], c["bias"]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule, function", [pytest.param(rule, f, id=f.__name__) for rule in FUNCTIONS
                                            for f in FUNCTIONS[rule]])
def test_fast_results_and_gradients_are_right(rule, function, dtype):
    c = delta_call(rule, dtype, requires_grad=True, packed=True, tokens=100, heads=(2, 4), sizes=(32, 16))
    c["cu_seqlens"] = torch.tensor([0, 30, 30, 100])
    l2norm = {} if rule in ("simple_gla", "gla") else {"use_qk_l2norm_in_kernel": True}
    o, state = function(**c, output_final_state=True, **l2norm)
    assert o.dtype == dtype and state.dtype == torch.float32
    do, dstate = torch.randn_like(o), torch.randn_like(state)
    names = [n for n, t in c.items() if t.requires_grad]
    grads = torch.autograd.grad((o, state), [c[n] for n in names], (do, dstate))
    softdelta.testing.assert_close(
        {"o": o, "final_state": state, **{"d" + n: d for n, d in zip(names, grads)}},
        dict(op=rule, **c, do=do, dfinal_state=dstate, **l2norm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fast_attention_and_gradients_are_right(dtype):
    c = attention_call(dtype, requires_grad=True, rows=(70, 90), sizes=(32, 24))
    o, lse, _ = sd.flash_sparse_attn_func(c["q"], c["k"], c["v"], c["mask"], c["bias"], is_causal=True,
                                          return_attn_probs=True)
    do = torch.randn_like(o)
    dq, dk, dv, dbias = torch.autograd.grad(o, [c[n] for n in ("q", "k", "v", "bias")], do)
    c.pop("sink")
    softdelta.testing.assert_close(dict(o=o, lse=lse, dq=dq, dk=dk, dv=dv, dbias=dbias),
                                   dict(op="attention", **c, do=do, causal="bottom_right", empty_row="plus_infinity"))


@pytest.mark.parametrize("packed", [False, True])
def test_simple_gla_in_reverse(packed):
    c = delta_call("simple_gla", torch.float64, requires_grad=True, packed=packed)
    got = sd.fused_recurrent_simple_gla(**c, output_final_state=True, reverse=True)
    bounds = c.pop("cu_seqlens").tolist() if packed else [0, 7]
    o, states = [], []
    for n, (first, last) in enumerate(zip(bounds, bounds[1:])):
        turned = {name: t[:, first:last].flip(1) for name, t in c.items() if name != "initial_state"}
        rows, state = sd.chunk_simple_gla(**turned, initial_state=c["initial_state"][n:n + 1] if packed else
                                          c["initial_state"], output_final_state=True)
        o.append(rows.flip(1))
        states.append(state)
    want = torch.cat(o, 1), torch.cat(states)
    torch.testing.assert_close(got, want)
    d = [torch.randn_like(t) for t in want]
    for a, b in zip(torch.autograd.grad(got, list(c.values()), d), torch.autograd.grad(want, list(c.values()), d)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [0, -1, -1000])
def test_parallel_simple_gla_and_its_scores(gate, dtype):
    c = delta_call("simple_gla", dtype, tokens=70, heads=(2, 4), sizes=(16, 8))
    del c["initial_state"]
    c["g"] = c["g"] * -gate if gate else None
    o, scores = sd.parallel_simple_gla(**c, scale=0.3, output_attentions=True)
    assert torch.equal(o, sd.chunk_simple_gla(**c, scale=0.3)[0])
    assert scores.shape == (2, 4, 70, 70) and scores.dtype == dtype
    want = sd.chunk_simple_gla(**{n: t if t is None else t.double() for n, t in c.items()}, scale=0.3)[0]
    got = torch.einsum("bhts,bshv->bthv", scores.double(), c["v"].double())
    limit = {torch.float64: 1e-14, torch.float32: 3e-7, torch.bfloat16: 3e-3}[dtype]
    assert (got - want).norm() <= limit * want.norm()
    assert sd.parallel_simple_gla(**c)[1] is None


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", FUNCTIONS)
def test_recurrent_forms_round_nothing_but_o(rule, dtype, compiled):
    c = delta_call(rule, dtype, requires_grad=True, tokens=100, heads=(2, 4), sizes=(64, 32))
    function = FUNCTIONS[rule][-1]
    if rule == "gla":  # its recurrent form has another name for the gate
        def function(g, **c):
            return sd.fused_recurrent_gla(gk=g, **c)
    else:
        assert function.__name__.startswith("fused_recurrent_")
    exact = {n: x.detach().double().requires_grad_() for n, x in c.items()}
    want, want_state = function(**exact, output_final_state=True)
    run = torch.compile(function, backend="aot_eager") if compiled else function
    o, state = run(**c, output_final_state=True)
    ulp = torch.finfo(dtype).eps
    assert (state.double() - want_state).norm() < 3e-6 * want_state.norm()
    assert (o.double() - want).norm() < ulp / 2 * want.norm()
    dstate = torch.randn_like(want_state)
    by = torch.autograd.grad(want_state, list(exact.values()), dstate)
    for n, d, e in zip(c, torch.autograd.grad(state, list(c.values()), dstate.float()), by):
        assert (d.double() - e).norm() <= (ulp / 2 if d.dtype == dtype else 1e-5) * e.norm(), n


@pytest.mark.parametrize("sizes", [{}, dict(sizes=(16, 8), batch=1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_operands_with_strides_of_0_are_their_copies(name, dtype, sizes):
    if sizes:
        sizes = sizes | ({"tokens": 70} if name in RULE else {"rows": (40, 50)})
    for what, views, copies in with_strides_of_0(name, dtype, **sizes):
        for i, (a, b) in enumerate(zip(views, copies, strict=True)):
            assert torch.equal(a, b), f"{what}, result {i}"


def test_only_what_is_needed_is_differentiated():
    c = delta_call("gated_delta_rule")
    c["k"].requires_grad_()
    o, state = sd.chunk_gated_delta_rule(**c, output_final_state=True)
    assert o.requires_grad and state.requires_grad
    state.sum().backward()  # the loss may see the state alone
    assert c["k"].grad is not None and c["q"].grad is None
    with torch.no_grad():
        assert not sd.chunk_gated_delta_rule(**c)[0].requires_grad


def test_negated_views_are_refused():
    q = torch.randn(1, 4, 2, 8)
    negated = torch.complex(q, q).conj().imag
    assert negated.is_neg()
    with pytest.raises(ValueError, match=r"q is a view of other numbers, negated, expected .*resolve_neg"):
        sd.scaled_dot_product_attention(negated, q, q)
    torch.testing.assert_close(sd.scaled_dot_product_attention(negated.resolve_neg(), q, q),
                               sd.scaled_dot_product_attention(-q, q, q))


class BeforeTorch210:
    """A tensor as torch before 2.10 has it: a capsule alone, and none where gradients are recorded."""

    def __init__(self, tensor):
        self.tensor, self.requires_grad = tensor, tensor.requires_grad

    def __dlpack__(self, **options):
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self.tensor.__dlpack__(**options)

    def detach(self):
        return BeforeTorch210(self.tensor.detach())

    def is_neg(self):
        return self.tensor.is_neg()


def test_tensors_of_old_torch_are_read():
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    want, o = sd.flash_attn_func(q, k, v), torch.empty(1, 4, 2, 8)
    inputs, options = tuple(map(BeforeTorch210, (q, k, v))), tuple(AttentionOptions())
    _native.attention_forward(inputs, options, (BeforeTorch210(o),), "automatic", 1, False)
    assert torch.equal(o, want)
    negated = BeforeTorch210(torch.complex(q, q).conj().imag)
    with pytest.raises(ValueError, match="k is a view of other numbers, negated"):
        _native.attention_forward((inputs[0], negated, inputs[2]), options, (o,), "automatic", 1, False)


def test_threads_follow_torch_and_results_do_not_depend_on_them():
    c = delta_call("kda", tokens=300, heads=(4, 4), sizes=(32, 32))
    before = torch.get_num_threads()
    want = sd.chunk_kda(**c)[0]
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            assert _calls.threads() == n
            assert torch.equal(sd.chunk_kda(**c)[0], want)
        softdelta.set_num_threads(2)
        assert _calls.threads() == 2
    finally:
        softdelta.set_num_threads(0)
        torch.set_num_threads(before)


def test_one_openmp_runtime_is_loaded():
    sd.chunk_kda(**delta_call("kda"))
    torch.randn(300, 300) @ torch.randn(300, 300)
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if any(n in line for n in ("libgomp", "libomp", "libiomp"))}
    assert len(runtimes) == 1, runtimes
