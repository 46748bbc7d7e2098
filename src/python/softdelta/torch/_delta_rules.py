"""The delta rules under the names and signatures of flash-linear-attention 0.6.

Shapes, in all of them: q, k, p [B, T, H, K]; v, o [B, T, HV, V], HV a multiple of H; beta [B, T, HV]. g is a natural
logarithm, [B, T, HV], for KDA [B, T, HV, K]. States of N sequences are [N, HV, K, V], or [N, HV, V, K] with
state_v_first. Tensors
are f32, bf16 or f16, in any mixture, with any strides; f64, all of them, goes to the reference. Sums are kept in f32, and the
final state is f32. With cu_seqlens [N+1] B is 1 and holds N sequences one after the other.

Arguments that only choose how a GPU kernel works (chunk_size, chunk_indices, cu_seqlens_cpu, safe_gate) are accepted and
change nothing. layout="bhtd", ours: q, k, v, p, g, beta and o have heads before tokens. What we do not do is a ValueError.
"""
from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _native, _options
from .._records import DELTA_ROWS, DeltaInputs, DeltaOptions
from . import _calls, _ops, _route
from ._families import DELTA_RULE as FAMILY

DELTA_RULE, GATED_DELTA_RULE, KDA, COMBA, SIMPLE_GLA, GLA, GDN2, GATED_DELTA_PRODUCT, DPLR = (
    _options.RULES[name] for name in ("delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla", "gla", "gdn2",
                                      "gated_delta_product", "dplr"))


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context=None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet (Yang et al. 2025): S ← e^g S, S ← S + k (β (v − Sᵀk))ᵀ, o = scale · Sᵀ q.

    cp_context: what flash-linear-attention's build_cp_context returns; q and the others are then this rank's part of
    the sequences, and there are no initial and final states (softdelta.torch.distributed.delta_rule knows them).
    use_gate_in_kernel=True (a keyword): g is raw, the gate is −e^A_log · softplus(g + dt_bias), A_log and dt_bias [HV].
    Returns o and the final state (None unless output_final_state).
    """
    state_v_first = _old_layout(kwargs, state_v_first)
    gate = _gate(kwargs.pop("use_gate_in_kernel", False), g, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None))
    _refuse_rest("chunk_gated_delta_rule", kwargs, cu_seqlens, cu_seqlens_cpu, (16, 32, 64))
    inputs = DeltaInputs(q, k, v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(GATED_DELTA_RULE, inputs, scale, output_final_state, l2norm=use_qk_l2norm_in_kernel, gate=gate,
                sigmoid=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval, v_first=state_v_first,
                cp_context=cp_context, layout=layout)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """As chunk_gated_delta_rule, for decode. gk [B, T, HV, K] gates key channels, alone or with g; gv is refused.
    Without any gate it is the plain delta rule; beta defaults to 1."""
    state_v_first = _old_layout(kwargs, state_v_first)
    _refuse_rest("fused_recurrent_gated_delta_rule", kwargs)
    if gv is not None:
        raise ValueError("gv is given, expected None: no rule here gates value channels")
    if use_gate_in_kernel and gk is not None:
        raise ValueError("gk is given, expected None: use_gate_in_kernel makes the gate from g")
    gate = _gate(use_gate_in_kernel, g, A_log, dt_bias)
    rule = GATED_DELTA_RULE
    if gk is not None:
        rule, g = KDA, gk if g is None else gk + g.unsqueeze(-1)
    elif g is None:
        rule = DELTA_RULE
    inputs = DeltaInputs(q, k, v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(rule, inputs, scale, output_final_state, l2norm=use_qk_l2norm_in_kernel, gate=gate,
                sigmoid=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval, v_first=state_v_first,
                float_products=True, layout=layout)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context=None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention (2025): as the gated delta rule with a gate per key channel, g [B, T, HV, K].

    use_gate_in_kernel: g is raw, the gate is −e^A_log · softplus(g + dt_bias), or with lower_bound
    lower_bound · σ(e^A_log · (g + dt_bias)); A_log [HV] and dt_bias [HV·K] are keywords.
    return_intermediate_states, without gradients only, adds the states at every chunk_size-th row of a sequence
    [B, NT, HV, K, V], as k; chunk_size, a keyword, is 32 or 64 (default). disable_recompute: a GPU keeps for the backward
    pass what it can, whatever set_most_kept says.
    """
    state_v_first = _old_layout(kwargs, state_v_first)
    gate = _gate(use_gate_in_kernel, g, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None), lower_bound)
    chunk_size = kwargs.get("chunk_size", 64)
    _refuse_rest("chunk_kda", kwargs, cu_seqlens, cu_seqlens_cpu, (32, 64))
    if use_graph or max_num_seqs is not None:
        raise ValueError("use_graph and max_num_seqs are given, expected False and None: they drive one accelerator")
    inputs = DeltaInputs(q, k, v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(KDA, inputs, scale, output_final_state, l2norm=use_qk_l2norm_in_kernel, gate=gate,
                sigmoid=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval, v_first=state_v_first,
                state_interval=chunk_size if return_intermediate_states else None, cp_context=cp_context,
                whatever_kept=_flag("disable_recompute", disable_recompute), layout=layout)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """As chunk_kda, for decode; differentiable too."""
    state_v_first = _old_layout(kwargs, state_v_first)
    _refuse_rest("fused_recurrent_kda", kwargs)
    gate = _gate(use_gate_in_kernel, g, A_log, dt_bias, lower_bound)
    inputs = DeltaInputs(q, k, v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(KDA, inputs, scale, output_final_state, l2norm=use_qk_l2norm_in_kernel, gate=gate,
                sigmoid=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval, v_first=state_v_first,
                float_products=True, layout=layout)


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    layout: str = "bthd",
) -> tuple[Tensor, Tensor | None]:
    """Comba (Hu et al. 2025): d = β (v − Sᵀp) before the decay, S ← e^g S + k dᵀ. p None is k."""
    _refuse_rest("chunk_comba", {}, cu_seqlens, cu_seqlens_cpu)
    return _comba(q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, layout)


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: str = "bthd",
) -> tuple[Tensor, Tensor | None]:
    """As chunk_comba, for decode; differentiable too. p stands before v."""
    return _comba(q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, layout,
                  float_products=True)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    layout: str = "bthd",
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet (Yang et al. 2024): S ← S + k (β (v − Sᵀk))ᵀ."""
    _refuse_rest("chunk_delta_rule", kwargs, cu_seqlens, cu_seqlens_cpu, (16, 32, 64))
    inputs = DeltaInputs(q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(DELTA_RULE, inputs, scale, output_final_state, l2norm=use_qk_l2norm_in_kernel, layout=layout)


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    layout: str = "bthd",
) -> tuple[Tensor, Tensor | None]:
    """As chunk_delta_rule, for decode; differentiable too. beta defaults to 1."""
    inputs = DeltaInputs(q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(DELTA_RULE, inputs, scale, output_final_state, l2norm=use_qk_l2norm_in_kernel, float_products=True,
                layout=layout)


# ----------------------------------------------------------------------------------------------------------------------

_number, _flag = _options.number, _options.flag


def delta_rule(
    rule: str | _options.Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    p: Tensor | None = None,
    initial_state: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    steps: int = 1,
    output_final_state: bool = False,
    layout: str = "bthd",
) -> tuple[Tensor, Tensor | None]:
    """Ours: softdelta.delta_forward with gradients, of any rule by its name or its facts, a softdelta.Rule."""
    number = _options.rule_number(rule)
    for name, given in ("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound):
        if given is not None and not use_gate_in_kernel:
            raise ValueError(f"{name} is given, expected None: use_gate_in_kernel is off")
    gate = _gate(use_gate_in_kernel, g, A_log, dt_bias, lower_bound)
    inputs = DeltaInputs(q, k, v, g=g, g_gamma=g_gamma, beta=beta, p=p, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return _run(number, inputs, scale, output_final_state, l2norm=use_qk_l2norm_in_kernel, gate=gate,
                sigmoid=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval, v_first=state_v_first, layout=layout,
                steps=steps)


def _comba(q, k, v, p, g, beta, scale, initial_state, output_final_state, l2norm, cu_seqlens, layout, float_products=False):
    inputs = DeltaInputs(q, k, v, g=g, beta=beta, p=k if p is None else p, initial_state=initial_state,
                         cu_seqlens=cu_seqlens)
    return _run(COMBA, inputs, scale, output_final_state, l2norm=l2norm, float_products=float_products,
                layout=layout)


class _Gate(NamedTuple):
    """Of a raw gate, which the kernel makes: A_log [HV], dt_bias [HV] or [HV·K]."""
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float


def _gate(in_kernel: bool, g, A_log, dt_bias, lower_bound=None) -> _Gate | None:
    """None without use_gate_in_kernel: then the other three mean nothing, as in flash-linear-attention."""
    if not in_kernel:
        return None
    if g is None:
        raise ValueError("g is None, expected the raw gate: use_gate_in_kernel makes the gate from it")
    if A_log is None and lower_bound is None:
        raise ValueError("A_log is None, expected [HV]: use_gate_in_kernel without lower_bound needs it")
    _route.expect_tensors(A_log=A_log, dt_bias=dt_bias)
    if A_log is not None and A_log.dim() != 1:
        A_log = A_log.reshape(-1)
    if dt_bias is not None and dt_bias.dim() != 1:
        dt_bias = dt_bias.reshape(-1)
    return _Gate(A_log, dt_bias, _number("lower_bound", lower_bound))


def rows_and_heads_swapped(inputs: DeltaInputs) -> DeltaInputs:
    rows = {n: x for n in DELTA_ROWS if (x := getattr(inputs, n)) is not None}
    _route.expect_tensors(**rows)
    for name, x in rows.items():
        if x.dim() < 3:
            raise ValueError(f"{name} has {x.dim()} dimensions, expected 3 or 4, heads before tokens, with layout 'bhtd'")
    return inputs._replace(**{n: x.transpose(1, 2) for n, x in rows.items()})


def _run(rule: int, inputs: DeltaInputs, scale, output_final_state: bool, *, l2norm=False, gate: _Gate | None = None,
         sigmoid=False, neg_eigval=False, v_first=False, state_interval: int | None = None, cp_context=None,
         whatever_kept=False, float_products=False, layout="bthd", steps=1):
    """o and the final state or None; with state_interval also the states at the start of so many rows of a sequence.
    float_products: as recurrent kernels, which round nothing but o."""
    if _options.number_of(_options.LAYOUT, "layout", layout):
        o, *states = _run(rule, rows_and_heads_swapped(inputs), scale, output_final_state, l2norm=l2norm, gate=gate,
                          sigmoid=sigmoid, neg_eigval=neg_eigval, v_first=v_first, state_interval=state_interval,
                          cp_context=cp_context, whatever_kept=whatever_kept, float_products=float_products, steps=steps)
        return o.transpose(1, 2), *states
    if neg_eigval and not sigmoid:
        raise ValueError("allow_neg_eigval is True, expected use_beta_sigmoid_in_kernel=True with it")
    if gate is not None:
        inputs = inputs._replace(A_log=gate.A_log, dt_bias=gate.dt_bias)
    options = DeltaOptions(rule, _number("scale", scale), _flag("use_qk_l2norm_in_kernel", l2norm), gate is not None,
                           math.nan if gate is None else gate.lower_bound,
                           _flag("use_beta_sigmoid_in_kernel", sigmoid), _flag("allow_neg_eigval", neg_eigval),
                           _flag("state_v_first", v_first), float_products=float_products,
                           output_final_state=bool(output_final_state), whatever_kept=whatever_kept,
                           steps=_options.whole("steps", steps))
    if cp_context is not None:
        if output_final_state or state_interval is not None:
            raise ValueError("output_final_state or return_intermediate_states is True, expected False with cp_context")
        from .distributed._delta_rule import with_context
        return with_context(cp_context, inputs, options)
    if state_interval is None:
        o, state = _ops.call(FAMILY, inputs, options)
        return o, state if output_final_state else None
    return _run_with_states(inputs, options._replace(state_interval=state_interval))


def _run_with_states(inputs: DeltaInputs, options: DeltaOptions):
    """_run without gradients, and the states, as k."""
    inputs = _route.autocast(inputs, FAMILY.casts)
    q, v, cu_seqlens = inputs.q, inputs.v, inputs.cu_seqlens
    if _route.needs_gradient(inputs):
        raise ValueError("return_intermediate_states is True, expected False where gradients are recorded")
    if torch.jit.is_tracing():
        raise ValueError("return_intermediate_states is True, expected False within torch.jit.trace")
    if cu_seqlens is not None:  # how many states there are is asked before the call
        cu_seqlens = cu_seqlens.cpu()
        inputs = inputs._replace(cu_seqlens=cu_seqlens)
    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    o, final_state = _calls.empty_delta(inputs, options)
    shape = _calls.state_shape(q, v, cu_seqlens, options.state_v_first)
    chunks = sum((n + options.state_interval - 1) // options.state_interval for n in lengths)
    states = _calls.new_state(q, (q.shape[0], chunks, *shape[1:]))
    if not q.is_meta:
        _native.delta_forward(_calls.with_whole_rows(inputs), options, (o, final_state, states), _calls.AUTOMATIC,
                              _calls.threads(), False)
    return o, final_state, states.to(inputs.k.dtype)


def _old_layout(kwargs: dict, state_v_first: bool) -> bool:
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first and its old name transpose_state_layout are both given, expected one")
    warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=3)
    return kwargs.pop("transpose_state_layout")


def _refuse_rest(function: str, kwargs: dict, cu_seqlens=None, cu_seqlens_cpu=None,
                 chunk_sizes=()) -> None:
    """What flash-linear-attention takes and we do not."""
    if chunk_sizes and (chunk_size := kwargs.pop("chunk_size", 64)) not in chunk_sizes:
        expected = {(64,): "64 for GDN-2", (32, 64): "either 32 or 64"}.get(chunk_sizes, "16, 32, or 64")  # its words
        raise ValueError(f"`chunk_size` must be {expected}, got {chunk_size}")
    if kwargs.pop("head_first", False):
        raise ValueError("head_first is True, expected [B, T, H, ...] tensors")
    for name in kwargs:
        raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu is given without cu_seqlens, expected both or neither")
