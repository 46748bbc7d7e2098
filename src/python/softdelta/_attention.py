"""Softmax attention on arrays of any library."""
from __future__ import annotations

from . import _native, _options
from ._arrays import Arrays, shape_of
from ._records import ATTENTION_WANTED, AttentionGradients, AttentionInputs, AttentionOptions, AttentionOutputs

_RECORDING = "softdelta.torch.flash_attn_func"


def attention_forward(q, k, v, *, mask=None, bias=None, sink=None, cu_seqlens_q=None, cu_seqlens_k=None,
                      cache_seqlens=None, block_table=None, alibi_slopes=None, bias_slopes=None, k_scale=None,
                      v_scale=None, scale=None, causal="none", window_left=-1, window_right=-1, softcap=0.0,
                      empty_row="minus_infinity", top_w=-1, query_offset=0, key_offset=0, o=None, lse=None,
                      layout="bthd", engine="automatic", threads=None, dtype=None):
    """Softmax attention: s = softcap(scale · q kᵀ) + bias, p = softmax of s over the allowed keys, o = p v.

    B batch, Lq Lk lengths, H query heads, Hk key heads (H is a multiple of Hk), D Dv head sizes, N packed sequences.
    Arrays speak DLPack or the buffer protocol, lie on the CPU, have any strides, and are f32, bf16, f16 (f64 with the
    reference) in any mixture. They are read where they are.

    q [B, Lq, H, D]   k [B, Lk, Hk, D]   v [B, Lk, Hk, Dv]
    mask              bool, true keeps: [B|1, H|Hk|1, Lq|1, Lk|1]
    bias              float, as mask; added to the scaled scores; −∞ masks
    sink              [H] a logit that joins the softmax sum and has no value
    cu_seqlens_q, _k  [N+1] i32 or i64: packed sequences, q [1, ΣLq, H, D], k [1, ΣLk, Hk, D]
    cache_seqlens     [B] keys in use of each batch row, at most the rows of the cache; causal and window count with it
                      as Lk
    block_table       [B, max blocks] with cache_seqlens: k, v are pages [blocks, block rows, Hk, ·]
    cu_seqlens_q with cache_seqlens: packed queries, and each of the N sequences has its own cache, k [N, Lk, Hk, ·], or
                      row of block_table [N, max blocks]: prefill and decode in one batch
    alibi_slopes      [H] adds −slope·|i + Lk − Lq − j| to the score of query i and key j (ALiBi)
    bias_slopes       [H] multiplies bias, one number for each query head; −∞ masks whatever the slope
    k_scale, v_scale  floats [B|1, Lk|1, Hk|1, ·]: k, v are numbers of 8 or 4 bits, without gradients. int8 [.., D] and
                      scales [.., 1]; or blocks of 32 with a scale each, [.., D/32]: int8 [.., D/32, 32] (ggml's q8_0),
                      uint8 [.., D/32, 16] (q4_0: byte b has element b in its low half, b + 16 in its high one, each
                      plus 8). float8_e4m3fn of torch as int8
    scale             D^-1/2 by default
    causal            "none", "top_left" (j ≤ i), "bottom_right" (j ≤ i + Lk − Lq)
    window_left, _right  keys of query i: i + Lk − Lq − left … + right (top_left: i − left …); −1 is unbounded
    softcap           c·tanh(s/c) of the scaled scores, before the bias; 0 is off
    empty_row         lse of a row without keys: "minus_infinity", "plus_infinity", "zero"; its o is 0
    top_w             keeps the w largest biases of a row, slopes applied (dynamic mask attention); −1 is off
    query_offset, key_offset  of a call with some rows of a longer one: causal and window take query i and key j for
                      i + query_offset and j + key_offset; without alibi_slopes
    o, lse            where to write; new arrays by default
    layout            "bthd", or "bhtd": q, k, v and o are [B, H, L, ·], pages too; without k_scale and v_scale
    engine            "automatic", "fast", "reference" (f64 loops), "stages_f64", "stages_f32"
    threads           of this call; softdelta.set_num_threads by default. Results do not depend on it
    dtype             "bf16": arrays of uint16 hold bf16

    Returns o [B, Lq, H, Dv], as v (as q where there are scales), and lse [B, H, Lq], f32 (f64 for f64). lse is the natural
    logarithm of the sum of exponentials. Raises ValueError naming the argument, also for a tensor of torch whose gradient would be recorded, and
    softdelta.Unsupported. After Dao (FlashAttention),
    Shazeer (MQA), Ainslie (GQA), Shi (dynamic masks), Press (ALiBi).
    """
    a, call, results = _prepared(
        q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, alibi_slopes, bias_slopes,
        k_scale, v_scale, scale, causal, window_left, window_right, softcap, empty_row, top_w, query_offset, key_offset,
        o, lse, layout, engine, threads, dtype)
    _native.attention_forward(*call)
    return tuple(map(a.finish, results))


def _prepared(q, k, v, mask=None, bias=None, sink=None, cu_seqlens_q=None, cu_seqlens_k=None, cache_seqlens=None, block_table=None,
              alibi_slopes=None, bias_slopes=None, k_scale=None, v_scale=None, scale=None, causal="none", window_left=-1,
              window_right=-1, softcap=0.0, empty_row="minus_infinity", top_w=-1, query_offset=0, key_offset=0, o=None,
              lse=None, layout="bthd", engine="automatic", threads=None, dtype=None):
    """The arrays of a forward call, the arguments of the native function, and o and lse."""
    a = Arrays(q, dtype, _RECORDING)
    batch, rows, heads, _ = shape_of("q", q, 4, "[B, Lq, H, D]")
    heads_first = _heads_first(layout, k_scale, v_scale)
    if heads_first:
        rows, heads = heads, rows
    _options.warn_if_swapped("q", rows, heads, heads_first, stacklevel=4)
    if v_scale is not None and len(v.shape) == 5:
        value_size = 32 * v.shape[3]
    else:
        value_size = shape_of("v", v, 4, "[B, Lk, Hk, Dv]")[3]
    if o is None:
        like = v if k_scale is None and v_scale is None else q
        shape = (batch, heads, rows, value_size) if heads_first else (batch, rows, heads, value_size)
        o = a.empty(shape, a.dtype_of(like), like)
    if lse is None:
        lse = a.empty((batch, heads, rows), "f64" if a.dtype_of(q) == "f64" else "f32")
    inputs = a.read(AttentionInputs(q=q, k=k, v=v, mask=mask, bias=bias, sink=sink, cu_seqlens_q=cu_seqlens_q,
                                    cu_seqlens_k=cu_seqlens_k, cache_seqlens=cache_seqlens, block_table=block_table,
                                    alibi_slopes=alibi_slopes, bias_slopes=bias_slopes, k_scale=k_scale,
                                    v_scale=v_scale))
    outputs = AttentionOutputs(o=a.writable("o", o), lse=a.writable("lse", lse))
    options = options_of(scale, causal, window_left, window_right, softcap, empty_row, top_w, query_offset, key_offset)
    return a, (inputs, options, outputs, *_options.execution(engine, threads), a.bf16, heads_first), (o, lse)


class AttentionPlan:
    """Attention of many layers that differ in their arrays alone, as those of one step of a server do: lengths, block table
    and options are checked once, and a layer's call takes a few microseconds less.

    Made with attention_forward's arguments for one of them; nothing is computed. A plan is for one call at a time, and
    for the engine "cpu". Raises what attention_forward does.
    """

    def __init__(self, q, k, v, **arguments):
        a, call, results = _prepared(q, k, v, **arguments)
        self._plan, self._dtype = _native.AttentionPlan(*call), arguments.get("dtype")
        self._results = [(tuple(x.shape), a.dtype_of(x), a.empty((0,), a.dtype_of(x), x)) for x in results]

    def forward(self, q, k, v, *, mask=None, bias=None, sink=None, alibi_slopes=None, bias_slopes=None, k_scale=None,
                v_scale=None, o=None, lse=None):
        """A layer: arrays with shape, strides and type of the plan's. Lengths and block_table are those that the plan was
        made with. Returns o and lse; the bits are attention_forward's."""
        a = Arrays(q, self._dtype, _RECORDING)
        inputs = a.read(AttentionInputs(q=q, k=k, v=v, mask=mask, bias=bias, sink=sink, alibi_slopes=alibi_slopes,
                                        bias_slopes=bias_slopes, k_scale=k_scale, v_scale=v_scale))
        o, lse = (a.empty(*like) if x is None else x for x, like in zip((o, lse), self._results))
        self._plan.forward(inputs, AttentionOutputs(o=a.writable("o", o), lse=a.writable("lse", lse)), a.bf16)
        return a.finish(o), a.finish(lse)


def attention_backward(q, k, v, do, *, mask=None, bias=None, sink=None, cu_seqlens_q=None, cu_seqlens_k=None,
                       cache_seqlens=None, alibi_slopes=None, bias_slopes=None, scale=None, causal="none",
                       window_left=-1, window_right=-1, softcap=0.0, empty_row="minus_infinity", top_w=-1,
                       query_offset=0, key_offset=0, o=None, lse=None, dlse=None, wanted=None, gradients=None,
                       layout="bthd", engine="automatic", threads=None, dtype=None):
    """Gradients of a loss by attention's inputs, from do [B, Lq, H, Dv] and optionally dlse [B, H, Lq].

    Inputs, options and layout are attention_forward's. o and lse, if given, are what it returned (saves time). wanted names the
    inputs to differentiate by, of q k v bias sink; all that are given by default. gradients {"dq": array, …} says where
    to write; new arrays by default. Slopes have no gradient. Returns {"dq": array, …}, each of the shape and type of its input. Sums over the
    heads of a group and over broadcast dimensions of bias run in a fixed order. Raises ValueError, Unsupported.
    """
    a = Arrays(q, dtype, _RECORDING)
    inputs = AttentionInputs(q=q, k=k, v=v, mask=mask, bias=bias, sink=sink, cu_seqlens_q=cu_seqlens_q,
                             cu_seqlens_k=cu_seqlens_k, cache_seqlens=cache_seqlens, alibi_slopes=alibi_slopes,
                             bias_slopes=bias_slopes)
    results = new_gradients(a, {n: getattr(inputs, n) for n in ATTENTION_WANTED}, wanted, gradients)
    inputs = a.read(inputs)
    given = a.read(AttentionGradients(o=o, lse=lse, d_o=do, dlse=dlse))
    to_write = given._replace(**{n: a.writable(n, x) for n, x in results.items()})
    options = options_of(scale, causal, window_left, window_right, softcap, empty_row, top_w, query_offset,
                       key_offset)
    _native.attention_backward(inputs, options, to_write, *_options.execution(engine, threads), a.bf16,
                               _heads_first(layout))
    return {name: a.finish(x) for name, x in results.items()}


def new_gradients(a: Arrays, given: dict, wanted, gradients) -> dict:
    """{"d" + name: array} for the inputs to differentiate by."""
    gradients = dict(gradients or {})
    if wanted is None:
        wanted = [n for n, x in given.items() if x is not None]
    for name in wanted:
        if name not in given:
            raise ValueError(f"wanted names {name!r}, expected some of {', '.join(given)}")
        if given[name] is None:
            raise ValueError(f"wanted names {name!r}, which is not given")
    for name in gradients:
        if name[1:] not in wanted or name[:1] != "d":
            raise ValueError(f"gradients has {name!r}, expected some of {', '.join('d' + n for n in wanted)}")
    return {"d" + n: gradients[f"d{n}"] if f"d{n}" in gradients else
            a.empty(given[n].shape, a.dtype_of(given[n]), given[n]) for n in wanted}


def _heads_first(layout, *scales) -> bool:
    heads_first = bool(_options.number_of(_options.LAYOUT, "layout", layout))
    if heads_first and any(s is not None for s in scales):
        raise ValueError("layout is 'bhtd', expected 'bthd' with k_scale or v_scale")
    return heads_first


def options_of(scale, causal, window_left, window_right, softcap, empty_row, top_w, query_offset,
             key_offset) -> AttentionOptions:
    return AttentionOptions(
        scale=_options.number("scale", scale), causal=_options.number_of(_options.CAUSAL, "causal", causal),
        window_left=_options.whole("window_left", window_left),
        window_right=_options.whole("window_right", window_right), softcap=_options.number("softcap", softcap),
        empty_row=_options.number_of(_options.EMPTY_ROW, "empty_row", empty_row),
        top_w=_options.whole("top_w", top_w), query_offset=_options.whole("query_offset", query_offset),
        key_offset=_options.whole("key_offset", key_offset))
