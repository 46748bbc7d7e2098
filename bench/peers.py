#!/usr/bin/env python3
"""softdelta beside its peers, in one process, taking turns on the same tensors: the floors that must hold.

    bench/get-peers /tmp/peers                      # torch, transformers and ggml, outside the repository
    /tmp/peers/venv/bin/python bench/peers.py --ggml /tmp/peers/ggml --json rows.json
    bench/report.py rows.json                       # docs/performance.md

A ratio is the peer's time over ours. A ceiling is what the machine reaches in this process with these threads:
multiply-adds between registers (f32, bf16), or memory read (read) or read and written (copy). Only unmasked work
counts. Each of our results is also compared, loosely, with the formula in f64. A peer is also timed alone, in a process
of its own, and its faster time counts: what ours leaves in caches and clocks may slow it down."""
import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile

import torch

import peers_attention
import peers_delta
import peers_family
from ggml_ctypes import Ggml
from peers_row import Machine, alternate, failure_of, measure
from softdelta_ctypes import Library

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=os.path.join(ROOT, "build", "src", "libsoftdelta.so"))
    parser.add_argument("--ggml", help="folder with a build of ggml; its rows are empty without")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side; the median counts")
    parser.add_argument("--patience", type=float, default=5, metavar="SECONDS",
                        help="what takes longer is measured three times only")
    parser.add_argument("--only", action="append", metavar="attention|delta|NAME",
                        help="rows whose name contains this; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the rows' names and stop")
    parser.add_argument("--json", metavar="FILE", help="write the rows, each with the machine and versions it ran on")
    parser.add_argument("--by-turns", action="store_true", help="do not time peers alone, too")
    parser.add_argument("--alone", metavar="FILE", help=argparse.SUPPRESS)  # of the process that times peers alone
    return parser.parse_args()


def cpu_name():
    with open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")


def version_of(module):
    try:
        return __import__(module).__version__
    except ImportError:
        return None


def compiler_of(library):
    """What the compiler wrote into the library about itself."""
    try:
        text = subprocess.run(["readelf", "-p", ".comment", library], capture_output=True, text=True).stdout
    except FileNotFoundError:
        text = ""
    found = re.findall(r"\]\s+(.*)", text)
    return ", ".join(sorted(set(found))) or None


def environment(machine):
    return {"cpu": cpu_name(), "threads": machine.threads, "system": platform.platform(),
            "isa": machine.library.isa(), "compiler": compiler_of(machine.library.path),
            "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""), "softdelta": machine.library.version(),
            "torch": torch.__version__, "transformers": version_of("transformers"),
            "ggml": machine.ggml and machine.ggml.version(),
            "limits": machine.limits, "scaling": machine.scaling}


def check_runtime():
    """torch, ggml and ours share one OpenMP runtime, and so one pool of threads; two would spin against each other."""
    with open("/proc/self/maps") as maps:
        found = {line.split()[-1] for line in maps if re.search(r"lib(g|i)?omp", line)}
    if len(found) > 1:
        sys.exit(f"more than one OpenMP runtime is loaded: {', '.join(sorted(found))}")


def chosen(machine, only):
    """The rows whose name contains one of `only`."""
    for row in [*peers_attention.rows(machine), *peers_delta.rows(machine), *peers_family.rows(machine)]:
        if not only or any(part in row.name for part in only):
            yield row


def time_alone(arguments, machine):
    """Median seconds of each peer, by the row's name; ours is not run."""
    found = {}
    for row in chosen(machine, arguments.only):
        work = None if row.peer.startswith("ours") else row.setup(machine)
        if work and work.peer and not failure_of(work.peer):
            found[row.name] = alternate([(work.peer, work.calls)], arguments.rounds, arguments.patience)[0]
    return found


def alone(arguments):
    """What time_alone() finds in a process of its own."""
    with tempfile.NamedTemporaryFile("r") as file:
        subprocess.run([sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--alone", file.name], check=True)
        return json.load(file)


def main():
    arguments = parse()
    if not os.path.exists(arguments.library):
        sys.exit(f"{arguments.library} does not exist: build softdelta (scripts/test does), or name it with --library")
    torch.set_num_threads(arguments.threads)
    library = Library(arguments.library, arguments.threads)
    ggml = Ggml(arguments.ggml, arguments.threads) if arguments.ggml else None
    check_runtime()
    machine = Machine(library, arguments.threads, ggml)
    if arguments.alone:
        with open(arguments.alone, "w") as file:
            json.dump(time_alone(arguments, machine), file)
        return 0
    peers = {} if arguments.list or arguments.by_turns else alone(arguments)
    if not arguments.list:
        machine.measure_limits()
        print(*(f"{name} {limit / 1e9:.0f} G{'flop' if name in ('f32', 'bf16') else 'B'}/s"
                for name, limit in machine.limits.items() if limit), sep=", ", flush=True)
    results, about = [], environment(machine)
    for row in chosen(machine, arguments.only):
        if arguments.list:
            print(row.name)
            continue
        found = measure(row, machine, arguments.rounds, arguments.patience, peers.get(row.name))
        results.append(found | {"environment": about})
        print(line(results[-1]), flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(results, file, indent=1)
    return 0 if all(r["holds"] is not False for r in results) else 1


def line(r):
    def number(value, form):
        return "–" if value is None else format(value, form)

    def against(value, floor):
        return number(value, ".2f") + (f" ≥ {floor:.2f}" if floor is not None else "")

    verdict = {True: "holds", False: "FAILS", None: "unknown"}[r["holds"]]
    return (f"{r['name']:<64} {number(r['ours_ms'], '.3f'):>10} ms  {r['peer']}{' alone' * r['alone']} {number(r['peer_ms'], '.3f')} ms  "
            f"ratio {against(r['ratio'], r['floor_ratio'])}  of ceiling "
            f"{against(r['ceiling_fraction'], r['floor_ceiling'])}  {verdict}  {r['note']}")


if __name__ == "__main__":
    sys.exit(main())
