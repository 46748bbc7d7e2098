"""The whole table: every right kernel and every cheat under audit, and which class catches which.

    PYTHONPATH=src/python python tests/python/audit_table.py [--op kda …] [--cheats plain sly] [--only NAME …] [--processes 16]

--cheats plain: audit_cheats.py; sly: audit_sly.py, with the right kernels of audit_kernels.py. Operations in their models' signatures
are model:gdn2 and so on. --markdown FOLDER writes a table for each operation, as audit_table.md is one. Exit status 1 when a right
kernel is accused or a cheat passes.
"""
import argparse
import multiprocessing
import os
import random
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import audit_cheats  # noqa: E402
import audit_kernels  # noqa: E402
import audit_sly  # noqa: E402
import torch  # noqa: E402

import softdelta  # noqa: E402
from softdelta._audit import run  # noqa: E402

# Cheats that are none for a rule: a gate per head has no channels.
NOT_OF = {"gated_delta_rule": {"gate of the mean"}}
PLAIN = ("kda", "gated_delta_rule", "attention")
OPS = (*audit_kernels.OPS, "dplr", *(f"model:{name}" for name in audit_kernels.MODELS))
# A cheat that cannot run is no cheat.
BROKEN = ("KeyError", "NameError", "AttributeError", "IndexError", "UnboundLocalError", "TypeError")


def kernels_of(op, cheats, group):
    """{name: (kind, kernel or how another process finds it)}"""
    model = op.removeprefix("model:")
    if group == "right":
        right = audit_cheats.kernels("right", op) if cheats == "plain" else \
            audit_kernels.of_model(model) if model != op else audit_kernels.kernels(op)
        return {name: ("", kernel) for name, kernel in right.items()}
    if cheats == "sly":
        return {name: (kind, f"{audit_sly.__file__}:{op.replace(':', '__')}_{i}" if name in audit_sly.NEEDS_A_PROCESS else kernel)
                for i, (name, (kind, kernel)) in enumerate(audit_sly.kernels(op).items())}
    return {name: ("", f"{audit_cheats.__file__}:cheat_{i}" if name == "computes with softdelta" else kernel)
            for i, (name, kernel) in enumerate(audit_cheats.kernels("cheat", op).items()) if name not in NOT_OF.get(op, ())}


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


def audit_one(task):
    """(task, kind, verdict, what caught it, sentences, seconds)"""
    op, cheats, group, name, seed, budget, dtypes, first = task
    torch.set_num_threads(1)
    if first and group == "cheat" and not hasattr(run, "first"):
        stop_at_the_first_fault()
        run.first = True
    audit_sly.memory.clear()
    random.seed(seed)
    kind, kernel = kernels_of(op, cheats, group)[name]
    start = time.monotonic()
    try:
        found = softdelta.audit(kernel, op=op.removeprefix("model:").partition(":")[0], budget_s=budget, output=False, seed=seed,
                                isolate=isinstance(kernel, str), dtypes=dtypes)
    except Exception as e:
        return task, kind, "broken", set(), [f"{type(e).__name__}: {e}"], time.monotonic() - start
    said = found.faults + found.gaps
    broken = group == "cheat" and any(f"failed: {e}" in s or f"refused: {e}" in s for s in said for e in BROKEN)
    return task, kind, "broken" if broken else found.verdict, caught_by(found), said, found.seconds


def table_of(op, cheats, rows, first):
    alone, total, lines = Counter(), Counter(), []
    for (_, _, _, name, *_), kind, verdict, by, _, _ in rows:
        plain = {c for c in by if not c.endswith(" f32")}
        total.update(plain)
        if len(plain) == 1:
            alone.update(plain)
        shown = sorted(plain) if len(plain) <= 4 else [*sorted(plain)[:3], f"{len(plain) - 3} more"]
        lines.append(f"| {name} | {kind} | {verdict} | {', '.join(shown)} |")
    return (f"# Cheats under audit, {op}\n\nWritten by `audit_table.py --op {op} --cheats {cheats}{' --first' if first else ''}`.\n\n"
            f"| cheat | kind | verdict | {'caught first by' if first else 'caught by'} |\n|---|---|---|---|\n" + "\n".join(lines) +
            "\n\n| class or check | cheats it catches | of these it alone |\n|---|---|---|\n" +
            "\n".join(f"| {name} | {n} | {alone[name]} |" for name, n in total.most_common()) + "\n")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--op", nargs="*", default=["kda"], help=f"all, or of {', '.join(OPS)}")
    p.add_argument("--cheats", nargs="*", default=["plain"], help="plain, sly")
    p.add_argument("--only", nargs="*")
    p.add_argument("--budget", type=float, default=600)
    p.add_argument("--dtypes", default="bf16,f32", help="of right kernels, or any: drawn; cheats are asked in bf16 and f32")
    p.add_argument("--seed", type=int, help="of the first; default: one that nobody knows")
    p.add_argument("--processes", type=int, default=1)
    p.add_argument("--seconds", type=float, default=1e9, help="stop after so many, and count what is done")
    p.add_argument("--markdown", metavar="FOLDER")
    p.add_argument("--first", action="store_true", help="stop each cheat at its first fault: the table says which that is")
    p.add_argument("--groups", nargs="*", default=["right", "cheat"])
    a = p.parse_args()
    seed = random.randrange(10**8) if a.seed is None else a.seed
    print(f"seed {seed}", flush=True)
    tasks = [(op, cheats, group, name) for op in (OPS if a.op == ["all"] else a.op) for cheats in a.cheats
             if cheats == "sly" or op in PLAIN for group in a.groups for name in kernels_of(op, cheats, group)
             if not a.only or name in a.only]
    drawn = random.Random(seed)
    types = [drawn.choice(("bf16", "f16", "f32", "bf16,f32")) if a.dtypes == "any" else a.dtypes for _ in tasks]
    tasks = [(*t, seed + i, a.budget, (types[i] if t[2] == "right" else "bf16,f32").split(","), a.first)
             for i, t in enumerate(tasks)]
    order = {t[:4]: i for i, t in enumerate(tasks)}
    random.Random(seed).shuffle(tasks)  # what is done when the time is over says something of all
    done, end = [], time.monotonic() + a.seconds
    with multiprocessing.get_context("spawn").Pool(a.processes) as pool:
        answers = pool.imap_unordered(audit_one, tasks)
        for _ in tasks:
            try:
                done.append(answers.next(max(end - time.monotonic(), 0.1)))
            except multiprocessing.TimeoutError:
                break
            (op, cheats, group, name, seed, _, dtypes, _), _, verdict, by, said, seconds = done[-1]
            plain = sorted(c for c in by if not c.endswith(" f32"))
            word = ("right " if verdict == "right" else "ACCUSED") if group == "right" else \
                "BROKEN" if verdict == "broken" else "caught" if by else "MISSED"
            print(f"{word} {op}, {name}: {verdict}, seed {seed}, {','.join(dtypes)}, {seconds:.0f} s" + (f", by {', '.join(plain)}" if plain else "") +
                  "".join(f"\n       {f}" for f in said[:12] if word in ("ACCUSED", "BROKEN", "MISSED")), flush=True)
        pool.terminate()
    done.sort(key=lambda d: order[d[0][:4]])
    failed = 0
    for op in dict.fromkeys(t[0] for t in order):
        for cheats in a.cheats:
            own = [d for d in done if d[0][:2] == (op, cheats)]
            right, caught = ([d for d in own if d[0][2] == group] for group in ("right", "cheat"))
            if not own:
                continue
            passed, seen = sum(d[2] == "right" for d in right), sum(bool(d[3]) and d[2] != "broken" for d in caught)
            failed += len(own) - passed - seen
            print(f"{op}, {cheats}: {seen} of {len(caught)} cheats caught, {passed} of {len(right)} right kernels passed")
            if a.markdown and caught:
                Path(a.markdown).mkdir(parents=True, exist_ok=True)
                Path(a.markdown, f"{op.replace(':', '_')}-{cheats}.md").write_text(table_of(op, cheats, caught, a.first))
    print(f"{len(done)} of {len(tasks)} audits done")
    return failed > 0 or len(done) < len(tasks)


if __name__ == "__main__":
    raise SystemExit(main())
