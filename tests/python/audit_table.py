"""The whole table: every right kernel and every cheat of audit_cheats.py under audit, and which class catches which.

    PYTHONPATH=src/python python tests/python/audit_table.py [--op kda] [--only NAME …]

Exit status 1 when a right kernel is accused or a cheat passes.
"""
import argparse
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import audit_cheats  # noqa: E402
import softdelta  # noqa: E402

FILE = Path(audit_cheats.__file__)
# Cheats that are none for a rule: a gate per head has no channels.
NOT_OF = {"gated_delta_rule": {"gate of the mean"}}


def audits(op, group, only, budget):
    for i, (name, kernel) in enumerate(audit_cheats.kernels(group, op).items()):
        if name in NOT_OF.get(op, ()) or only and name not in only:
            continue
        isolate = name == "computes with softdelta"
        found = softdelta.audit(f"{FILE}:{group}_{i}" if isolate else kernel, op=op, budget_s=budget, output=False,
                                isolate=isolate)
        yield name, found


def caught_by(found):
    classes = {r.name for r in found.rows if r.wrong or r.missing}
    twins = {f"{r.name} f32" for r in found.rows if r.dtype == "f32" and (r.wrong or r.missing)}
    return classes | twins | {c.name for c in found.checks if c.faults}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--op", default="kda")
    p.add_argument("--only", nargs="*")
    p.add_argument("--budget", type=float, default=600)
    a = p.parse_args()
    failed, alone, total = 0, Counter(), Counter()
    for name, found in audits(a.op, "right", a.only, a.budget):
        failed += not found.right
        print(f"right  {name}: {found.verdict}, {found.seconds:.0f} s" + "".join(f"\n       {f}" for f in found.faults),
              flush=True)
    for name, found in audits(a.op, "cheat", a.only, a.budget):
        by = caught_by(found)
        plain = {c for c in by if not c.endswith(" f32")}
        total.update(plain)
        if len(plain) == 1:
            alone.update(plain)
        failed += found.right
        print(f"{'MISSED' if found.right else 'caught'} {name}: {found.verdict}, seed {found.seed}, {found.seconds:.0f} s, by "
              f"{', '.join(sorted(plain)) or 'nothing'}", flush=True)
    print("\nclass or check: cheats it catches, of these it alone")
    for name, n in total.most_common():
        print(f"  {name}: {n}, {alone[name]}")
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main())
