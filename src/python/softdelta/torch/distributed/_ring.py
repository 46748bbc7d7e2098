"""Ring attention. Keys and values are sent around the ring of ranks; in each step a rank computes the attention of its
queries over the keys that it holds:

    step 0     step 1     step 2          P = 3: what ranks 0, 1, 2 hold
    k0 k1 k2   k2 k0 k1   k1 k2 k0

Results of the steps are merged by their lse, in f32, in the order of steps. In the backward pass the gradients of keys
and values are sent with them, or alone, where the forward pass kept the keys. The probabilities of a step are e^(s − lse), so it needs o and lse of all keys. A backward
pass that computes o and lse itself gets those of the step's keys instead. With w = e^(lse of the step − lse) it then takes
w·do for do, and w·(rowsum(do∘(o of the step − o)) + dlse) for dlse."""
from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd import Function

from ... import _native
from ..._records import ATTENTION_WANTED, AttentionInputs, AttentionOptions
from .. import _calls
from .._flat import ATTENTION
from ._ranks import Ranks

_TOP_LEFT = 1
LARGEST_LSE = 1024.0
MOST_KEPT = 1 << 28  # bytes of all ranks' keys and values that a forward pass keeps, so that they travel once


def ring(ranks: Ranks, rows, options: AttentionOptions, inputs: AttentionInputs):
    o, lse = Ring.apply(ranks, rows, options, *inputs)
    beyond = bool(((lse.detach().abs() > LARGEST_LSE) & lse.detach().isfinite()).any())

    def check():
        if beyond:
            raise _native.Unsupported(f"a row has |lse| beyond {LARGEST_LSE:g}, where f32 does not tell what each rank "
                                      "adds; expected method heads")
        return {}, (), {}

    ranks.agree("the ring's lse", {"lse": lse}, check)
    return o, lse


class Ring(Function):
    @staticmethod
    def forward(ctx, ranks, rows, options, *inputs):
        inputs = AttentionInputs(*inputs)
        merged = _Merged(inputs, [n for _, n in rows.queries[ranks.rank]])
        travel, kept = _Travel(ranks, rows, inputs, options), []
        keeps = any(ctx.needs_input_grad) and travel.bytes_of_all() <= MOST_KEPT
        for step in range(ranks.size):
            travel.begin_next(step)
            for block in travel.blocks(step):
                merged.add(block.queries, block.forward)
            travel.finish_next(step)
            kept += travel.here if keeps and step + 1 < ranks.size else ()
        o, lse = merged.results(inputs.v.dtype)
        ctx.ranks, ctx.rows, ctx.options = ranks, rows, options
        ctx.save_for_backward(*inputs, o, lse, *kept)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse):
        count = len(AttentionInputs._fields)
        inputs, (o, lse, *kept) = AttentionInputs(*ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        wanted = {n for n, w in zip(ATTENTION_WANTED, ATTENTION.wanted_of(ctx.needs_input_grad[3:])) if w}
        sums = _Gradients(inputs, wanted, lse.dtype)
        travel = _Travel(ctx.ranks, ctx.rows, inputs, ctx.options, list(zip(kept[::2], kept[1::2])))
        own, home = [*travel.blocks(0)], sums.of_keys(travel.here)
        travel.begin_next(0)
        for block in own[:-1]:
            block.backward(o, lse, do, dlse, sums, home)
        travel.finish_next(0)
        for step in range(1, ctx.ranks.size):
            travel.begin_next(step)
            added = sums.of_keys(travel.here)
            for block in travel.blocks(step):
                block.backward(o, lse, do, dlse, sums, added)
            travel.pass_gradients(added, step)
            travel.finish_next(step)
        for block in own[-1:]:
            block.backward(o, lse, do, dlse, sums, home)
        travel.add_gradients(home)
        found = sums.others | {n: t.finished() for n, t in (sums.of_queries | home).items()}
        grads = [found[n].to(getattr(inputs, n).dtype) if n in wanted else None for n in ATTENTION_WANTED]
        return None, None, None, *ATTENTION.gradients(grads)


class _Merged:
    """o and lse of this rank's queries, merged block by block."""

    def __init__(self, inputs: AttentionInputs, counts: list[int]):
        self._q, self._size, self._wide = inputs.q, inputs.v.shape[3], _calls.wide(inputs.q)
        self._segments = [slice(sum(counts[:i]), sum(counts[:i + 1])) for i in range(len(counts))]
        self._whole, self._step = self._new(), None
        self._begun: set[int] = set()

    def _new(self) -> tuple[Tensor, Tensor]:
        B, rows, H, _ = self._q.shape
        return (self._q.new_empty((B, rows, H, self._size), dtype=self._wide),
                self._q.new_empty((B, H, rows), dtype=self._wide))

    def add(self, queries: slice, compute) -> None:
        """compute((o, lse)) fills in what a block adds. queries are whole segments, of which all or none have begun."""
        inside = [i for i, s in enumerate(self._segments) if queries.start <= s.start and s.stop <= queries.stop]
        if self._begun.isdisjoint(inside):
            compute(_rows_of(self._whole, queries))
            self._begun.update(inside)
            return
        if self._step is None:
            self._step = self._new()
        step = _rows_of(self._step, queries)
        compute(step)
        _merge(*_rows_of(self._whole, queries), *step)

    def results(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        for i, rows in enumerate(self._segments):
            if i not in self._begun:  # rows that see no key
                for t, empty in zip(_rows_of(self._whole, rows), (0, -torch.inf)):
                    t.fill_(empty)
        return self._whole[0].to(dtype), self._whole[1]


def _rows_of(both, rows: slice) -> tuple[Tensor, Tensor]:
    return both[0][:, rows], both[1][:, :, rows]


def _merge(o: Tensor, lse: Tensor, o_step: Tensor, lse_step: Tensor) -> None:
    """Merges a step into o and lse, in place. Of two rows without a key, or with a sink of ∞, lse are equal."""
    share = torch.where(lse_step == lse, 0.5, torch.sigmoid(lse_step - lse))
    o.lerp_(o_step, share.transpose(1, 2).unsqueeze(-1))
    torch.logaddexp(lse, lse_step, out=lse)


class _Sum:
    """The gradient of rows, summed over blocks. The first block of some rows writes to it, those of later ones are added."""

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self.total = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
        self._more, self._begun = None, []

    def memory(self, rows: slice) -> Tensor:
        """Where a block writes its gradient of these rows. added() follows."""
        if not self._has_begun(rows):
            return self.total[:, rows]
        if self._more is None:
            self._more = torch.empty_like(self.total)
        return self._more[:, rows]

    def added(self, rows: slice) -> None:
        if self._has_begun(rows):
            self._clear_rest(rows)
            self.total[:, rows] += self._more[:, rows]
        self._begun = sorted([*self._begun, rows], key=lambda r: r.start)

    def finished(self) -> Tensor:
        everything = slice(0, self.total.shape[1])
        self._clear_rest(everything)
        self._begun = [everything]
        return self.total

    def _has_begun(self, rows: slice) -> bool:
        return any(b.start < rows.stop and rows.start < b.stop for b in self._begun)

    def _clear_rest(self, rows: slice) -> None:
        at = rows.start
        for begun in [*self._begun, slice(rows.stop, rows.stop)]:
            if at < min(begun.start, rows.stop):
                self.total[:, at:min(begun.start, rows.stop)].zero_()
            at = max(at, begun.stop)


class _Gradients:
    """What a backward pass fills: sums for this rank's queries, and for each step those for the keys that are here."""

    def __init__(self, inputs: AttentionInputs, wanted: set[str], wide: torch.dtype):
        self.wanted, self.wide = wanted, wide
        self.of_queries = {"q": _Sum(inputs.q, wide)} if "q" in wanted else {}
        self.others = {n: torch.zeros_like(getattr(inputs, n), dtype=wide) for n in wanted - {"q", "k", "v"}}

    def of_keys(self, here) -> dict[str, _Sum]:
        return {n: _Sum(t, self.wide) for n, t in zip("kv", here) if n in self.wanted}


class _Block:
    """A segment of this rank's queries and a segment of the keys that this rank holds now."""

    def __init__(self, inputs: AttentionInputs, options: AttentionOptions, queries: slice, keys: slice):
        self.inputs, self.options, self.queries, self.keys = inputs, options, queries, keys

    def forward(self, into: tuple[Tensor, Tensor]) -> None:
        _native.attention_forward(self.inputs, self.options, into, _calls.AUTOMATIC, _calls.threads(), False)

    def backward(self, o, lse, do, dlse, sums: _Gradients, key_sums: dict[str, _Sum]) -> None:
        o, do = o[:, self.queries], do[:, self.queries]
        lse, dlse = lse[:, :, self.queries], dlse[:, :, self.queries]
        if not self._takes_saved():
            o, lse, do, dlse = self._of_own_keys(sums.wide, o, lse, do, dlse)
        by_rows = [(n, t, self.queries) for n, t in sums.of_queries.items()]
        by_rows += [(n, t, self.keys) for n, t in key_sums.items()]
        grads = {n: torch.empty_like(getattr(self.inputs, n), dtype=sums.wide, memory_format=torch.contiguous_format)
                 for n in sums.others if getattr(self.inputs, n) is not None}
        grads |= {n: t.memory(rows) for n, t, rows in by_rows}
        _native.attention_backward(self.inputs, self.options,
                                   (o, lse, do, dlse, *(grads.get(n) for n in ATTENTION_WANTED)), _calls.AUTOMATIC,
                                   _calls.threads(), False)
        for _, t, rows in by_rows:
            t.added(rows)
        for name in sums.others.keys() & grads.keys():
            to = sums.others[name]
            (self.of_plane(to) if name == "bias" else to).add_(grads[name])

    def _takes_saved(self) -> bool:
        """Whether the backward pass uses the saved o and lse. The reference computes its own, and so do the gradients of a
        sink and of a bias that is the same for all keys of a row."""
        x = self.inputs
        alone = x.sink is None and (x.bias is None or x.bias.shape[3] > 1)
        return alone and not any(t is not None and t.dtype == torch.float64 for t in x) and (
            x.q.is_cuda or _has_kernels())

    def _of_own_keys(self, wide, o, lse, do, dlse):
        """o, lse, do and dlse for attention over the keys of this block alone (see the top of this file)."""
        q, v = self.inputs.q, self.inputs.v
        o_step, lse_step = (q.new_empty((*q.shape[:3], v.shape[3]), dtype=wide),
                            q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide))
        self.forward((o_step, lse_step))
        share = torch.where(lse_step == -torch.inf, 0.0, torch.exp(lse_step - lse))
        do = do.to(wide)
        along = (do * (o_step - o.to(wide))).sum(-1).transpose(1, 2)
        return o_step, lse_step, do * share.transpose(1, 2).unsqueeze(-1), share * (along + dlse)

    key_positions = slice(None)

    def of_plane(self, t: Tensor | None) -> Tensor | None:
        """The part of a mask or bias that belongs to this block."""
        if t is None:
            return None
        t = t if t.shape[2] == 1 else t[:, :, self.queries]
        return t if t.shape[3] == 1 else t[:, :, :, self.key_positions]


@functools.cache
def _has_kernels() -> bool:
    return any(level["available"] for level in _native.isa_levels())


class _Travel:
    """The keys and values that this rank holds now, and their gradients.

    For causal attention in zigzag order without masks (`halved`) only earlier ranks see the second half of a rank's keys.
    It does not travel past later ranks, but goes straight to rank 0:

        P = 3, keys of rank 1:   first half   1 → 2 → 0        second half   1 → 0
    """

    def __init__(self, ranks: Ranks, rows, inputs: AttentionInputs, options: AttentionOptions, kept=()):
        """kept: of each step but the first, what the forward pass held."""
        self._kept = kept
        self.ranks, self.rows, self.inputs, self.options = ranks, rows, inputs, options
        if inputs.k.is_cuda:
            ranks.give_priority()
        self.halved = (options.causal != 0 and options.window_left < 0 and options.window_right < 0
                       and inputs.mask is None and inputs.bias is None and rows.queries == rows.keys
                       and len(rows.queries[0]) == 2)
        self._own = self.here = (inputs.k.contiguous(), inputs.v.contiguous())
        self._coming = self._gradients = None

    def source(self, step: int) -> int:
        """The rank whose keys are held here in this step."""
        return (self.ranks.rank - step) % self.ranks.size

    def bytes_of_all(self) -> int:
        """Of the keys and values of all ranks."""
        row = sum(t.element_size() * t.shape[0] * t.shape[2] * t.shape[3] for t in (self.inputs.k, self.inputs.v))
        return row * self.rows.total(self.rows.keys)

    def _count(self, rank: int) -> int:
        return sum(n for _, n in self.rows.keys[rank])

    def _rows_from(self, sender: int, source: int) -> slice:
        """Those keys of `source` that a rank sends to the next."""
        return slice(0, self._count(source) // 2 if self.halved and source <= sender else self._count(source))

    def _start(self, sends, receives):
        """sends, receives: (tensor, rank). Returns the transfers, and what must live until they end."""
        sends = [(t.contiguous(), rank) for t, rank in sends]
        buffers = [(t if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format), rank)
                   for t, rank in receives]
        copies = [(t, buffer) for (t, _), (buffer, _) in zip(receives, buffers) if buffer is not t]
        return self.ranks.exchange(sends, buffers), copies, sends

    def _wait(self, work) -> None:
        transfers, copies, _ = work
        for transfer in transfers:
            with self.ranks.naming("while keys travelled"):
                transfer.wait()
        for t, buffer in copies:
            t.copy_(buffer)

    def _move(self, tensors, sent: slice, like, source: int):
        """Starts to send these rows of tensors to the next rank. Returns memory for those of `source` from the previous
        rank, and what is sent and received."""
        P, rank = self.ranks.size, self.ranks.rank
        before, rows = (rank - 1) % P, self._rows_from((rank - 1) % P, source)
        coming = tuple(t.new_empty((t.shape[0], like, *t.shape[2:])) for t in tensors)
        return (coming, [(t[:, sent], (rank + 1) % P) for t in tensors], [(t[:, rows], before) for t in coming])

    def begin_next(self, step: int) -> None:
        P, rank, source = self.ranks.size, self.ranks.rank, self.source(step + 1)
        if step + 1 == P or self._kept:
            return
        rows = self._rows_from((rank - 1) % P, source)
        straight = self.halved and rank == 0
        coming, sends, receives = self._move(self.here, self._rows_from(rank, self.source(step)),
                                             self._count(source) if straight else rows.stop, source)
        if straight:
            receives += [(t[:, rows.stop:], source) for t in coming]
        elif self.halved and step + 1 + rank == P:  # rank 0 comes to this rank's keys
            sends += [(t[:, self._count(rank) // 2:], 0) for t in self._own]
        self._coming = coming, self._start(sends, receives)

    def finish_next(self, step: int) -> None:
        if step + 1 == self.ranks.size:
            return
        if self._kept:
            self.here = self._kept[step]
        else:
            self._wait(self._coming[1])
            self.here = self._coming[0]

    def pass_gradients(self, sums: dict[str, _Sum], step: int) -> None:
        """Sends the gradients of the keys that are here on, those of earlier ranks added. They travel while the next step
        is computed, and come home after the last."""
        self.add_gradients(sums)
        if sums:
            source = self.source(step + 1)
            rows = self._rows_from((self.ranks.rank - 1) % self.ranks.size, source)
            coming, *transfers = self._move(tuple(t.total for t in sums.values()), slice(None), rows.stop, source)
            self._gradients = coming, self._start(*transfers)

    def add_gradients(self, sums: dict[str, _Sum]) -> None:
        """Adds what earlier ranks have sent."""
        totals = [t.finished() for t in sums.values()]
        if self._gradients is None:
            return
        coming, work = self._gradients
        self._wait(work)
        for total, t in zip(totals, coming):
            total[:, :t.shape[1]] += t

    def _halved_blocks(self, step: int):
        """Each half of the queries sees another rank's keys all or not at all, so that both halves of the keys are one
        range. That gives larger calls and fewer merges."""
        inputs, options = self.inputs, self.options._replace(causal=_TOP_LEFT)
        rank, source = self.ranks.rank, self.source(step)
        half = inputs.q.shape[1] // 2
        first, second, both = slice(0, half), slice(half, 2 * half), slice(0, 2 * half)
        unmasked = options._replace(causal=0)
        if source == rank:
            cuts = [(first, first, options), (second, both, options._replace(query_offset=half))]
        else:
            cuts = [(both, first, unmasked) if source < rank else (second, both, unmasked)]
        for queries, keys, how in cuts:
            block = _Block(inputs, how, queries, keys)
            block.inputs = inputs._replace(q=inputs.q[:, queries], k=self.here[0][:, keys], v=self.here[1][:, keys],
                                           sink=inputs.sink if source == rank else None)
            yield block

    def blocks(self, step: int):
        if self.halved:
            yield from self._halved_blocks(step)
            return
        inputs, options = self.inputs, self.options
        rows, source = self.rows, self.source(step)
        shift = rows.total(rows.keys) - rows.total(rows.queries)
        q_at = 0
        for first_query, queries in rows.queries[self.ranks.rank]:
            k_at, sink_here = 0, step == 0
            for first_key, keys in rows.keys[source]:
                block = _Block(inputs, options, slice(q_at, q_at + queries), slice(k_at, k_at + keys))
                block.key_positions = slice(first_key, first_key + keys)
                k_at += keys
                block.inputs = inputs._replace(
                    q=inputs.q[:, block.queries], k=self.here[0][:, block.keys], v=self.here[1][:, block.keys],
                    mask=block.of_plane(inputs.mask), bias=block.of_plane(inputs.bias),
                    sink=inputs.sink if sink_here else None)
                # Positions count from the start of the whole sequence. Causal aligns the last query with the last key,
                # or with top_left the first with the first.
                offset = first_query + (0 if options.causal == _TOP_LEFT else shift - keys + queries)
                block.options = options._replace(query_offset=offset, key_offset=first_key)
                hidden = options.causal != 0 and queries > 0 and not sink_here and (
                    first_query + queries - 1 + (0 if options.causal == _TOP_LEFT else shift) < first_key)
                sink_here = False
                if queries > 0 and not hidden:
                    yield block
            q_at += queries
