"""Torch tensors to the library: results are allocated here and filled without a copy. No autograd. Tensors and options
are the records of softdelta._records; rules and the like are numbers, NaN is a default."""
from __future__ import annotations

import operator

import torch
from torch import Tensor

from .. import _native, _options
from .._arrays import bounds_of
from .._records import (ATTENTION_WANTED, CONVOLUTION_WANTED, DELTA_WANTED, NORM_WANTED, AttentionInputs,
                        AttentionOptions, ConvolutionInputs, ConvolutionOptions, DeltaInputs, DeltaOptions, NormInputs,
                        NormOptions)
from ._route import expect_tensors

AUTOMATIC = "automatic"


_torch_threads = torch.get_num_threads


def threads() -> int:
    return _options.threads or _torch_threads()


def wide(t: Tensor) -> torch.dtype:
    """The type of what is kept in f32: f64 for f64."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def state_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, v_first: bool) -> tuple:
    n = q.shape[0] if cu_seqlens is None else bounds_of("cu_seqlens", cu_seqlens) - 1
    sizes = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
    return (n, v.shape[2], *sizes)


def new_state(q: Tensor, shape: tuple) -> Tensor:
    dtype = wide(q)
    return q.new_empty(shape) if q.dtype == dtype else torch.empty(shape, dtype=dtype, device=q.device)  # the first is quicker


def whole_rows(t: Tensor | None) -> Tensor | None:
    """The fast kernels of a GPU read 16-bit rows by units of 16 bytes: what lies otherwise, as the gradient of a sum does,
    is copied."""
    if t is None or t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t
    if not t.is_cuda or t.dim() == 0 or t.element_size() != 2 or t.shape[-1] % 8 != 0:
        return t
    fits = t.stride(-1) == 1 and t.data_ptr() % 16 == 0
    fits = fits and all(stride > 0 and stride % 8 == 0 for size, stride in zip(t.shape[:-1], t.stride()) if size > 1)
    return t if fits else t.contiguous()


def with_whole_rows(inputs: DeltaInputs) -> DeltaInputs:
    q, k, v, p = given = inputs.q, inputs.k, inputs.v, inputs.p
    if not q.is_cuda:
        return inputs
    whole = whole_rows(q), whole_rows(k), whole_rows(v), whole_rows(p)
    if all(map(operator.is_, whole, given)):
        return inputs
    q, k, v, p = whole
    return inputs._replace(q=q, k=k, v=v, p=p)


# ----------------------------------------------------------------------------------------------------------------------
# What a forward pass on a GPU keeps for its backward pass

_most_kept = 0  # set_most_kept


def set_most_kept(n: int) -> None:
    """How many bytes a delta rule's forward pass on a GPU may keep for its backward pass, which then takes less time: of
    each token and value head 1.8 KB of KDA, 1.1 KB of the other rules. A call that would keep more keeps nothing. 0, the
    default: none does. Gradients may differ in their last bits. Raises ValueError for a number that is negative."""
    global _most_kept
    if _options.whole("n", n) < 0:
        raise ValueError(f"n is {n}, expected 0 bytes or more")
    _most_kept = n


def new_kept(inputs: DeltaInputs, options: DeltaOptions) -> Tensor | None:
    """Memory for what this call keeps; None: nothing. Shapes alone decide, never what is free: last bits depend on it."""
    if not inputs.q.is_cuda or (_most_kept == 0 and not options.whatever_kept):
        return None
    size = _native.delta_kept_size(inputs, options, AUTOMATIC)
    if size == 0 or (size > _most_kept and not options.whatever_kept):
        return None
    return inputs.q.new_empty(size, dtype=torch.uint8)


def _kept_at(kept: Tensor | None = None) -> tuple[int, ...]:
    """The last arguments of the library's calls."""
    return () if kept is None else (0, 0, kept.data_ptr(), kept.numel())


# ----------------------------------------------------------------------------------------------------------------------


def empty_delta(inputs: DeltaInputs, options: DeltaOptions):
    """What delta_forward writes."""
    q, v = inputs.q, inputs.v
    if q is None or v is None or q.dim() != 4 or v.dim() != 4:
        refuse_ranks(q, v)
    _options.warn_if_swapped("v", v.shape[1], v.shape[2], False)
    o = v.new_empty((*q.shape[:2], *v.shape[2:]))
    if not options.output_final_state:
        return o, None
    return o, new_state(q, state_shape(q, v, inputs.cu_seqlens, options.state_v_first))


def delta_forward(inputs: DeltaInputs, options: DeltaOptions, kept: Tensor | None = None):
    """o [B, T, HV, V] and the final state, or None."""
    results = empty_delta(inputs, options)
    _native.delta_forward(with_whole_rows(inputs), options, results, AUTOMATIC, threads(), False, *_kept_at(kept))
    return results


def delta_forward_keeping(inputs: DeltaInputs, options: DeltaOptions):
    """The same, and what delta_backward needs not compute again, or None."""
    results, inputs = empty_delta(inputs, options), with_whole_rows(inputs)
    kept = new_kept(inputs, options)
    _native.delta_forward(inputs, options, results, AUTOMATIC, threads(), False, *_kept_at(kept))
    return results, (kept,)


def delta_backward(inputs: DeltaInputs, options: DeltaOptions, kept, incoming, wanted) -> list:
    """Gradients of DELTA_WANTED from those of o and the final state; None where not wanted. kept: of
    delta_forward_keeping, or nothing."""
    do, dfinal_state = incoming
    grads = empty_gradients(inputs, DELTA_WANTED, wanted)
    if do is None and dfinal_state is None:
        return [g if g is None else g.zero_() for g in grads]
    inputs = with_whole_rows(inputs)
    _native.delta_backward(inputs, options, (whole_rows(do), dfinal_state, *grads), AUTOMATIC, threads(), False,
                           *_kept_at(*kept))
    return grads


def empty_gradients(inputs, names, wanted) -> list:
    return [torch.empty_like(getattr(inputs, n)) if w else None for n, w in zip(names, wanted)]


def empty_attention(inputs: AttentionInputs, options: AttentionOptions, keeps: bool = False):
    """What attention_forward writes: o [B, Lq, H, Dv] and lse [B, H, Lq], or None. With heads_first o is [B, H, Lq, Dv] in
    the memory layout of the other."""
    q, v = inputs.q, inputs.v
    size, dtype = None, None
    if inputs.k_scale is not None or inputs.v_scale is not None:
        size, dtype = quantised_value_size(inputs), q.dtype
    elif q is None or v is None or q.dim() != 4 or v.dim() != 4:
        refuse_rank("q", q, 4, "[B, Lq, H, D]")
        refuse_rank("v", v, 4, "[B, Lk, Hk, Dv]")
    else:
        size, dtype = v.shape[3], v.dtype
    if options.heads_first:
        batch, heads, rows, _ = q.shape
        o = v.new_empty_strided((batch, heads, rows, size), (rows * heads * size, size, heads * size, 1), dtype=dtype)
    else:
        batch, rows, heads, _ = q.shape
        o = torch.empty((batch, rows, heads, size), dtype=dtype, device=v.device)
    _options.warn_if_swapped("q", rows, heads, options.heads_first)
    if not (options.with_lse or keeps):
        return o, None
    return o, torch.empty((batch, heads, rows), dtype=wide(q), device=q.device)


def attention_forward(inputs: AttentionInputs, options: AttentionOptions, keeps: bool = False):
    """o and lse, or None. With heads_first q, k, v and o are [B, H, L, D]."""
    results = empty_attention(inputs, options, keeps)
    _native.attention_forward(inputs, options, results, AUTOMATIC, threads(), False, options.heads_first)
    return results


def attention_forward_keeping(inputs: AttentionInputs, options: AttentionOptions):
    """The same, and o and lse, which attention_backward takes."""
    results = attention_forward(inputs, options, True)
    return results if options.with_lse else (results[0], None), results


def quantised_value_size(inputs: AttentionInputs) -> int:
    """Dv where keys or values have scales: blocks of 32 are a dimension of their own."""
    refuse_rank("q", inputs.q, 4, "[B, Lq, H, D]")
    if inputs.v_scale is None or inputs.v is None or inputs.v.dim() != 5:
        refuse_rank("v", inputs.v, 4, "[B, Lk, Hk, Dv]")
        return inputs.v.shape[3]
    return 32 * inputs.v.shape[3]


def attention_backward(inputs: AttentionInputs, options: AttentionOptions, results, incoming, wanted) -> list:
    """Gradients of ATTENTION_WANTED from o, lse and their gradients; None where not wanted."""
    do, dlse = incoming
    grads = empty_gradients(inputs, ATTENTION_WANTED, wanted)
    if not any(wanted):  # slopes, which have none
        return grads
    if do is None:
        do = inputs.v.new_zeros((*inputs.q.shape[:3], inputs.v.shape[3]))
    _native.attention_backward(inputs, options, (*results, whole_rows(do), dlse, *grads), AUTOMATIC, threads(), False,
                               options.heads_first)
    return grads


def empty_convolution(inputs: ConvolutionInputs, options: ConvolutionOptions):
    """What convolution_forward writes."""
    x = inputs.x
    refuse_rank("x", x, 3, "[B, T, C]")
    state = x.new_empty(final_state_shape(inputs, options)) if options.kept >= 0 else None
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), state


def convolution_forward(inputs: ConvolutionInputs, options: ConvolutionOptions):
    """y [B, T, C] and the last options.kept tokens of each sequence, or None; both as x."""
    results = empty_convolution(inputs, options)
    _native.convolution_forward(inputs, options, results, AUTOMATIC, threads(), False)
    return results


def final_state_shape(inputs: ConvolutionInputs, options: ConvolutionOptions) -> tuple:
    x, bounds = inputs.x, inputs.cu_seqlens
    return x.shape[0] if bounds is None else bounds_of("cu_seqlens", bounds) - 1, x.shape[2], options.kept


def convolution_backward(inputs: ConvolutionInputs, options: ConvolutionOptions, _, incoming, wanted) -> list:
    """Gradients of CONVOLUTION_WANTED from those of y and the final state; None where not wanted."""
    grads = empty_gradients(inputs, CONVOLUTION_WANTED, wanted)
    if all(t is None for t in incoming):
        return [g if g is None else g.zero_() for g in grads]
    _native.convolution_backward(inputs, options, (*incoming, *grads), AUTOMATIC, threads(), False)
    return grads


def empty_norm(inputs: NormInputs, _):
    """What norm_forward writes."""
    refuse_rank("x", inputs.x, 4, "[B, T, H, D]")
    return torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device),


def norm_forward(inputs: NormInputs, options: NormOptions):
    """y [B, T, H, D], as x."""
    results = empty_norm(inputs, options)
    _native.norm_forward(inputs, options, results, AUTOMATIC, threads(), False)
    return results


def norm_backward(inputs: NormInputs, options: NormOptions, _, incoming, wanted) -> list:
    """Gradients of NORM_WANTED from that of y; None where not wanted."""
    grads = empty_gradients(inputs, NORM_WANTED, wanted)
    _native.norm_backward(inputs, options, (*incoming, *grads), AUTOMATIC, threads(), False)
    return grads


def refuse_ranks(q: Tensor, v: Tensor) -> None:
    refuse_rank("q", q, 4, "[B, T, H, K]")
    refuse_rank("v", v, 4, "[B, T, HV, V]")


def refuse_rank(name: str, t: Tensor, rank: int, shape: str) -> None:
    if t is None:
        raise ValueError(f"{name} is None, expected a tensor {shape}")
    expect_tensors(**{name: t})
    if t.dim() != rank:
        raise ValueError(f"{name} has {t.dim()} dimensions, expected {rank}: {shape}")
