#!/usr/bin/env python3
"""Two builds of softdelta on the rows of peers.py, in one process, taking turns: what a change did to speed.

    bench/before_after.py before/libsoftdelta.so build/src/libsoftdelta.so --threads 2 --only GDN

A ratio is the time before over the time after; below 1 it got slower. The median of 31 turns counts; a row that is more than
2 % slower is measured again with 101, and fails if it still is."""
import argparse
import os
import sys

import torch

import peers_attention
import peers_delta
from peers_row import Machine, alternate, failure_of
from softdelta_ctypes import Library

SLOWER = 0.98


def works(machine):
    """row name → a function that makes our call of the row"""
    rows = [*peers_attention.rows(machine), *peers_delta.rows(machine)]
    return {row.name: lambda row=row: row.setup(machine) for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--patience", type=float, default=5, metavar="SECONDS",
                        help="what takes longer is measured three times only")
    parser.add_argument("--only", action="append", metavar="TEXT", help="rows whose name contains this; may be repeated")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machines = [Machine(Library(os.path.abspath(path), arguments.threads), arguments.threads)
                for path in (arguments.before, arguments.after)]
    before, after = map(works, machines)
    failed = []
    for name in before:
        if ": ggml" in name or arguments.only and not any(part in name for part in arguments.only):
            continue
        sides = [before[name](), after[name]()]
        failures = [failure_of(work.ours) for work in sides]
        if any(failures):
            print(f"{name:<64} {failures}", flush=True)
            continue
        calls = [(work.ours, work.calls) for work in sides]
        rounds = arguments.rounds
        times = alternate(calls, rounds, arguments.patience)
        if times[0] / times[1] < SLOWER:
            rounds = 101
            times = alternate(calls, rounds, arguments.patience)
        ratio = times[0] / times[1]
        if ratio < SLOWER:
            failed.append(name)
        print(f"{name:<64} {times[0] * 1e3:10.3f} → {times[1] * 1e3:10.3f} ms  {ratio:.3f}  of {rounds}"
              f"{'  SLOWER' if ratio < SLOWER else ''}", flush=True)
    print(f"{len(failed)} rows slower")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
