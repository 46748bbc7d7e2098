"""Case files: one call of one operation, dumped by the code that computed it, judged against the f64 truth."""
from __future__ import annotations

import math
import os
import sys
import warnings
from dataclasses import dataclass, field, replace

from . import _native, _options
from ._arrays import Arrays


@dataclass(frozen=True)
class Finding:
    """What there is to say about one result."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    largest_error: float  # |result − truth|
    at: tuple[int, ...]
    ratio: float  # RMSE(result − truth) / RMS(truth)
    limit: float  # of the ratio: what a right kernel of this precision may have
    verdict: str  # right, digits_lost, wrong, cannot_be_judged
    note: str  # why it is wrong, and where first; why it cannot be judged; which digits are lost


_WORDS = {"digits_lost": "right, digits lost", "cannot_be_judged": "cannot be judged"}


def summarise(findings) -> str:
    verdicts = {f.verdict for f in findings}
    return next((v for v in ("wrong", "cannot_be_judged") if v in verdicts), "right")


@dataclass(frozen=True)
class Report:
    """The verdict on a case; str() is a table, in which nothing that a file says stands outside quotes."""
    op: str
    producer: str
    results: tuple[Finding, ...]
    notes: tuple[str, ...] = field(default=())
    missing: tuple[str, ...] = field(default=())  # results that were required
    engine: str = ""  # of ours, whose results are judged

    @property
    def verdict(self) -> str:
        """right (digits lost included), or else wrong, or else cannot_be_judged; of a right one that lacks a required
        result, incomplete."""
        verdict = summarise(self.results)
        return "incomplete" if verdict == "right" and self.missing else verdict

    @property
    def right(self) -> bool:
        return self.verdict == "right"

    def __str__(self) -> str:
        rows = [("result", "shape", "type", "largest error", "at", "ratio", "limit", "verdict")]
        rows += [(f.name, str(list(f.shape)), f.dtype, f"{f.largest_error:.2e}", str(list(f.at)), f"{f.ratio:.2e}",
                  f"{f.limit:.2e}", _WORDS.get(f.verdict, f.verdict))
                 for f in self.results]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        producer = f" (engine {self.engine})" if self.engine else f" ({quote(self.producer)})" if self.producer else ""
        lines = [f"{self.op}: {_WORDS.get(self.verdict, self.verdict)}{producer}"]
        lines += ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        lines += [f"  {f.name}: {f.note}" for f in self.results if f.note]
        lines += [f"  {name}: missing" for name in self.missing]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def verify(path, *, limits=None, engine=None, threads=None, require=()) -> Report:
    """Judges every result that a case file holds against the f64 truth, within limits computed for this very call.

    path is a str, bytes or os.PathLike. limits {"dq": 0.01} replaces the limit of a result's ratio. engine names one of
    ours ("fast", …), to be judged on the file's inputs instead of the file's results. require: "all", or names of results
    that must be there. A note says what the inputs hide. Raises ValueError when the file is unreadable or contradicts
    itself. As `softdelta verify`.
    """
    engine = _engine(engine)
    d = _native.verify_file(native_path(path), {}, named(limits, "limits"), engine, _options.or_set(threads), False)
    required = d["expected"] if require == "all" else [require] if isinstance(require, str) else list(require)
    for name in required:
        if name not in d["expected"]:
            raise ValueError(f"require holds {name!r}, expected 'all' or results of its call: {', '.join(d['expected'])}")
    there = {f["name"] for f in d["results"]}
    return replace(_report(d), engine=engine, missing=tuple(n for n in required if n not in there))


def judge(actual, case, *, limits=None, threads=None, dtype=None) -> Report:
    """The verdict on results `actual` {"o": array, "dq": array, …} of a case: a path, or the arguments of `dump` as a
    dict. None: the results that the case holds."""
    actual, bf16 = read_tensors(named(actual, "actual"), dtype)
    tail = named(limits, "limits"), _engine(None), _options.or_set(threads)
    if not isinstance(case, dict):
        return _report(_native.verify_file(native_path(case), actual, *tail, bf16))
    metadata, tensors, bf16_too = split_case(dict(case), dtype)
    return _report(_native.verify_case(metadata, tensors, actual, *tail, bf16 or bf16_too))


def dump(path, op, *, dtype=None, **tensors) -> None:
    """Writes one call as a case file, which `softdelta verify` judges.

    op is attention or a rule of delta_forward, a softdelta.Rule too. Arrays are named as in
    softdelta.delta_forward and attention_forward, results o, lse, final_state, gradients given do, dlse, dfinal_state,
    and gradients computed dq, dk, …; None is left out. Options are given as Python values (scale=0.1,
    use_qk_l2norm_in_kernel=True, causal="top_left", producer="my kernel"); docs/case-file.md lists them. Tensors of
    torch may be on any device and may require gradients. dtype="bf16": arrays of uint16 hold bf16. Raises ValueError
    for a call that contradicts itself, before anything is written. A name that nobody knows is stored and warned of:
    who reads the file ignores it.
    """
    metadata, arrays, bf16 = split_case({"op": op, **tensors}, dtype)
    for warning in _native.write_case(native_path(path), metadata, arrays, bf16):
        warnings.warn(warning, stacklevel=2)


def native_path(path) -> bytes:
    """A path as the system takes it."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError(f"the path is {path!r}, expected one without a null byte")
    return encoded


def named(values, argument: str) -> dict:
    """A dict whose keys are names; {} for None."""
    if values is not None and not isinstance(values, dict):
        raise TypeError(f"{argument} is a {type(values).__name__}, expected a dict")
    for name in values or {}:
        if not isinstance(name, str):
            raise TypeError(f"{argument} has the key {name!r}, expected names")
    return dict(values or {})


def quote(text: str) -> str:
    """In double quotes, as one line of at most 60 printable characters."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:60])
    return '"' + shown.replace('"', '\\"') + '"' + "..." * (len(text) > 60)


def _engine(name) -> str:
    return "" if name is None else _options.engine_name(name)


def _report(d: dict) -> Report:
    return Report(d["op"], d["producer"], tuple(Finding(**f) for f in d["results"]), tuple(d["notes"]))


def split_case(case: dict, dtype) -> tuple[dict, dict, bool]:
    """Metadata and tensors of a case."""
    if "op" not in case:
        raise ValueError(f"the case has no op, expected attention, {', '.join(_native.RULES[:-1])} or {_native.RULES[-1]}")
    metadata, tensors = {}, {}
    numpy = sys.modules.get("numpy")
    for name, value in named(case, "the case").items():
        if numpy is not None and isinstance(value, numpy.generic):
            value = value.item()
        if isinstance(value, bool):
            metadata[name] = "true" if value else "false"
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}, expected a finite number")
        elif isinstance(value, (int, float, str, _options.Rule)):
            value = str(value) if name == "op" else value
            metadata[name] = value if isinstance(value, str) else repr(value)
            metadata[name].encode()  # raises ValueError for what is no text
        elif value is not None:
            tensors[name] = value
    return metadata, *read_tensors(tensors, dtype)


def read_tensors(tensors: dict, dtype) -> tuple[dict, bool]:
    torch = sys.modules.get("torch")
    a = Arrays(None, dtype)
    readable = {}
    for name, x in tensors.items():
        if x is None:
            continue
        if torch is not None and isinstance(x, torch.Tensor):
            x = x.detach().cpu()
        readable[name] = a.readable(x)
    return readable, a.bf16
