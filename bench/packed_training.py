#!/usr/bin/env python3
"""A packed pre-training step of the small hybrids of models.py: softdelta's kernels beside fla's rules and convolution (Triton) with
torch's attention, by turns.

    bench/packed_training.py [--only kimi_linear] [--tokens 16384] [--sequences 16] [--repeats 10] [--device cuda]

Sequences of drawn lengths lie in one row, as transformers' DataCollatorWithFlattening packs them. A row shows medians in ms of
loss and gradients, and how far both losses are from those of the same weights in f64, of the first --exact tokens on the CPU.
`--device cpu` shows that it runs.
"""
import argparse
import contextlib
import statistics
import time
import warnings

import torch
import transformers

import models
import softdelta.transformers


def packed(tokens, sequences, device):
    random = torch.Generator().manual_seed(3)
    cuts = torch.randperm(tokens - 1, generator=random)[:sequences - 1].sort().values + 1
    bounds = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), tokens)]).int()
    lengths = bounds.diff().tolist()
    ids = models.draw(tokens).to(device)
    labels = ids.clone()
    labels[0, bounds[:-1].long()] = -100  # no sequence predicts the next one's first token
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    bounds = bounds.to(device)
    return dict(input_ids=ids, labels=labels, position_ids=positions, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
                max_length_q=max(lengths), max_length_k=max(lengths), use_cache=False)


@contextlib.contextmanager
def fla_in(namespace):
    """fla's functions in a modeling file, in place of transformers'."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    def bounds(rest):
        return rest.get("cu_seqlens", rest.get("cu_seq_lens_q"))

    def rule(of):
        def call(q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **rest):
            if q.shape[2] != v.shape[2]:
                q, k = (t.repeat_interleave(v.shape[2] // q.shape[2], 2) for t in (q, k))
            return of(q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                      use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=bounds(rest))
        return call

    def convolution(x, weight, bias=None, activation=None, **rest):
        y, _ = causal_conv1d(x.transpose(1, 2).contiguous(), weight, bias, activation=activation, cu_seqlens=bounds(rest))
        return y.transpose(1, 2)

    new = {"torch_chunk_gated_delta_rule": rule(chunk_gated_delta_rule), "chunk_kimi_delta_attention": rule(chunk_kda),
           "causal_conv1d_fn": convolution}
    old = {name: namespace[name] for name in new if name in namespace}
    namespace.update({name: new[name] for name in old})
    try:
        yield
    finally:
        namespace.update(old)


def milliseconds(call, device):
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=models.CLASSES)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--exact", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--attention", choices=("sdpa", "flex_attention"), default="sdpa", help="the peer's")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for name in models.CLASSES:
        if given.only not in (None, name):
            continue
        small = packed(given.exact, given.sequences, "cpu")
        with softdelta.transformers.enable():
            model = models.build(name, torch.float64)
            model.set_experts_implementation("eager")  # torch's grouped products know no f64
            exact = model(**small).loss.item()
        model = models.build(name, torch.bfloat16).to(given.device)
        batch = packed(given.tokens, given.sequences, given.device)
        few = packed(given.exact, given.sequences, given.device)
        parameters = list(model.parameters())
        ways = {"softdelta": ("sdpa", softdelta.transformers.enable),
                "fla": (given.attention, lambda: fla_in(vars(__import__(type(model).__module__, fromlist="x"))))}

        def step():
            torch.autograd.grad(model(**batch).loss, parameters, allow_unused=True)

        losses, times = {}, {way: [] for way in ways}
        for turn in range(given.repeats + 2):
            for way, (attention, kernels) in ways.items():
                if way not in times:
                    continue
                model.set_attn_implementation(attention)
                try:
                    with kernels():
                        if turn == 0:
                            with torch.no_grad():
                                losses[way] = model(**few).loss.item()
                        ms = milliseconds(step, given.device)
                except Exception as failure:  # a peer's own: the row says so
                    if way == "softdelta":
                        raise
                    times = {"softdelta": times["softdelta"]}
                    print(f"{name}: {way}: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:150]}")
                    continue
                if turn >= 2:  # what compiles is not timed
                    times[way].append(ms)
        print(f"{name}, {given.tokens} tokens in {given.sequences} sequences:",
              "   ".join(f"{way} {statistics.median(ms):.1f} ms" for way, ms in times.items() if ms),
              "  loss of f64", f"{exact:.6f};", ", ".join(f"{way} {loss - exact:+.1e}" for way, loss in losses.items()), flush=True)


if __name__ == "__main__":
    main()
