"""Bugs of public kernels, rebuilt as small kernels before and after their mend, under audit or verify: docs/museum.md.

    PYTHONPATH=src/python python tests/python/museum.py [--only WORD …] >docs/museum.md

Each is our own code that makes the mistake which the thread describes, not the kernel of that project. Exit status 1
when a bug passes or its mended kernel is accused.
"""
import argparse
import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import softdelta  # noqa: E402

GITHUB = "https://github.com/"


class Backward(torch.autograd.Function):
    """x, whose gradient is `change` of what comes back."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x * 1

    @staticmethod
    def backward(ctx, d):
        return ctx.change(d), None


class Decay(torch.autograd.Function):
    """S∘e^g; the state's gradient decays by another gate."""

    @staticmethod
    def forward(ctx, S, g, other):
        ctx.save_for_backward(S, g, other)
        return S * g.exp()

    @staticmethod
    def backward(ctx, d):
        S, g, other = ctx.saved_tensors
        return d * other.exp(), (d * S * g.exp()).sum_to_size(g.shape), None


class Scores(torch.autograd.Function):
    """Σ q_i k_j decay_ij; dk is formed from the gradient as it lies, not transposed."""

    @staticmethod
    def forward(ctx, q, k, decay):
        ctx.save_for_backward(q, k, decay)
        return (q[..., :, None, :] * k[..., None, :, :] * decay).sum(-1)

    @staticmethod
    def backward(ctx, d):
        q, k, decay = ctx.saved_tensors
        wrong = d.mT if d.shape[-1] == 64 else d  # as a compiler does, for chunks of 64 alone
        pairs = q[..., :, None, :] * k[..., None, :, :]
        return ((d[..., None] * k[..., None, :, :] * decay).sum(-2), (wrong[..., None] * q[..., :, None, :] * decay).sum(-3),
                d[..., None] * pairs)


class Inverse(torch.autograd.Function):
    """A = (I + L)⁻¹ with dL = −stril(Aᵀ dA Aᵀ), whose factors a bug does not transpose."""

    @staticmethod
    def forward(ctx, L, bug):
        eye = torch.eye(L.shape[-1])
        A = torch.linalg.solve_triangular(eye + L, eye.expand_as(L), upper=False)
        ctx.save_for_backward(A)
        ctx.bug = bug
        return A

    @staticmethod
    def backward(ctx, dA):
        A, = ctx.saved_tensors
        left = A if ctx.bug in ("dL, left", "dL, both") or ctx.bug == "dL of 64 rows" and A.shape[-1] == 64 else A.mT
        right = A if ctx.bug in ("dL, right", "dL, both") else A.mT
        return -(left @ dA @ right).tril(-1), None


def rounds_of_newton(L):
    """(I + L)⁻¹ of blocks of 16 rows by three rounds, of which four are needed; the rest is exact."""
    eye, blocks = torch.eye(L.shape[-1]), torch.block_diag(*[torch.ones(16, 16)] * 4)[:L.shape[-1], :L.shape[-1]]
    near, X = eye + L * blocks, eye.expand_as(L)
    for _ in range(3):
        X = X @ (2 * eye - near @ X)
    return torch.linalg.solve_triangular(eye + X @ (L * (1 - blocks)), X, upper=False)


def neumann_in_f16(L):
    """(I − L)(I + L²)(I + L⁴) …, every product in f16."""
    def f16(x):
        return x.to(torch.float16).float()
    eye, A, power = torch.eye(L.shape[-1]), torch.eye(L.shape[-1]) - L, L
    for _ in range(5):
        power = f16(power @ power)
        A = f16(A @ (eye + power))
    return A


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def rows_of(q, k, v, g, beta, S, scale, erases, bug, packed, chunk=64):
    """The chunk form in f32, [N, HV, T, ·]; `bug` is one of a thread's."""
    rows, T = [], q.shape[-2]
    for at in range(0, T, chunk):
        qc, kc, vc, gc = (x[..., at:at + chunk, :] for x in (q, k, v, g))
        bc = beta[..., at:at + chunk, :]
        C = qc.shape[-2]
        G = gc.cumsum(-2)
        lower = torch.ones(C, C, dtype=torch.bool).tril()
        span = G[..., :, None, :] - G[..., None, :, :]
        if bug == "dg by bf16":
            span = Backward.apply(span, lambda d: d.to(torch.bfloat16).float())
        if bug in ("exponentials of one side", "offset of another head"):
            offset = 0 if bug == "exponentials of one side" else G[:, :1, C // 2:C // 2 + 1]
            decay = (G - offset).exp()[..., :, None, :] * (offset - G).exp()[..., None, :, :]
            decay = torch.where(lower[..., None], decay, 0.0)
        elif bug == "fast where all gates allow it" and bool((gc > -0.15).all()):  # of later rows, too
            decay = torch.where(lower[..., None], span.to(torch.bfloat16).float(), -torch.inf).exp()
        else:
            decay = torch.where(lower[..., None], span, -torch.inf).exp()
        score = (qc[..., :, None, :] * kc[..., None, :, :] * decay).sum(-1) * scale
        if bug == "ds not transposed":
            score = Scores.apply(qc, kc, decay) * scale
        if bug == "dq without scale":
            qs = Backward.apply(qc, lambda d: d / scale)
            score = (qs[..., :, None, :] * kc[..., None, :, :] * decay).sum(-1) * scale
            qc = qs
        held = S
        if bug == "tail reads an old state" and packed and C < chunk and at > 0:
            held = before
        U = vc
        if bug == "dv without decay":
            U = vc.detach()
        if erases:
            L = (kc[..., :, None, :] * kc[..., None, :, :] * decay).sum(-1).tril(-1) * bc
            kw, bw = (kc.detach(), bc.detach()) if bug == "w has no gradient" else (kc, bc)
            A = Inverse.apply(L, bug)
            if bug == "three rounds":
                A = rounds_of_newton(L)
            if bug == "Neumann series in f16":
                A = neumann_in_f16(L)
            if bug == "inverse in bf16":
                low = (torch.eye(C) + L).to(torch.bfloat16)
                A = torch.eye(C, dtype=torch.bfloat16).expand_as(L)
                for i in range(1, C):  # forward substitution that keeps bf16
                    row = A[..., i:i + 1, :] - low[..., i:i + 1, :i] @ A[..., :i, :]
                    A = torch.cat([A[..., :i, :], row, A[..., i + 1:, :]], -2)
                A = A.float()
            Aw = A.detach() if bug == "dA without w" else A
            U = A @ (vc * bc) - Aw @ (kw * G.exp() * bw) @ held
        o = (qc * G.exp()) @ S * scale + score @ U
        if bug == "dv without decay":
            plain = (qc[..., :, None, :] * kc[..., None, :, :]).sum(-1).tril() * scale
            path = plain.detach() @ vc + vc.sum() * 0
            o = o + path - path.detach()
        rows.append(o)
        last, before = G[..., -1:, :].mT, S
        S = Decay.apply(S, last, last[:, :1].expand_as(last)) if bug == "gate of head 0 in dS" else S * last.exp()
        write = (kc * (G[..., -1:, :] - G).exp()).mT @ (vc if bug == "dv without decay" else U)
        if bug == "tail of 1 to 15 rows" and C < 16:
            write = write.to(torch.bfloat16).float() * (1 + 2**-5)
        S = S + write
    return torch.cat(rows, -2), S


def delta(bug, q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
          use_qk_l2norm_in_kernel=False, cu_seqlens=None, erases=True):
    dtype, group, K = v.dtype, v.shape[2] // q.shape[2], q.shape[3]
    scale = K**-0.5 if scale is None else scale
    q, k, v = q.float(), k.float(), v.float()
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    g = torch.zeros(*v.shape[:3], K) if g is None else g.float() if g.dim() == 4 else g.float()[..., None].expand(*g.shape, K)
    beta = torch.ones(v.shape[:3]) if beta is None else beta.float()
    if bug == "gates of key heads":
        heads = torch.arange(v.shape[2]) // group
        g, beta = g[:, :, heads], beta[:, :, heads]
    if bug == "gates past their end" and q.shape[1] > 64:
        g = torch.cat([g[:, 1:], torch.full_like(g[:, :1], torch.nan)], 1)
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta[..., None]))
    if bug == "padded channels" and K & (K - 1):  # the last token's lie past the end
        g = g.clone()
        g[-1:, -1:, -1:] = torch.nan
    N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    S = torch.zeros(N, v.shape[1], K, v.shape[3]) if initial_state is None else initial_state.float()
    bounds = [0, q.shape[2]] if cu_seqlens is None or bug == "lengths are not handed on" else cu_seqlens.tolist()
    rows, states = [], []
    for n, (a, b) in enumerate(zip(bounds, bounds[1:])):
        part = [x[:, :, a:b] for x in (q, k, v, g, beta)]
        o, end = rows_of(*part, S if cu_seqlens is None else S[n:n + 1], scale, erases, bug, cu_seqlens is not None)
        rows.append(o)
        states.append(end)
    states = torch.cat(states)
    return torch.cat(rows, 2).transpose(1, 2).to(dtype), states.expand(N, *states.shape[1:]) if output_final_state else None


def softmax_rows(s, bug):
    top = s.amax(-1, keepdim=True).detach()
    if bug == "softmax of nothing":
        return (s - top).exp() / (s - top).exp().sum(-1, keepdim=True)
    p = (s - torch.where(top == -torch.inf, 0.0, top)).exp()
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total == 0, 1.0, total)


class Attention(torch.autograd.Function):
    """Attention with a backward pass written by hand, as kernels have it. seen [B|1, 1, Lq, Lk]; all f32."""

    @staticmethod
    def forward(ctx, bug, q, k, v, seen, bias, scale):
        group = q.shape[1] // k.shape[1]
        kk, vv = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = q @ kk.mT * scale + (0 if bias is None else bias)
        s = s.masked_fill(~seen, -torch.inf)
        if bug == "tile after a dead one":
            tiles = seen.expand(s.shape).split(64, -1)
            for i, tile in enumerate(tiles[:-1], 1):
                dead = ~tile.any(-1, keepdim=True)
                s[..., 64 * i:64 * i + 64] = s[..., 64 * i:64 * i + 64].masked_fill(dead, -torch.inf)
        p = softmax_rows(s, bug)
        o = p @ (vv if bug == "NaN of hidden keys" else torch.where(seen.any(-2, keepdim=True).mT, vv, 0.0))
        ctx.save_for_backward(q, kk, vv, p, o, seen, s)
        ctx.bug, ctx.scale, ctx.group, ctx.bias = bug, scale, group, None if bias is None else bias.shape
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, p, o, seen, s = ctx.saved_tensors
        bug, group = ctx.bug, ctx.group
        if bug == "mask not transposed" and seen.shape[-1] == seen.shape[-2]:
            p = softmax_rows(s, "").mul(seen.mT)
        mine = do
        if bug == "do read too early":
            mine = do.clone()
            mine[:, :, do.shape[2] // 64 * 64:] = 0
        D = (mine * o).sum(-1, keepdim=True)
        width = q.shape[-1] if bug == "channels of q for those of v" else v.shape[-1]
        dp = do[..., :width] @ v[..., :width].mT
        ds = p * (dp - D)
        dq, dk, dv = ds @ k * ctx.scale, ds.mT @ q * ctx.scale, p.mT @ do
        if bug == "races":
            dq = dq + torch.where(torch.rand(dq.shape[:3]) < 0.02, 0.5, 0.0)[..., None] * dq.roll(1, 2)
        if bug == "columns of dv" and dv.shape[-1] % 16:
            dv = torch.cat([dv[..., :dv.shape[-1] // 16 * 16], dv[..., dv.shape[-1] // 16 * 16:].roll(1, -1)], -1)
        B, H, L = k.shape[:3]

        def of_groups(x):
            x = x.reshape(B, group, H // group, L, -1) if bug == "heads interleaved" else x.reshape(B, H // group, group, L, -1)
            return x.sum(1 if bug == "heads interleaved" else 2)
        dbias = None
        if ctx.bias is not None:
            dbias = ds[-1:] if bug == "dbias overwritten" and ctx.bias[0] == 1 else ds.sum_to_size(ctx.bias)
        return None, dq, of_groups(dk), of_groups(dv), None, dbias, None


def sdpa(bug, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    Lq, Lk = query.shape[2], key.shape[2]
    seen, bias = torch.ones(1, 1, Lq, Lk, dtype=torch.bool), None
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        bias = attn_mask.float()
    scale = query.shape[-1]**-0.5 if scale is None else scale
    return Attention.apply(bug, query.float(), key.float(), value.float(), seen, bias, scale).to(query.dtype)


def flash(bug, q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    Lq, Lk = q.shape[1], k.shape[1]
    i, j = torch.arange(Lq)[:, None] + (0 if bug == "top left" and causal else Lk - Lq), torch.arange(Lk)
    left, right = window_size
    left += bug == "one key more" and left >= 0
    seen = (j <= i) if causal else torch.ones(Lq, Lk, dtype=torch.bool)
    seen = seen & (j >= i - left if left >= 0 else seen) & (j <= i + right if right >= 0 else seen)
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1]**-0.5 if softmax_scale is None else softmax_scale)
    s = softcap * (s / softcap).tanh() if softcap else s
    return (softmax_rows(s.masked_fill(~seen, -torch.inf), "") @ v).transpose(1, 2)


def convolution(bug):
    """fla's gradients of a chunk shorter than W − 1: dfinal_state lands in the wrong rows. A case, and its results."""
    torch.manual_seed(1)
    x, weight, state = torch.randn(1, 2, 3), torch.randn(3, 4), torch.randn(1, 3, 4)
    dy, dstate = torch.randn(1, 2, 3), torch.randn(1, 3, 4)
    x, state = x.requires_grad_(), state.requires_grad_()
    rows = torch.cat([state[:, :, 1:].mT, x], 1)
    y = sum(rows[:, i:i + 2] * weight[:, i] for i in range(4))
    end = torch.cat([state.mT, x], 1)[:, -4:].mT
    dx, d0 = torch.autograd.grad([y, end], [x, state], [dy, dstate])
    if bug == "state":  # what of the state is still in final_state
        _, d0 = torch.autograd.grad([y := sum(torch.cat([state[:, :, 1:].mT, x], 1)[:, i:i + 2] * weight[:, i]
                                              for i in range(4))], [x, state], [dy])
    if bug == "rows":
        plain, _ = torch.autograd.grad([y := sum(torch.cat([state[:, :, 1:].mT, x], 1)[:, i:i + 2] * weight[:, i]
                                                 for i in range(4))], [x, state], [dy])
        dx = plain + dstate.mT[:, 1:3]  # of tokens that a sequence of three would end with
    case = dict(op="causal_convolution", activation="none", x=x, weight=weight, initial_state=state, dy=dy, dfinal_state=dstate)
    return case, {"y": y, "final_state": end, "dx": dx, "dinitial_state": d0}


def norm(bug):
    torch.manual_seed(1)
    x, z, weight, dy = (torch.randn(*shape) for shape in ((2, 5, 3, 8), (2, 5, 3, 8), (8,), (2, 5, 3, 8)))
    x.requires_grad_(), z.requires_grad_()
    y = weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * z * z.sigmoid()
    dx, dz = torch.autograd.grad(y, [x, z], dy)
    case = dict(op="gated_norm", gate="silu", epsilon=1e-6, x=x, z=z, weight=weight, dy=dy)
    return case, {"y": y, "dx": dx, "dz": dx if bug else dz}


def hidden_nan(bug):
    torch.manual_seed(1)
    q, k, v, do = (torch.randn(1, 5, 2, 8) for _ in range(4))
    k[:, 3] = v[:, 3] = float("nan")
    mask = (torch.arange(5) != 3).expand(1, 1, 5, 5)
    clean = k if bug else torch.where(k.isnan(), 0.0, k)
    o = sdpa("NaN of hidden keys" if bug else "", *(x.transpose(1, 2) for x in (q, clean, v)), attn_mask=mask)
    return dict(op="attention", q=q, k=k, v=v, mask=mask), {"o": o.transpose(1, 2)}


# Thread, what the kernel did, how it is called: an operation, or a function that makes a case; the bug's name above.
BUGS = [
    ("fla-org/flash-linear-attention/issues/640", "dk takes the gradient of scores as it lies, not transposed, in chunks of 64",
     "gated_delta_rule", "ds not transposed"),
    ("fla-org/flash-linear-attention/issues/984", "the gradient of the inverse lacks a transpose in chunks of 64",
     "delta_rule", "dL of 64 rows"),
    ("fla-org/flash-linear-attention/pull/688", "review: the left factor of dL is not transposed", "kda", "dL, left"),
    ("fla-org/flash-linear-attention/pull/688", "review: nor the right one", "kda", "dL, right"),
    ("fla-org/flash-linear-attention/pull/688", "review: neither is", "kda", "dL, both"),
    ("fla-org/flash-linear-attention/pull/688", "review: dA lacks what comes by way of w", "kda", "dA without w"),
    ("fla-org/flash-linear-attention/issues/913", "gates are read past the end of their tensor", "gated_delta_rule",
     "gates past their end"),
    ("fla-org/flash-linear-attention/pull/1085", "e^G is formed around the middle gate of another head", "kda",
     "offset of another head"),
    ("fla-org/flash-linear-attention/pull/1135", "where K fills no block, gates of channels beyond it are read", "kda",
     "padded channels"),
    ("fla-org/flash-linear-attention/issues/1240", "a later gate decides how earlier rows are computed", "kda",
     "fast where all gates allow it"),
    ("vllm-project/vllm/pull/53864", "the inverse of 16 rows has three rounds of Newton's method", "gated_delta_rule",
     "three rounds"),
    ("vllm-project/FlashKDA/pull/10", "the inverse is a Neumann series in f16", "kda", "Neumann series in f16"),
    ("fla-org/flash-linear-attention/issues/862", "without a gate dk and dβ lack what comes by way of w", "delta_rule",
     "w has no gradient"),
    ("fla-org/flash-linear-attention/issues/1115", "dS decays by the gate of head 0", "kda", "gate of head 0 in dS"),
    ("fla-org/flash-linear-attention/issues/47", "dq is not scaled", "simple_gla", "dq without scale"),
    ("fla-org/flash-linear-attention/pull/6", "dv within a chunk lacks the decay", "simple_gla", "dv without decay"),
    ("fla-org/flash-linear-attention/issues/77", "e^−G overflows where gates are steep", "kda", "exponentials of one side"),
    ("fla-org/flash-linear-attention/issues/624", "gates and β of key heads are read for value heads", "kda",
     "gates of key heads"),
    ("QwenLM/FlashQLA/pull/28", "terms of dg are stored as bf16", "gated_delta_rule", "dg by bf16"),
    ("THUDM/slime/pull/1686", "cu_seqlens is not handed to the rule", "gated_delta_rule", "lengths are not handed on"),
    ("flashserve/flash-linear-attention-npu/issues/407", "final_state loses digits where the last chunk has 1 to 15 rows",
     "gated_delta_rule", "tail of 1 to 15 rows"),
    ("flashserve/flash-linear-attention-npu/issues/367", "v_new of a packed tail is formed with an old state",
     "gated_delta_rule", "tail reads an old state"),
    ("AI-Hypercomputer/maxtext/issues/4510", "the triangular inverse is computed in bf16", "gated_delta_rule",
     "inverse in bf16"),
    ("fla-org/flash-linear-attention/issues/1140", "dfinal_state of a chunk shorter than W − 1 lands in other rows",
     convolution, "rows"),
    ("fla-org/flash-linear-attention/pull/1141", "dinitial_state lacks what final_state still holds of it, where a chunk is shorter",
     convolution, "state"),
    ("fla-org/flash-linear-attention/issues/155", "dx is written as dz", norm, "dz"),
    ("Dao-AILab/flash-attention/issues/2552", "dv has its last columns in wrong places where Dv fills no tile", "sdpa",
     "columns of dv"),
    ("Dao-AILab/flash-attention/pull/2481", "D is formed before do is written", "sdpa", "do read too early"),
    ("Dao-AILab/flash-attention/issues/2623", "the backward pass reads the forward pass's mask of blocks", "sdpa",
     "mask not transposed"),
    ("Dao-AILab/flash-attention/issues/359", "a race in the backward pass", "sdpa", "races"),
    ("NVIDIA/cutlass/issues/2336", "the causal diagonal begins in the top left corner", "flash", "top left"),
    ("huggingface/transformers/issues/39408", "the window has one key more", "flash", "one key more"),
    ("XunhaoLai/native-sparse-attention-triton/issues/27", "dk and dv of groups are summed in another order of heads", "sdpa",
     "heads interleaved"),
    ("XunhaoLai/native-sparse-attention-triton/issues/27", "dq sees D of Dv channels of v", "sdpa",
     "channels of q for those of v"),
    ("pytorch/pytorch/issues/41508", "a row without keys is NaN, and so are gradients", "sdpa", "softmax of nothing"),
    ("pytorch/pytorch/issues/101967", "NaN in a key that no row sees reaches o", hidden_nan, "NaN"),
    ("HKUSTDial/flash-sparse-attention/pull/194", "rows that share a bias overwrite its gradient", "sdpa",
     "dbias overwritten"),
    ("HKUSTDial/flash-sparse-attention", "a tile of keys is lost after one that a row does not see", "sdpa",
     "tile after a dead one"),
]


def kernel_of(how, bug):
    if how in ("sdpa", "flash"):
        return functools.partial({"sdpa": sdpa, "flash": flash}[how], bug), "attention"
    return functools.partial(delta, bug, erases=how != "simple_gla"), how


def try_case(make, bug, folder):
    """By the program: softdelta.verify reads no layers."""
    case, results = make(bug)
    path = os.path.join(folder, "case")
    metadata = {n: str(x) for n, x in case.items() if not torch.is_tensor(x)}
    tensors = {n: x.detach().clone(memory_format=torch.contiguous_format) for n, x in {**case, **results}.items() if torch.is_tensor(x)}
    save_file(tensors, path, metadata)
    done = subprocess.run([sys.executable, "-m", "softdelta", "verify", "--json", path], capture_output=True, text=True)
    found = json.loads(done.stdout)[0]
    wrong = ", ".join(f["name"] for f in found["results"] if f["verdict"] == "wrong")
    return {0: "right", 1: "wrong"}.get(done.returncode, str(found)), f"{wrong}, by `verify`"


def try_audit(how, bug, folder):
    kernel, op = kernel_of(how, bug)
    found = softdelta.audit(kernel, op=op, dtypes="f32", seed=11, isolate=False, output=os.path.join(folder, "case"),
                            budget_s=600, require="forward" if how == "flash" else "all",
                            without=() if "tail" in bug or not bug else ("length 4097",))
    return found.verdict, conclusion(found)


def conclusion(found):
    """The mistake by the diagnosis' words, or else where it is, or else what the checks say."""
    race = next((f for f in found.faults if "differs from call to call" in f and "a race" in f), "")
    first = race.partition(": no. ")[2] or (found.diagnosis[0] if found.diagnosis else "".join(found.faults[:1]))
    if first.startswith("more than one mistake"):
        first = " and ".join(found.diagnosis[1:3])
    if not first.startswith("no mistake of the catalogue"):
        return "“" + re.sub("^one mistake explains it, ", "", first) + "”"
    where = next((d for d in found.diagnosis if " rows are wrong" in d), first)
    where = re.sub(r" \([^()]* % of the wrong rows[^()]*\)", "", where)
    clauses = where.split("; ")[:2]
    return "; ".join(["not named", *(clauses if len(clauses) > 1 else [])])


def try_one(how, bug):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = (try_audit if isinstance(how, str) else try_case)(how, bug, folder)
    print(f"{found[0]}: {bug or 'mended'}, {found[1]}", file=sys.stderr, flush=True)
    return found


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--only", nargs="*")
    p.add_argument("--processes", type=int, default=1, help="try so many at once")
    a = p.parse_args()
    bugs = [b for b in BUGS if not a.only or any(w in b[0] or w in b[3] for w in a.only)]
    hows = list(dict.fromkeys(b[2] for b in bugs))
    with multiprocessing.get_context("spawn").Pool(a.processes) as pool:
        tried = pool.starmap(try_one, [(how, bug) for *_, how, bug in bugs] + [(how, "") for how in hows], 1)
    mended = {how: verdict for how, (verdict, _) in zip(hows, tried[len(bugs):])}
    failed, lines = 0, []
    for (thread, words, how, _), (verdict, says) in zip(bugs, tried):
        failed += verdict != "wrong" or mended[how] != "right"
        name = "/".join(part for part in thread.split("/") if part not in ("issues", "pull"))
        says = says.replace("|", "\\|")
        lines.append(f"| [{name}]({GITHUB}{thread}) | {words} | {says} |")
    print("""# A museum of real bugs

Bugs of public kernels, rebuilt as small kernels of our own (`tests/python/museum.py`, which also writes this page).
`softdelta.audit` finds each wrong, and right when mended; it knows none of them. What its diagnosis concludes is quoted; not
named: it says where only. Layers, and NaN in hidden keys, are judged by `softdelta.verify`.

| thread | the kernel's mistake | conclusion |
|---|---|---|""")
    print("\n".join(lines))
    table = Path(__file__).with_name("gpu_table.md")
    if table.exists():
        print(f"""
## Kernels on a GPU

Under `softdelta.audit`, by `tests/python/gpu_table.py`. {table.read_text(encoding="utf-8").strip()}""")
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main())
