"""A rank computes its tokens segment by segment, with one call of the library for each segment. A backward pass keeps
a state for every few dozen tokens while it runs, so that shorter calls need less memory. The state that passes from one
segment to the next is called a carry. Packed: the state of the one sequence that crosses; otherwise one for each batch
row.

    tokens     0 ............ 64 ............ 128 ...      a packed sequence may cross any number of segments
    carries    c0             c1              c2           c0 comes from the rank before, the last goes to the next"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import _native
from ..._records import DELTA_SUMS, DELTA_WANTED, DeltaInputs, DeltaOptions
from .. import _calls
from .._flat import DELTA
from ._plan import Heads, Plan, heads_of, tokens_of

STATES = 1 << 28  # at most so many: tokens of a segment times entries of a state
STATES_OF_GPU = 1 << 32  # the same on a GPU, which long calls keep busy
UNIT = 192  # a segment has a multiple of so many tokens: whole chunks of every engine


class Handover(NamedTuple):
    """Events of a GPU: of a carry that comes from another stream, and of the one that another stream takes. None: there is
    no such carry."""
    ready: torch.cuda.Event | None
    done: torch.cuda.Event | None


class Segment(NamedTuple):
    tokens: slice
    bounds: Tensor | None  # cu_seqlens of the packed sequences among these tokens; None: not packed
    enters: bool           # packed: the first sequence began in an earlier segment
    leaves: bool           # packed: the last sequence goes on in the next segment


def segment_tokens(inputs: DeltaInputs) -> int:
    """How many tokens a segment has; the last one may have fewer. Only the sizes of one head count, so that results do not
    depend on the number of heads."""
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
    """The segments of a call. A carry is [B, HV, K, V], or [1, HV, K, V] for packed sequences."""

    def __init__(self, plan: Plan, inputs: DeltaInputs, options: DeltaOptions | None = None):
        self.plan, self.inputs = plan, inputs
        self.options = plan.options if options is None else options
        self.segments = segments_of(plan, inputs)
        self._value_heads = inputs.v.shape[2]

    def new_carry(self) -> Tensor:
        q, v = self.inputs.q, self.inputs.v
        shape = _calls.state_shape(q, v, None, self.options.state_v_first)
        return torch.zeros(shape, dtype=_calls.wide(q), device=q.device)

    def new_carries(self, first: Tensor | None) -> list[Tensor | None]:
        """Memory for the carries; the first one is what the previous rank gives."""
        return [first, *(self.new_carry() for _ in self.segments)]

    def forward(self, heads: Heads, carries: list[Tensor | None], o: Tensor | None = None,
                handover: Handover | None = None) -> None:
        """Starts from carries[0]. Fills o [B, T, HV, V], and carries[i + 1] with the state after segment i."""
        last = len(self.segments) - 1
        for i, segment in enumerate(self.segments):
            events = self._begin(handover, segment, i == 0, i == last)
            state, behind = self._states(segment, carries[i], heads), self._results(segment, carries[i + 1], heads)
            _native.delta_forward(self._part(segment, heads, state), self.options,
                                  (None if o is None else o[:, segment.tokens, heads.values], behind),
                                  _calls.AUTOMATIC, _calls.threads(), False, *events)
            if segment.bounds is not None:
                own = carries[i + 1][:, heads.values]
                own.copy_(behind[-1:]) if segment.leaves else own.zero_()
        self._end(handover, self.segments[-1])

    @staticmethod
    def _begin(handover: Handover | None, segment: Segment, first: bool, last: bool) -> tuple[int, int]:
        """The events that this segment's call waits for and records. The states of packed sequences are copied before and
        after a call, so that the events are outside."""
        if handover is None:
            return 0, 0
        ready, done = handover.ready if first else None, handover.done if last else None
        if segment.bounds is None:
            return tuple(0 if event is None else event.cuda_event for event in (ready, done))
        if ready is not None:
            ready.wait()
        return 0, 0

    @staticmethod
    def _end(handover: Handover | None, segment: Segment) -> None:
        if handover is not None and handover.done is not None and segment.bounds is not None:
            handover.done.record()

    def backward(self, heads: Heads, carries, do: Tensor, leaving: Tensor, to: Gradients,
                 handover: Handover | None = None) -> Tensor:
        """Starts from `leaving`, the gradient of the last carry. Fills `to`, and returns the gradient of carries[0], where
        only the entries of these heads are set. carries: as forward filled them."""
        behind, last = leaving, len(self.segments) - 1
        for i in range(last, -1, -1):
            segment, before = self.segments[i], to.carries[i % len(to.carries)]
            events = self._begin(handover, segment, i == last, i == 0)
            results = heads_of(tokens_of(to.results, segment.tokens), heads, self._value_heads)
            d_state = self._results(segment, before, heads)
            results = results._replace(initial_state=d_state)
            _native.delta_backward(self._part(segment, heads, self._states(segment, carries[i], heads)), self.options,
                                   (do[:, segment.tokens, heads.values],
                                    self._states(segment, behind, heads, last=True),
                                    *(getattr(results, n) for n in DELTA_WANTED)), _calls.AUTOMATIC, _calls.threads(),
                                   False, *events)
            if to.sums:
                own = heads_of(DeltaInputs(**to.sums), heads, self._value_heads)
                for name in to.sums:
                    getattr(own, name).add_(getattr(results, name))
            if segment.bounds is not None:
                own = before[:, heads.values]
                own.copy_(d_state[:1]) if segment.enters else own.zero_()
            behind = before
        self._end(handover, self.segments[0])
        return behind

    def _part(self, segment: Segment, heads: Heads, state: Tensor | None) -> DeltaInputs:
        rows = tokens_of(self.inputs._replace(initial_state=None), segment.tokens)
        return heads_of(rows, heads, self._value_heads)._replace(initial_state=state, cu_seqlens=segment.bounds)

    def _states(self, segment: Segment, carry: Tensor | None, heads: Heads, last: bool = False) -> Tensor | None:
        """The initial state of each sequence of a segment: the carry for the sequence that crosses, 0 for the others. With
        `last` the same for the gradients of final states."""
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
        """Memory for the final states of a segment's sequences."""
        own = carry[:, heads.values]
        return own if segment.bounds is None else own.new_empty((len(segment.bounds) - 1, *own.shape[1:]))


class Gradients:
    """The gradients that the backward pass of a walk fills, in the order of DELTA_WANTED. needs: a flag for each input."""

    def __init__(self, walk: Walk, needs):
        self._initial = DELTA_WANTED.index("initial_state")
        self._wanted = list(DELTA.wanted_of(needs))
        self._all = _calls.empty_gradients(walk.inputs, DELTA_WANTED, self._wanted)
        self.results = DELTA.inputs(*DELTA.gradients(self._all))._replace(initial_state=None)
        self.carries = [walk.new_carry() for _ in range(min(2, len(walk.segments)))]  # used in turn
        self.sums = {}
        if len(walk.segments) > 1:  # summed in f32, and rounded once
            given = {n: getattr(self.results, n) for n in DELTA_SUMS}
            self.sums = {n: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
                         for n, t in given.items() if t is not None}
            self.results = self.results._replace(**{n: torch.empty_like(t) for n, t in self.sums.items()})

    def finish(self) -> list:
        """A gradient for each input."""
        for name, total in self.sums.items():
            self._all[DELTA_WANTED.index(name)].copy_(total)
        if self._wanted[self._initial]:
            self._all[self._initial].copy_(self.carries[0])
        return DELTA.gradients(self._all)
