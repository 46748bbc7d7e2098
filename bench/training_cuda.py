#!/usr/bin/env python3
"""What people train with on one NVIDIA GPU, through softdelta.torch: packed sequences, padded rows, shared biases, f32, other
cards' kernels, and what a call costs the host, beside the same call without it, torch's, flex_attention and fla.

    bench/training_cuda.py [--only varlen] [--repeats 10] [--json rows.json] [--compile 16]
    bench/training_cuda.py --table rows.json …      # the table of docs/performance.md; of several cards' files
    SOFTDELTA_CUDA_LEVEL=sm_80 bench/training_cuda.py --only card

Ways of a row take turns. A row shows medians of CUDA events in ms, forward / forward and backward, and how far o is from
ours; the GPU is kept busy before each call, so that its time is not the host's. Rows of the host are µs of calls that queue
a few tokens' work, on one processor. --compile N lets N processes compile a share of fla's kernels each before.
"""
import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time

import torch

import softdelta.torch as sd

BUSY = 4_000_000  # clocks before a call
GQA = (32, 8, 128)
PACKED = {"16 x 4096": [4096] * 16, "64 x 1024": [1024] * 64, "256 x 256": [256] * 256}
PACKED_DELTA = {"8 x 4096": [4096] * 8, "64 x 1024": [1024] * 64, "512 x 128": [128] * 512}


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def bounds_of(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


class Row:
    """Ways to compute the same of leaves that have gradients; the first is ours."""

    def __init__(self, name):
        self.name, self.ways = name, {}

    def add(self, way, call, leaves, d_o, flat=lambda o: o):
        leaves = [t.detach().requires_grad_() for t in leaves]

        def forward():
            with torch.no_grad():
                return call(*leaves)

        def both():
            torch.autograd.grad(call(*leaves), leaves, d_o)

        self.ways[way] = forward, both, flat


# --- attention


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def sdpa(q, k, v, bias=None, of=sd.scaled_dot_product_attention, **options):
    """q, k, v [B, L, H, D]."""
    return of(*heads_first(q, k, v), attn_mask=bias, **options).transpose(1, 2)


def torch_sdpa(*backends):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def of(q, k, v, attn_mask=None, **options):
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
        with sdpa_kernel([getattr(SDPBackend, b) for b in backends]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)

    return of


def repeated(q, k, v, **options):
    """Torch's, whose kernel of f32 has a key head for each."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def torch_varlen():
    """As torch's version spells it."""
    from torch.nn.attention.varlen import varlen_attn

    def call(q, k, v, bounds, most):
        for options in (dict(window_size=(-1, 0), enable_gqa=True), dict(is_causal=True), dict(window_size=(-1, 0))):
            try:
                return varlen_attn(q, k, v, bounds, bounds, most, most, **options)
            except TypeError:
                continue
        raise RuntimeError("this torch has another varlen_attn")

    return call


def attention_varlen(name):
    lengths, (H, Hk, D) = PACKED[name], GQA
    bounds, most, total = bounds_of(lengths), max(lengths), sum(lengths)
    x, d_o = [normal(total, h, D) for h in (H, Hk, Hk)], normal(total, H, D)
    row = Row(f"attention {name.replace('x', '×')}")
    row.add("ours", lambda q, k, v: sd.flash_attn_varlen_func(q, k, v, bounds, bounds, most, most, causal=True), x, d_o)
    batch = [t.view(len(lengths), most, *t.shape[1:]) for t in (*x, d_o)]
    row.add("batch", lambda q, k, v: sd.flash_attn_func(q, k, v, causal=True), batch[:3], batch[3], lambda o: o.flatten(0, 1))
    row.add("varlen_attn", lambda q, k, v: torch_varlen()(q, k, v, bounds, most), x, d_o)
    return row


def padded_rows():
    B, H, S, D = 2, 16, 2048, 128
    x, d_o = [normal(B, S, H, D) for _ in range(3)], normal(B, S, H, D)
    least = torch.finfo(torch.bfloat16).min
    mask = torch.full((S, S), least, device="cuda", dtype=torch.bfloat16).triu(1)[None, None].expand(B, 1, S, S).contiguous()
    padded = mask.clone()
    padded[0, :, :7] = least
    row = Row("seven padded rows, B2 H16 S2048")
    row.add("ours", lambda q, k, v: sdpa(q, k, v, padded), x, d_o)
    row.add("without them", lambda q, k, v: sdpa(q, k, v, mask), x, d_o)
    row.add("torch", lambda q, k, v: sdpa(q, k, v, padded, torch_sdpa("EFFICIENT_ATTENTION")), x, d_o)
    return row


def flex(shared_heads, shared_batch):
    from torch.nn.attention.flex_attention import flex_attention
    torch._dynamo.reset()  # another row's shapes would make these dynamic, and the kernels slower
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q, k, v, bias):
        def add(score, b, h, i, j):
            return score + bias[0 if shared_batch else b, 0 if shared_heads else h, i, j]
        return compiled(*heads_first(q, k, v), score_mod=add).transpose(1, 2)

    return call


def shared_bias(B, H, by):
    S, D = 4096, 128
    x, d_o = [normal(B, S, H, D) for _ in range(3)], normal(B, S, H, D)
    heads, batch = "heads" in by, "batch" in by
    bias = normal(1 if batch else B, 1 if heads else H, S, S)
    row = Row(f"bias shared by {' and '.join(by)}, B{B} H{H}")
    row.add("ours", sdpa, [*x, bias], d_o)
    row.add("unshared", sdpa, [*x, bias.expand(B, H, S, S).contiguous()], d_o)
    row.add("flex_attention", flex(heads, batch), [*x, bias], d_o)
    return row


def f32_causal(D):
    H, Hk, _ = GQA
    x, d_o = [normal(1, 4096, h, D, dtype=torch.float32) for h in (H, Hk, Hk)], normal(1, 4096, H, D, dtype=torch.float32)
    row = Row(f"f32 causal H32/8 S4096 D{D}")
    options = dict(is_causal=True, enable_gqa=True)
    row.add("ours", functools.partial(sdpa, **options), x, d_o)
    row.add("torch", functools.partial(sdpa, of=repeated, is_causal=True), x, d_o)
    return row


def card_attention(kind, D=128):
    B, H, S = (1, 32, 4096) if kind == "causal" else (2, 16, 2048)
    x, d_o = [normal(B, S, H, D) for _ in range(3)], normal(B, S, H, D)
    names = {"bias": "bias [B, H, S, S] and its gradient,", "mask": "bias [B, H, S, S],"}
    row = Row(f"{names.get(kind, kind)} B{B} H{H} S{S} D{D}")
    options = dict(is_causal=kind == "causal")
    if kind == "bias":
        x.append(normal(B, H, S, S))
    if kind == "mask":
        options["bias"] = normal(B, H, S, S)
    row.add("ours", functools.partial(sdpa, **options), x, d_o)
    backend = "EFFICIENT_ATTENTION" if kind in ("bias", "mask") else "FLASH_ATTENTION"
    row.add("torch", functools.partial(sdpa, of=torch_sdpa(backend), **options), x, d_o)
    return row


# --- delta rules


def delta_operands(rule, B, T, H, HV, dtype=torch.bfloat16, D=128):
    keys = [torch.nn.functional.normalize(normal(B, T, H, D, dtype=torch.float32), dim=-1).to(dtype) for _ in range(2)]
    gate = normal(B, T, HV, *([D] if rule == "kda" else []), dtype=torch.float32)
    return [*keys, normal(B, T, HV, D, dtype=dtype), torch.nn.functional.logsigmoid(gate),
            normal(B, T, HV, dtype=torch.float32).sigmoid()]


OURS = {"gdn": sd.chunk_gated_delta_rule, "kda": sd.chunk_kda}


def fla(rule):
    """None where it is not installed."""
    try:
        if rule == "gdn":
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
        else:
            from fla.ops.kda import chunk_kda as function
    except ImportError:
        return None
    return function


def delta(rule, B, T, H, HV, dtype=torch.bfloat16):
    x = delta_operands(rule, B, T, H, HV, dtype)
    d_o = normal(*x[2].shape, dtype=dtype)
    heads = f"H{H}" if H == HV else f"H{H}/{HV}"
    row = Row(f"{'f32 ' if dtype == torch.float32 else ''}{rule.upper()} B{B} T{T} {heads}")
    row.add("ours", lambda q, k, v, g, beta: OURS[rule](q, k, v, g, beta)[0], x, d_o)
    if H == HV and (peer := fla(rule)):
        row.add("fla", lambda q, k, v, g, beta: peer(q, k, v, g=g, beta=beta)[0], x, d_o)
    return row


def delta_varlen(rule, name):
    lengths = PACKED_DELTA[name]
    bounds, total = bounds_of(lengths), sum(lengths)
    x = delta_operands(rule, 1, total, 32, 32)
    d_o = normal(*x[2].shape)
    row = Row(f"{rule.upper()} {name.replace('x', '×')}")
    row.add("ours", lambda q, k, v, g, beta: OURS[rule](q, k, v, g, beta, cu_seqlens=bounds)[0], x, d_o)
    batch = [t.view(len(lengths), lengths[0], *t.shape[2:]) for t in (*x, d_o)]
    row.add("batch", lambda q, k, v, g, beta: OURS[rule](q, k, v, g, beta)[0], batch[:5], batch[5],
            lambda o: o.flatten(0, 1)[None])
    if (peer := fla(rule)):
        row.add("fla", lambda q, k, v, g, beta: peer(q, k, v, g=g, beta=beta, cu_seqlens=bounds.long())[0], x, d_o)
    return row


ROWS = {
    **{f"attention varlen {n}": functools.partial(attention_varlen, n) for n in PACKED},
    "padded": padded_rows,
    "bias heads": lambda: shared_bias(1, 32, ["heads"]),
    "bias batch": lambda: shared_bias(2, 16, ["batch"]),
    "bias heads batch": lambda: shared_bias(2, 16, ["heads", "batch"]),
    "f32 attention D128": lambda: f32_causal(128),
    "f32 attention D64": lambda: f32_causal(64),
    "f32 gdn": lambda: delta("gdn", 8, 4096, 32, 32, torch.float32),
    **{f"{r} varlen {n}": functools.partial(delta_varlen, r, n) for r in OURS for n in PACKED_DELTA},
    "gdn batch": lambda: delta("gdn", 8, 4096, 32, 32),
    "gdn long": lambda: delta("gdn", 1, 32768, 16, 32),
    "card causal D128": lambda: card_attention("causal"),
    "card causal D64": lambda: card_attention("causal", 64),
    "card full D128": lambda: card_attention("full"),
    "card mask D128": lambda: card_attention("mask"),
    "card bias D128": lambda: card_attention("bias"),
    "card gdn": lambda: delta("gdn", 8, 4096, 32, 32),
    "card kda": lambda: delta("kda", 8, 4096, 32, 32),
}


# --- time


def milliseconds(call):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BUSY)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def distance(o, exact):
    return ((o.float() - exact.float()).norm() / exact.float().norm()).item()


def measure(row, repeats):
    """way → [ms forward, ms both, distance of o from the first way's], or what the way says where it fails."""
    found, first, flat_first = {}, None, None
    for way, (forward, both, flat) in row.ways.items():
        try:
            o = flat(forward())
            both()
            torch.cuda.synchronize()
        except Exception as failure:  # a peer's own: the row says so
            found[way] = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:120]}"
            continue
        first = o if first is None else first
        found[way] = [[], [], distance(o, first)]
    del first
    for turn in range(repeats + 1):
        for way, times in found.items():
            if isinstance(times, list):
                for i in range(2):
                    ms = milliseconds(row.ways[way][i])
                    if turn:
                        times[i].append(ms)
    return {way: t if isinstance(t, str) else [statistics.median(t[0]), statistics.median(t[1]), t[2]]
            for way, t in found.items()}


def microseconds(call, calls=2000):
    """Of the host: the median of calls, which wait for the GPU before its queue is full."""
    times = []
    for i in range(calls + 200):
        if i % 100 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[200:]) * 1e6


def host_rows():
    """name → way → µs forward, both."""
    B, S, H, D = 1, 128, 2, 64
    x = [normal(B, S, H, D).transpose(1, 2) for _ in range(3)]
    g, beta = -torch.rand(B, S, H, device="cuda"), torch.rand(B, S, H, device="cuda")
    d_o = normal(B, S, H, D).transpose(1, 2)
    rows = {"SDPA": {"ours": sd.scaled_dot_product_attention,
                     "torch": torch.nn.functional.scaled_dot_product_attention},
            "GDN": {"ours": lambda q, k, v: sd.chunk_gated_delta_rule(q, k, v, g, beta)[0]}}
    found = {}
    for name, ways in rows.items():
        for way, function in ways.items():
            if name == "GDN":
                leaves, out = [t.transpose(1, 2).contiguous().requires_grad_() for t in x], d_o.transpose(1, 2).contiguous()
            else:
                leaves, out = [t.detach().requires_grad_() for t in x], d_o

            def forward(function=function, leaves=leaves):
                with torch.no_grad():
                    function(*leaves)

            def both(function=function, leaves=leaves, out=out):
                torch.autograd.grad(function(*leaves), leaves, out)

            found.setdefault(name, {})[way] = [microseconds(forward), microseconds(both)]

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx, d):
            q, k, v = ctx.saved_tensors
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    leaves = [t.detach().requires_grad_() for t in x]
    found["SDPA"]["an empty function"] = [0.0, microseconds(lambda: torch.autograd.grad(Empty.apply(*leaves), leaves, d_o))]
    return found


def compile_share(share, shares):
    """Compiles a share of fla's kernels."""
    from peers_cuda import try_a_share
    try_a_share(share, shares)
    bf16, f32 = torch.bfloat16, torch.float32
    for rule, dtype, bounds in (("gdn", bf16, None), ("gdn", bf16, bounds_of([1024, 3072])), ("kda", bf16, None),
                                ("kda", bf16, bounds_of([1024, 3072])), ("gdn", f32, None)):
        q, k, v, g, beta = x = [t.requires_grad_() for t in delta_operands(rule, 1, 4096, 32, 32, dtype)]
        try:
            o = fla(rule)(q, k, v, g=g, beta=beta, cu_seqlens=None if bounds is None else bounds.long())[0]
            torch.autograd.grad(o, x, torch.randn_like(o))
        except Exception as failure:  # its row says so
            print(f"{rule} {dtype}: {failure}", file=sys.stderr)


def table(files):
    """Of files of --json: ours in ms, and how many times that each other way takes; rows of one name are one."""
    rows, host = {}, {}
    for file in files:
        with open(file) as text:
            found = json.load(text)
        for name, ways in found["rows"].items():
            rows.setdefault(name, {}).update(ways)
        host.update(found["host"])
    print("| work | ours | others, times that |\n|---|---|---|")
    for name, ways in rows.items():
        (_, ours), *others = ways.items()
        ratios = [f"{way} –" if isinstance(t, str) else f"{way} {t[0] / ours[0]:.2f}/{t[1] / ours[1]:.2f}" for way, t in others]
        print(f"| {name} | {ours[0]:.3g}/{ours[1]:.3g} | {', '.join(ratios)} |")
    for name, ways in host.items():
        (_, ours), *others = ways.items()
        print(f"| host, {name}: µs | {ours[0]:.0f}/{ours[1]:.0f} | {', '.join(f'{way} {t[1] / ours[1]:.2f}' for way, t in others)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="rows whose key contains this; may be repeated")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", metavar="FILE", help="write the rows here, after each one")
    parser.add_argument("--table", nargs="+", metavar="FILE")
    parser.add_argument("--compile", type=int, default=0, metavar="N")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)  # of those processes
    given = parser.parse_args()
    if given.table:
        return table(given.table)
    if given.share is not None:
        return compile_share(given.share, given.compile)
    for child in [subprocess.Popen([sys.executable, *sys.argv, "--share", str(i)]) for i in range(given.compile)]:
        child.wait()
    level = os.environ.get("SOFTDELTA_CUDA_LEVEL", "")
    found = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, level=level, rows={}, host={})
    print(found["device"], "torch", found["torch"], level)

    def keep():
        if given.json:
            with open(given.json, "w") as file:
                json.dump(found, file, indent=1)

    if given.only is None or "host" in given.only:
        torch.set_num_threads(1)
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(allowed)})
        found["host"] = host_rows()
        os.sched_setaffinity(0, allowed)
        print(*(f"host {name}, {way}: {us[0]:.0f} / {us[1]:.0f} µs" for name, ways in found["host"].items()
                for way, us in ways.items()), sep="\n", flush=True)
        keep()
    for key, make in ROWS.items():
        if not any(part in key for part in given.only) if given.only else key.startswith("card"):
            continue
        torch.manual_seed(1)
        torch.cuda.empty_cache()
        row = make()
        found["rows"][row.name] = ways = measure(row, given.repeats)
        print(row.name + ":", "   ".join(f"{way} {t}" if isinstance(t, str) else f"{way} {t[0]:.3f} / {t[1]:.3f} (differs by {t[2]:.0e})"
                                          for way, t in ways.items()), flush=True)
        keep()
        del row


if __name__ == "__main__":
    main()
