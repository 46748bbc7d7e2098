"""Where a wrong case is wrong, and which known mistake explains it."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from . import _native, _options
from ._cases import Finding, named, native_path, read_tensors, split_case, summarise


@dataclass(frozen=True)
class Candidate:
    """A mistake of the catalogue, or two at once, tried on the case's inputs. Errors are relative to what rounding may
    cost."""
    mistakes: tuple[str, ...]  # names as in docs/diagnose.md
    scope: str  # both; forward: gradients are right all the same; backward: outputs are
    left: dict[str, float]  # error that the mistake does not explain, by result
    worst_block: float  # likewise, of 64 rows of a head
    explains: bool  # what is left is rounding
    equal: tuple[str, ...]  # mistakes that this input cannot tell from it


@dataclass(frozen=True)
class Stage:
    """An intermediate that the case carries."""
    name: str
    ratio: float  # RMSE / RMS of the truth, of the block that is nearest to its limit
    limit: float
    wrong: bool
    note: str  # why it could not be judged


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a case; str() is what `softdelta diagnose` prints."""
    op: str
    producer: str
    results: tuple[Finding, ...]
    notes: tuple[str, ...]
    where: tuple[str, ...]  # sentences: rows, heads, chunks, sequences whose error is beyond rounding
    stages: tuple[Stage, ...]  # in data flow
    conclusion: tuple[str, ...]  # sentences: which mistake
    explained_by: int  # one mistake, two at once, or 0: nothing in the catalogue explains it
    noise: bool  # no mistake, only more noise than allowed
    before: dict[str, float]  # error of each result, relative to what rounding may cost
    ranking: tuple[Candidate, ...]  # single mistakes, likeliest first
    pairs: tuple[Candidate, ...]  # two at once, when no single one explains it
    within_rounding: tuple[str, ...]  # mistakes that show less here than rounding may
    no_effect: tuple[str, ...]  # mistakes that this call cannot have, or its results cannot show
    seconds: float
    text: str

    @property
    def verdict(self) -> str:
        """As Report.verdict."""
        return summarise(self.results)

    @property
    def right(self) -> bool:
        return self.verdict == "right"

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Names of the mistakes that explain it; empty when nothing does, or nothing is wrong."""
        return (self.pairs if self.explained_by == 2 else self.ranking)[0].mistakes if self.explained_by else ()

    @property
    def details(self) -> str:
        """The text without its table of results."""
        return self.text.partition("\n\n")[2].rstrip("\n")

    def __str__(self) -> str:
        return self.text.rstrip("\n")


def diagnose(case, actual=None, *, top=5, plot=None, progress: Callable[[float, str], object] | None = None,
             threads=None, dtype=None) -> Diagnosis:
    """Says where results are wrong, at which stage, and which mistake of the catalogue (docs/diagnose.md) explains it.

    case      a path of a case file, or the arguments of `dump` as a dict; it may hold intermediates too, under their
              kernels' names (docs/stages.md)
    actual    {"o": array, "dq": array, …}; None: the results that the case holds
    top       mistakes that the text lists
    plot      a path: draws rows × heads of every wrong result there, SVG
    progress  called with the part of the present step that is done, 0 to 1, and the step's name; None is silent
    dtype     "bf16": arrays of uint16 hold bf16

    A right case costs what `verify` costs; a wrong one of 4 heads of 512 tokens some seconds. Raises ValueError when
    the case is unreadable or contradicts itself. As `softdelta diagnose`.
    """
    results, bf16 = read_tensors(named(actual, "actual"), dtype)
    if plot is not None:
        plot = native_path(plot)
        _native.expect_output(plot, b"" if isinstance(case, dict) else native_path(case))
    tail = top, plot is not None, _options.or_set(threads), progress
    if isinstance(case, dict):
        metadata, arrays, bf16_too = split_case(case, dtype)
        d = _native.diagnose_case(metadata, arrays, results, *tail, bf16 or bf16_too)
    else:
        d = _native.diagnose_file(native_path(case), results, *tail, bf16)
    svg = d.pop("svg")
    if plot is not None:
        _native.write_text(plot, svg)
    return Diagnosis(
        results=tuple(Finding(**f) for f in d.pop("results")), notes=tuple(d.pop("notes")),
        stages=tuple(Stage(**s) for s in d.pop("stages")), ranking=_candidates(d.pop("ranking")),
        pairs=_candidates(d.pop("pairs")), **d)


def _candidates(dicts: list) -> tuple[Candidate, ...]:
    return tuple(Candidate(**c) for c in dicts)
