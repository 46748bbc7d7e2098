"""What a rank does in one call of a delta rule: which tokens it has, and whether states enter and leave it."""
from __future__ import annotations

from typing import NamedTuple

from ..._records import DELTA_ROWS, DELTA_SUMS, DeltaInputs, DeltaOptions
from ._ranks import Ranks, parts_of


class Part(NamedTuple):
    """Which packed sequences a rank has, and whether states enter and leave it (see Plan)."""
    local_bounds: list[int] | None
    enters: bool
    leaves: bool


def part_of(ranks: Ranks, lengths: list[int], bounds: list[int] | None) -> Part:
    """lengths: tokens of each rank; bounds: where packed sequences begin in the tokens of all ranks."""
    first, last = ranks.rank == 0, ranks.rank == ranks.size - 1
    if bounds is None:
        return Part(None, not first, not last)
    begin = sum(lengths[:ranks.rank])
    end = begin + lengths[ranks.rank]
    local = [0, *(b - begin for b in bounds if begin < b < end), end - begin]
    return Part(local, not first and begin not in bounds, not last and end not in bounds)


class Heads(NamedTuple):
    """One group of heads: its key heads, and the value heads that read them."""
    keys: slice
    values: slice


class Plan:
    """local_bounds: where packed sequences begin in this rank's tokens, and the end of the last; None without packing.
    enters, leaves: whether the state of the first sequence comes from the rank before, and that of the last one goes to
    the next."""

    def __init__(self, ranks: Ranks, options: DeltaOptions, local_bounds: list[int] | None, enters: bool, leaves: bool,
                 head_groups: int, output_final_state: bool, gradient: bool):
        self.ranks, self.options, self.groups, self.gradient = ranks, options, head_groups, gradient
        self.local_bounds, self.enters, self.leaves = local_bounds, enters, leaves
        self.has_final_state = output_final_state and ranks.rank == ranks.size - 1

    def unpacked(self) -> Plan:
        """The same plan for one sequence that is not packed with others."""
        return Plan(self.ranks, self.options, None, self.enters, self.leaves, self.groups, False, self.gradient)

    def head_groups(self, inputs: DeltaInputs):
        count, group = inputs.q.shape[2], inputs.v.shape[2] // inputs.q.shape[2]
        for keys in parts_of(count, min(self.groups, count)):
            yield Heads(keys, slice(keys.start * group, keys.stop * group))

    @staticmethod
    def all_heads(inputs: DeltaInputs) -> Heads:
        return Heads(slice(0, inputs.q.shape[2]), slice(0, inputs.v.shape[2]))


def tokens_of(t: DeltaInputs, which: slice) -> DeltaInputs:
    """A record of inputs, or of their gradients, with some of its tokens."""
    rows = {n: getattr(t, n)[:, which] for n in DELTA_ROWS if getattr(t, n) is not None}
    return t._replace(**rows)


def heads_of(t: DeltaInputs, heads: Heads, count: int) -> DeltaInputs:
    """A record of inputs, or of their gradients, with some of its heads, of `count` value heads."""

    def of_rows(x, which):
        return None if x is None else x[:, :, which]

    def of_heads(x):
        size = 0 if x is None else x.shape[0] // count
        return None if x is None else x[heads.values.start * size:heads.values.stop * size]

    return t._replace(q=of_rows(t.q, heads.keys), k=of_rows(t.k, heads.keys), p=of_rows(t.p, heads.keys),
                      v=of_rows(t.v, heads.values), g=of_rows(t.g, heads.values),
                      beta=of_rows(t.beta, heads.values), **{n: of_heads(getattr(t, n)) for n in DELTA_SUMS},
                      initial_state=None if t.initial_state is None else t.initial_state[:, heads.values])
