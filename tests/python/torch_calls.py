"""Every public function of softdelta.torch as f(tensors) → results, with operands to call it with."""
import torch

import softdelta.torch as sd
from drawing import attention_call, delta_call, expanded

RULE = {"chunk_gated_delta_rule": "gated_delta_rule", "fused_recurrent_gated_delta_rule": "gated_delta_rule",
        "chunk_kda": "kda", "fused_recurrent_kda": "kda", "chunk_comba": "comba", "chunk_simple_gla": "simple_gla",
        "chunk_gla": "gla",
        "chunk_delta_rule": "delta_rule"}
RULE |= {name: rule for name, rule in (("fused_recurrent_delta_rule", "delta_rule"),
                                       ("fused_recurrent_comba", "comba"), ("fused_recurrent_simple_gla", "simple_gla"),
                                       ("fused_chunk_simple_gla", "simple_gla")) if hasattr(sd, name)}
CAST = ("q", "k", "v", "p", "bias")  # what autocast casts
BOUNDS = torch.tensor([0, 3, 5], dtype=torch.int32)


def _delta(name):
    gate_in_kernel = name in ("chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule",
                              "fused_recurrent_kda")

    def draw(dtype, **sizes):
        call = delta_call(RULE[name], dtype, requires_grad=True, **sizes)
        if gate_in_kernel:
            heads, channels = call["v"].shape[2], call["q"].shape[3] if "kda" in name else 1
            wide = torch.promote_types(dtype, torch.float32)
            call["A_log"] = torch.rand(heads, dtype=wide).requires_grad_()
            call["dt_bias"] = torch.rand(heads * channels, dtype=wide).requires_grad_()
        return call

    def run(call):
        more = {"use_gate_in_kernel": True} if gate_in_kernel else {}
        return getattr(sd, name)(**call, output_final_state=True, **more)

    return draw, run


def _attention(*names, heads_first=False, packed=False, one_length=False):
    def draw(dtype, **sizes):
        sizes["rows"] = (5, 5) if one_length else sizes.get("rows", (5, 6))
        call = attention_call(dtype, requires_grad=True, **sizes)
        call = {n: call[n].detach() for n in ("q", "k", "v", *names)}
        if packed:
            call |= {n: call[n][0] for n in "qkv"}
        if heads_first:
            call |= {n: call[n].transpose(1, 2) for n in "qkv"}
        return {n: x.clone().requires_grad_(x.dtype != torch.bool) for n, x in call.items()}

    return draw


def _sdpa(call):
    call = dict(call)
    return sd.scaled_dot_product_attention(*(call.pop(n) for n in "qkv"), call.pop("mask"), enable_gqa=True,
                                           return_lse=True, **call)


def _varlen(call):
    return sd.flash_attn_varlen_func(*call.values(), BOUNDS, BOUNDS, 3, 3, causal=True, return_attn_probs=True)[:2]


def _sparse(call):
    return sd.flash_sparse_attn_func(call["q"], call["k"], call["v"], call["mask"], call["bias"], keep=3,
                                     return_attn_probs=True)[:2]


# name → (operands of a type, by their names, and of sizes as drawing.py has them; the call, whose results begin with o)
FUNCTIONS = {name: _delta(name) for name in RULE} | {
    "scaled_dot_product_attention": (_attention("mask", "bias", "sink", heads_first=True), _sdpa),
    "flash_attn_func": (_attention(), lambda c: sd.flash_attn_func(*c.values(), causal=True, window_size=(3, 0),
                                                                   return_attn_probs=True)[:2]),
    "flash_attn_func with ALiBi": (_attention(), lambda c: sd.flash_attn_func(
        *c.values(), alibi_slopes=torch.tensor([0.5, 0.25, 1.0, 2.0], device=c["q"].device), return_attn_probs=True)[:2]),
    "flash_attn_varlen_func": (_attention(packed=True, one_length=True), _varlen),
    "flash_sparse_attn_func": (_attention("mask", "bias"), _sparse),
}


def loss(results):
    """A number that every element of every result reaches, in f32 or f64."""
    return sum((x.to(torch.promote_types(x.dtype, torch.float32)).sin() * (i + 1)).sum()
               for i, x in enumerate(results) if x is not None)


def with_strides_of_0(name, dtype, run_on=lambda call: call, **sizes):
    """(what, results and gradients, those of copies) for every operand and gradient given, expanded along each dimension."""
    draw, run = FUNCTIONS[name]
    call = run_on({n: x.detach() for n, x in draw(dtype, **sizes).items()})
    incoming = [torch.randn_like(x) for x in run(call)]

    def results(call, incoming):
        call = {n: x.detach().requires_grad_(x.is_floating_point()) for n, x in call.items()}
        found = run(call)
        return *found, *torch.autograd.grad(found, [call[n] for n in differentiable(call)], incoming)

    for n, x in call.items():
        for view in expanded(x):
            yield (f"{n}, strides {view.stride()}", results({**call, n: view}, incoming),
                   results({**call, n: view.contiguous()}, incoming))
    for i, d in enumerate(incoming):
        for view in expanded(d):
            yield (f"gradient of result {i}, strides {view.stride()}", results(call, incoming[:i] + [view] + incoming[i + 1:]),
                   results(call, incoming[:i] + [view.contiguous()] + incoming[i + 1:]))


def differentiable(call):
    return [n for n, x in call.items() if x is not None and x.requires_grad]


def gradients(call, value):
    """The gradient of a loss by every operand that can have one."""
    names = differentiable(call)
    return dict(zip(names, torch.autograd.grad(value, [call[n] for n in names])))
