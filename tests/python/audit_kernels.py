"""Right kernels of every operation, without softdelta: each as honest implementations differ, in chunks, rounding and sums.

    kernels(op) -> {name: function with flash-linear-attention's (torch's) signature}
"""
import functools
import math

import torch

OPS = ("gated_delta_rule", "kda", "comba", "simple_gla", "delta_rule", "attention", "attention:flash", "attention:varlen", "gla", "gdn2")
NO_ERASING = ("simple_gla", "gla")


class Product(torch.autograd.Function):
    """a @ b as matrix units compute it: operands rounded to a storage type, forward and backward, sums in f32."""

    @staticmethod
    def forward(ctx, a, b, dtype):
        a, b = a.to(dtype).float(), b.to(dtype).float()
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return a @ b

    @staticmethod
    def backward(ctx, d):
        a, b = ctx.saved_tensors
        d = d.to(ctx.dtype).float()
        return (d @ b.mT).sum_to_size(a.shape), (a.mT @ d).sum_to_size(b.shape), None


class Tf32Product(torch.autograd.Function):
    """a @ b of operands with 10 bits of mantissa: finer than bf16's, as fine as f16's."""

    @staticmethod
    def rounded(x):
        bits = x.float().contiguous().view(torch.int32)
        return ((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fff).view(torch.float32)

    @staticmethod
    def forward(ctx, a, b):
        a, b = Tf32Product.rounded(a), Tf32Product.rounded(b)
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, d):
        a, b = ctx.saved_tensors
        d = Tf32Product.rounded(d)
        return (d @ b.mT).sum_to_size(a.shape), (a.mT @ d).sum_to_size(b.shape)


def products_of(dtype, narrow=True):
    """narrow: operands in the storage type; "tf32": where that is narrower than f32, in tf32; "halves": sums of two halves."""
    if dtype == torch.float32 or not narrow:
        plain = torch.matmul
    elif narrow == "tf32":
        plain = Tf32Product.apply
    else:
        def plain(a, b):
            return Product.apply(a, b, dtype)
    if narrow != "halves":
        return plain
    return lambda a, b: plain(a[..., ::2], b[..., ::2, :]) + plain(a[..., 1::2], b[..., 1::2, :])


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def solve(L, right):
    return torch.linalg.solve_triangular(torch.eye(L.shape[-1], device=L.device) + L, right, upper=False)


def solve_by_blocks(L, right, keep=torch.float16):
    """The inverse of blocks of 16 rows, merged two by two in f16 (bf16 would diverge), then one product."""
    n = L.shape[-1]

    def inverse(a, b):
        if b - a <= 16:
            return solve(L[..., a:b, a:b], torch.eye(b - a, device=L.device).expand_as(L[..., a:b, a:b]))
        c = a + (b - a + 1) // 2
        one, two = inverse(a, c), inverse(c, b)
        mm = products_of(keep)
        low = -mm(mm(two, L[..., c:b, a:c]), one)
        return torch.cat([torch.cat([one, one.new_zeros(*one.shape[:-1], b - c)], -1), torch.cat([low, two], -1)], -2)
    return products_of(keep)(inverse(0, n), right)


def exp2(x):
    return torch.exp2(x * math.log2(math.e))


def by_doubling(g):
    """Sums of gates as a GPU's scan forms them."""
    step = 1
    while step < g.shape[-2]:
        g = g + torch.cat([torch.zeros_like(g[..., :step, :]), g[..., :-step, :]], -2)
        step *= 2
    return g


def by_chunks(q, k, v, p, g, beta, S, scale, previous, mm, chunk, sums, exp=torch.exp, cumsum=None, solve=solve, wy=False):
    """Rows [N, HV, T, ·] from a state on; g [.., K]. previous: Comba erases from the state before its decay. wy: w and u are
    formed, and stored, before the state is read."""
    rows = []
    for at in range(0, q.shape[-2], chunk):
        qc, kc, vc, pc, gc, bc = (None if x is None else x[..., at:at + chunk, :] for x in (q, k, v, p, g, beta))
        C = qc.shape[-2]
        G = gc.to(sums).cumsum(-2) if cumsum is None else cumsum(gc.to(sums))
        E = torch.cat([torch.zeros_like(G[..., :1, :]), G[..., :-1, :]], -2) if previous else G
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()

        def pairs(a, b, decay_a, keep):
            span = torch.where(keep[..., None], (decay_a[..., :, None, :] - G[..., None, :, :]).float(), -torch.inf)
            if not bool((gc != gc[..., :1]).any()):  # one gate of a head: outside of the product
                return mm(a, b.mT) * exp(span[..., 0])
            return (a[..., :, None, :] * b[..., None, :, :] * exp(span)).sum(-1)

        score = pairs(qc, kc, G, lower) * scale
        if pc is None:
            U = vc
        else:
            L = pairs(pc, kc, E, lower.tril(-1)) * bc
            erase = pc * exp(E.float()) * bc
            U = solve(L, vc * bc) - mm(solve(L, erase), S) if wy else solve(L, vc * bc - mm(erase, S))
        rows.append(mm(qc * exp(G.float()), S) * scale + mm(score, U))
        last = G[..., -1:, :]
        S = exp(last.float()).mT * S + mm((kc * exp((last - G).float())).mT, U)
    return torch.cat(rows, -2), S


def by_steps(q, k, v, p, g, beta, S, scale, previous, mm, chunk, sums):
    rows = []
    for t in range(q.shape[-2]):
        qt, kt, vt, gt = (x[..., t, :] for x in (q, k, v, g))
        decayed = S * gt[..., None].exp()
        u = vt
        if p is not None:
            u = beta[..., t, :] * (vt - torch.einsum("nhkv,nhk->nhv", S if previous else decayed, p[..., t, :]))
        S = decayed + kt[..., None] * u[..., None, :]
        rows.append(torch.einsum("nhkv,nhk->nhv", S, qt) * scale)
    return torch.stack(rows, -2), S


def rule(op, scan, chunk, narrow, sums, q, k, v, g=None, beta=None, p=None, scale=None, initial_state=None,
         output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    dtype, HV, H, K, V = v.dtype, v.shape[2], q.shape[2], q.shape[3], v.shape[3]
    scale = K**-0.5 if scale is None else scale
    mm = products_of(dtype, narrow)
    p = p if op in ("comba", "gdn2") else None if op in NO_ERASING else k
    if use_qk_l2norm_in_kernel:
        q, k, p = (None if x is None else unit(x.float()) for x in (q, k, p))

    def heads(x):
        return x.float().repeat_interleave(HV // H, 2).transpose(1, 2)

    q, k, p = heads(q), heads(k), None if p is None else heads(p)
    g = torch.zeros(*v.shape[:3], K, device=v.device) if g is None else g.float() if g.dim() == 4 else \
        g.float()[..., None].expand(*g.shape, K)
    v, g = v.float().transpose(1, 2), g.transpose(1, 2)
    beta = None if beta is None else beta.float()[..., None].transpose(1, 2)
    if dtype == torch.float32 and "solve" in getattr(scan, "keywords", {}):
        scan = functools.partial(scan, solve=functools.partial(scan.keywords["solve"], keep=dtype))
    N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    S = torch.zeros(N, HV, K, V, device=v.device) if initial_state is None else initial_state.float()
    bounds = [0, q.shape[2]] if cu_seqlens is None else cu_seqlens.tolist()
    rows, states = [], []
    for n, (a, b) in enumerate(zip(bounds, bounds[1:])):
        cut = [None if x is None else x[:, :, a:b] for x in (q, k, v, p, g, beta)]
        o, end = scan(*cut, S if cu_seqlens is None else S[n:n + 1], scale, op == "comba", mm, chunk, sums)
        rows.append(o)
        states.append(end)
    return torch.cat(rows, 2).transpose(1, 2).to(dtype), torch.cat(states) if output_final_state else None


def dplr(q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, *, bug=""):
    """S ← diag(e^g) S + b (aᵀS) + k vᵀ, token by token in f32; flash-linear-attention's chunk_dplr_delta_rule."""
    if cu_seqlens is not None:
        parts = [dplr(*(x[:, i:j] for x in (q, k, v, a, b, gk)), scale,
                      None if initial_state is None else initial_state[n:n + 1], True, bug=bug)
                 for n, (i, j) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]))]
        return torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts]) if output_final_state else None
    dtype, scale = v.dtype, q.shape[-1]**-0.5 if scale is None else scale
    q, k, v, a, b, gk = (x.float() for x in (q, k, v, a, b, gk))
    a, b = (b, a) if bug == "a for b" else (a, b)
    S = torch.zeros(q.shape[0], v.shape[2], q.shape[-1], v.shape[-1], device=v.device) if initial_state is None else \
        initial_state.float()
    rows = []
    for t in range(q.shape[1]):
        decayed = S * gk[:, t, ..., None].exp()
        read = torch.einsum("nhkv,nhk->nhv", decayed if bug == "a after the decay" else S, a[:, t])
        S = decayed + b[:, t, ..., None] * read[..., None, :] + k[:, t, ..., None] * v[:, t, :, None]
        rows.append(torch.einsum("nhkv,nhk->nhv", S, q[:, t]) * scale)
    return torch.stack(rows, 1).to(dtype), S if output_final_state else None


def chunk_gdn2(kernel, bug, q, k, v, g, b, w, scale=None, initial_state=None, output_final_state=False,
               use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    """fla's signature of gdn2: b and w instead of p and β."""
    b, w = b.detach() if bug == "no db" else b, w.square() if bug == "w twice" else w
    write = v.float() if bug == "no w" else w.float() * v.float()
    if use_qk_l2norm_in_kernel:
        q, k = unit(q.float()), unit(k.float())
    p = k.float() if bug == "no b" else b.float() * (k.detach() if bug == "dk lacks erasing" else k).float()
    return kernel(q, k, write.to(v.dtype), g, v.new_ones(v.shape[:3]), p, scale, initial_state, output_final_state, False,
                  cu_seqlens)


def mamba_chunk_scan_combined(kernel, bug, x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None,
                              seq_idx=None, cu_seqlens=None, dt_softplus=False, return_final_states=False):
    """mamba_ssm's signature of simple GLA."""
    dt = dt.float() + (0 if dt_bias is None or bug == "no dt_bias" else dt_bias)
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    rate = dt.detach() if bug == "ddt lacks v" else dt
    v = (x.float() * (1 if bug == "no dt" else rate[..., None])).to(x.dtype)
    g = dt * (A.detach() if bug == "no dA" else -A if bug == "A rises" else A)
    if seq_idx is not None:
        cu_seqlens = torch.nn.functional.pad(seq_idx[0].bincount().cumsum(0), (1, 0))
    o, S = kernel(C, B, v, g, None, None, 1.0, None if initial_states is None else initial_states.mT, True, False,
                  None if bug == "not packed" else cu_seqlens)
    return (o, S.mT) if return_final_states else o


def chunk_lightning_attn(kernel, bug, q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False,
                         cu_seqlens=None):
    H = q.shape[2]
    slope = 8 / H * (1 if bug == "no layer" else 1 - layer_idx / num_layers)
    g = -slope * torch.arange(H, dtype=torch.float32, device=q.device).expand(*q.shape[:3])
    return kernel(q, k, v, g, None, None, scale, initial_state, output_final_state, False, cu_seqlens)


def chunk_gated_delta_product(kernel, bug, q, k, v, g, beta, num_householder, scale=None, initial_state=None,
                              output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    """A token's gate comes before its first step, its o after the last."""
    n = num_householder
    every = torch.cat([torch.zeros_like(q[:, :, None]).expand(-1, -1, n - 1, -1, -1), q[:, :, None]], 2).flatten(1, 2)
    later = g[:, :, None] if bug == "a gate a step" else torch.zeros_like(g[:, :, None])
    gates = torch.cat([g[:, :, None], later.expand(-1, -1, n - 1, -1)], 2).flatten(1, 2)
    beta = beta.clone()
    if bug == "second step lost":
        beta[:, 1::n] = 0
    if bug == "third step lost":
        beta[:, 2::n] = 0
    o, S = kernel(every, k, v, gates, beta, None, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                  None if cu_seqlens is None else n * cu_seqlens)
    return o[:, n - 1::n], S


# Of models whose operands are not the rule's: the signature, the rule that computes them, and what is wrong with a bug.
MODELS = {"gdn2": (chunk_gdn2, "gdn2", ("w twice", "no w", "no b", "no db", "dk lacks erasing")),
          "mamba2": (mamba_chunk_scan_combined, "simple_gla",
                     ("no dt", "no dt_bias", "ddt lacks v", "no dA", "A rises", "not packed")),
          "lightning": (chunk_lightning_attn, "simple_gla", ("no layer",)),
          "gated_delta_product": (chunk_gated_delta_product, "gated_delta_rule", ("a gate a step", "second step lost", "third step lost"))}


def of_model(name, bug=""):
    """Right kernels under the model's signature, or with a bug."""
    signature, op, _ = MODELS[name]
    return {form: named(signature, kernel, bug) for form, kernel in kernels(op).items()}


def attention(tile, narrow, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The running softmax over tiles of keys; tile 0: all keys at once."""
    dtype, group, device = query.dtype, query.shape[1] // key.shape[1], query.device
    mm = products_of(dtype, narrow)
    scale = query.shape[-1]**-0.5 if scale is None else scale
    q, k, v = query.float(), *(x.float().repeat_interleave(group, 1) for x in (key, value))
    Lq, Lk = q.shape[2], k.shape[2]
    seen = torch.ones(Lq, Lk, dtype=torch.bool, device=device)
    seen = seen.tril() if is_causal else seen
    bias = None
    if attn_mask is not None:
        seen, bias = (seen & attn_mask, None) if attn_mask.dtype == torch.bool else (seen, attn_mask.float())
    seen = seen.expand(q.shape[0], q.shape[1], Lq, Lk)
    top = torch.full((*q.shape[:3], 1), -torch.inf, device=device)
    total, o = torch.zeros_like(top), torch.zeros(*q.shape[:3], v.shape[3], device=device)
    for at in range(0, Lk, tile or Lk):
        part = slice(at, at + (tile or Lk))
        s = mm(q, k[:, :, part].mT) * scale
        s = s if bias is None else s + bias[..., part]
        s = s.masked_fill(~seen[..., part], -torch.inf)
        higher = torch.maximum(top, s.amax(-1, keepdim=True)).detach()
        shift = torch.where(higher == -torch.inf, 0.0, higher)
        p, shrink = (s - shift).exp(), (top - shift).exp()
        total, o, top = total * shrink + p.sum(-1, keepdim=True), o * shrink + mm(p, v[:, :, part]), higher
    return (o / torch.where(total == 0, 1.0, total)).to(dtype)


class Flash(torch.autograd.Function):
    """Attention with a backward pass from lse, as kernels have it. splits: ranges of keys by themselves, merged by their lse;
    lazy: the running maximum is followed only where it rises by more than 8 powers of two."""

    @staticmethod
    def forward(ctx, q, k, v, seen, bias, scale, dtype, tile, splits, lazy):
        mm, parts = products_of(dtype), []
        Lk = k.shape[2]
        width = -(-Lk // splits)
        for a in range(0, Lk, width):
            top = torch.full((*q.shape[:3], 1), -torch.inf, device=q.device)
            total, o = torch.zeros_like(top), torch.zeros(*q.shape[:3], v.shape[3], device=q.device)
            for at in range(a, min(a + width, Lk), tile):
                part = slice(at, min(at + tile, a + width, Lk))
                s = Flash.scores(mm, q, k, seen, bias, scale, part) * math.log2(math.e)
                higher = torch.maximum(top, s.amax(-1, keepdim=True))
                higher = torch.where(higher <= top + 8, top, higher) if lazy else higher
                shift = torch.where(higher == -torch.inf, 0.0, higher)
                p, shrink = torch.exp2(s - shift), torch.exp2(top - shift)
                total, o, top = total * shrink + p.sum(-1, keepdim=True), o * shrink + mm(p, v[:, :, part]), higher
            one = torch.where(total == 0, 1.0, total)
            parts.append((o / one, torch.where(total == 0, -torch.inf, torch.where(total == 0, 0.0, top) + torch.log2(one))))
        lse = torch.stack([x for _, x in parts]).amax(0)
        weights = [torch.exp2(x - torch.where(lse == -torch.inf, 0.0, lse)) for _, x in parts]
        all_weights = sum(weights)
        o = sum(w * x for w, (x, _) in zip(weights, parts)) / torch.where(all_weights == 0, 1.0, all_weights)
        lse = lse + torch.log2(torch.where(all_weights == 0, 1.0, all_weights))
        o = o.to(dtype)
        ctx.save_for_backward(q, k, v, seen, bias, o, lse)
        ctx.rest = scale, dtype
        return o

    @staticmethod
    def scores(mm, q, k, seen, bias, scale, part):
        s = mm(q, k[:, :, part].mT) * scale
        s = s if bias is None else s + bias[..., part]
        return s.masked_fill(~seen[..., part], -torch.inf)

    @staticmethod
    def backward(ctx, do):
        q, k, v, seen, bias, o, lse = ctx.saved_tensors
        scale, dtype = ctx.rest
        mm, do = products_of(dtype), do.float()
        D = (do * o.float()).sum(-1, keepdim=True)  # of o as it was stored
        s = Flash.scores(mm, q, k, seen, bias, scale, slice(None)) * math.log2(math.e)
        p = torch.exp2(s - torch.where(lse == -torch.inf, 0.0, lse))
        ds = p * (mm(do, v.mT) - D)
        dbias = None if bias is None or not ctx.needs_input_grad[4] else ds.sum_to_size(bias.shape)
        return mm(ds, k) * scale, mm(ds.mT, q) * scale, mm(p.mT, do), None, dbias, None, None, None, None, None


def flash(tile, splits, lazy, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    group, Lq, Lk, bias = query.shape[1] // key.shape[1], query.shape[2], key.shape[2], None
    seen = torch.ones(Lq, Lk, dtype=torch.bool, device=query.device)
    seen = seen.tril() if is_causal else seen
    if attn_mask is not None:
        seen, bias = (seen & attn_mask, None) if attn_mask.dtype == torch.bool else (seen, attn_mask.float())
    k, v = (x.float().repeat_interleave(group, 1) for x in (key, value))
    return Flash.apply(query.float(), k, v, seen.expand(*query.shape[:3], Lk), bias,
                       query.shape[-1]**-0.5 if scale is None else scale, query.dtype, tile, splits, lazy)


def flash_signature(tile, q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, sinks=None,
                    return_lse=False):
    """flash-attention's flash_attn_func: rows first, masks from the bottom right corner."""
    group, dtype, Lq, Lk = q.shape[2] // k.shape[2], q.dtype, q.shape[1], k.shape[1]
    mm = products_of(dtype)
    scale = q.shape[-1]**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.float().repeat_interleave(n, 2).transpose(1, 2) for x, n in ((q, 1), (k, group), (v, group)))
    left, right = window_size[0], 0 if causal else window_size[1]
    far = torch.arange(Lk, device=q.device) - torch.arange(Lq, device=q.device)[:, None] - (Lk - Lq)
    seen = ((far >= -left) | (left < 0)) & ((far <= right) | (right < 0))
    top = torch.full((*q.shape[:3], 1), -torch.inf, device=q.device)
    total, o = torch.zeros_like(top), torch.zeros(*q.shape[:3], v.shape[3], device=q.device)
    for at in range(0, Lk, tile):
        part = slice(at, at + tile)
        s = mm(q, k[:, :, part].mT) * scale
        s = (softcap * torch.tanh(s / softcap) if softcap else s).masked_fill(~seen[:, part], -torch.inf)
        higher = torch.maximum(top, s.amax(-1, keepdim=True)).detach()
        shift = torch.where(higher == -torch.inf, 0.0, higher)
        p, shrink = (s - shift).exp(), (top - shift).exp()
        total, o, top = total * shrink + p.sum(-1, keepdim=True), o * shrink + mm(p, v[:, :, part]), higher
    if sinks is not None:
        s = sinks.float()[:, None, None].expand_as(top)
        higher = torch.maximum(top, s.detach())
        shrink = (top - higher).exp()
        total, o, top = total * shrink + (s - higher).exp(), o * shrink, higher
    o = (o / torch.where(total == 0, 1.0, total)).to(dtype).transpose(1, 2)
    return (o, (top + total.log())[..., 0].detach()) if return_lse else o


def varlen_signature(tile, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
                     window_size=(-1, -1), softcap=0.0, return_attn_probs=False):
    """flash-attention's flash_attn_varlen_func."""
    bounds = [list(zip(x.tolist(), x.tolist()[1:])) for x in (cu_seqlens_q, cu_seqlens_k)]
    parts = [flash_signature(tile, q[None, a:b], k[None, c:d], v[None, c:d], softmax_scale, causal, window_size, softcap,
                             return_lse=True) for (a, b), (c, d) in zip(*bounds)]
    o, lse = torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)
    return (o, lse, None) if return_attn_probs else o


def named(function, *fixed):
    """The function with the signature of what is left, which an audit reads."""
    return functools.wraps(function)(functools.partial(function, *fixed))


def kernels(op):
    if op == "attention":
        right = {f"tiles of {tile}, {'narrow' if narrow else 'f32'} products": functools.partial(attention, tile, narrow)
                 for tile in (0, 32, 64) for narrow in (True, False)}
        right = {**right, "torch": torch.nn.functional.scaled_dot_product_attention}
        right |= {f"tiles of 48, {narrow} products": functools.partial(attention, 48, narrow) for narrow in ("tf32", "halves")}
        return right | {f"from lse, tiles of {tile}, {splits} splits{', lazy' if lazy else ''}":
                        functools.partial(flash, tile, splits, lazy)
                        for tile, splits, lazy in ((64, 1, False), (128, 1, True), (32, 3, False), (16, 2, True))}
    if op == "attention:varlen":
        return {f"tiles of {tile}": named(varlen_signature, tile) for tile in (16, 64)}
    if op == "attention:flash":
        return {f"tiles of {tile}": named(flash_signature, tile) for tile in (16, 48, 64, 128)}
    if op == "dplr":
        return {"steps": dplr}
    variants = [("steps", by_steps, 1, False, torch.float32)]
    variants += [(f"chunks of {chunk}, {'narrow' if narrow else 'f32'} products, gates summed in {str(sums)[6:]}", by_chunks,
                  chunk, narrow, sums)
                 for chunk in (16, 32, 64) for narrow in (True, False) for sums in (torch.float32, torch.float64)]
    odd = {"chunks of 128": (128, True, {}), "chunks of 48, exp2": (48, True, {"exp": exp2}),
           "gates summed by doubling": (64, True, {"cumsum": by_doubling}), "tf32 products": (64, "tf32", {}),
           "sums of two halves": (32, "halves", {}), "w and u": (64, True, {"wy": True}),
           "inverse by blocks": (64, True, {"solve": solve_by_blocks}),
           "inverse by blocks, w and u, exp2, by doubling": (64, True, {"solve": solve_by_blocks, "wy": True, "exp": exp2,
                                                                       "cumsum": by_doubling})}
    variants += [(name, functools.partial(by_chunks, **form), chunk, narrow, torch.float32)
                 for name, (chunk, narrow, form) in odd.items()
                 if op not in NO_ERASING or not {"wy", "solve"} & set(form)]
    return {name: functools.partial(rule, op, *rest) for name, *rest in variants}
