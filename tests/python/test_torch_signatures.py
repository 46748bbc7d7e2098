"""Names and defaults of the arguments are those of the libraries whose functions these stand in for."""
import inspect

import pytest
import torch

import softdelta.torch as sd
from softdelta._options import FACTS
from drawing import attention_call, delta_call
from torch_calls import FUNCTIONS

required = inspect.Parameter.empty

# flash-linear-attention 0.6.0, fla/ops; last: the keywords that its **kwargs take and use.
FLA = {
    "chunk_gated_delta_rule": (
        dict(q=required, k=required, v=required, g=required, beta=required, scale=None, initial_state=None,
             output_final_state=False, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False,
             allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
             cp_context=None), dict(chunk_size=64, use_gate_in_kernel=False, A_log=None, dt_bias=None)),
    "fused_recurrent_gated_delta_rule": (
        dict(q=required, k=required, v=required, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
             output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
             dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
             cu_seqlens=None), {}),
    "chunk_kda": (
        dict(q=required, k=required, v=required, g=required, beta=required, scale=None, initial_state=None,
             output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
             use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
             disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
             cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None),
        dict(chunk_size=64, A_log=None, dt_bias=None)),
    "fused_recurrent_kda": (
        dict(q=required, k=required, v=required, g=required, beta=required, A_log=None, dt_bias=None, scale=None,
             initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
             use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False,
             cu_seqlens=None), {}),
    "chunk_comba": (
        dict(q=required, k=required, v=required, p=required, g=required, beta=None, scale=None, initial_state=None,
             output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None), None),
    "chunk_simple_gla": (
        dict(q=required, k=required, v=required, g=None, g_gamma=None, scale=None, initial_state=None,
             output_final_state=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None),
        dict(chunk_size=64)),
    "chunk_gla": (
        dict(q=required, k=required, v=required, g=required, scale=None, initial_state=None, output_final_state=False,
             state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None), None),
    "fused_recurrent_gla": (
        dict(q=required, k=required, v=required, gk=None, gv=None, scale=None, initial_state=None,
             output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None), {}),
    "chunk_lightning_attn": (
        dict(q=required, k=required, v=required, layer_idx=required, num_layers=required, scale=None,
             initial_state=None, output_final_state=False, cu_seqlens=None), dict(chunk_size=64)),
    "chunk_gdn2": (
        dict(q=required, k=required, v=required, g=required, b=required, w=required, scale=None, initial_state=None,
             output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None,
             cu_seqlens_cpu=None, safe_gate=False, lower_bound=None, disable_recompute=False,
             return_intermediate_states=False, state_v_first=False), dict(chunk_size=64, A_log=None, dt_bias=None)),
    "fused_recurrent_gdn2": (
        dict(q=required, k=required, v=required, g=required, b=required, w=required, A_log=None, dt_bias=None,
             scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
             use_gate_in_kernel=False, lower_bound=None, state_v_first=False, cu_seqlens=None), {}),
    "chunk_gated_delta_product": (
        dict(q=required, k=required, v=required, g=required, beta=required, num_householder=required, scale=None,
             initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
             cu_seqlens_cpu=None), None),
    "chunk_dplr_delta_rule": (
        dict(q=required, k=required, v=required, a=required, b=required, gk=required, scale=None, initial_state=None,
             output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None,
             disable_recompute=False, cp_context=None, lower_bound=None), {}),
    "fused_recurrent_dplr_delta_rule": (
        dict(q=required, k=required, v=required, a=required, b=required, gk=required, scale=None, initial_state=None,
             output_final_state=False, reverse=False, cu_seqlens=None), None),
    "chunk_rwkv7": (
        dict(r=required, w=required, k=required, v=required, a=required, b=required, scale=1.0, initial_state=None,
             output_final_state=False, cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None,
             disable_recompute=False, cp_context=None, lower_bound=None), {}),
    "fused_recurrent_rwkv7": (
        dict(r=required, w=required, k=required, v=required, a=required, b=required, scale=None, initial_state=None,
             output_final_state=True, cu_seqlens=None), {}),
    "fused_mul_recurrent_rwkv7": (
        dict(r=required, w=required, k=required, v=required, kk=required, a=required, scale=1.0, initial_state=None,
             output_final_state=False, reverse=False, cu_seqlens=None), {}),
    "chunk_delta_rule": (
        dict(q=required, k=required, v=required, beta=required, scale=None, initial_state=None,
             output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None),
        dict(chunk_size=64)),
    "fused_recurrent_comba": (
        dict(q=required, k=required, p=required, v=required, g=required, beta=None, scale=None, initial_state=None,
             output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None), None),
    "fused_chunk_simple_gla": (
        dict(q=required, k=required, v=required, g=None, g_gamma=None, scale=None, initial_state=None,
             output_final_state=False, cu_seqlens=None), None),
    "fused_recurrent_simple_gla": (
        dict(q=required, k=required, v=required, g=None, g_gamma=None, scale=None, initial_state=None,
             output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None), {}),
    "parallel_simple_gla": (
        dict(q=required, k=required, v=required, g=None, scale=None, output_attentions=False, cu_seqlens=None,
             cu_seqlens_cpu=None), None),
    "fused_recurrent_delta_rule": (
        dict(q=required, k=required, v=required, beta=None, scale=None, initial_state=None, output_final_state=False,
             use_qk_l2norm_in_kernel=False, cu_seqlens=None), None),
}
OTHERS = {
    # mamba_ssm 2.3
    "mamba_chunk_scan_combined": dict(
        x=required, dt=required, A=required, B=required, C=required, chunk_size=required, D=None, z=None, dt_bias=None,
        initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
        return_final_states=False, return_varlen_states=False, state_dtype=None),
    "mamba_split_conv1d_scan_combined": dict(
        zxbcdt=required, conv1d_weight=required, conv1d_bias=required, dt_bias=required, A=required, D=required,
        chunk_size=required, initial_states=None, seq_idx=None, dt_limit=(0.0, float("inf")), return_final_states=False,
        activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, headdim=None,
        ngroups=1, norm_before_gate=True),
    "selective_state_update": dict(state=required, x=required, dt=required, A=required, B=required, C=required, D=None,
                                   z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None),
    # torch.nn.functional
    "scaled_dot_product_attention": dict(query=required, key=required, value=required, attn_mask=None, dropout_p=0.0,
                                         is_causal=False, scale=None, enable_gqa=False),
    # flash-attention 2
    "flash_attn_func": dict(q=required, k=required, v=required, dropout_p=0.0, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                            return_attn_probs=False),
    # from cu_seqlens_k on with defaults: vLLM, which names its arguments, has seqused_k instead
    "flash_attn_varlen_func": dict(q=required, k=required, v=required, cu_seqlens_q=required, cu_seqlens_k=None,
                                   max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0, softmax_scale=None,
                                   causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                   deterministic=False, return_attn_probs=False, block_table=None),
    "flash_attn_with_kvcache": dict(q=required, k_cache=required, v_cache=required, k=None, v=None, rotary_cos=None,
                                    rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
                                    block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1),
                                    softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                                    return_softmax_lse=False),
    # torch.nn.attention.varlen, without what is by name alone
    "varlen_attn": dict(query=required, key=required, value=required, cu_seq_q=required, cu_seq_k=required, max_q=required,
                        max_k=required),
    # flash-dmattn 1.2.2 (flash_dmattn_func)
    "flash_sparse_attn_func": dict(query=required, key=required, value=required, attn_mask=None, attn_bias=None,
                                   softmax_scale=None, is_causal=None, softcap=None, deterministic=None,
                                   return_attn_probs=None),
}
RULE = {name: name.replace("fused_", "").partition("_")[2] for name in FLA}


def arguments_of(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("name", FLA)
def test_delta_rules_have_the_arguments_of_fla(name):
    arguments, keywords = FLA[name]
    function = getattr(sd, name)
    assert list(arguments_of(function).items()) == list(arguments.items())
    assert any(p.kind == p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()) == \
        (keywords is not None)
    drawn = delta_call(RULE[name]) if RULE.get(name) in FACTS else {}
    if not {n for n, x in arguments.items() if x is required} <= set(drawn):
        return  # test_torch_family.py calls it
    call = {n: t for n, t in drawn.items() if n in arguments}
    o, state = function(**call, **(keywords or {}))  # its keywords, at their defaults
    assert o.shape == call["v"].shape and state is None
    if keywords is not None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
            function(**call, no_such=1)


@pytest.mark.parametrize("name", OTHERS)
def test_attention_has_the_arguments_of_its_peers(name):
    assert list(arguments_of(getattr(sd, name)).items()) == list(OTHERS[name].items())


@pytest.mark.parametrize("name, given, message", [
    ("chunk_gated_delta_rule", dict(cp_context=object()), "cp_context"),
    ("chunk_gated_delta_rule", dict(chunk_size=48), "`chunk_size` must be 16, 32, or 64, got 48"),
    ("chunk_delta_rule", dict(chunk_size=128), "`chunk_size` must be 16, 32, or 64, got 128"),
    ("chunk_kda", dict(chunk_size=16), "`chunk_size` must be either 32 or 64, got 16"),
    ("chunk_simple_gla", dict(chunk_size=48), "`chunk_size` must be a power of 2, got 48"),
    ("chunk_gated_delta_rule", dict(head_first=True), "head_first"),
    ("chunk_gated_delta_rule", dict(cu_seqlens_cpu=torch.tensor([0, 7])), "cu_seqlens_cpu"),
    ("chunk_gated_delta_rule", dict(allow_neg_eigval=True), "allow_neg_eigval"),
    ("chunk_gated_delta_rule", dict(use_gate_in_kernel=True), "A_log"),
    ("chunk_kda", dict(allow_neg_eigval=True, return_intermediate_states=True), "allow_neg_eigval"),
    ("chunk_kda", dict(use_graph=True), "use_graph"),
    ("chunk_kda", dict(use_gate_in_kernel=True), "A_log"),
    ("fused_recurrent_gated_delta_rule", dict(gv=torch.zeros(2, 7, 2, 4)), "gv"),
    ("chunk_delta_rule", dict(beta=torch.zeros(2, 7, 3)), "beta"),
    ("fused_recurrent_simple_gla", dict(state_v_first=True, transpose_state_layout=True), "both given"),
    ("parallel_simple_gla", dict(output_attentions=True, cu_seqlens=torch.tensor([0, 7])), "output_attentions"),
])
def test_what_fla_takes_and_we_do_not_is_an_error(name, given, message):
    call = {**delta_call(RULE[name]), **given}
    if name == "parallel_simple_gla":
        del call["initial_state"]
    with pytest.raises(ValueError, match=message):
        getattr(sd, name)(**call)


@pytest.mark.parametrize("given", [dict(A_log=torch.zeros(3)), dict(dt_bias=torch.zeros(3)), dict(lower_bound=-5.0)])
def test_a_gate_of_the_kernel_must_be_asked_for(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))} is given, expected None: use_gate_in_kernel is off"):
        sd.delta_rule("kda", **delta_call("kda"), **given)


def test_the_old_name_of_the_layout():
    call = delta_call("kda", v_first=True)
    want = sd.chunk_kda(**call, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout"):
        got = sd.chunk_kda(**call, transpose_state_layout=True)
    assert torch.equal(got[0], want[0])


def test_gates_of_channels_and_heads_together():
    call = delta_call("gated_delta_rule", dtype=torch.float64)
    gk = -torch.rand(2, 7, 2, 3, dtype=torch.float64)
    got, _ = sd.fused_recurrent_gated_delta_rule(**call, gk=gk)
    want, _ = sd.fused_recurrent_kda(**{**call, "g": gk + call["g"][..., None]})
    torch.testing.assert_close(got, want)
    del call["g"]
    got, _ = sd.fused_recurrent_gated_delta_rule(**call)
    torch.testing.assert_close(got, sd.chunk_delta_rule(**call)[0])


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_states_of_chunks(chunk_size):
    call = delta_call("kda", dtype=torch.float64, tokens=130)
    options = dict(output_final_state=True, return_intermediate_states=True, chunk_size=chunk_size)
    o, final, states = sd.chunk_kda(**call, **options)
    assert states.shape == (2, 130 // chunk_size + 1, 2, 3, 4)
    for chunk in range(1, 130 // chunk_size + 1):
        head = {n: t if n == "initial_state" else t[:, :chunk * chunk_size] for n, t in call.items()}
        torch.testing.assert_close(sd.chunk_kda(**head, output_final_state=True)[1], states[:, chunk])


def test_states_of_chunks_are_as_k_and_without_gradients():
    call = delta_call("kda", dtype=torch.bfloat16, tokens=70)
    _, final, states = sd.chunk_kda(**call, output_final_state=True, return_intermediate_states=True)
    assert states.dtype == torch.bfloat16 and final.dtype == torch.float32
    head = {n: t if n == "initial_state" else t[:, :64] for n, t in call.items()}
    assert torch.equal(sd.chunk_kda(**head, output_final_state=True)[1].bfloat16(), states[:, 1])
    with pytest.raises(ValueError, match="return_intermediate_states"):
        sd.chunk_kda(**delta_call("kda", requires_grad=True), return_intermediate_states=True)


@pytest.mark.parametrize("call, message", [
    (lambda q: sd.scaled_dot_product_attention(q, q, q, dropout_p=0.1), "dropout_p is 0.1"),
    (lambda q: sd.flash_attn_func(q, q, q, dropout_p=0.1), "dropout_p is 0.1"),
    (lambda q: sd.flash_attn_func(q, q, q, alibi_slopes=torch.ones(7)), "alibi_slopes: dimension 0 is 7"),
    (lambda q: sd.flash_attn_func(q, q, q, window_size=(1,)), r"window is \(1,\), expected two"),
    (lambda q: sd.flash_attn_func(q, q, q, alibi_slopes=torch.ones(9, 4)), r"alibi_slopes has shape \(9, 4\)"),
    (lambda q: sd.flash_attn_varlen_func(q[0], q[0], q[0], torch.tensor([0, 5])), "cu_seqlens_k and seqused_k"),
    (lambda q: sd.flash_attn_varlen_func(q[0], q[0], q[0], torch.tensor([0, 5]), seqused_k=torch.tensor([5])),
     "without block_table"),
    (lambda q: sd.scaled_dot_product_attention(q, q[:, :1], q[:, :1]), "enable_gqa"),
    (lambda q: sd.flash_sparse_attn_func(q, q, q, attn_mask=torch.zeros(1, 1, 5, 5)), "attn_mask holds"),
    (lambda q: sd.scaled_dot_product_attention(q[None], q[None], q[None]), "5, 5 and 5 dimensions"),
])
def test_what_peers_of_attention_take_and_we_do_not_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(attention_call(heads=(4, 4), rows=(5, 5), sizes=(4, 4))["q"])


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if " " not in name])
def test_what_is_no_tensor_is_named(name):
    draw, run = FUNCTIONS[name]
    call = {n: x.detach() for n, x in draw(torch.float32).items()}
    for operand, x in call.items():
        for other in x.numpy(), x.tolist(), "x":
            with pytest.raises(TypeError, match=f" is {type(other).__name__}, expected a tensor"):
                run(call | {operand: other})


def test_what_is_no_tensor_is_named_by_mamba_and_layers():
    x = torch.ones(2, 4, 3)
    for call, name in ((lambda: sd.selective_state_update(x, [1], x, x, x, x), "x"),
                       (lambda: sd.mamba_chunk_scan_combined(x, x, 3, x, x, 64), "A"),
                       (lambda: sd.mamba_split_conv1d_scan_combined(x, [x], x, x, x, x, 64, activation="silu"), "conv1d_weight"),
                       (lambda: sd.delta_step("delta_rule", x, x, x, "state"), "initial_state"),
                       (lambda: sd.causal_conv1d(x, "weight"), "weight"), (lambda: sd.rms_norm_gated(x, 5, None), "g")):
        with pytest.raises(TypeError, match=f"^{name} is .*, expected a tensor"):
            call()
