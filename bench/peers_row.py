"""A row of the comparison: what is timed, against whom, and what must hold."""
import os
import statistics
import time
from dataclasses import dataclass
from typing import Callable, Optional

import torch


@dataclass
class Work:
    """One call of ours and one of the peer on the same tensors."""
    ours: Callable
    peer: Optional[Callable] = None     # None: the peer is not installed
    flops: float = 0                    # unmasked work of `ours`
    bytes: float = 0                    # memory traffic of `ours`, where that is the limit
    ceiling: Optional[str] = None       # which limit of the machine counts: f32, bf16, read, copy
    check: Optional[Callable] = None    # largest RMSE(ours − f64) / RMS(f64) over the results
    error_limit: float = 1e-4           # loose: finds wrong results, not imprecise ones
    peer_scale: float = 1               # the peer's time counts this many times (a smaller problem, say)
    calls: int = 1                      # calls in one measurement, for what is too short to time


@dataclass
class Row:
    name: str
    peer: str
    setup: Callable                     # (Machine) → Work
    floor_ratio: Optional[float] = None
    floor_ceiling: Optional[float] = None


class Machine:
    """What rows run on, and what it can do at most."""

    def __init__(self, library, threads, ggml=None):
        self.library, self.threads, self.ggml = library, threads, ggml
        self.limits = {}      # name → flop/s or byte/s
        self.scaling = None   # of the f32 ceiling loop from one thread to all

    def measure_limits(self):
        self.limits = {name: self.limit(name) for name in ("f32", "bf16", "read", "copy")}
        alone = self.library.ceiling("f32", 1)
        if alone:
            self.scaling = self.limits["f32"] / alone

    def limit(self, name):
        """Measured now: multiply-adds between registers, or memory that is read, or read and written."""
        if name in ("f32", "bf16"):
            return self.library.ceiling(name, self.threads)
        x = torch.ones(1 << 28)  # 1 GiB
        size = x.numel() * x.element_size()
        if name == "copy":
            return 2 * size / statistics.median(seconds(lambda: x.mul_(1.0), 1) for _ in range(5))
        # whichever reads faster: the library's own loop or torch's sum
        return max(size / statistics.median(seconds(x.sum, 1) for _ in range(5)),
                   self.library.bandwidth(self.threads) or 0)


def seconds(call, count):
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def alternate(sides, rounds, patience):
    """Median seconds of each side; sides take turns. A side that takes longer than `patience` is timed three times."""
    times = [[] for _ in sides]
    for _ in range(rounds):
        for (call, count), taken in zip(sides, times):
            if len(taken) < 3 or statistics.median(taken) <= patience:
                taken.append(seconds(call, count))
    return [statistics.median(taken) for taken in times]


def busy_seconds():
    """Processor time that other processes and other machines of the host took, and all there was."""
    with open("/proc/stat") as file:
        user, nice, system, idle, wait, irq, softirq, steal = [int(x) for x in file.readline().split()[1:9]]
    tick = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + irq + softirq + steal) / tick
    own = os.times()
    return busy - own.user - own.system, busy + (idle + wait) / tick


def failure_of(call):
    """Runs the call, which warms it up; the message of its failure, or None."""
    try:
        call()
        return None
    except RuntimeError as failure:
        return str(failure).splitlines()[0]


def measure(row, machine, rounds, patience, alone=None):
    """The row's result as a dictionary. alone: the peer's seconds in a process of its own; the faster time counts."""
    result = {"name": row.name, "ours_ms": None, "peer": row.peer, "peer_ms": None, "alone": False, "ratio": None,
              "ceiling_fraction": None, "floor_ratio": row.floor_ratio, "floor_ceiling": row.floor_ceiling,
              "holds": False, "limit": None, "error": None, "note": ""}
    work = row.setup(machine)
    notes, sides = [], {}
    for side, call in (("ours", work.ours), ("peer", work.peer)):
        failure = failure_of(call) if call else "not installed"
        if failure:
            notes.append(f"{side}: {failure}")
        else:
            sides[side] = (call, work.calls)
    if "ours" in sides and work.check:
        result["error"] = work.check()
    # clocks change, and memory is shared with whoever else runs on the host: limits count as they are now
    before, start = work.ceiling and machine.limit(work.ceiling), busy_seconds()
    medians = dict(zip(sides, alternate(list(sides.values()), rounds, patience)))
    elsewhere = [(y - x) for x, y in zip(start, busy_seconds())]
    after = work.ceiling and machine.limit(work.ceiling)
    limit = before and after and max(before, after)  # a disturbed limit must not flatter
    if elsewhere[0] > max(0.1, 0.05 * elsewhere[1]):
        notes.append(f"disturbed: others used {elsewhere[0] / elsewhere[1]:.0%} of the processors meanwhile")
    result["note"] = "; ".join(notes)
    if "peer" in medians:
        result["alone"] = alone is not None and alone < medians["peer"]
        result["peer_ms"] = (alone if result["alone"] else medians["peer"]) * work.peer_scale * 1e3
    if "ours" in medians:
        judge(result, work, medians["ours"], limit)
    return result


def judge(result, work, ours, limit):
    result["ours_ms"] = ours * 1e3
    held = []
    if result["peer_ms"] is not None:
        result["ratio"] = result["peer_ms"] / result["ours_ms"]
    if limit:
        result["limit"] = limit
        result["ceiling_fraction"] = (work.flops or work.bytes) / ours / limit
    for value, floor in (("ratio", "floor_ratio"), ("ceiling_fraction", "floor_ceiling")):
        if result[floor] is not None:
            held.append(None if result[value] is None else result[value] >= result[floor])
    if result["error"] is not None and not result["error"] <= work.error_limit:  # NaN is wrong too
        result["note"] += f"{'; ' * bool(result['note'])}wrong result: error {result['error']:.1e}"
        held.append(False)
    result["holds"] = False if False in held else None if None in held else True
