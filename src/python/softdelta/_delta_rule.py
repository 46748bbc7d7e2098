"""The delta rules on arrays of any library."""
from __future__ import annotations

from . import _native, _options
from ._arrays import Arrays, bounds_of, shape_of
from ._attention import new_gradients
from ._records import DELTA_ROWS, DELTA_WANTED, DeltaGradients, DeltaInputs, DeltaOptions, DeltaOutputs


def delta_forward(rule, q, k, v, *, g=None, g_gamma=None, beta=None, p=None, initial_state=None, A_log=None,
                  dt_bias=None, cu_seqlens=None, state_indices=None, final_state_indices=None, has_initial_state=None,
                  snapshot_indices=None, scale=None, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                  lower_bound=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
                  state_interval=64, return_states=False, head_order="grouped", steps=1, o=None, final_state=None,
                  layout="bthd", engine="automatic", threads=None, dtype=None):
    """A delta rule: a state S [K, V] per value head, token by token; g is a natural logarithm, o = scale · Sᵀ q.

    rule is one of
      "delta_rule"        S ← S + k (β (v − Sᵀk))ᵀ                             Yang et al. 2024 (DeltaNet)
      "gated_delta_rule"  S ← e^g S, then as above; g per head                 Yang et al. 2025 (Gated DeltaNet)
      "kda"               S ← diag(e^g) S, then as above; g per key channel    Kimi Linear 2025
      "comba"             d = β (v − Sᵀp), S ← e^g S + k dᵀ                     Hu et al. 2025
      "simple_gla"        S ← e^g S + k vᵀ                                     Sun et al., Qin et al.
      "gla"               S ← diag(e^g) S + k vᵀ                               Yang et al. 2024 (GLA)
      "gdn2"              S ← diag(e^g) S, S ← S + k (β (v − Sᵀp))ᵀ             Gated DeltaNet-2
      "gated_delta_product"  as gated_delta_rule, the gate is optional         Siems et al. 2025, of several steps
      "dplr"              d = β (v − Sᵀp), S ← diag(e^g) S + k dᵀ               RWKV-7, of two steps

    A softdelta.Rule says other facts.

    B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K V head sizes, N sequences. Arrays speak
    DLPack or the buffer protocol, lie on the CPU, have any strides, and are f32, bf16, f16 (f64 with the reference) in
    any mixture. They are read where they are.

    q, k [B, T, H, K]   v [B, T, HV, V]   p [B, T, H, K] (comba, gdn2, dplr)
    g                [B, T, HV]; kda, gla, gdn2, dplr [B, T, HV, K]; −∞ wipes the state
    g_gamma          [HV] simple_gla: one gate for all tokens, instead of g
    beta             [B, T, HV], 1 by default
    initial_state    [N, HV, K, V], 0 by default
    cu_seqlens       [N+1] i32 or i64: N packed sequences, B = 1
    state_indices    [N]: sequence n uses this entry of a pool of states [pool, HV, K, V]; -1: no sequence, o is 0
    final_state_indices  [N]: its final state goes to this entry instead; -1: nowhere. Sequences may then begin from one
                     entry, but from none that another sequence writes
    has_initial_state    [N] bool: False: it begins from 0, whatever its entry holds
    snapshot_indices [B, NT]: the states of return_states go to these entries of final_state's pool; -1: nowhere
    scale            K^-1/2 by default
    use_qk_l2norm_in_kernel     q, k, p ← x / √(Σx² + 1e-6)
    use_gate_in_kernel          g is raw, the gate is −e^A_log · softplus(g + dt_bias), A_log [HV], dt_bias [HV] or, for
                                a gate per channel, [HV·K]; with lower_bound it is lower_bound · σ(e^A_log · (g + dt_bias))
    use_beta_sigmoid_in_kernel  beta is a logit, σ(beta) is used; times 2 with allow_neg_eigval
    state_v_first    states are [.., V, K]
    head_order       which key head value head h reads: "grouped", h // (HV // H), or "tiled", h % H
    steps            n rank-one updates of a token: k, v, p and beta have n·T rows, each step after the other
    return_states    also the states at every `state_interval`th row of a sequence [B, NT, HV, K, V]
    o, final_state   where to write; new arrays by default. final_state may be initial_state itself
    layout           "bthd", or "bhtd": q, k, v, p, g, beta and o have heads before tokens
    engine, threads, dtype  as attention_forward's

    Returns o [B, T, HV, V], as v, and final_state, f32 (f64 for f64); with return_states the states as a third.
    Raises ValueError naming the argument, and softdelta.Unsupported.
    """
    a = Arrays(q, dtype, recording(rule))
    shape_of("q", q, 4, "[B, T, H, K]")
    shape_of("v", v, 4, "[B, T, HV, V]")
    heads_first = _options.number_of(_options.LAYOUT, "layout", layout)
    if heads_first:
        q, k, v, p, g, beta = (a.swapped(n, x) for n, x in zip(DELTA_ROWS, (q, k, v, p, g, beta)))
    batch, tokens, _, key_size = q.shape
    value_heads, value_size = v.shape[2:]
    _options.warn_if_swapped("v", tokens, value_heads, bool(heads_first))
    sequences = batch if cu_seqlens is None else bounds_of("cu_seqlens", cu_seqlens) - 1
    state_interval = _options.whole("state_interval", state_interval)
    if state_interval < 1:
        raise ValueError(f"state_interval is {state_interval}, expected a number of rows, 1 at least")
    state = (value_heads, value_size, key_size) if state_v_first else (value_heads, key_size, value_size)
    wide = "f64" if a.dtype_of(q) == "f64" else "f32"
    if o is None:
        rows = (value_heads, tokens) if heads_first else (tokens, value_heads)
        o = a.empty((batch, *rows, value_size), a.dtype_of(v), v)
    if final_state is None:
        _options.expect_pool(state_indices=state_indices, final_state_indices=final_state_indices,
                             snapshot_indices=snapshot_indices)
        final_state = a.empty((sequences, *state), wide)
    states = None
    if return_states:
        lengths = [tokens] if cu_seqlens is None else [int(y) - int(x) for x, y in zip(cu_seqlens, cu_seqlens[1:])]
        chunks = sum((n + state_interval - 1) // state_interval for n in lengths)
        states = a.empty((batch, chunks, *state), wide)
    inputs = a.read(DeltaInputs(q=q, k=k, v=v, g=g, g_gamma=g_gamma, beta=beta, p=p, initial_state=initial_state,
                                A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens, state_indices=state_indices,
                                final_state_indices=final_state_indices, has_initial_state=has_initial_state,
                                snapshot_indices=snapshot_indices))
    outputs = DeltaOutputs(o=a.writable("o", a.swapped("o", o) if heads_first else o), final_state=a.writable("final_state", final_state),
                           states=a.writable("states", states))
    options = options_of(rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound,
                         use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, state_interval, head_order, steps)
    _native.delta_forward(inputs, options, outputs, *_options.execution(engine, threads), a.bf16)
    some = a.finish(o), a.finish(final_state)
    return (*some, a.finish(states)) if return_states else some


def delta_step(rule, q, k, v, state, *, state_indices=None, o=None, **arguments):
    """One token of decode, or a few: delta_forward with the state updated in place.

    state [N, HV, K, V] (or [.., V, K] with state_v_first), a writable array; with state_indices [N] a pool
    [pool, HV, K, V], of which entry state_indices[n] belongs to sequence n. The rest as delta_forward's. Returns o.
    """
    if state is None:
        raise ValueError("state is None, expected a writable array [N, HV, K, V]")
    return delta_forward(rule, q, k, v, initial_state=state, final_state=state, state_indices=state_indices, o=o,
                         **arguments)[0]


def delta_backward(rule, q, k, v, do=None, *, dfinal_state=None, g=None, g_gamma=None, beta=None, p=None,
                   initial_state=None, A_log=None, dt_bias=None, cu_seqlens=None, scale=None,
                   use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, lower_bound=None,
                   use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, head_order="grouped", steps=1,
                   wanted=None, gradients=None, layout="bthd", engine="automatic", threads=None, dtype=None):
    """Gradients of a loss by a delta rule's inputs, from do [B, T, HV, V] or dfinal_state, or both.

    Inputs, options and layout are delta_forward's. wanted names the inputs to differentiate by, of q k v g g_gamma beta p
    initial_state A_log dt_bias; all that are given by default. gradients {"dq": array, …} says where to write; new
    arrays by default. Returns {"dq": array, …}, each of the shape and type of its input. With HV > H, dq, dk and dp are
    sums over the group in a fixed order. Raises ValueError, Unsupported.
    """
    a = Arrays(q, dtype, recording(rule))
    inputs = DeltaInputs(q=q, k=k, v=v, g=g, g_gamma=g_gamma, beta=beta, p=p, initial_state=initial_state,
                         A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens)
    results = new_gradients(a, {n: getattr(inputs, n) for n in DELTA_WANTED}, wanted, gradients)
    to_write = results
    if _options.number_of(_options.LAYOUT, "layout", layout):
        inputs = inputs._replace(**{n: a.swapped(n, getattr(inputs, n)) for n in DELTA_ROWS})
        to_write = {n: a.swapped(n, x) if n[1:] in DELTA_ROWS else x for n, x in results.items()}
        do = a.swapped("do", do)
    inputs = a.read(inputs)
    given = a.read(DeltaGradients(d_o=do, dfinal_state=dfinal_state))
    to_write = given._replace(**{n: a.writable(n, x) for n, x in to_write.items()})
    options = options_of(rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound,
                         use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, head_order=head_order, steps=steps)
    _native.delta_backward(inputs, options, to_write, *_options.execution(engine, threads), a.bf16)
    return {name: a.finish(x) for name, x in results.items()}


def recording(rule):
    """The function that records gradients."""
    return "softdelta.torch.delta_rule" if isinstance(rule, _options.Rule) else f"softdelta.torch.chunk_{rule}"


def options_of(rule, scale, l2norm, gate, lower_bound, sigmoid, neg_eigval, v_first, state_interval=64,
               head_order="grouped", steps=1) -> DeltaOptions:
    """A rule by its name or facts, and its options, checked."""
    return DeltaOptions(
        rule=_options.rule_number(rule), scale=_options.number("scale", scale),
        use_qk_l2norm_in_kernel=_options.flag("use_qk_l2norm_in_kernel", l2norm),
        use_gate_in_kernel=_options.flag("use_gate_in_kernel", gate),
        lower_bound=_options.number("lower_bound", lower_bound),
        use_beta_sigmoid_in_kernel=_options.flag("use_beta_sigmoid_in_kernel", sigmoid),
        allow_neg_eigval=_options.flag("allow_neg_eigval", neg_eigval),
        state_v_first=_options.flag("state_v_first", v_first), state_interval=state_interval,
        head_order=_options.number_of(_options.HEAD_ORDER, "head_order", head_order), steps=_options.whole("steps", steps))
