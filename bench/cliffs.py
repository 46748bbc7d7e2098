#!/usr/bin/env python3
"""Looks for cliffs: draws legal calls, times each beside its plain neighbour, and lists those that take longer for the
same work.

    bench/cliffs.py --calls 2000 --json cliffs.json      # of the softdelta that this Python imports
    bench/cliffs.py --device cuda --calls 500 --table    # the table of docs/performance.md

A neighbour does the same unmasked work in one contiguous batch of one type with no options (cliff_calls.py). A call that
takes more than twice the neighbour's time for its work is measured again, then stripped of what is peculiar about it until
nothing more can go: what is left names its class. The exit status is 1 where a class of more than three times has no
reason below."""
import argparse
import collections
import json
import random
import sys
import time

import torch

import softdelta
from cliff_calls import build, draw

BEYOND, FAR, SHOWN = 2.0, 3.0, 5.0

SCORES = "masks, biases and caps cost work for each score"
FILLED = "vectors and tiles are padded"
CONVERTED = "each number is converted"
STATES = "each sequence reads and writes its states, however short it is"
THREADS = "single threads compute it, without tiles"
# operation, step or None, what is peculiar, reason
REASONS = {
    "cpu": [
        *(("attention", step, name, SCORES) for step in ("forward", "backward") for name in
          ("mask", "bias", "alibi", "softcap", "rows without keys", "padded keys", "window")),
        ("attention", None, "sizes", FILLED),
        ("attention", None, "one type", CONVERTED),
        ("attention", "decode", "quantised", CONVERTED),
        ("attention", None, "layout", "channels that lie apart are read one by one"),
        ("convolution", None, "activation", "an exponential and a division for each number"),
        ("convolution", None, "channels first", "tokens are transposed on their way in and out"),
        ("convolution", None, "packed", "each sequence loads its own history"),
        ("convolution", None, "sizes", FILLED),
        ("attention", "backward", "packed", "a bias and its gradient have the longest sequence's size"),
        ("attention", "backward", "lengths", "gradients of hidden keys are written, too"),
        ("delta", None, "rising gates", "gates that rise by more than 1 in a chunk go token by token"),
        *(("delta", None, name, STATES) for name in ("packed", "few tokens", "initial state", "final state")),
        ("delta", None, "sizes", FILLED),
        ("delta", None, "raw gate", "an exponential, a logarithm and a division for each gate"),
    ],
    "cuda": [
        *(("attention", None, name, "rows without keys are computed again, and their call with them")
          for name in ("padded keys", "rows without keys")),
        ("attention", None, "bias", "shared by heads or batch rows: " + THREADS),
        ("attention", None, "mask", SCORES),
        ("attention", None, "alibi", SCORES),
        ("delta", None, "rising gates", "chunks whose gates rise go token by token in f64"),
        ("delta", None, "one large row", "chunks with a number that is not finite go token by token in f64"),
        *((operation, None, name, THREADS) for operation in ("attention", "delta") for name in
          ("one type", "sizes", "layout")),
        ("attention", None, "packed", "a grid has the longest sequence's blocks for each"),
    ],
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--busy", action="store_true", help="others use this machine: count processor time")
    parser.add_argument("--json", metavar="FILE", help="write every call")
    parser.add_argument("--table", action="store_true", help="print the classes as a table of Markdown")
    parser.add_argument("--one", action="store_true", help="the call of --seed alone, and what it is")
    return parser.parse_args()


clock = time.perf_counter


def seconds(run, device):
    """Of one call. A GPU gets several at once, for its clock starts late."""
    if device == "cpu":
        start = clock()
        run()
        return clock() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 3e3


def measure(call, plain, device, rounds):
    """How many times longer the same work takes than the neighbour's: the best of each, alternating, for what disturbs a
    machine only adds."""
    call.run(), plain.run()
    ours, theirs = float("inf"), float("inf")
    for _ in range(rounds):
        ours, theirs = min(ours, seconds(call.run, device)), min(theirs, seconds(plain.run, device))
    return ours / call.work / (theirs / plain.work), ours, theirs


def ratio_of(plan, device, rounds):
    call = build(plan, device)
    return measure(call, build(call.plain, device), device, rounds)


def smallest(plan, ratio, device):
    """The plan without all that is not needed to be beyond, and its ratio."""
    for name in list(plan.odd):
        if len(plan.odd) == 1:
            break
        less = plan.without(name)
        try:
            found = ratio_of(less, device, 5)[0]
        except (ValueError, softdelta.Unsupported):
            continue
        if found > BEYOND:
            plan, ratio = less, found
    return plan, ratio


def class_of(plan):
    """Words for what is peculiar: names, and those of their values that are words."""
    def words(name, value):
        if name in ("layout", "one type"):
            return f"{value[0]} {value[1]}"
        if name == "bias":
            dims = "".join(d for d, has in zip("BHQK", value[0]) if has) or "1"
            return f"bias [{dims}]" + " expanded" * value[1] + " with gradient" * (value[2] and plan.step == "backward")
        return f"{name} {value}" if isinstance(value, (str, float)) and not isinstance(value, bool) else name
    what = plan.base.get("rule", "")
    return (plan.operation, plan.step, what, plan.base["type"], ", ".join(words(n, x) for n, x in sorted(plan.odd.items())))


def reason_for(plan, device):
    """Why the call takes longer: a reason for everything that is peculiar about it, or None."""
    found = []
    for peculiar in plan.odd:
        found.append(next((reason for operation, step, name, reason in REASONS[device]
                           if operation == plan.operation and step in (None, plan.step) and name == peculiar), None))
    return None if None in found else "; ".join(sorted(set(found)))


def main():
    global clock
    arguments = parse()
    clock = time.process_time if arguments.busy else time.perf_counter
    if arguments.threads:
        softdelta.set_num_threads(arguments.threads)
        torch.set_num_threads(arguments.threads)
    found, rows, refused = [], [], collections.Counter()
    started = time.time()
    for seed in range(arguments.seed, arguments.seed + (1 if arguments.one else arguments.calls)):
        plan = draw(random.Random(seed), arguments.device == "cuda")
        try:
            ratio, ours, theirs = ratio_of(plan, arguments.device, 3)
            if ratio > BEYOND:
                ratio, ours, theirs = min((ratio, ours, theirs), ratio_of(plan, arguments.device, 7))
        except softdelta.Unsupported as e:
            refused[str(e)] += 1
            continue
        except ValueError as e:
            refused[str(e)] += 1
            continue
        rows.append({"seed": seed, "class": class_of(plan), "ratio": ratio, "ms": ours * 1e3, "plain_ms": theirs * 1e3})
        if arguments.one:
            print(plan, f"{ratio:.2f} ({ours * 1e3:.3f} ms beside {theirs * 1e3:.3f})")
        if ratio > BEYOND:
            plan, ratio = smallest(plan, ratio, arguments.device)
            found.append((ratio, plan, seed))
            print(f"\r{ratio:6.2f} × {' '.join(class_of(plan))} (seed {seed})", flush=True)
        if sys.stderr.isatty():
            print(f"\r{len(rows)} calls, {len(found)} beyond, {time.time() - started:.0f} s ", end="", file=sys.stderr)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"rows": rows, "beyond": [{"ratio": r, "class": class_of(p), "seed": s} for r, p, s in found]}, file)
    for text, count in refused.most_common():
        print(f"{count} refused: {text}")
    return report(found, len(rows), arguments)


def report(found, calls, arguments):
    print(f"{calls} calls, {len(found)} beyond {BEYOND:g} ×")
    if arguments.table:
        print_table(found, arguments.device)
    return 1 if any(ratio > FAR and reason_for(plan, arguments.device) is None for ratio, plan, _ in found) else 0


def print_table(found, device):
    """Classes of one reason as one row: what is peculiar, how often, the most. Those never beyond SHOWN are one
    row."""
    rows, near = collections.defaultdict(list), []
    for ratio, plan, _ in found:
        operation, step, _, _, _ = class_of(plan)
        reason = reason_for(plan, device)
        names = ", ".join(sorted(plan.odd))
        rows[reason or (operation, names), reason].append((ratio, operation, step, names))
    print("| operation | what is peculiar | calls | most, × | reason |\n|---|---|---|---|---|")
    for (_, reason), members in sorted(rows.items(), key=lambda row: -max(m[0] for m in row[1])):
        most = max(m[0] for m in members)
        if most <= SHOWN:
            near += members
            continue
        operations = "; ".join(f"{operation} {', '.join(sorted({m[2] for m in members if m[1] == operation}))}"
                               for operation in sorted({m[1] for m in members}))
        names = "; ".join(sorted({m[3] for m in members}))
        print(f"| {operations} | {names} | {len(members)} | {most:.1f} | {reason or '–'} |")
    if near:
        print(f"| all | everything else | {len(near)} | {max(m[0] for m in near):.1f} | |")


if __name__ == "__main__":
    sys.exit(main())
