"""What an audit found: a screen, JSON, JUnit XML."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

STATUS = {"right": 0, "wrong": 1, "incomplete": 3, "cannot_be_judged": 3}


@dataclass
class Row:
    """One call."""
    name: str  # of the class
    dtype: str
    findings: dict = field(default_factory=dict)  # result: softdelta.Finding
    faults: list = field(default_factory=list)  # sentences: why it is wrong
    missing: list = field(default_factory=list)  # results that did not come, and why
    seconds: float = 0

    @property
    def wrong(self) -> bool:
        return bool(self.faults) or any(f.verdict == "wrong" for f in self.findings.values())


@dataclass
class Check:
    name: str
    faults: list
    missing: str = ""  # why it was not made
    seconds: float = 0


@dataclass
class Audit:
    function: str
    op: str
    device: str
    seed: int
    seconds: float = 0
    rows: list = field(default_factory=list)
    checks: list = field(default_factory=list)
    left_out: list = field(default_factory=list)  # what the signature lacks or the caller left out
    not_reached: list = field(default_factory=list)  # within the budget
    hidden: dict | None = None  # mistakes that no input can show, as the call lacks something: what would show them
    case: str = ""  # file of the smallest failing input
    case_says: str = ""
    diagnosis: list = field(default_factory=list)
    repeat: str = ""  # the command that draws the same inputs

    @property
    def verdict(self) -> str:
        """right, wrong, incomplete or cannot_be_judged."""
        if any(r.wrong for r in self.rows) or any(c.faults for c in self.checks):
            return "wrong"
        if self.not_reached or any(r.missing for r in self.rows) or any(c.missing for c in self.checks):
            return "incomplete"
        judged = [f for r in self.rows for f in r.findings.values() if f.verdict != "cannot_be_judged"]
        return "right" if judged else "cannot_be_judged"

    @property
    def right(self) -> bool:
        return self.verdict == "right"

    @property
    def status(self) -> int:
        return STATUS[self.verdict]

    @property
    def score(self) -> tuple[int, int]:
        """Results and checks that are right, of how many."""
        total = sum(len(r.findings) + len(r.missing) for r in self.rows) + len(self.checks) + len(self.not_reached)
        right = sum(f.verdict in ("right", "digits_lost") for r in self.rows for f in r.findings.values())
        return right + sum(not c.faults and not c.missing for c in self.checks), total

    @property
    def faults(self) -> list:
        """Sentences; each fault once, with where it shows."""
        found = grouped((fault, r) for r in self.rows for fault in r.faults)
        wrong = {}
        for r in self.rows:
            for f in r.findings.values():
                if f.verdict == "wrong":
                    wrong.setdefault(f.name, []).append((r, f))
        for name, where in wrong.items():
            r, f = max(where, key=lambda pair: excess(pair[1]))
            of = sum(name in row.findings for row in self.rows)
            found.append(f"{name} is wrong in {len(where)} of {of} calls, most in {r.name} {r.dtype}: {f.note}")
        return found + [f"{c.name}: no. {f}" for c in self.checks for f in c.faults]

    @property
    def gaps(self) -> list:
        """Sentences: what is missing for a verdict."""
        found = grouped((missing, r) for r in self.rows for missing in r.missing)
        found += [f"{c.name}: {c.missing}" for c in self.checks if c.missing]
        if self.not_reached:
            found.append("not reached within the budget: " + ", ".join(self.not_reached))
        return found

    def to_dict(self) -> dict:
        number = lambda x: x if math.isfinite(x) else None  # JSON has no infinity
        return {
            "function": self.function, "op": self.op, "device": self.device, "seed": self.seed, "verdict": self.verdict,
            "status": self.status, "score": list(self.score), "seconds": round(self.seconds, 2),
            "rows": [{"class": r.name, "type": r.dtype, "wrong": r.wrong, "faults": r.faults, "missing": r.missing,
                      "results": [{"name": f.name, "ratio": number(f.ratio), "limit": number(f.limit),
                                   "verdict": f.verdict, "note": f.note} for f in r.findings.values()]}
                     for r in self.rows],
            "checks": [{"name": c.name, "faults": c.faults, "missing": c.missing} for c in self.checks],
            "faults": self.faults, "gaps": self.gaps, "left_out": self.left_out, "hidden": list(self.hidden or ()),
            "case": self.case,
            "diagnosis": self.diagnosis, "repeat": self.repeat}

    def junit(self) -> str:
        cases = [(f"{r.name} {r.dtype}", r.seconds,
                  r.faults + [f"{f.name}: {f.note}" for f in r.findings.values() if f.verdict == "wrong"], r.missing)
                 for r in self.rows]
        cases += [(c.name, c.seconds, c.faults, [c.missing] if c.missing else []) for c in self.checks]
        cases += [(name, 0, [], ["not reached within the budget"]) for name in self.not_reached]
        lines = []
        for name, seconds, faults, missing in cases:
            inner = f"<failure message={quoteattr(faults[0])}>{escape(chr(10).join(faults))}</failure>" if faults else \
                    f"<error message={quoteattr(missing[0])}/>" if missing else ""
            lines.append(f'  <testcase classname={quoteattr("audit." + self.op)} name={quoteattr(name)} '
                         f'time="{seconds:.3f}">{inner}</testcase>')
        failures, errors = sum(bool(c[2]) for c in cases), sum(bool(c[3]) and not c[2] for c in cases)
        return (f'<?xml version="1.0" encoding="utf-8"?>\n<testsuite name={quoteattr(self.function)} tests="{len(cases)}" '
                f'failures="{failures}" errors="{errors}" time="{self.seconds:.3f}">\n' + "\n".join(lines) +
                "\n</testsuite>\n")

    def __str__(self) -> str:
        right, total = self.score
        types = list(dict.fromkeys(r.dtype for r in self.rows))
        lines = [f"{self.function} as {self.op} on {self.device}: {self.verdict.replace('_', ' ')}",
                 f"  {right} of {total} right; types {', '.join(types)}; seed {self.seed}; {self.seconds:.0f} s"]
        names = list(dict.fromkeys(n for r in self.rows for n in r.findings))
        if names:
            table = [("error / limit", *(n.replace("final_state", "state").replace("initial_state", "state0") for n in names))]
            for row in dict.fromkeys(r.name for r in self.rows):
                same = [r.findings for r in self.rows if r.name == row]
                table.append((row, *(cell([f[n] for f in same if n in f]) for n in names)))
            widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
            lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in table]
        passed = sum(not c.faults and not c.missing for c in self.checks)
        lines.append(f"  checks passed: {passed} of {len(self.checks)}")
        lines += some("wrong", self.faults) + some("missing", self.gaps) + some("left out", self.left_out)
        if self.hidden:
            lines.append(f"  no input could show {', '.join(self.hidden)}")
        if self.case:
            lines.append(f"  smallest failing input: {self.case} ({self.case_says})")
        lines += [f"  diagnosis: {d}" for d in self.diagnosis[:4]]
        return "\n".join([line if len(line) <= 160 else line[:157] + "..." for line in lines] +
                         [f"  again: {self.repeat}"])


def grouped(pairs):
    """Sentences with the calls that show them; those that differ in numbers only are one."""
    shown = {}
    for sentence, r in pairs:
        shown.setdefault(re.sub(r"\d+", "0", sentence), []).append((sentence, f"{r.name} {r.dtype}"))
    return [f"{where[0][0]} ({where[0][1]}{f' and {len(where) - 1} more' if len(where) > 1 else ''})"
            for where in shown.values()]


def some(heading, sentences, most=8):
    rest = [f"  and {len(sentences) - most} more"] if len(sentences) > most else []
    return [f"  {heading}: {s}" for s in sentences[:most]] + rest


def excess(f) -> float:
    if f.verdict == "wrong" and "NaN" in f.note:
        return math.inf
    if f.ratio == 0:
        return 0
    return f.ratio / f.limit if f.limit > 0 else math.inf


def cell(findings) -> str:
    """Of one result in all types: the worst."""
    wrong = [f for f in findings if f.verdict == "wrong"]
    judged = [f for f in findings if f.verdict not in ("wrong", "cannot_be_judged")]
    if not wrong and not judged:
        return "?" if findings else ""
    x = max(excess(f) for f in wrong or judged)
    text = "?" if math.isnan(x) else "NaN" if x == math.inf else f"{x:.2f}" if x < 10 else f"{x:.0f}" if x < 1e4 else f"{x:.0e}"
    return text + (" WRONG" if wrong else " digits" if any(f.verdict == "digits_lost" for f in judged) else "")
