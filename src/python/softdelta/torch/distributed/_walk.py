"""A rank's tokens, a segment after the other: one call of the library for each. Memory then does not grow with the
tokens, since a backward pass keeps a state of every few dozen tokens while it runs. What goes from segment to segment
is a carry, the state of the one sequence that crosses (of every batch row without packing).

    tokens     0 ............ 64 ............ 128 ...      a packed sequence may cross any number of segments
    carries    c0             c1              c2           c0 comes from the rank before, the last goes to the next"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import _native
from ..._records import DELTA_WANTED, DeltaInputs, DeltaOptions
from .. import _calls
from .._flat import DELTA
from ._plan import Heads, Plan, heads_of, tokens_of

STATES = 1 << 28  # tokens times entries of a state, in a segment
STATES_OF_GPU = 1 << 32  # long ones keep it busy
UNIT = 192        # segments have a multiple of it: whole chunks of every engine's passes
SUMMED = ("g_gamma", "A_log", "dt_bias")  # whose gradients are sums over tokens


class Segment(NamedTuple):
    tokens: slice
    bounds: Tensor | None  # of packed sequences, among these tokens
    enters: bool           # of packed sequences: whether the first began earlier, and the last goes on
    leaves: bool


def segment_tokens(inputs: DeltaInputs) -> int:
    """At most, in a segment; from the sizes of a head alone, so that results do not depend on how many there are.
    Segments are of one length but for the last."""
    states = STATES_OF_GPU if inputs.q.is_cuda else STATES
    tokens, most = max(1, inputs.q.shape[1]), max(UNIT, states // (inputs.q.shape[3] * inputs.v.shape[3]))
    count = -(-tokens // most)
    return -(-tokens // count // UNIT) * UNIT


def segments_of(plan: Plan, inputs: DeltaInputs) -> list[Segment]:
    tokens, most = inputs.q.shape[1], segment_tokens(inputs)
    cuts = [*range(0, tokens, most), tokens] if tokens > 0 else [0, 0]
    parts = [slice(a, b) for a, b in zip(cuts, cuts[1:])]
    if plan.local_bounds is None:
        return [Segment(part, None, True, True) for part in parts]
    found, last = [], len(parts) - 1
    starts, end = plan.local_bounds[:-1], plan.local_bounds[-1]
    for i, part in enumerate(parts):
        inside = [b for b in starts if part.start < b < part.stop]
        enters = part.start not in starts if i > 0 else plan.enters
        leaves = part.stop not in starts if i < last else plan.leaves
        found.append(Segment(part, torch.tensor([0, *(b - part.start for b in inside), part.stop - part.start]),
                             enters, leaves))
    assert end == tokens
    return found


class Walk:
    """Of a call; carries [B, HV, K, V], of packed sequences [1, HV, K, V]."""

    def __init__(self, plan: Plan, inputs: DeltaInputs, options: DeltaOptions | None = None):
        self.plan, self.inputs = plan, inputs
        self.options = plan.options if options is None else options
        self.segments = segments_of(plan, inputs)
        self._size_of_gate = plan.size_of_gate(inputs)

    def new_carry(self) -> Tensor:
        q, v = self.inputs.q, self.inputs.v
        shape = _calls.state_shape(q, v, None, self.options.state_v_first)
        return torch.zeros(shape, dtype=_calls.wide(q), device=q.device)

    def new_carries(self, first: Tensor | None) -> list[Tensor | None]:
        """first: what comes from the rank before."""
        return [first, *(self.new_carry() for _ in self.segments)]

    def forward(self, heads: Heads, carries: list[Tensor | None], o: Tensor | None = None) -> None:
        """From carries[0] on: fills o [B, T, HV, V] and carries[i + 1] behind segment i."""
        for i, segment in enumerate(self.segments):
            state, behind = self._states(segment, carries[i], heads), self._results(segment, carries[i + 1], heads)
            _native.delta_forward(self._part(segment, heads, state), self.options,
                                  (None if o is None else o[:, segment.tokens, heads.values], behind),
                                  _calls.AUTOMATIC, _calls.threads(), False)
            if segment.bounds is not None:
                own = carries[i + 1][:, heads.values]
                own.copy_(behind[-1:]) if segment.leaves else own.zero_()

    def backward(self, heads: Heads, carries, do: Tensor, leaving: Tensor, to: Gradients) -> Tensor:
        """From `leaving`, the gradient of the last carry, on: fills `to`, and returns the gradient of carries[0], of
        which the entries of these heads are filled in. carries: those of forward."""
        behind = leaving
        for i in range(len(self.segments) - 1, -1, -1):
            segment, before = self.segments[i], to.carries[i % len(to.carries)]
            results = heads_of(tokens_of(to.results, segment.tokens), heads, self._size_of_gate)
            d_state = self._results(segment, before, heads)
            results = results._replace(initial_state=d_state)
            _native.delta_backward(self._part(segment, heads, self._states(segment, carries[i], heads)), self.options,
                                   (do[:, segment.tokens, heads.values],
                                    self._states(segment, behind, heads, last=True),
                                    *(getattr(results, n) for n in DELTA_WANTED)), _calls.AUTOMATIC, _calls.threads(),
                                   False)
            if to.sums:
                own = heads_of(DeltaInputs(v=self.inputs.v, **to.sums), heads, self._size_of_gate)
                for name in to.sums:
                    getattr(own, name).add_(getattr(results, name))
            if segment.bounds is not None:
                own = before[:, heads.values]
                own.copy_(d_state[:1]) if segment.enters else own.zero_()
            behind = before
        return behind

    def _part(self, segment: Segment, heads: Heads, state: Tensor | None) -> DeltaInputs:
        rows = tokens_of(self.inputs._replace(initial_state=None), segment.tokens)
        return heads_of(rows, heads, self._size_of_gate)._replace(initial_state=state, cu_seqlens=segment.bounds)

    def _states(self, segment: Segment, carry: Tensor | None, heads: Heads, last: bool = False) -> Tensor | None:
        """Those before a segment's sequences, or the gradients of those behind them: the carry, and else 0."""
        if carry is None:
            return None
        own = carry[:, heads.values]
        if segment.bounds is None:
            return own
        states = own.new_zeros((len(segment.bounds) - 1, *own.shape[1:]))
        if segment.leaves if last else segment.enters:
            states[-1 if last else 0] = own[0]
        return states

    def _results(self, segment: Segment, carry: Tensor, heads: Heads) -> Tensor:
        """Where a call writes the states of a segment's sequences."""
        own = carry[:, heads.values]
        return own if segment.bounds is None else own.new_empty((len(segment.bounds) - 1, *own.shape[1:]))



class Gradients:
    """What the backward pass of a walk fills, as DELTA_WANTED. needs: a flag for each input."""

    def __init__(self, walk: Walk, needs):
        self._initial = DELTA_WANTED.index("initial_state")
        self._wanted = list(DELTA.wanted_of(needs))
        self._all = _calls.empty_gradients(walk.inputs, DELTA_WANTED, self._wanted)
        self.results = DELTA.inputs(*DELTA.gradients(self._all))._replace(initial_state=None)
        self.carries = [walk.new_carry() for _ in range(min(2, len(walk.segments)))]  # by turns
        self.sums = {}
        if len(walk.segments) > 1:
            given = {n: getattr(self.results, n) for n in SUMMED}
            self.sums = {n: torch.zeros_like(t) for n, t in given.items() if t is not None}

    def finish(self) -> list:
        """A gradient for each input."""
        for name, total in self.sums.items():
            getattr(self.results, name).copy_(total)
        if self._wanted[self._initial]:
            self._all[self._initial].copy_(self.carries[0])
        return DELTA.gradients(self._all)
