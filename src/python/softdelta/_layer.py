"""The causal convolution and the gated norm around a delta rule, on arrays of any library."""
from __future__ import annotations

from . import _native, _options
from ._arrays import Arrays, bounds_of, shape_of
from ._attention import new_gradients
from ._records import (CONVOLUTION_WANTED, NORM_WANTED, ConvolutionGradients, ConvolutionInputs, ConvolutionOptions,
                       ConvolutionOutputs, NormGradients, NormInputs, NormOptions, NormOutputs)


def causal_convolution_forward(x, weight, bias=None, *, initial_state=None, cu_seqlens=None, state_indices=None,
                               final_state_indices=None, has_initial_state=None, activation="none", y=None,
                               final_state=None, engine="automatic", threads=None, dtype=None):
    """Causal convolution of each channel by itself: y_t = act(bias + Σ_{i<W} weight_i · x_{t−W+1+i}).

    B batch, T tokens, C channels, W width, N sequences, S tokens of a state. Arrays speak DLPack or the buffer protocol,
    lie on the CPU, have any strides (channels innermost are quickest), and are f32, bf16, f16 (f64 with the reference) in
    any mixture.

    x              [B, T, C]
    weight         [C, W]; weight[:, W−1] is the newest token's. W ≤ 8; engine "reference" takes wider ones
    bias           [C], 0 by default
    initial_state  [N, C, S], S ≥ W − 1: the tokens before the first, the newest last; 0 by default
    cu_seqlens     [N+1] i32 or i64: N packed sequences, B = 1
    state_indices  [N]: sequence n uses this entry of a pool of states [pool, C, S]; -1: no sequence, y is 0
    final_state_indices, has_initial_state  [N] as delta_forward's
    activation     "none" or "silu"
    y, final_state where to write; new arrays by default. final_state may be initial_state itself
    engine, threads, dtype  as attention_forward's

    Returns y [B, T, C] and final_state [N, C, S], both as x; S is the initial state's, else W − 1. Raises ValueError
    naming the argument, and softdelta.Unsupported.
    """
    a = Arrays(x, dtype, "softdelta.torch.causal_conv1d")
    batch, tokens, channels = shape_of("x", x, 3, "[B, T, C]")
    width = shape_of("weight", weight, 2, "[C, W]")[1]
    sequences = batch if cu_seqlens is None else bounds_of("cu_seqlens", cu_seqlens) - 1
    if y is None:
        y = a.empty((batch, tokens, channels), a.dtype_of(x), x)
    if final_state is None:
        _options.expect_pool(state_indices=state_indices, final_state_indices=final_state_indices)
        kept = max(width - 1, 0)
        if initial_state is not None:
            kept = shape_of("initial_state", initial_state, 3, "[N, C, S]")[2]
        final_state = a.empty((sequences, channels, kept), a.dtype_of(x), x)
    inputs = a.read(ConvolutionInputs(x=x, weight=weight, bias=bias, initial_state=initial_state, cu_seqlens=cu_seqlens,
                                      state_indices=state_indices, final_state_indices=final_state_indices,
                                      has_initial_state=has_initial_state))
    outputs = ConvolutionOutputs(y=a.writable("y", y), final_state=a.writable("final_state", final_state))
    _native.convolution_forward(inputs, _activation(activation), outputs, *_options.execution(engine, threads), a.bf16)
    return a.finish(y), a.finish(final_state)


def causal_convolution_step(x, weight, state, bias=None, *, state_indices=None, y=None, **arguments):
    """One token of decode, or a few: causal_convolution_forward with the state updated in place.

    state [N, C, S], S ≥ W − 1, a writable array; with state_indices [N] a pool [pool, C, S], of which entry
    state_indices[n] belongs to sequence n. The rest as causal_convolution_forward's. Returns y.
    """
    if state is None:
        raise ValueError("state is None, expected a writable array [N, C, S]")
    return causal_convolution_forward(x, weight, bias, initial_state=state, final_state=state,
                                      state_indices=state_indices, y=y, **arguments)[0]


def causal_convolution_backward(x, weight, dy=None, bias=None, *, dfinal_state=None, initial_state=None,
                                cu_seqlens=None, activation="none", wanted=None, gradients=None, engine="automatic",
                                threads=None, dtype=None):
    """Gradients of a loss by the convolution's inputs, from dy [B, T, C] or dfinal_state [N, C, S], or both.

    Inputs and options are causal_convolution_forward's. wanted names the inputs to differentiate by, of x weight bias
    initial_state; all that are given by default. gradients {"dx": array, …} says where to write; new arrays by default.
    Returns {"dx": array, …}, each of the shape and type of its input. Sums over tokens run in an order that shapes fix.
    Raises ValueError, Unsupported.
    """
    a = Arrays(x, dtype, "softdelta.torch.causal_conv1d")
    inputs = ConvolutionInputs(x=x, weight=weight, bias=bias, initial_state=initial_state, cu_seqlens=cu_seqlens)
    results = new_gradients(a, {n: getattr(inputs, n) for n in CONVOLUTION_WANTED}, wanted, gradients)
    inputs = a.read(inputs)
    given = a.read(ConvolutionGradients(dy=dy, dfinal_state=dfinal_state))
    to_write = given._replace(**{n: a.writable(n, r) for n, r in results.items()})
    _native.convolution_backward(inputs, _activation(activation), to_write, *_options.execution(engine, threads), a.bf16)
    return {name: a.finish(r) for name, r in results.items()}


def _activation(activation) -> ConvolutionOptions:
    return ConvolutionOptions(_options.number_of(_options.ACTIVATION, "activation", activation))


def gated_norm_forward(x, z=None, weight=None, *, gate="silu", epsilon=1e-6, y=None, engine="automatic", threads=None,
                       dtype=None):
    """The gated norm over the D channels of each row: y = weight · x / √(mean x² + epsilon) · gate(z).

    x, z    [B, T, H, D], any strides; z is given unless gate is "none"
    weight  [D], 1 by default
    gate    "none", "silu" or "sigmoid"
    y       where to write; a new array by default
    engine, threads, dtype  as attention_forward's

    Returns y [B, T, H, D], as x. Raises ValueError naming the argument, and softdelta.Unsupported.
    """
    a = Arrays(x, dtype, "softdelta.torch.rms_norm_gated")
    shape = shape_of("x", x, 4, "[B, T, H, D]")
    if y is None:
        y = a.empty(shape, a.dtype_of(x), x)
    inputs = a.read(NormInputs(x=x, z=z, weight=weight))
    _native.norm_forward(inputs, _gate(gate, epsilon), NormOutputs(y=a.writable("y", y)),
                         *_options.execution(engine, threads), a.bf16)
    return a.finish(y)


def gated_norm_backward(x, dy, z=None, weight=None, *, gate="silu", epsilon=1e-6, wanted=None, gradients=None,
                        engine="automatic", threads=None, dtype=None):
    """Gradients of a loss by the norm's inputs, from dy [B, T, H, D].

    Inputs and options are gated_norm_forward's. wanted names the inputs to differentiate by, of x z weight; all that are
    given by default. gradients {"dx": array, …} says where to write; new arrays by default. Returns {"dx": array, …},
    each of the shape and type of its input. The sum over rows runs in an order that shapes fix. Raises ValueError,
    Unsupported.
    """
    a = Arrays(x, dtype, "softdelta.torch.rms_norm_gated")
    inputs = NormInputs(x=x, z=z, weight=weight)
    results = new_gradients(a, {n: getattr(inputs, n) for n in NORM_WANTED}, wanted, gradients)
    inputs = a.read(inputs)
    to_write = a.read(NormGradients(dy=dy))._replace(**{n: a.writable(n, r) for n, r in results.items()})
    _native.norm_backward(inputs, _gate(gate, epsilon), to_write, *_options.execution(engine, threads), a.bf16)
    return {name: a.finish(r) for name, r in results.items()}


def _gate(gate, epsilon) -> NormOptions:
    return NormOptions(_options.number_of(_options.ACTIVATION, "gate", gate), _options.number("epsilon", epsilon))
