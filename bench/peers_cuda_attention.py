#!/usr/bin/env python3
"""Attention on one NVIDIA GPU: ours against torch's (cuDNN, FlashAttention, and with a dense mask), flex_attention and the
Triton kernels of flash-sparse-attention (the former flash-dmattn), where that is installed.

    bench/peers_cuda_attention.py --library build-cuda/src/libsoftdelta.so [--only causal] [--peer cuDNN] [--dtype float16]

All compute on the same tensors of 16 bits, by turns, timed by CUDA events; a row shows medians in ms, and how far o is from ours:
‖o − ours‖ / ‖ours‖. Ours has a workspace, as the peers have PyTorch's cache. A peer is called twice before, so that what it
compiles is not timed.
"""
import argparse
import functools
import importlib.util

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import softdelta_ctypes as c
from peers_cuda import Library, medians, on_gpu

# name: B, H, Hk, Lq, Lk, D, causal, window, bias
SHAPES = {"causal": (1, 32, 8, 4096, 4096, 128, True, -1, None),
          "causal D64": (1, 32, 8, 4096, 4096, 64, True, -1, None),
          "bias": (1, 32, 8, 4096, 4096, 128, False, -1, "full"),
          "row bias": (1, 32, 8, 4096, 4096, 128, False, -1, "row"),
          "pair bias": (1, 8, 8, 512, 512, 32, False, -1, "full"),
          "window": (1, 32, 8, 16384, 16384, 128, True, 1024, None),
          "causal D256": (1, 16, 8, 4096, 4096, 256, True, -1, None),
          "decode": (16, 32, 8, 1, 32768, 128, False, -1, None),
          "decode of one": (1, 32, 8, 1, 32768, 128, False, -1, None),
          "decode D256": (16, 16, 8, 1, 16384, 256, False, -1, None)}


def ours(library, x, o, d_o, **options):
    lse = torch.empty(x["q"].shape[0], x["q"].shape[2], x["q"].shape[1], device="cuda")
    forward = library.attention("forward", x, on_gpu(c.AttentionOutputs, {"o": o, "lse": lse}), **options)
    backwards = []
    for names in (set(x), set(x) - {"bias"}):
        gradients = {"o": o, "lse": lse, "d_o": d_o, **{"d" + name: torch.empty_like(x[name]) for name in names}}
        backwards.append(library.attention("backward", x, on_gpu(c.AttentionGradients, gradients), **options))
    return forward, backwards


def heads_first(t):
    return t.transpose(1, 2)


def peer(function, x, d_o):
    """Calls of a peer that takes [B, H, L, D]: forward, and forward with backward."""
    def run(x):
        return function(*(heads_first(x[name]) for name in "qkv"), *([x["bias"]] if "bias" in x else []))

    def forward():
        with torch.no_grad():
            return run(x)

    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}

    def both():
        torch.autograd.grad(run(leaves), list(leaves.values()), heads_first(d_o))

    return forward, both


def torch_attention(backend, causal, q, k, v, bias=None):
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=True)


def is_seen(window, i, j):
    return (j <= i) & (i - j <= window) if window >= 0 else j <= i


def with_mask(backend, window, Lq, Lk):
    """Torch's with a dense mask: bool for a window, otherwise the bias. Heads are repeated: not every backend groups them."""
    i, j = torch.arange(Lq, device="cuda"), torch.arange(Lk, device="cuda")
    mask = is_seen(window, i[:, None], j)[None, None] if window >= 0 else None

    def call(q, k, v, bias=None):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        added = (mask if bias is None else bias).expand(*q.shape[:3], k.shape[2])
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)

    return call


def flex(causal, window, Lq, Lk):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    torch._dynamo.reset()  # another row's shapes would make these dynamic, and the kernels slower
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda _b, _h, i, j: is_seen(window, i, j), None, None, Lq, Lk, device="cuda")

    def call(q, k, v, bias=None):
        def add(score, _b, h, i, j):
            return score + (bias[0, h, i, j] if bias.shape[2] > 1 else bias[0, h, 0, j])
        return compiled(q, k, v, score_mod=None if bias is None else add, block_mask=mask, enable_gqa=True)

    return call


def dmattn(causal, q, k, v, bias=None):
    from flash_sparse_attn import triton_sparse_attn_func
    return heads_first(triton_sparse_attn_func(*map(heads_first, (q, k, v)), attn_bias=bias, is_causal=causal))


PEERS = "cuDNN", "FlashAttention", "torch with a mask", "cuDNN with a mask", "flex_attention", "flash-dmattn"


def peers_of(Lq, Lk, D, causal, window, bias):
    """What makes a function that computes the same, by names of PEERS."""
    peers = {}
    if window < 0 and bias is None:
        peers["cuDNN"] = lambda: functools.partial(torch_attention, SDPBackend.CUDNN_ATTENTION, causal)
        peers["FlashAttention"] = lambda: functools.partial(torch_attention, SDPBackend.FLASH_ATTENTION, causal)
    else:
        peers["torch with a mask"] = lambda: with_mask(SDPBackend.EFFICIENT_ATTENTION, window, Lq, Lk)
        peers["cuDNN with a mask"] = lambda: with_mask(SDPBackend.CUDNN_ATTENTION, window, Lq, Lk)
    if Lq > 1 and D <= 128:
        peers["flex_attention"] = lambda: flex(causal, window, Lq, Lk)
    if bias and importlib.util.find_spec("flash_sparse_attn"):
        peers["flash-dmattn"] = lambda: functools.partial(dmattn, causal)
    return peers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build-cuda/src/libsoftdelta.so")
    parser.add_argument("--only", choices=SHAPES, action="append", help="one row; may be repeated")
    parser.add_argument("--peer", choices=PEERS, action="append", help="one peer; may be repeated; flex_attention compiles for 20 s a row")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--alone", action="store_true", help="without peers")
    given = parser.parse_args()
    library = Library(given.library, threads=1)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for name in given.only or SHAPES:
        B, H, Hk, Lq, Lk, D, causal, window, bias = SHAPES[name]
        random = torch.Generator("cuda").manual_seed(1)
        normal = functools.partial(torch.randn, device="cuda", generator=random, dtype=getattr(torch, given.dtype))
        x = {"q": normal(B, Lq, H, D), "k": normal(B, Lk, Hk, D), "v": normal(B, Lk, Hk, D)}
        if bias:
            x["bias"] = normal(1, H, Lq if bias == "full" else 1, Lk)
        o, d_o = torch.empty_like(x["q"]), normal(B, Lq, H, D)
        forward, backwards = ours(library, x, o, d_o, causal=c.BOTTOM_RIGHT if causal else c.NO_CAUSAL, window_left=window)
        ways = {"forward": {"ours": forward}, "forward + backward": {"ours": lambda: (forward(), backwards[0]())}}
        if bias:
            ways["forward + backward"]["ours without dbias"] = lambda: (forward(), backwards[1]())
        forward()
        for peer_name, make in peers_of(Lq, Lk, D, causal, window, bias).items():
            if given.alone or peer_name not in (given.peer or PEERS):
                continue
            torch.cuda.empty_cache()
            try:
                calls = peer(make(), x, d_o)
                error = ((heads_first(calls[0]()).float() - o.float()).norm() / o.float().norm()).item()
            except Exception as failure:  # a peer's own: the row says so
                print(f"{name}: {peer_name}: {str(failure).splitlines()[0][:100]}")
                continue
            ways["forward"][f"{peer_name} (differs by {error:.1e})"] = calls[0]
            ways["forward + backward"][peer_name] = calls[1]
        if Lq == 1:
            del ways["forward + backward"]
            copy = torch.empty_like(x["k"])
            ways["forward"]["copy of k"] = lambda: copy.copy_(x["k"])  # reads and writes as many bytes
        for way, calls in ways.items():
            row = medians(calls, given.repeats)
            text = "   ".join(f"{who} {ms:.3f}" if isinstance(ms, float) else f"{who}: {ms}" for who, ms in row.items())
            print(f"{name} B{B} H{H}/{Hk} {Lq}x{Lk} D{D} {way}: {text}", flush=True)
        del forward, backwards, ways, x
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
