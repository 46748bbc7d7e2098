"""What a rank needs besides its own tensors.

    python tests/python/ranks_memory.py 1e7 8 relay scan         # tokens, ranks, methods: MiB on each rank
"""
import sys

import torch
import torch.distributed as dist


def _peak(field="VmHWM") -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) << 10


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def _run(tokens, method) -> float:
    import softdelta.torch.distributed as sdd

    size, kind = 64, torch.bfloat16
    q, k, v, do = (torch.randn(1, tokens, 1, size, dtype=kind) for _ in range(4))
    k *= size**-0.5
    g, beta = -torch.rand(1, tokens, 1, size, dtype=kind), torch.rand(1, tokens, 1, dtype=kind)
    given = [t.requires_grad_() for t in (q, k, v, g, beta)]
    _forget_peak()
    before = _peak("VmRSS")
    o, _ = sdd.delta_rule("kda", q, k, v, g=g, beta=beta, method=method)
    o.backward(do)
    results = sum(t.numel() * t.element_size() for t in (o, *(x.grad for x in given)))
    return (_peak() - before - results) / 2**20


def needed(tokens, method) -> float:
    """The peak of KDA forward and backward in MiB, without operands and results: a rank's share of so many tokens, H1 D64
    bf16. A small call comes first, so that libraries are loaded."""
    _run(1024, method)
    return _run(tokens // dist.get_world_size(), method)


if __name__ == "__main__":
    import ranks

    for name in sys.argv[3:]:
        found = ranks.run(int(sys.argv[2]), needed, int(float(sys.argv[1])), name, timeout=3000)
        print(name, *(f"{x:.0f}" for x in found), "MiB")
