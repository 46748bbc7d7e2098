#!/usr/bin/env python3
"""Training with a learnable bias, ours beside torch's math path, its scaled_dot_product_attention, flex_attention and, where
flash-sparse-attention is installed, the Triton kernels of the former flash-dmattn: attention alone, forward and backward with the
bias's gradient, and whole steps of a model (tests/python/pair_bias_training.py), all by turns.

    bench/bias_training.py [--only pair] [--dtype bfloat16] [--repeats 20] [--device cuda]

A row shows medians in ms, and how far o and dbias are from the math path in f64: ‖x − exact‖ / ‖exact‖. Each way is called twice
before, so that what it compiles is not timed. `--device cpu` shows that it runs.
"""
import argparse
import importlib.util
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "python"))
import pair_bias_training as training

SHAPES = {"pair": ("pair", dict(B=1, H=8, S=512, D=32)),
          "pair long": ("pair", dict(B=1, H=8, S=1024, D=32)),
          "relative": ("relative", dict(B=2, H=8, S=512, D=64)),
          "relative long": ("relative", dict(B=1, H=16, S=2048, D=64))}


def torch_attention(q, k, v, bias):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)).transpose(1, 2)


def dmattn_attention(q, k, v, bias):
    from flash_sparse_attn import triton_sparse_attn_func
    return triton_sparse_attn_func(q, k, v, attn_bias=bias.to(q.dtype), is_causal=False)


def ways(device):
    """What makes each way: flex_attention is compiled anew for each shape."""
    all_ways = {"ours": lambda: training.our_attention, "math path": lambda: training.math_attention,
                "torch SDPA": lambda: torch_attention}
    if device == "cuda":
        all_ways["flex_attention"] = training.flex_attention
        if importlib.util.find_spec("flash_sparse_attn"):
            all_ways["flash-dmattn"] = lambda: dmattn_attention
    return all_ways


def seconds(call, device):
    if device != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def medians(calls, repeats, device):
    """Seconds of each call, by turns; what a peer says where it fails."""
    times, failed = {name: [] for name in calls}, {}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            if name in failed:
                continue
            try:
                took = seconds(call, device)
            except Exception as error:  # a peer's own: the row says so
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
                continue
            if turn >= 2:
                times[name].append(took)
    return {name: failed.get(name) or f"{statistics.median(t) * 1e3:.3f}" for name, t in times.items()}


def attention_calls(attentions, device, dtype, B, H, S, D):
    """name → a function of one forward and backward pass; name → how far o and dbias are from the math path in f64."""
    generator = torch.Generator(device).manual_seed(1)
    q, k, v, d_o = (torch.randn(B, S, H, D, device=device, dtype=dtype, generator=generator) for _ in range(4))
    bias = torch.randn(1, H, S, S, device=device, dtype=dtype, generator=generator)
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]

    def both(attention, leaves=leaves):
        o = attention(*leaves)
        return o, torch.autograd.grad(o, leaves, d_o.to(o.dtype))

    def far(x, exact):
        return ((x.double() - exact).norm() / exact.norm()).item()

    exact_o, exact_gradients = both(training.exact_attention, [t.detach().double().requires_grad_() for t in leaves])
    calls, distances = {}, {}
    for name, attention in attentions.items():
        calls[name] = lambda attention=attention: both(attention)
        try:
            o, gradients = both(attention)
        except Exception:  # medians says why
            continue
        distances[name] = f"{far(o, exact_o):.0e}, {far(gradients[3], exact_gradients[3]):.0e}"
    return calls, distances


def step_calls(attentions, kind, device, dtype, **shape):
    B, H, S, D = (shape[name] for name in "BHSD")
    x, target = (torch.randn(B, S, H * D, device=device) for _ in range(2))
    extra = torch.randn(1, S, S, 16, device=device) if kind == "pair" else training.buckets(S, device)

    def step_of(attention):
        torch.manual_seed(0)
        model = training.Model(kind, attention, B, H, S, D).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return lambda: training.step(model, optimizer, x, target, extra, device, dtype)

    return {name: step_of(attention) for name, attention in attentions.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SHAPES, action="append", help="one row; may be repeated")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    print(torch.cuda.get_device_name() if given.device == "cuda" else "cpu", "torch", torch.__version__)
    for name in given.only or SHAPES:
        kind, shape = SHAPES[name]
        attentions = {way: make() for way, make in ways(given.device).items()}
        calls, distances = attention_calls(attentions, given.device, dtype, **shape)
        rows = {"attention": medians(calls, given.repeats, given.device),
                "step": medians(step_calls(attentions, kind, given.device, dtype, **shape), given.repeats, given.device)}
        sizes = " ".join(f"{key}{value}" for key, value in shape.items())
        for what, row in rows.items():
            text = "   ".join(f"{way} {ms}" + (f" ({distances[way]})" if what == "attention" and way in distances else "")
                              for way, ms in row.items())
            print(f"{name} {sizes} {what}: {text}", flush=True)


if __name__ == "__main__":
    main()
