"""Names of options as the C interface numbers them, and how many threads work."""
from __future__ import annotations

import functools
import math
import operator
import warnings
from typing import NamedTuple

from . import _native

RULES = {name: number for number, name in enumerate(_native.RULES)}


class Rule(NamedTuple):
    """A delta rule by its facts, wherever the name of one is taken: the table's rules, and every other combination.

    ``Rule("channel", "decayed")`` is kda: S ← diag(e^g) S, then S ← S + k (β (v − Sᵀk))ᵀ.
    ``Rule("head", "previous", own_p=True)`` is comba: d = β (v − Sᵀp), then S ← e^g S + k dᵀ.
    ``Rule("none", "nothing")`` is linear attention: S ← S + k vᵀ.
    """
    gate: str = "none"       # or head, channel: a number for each value head, or one for each of its key channels
    erases: str = "decayed"  # from the decayed state, or the previous one, or nothing
    own_p: bool = False      # along p instead of k

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of what it takes beside q, k and v."""
        taken = {"g": self.gate != "none", "beta": self.erases != "nothing", "p": self.own_p}
        return tuple(name for name, is_taken in taken.items() if is_taken)

    def __str__(self) -> str:
        """The name that case files have for it."""
        along = "" if self.erases == "nothing" and not self.own_p else ":p" if self.own_p else ":k"
        return f"rule:{self.gate}:{self.erases}{along}"


FACTS = {name: Rule(*facts) for name, facts in _native.RULE_FACTS.items()}


def rule_number(rule: str | Rule) -> int:
    """The number of a rule, given by its name or its facts."""
    if not isinstance(rule, Rule):
        return number_of(RULES, "rule", rule)
    if str(rule) not in _native.RULE_NUMBERS:
        raise ValueError(f"rule is {rule!r}, expected a gate of none, head or channel, which erases decayed, previous or "
                         "nothing; of nothing there is no own_p")
    return _native.RULE_NUMBERS[str(rule)]


def facts_of(number: int) -> Rule:
    """What the rule of this number is."""
    return next(FACTS[name] for name, of in _native.RULE_NUMBERS.items() if of == number)
CAUSAL = {"none": 0, "top_left": 1, "bottom_right": 2}
EMPTY_ROW = {"minus_infinity": 0, "plus_infinity": 1, "zero": 2}
ACTIVATION = {"none": 0, "silu": 1, "sigmoid": 2}
HEAD_ORDER = {"grouped": 0, "tiled": 1}
LAYOUT = {"bthd": 0, "bhtd": 1}  # [B, T, H, D]; heads first
_MOST_HEADS = 256  # of any published model
_CHOICES = "automatic", "fast"

threads = 0  # set_num_threads


def number_of(names: dict[str, int], argument: str, value: str) -> int:
    """The number of a named option; ValueError lists the names."""
    try:
        return names[value]
    except (KeyError, TypeError):
        raise ValueError(f"{argument} is {value!r}, expected one of {', '.join(map(str, names))}") from None


def number(name: str, value) -> float:
    """A float of any library's scalar; None is NaN, the C interface's default."""
    if value is None:
        return math.nan
    try:
        x = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        x = math.nan
    if x != x:
        raise ValueError(f"{name} is {value!r}, expected a number")
    return x


def whole(name: str, value) -> int:
    """An int of any library's scalar."""
    try:
        n = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, expected a whole number") from None
    if not -2**63 <= n < 2**63:
        raise ValueError(f"{name} is {n}, expected a number of 64 bits")
    return n


def expect_pool(**indices) -> None:
    """Where no final_state is given: none of these says where in it."""
    for name, given in indices.items():
        if given is not None:
            raise ValueError(f"final_state is not given, expected the pool of states: {name} says where in it")


def flag(name: str, value) -> bool:
    """A bool of any library's scalar."""
    if value is True or value is False:
        return value
    if getattr(value, "shape", None) == () and str(value.dtype) in ("bool", "torch.bool"):
        return bool(value)
    raise ValueError(f"{name} is {value!r}, expected True or False")


def warn_if_swapped(name: str, rows: int, heads: int, heads_first: bool, stacklevel: int = 3) -> None:
    """Shapes alone do not tell rows from heads: a few rows of many heads are a short prompt. More heads than any model has,
    of fewer rows, are probably the other layout."""
    if heads > _MOST_HEADS and 1 < rows < heads:
        here, other = list(LAYOUT)[::-1] if heads_first else LAYOUT
        warnings.warn(f"{name} has {heads} heads of {rows} rows, as layout {here!r} reads it; if these are {rows} heads of "
                      f"{heads} rows, say layout={other!r}", stacklevel=stacklevel)


def set_num_threads(n: int) -> None:
    """How many threads every later call uses. 0, the default: OpenMP's default, and in softdelta.torch
    torch.get_num_threads(). Short calls stay on the thread that calls. Results do not depend on it. Raises ValueError
    for what is no such number."""
    global threads
    threads = _thread_number("n", n)


def get_num_threads() -> int:
    """What set_num_threads was last given; 0 when nothing."""
    return threads


def engine_name(engine: str) -> str:
    """The name itself; ValueError lists those known."""
    if engine not in _CHOICES and engine not in engines():
        raise ValueError(f"engine is {engine!r}, expected one of {', '.join((*_CHOICES, *engines()))}")
    return engine


@functools.cache
def engines() -> tuple[str, ...]:
    """The engines of this process, asked for when one is needed: looking for GPUs starts CUDA, and a process that is
    forked later could not use it any more."""
    return tuple(_native.engines())


def execution(engine: str, threads_of_call: int | None) -> tuple[str, int]:
    return engine_name(engine), or_set(threads_of_call)


def or_set(threads_of_call: int | None) -> int:
    """The threads of a call, checked; what set_num_threads said for None."""
    return threads if threads_of_call is None else _thread_number("threads", threads_of_call)


def _thread_number(argument: str, n) -> int:
    most = 2**31 - 1  # of the C interface; what is beyond 16 times the processors is cut there
    try:
        number = operator.index(n)
    except TypeError:
        number = -1
    if not 0 <= number <= most:
        raise ValueError(f"{argument} is {n!r}, expected 0 (the default) to {most} threads")
    return number
