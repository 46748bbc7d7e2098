"""softdelta for JAX on CPUs: softmax attention and the delta rules, under jit, grad and vmap.

Where softdelta was built beside jaxlib, XLA calls the library itself (XLA FFI). Elsewhere each call goes through
jax.pure_callback: it waits for the interpreter, and copies its results. There are no second derivatives and no jvp.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _native, _options
from ._arrays import shape_of
from ._attention import options_of as attention_options_of
from ._delta_rule import options_of as delta_options_of
from ._records import (ATTENTION_WANTED, DELTA_WANTED, AttentionGradients, AttentionInputs, AttentionOutputs,
                       DeltaGradients, DeltaInputs, DeltaOutputs)

__all__ = ["delta_rule", "dot_product_attention"]


class _Family(NamedTuple):
    name: str
    inputs: type
    outputs: type
    gradients: type
    wanted: tuple[str, ...]
    results: tuple[str, ...]


_ATTENTION = _Family("attention", AttentionInputs, AttentionOutputs, AttentionGradients, ATTENTION_WANTED, ("o", "lse"))
_DELTA = _Family("delta", DeltaInputs, DeltaOutputs, DeltaGradients, DELTA_WANTED, ("o", "final_state"))


class _Call(NamedTuple):
    """What is fixed when JAX traces a call."""
    family: _Family
    names: tuple[str, ...]  # of the operands that are given
    options: tuple
    threads: int


def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
                          key_value_seq_lengths=None, local_window_size=None, sink=None, softcap=0.0, return_lse=False):
    """jax.nn.dot_product_attention: query [B, T, N, H], key [B, S, K, H], value [B, S, K, Hv], B perhaps absent; N is a
    multiple of K. bias (floats, added) and mask (bool, true keeps) broadcast to [B, N, T, S]; is_causal: key j ≤ query i;
    key_value_seq_lengths [B]; local_window_size w or (left, right): keys i − left … i + right.

    Ours: sink [N], a logit that joins the softmax sum and has no value; softcap c: scores become c·tanh(s/c).
    Differentiable once by query, key, value, bias and sink. A row without keys is 0, not NaN. Returns o [B, T, N, Hv], as
    value; with return_lse also lse [B, N, T]. Raises ValueError naming the argument.
    """
    if all(getattr(x, "ndim", None) == 3 for x in (query, key, value)):
        if key_value_seq_lengths is not None:
            raise ValueError("key_value_seq_lengths is given, expected None without a batch dimension")
        results = dot_product_attention(
            query[None], key[None], value[None], bias, mask, scale=scale, is_causal=is_causal,
            local_window_size=local_window_size, sink=sink, softcap=softcap, return_lse=return_lse)
        return jax.tree.map(lambda x: x[0], results)
    batch, rows, heads, _ = shape_of("query", query, 4, "[B, T, N, H]")
    keys = shape_of("key", key, 4, "[B, S, K, H]")[1]
    value_size = shape_of("value", value, 4, "[B, S, K, Hv]")[3]
    window = (local_window_size, ) * 2 if isinstance(local_window_size, int) else local_window_size or (-1, -1)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"local_window_size is {local_window_size!r}, expected a whole number or two (left, right)")
    left, right = window
    if local_window_size is not None and rows != keys and not is_causal:
        raise ValueError(f"local_window_size is {local_window_size}, expected None for {rows} queries and {keys} keys without "
                         "is_causal: they share no diagonal")
    if mask is not None and mask.dtype != bool:
        raise ValueError(f"mask holds {mask.dtype}, expected bool; floats to add are bias")
    if key_value_seq_lengths is not None:
        there = (jnp.arange(keys) < key_value_seq_lengths[:, None])[:, None, None]
        mask = there if mask is None else mask & there
    mask, bias = (x if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (mask, bias))
    options = attention_options_of(scale, "top_left" if is_causal else "none", left, right, softcap, "minus_infinity", -1, 0, 0)
    results = (jax.ShapeDtypeStruct((batch, rows, heads, value_size), value.dtype),
               jax.ShapeDtypeStruct((batch, heads, rows), _wide(query)))
    o, lse = _run(_ATTENTION, AttentionInputs(query, key, value, mask=mask, bias=bias, sink=sink), options, results)
    return (o, lse) if return_lse else o


def delta_rule(rule, q, k, v, *, g=None, g_gamma=None, beta=None, p=None, initial_state=None, A_log=None, dt_bias=None,
               cu_seqlens=None, scale=None, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, lower_bound=None,
               use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False):
    """softdelta.delta_forward for JAX: the same rules, shapes and options, differentiable once by every operand of floats.

    Returns o [B, T, HV, V], as v, and the final state [N, HV, K, V], f32. Raises ValueError naming the argument.
    """
    batch, _, _, key_size = shape_of("q", q, 4, "[B, T, H, K]")
    heads, value_size = shape_of("v", v, 4, "[B, T, HV, V]")[2:]
    options = delta_options_of(rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound,
                               use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first)
    sequences = batch if cu_seqlens is None else shape_of("cu_seqlens", cu_seqlens, 1, "[N+1]")[0] - 1
    state = (value_size, key_size) if state_v_first else (key_size, value_size)
    results = (jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct((sequences, heads, *state), _wide(q)))
    inputs = DeltaInputs(q=q, k=k, v=v, g=g, g_gamma=g_gamma, beta=beta, p=p, initial_state=initial_state, A_log=A_log,
                         dt_bias=dt_bias, cu_seqlens=cu_seqlens)
    return _run(_DELTA, inputs, options, results)


# ----------------------------------------------------------------------------------------------------------------------


def _wide(x):
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _run(family, inputs, options, results):
    given = {n: jnp.asarray(x) for n, x in zip(inputs._fields, inputs) if x is not None}
    call = _Call(family, tuple(given), tuple(options), _options.threads)
    return _differentiable(call, results, *given.values())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(call, results, *operands):
    return _invoke(call, "forward", call.names, operands, call.family.results, results)


def _forward(call, results, *operands):
    values = [x.value for x in operands]
    found = _differentiable(call, results, *values)
    return found, (values, found, [() if x.perturbed else None for x in operands])  # ( ) and None: no values, so they are fixed


def _backward(call, _, saved, incoming):
    values, found, perturbed = saved
    given = dict(zip(call.names, values))
    wanted = [n for n, p in zip(call.names, perturbed) if p is not None and n in call.family.wanted]
    if call.family is _ATTENTION:
        given |= dict(zip(("o", "lse"), found))
    zero = jax.custom_derivatives.SymbolicZero
    given |= {"d_o" if n == "o" else f"d{n}": x for n, x in zip(call.family.results, incoming) if not isinstance(x, zero)}
    if call.family is _ATTENTION and "d_o" not in given:
        given["d_o"] = jnp.zeros_like(found[0])
    shapes = tuple(jax.ShapeDtypeStruct(given[n].shape, given[n].dtype) for n in wanted)
    grads = {}
    if wanted:
        grads = dict(zip(wanted, _invoke(call, "backward", tuple(given), tuple(given.values()),
                                         tuple(f"d{n}" for n in wanted), shapes)))
    return tuple(grads.get(n) for n in call.names)


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)


def _invoke(call: _Call, direction: str, names, operands, result_names, results) -> tuple:
    """The library's function: operands and results by their names."""
    function = f"{call.family.name}_{direction}"
    if not _by_xla:
        return tuple(jax.pure_callback(functools.partial(_on_host, call, direction, names, result_names, results), results,
                                       *operands, vmap_method="sequential"))
    foreign = jax.ffi.ffi_call("softdelta", results, vmap_method="sequential")
    return tuple(foreign(*operands, function=function, operands=" ".join(names), results=" ".join(result_names),
                         options=np.array(call.options, np.float64), threads=np.int64(call.threads)))


def _on_host(call: _Call, direction: str, names, result_names, results, *operands) -> tuple:
    given = {n: _readable(np.asarray(x)) for n, x in zip(names, operands)}
    made = {n: np.empty(r.shape, r.dtype) for n, r in zip(result_names, results)}
    to_write = {n: _readable(x) for n, x in made.items()}
    family = call.family
    inputs = family.inputs(**{n: x for n, x in given.items() if n in family.inputs._fields})
    if direction == "forward":
        others = family.outputs(**to_write)
    else:
        others = family.gradients(**{n: x for n, x in given.items() if n not in family.inputs._fields}, **to_write)
    getattr(_native, f"{family.name}_{direction}")(inputs, call.options, others, "automatic", call.threads, True)
    return tuple(made.values())


def _readable(x):
    """bf16, which NumPy has not, as the native module takes it."""
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


_by_xla = hasattr(_native, "xla_handler")
if _by_xla:
    jax.ffi.register_ffi_target("softdelta", _native.xla_handler(), platform="cpu")
