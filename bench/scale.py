#!/usr/bin/env python3
"""How long one layer takes on many ranks, by a model: the time of the operations and the speed of the links are given,
and ranks are followed step by step. docs/scale.md explains it and has its tables.

    bench/scale.py                             # all tables
    bench/scale.py --ranks 64 --tokens 1e6     # one row for each link and method
    bench/scale.py --forward 51.4              # ms of KDA forward, T4096 H32 D128, as docs/performance.md has it

Needs Python alone.
"""
import argparse
from dataclasses import dataclass

LINKS = {"10 Gb/s": (1.25e9, 30e-6), "100 Gb/s": (12.5e9, 10e-6), "400 Gb/s": (50e9, 5e-6), "NVLink": (450e9, 3e-6)}
RANKS, TOKENS = (8, 64, 512, 4096), (1e5, 1e6, 1e7, 1e8)


@dataclass
class Layer:
    heads: int = 32
    size: int = 128
    forward: float = 20.4e-3  # s, delta rule, 4096 tokens of all heads
    backward: float = 3.05  # times forward
    attention: float = 0.9e12  # multiply-adds counted as two, per second
    element: int = 2  # bytes of q, k, v, o; gates have 4
    threads: int = 0  # of a rank, where one thread computes a head; 0: all compute any number of heads as fast

    def scan(self, tokens):
        return self.forward * tokens / 4096


@dataclass
class Result:
    seconds: float
    sent: float  # bytes by one rank
    kept: float  # bytes that one rank keeps besides its own tensors

    def efficiency(self, alone, ranks):
        return alone / (ranks * self.seconds)


def relay(layer, ranks, tokens, link):
    """Forward and backward. A rank starts a group of heads when it has finished the previous group and has received its
    states."""
    speed, latency = link
    groups, share = min(layer.heads, 4 * (ranks - 1)), 0.0
    if layer.threads:
        def turns(count):  # of the threads, one after the other, in a group
            return -(-layer.heads // count // layer.threads)

        groups = min(range(1, layer.heads + 1), key=lambda count: (count + ranks - 1) * turns(count))
        share = turns(groups) * layer.threads / layer.heads
    states = layer.heads / groups * layer.size**2 * 4
    seconds = 0.0
    for work in (1.0, layer.backward):
        step = layer.scan(tokens / ranks) * work * (share or 1 / groups)
        hand_over = states / speed + latency
        seconds += groups * step + (ranks - 1) * (step + hand_over)  # the last rank's last group
        seconds += max(0.0, hand_over - step) * (groups - 1)  # a link that is slower than the groups
    return Result(seconds, 2 * groups * states, layer.heads * layer.size**2 * 8)


def scan(layer, ranks, tokens, link):
    """Summaries (M and E) before the forward pass, R before the backward pass; gathered around a ring."""
    speed, latency = link
    matrix = layer.heads * layer.size**2 * 4
    own = layer.scan(tokens / ranks)
    gather = 3 * (ranks - 1) * matrix / speed + 3 * (ranks - 1) * latency
    fold = 2 * (ranks - 1) * layer.heads * 2 * layer.size**3 / layer.attention
    return Result(own * (3 + 2 * layer.backward) + gather + fold, 3 * (ranks - 1) * matrix, 3 * ranks * matrix)


def heads(layer, ranks, tokens, link):
    """All to all exchanges of q, k, v, gate and o, and of their gradients."""
    if ranks > layer.heads:
        return None
    speed, latency = link
    row = layer.heads * layer.size * (4 * layer.element + 4)
    sent = 2 * tokens / ranks * row * (ranks - 1) / ranks
    seconds = layer.scan(tokens / ranks) * (1 + layer.backward) + sent / speed + 4 * (ranks - 1) * latency
    return Result(seconds, sent, 2 * tokens / ranks * row)


def ring(layer, ranks, tokens, link, zigzag=True):
    """Causal attention. A step takes as long as the longer of its products and its transfer; without zigzag order the
    last rank is the slowest."""
    speed, latency = link
    rows = tokens / ranks
    block = 4 * rows**2 * layer.heads * layer.size / layer.attention  # a full block, forward
    moved = 2 * rows * layer.heads * layer.size * layer.element
    seconds = 0.0
    for work, carried in ((1.0, 1.0), (2.5, 3.0)):  # backward: five products; gradients in f32 travel too
        for step in range(ranks):
            products = block * work * (0.5 if zigzag or step == 0 else 1.0)
            seconds += max(products, (carried * moved / speed + latency) if step + 1 < ranks else 0.0)
    return Result(seconds, 4 * (ranks - 1) * moved, 6 * moved)


METHODS = {"relay": relay, "scan": scan, "heads": heads}


def alone(layer, tokens, attention=False):
    if attention:
        return 3.5 * 2 * tokens**2 * layer.heads * layer.size / layer.attention
    return layer.scan(tokens) * (1 + layer.backward)


def short(seconds):
    for unit, size in (("d", 86400), ("h", 3600), ("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def size(count):
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def rows(layer, ranks_of, tokens_of, links):
    print("| T | P | link | relay | scan | heads | best | attention, zigzag ring |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens in tokens_of:
        for ranks in ranks_of:
            for name in links:
                cells, best = [], None
                for method, model in METHODS.items():
                    found = model(layer, ranks, tokens, LINKS[name])
                    if found is None:
                        cells.append("–")
                        continue
                    best = min(best or (found.seconds, method), (found.seconds, method))
                    cells.append(f"{short(found.seconds)}, {found.efficiency(alone(layer, tokens), ranks):.2f}")
                found = ring(layer, ranks, tokens, LINKS[name])
                attention = f"{short(found.seconds)}, {found.efficiency(alone(layer, tokens, True), ranks):.2f}"
                print(f"| {tokens:.0e} | {ranks} | {name} | {' | '.join(cells)} | {best[1]} | {attention} |")


def traffic(layer, ranks_of, tokens_of):
    print("| T | P | relay | scan | heads | ring | kept by scan |")
    print("|---|---|---|---|---|---|---|")
    link = LINKS["100 Gb/s"]
    for tokens in tokens_of:
        for ranks in ranks_of:
            found = [model(layer, ranks, tokens, link) for model in (relay, scan, heads, ring)]
            sent = " | ".join("–" if f is None else size(f.sent) for f in found)
            print(f"| {tokens:.0e} | {ranks} | {sent} | {size(found[1].kept)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--tokens", type=float, nargs="*", default=TOKENS)
    parser.add_argument("--links", nargs="*", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--heads", type=int, default=Layer.heads)
    parser.add_argument("--size", type=int, default=Layer.size)
    parser.add_argument("--forward", type=float, default=Layer.forward * 1e3, help="ms")
    parser.add_argument("--threads", type=int, default=Layer.threads, help="of a rank, one for each head; 0: any")
    given = parser.parse_args()
    layer = Layer(heads=given.heads, size=given.size, forward=given.forward / 1e3, threads=given.threads)
    rows(layer, given.ranks, given.tokens, given.links)
    print()
    traffic(layer, given.ranks, given.tokens)


if __name__ == "__main__":
    main()
