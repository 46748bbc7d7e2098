"""The torch custom ops: opcheck, gradcheck (f64 goes to the reference), torch.compile."""
import pytest
import torch

import softdelta.torch as sd
from softdelta import _native
from drawing import attention_call, delta_call, quantised_call

RULES = list(_native.RULES)
FUNCTIONS = {"delta_rule": sd.chunk_delta_rule, "gated_delta_rule": sd.chunk_gated_delta_rule, "kda": sd.chunk_kda,
             "comba": sd.chunk_comba, "simple_gla": sd.chunk_simple_gla, "gla": sd.chunk_gla}


def inputs_of(call):
    names = ("q", "k", "v", "g", "g_gamma", "beta", "p", "initial_state", "A_log", "dt_bias", "cu_seqlens")
    return tuple(call.get(n) for n in names)


DELTA = ("Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? g_gamma, Tensor? beta, Tensor? p, Tensor? initial_state, "
         "Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, SymInt rule, float scale, bool use_qk_l2norm_in_kernel, "
         "bool use_gate_in_kernel, float lower_bound, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, "
         "bool state_v_first, SymInt steps, bool float_products, bool output_final_state")
ATTENTION = ("Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? sink, Tensor? cu_seqlens_q, "
             "Tensor? cu_seqlens_k, Tensor? cache_seqlens, Tensor? block_table, Tensor? alibi_slopes, Tensor? bias_slopes, "
             "Tensor? k_scale, Tensor? v_scale, float scale, SymInt causal, SymInt window_left, SymInt window_right, "
             "float softcap, SymInt empty_row, SymInt top_w, bool heads_first")


@pytest.mark.parametrize("name, schema", [
    ("delta_forward", f"{DELTA}) -> (Tensor, Tensor)"),
    ("delta_backward", f"{DELTA}, Tensor? do, Tensor? dfinal_state, bool[] wanted) -> "
     f"({', '.join(['Tensor'] * 10)})"),
    ("attention_forward", f"{ATTENTION}) -> (Tensor, Tensor)"),
    ("attention_backward", f"{ATTENTION}, Tensor o, Tensor lse, Tensor? do, Tensor? dlse, bool[] wanted) -> "
     f"({', '.join(['Tensor'] * 5)})"),
])
def test_ops_keep_their_schemas(name, schema):
    """Saved graphs call them with these arguments in this order."""
    assert str(getattr(torch.ops.softdelta, name).default._schema) == f"softdelta::{name}({schema}"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rules_pass_opcheck(rule, dtype):
    call = delta_call(rule, dtype=dtype, requires_grad=True)
    options = (RULES.index(rule), 0.3, False, False, float("nan"), False, False, False, 1)
    for float_products, final_state in ((False, True), (False, False), (True, True)):
        torch.library.opcheck(torch.ops.softdelta.delta_forward.default,
                              (*inputs_of(call), *options, float_products, final_state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_passes_opcheck(dtype):
    c = attention_call(dtype=dtype, requires_grad=True)
    inputs = (c["q"], c["k"], c["v"], c["mask"], c["bias"], c["sink"], None, None, None, None)
    for slopes in ((None, None), (torch.rand(4), torch.rand(4))):
        torch.library.opcheck(torch.ops.softdelta.attention_forward.default,
                              (*inputs, *slopes, None, None, float("nan"), 2, 5, -1, 0.0, 0, -1, False))
    heads_first = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in inputs[:3])
    torch.library.opcheck(torch.ops.softdelta.attention_forward.default,
                          (*heads_first, *inputs[3:], *[None] * 4, float("nan"), 2, 5, -1, 0.0, 0, -1, True))


@pytest.mark.parametrize("kind", ["rows", "q8_0", "q4_0"])
def test_attention_of_few_bits_passes_opcheck(kind):
    q, k, v, k_scale, v_scale, _, _ = quantised_call(kind)
    torch.library.opcheck(torch.ops.softdelta.attention_forward.default,
                          (q, k, v, *[None] * 9, k_scale, v_scale, float("nan"), 2, 5, -1, 0.0, 0, -1, False))


@pytest.mark.parametrize("rule", FUNCTIONS)
@pytest.mark.parametrize("options", [{}, {"packed": True}, {"state_v_first": True}, {"l2norm": True}])
def test_delta_rules_pass_gradcheck(rule, options):
    options = dict(options)
    v_first, l2norm = options.pop("state_v_first", False), options.pop("l2norm", False)
    if (v_first and rule in ("delta_rule", "comba")) or (l2norm and rule in ("simple_gla", "gla")):
        pytest.skip("its signature has no such option")
    call = delta_call(rule, dtype=torch.float64, requires_grad=True, v_first=v_first, **options)
    more = {**({"state_v_first": True} if v_first else {}), **({"use_qk_l2norm_in_kernel": True} if l2norm else {})}
    fixed = {"cu_seqlens": call.pop("cu_seqlens", None), "output_final_state": True, **more}
    names = [n for n, t in call.items() if t is not None]

    def f(*tensors):
        return FUNCTIONS[rule](**dict(zip(names, tensors)), **fixed)

    assert torch.autograd.gradcheck(f, tuple(call[n] for n in names), fast_mode=False)


@pytest.mark.parametrize("lower_bound", [None, -3.0])
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_gates_and_beta_in_the_kernel_pass_gradcheck(rule, lower_bound):
    if rule == "gated_delta_rule" and lower_bound is not None:
        pytest.skip("its signature has no lower_bound")
    call = delta_call(rule, dtype=torch.float64, requires_grad=True)
    channels = call["q"].shape[3] if rule == "kda" else 1
    heads = call["v"].shape[2]
    call["A_log"] = torch.rand(heads, dtype=torch.float64).requires_grad_()
    call["dt_bias"] = torch.rand(heads * channels, dtype=torch.float64).requires_grad_()
    names = list(call)
    more = {} if lower_bound is None else {"lower_bound": lower_bound}

    def f(*tensors):
        return FUNCTIONS[rule](**dict(zip(names, tensors)), use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                               allow_neg_eigval=True, **more)[0]

    assert torch.autograd.gradcheck(f, tuple(call.values()))


@pytest.mark.parametrize("options", [dict(), dict(is_causal=True), dict(window=(2, 1), softcap=1.5)])
def test_scaled_dot_product_attention_passes_gradcheck(options):
    c = attention_call(dtype=torch.float64, requires_grad=True)
    heads_first = [c[n].detach().transpose(1, 2).contiguous().requires_grad_() for n in "qkv"]

    def f(q, k, v, bias, sink):
        return sd.scaled_dot_product_attention(q, k, v, c["mask"], bias=bias, sink=sink, enable_gqa=True,
                                               return_lse=True, **options)

    assert torch.autograd.gradcheck(f, (*heads_first, c["bias"], c["sink"]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_functions_give_the_same(dynamic):
    c = delta_call("gated_delta_rule", dtype=torch.float32, requires_grad=True)
    names = ("q", "k", "v", "g", "beta")

    def layer(q, k, v, g, beta):
        o, _ = sd.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        a = sd.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), is_causal=True)
        return o.tanh().sum() + (2 * a).square().sum()

    inputs = [c[n] for n in names]
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    want, got = layer(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs)):
        torch.testing.assert_close(a, b)


def test_compiled_by_inductor():
    c = attention_call(dtype=torch.float32)
    q, k, v = (c[n].transpose(1, 2) for n in "qkv")
    f = torch.compile(lambda q, k, v: sd.scaled_dot_product_attention(2 * q, k, v, enable_gqa=True) + 1, fullgraph=True)
    torch.testing.assert_close(f(q, k, v), sd.scaled_dot_product_attention(2 * q, k, v, enable_gqa=True) + 1)
