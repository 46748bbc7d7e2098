"""softdelta.audit: draws inputs, calls your function on them, and says whether it is right."""
from __future__ import annotations

import argparse
import json
import sys

from .report import Audit


def audit(fn, *, op, device="cpu", dtypes=("bf16", "f32"), seed=None, require="all", budget_s=60, isolate=True,
          adapter=None, without=(), compile=False, output=None) -> Audit:
    """Whether a function computes an operation: its results on drawn inputs against the f64 truth, and its manners.

    fn        "module:function", "f.py:function", a function, or "kernels.so": a shared library with the names of
              softdelta/softdelta.h (softdelta_delta_forward, …)
    op        attention or the name of a rule; mamba2, lightning: simple GLA under its models' signatures
    device    where torch puts the inputs
    dtypes    storage types of the inputs; all after the first hold the numbers of the first
    seed      of the inputs; None: one that nobody knows before, Audit.seed tells it
    require   "all" results; "forward"; or names of results
    budget_s  seconds for all: what is not reached is named, and the verdict is incomplete
    isolate   True: the function runs in a process of its own, which never sees softdelta
    adapter   the signature: fla (rows q, k, v, g, beta, p) or gdn2 (b and w) for delta rules, mamba2 for mamba_ssm's; sdpa
              (torch), flash (flash_attn_func) or flashinfer (single_prefill_with_kv_cache) for attention; None: by the names
              of the parameters
    without   classes of inputs and checks to leave out, by name
    compile   True: torch.compile(fn)
    output    where the smallest failing input is saved; None: audit-OP-SEED.safetensors; False: nowhere, undiagnosed

    The verdict is right, wrong, incomplete (results, classes or checks are missing) or cannot_be_judged.
    """
    from .run import run_audit
    return run_audit(fn, op, device, dtypes, seed, require, budget_s, isolate, adapter, without, compile, output)


def write_inputs(op, folder, *, dtypes=("bf16", "f32"), seed=None, adapter=None) -> list[str]:
    """The inputs of an audit as case files, for kernels that Python cannot call: add results, then softdelta verify.
    Returns the paths. What a drawn call may not be told of its memory (strides) is not in a file."""
    from .run import write_calls
    return write_calls(op, folder, dtypes, seed, adapter)


def main(argv=None) -> int:
    """`softdelta audit`. Returns the exit status: 0 right, 1 wrong, 2 unusable, 3 incomplete or not to be judged."""
    p = argparse.ArgumentParser(prog="softdelta audit", description="Say whether a function computes an operation")
    p.add_argument("function", metavar="MODULE:FUNCTION", nargs="?",
                   help="or F.py:FUNCTION, or a shared library with the names of softdelta.h")
    p.add_argument("--op", required=True, help="as in a case file")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtypes", default="bf16,f32", help="storage types of the inputs (default: %(default)s)")
    p.add_argument("--seed", type=int, help="of the inputs; default: drawn, and printed")
    p.add_argument("--require", default="all", help="all, forward or names of results (default: %(default)s)")
    p.add_argument("--budget", type=float, default=60, help="seconds (default: %(default)s)")
    p.add_argument("--no-isolate", action="store_true", help="call the function in this process")
    p.add_argument("--adapter", help="signature of the function; default: by its parameters")
    p.add_argument("--without", default="", help="classes and checks to leave out, by name")
    p.add_argument("--compile", action="store_true", help="call torch.compile(FUNCTION)")
    p.add_argument("-o", "--output", help="case file for the smallest failing input")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--inputs", metavar="FOLDER", help="write the inputs as case files there, and call nothing")
    p.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    a = p.parse_args(argv)
    if (a.function is None) == (a.inputs is None):
        p.error("expected MODULE:FUNCTION or --inputs FOLDER")
    try:
        if a.inputs:
            print("\n".join(write_inputs(a.op, a.inputs, dtypes=a.dtypes.split(","), seed=a.seed, adapter=a.adapter)))
            return 0
        found = audit(a.function, op=a.op, device=a.device, dtypes=a.dtypes.split(","), seed=a.seed,
                      require=a.require if a.require in ("all", "forward") else a.require.split(","), budget_s=a.budget,
                      isolate=not a.no_isolate, adapter=a.adapter, without=[w for w in a.without.split(",") if w],
                      compile=a.compile, output=a.output)
        if a.junit:
            with open(a.junit, "w", encoding="utf-8") as file:
                file.write(found.junit())
    except (ValueError, OSError, ImportError) as e:
        print(f"softdelta audit: {e}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), indent=2) if a.json else found)
    return found.status


audit.main = main
audit.write_inputs = write_inputs
