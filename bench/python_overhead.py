#!/usr/bin/env python3
"""What a call costs before it computes anything: tiny tensors through softdelta.torch, with and without gradients,
against the same C calls; what a C call of many sequences costs beside its work; and whether torch and softdelta get in
each other's way when their calls alternate.

    pip install .[torch]
    bench/python_overhead.py --library build/src/libsoftdelta.so [--threads 2] [--json FILE]
"""
import argparse
import json
import statistics
import time

import torch

import softdelta.torch
from softdelta_ctypes import BOTTOM_RIGHT, GATED_DELTA_RULE, Library


def microseconds(call, calls=500, rounds=9):
    """The least mean of several rounds."""
    for _ in range(calls):
        call()
    means = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - start) / calls)
    return min(means) * 1e6


def overhead(library):
    q, k, v = (torch.randn(1, 1, 1, 8) for _ in range(3))
    g, beta, state = -torch.rand(1, 1, 1), torch.rand(1, 1, 1), torch.zeros(1, 1, 8, 8)
    o, lse, new_state, do = torch.empty_like(v), torch.empty(1, 1, 1), torch.empty_like(state), torch.randn_like(v)
    foreign = microseconds(library.c.softdelta_isa_level_count)  # of ctypes itself

    def c_call(call):
        return microseconds(call) - foreign

    delta = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=state)
    rule = dict(rule=GATED_DELTA_RULE, use_qk_l2norm_in_kernel=1)
    attention = dict(q=q, k=k, v=v)
    like = torch.empty_like
    forward = {
        "gated delta rule": c_call(library.delta_forward(delta, dict(o=o, final_state=new_state), **rule)),
        "attention": c_call(library.attention_forward(attention, dict(o=o)))}
    del delta["initial_state"]  # training starts from nothing and keeps no state
    both = {
        "gated delta rule": c_call(library.delta_forward(delta, dict(o=o), **rule)) + c_call(library.delta_backward(
            delta, dict(d_o=do, dq=like(q), dk=like(k), dv=like(v), dg=like(g), dbeta=like(beta)), **rule)),
        "attention": c_call(library.attention_forward(attention, dict(o=o, lse=lse))) + c_call(library.attention_backward(
            attention, dict(d_o=do, o=o, lse=lse, dq=like(q), dk=like(k), dv=like(v))))}
    leaves = [t.clone().requires_grad_() for t in (q, k, v, g, beta)]
    sd = softdelta.torch

    def delta_with_gradients():
        out, _ = sd.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
        torch.autograd.grad(out, leaves, do)

    def attention_with_gradients():
        torch.autograd.grad(sd.scaled_dot_product_attention(*leaves[:3]), leaves[:3], do)

    python = {
        "gated delta rule": (microseconds(lambda: sd.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)),
                             microseconds(delta_with_gradients)),
        "attention": (microseconds(lambda: sd.scaled_dot_product_attention(q, k, v)),
                      microseconds(attention_with_gradients))}
    rows = []
    for name, (without, with_gradients) in python.items():
        rows.append(dict(call=name, gradients=False, c_us=forward[name], python_us=without,
                         overhead_us=without - forward[name]))
        rows.append(dict(call=name, gradients=True, c_us=both[name], python_us=with_gradients,
                         overhead_us=with_gradients - both[name]))
    return rows


def many_sequences(library, count=64, heads=8, size=64, keys=32, block=16):
    """A token of each of `count` sequences, on a pool of states and on a paged cache, against a token of one sequence with
    the heads of all. The bytes and the arithmetic are the same, and so are the units: kernels take up to eight heads
    together. What the first call takes longer, and what a call of one sequence with one head takes, is beside the work."""

    def step(sequences, heads):
        q, k, v = (torch.randn(sequences, 1, heads, size) for _ in range(3))
        pool = torch.zeros(sequences, heads, size, size)
        inputs = dict(q=q, k=k, v=v, g=-torch.rand(sequences, 1, heads), beta=torch.rand(sequences, 1, heads),
                      initial_state=pool, state_indices=torch.randperm(sequences, dtype=torch.int32))
        return library.delta_forward(inputs, dict(o=torch.empty_like(v), final_state=pool), rule=GATED_DELTA_RULE,
                                     use_qk_l2norm_in_kernel=1)

    def decode(sequences, heads, forward=library.attention_forward):
        q = torch.randn(sequences, 1, heads, size)
        k, v = (torch.randn(sequences * keys // block, block, heads, size) for _ in range(2))
        table = torch.randperm(len(k), dtype=torch.int32).view(sequences, -1)
        inputs = dict(q=q, k=k, v=v, block_table=table, cache_seqlens=torch.full((sequences,), keys, dtype=torch.int32))
        return forward(inputs, dict(o=torch.empty_like(q)), causal=BOTTOM_RIGHT)

    def layer(sequences, heads):
        return decode(sequences, heads, library.attention_plan)

    rows = []
    for name, call in ("gated delta rule", step), ("attention", decode), ("attention's plan", layer):
        many, one, least = (microseconds(call(*shape)) for shape in ((count, heads), (1, count * heads), (1, 1)))
        rows.append(dict(call=name, sequences=count, heads=heads, many_us=many, one_us=one, beside_us=many - one + least))
    return rows


def alternating(rounds=40):
    """Milliseconds of a torch product and of our attention, each alone and when they alternate."""
    a = torch.randn(1024, 1024)
    q = torch.randn(1, 8, 512, 64)
    calls = {"torch": lambda: a @ a, "softdelta": lambda: softdelta.torch.scaled_dot_product_attention(q, q, q)}

    def times(order):
        spent = {name: [] for name in order}
        for _ in range(rounds):
            for name in order:
                start = time.perf_counter()
                calls[name]()
                spent[name].append((time.perf_counter() - start) * 1e3)
        return {name: statistics.median(t[5:]) for name, t in spent.items()}

    together = times(list(calls))
    return [dict(call=name, alone_ms=times([name])[name], alternating_ms=together[name]) for name in calls]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libsoftdelta.so, for the C calls")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the rows here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    library = Library(options.library, options.threads)
    rows, sequences, pairs = overhead(library), many_sequences(library), alternating()
    for r in rows:
        print(f"{r['call']:18} {'forward and backward' if r['gradients'] else 'forward':22} C {r['c_us']:5.1f} µs   "
              f"Python {r['python_us']:5.1f} µs   over the C call {r['overhead_us']:5.1f} µs")
    for r in sequences:
        print(f"{r['call']:18} {r['sequences']} sequences {r['many_us']:5.1f} µs   one of as many heads {r['one_us']:5.1f} µs   "
              f"beside the work {r['beside_us']:5.1f} µs")
    for r in pairs:
        print(f"{r['call']:18} alone {r['alone_ms']:6.2f} ms   alternating {r['alternating_ms']:6.2f} ms")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(overhead=rows, many_sequences=sequences, alternating=pairs), file, indent=2)


if __name__ == "__main__":
    main()
