#!/usr/bin/env python3
"""How long short calls take beside other busy processes: mean, median and 99th percentile in µs, on one thread and on
all, with the processors idle and with a busy process beside each of them.

    bench/under_load.py --library build/src/libsoftdelta.so [--threads 2] [--busy 2] [--only TEXT]
"""
import argparse
import os
import subprocess
import time

import torch

from softdelta_ctypes import GATED_DELTA_RULE, KDA, Library


def decode(library, threads, heads, keys, size, dtype, key_heads=None):
    rows = dict(dtype=dtype)
    q = torch.randn(1, 1, heads, size).to(**rows)
    k, v = (torch.randn(1, keys, key_heads or heads, size).to(**rows) for _ in range(2))
    return library.attention_forward(dict(q=q, k=k, v=v), dict(o=torch.empty_like(q)), threads)


def prefill(library, threads, heads, rows, size):
    q, k, v = (torch.randn(1, rows, heads, size) for _ in range(3))
    return library.attention_forward(dict(q=q, k=k, v=v), dict(o=torch.empty_like(q)), threads)


def step(library, threads, rule, heads, size=128):
    q, k, v = (torch.randn(1, 1, heads, size) for _ in range(3))
    g = -torch.rand(*((1, 1, heads, size) if rule == KDA else (1, 1, heads)))
    state = torch.zeros(1, heads, size, size)
    inputs = dict(q=q, k=k, v=v, g=g, beta=torch.rand(1, 1, heads), initial_state=state)
    return library.delta_forward(inputs, dict(o=torch.empty_like(v), final_state=state), threads, rule=rule,
                                 use_qk_l2norm_in_kernel=1)


F32, BF16 = torch.float32, torch.bfloat16
CALLS = {
    "decode H8 L128 D64 f32": lambda l, t: decode(l, t, 8, 128, 64, F32),
    "decode H8 L512 D64 bf16": lambda l, t: decode(l, t, 8, 512, 64, BF16),
    "decode H8 L512 D64 f32": lambda l, t: decode(l, t, 8, 512, 64, F32),
    "decode H8 L512 D128 bf16": lambda l, t: decode(l, t, 8, 512, 128, BF16),
    "decode H8 L512 D128 f32": lambda l, t: decode(l, t, 8, 512, 128, F32),
    "decode H32/8 L512 D128 bf16": lambda l, t: decode(l, t, 32, 512, 128, BF16, 8),
    "decode H8 L4096 D128 f32": lambda l, t: decode(l, t, 8, 4096, 128, F32),
    "GDN step H16 D128": lambda l, t: step(l, t, GATED_DELTA_RULE, 16),
    "KDA step H16 D128": lambda l, t: step(l, t, KDA, 16),
    "GDN step H24 D128": lambda l, t: step(l, t, GATED_DELTA_RULE, 24),
    "GDN step H32 D128": lambda l, t: step(l, t, GATED_DELTA_RULE, 32),
    "forward H8 L64 D64 f32": lambda l, t: prefill(l, t, 8, 64, 64),
    "forward H8 L128 D64 f32": lambda l, t: prefill(l, t, 8, 128, 64),
    "forward H8 L512 D64 f32": lambda l, t: prefill(l, t, 8, 512, 64),
}


def measure(call, seconds):
    """Mean, median and 99th percentile in µs."""
    for _ in range(20):
        call()
    times, clock = [], time.perf_counter
    end = clock() + seconds
    while (start := clock()) < end:
        call()
        times.append(clock() - start)
    times.sort()
    n = len(times)
    return [x * 1e6 for x in (sum(times) / n, times[n // 2], times[n * 99 // 100])]


class BusyProcesses:
    def __init__(self, count):
        self.all = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]

    def __enter__(self):
        time.sleep(0.2)

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/src/libsoftdelta.so")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="busy processes")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--only", default="", help="calls whose name has this in it")
    args = parser.parse_args()
    library = Library(args.library, args.threads)
    print("| call | threads | idle: mean | p50 | p99 | busy: mean | p50 | p99 |\n|---|---|---|---|---|---|---|---|")
    for name, make in CALLS.items():
        if args.only not in name:
            continue
        for threads in (1, args.threads):
            call = make(library, threads)
            figures = measure(call, args.seconds)
            with BusyProcesses(args.busy):
                figures += measure(call, args.seconds)
            print(f"| {name} | {threads} | " + " | ".join(f"{x:.3g}" for x in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
