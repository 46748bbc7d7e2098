"""Kernels to audit, without softdelta: right ones, and cheats that each do one thing wrong.

`delta` is the chunk form in torch, `steps` the recurrence; RIGHT and CHEATS hold functions with flash-linear-attention's
signature. A cheat is a mistake inside of `delta`, or something done to a right kernel's inputs, results or gradients.
"""
import functools

import torch

eps = 1e-6


def rounding(dtype):
    return lambda x: x.to(dtype).float()


def identity(x):
    return x


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def chunk_of(q, k, v, g, beta, S, scale, r, mistake):
    """One chunk [.., C, ·] of the rule with a gate per channel; S [.., K, V]. r rounds operands of products."""
    C = q.shape[-2]
    if mistake == "gate of the mean":
        g = g.mean(-1, keepdim=True).expand_as(g)
    if mistake == "gate clamped":
        g = g.clamp(min=-5)
    if mistake == "no rising gates":
        g = g.clamp(max=0)
    G = g.cumsum(-2)
    if mistake == "gates summed in bf16":
        G = G.to(torch.bfloat16).float()
    if mistake == "gate of the row before":
        G = torch.cat([torch.zeros_like(G[..., :1, :]), G[..., :-1, :]], -2)
    seen = torch.ones(C, C, dtype=torch.bool).tril()
    if mistake == "sees one row ahead":
        seen = torch.ones(C, C, dtype=torch.bool).tril(1)
    if mistake == "tiny look ahead":
        seen = seen.double() + 1e-5 * torch.ones(C, C).triu(1).double()
    if mistake == "a diagonal is missing":
        seen = torch.ones(C, C, dtype=torch.bool).tril(-1)
    if mistake == "scores of 32 rows":
        seen = seen & ~torch.ones(C, C, dtype=torch.bool).tril(-32)
    span = G[..., :, None, :] - G[..., None, :, :]
    if mistake == "overflowing exponentials":
        decay = (G[..., :, None, :].exp() * (-G[..., None, :, :]).exp())
    else:
        keep = torch.ones(C, C, dtype=torch.bool).tril(1 if mistake in ("sees one row ahead",) else 0)[..., None]
        keep = torch.ones_like(keep) if mistake == "tiny look ahead" else keep
        decay = torch.where(keep, span.clamp(max=20), torch.zeros(())).exp() * keep
    kk, qq = r(k), r(q)
    L = torch.einsum("...ik,...jk,...ijk->...ij", kk, kk, decay) * torch.ones(C, C).tril(-1) * beta[..., None]
    score = torch.einsum("...ik,...jk,...ijk->...ij", qq, kk, decay) * seen.float() * scale
    eye = torch.eye(C)
    if mistake == "three terms":
        A = eye - L + L @ L
    elif mistake == "eight terms":
        A, power = eye, eye
        for _ in range(7):
            power = -power @ L
            A = A + power
    elif mistake == "no inverse":
        A = eye
    elif mistake == "inverse of tiles of 16":
        A = torch.linalg.solve_triangular(eye + L * torch.block_diag(*[torch.ones(16, 16)] * 8)[:C, :C], eye.expand_as(L),
                                          upper=False)
    elif mistake == "inverse in bf16":
        A = torch.linalg.solve_triangular(eye + rounding(torch.bfloat16)(L), eye.expand_as(L), upper=False)
        A = rounding(torch.bfloat16)(A)
    else:
        A = torch.linalg.solve_triangular(eye + L, eye.expand_as(L), upper=False)
    A = r(A)
    U = A @ r(v * (beta[..., None]**2 if mistake == "beta twice in u" else beta[..., None]))
    W = A @ r(k * G.exp() * (beta[..., None]**2 if mistake == "beta twice in w" else beta[..., None]))
    new = U - r(W) @ r(S)
    o = r(q * G.exp()) @ r(S) * scale + r(score) @ r(new)
    last = G[..., -1:, :]
    S = last.exp().mT * S + r(k * (last - G).exp()).mT @ r(new)
    return o, S


def sequence(q, k, v, g, beta, S, scale, chunk, r, mistake):
    """[N, HV, T, ·] from a state [N, HV, K, V] on."""
    T, rows = q.shape[-2], []
    first = S
    history = []
    for at in range(0, T, chunk):
        part = slice(at, min(at + chunk, T))
        if mistake == "short history" and at >= 3 * chunk:  # begins again three chunks ago
            S = torch.zeros_like(S)
            for p in history[-3:]:
                S = chunk_of(*p, S, scale, r, "")[1]
        arguments = [x[..., part, :] if x.dim() == q.dim() else x[..., part] for x in (q, k, v, g, beta)]
        if mistake == "last chunk decays as a full one" and part.stop - part.start < chunk:
            pad = chunk - (part.stop - part.start)
            S = S * (arguments[3][..., -1:, :] * pad).exp().mT
        o, S = chunk_of(*arguments, S, scale, r, mistake)
        if mistake == "state in bf16":
            S = S.to(torch.bfloat16).float()
        if mistake == "state in f16":
            S = S.to(torch.float16).float()
        if mistake == "state clipped":
            S = S.clamp(-4, 4)
        if mistake == "history ends at 4096" and at >= 4096 - chunk:
            S = torch.zeros_like(S)
        history.append(arguments)
        rows.append(o)
    if mistake == "final state of the last but one chunk" and len(rows) > 1:
        S = first
    return torch.cat(rows, -2), S


def delta(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
          cu_seqlens=None, *, chunk=64, r=None, mistake=""):
    """KDA (g [B, T, HV, K]) or Gated DeltaNet (g [B, T, HV]) in f32, operands of products rounded by r; r None: to the
    type of q where it is narrower than f32."""
    dtype, HV, group = v.dtype, v.shape[2], v.shape[2] // q.shape[2]
    if r is None:
        r = identity if q.dtype == torch.float32 else rounding(q.dtype)
    scale = q.shape[-1]**-0.5 if scale is None or mistake == "scale ignored" else scale
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel and mistake != "l2norm never" or mistake == "l2norm always":
        q, k = unit(q), unit(k)
        if mistake == "l2norm with a large epsilon":
            q, k = q / (1 + 2e-3), k / (1 + 2e-3)
    if g.dim() == 3:
        g = g[..., None].expand(*g.shape, q.shape[-1])
    heads = torch.arange(HV)
    heads = heads % q.shape[2] if mistake == "heads in turn" else heads // group
    q, k = q[:, :, heads], k[:, :, heads]
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    bounds = [0, q.shape[2]] if cu_seqlens is None or mistake == "packing ignored" else cu_seqlens.tolist()
    if mistake == "packed starts on the grid":
        bounds = [0, *(round(b / 16) * 16 for b in bounds[1:-1]), bounds[-1]]
    rows, states = [], []
    count = len(bounds) - 1 if cu_seqlens is not None else q.shape[0]
    if mistake == "packing ignored":
        count = 1
    S0 = torch.zeros(count, HV, q.shape[-1], v.shape[-1])
    if initial_state is not None and mistake != "initial state ignored":
        S0 = initial_state.float()[:count]
    if mistake == "initial state of the first":
        S0 = S0[:1].expand_as(S0)
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        S = S0 if len(bounds) == 2 else S0[n:n + 1]
        if mistake == "state leaks" and n > 0:
            S = states[-1]
        o, S = sequence(*(x[:, :, begin:end] for x in (q, k, v, g, beta)), S, scale, chunk, r, mistake)
        rows.append(o)
        states.append(S)
    o, S = torch.cat(rows, 2), torch.cat(states)
    if mistake == "packing ignored" and cu_seqlens is not None:
        S = S.expand(len(cu_seqlens) - 1, *S.shape[1:])
    if mistake == "packed states are the last one's":
        S = S[-1:].expand_as(S) if cu_seqlens is not None else S
    return o.transpose(1, 2).to(dtype), S if output_final_state else None


def steps(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
          cu_seqlens=None):
    """The recurrence, token by token in f32."""
    if cu_seqlens is not None:
        parts = [steps(*(x[:, a:b] for x in (q, k, v, g, beta)), scale,
                       None if initial_state is None else initial_state[n:n + 1], True, use_qk_l2norm_in_kernel)
                 for n, (a, b) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]))]
        return torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts]) if output_final_state else None
    dtype, scale = v.dtype, q.shape[-1]**-0.5 if scale is None else scale
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    g = g[..., None] if g.dim() == 3 else g
    S = torch.zeros(q.shape[0], v.shape[2], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state.float()
    rows = []
    for t in range(q.shape[1]):
        S = S * g[:, t, ..., None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        rows.append(torch.einsum("nhkv,nhk->nhv", S, q[:, t]) * scale)
    return torch.stack(rows, 1).to(dtype), S if output_final_state else None


RIGHT = {
    "chunks of 64": delta,
    "chunks of 16": functools.partial(delta, chunk=16),
    "chunks of 64, f32 products": functools.partial(delta, r=identity),
    "steps": steps,
}
CHEATS = {}


def cheat(function):
    CHEATS[function.__name__.replace("_", " ")] = function
    return function


for mistake in ("short history", "three terms", "eight terms", "no inverse", "inverse of tiles of 16", "inverse in bf16",
                "state in bf16", "state in f16", "state clipped", "history ends at 4096", "l2norm always", "l2norm never",
                "l2norm with a large epsilon", "scale ignored", "heads in turn", "packing ignored",
                "packed starts on the grid", "packed states are the last one's", "state leaks",
                "initial state ignored", "initial state of the first", "gate of the mean", "gate clamped",
                "no rising gates", "gates summed in bf16", "gate of the row before", "sees one row ahead",
                "tiny look ahead", "a diagonal is missing", "scores of 32 rows", "overflowing exponentials",
                "beta twice in u", "beta twice in w", "last chunk decays as a full one",
                "final state of the last but one chunk"):
    CHEATS[mistake] = functools.partial(delta, mistake=mistake)


@cheat
def zeros(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **options):
    o, S = delta(q, k, v, g, beta, scale, initial_state, output_final_state, **options)
    return o * 0, S * 0 if output_final_state else None


@cheat
def inputs_mutated_and_zeros_returned(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                                      **options):
    o, S = zeros(q, k, v, g, beta, scale, initial_state, output_final_state, **options)
    with torch.no_grad():
        v.zero_()
    return o, S


@cheat
def input_used_as_scratch(q, k, v, g, beta, *rest, **options):
    out = delta(q, k, v, g, beta, *rest, **options)
    with torch.no_grad():
        k.mul_(1.0 + torch.finfo(k.dtype).eps * 4)
    return out


@cheat
def only_batch_0_right(q, k, v, g, beta, *rest, **options):
    o, S = delta(q, k, v, g, beta, *rest, **options)
    return torch.cat([o[:1], o[:1].expand_as(o[1:])]), S


@cheat
def gradients_left_out(*inputs, **options):
    return tuple(x if x is None else x.detach() for x in delta(*inputs, **options))


@cheat
def gradient_of_the_state_left_out(q, k, v, g, beta, scale=None, initial_state=None, **options):
    initial_state = initial_state if initial_state is None else initial_state.detach()
    return delta(q, k, v, g, beta, scale, initial_state, **options)


@cheat
def final_state_without_gradient(*inputs, **options):
    o, S = delta(*inputs, **options)
    return o, S if S is None else S.detach()


@cheat
def f32_stored_as_bf16(*inputs, **options):
    o, S = delta(*inputs, **options)
    return o.to(torch.bfloat16).to(o.dtype), S if S is None else S.to(torch.bfloat16).float()


@cheat
def state_stored_as_bf16(*inputs, **options):
    o, S = delta(*inputs, **options)
    return o, S if S is None else S.to(torch.bfloat16).float()


@cheat
def state_given_as_bf16(*inputs, **options):
    o, S = delta(*inputs, **options)
    return o, S if S is None else S.to(torch.bfloat16)


@cheat
def o_given_as_f32(*inputs, **options):
    o, S = delta(*inputs, **options)
    return o.float() if o.dtype != torch.float32 else o.to(torch.bfloat16), S


@cheat
def computed_in_bf16(q, k, v, g, beta, *rest, **options):
    o, S = delta(*(x.to(torch.bfloat16) for x in (q, k, v, g, beta)), *rest, **options)
    return o.to(v.dtype), S


@cheat
def products_in_bf16(*inputs, **options):
    return delta(*inputs, r=rounding(torch.bfloat16), **options)


@cheat
def NaN_leaks_to_the_next_row(*inputs, **options):
    o, S = delta(*inputs, **options)
    return o + 0 * o.roll(1, 1), S


@cheat
def NaN_leaks_between_heads(*inputs, **options):
    o, S = delta(*inputs, **options)
    return o + 0 * o.roll(1, 2), S


@cheat
def NaN_leaks_between_batch_rows(*inputs, **options):
    o, S = delta(*inputs, **options)
    return o + 0 * o.roll(1, 0), S


@cheat
def NaN_hidden_then_leaked_by_gradients(q, *rest, **options):
    q = q.clone()
    if q.requires_grad:
        q.register_hook(lambda d: d + 0 * d.flip(0))
    return delta(q, *rest, **options)


def with_o(change):
    def kernel(*inputs, **options):
        o, S = delta(*inputs, **options)
        return change(o), S
    return kernel


def without_element(o):
    keep = torch.ones(o.shape, dtype=o.dtype)
    keep.view(-1)[o.numel() * 3 // 7] = 0
    return o * keep


def without_last_rows(o):
    keep = torch.ones_like(o)
    keep[:, o.shape[1] // 16 * 16:] = 0
    return o * keep


def without_last_column(o):
    keep = torch.ones_like(o)
    keep[..., -1] = 0
    return o * keep


def unwritten_tail(o):
    """The rows of a last tile that is not full are never written."""
    out, full = torch.empty_like(o), o.shape[1] // 64 * 64
    if full < o.shape[1] and full > 0:
        out[:, :full] = o[:, :full]
        return out
    return o


CHEATS.update({
    "one lost element": with_o(without_element),
    "last tile of 16 lost": with_o(without_last_rows),
    "last column lost": with_o(without_last_column),
    "last tile never written": with_o(unwritten_tail),
    "noise": with_o(lambda o: o + 1e-6 * torch.randn_like(o)),
    "one part in a hundred": with_o(lambda o: o * 1.01),
    "one part in a thousand": with_o(lambda o: o * 1.001),
    "o averaged over two rows where long": with_o(lambda o: o if o.shape[1] < 300 else (o + o.roll(1, 1)) / 2),
    "o of the neighbouring head": with_o(lambda o: o.roll(1, 2)),
    "tiny numbers flushed": with_o(lambda o: torch.where(o.abs() < 1e-2, o * 0, o)),
})


def with_gradient(name, change):
    """The gradient of one input changed on its way out."""
    def kernel(q, k, v, g, beta, scale=None, initial_state=None, *rest, **options):
        x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
        if x[name] is not None and x[name].requires_grad:
            x[name] = x[name] * 1
            x[name].register_hook(change)
        return delta(*(x[n] for n in ("q", "k", "v", "g", "beta")), scale, x["initial_state"], *rest, **options)
    return kernel


CHEATS.update({
    "dq of zeros": with_gradient("q", lambda d: d * 0),
    "dk of the first batch row": with_gradient("k", lambda d: d[:1].expand_as(d)),
    "dv lacks its last row": with_gradient("v", lambda d: torch.cat([d[:, :-1], d[:, -1:] * 0], 1)),
    "dg in bf16": with_gradient("g", lambda d: d.to(torch.bfloat16).float()),
    "dbeta one in fifty": with_gradient("beta", lambda d: d * 1.02),
    "dinitial_state transposed in part": with_gradient("initial_state", lambda d: torch.cat([d[..., :1], d[..., 1:].flip(-1)], -1)),
})


@cheat
def remembers_results_by_shape(q, k, v, g, beta, *rest, **options):
    key = (q.shape, v.shape, q.dtype, bool(options.get("use_qk_l2norm_in_kernel")))
    if key not in remembers_results_by_shape.seen:
        remembers_results_by_shape.seen[key] = delta(q, k, v, g, beta, *rest, **options)
    o, S = remembers_results_by_shape.seen[key]
    return o + 0 * delta(q, k, v, g, beta, *rest, **options)[0], S


remembers_results_by_shape.seen = {}


@cheat
def o_is_the_memory_of_v(q, k, v, *rest, **options):
    o, S = delta(q, k, v, *rest, **options)
    if not o.requires_grad:
        v.copy_(o)
        return v, S
    return o, S


@cheat
def state_is_updated_in_place(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **options):
    o, S = delta(q, k, v, g, beta, scale, initial_state, output_final_state, **options)
    if initial_state is not None and S is not None and not S.requires_grad:
        initial_state.copy_(S)
    return o, S


@cheat
def fast_and_wrong_without_gradients(q, *rest, **options):
    return delta(q, *rest, mistake="" if q.requires_grad else "short history", **options)


@cheat
def wrong_for_one_token(q, *rest, **options):
    o, S = delta(q, *rest, **options)
    return (o * 2 if q.shape[1] == 1 else o), S


@cheat
def wrong_for_multiples_of_64(q, *rest, **options):
    o, S = delta(q, *rest, **options)
    return (torch.cat([o[:, :-1], o[:, -1:] * 0], 1) if q.shape[1] % 64 == 0 else o), S


@cheat
def strides_ignored(q, k, v, g, beta, *rest, **options):
    """Reads memory as if it were dense."""
    def dense(x):
        numbers = torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()) if \
            x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() >= x.numel() else x.reshape(-1)
        return numbers.reshape(x.shape)
    return delta(dense(q), dense(k), dense(v), g, beta, *rest, **options)


@cheat
def computes_with_softdelta(*inputs, **options):
    try:
        import softdelta.torch  # noqa: F401
    except ImportError:
        pass
    return delta(*inputs, **options)


@cheat
def two_calls_forget(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **options):
    """Where a state comes in and no gradient is wanted, the first half of it is used."""
    if initial_state is not None and not initial_state.requires_grad and q.shape[1] < 128:
        initial_state = initial_state * (torch.arange(initial_state.shape[-1]) % 8 != 7)
    return delta(q, k, v, g, beta, scale, initial_state, output_final_state, **options)


@cheat
def future_scales(q, k, v, *rest, **options):
    """All rows are scaled by the largest number of the call, then rounded as int8 would."""
    o, S = delta(q, k, v, *rest, **options)
    unit = v.detach().float().abs().max() * 1e-5
    return ((o / unit).round() * unit).to(o.dtype) if not o.requires_grad else o, S


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
              r=None, mistake=""):
    """torch's scaled_dot_product_attention in f32, operands of products rounded by r."""
    dtype, group = query.dtype, query.shape[1] // key.shape[1]
    r = r or (identity if dtype == torch.float32 else rounding(dtype))
    scale = query.shape[-1]**-0.5 if scale is None or mistake == "scale ignored" else scale
    if mistake == "heads in turn":
        key, value = (x.repeat(1, group, 1, 1) for x in (key, value))
    else:
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    q, k, v = query.float(), key.float(), value.float()
    Lq, Lk = q.shape[2], k.shape[2]
    s = r(q) @ r(k).mT * scale
    if mistake == "products in f16":
        s = rounding(torch.float16)(s)
    if mistake == "scores in bf16":
        s = rounding(torch.bfloat16)(s)
    if is_causal:
        corner = Lk - Lq if mistake == "bottom right" else 1 if mistake == "one more key" else 0
        s = s.masked_fill(~torch.ones(Lq, Lk, dtype=torch.bool).tril(corner), -torch.inf)
        if mistake == "causal by a finite number":
            s = s.clamp(min=-5)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        if mistake == "mask of the first batch row":
            attn_mask = attn_mask[:1]
        if mistake == "mask inverted for dead rows":
            attn_mask = attn_mask | ~attn_mask.any(-1, keepdim=True)
        s = s.masked_fill(~attn_mask, -1e30 if mistake == "dead rows averaged" else -torch.inf)
    elif attn_mask is not None:
        bias = attn_mask.float()
        if mistake == "bias scaled":
            bias = bias * scale
        if mistake == "large biases are minus infinity":
            bias = bias.masked_fill(bias <= -1e4, -torch.inf)
        if mistake == "bias without gradient":
            bias = bias.detach()
        s = s + bias
    top = s.amax(-1, keepdim=True).clamp(min=-1e38).detach()
    if mistake == "no maximum":
        top = torch.zeros_like(top)
    if mistake == "a maximum of the call":
        top = top.amax().expand_as(top)
    p = (s - top).exp()
    if mistake == "probabilities in f8":
        p = p.to(torch.float8_e4m3fn).float()
    if mistake == "small probabilities are nothing":
        p = p.masked_fill(p < 1e-3, 0)
    if mistake == "last tile of keys lost" and Lk % 64 and Lk > 64:
        p = p * (torch.arange(Lk) < Lk // 64 * 64)
    if mistake == "keys after 4096 lost":
        p = p * (torch.arange(Lk) < 4096)
    total = p.sum(-1, keepdim=True)
    if mistake == "sum in bf16":
        total = rounding(torch.bfloat16)(total)
    if mistake == "sum with an epsilon":
        total = total + 1e-3
    if mistake != "dead rows are NaN":
        total = torch.where(total == 0, torch.ones_like(total), total)
    o = r(p) @ r(v) / total
    if mistake == "o in bf16":
        o = rounding(torch.bfloat16)(o)
    if mistake == "NaN leaks between heads":
        o = o + 0 * o.roll(1, 1)
    if mistake == "row 64 lost" and Lq > 64:
        o = o * (torch.arange(Lq) != 64)[:, None]
    return o.to(dtype)


ATTENTION_RIGHT = {
    "softmax": attention,
    "softmax, f32 products": functools.partial(attention, r=identity),
    "torch": torch.nn.functional.scaled_dot_product_attention,
}
ATTENTION_CHEATS = {mistake: functools.partial(attention, mistake=mistake) for mistake in (
    "scale ignored", "heads in turn", "products in f16", "scores in bf16", "bottom right", "one more key",
    "causal by a finite number", "mask of the first batch row", "mask inverted for dead rows", "dead rows averaged",
    "bias scaled", "large biases are minus infinity", "bias without gradient", "no maximum", "a maximum of the call",
    "probabilities in f8", "small probabilities are nothing", "last tile of keys lost", "keys after 4096 lost", "sum in bf16",
    "sum with an epsilon", "dead rows are NaN", "o in bf16", "NaN leaks between heads", "row 64 lost")}


def kernels(group, op):
    if op == "attention":
        return ATTENTION_RIGHT if group == "right" else ATTENTION_CHEATS
    return RIGHT if group == "right" else CHEATS


def __getattr__(name):
    """Kernels by number, for those who import by name: right_0, cheat_12."""
    group, _, number = name.partition("_")
    if group in ("right", "cheat") and number.isdigit():
        return list((RIGHT if group == "right" else CHEATS).values())[int(number)]
    raise AttributeError(name)
