"""The whole table: every right kernel and every cheat under audit, and which class catches which.

    PYTHONPATH=src/python python tests/python/audit_table.py [--op kda] [--cheats plain|sly] [--only NAME …]

--cheats plain: audit_cheats.py; sly: audit_sly.py, and the right kernels of audit_kernels.py. --markdown FILE writes the table, as
tests/python/audit_table.md has it. Exit status 1 when a right kernel is accused or a cheat passes.
"""
import argparse
import os
from collections import Counter

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import audit_cheats  # noqa: E402
import audit_kernels  # noqa: E402
import audit_sly  # noqa: E402

import softdelta  # noqa: E402
from softdelta._audit import run  # noqa: E402

# Cheats that are none for a rule: a gate per head has no channels.
NOT_OF = {"gated_delta_rule": {"gate of the mean"}}


def kernels_of(op, cheats, group):
    """(name, kind, kernel or how another process finds it)"""
    if group == "right":
        right = audit_cheats.kernels("right", op) if cheats == "plain" else audit_kernels.kernels(op)
        return [(name, "", kernel) for name, kernel in right.items()]
    if cheats == "sly":
        return [(name, kind, f"{audit_sly.__file__}:{op}_{i}" if name in audit_sly.NEEDS_A_PROCESS else kernel)
                for i, (name, (kind, kernel)) in enumerate(audit_sly.kernels(op).items())]
    return [(name, "", f"{audit_cheats.__file__}:cheat_{i}" if name == "computes with softdelta" else kernel)
            for i, (name, kernel) in enumerate(audit_cheats.kernels("cheat", op).items()) if name not in NOT_OF.get(op, ())]


def audits(op, cheats, group, only, budget):
    for name, kind, kernel in kernels_of(op, cheats, group):
        if only and name not in only:
            continue
        audit_sly.memory.clear()
        yield name, kind, softdelta.audit(kernel, op=op, budget_s=budget, output=False, isolate=isinstance(kernel, str))


def stop_at_the_first_fault():
    """Nothing is asked of a function once something is wrong."""
    answer, audit_call = run.Runner.answer, run.audit_call

    def first_answer(self, *arguments, **keywords):
        reply = answer(self, *arguments, **keywords)
        self.end = 0 if self.manners else self.end
        return reply

    def first_call(runner, *arguments, **keywords):
        row = audit_call(runner, *arguments, **keywords)
        runner.end = 0 if row.wrong or row.missing else runner.end
        return row
    run.Runner.answer, run.audit_call = first_answer, first_call


def caught_by(found):
    classes = {r.name for r in found.rows if r.wrong or r.missing}
    twins = {f"{r.name} f32" for r in found.rows if r.dtype == "f32" and (r.wrong or r.missing)}
    return classes | twins | {c.name for c in found.checks if c.faults or c.missing and c.name not in found.not_reached}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--op", default="kda")
    p.add_argument("--cheats", choices=("plain", "sly"), default="plain")
    p.add_argument("--only", nargs="*")
    p.add_argument("--budget", type=float, default=600)
    p.add_argument("--markdown")
    p.add_argument("--first", action="store_true", help="stop each at its first fault: the table says which that is")
    p.add_argument("--no-right", action="store_true", help="leave out the right kernels")
    a = p.parse_args()
    if a.first:
        stop_at_the_first_fault()
    failed, alone, total, lines = 0, Counter(), Counter(), []
    for name, _, found in () if a.no_right else audits(a.op, a.cheats, "right", a.only, a.budget):
        failed += not found.right
        print(f"right  {name}: {found.verdict}, {found.seconds:.0f} s" + "".join(f"\n       {f}" for f in found.faults),
              flush=True)
    for name, kind, found in audits(a.op, a.cheats, "cheat", a.only, a.budget):
        by = caught_by(found)
        plain = {c for c in by if not c.endswith(" f32")}
        total.update(plain)
        if len(plain) == 1:
            alone.update(plain)
        failed += not by
        print(f"{'caught' if by else 'MISSED'} {name}: {found.verdict}, seed {found.seed}, {found.seconds:.0f} s, by "
              f"{', '.join(sorted(plain)) or 'nothing'}", flush=True)
        shown = sorted(plain) if len(plain) <= 4 else [*sorted(plain)[:3], f"{len(plain) - 3} more"]
        verdict = "wrong" if found.faults else "missed" if not by else "incomplete"
        lines.append(f"| {name} | {kind} | {verdict} | {', '.join(shown)} |")
    rows = [f"| {name} | {n} | {alone[name]} |" for name, n in total.most_common()]
    print("\nclass or check | cheats it catches | of these it alone\n" + "\n".join(rows))
    if a.markdown:
        with open(a.markdown, "w", encoding="utf-8") as file:
            by = "caught first by" if a.first else "caught by"
            file.write(f"# Cheats under audit, {a.op}\n\nWritten by `audit_table.py --op {a.op} --cheats {a.cheats}"
                       f"{' --first' if a.first else ''}`.\n\n"
                       f"| cheat | kind | verdict | {by} |\n|---|---|---|---|\n" + "\n".join(lines) +
                       "\n\n| class or check | cheats it catches | of these it alone |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main())
