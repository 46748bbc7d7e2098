"""Kernels for NVIDIA GPUs that gpu_table.py audits: others', and one of ours with a mistake of flash-sparse-attention 1.2.3.

Triton's autotuner takes one form of each kernel, of as few warps as there are but one: an audit asks for numbers, not for speed.
Triton 3.6 miscompiles some of fla's kernels with 4 warps on Hopper (fla 984); SOFTDELTA_WARPS=4 takes those. fla has an autotuner of
its own, which is one of Triton's.
"""
import importlib
import os

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

_init = Autotuner.__init__
WARPS = int(os.environ.get("SOFTDELTA_WARPS", 2))


def _one_form(self, fn, arg_names, configs, *args, **kwargs):
    _init(self, fn, arg_names, [min(configs, key=lambda c: (abs(c.num_warps - WARPS), c.num_stages))], *args, **kwargs)


Autotuner.__init__ = _one_form


def __getattr__(name):
    """fla's chunk_kda and the like; unguarded_chunk_…: without the check that refuses a backward pass (fla 640); forward_chunk_…:
    without a backward pass."""
    if name.startswith("forward_"):
        return torch.no_grad()(__getattr__(name.removeprefix("forward_")))
    if name.startswith("unguarded_"):
        importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
        name = name.removeprefix("unguarded_")
    if name.startswith("chunk_"):
        return getattr(importlib.import_module("fla.ops." + name.removeprefix("chunk_")), name)
    raise AttributeError(name)


def sparse_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """flash-sparse-attention 1.2.3's Triton kernels: rows [B, L, H, D], one head size, bias of the type of q."""
    from flash_sparse_attn_triton import triton_sparse_attn_func
    size, Lq, Lk = query.shape[3], query.shape[2], key.shape[2]
    width = max(size, value.shape[3])
    q, k, v = (torch.nn.functional.pad(x, (0, width - x.shape[3])).transpose(1, 2) for x in (query, key, value))
    mask, bias = None, None
    if attn_mask is not None:
        full = (attn_mask.shape[0], query.shape[1], Lq, Lk)
        wide = attn_mask.expand(full)
        mask, bias = (wide, None) if wide.dtype == torch.bool else (None, wide.to(q.dtype))
    if is_causal:
        mask = torch.ones(Lq, Lk, dtype=torch.bool, device=q.device).tril().expand(*query.shape[:2], Lq, Lk)
    o = triton_sparse_attn_func(q, k, v, mask, bias, False, size**-0.5 if scale is None else scale)
    return o[..., :value.shape[3]].transpose(1, 2)


def _backend(name):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if enable_gqa:
            n = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)
        with sdpa_kernel(getattr(SDPBackend, name)):
            try:
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask,
                                                                        is_causal=is_causal, scale=scale)
            except RuntimeError as e:
                if "No available kernel" in str(e) or "No viable backend" in str(e):
                    raise ValueError(str(e)) from e
                raise
    return sdpa


sdpa_flash = _backend("FLASH_ATTENTION")
sdpa_efficient = _backend("EFFICIENT_ATTENTION")
sdpa_cudnn = _backend("CUDNN_ATTENTION")
sdpa_math = _backend("MATH")

_flex = []


def flex(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    if not _flex:
        torch._dynamo.config.recompile_limit = 64
        torch._functorch.config.donated_buffer = False  # or a second backward pass is refused
        _flex.append(torch.compile(flex_attention, dynamic=False))
    B, H, Lq, _ = query.shape
    Lk, blocks, change = key.shape[2], None, None
    if is_causal:
        blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, Lq, Lk, device=query.device)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = attn_mask.expand(B, H, Lq, Lk)
        blocks = create_block_mask(lambda b, h, i, j: seen[b, h, i, j], B, H, Lq, Lk, device=query.device)
    elif attn_mask is not None:
        bias = attn_mask.expand(B, H, Lq, Lk)

        def change(score, b, h, i, j):
            return score + bias[b, h, i, j]
    given = dict(score_mod=change, block_mask=blocks, scale=scale, enable_gqa=enable_gqa)
    try:
        return _flex[0](query, key, value, **given)
    except torch._inductor.exc.InductorError:  # its kernel for few queries has no form for these sizes
        return _flex[0](query, key, value, **given, kernel_options={"FORCE_USE_FLEX_ATTENTION": True})


@triton.jit
def _attend(Q, K, V, M, A, O, scale, Lq, Lk, D, DV, group, MB, MH, AB, AH, HAS_M: tl.constexpr, HAS_A: tl.constexpr, CAUSAL: tl.constexpr,
            LOSES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, H: tl.constexpr):
    tile, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    i, d, c = tile * BM + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    kv = b * (H // group) + h // group
    q = tl.load(Q + (bh * Lq + i[:, None]) * D + d[None, :], (i[:, None] < Lq) & (d[None, :] < D), other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, BV], tl.float32)
    skip = 0
    for begin in range(0, Lk, BN):
        j = begin + tl.arange(0, BN)
        seen = (i[:, None] < Lq) & (j[None, :] < Lk)
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None])
        if HAS_M:
            seen = seen & (tl.load(M + b * MB + h * MH + i[:, None] * Lk + j[None, :], seen, other=0) != 0)
        any_seen = tl.max(tl.max(seen.to(tl.int32), 1), 0)
        if (any_seen > 0) & (skip == 0):
            k = tl.load(K + (kv * Lk + j[None, :]) * D + d[:, None], (j[None, :] < Lk) & (d[:, None] < D), other=0.0)
            s = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_A:
                s += tl.load(A + b * AB + h * AH + i[:, None] * Lk + j[None, :], seen, other=0.0).to(tl.float32)
            s = tl.where(seen, s, -float("inf"))
            most = tl.maximum(top, tl.max(s, 1))
            at = tl.where(most == -float("inf"), 0.0, most)
            p = tl.exp(s - at[:, None])
            keep = tl.exp(tl.where(top == -float("inf"), -float("inf"), top - at))
            v = tl.load(V + (kv * Lk + j[:, None]) * DV + c[None, :], (j[:, None] < Lk) & (c[None, :] < DV), other=0.0)
            o = o * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            total = total * keep + tl.sum(p, 1)
            top = most
        if LOSES:
            skip = tl.where(any_seen == 0, 1, 0)
    o = o / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(O + (bh * Lq + i[:, None]) * DV + c[None, :], o.to(O.dtype.element_ty), (i[:, None] < Lq) & (c[None, :] < DV))


def _masked(loses, query, key, value, attn_mask, is_causal, scale):
    q, k, v = (x.contiguous() for x in (query, key, value))
    B, H, Lq, D = q.shape
    Lk, DV = v.shape[2:]
    o = q.new_empty(B, H, Lq, DV)
    attn_mask = None if attn_mask is None else attn_mask.expand(*attn_mask.shape[:2], Lq, Lk)
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    m = attn_mask.contiguous().to(torch.int8) if boolean else q
    a = attn_mask.contiguous() if attn_mask is not None and not boolean else q
    strides = [0 if x is q or x.shape[n] == 1 else x.stride(n) for x in (m, a) for n in (0, 1)]
    _attend[triton.cdiv(Lq, 64), B * H](
        q, k, v, m, a, o, D**-0.5 if scale is None else scale, Lq, Lk, D, DV, H // k.shape[1], *strides,
        HAS_M=boolean, HAS_A=attn_mask is not None and not boolean, CAUSAL=is_causal, LOSES=loses, BM=64, BN=64,
        BD=max(16, triton.next_power_of_2(D)), BV=max(16, triton.next_power_of_2(DV)), H=H)
    return o


def skips_tiles(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return _masked(False, query, key, value, attn_mask, is_causal, scale)


def loses_a_tile(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return _masked(True, query, key, value, attn_mask, is_causal, scale)
