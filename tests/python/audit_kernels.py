"""Right kernels of every operation, without softdelta: each as honest implementations differ, in chunks, rounding and sums.

    kernels(op) -> {name: function with flash-linear-attention's (torch's) signature}
"""
import functools

import torch

OPS = ("gated_delta_rule", "kda", "comba", "simple_gla", "delta_rule", "attention")


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


def products_of(dtype):
    return torch.matmul if dtype == torch.float32 else lambda a, b: Product.apply(a, b, dtype)


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def solve(L, right):
    return torch.linalg.solve_triangular(torch.eye(L.shape[-1], device=L.device) + L, right, upper=False)


def by_chunks(q, k, v, p, g, beta, S, scale, previous, mm, chunk, sums):
    """Rows [N, HV, T, ·] from a state on; g [.., K]. previous: Comba erases from the state before its decay."""
    rows = []
    for at in range(0, q.shape[-2], chunk):
        qc, kc, vc, pc, gc, bc = (None if x is None else x[..., at:at + chunk, :] for x in (q, k, v, p, g, beta))
        C = qc.shape[-2]
        G = gc.to(sums).cumsum(-2)
        E = torch.cat([torch.zeros_like(G[..., :1, :]), G[..., :-1, :]], -2) if previous else G
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()

        def pairs(a, b, decay_a, keep):
            span = torch.where(keep[..., None], (decay_a[..., :, None, :] - G[..., None, :, :]).float(), -torch.inf)
            if not bool((gc != gc[..., :1]).any()):  # one gate of a head: outside of the product
                return mm(a, b.mT) * span[..., 0].exp()
            return (a[..., :, None, :] * b[..., None, :, :] * span.exp()).sum(-1)

        score = pairs(qc, kc, G, lower) * scale
        if pc is None:
            U = vc
        else:
            L = pairs(pc, kc, E, lower.tril(-1)) * bc
            U = solve(L, vc * bc - mm(pc * E.float().exp() * bc, S))
        rows.append(mm(qc * G.float().exp(), S) * scale + mm(score, U))
        last = G[..., -1:, :]
        S = last.float().exp().mT * S + mm((kc * (last - G).float().exp()).mT, U)
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
    mm = products_of(dtype if narrow else torch.float32)
    p = p if op == "comba" else None if op == "simple_gla" else k
    if use_qk_l2norm_in_kernel:
        q, k, p = (None if x is None else unit(x.float()) for x in (q, k, p))

    def heads(x):
        return x.float().repeat_interleave(HV // H, 2).transpose(1, 2)

    q, k, p = heads(q), heads(k), None if p is None else heads(p)
    g = torch.zeros(*v.shape[:3], K, device=v.device) if g is None else g.float() if g.dim() == 4 else \
        g.float()[..., None].expand(*g.shape, K)
    v, g = v.float().transpose(1, 2), g.transpose(1, 2)
    beta = None if beta is None else beta.float()[..., None].transpose(1, 2)
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


def attention(tile, narrow, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The running softmax over tiles of keys; tile 0: all keys at once."""
    dtype, group, device = query.dtype, query.shape[1] // key.shape[1], query.device
    mm = products_of(dtype if narrow else torch.float32)
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


def named(function, *fixed):
    """The function with the signature of what is left, which an audit reads."""
    return functools.wraps(function)(functools.partial(function, *fixed))


def kernels(op):
    if op == "attention":
        right = {f"tiles of {tile}, {'narrow' if narrow else 'f32'} products": functools.partial(attention, tile, narrow)
                 for tile in (0, 32, 64) for narrow in (True, False)}
        return {**right, "torch": torch.nn.functional.scaled_dot_product_attention}
    variants = [("steps", by_steps, 1, False, torch.float32)]
    variants += [(f"chunks of {chunk}, {'narrow' if narrow else 'f32'} products, gates summed in {str(sums)[6:]}", by_chunks,
                  chunk, narrow, sums)
                 for chunk in (16, 32, 64) for narrow in (True, False) for sums in (torch.float32, torch.float64)]
    return {name: functools.partial(rule, op, *rest) for name, *rest in variants}
