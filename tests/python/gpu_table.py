"""Real kernels on an NVIDIA GPU under audit, as a table: tests/python/gpu_table.md, which museum.py puts into its page.

    PYTHONPATH=src/python python tests/python/gpu_table.py [--only NAME …] [--processes 16] [--cases FOLDER] >gpu_table.md

All forms that Triton will compile are shared out among the processes first, and the classes of inputs after. A kernel that is
not installed is left out.
"""
import argparse
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch  # noqa: E402

import softdelta  # noqa: E402
from softdelta._audit import run, worker  # noqa: E402

HERE = Path(__file__).parent
# Classes of delta rules. The first share has the checks.
SHARES = (("ordinary",), ("packed", "mixed"), ("steep", "length 65", "length 64", "rising"), ("correlated", "slow", "stateless"),
          ("length 63", "length 1", "raw", "forward"), ("length 4097", "views", "wide"),
          ("size 64", "size 128", "short sequences", "one sequence"))
# Name, function, operation, types, results, shares: how many, or their classes.
KERNELS = [
    ("fla chunk_kda", "chunk_kda", "kda", "bf16", "all", SHARES),
    ("fla chunk_gated_delta_rule, forward", "forward_chunk_gated_delta_rule", "gated_delta_rule", "bf16", "forward", SHARES),
    ("fla chunk_gated_delta_rule, its refusal of Hopper taken out", "unguarded_chunk_gated_delta_rule", "gated_delta_rule",
     "bf16", "all", SHARES),
    ("fla chunk_gdn2", "chunk_gdn2", "gdn2", "bf16", "all", SHARES),
    ("fla chunk_delta_rule", "chunk_delta_rule", "delta_rule", "bf16", "all", SHARES),
    ("fla chunk_simple_gla, forward", "forward_chunk_simple_gla", "simple_gla", "bf16", "forward", SHARES),
    ("fla chunk_simple_gla, its refusal of Hopper taken out", "unguarded_chunk_simple_gla", "simple_gla", "bf16", "all", SHARES),
    ("fla chunk_gated_delta_product, forward", "forward_chunk_gated_delta_product", "gated_delta_product", "bf16", "forward", SHARES),
    ("fla chunk_gated_delta_product, its refusal of Hopper taken out", "unguarded_chunk_gated_delta_product", "gated_delta_product", "bf16", "all", SHARES),
    ("fla chunk_comba, forward", "forward_chunk_comba", "comba", "bf16", "forward", SHARES),
    ("fla chunk_comba, its refusal of Hopper taken out", "unguarded_chunk_comba", "comba", "bf16", "all", SHARES),
    ("fla chunk_gla", "chunk_gla", "gla", "bf16", "all", SHARES),
    ("fla chunk_lightning_attn", "chunk_lightning_attn", "lightning", "bf16", "all", SHARES),
    ("fla chunk_rwkv7", "chunk_rwkv7", "dplr", "bf16", "all", SHARES),
    ("flash-sparse-attention 1.2.3, Triton", "sparse_attention", "attention", "bf16", "all", 3),
    ("torch SDPA", "torch.nn.functional:scaled_dot_product_attention", "attention", "bf16,f32", "all", 2),
    ("torch SDPA, flash", "sdpa_flash", "attention", "bf16", "all", 1),
    ("torch SDPA, efficient", "sdpa_efficient", "attention", "bf16", "all", 1),
    ("torch SDPA, cuDNN", "sdpa_cudnn", "attention", "bf16", "all", 1),
    ("torch flex_attention, compiled", "flex", "attention", "bf16", "all", 4),
    ("a Triton kernel that skips dead tiles", "skips_tiles", "attention", "bf16", "forward", 1),
    ("the same, losing the tile after", "loses_a_tile", "attention", "bf16", "forward", 1),
]


def compile_share(kernels, claims, end):
    """Compiles what no other process has taken, and launches nothing: what a kernel would compute is not looked at."""
    from triton.runtime.jit import JITFunction
    torch.set_num_threads(1)
    launch, compile_form, taken = JITFunction.run, JITFunction._do_compile, [0]

    def take(self, key, *a, **k):
        name = hashlib.blake2b(f"{self.fn.__module__} {self.fn.__qualname__} {key}".encode(), digest_size=16).hexdigest()
        try:
            os.close(os.open(os.path.join(claims, name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
        start = time.monotonic()
        kernel = compile_form(self, key, *a, **k)
        try:
            kernel.run  # what launches it is compiled, too
        except Exception:  # it asks for more than the GPU has: the audit says so
            pass
        taken[0] += 1
        print(f"{time.monotonic() - start:5.1f} s {self.fn.__qualname__}", file=sys.stderr, flush=True)
        return kernel

    JITFunction._do_compile = take
    JITFunction.run = lambda self, *a, grid, warmup, **k: launch(self, *a, grid=grid, warmup=True, **k)
    for name, function, op, dtypes, require, _ in kernels:
        try:
            function = worker.load(f"{HERE / 'gpu_kernels.py'}:{function}")
            parameters, named = worker.parameters_of(function), worker.named_of(function)
        except Exception as e:  # not installed
            print(f"{name}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            continue
        adapter = run.adapter_of(op, parameters or named)
        for call in run.draw_calls(op, adapter, 1, run.DTYPES[dtypes.split(",")[0]]) if time.monotonic() < end else ():
            call = call if op == "attention" else run.fit(call, parameters, named)[0]
            if call is None:
                continue
            x = {n: t.cuda() for n, t in call.tensors.items()}
            gradients = [] if require == "forward" else call.gradients
            try:
                worker.compute(function, {"options": {**call.options, **call.signature.extra}, "gradients": gradients,
                                          "op": op, "adapter": adapter}, x)
            except Exception as e:
                print(f"{name}, {call.name}: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr, flush=True)
    return taken[0]


def audit_share(name, function, op, dtypes, require, share, shares, cases, budget):
    """A share of the classes, or every shares-th class; with the first the checks."""
    draw, checks = run.draw_calls, run.run_checks

    def draw_share(*a):
        calls = draw(*a)
        return [c for c in calls if c.name in shares[share]] if isinstance(shares, tuple) else calls[share::shares]
    run.draw_calls = draw_share
    run.run_checks = lambda *a: checks(*a) if share == 0 else None
    torch.set_num_threads(1)
    start = time.monotonic()
    function = function if ":" in function else f"{HERE / 'gpu_kernels.py'}:{function}"
    output = os.path.join(cases, f"{name.replace(' ', '-')}-{share}.safetensors") if cases else False
    try:
        found = softdelta.audit(function, op=op, device="cuda", dtypes=dtypes.split(","), seed=20261127, require=require,
                                budget_s=budget, output=output)
    except ValueError as e:  # not installed
        print(f"{name}: {e}", file=sys.stderr, flush=True)
        return None
    finally:
        run.draw_calls, run.run_checks = draw, checks
    print(f"\n{name}, share {share}, after {time.monotonic() - start:.0f} s\n{found}", file=sys.stderr, flush=True)
    return found


def in_time(answer, end):
    try:
        return answer.get(max(end - time.monotonic(), 0))
    except multiprocessing.TimeoutError:
        return None


def row_of(name, found):
    verdicts = [f.verdict for f in found]
    verdict = next(v for v in ("wrong", "incomplete", "right", "cannot_be_judged") if v in verdicts)
    right, total = (sum(f.score[i] for f in found) for i in (0, 1))
    rows = [r for f in found for r in f.rows]
    wrong = [(", ".join(n for n, x in r.findings.items() if x.verdict == "wrong"), r) for r in rows if r.wrong]
    said = [f"{names} of {r.name} {r.dtype}" for names, r in wrong if names]
    failed = dict.fromkeys(f[:160] for names, r in wrong if not names for f in r.faults)
    said += [f"{f} ({sum(f in (x[:160] for x in r.faults) for r in rows)} calls)" for f in failed]
    said += [f"{c.name}: no" for f in found for c in f.checks if c.faults]
    for words, missing in (("refused", [f"{r.name} {r.dtype}" for r in rows if r.missing]),
                           ("not reached", [n for f in found for n in f.not_reached])):
        said += [f"{words}: {', '.join(missing)}"] if missing else []
    diagnosis = [d for f in found for d in f.diagnosis[:2] if d.startswith(("one mistake", "nearest"))]
    said += [f"“{d.partition('; the error was')[0]}”" for d in diagnosis[:1]]
    return f"| {name} | {verdict} | {right} of {total} | {'; '.join(said).replace('|', '/')} |"


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--only", nargs="*")
    p.add_argument("--processes", type=int, default=os.cpu_count())
    p.add_argument("--cases", help="folder for failing inputs, and their diagnosis")
    p.add_argument("--budget", type=float, default=600)
    a = p.parse_args()
    kernels = [k for k in KERNELS if not a.only or any(w in k[0] for w in a.only)]
    shares = [(*k[:5], i, k[5], a.cases, a.budget)
              for k in kernels for i in range(len(k[5]) if isinstance(k[5], tuple) else k[5])]
    shares.sort(key=lambda s: s[2] != "attention")  # those meanwhile that need no form
    end = time.monotonic() + a.budget
    with multiprocessing.get_context("spawn").Pool(a.processes) as pool, tempfile.TemporaryDirectory() as claims:
        of_triton = [k for k in kernels if k[1].removeprefix("unguarded_").removeprefix("forward_").startswith(("chunk_", "sparse_"))]
        compiled = [pool.apply_async(compile_share, (of_triton, claims, end - 2 * a.budget / 3)) for _ in range(a.processes if of_triton else 0)]
        waiting = [pool.apply_async(audit_share, s) for s in shares]
        print(f"forms compiled: {sum(in_time(c, end) or 0 for c in compiled)}", file=sys.stderr, flush=True)
        found = [in_time(w, end) for w in waiting]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| kernel | verdict | right | what is wrong or missing |\n"
          "|---|---|---|---|")
    for kernel in kernels:
        own = [f for f, s in zip(found, shares) if s[0] == kernel[0] and f is not None]
        if own:
            print(row_of(kernel[0], own))


if __name__ == "__main__":
    main()
