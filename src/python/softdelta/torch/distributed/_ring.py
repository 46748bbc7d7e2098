"""Ring attention. Keys and values are sent around the ring of ranks; in each step a rank computes the attention of its
queries over the keys that it holds:

    step 0     step 1     step 2          P = 3: what ranks 0, 1, 2 hold
    k0 k1 k2   k2 k0 k1   k1 k2 k0

Results of the steps are merged by their lse, in f32, in the order of steps. In the backward pass the gradients of keys
and values are sent with them. The probabilities of a step are e^(s − lse), so it needs o and lse of all keys. A backward
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


def ring(ranks: Ranks, rows, options: AttentionOptions, inputs: AttentionInputs):
    o, lse = Ring.apply(ranks, rows, options, *inputs)
    beyond = bool(((lse.detach().abs() > LARGEST_LSE) & lse.detach().isfinite()).any())

    def check():
        if beyond:
            raise _native.Unsupported(f"a row has |lse| beyond {LARGEST_LSE:g}, where f32 does not tell what each rank "
                                      "adds; expected method heads")
        return (), {}

    ranks.agree(lse.device, check)
    return o, lse


class Ring(Function):
    @staticmethod
    def forward(ctx, ranks, rows, options, *inputs):
        inputs = AttentionInputs(*inputs)
        wide = _calls.wide(inputs.q)
        shape, device = inputs.q.shape, inputs.q.device
        o = torch.zeros((*shape[:3], inputs.v.shape[3]), dtype=wide, device=device)
        lse = torch.full((shape[0], shape[2], shape[1]), -torch.inf, dtype=wide, device=device)
        travel, begun = _Travel(ranks, rows, inputs.k, inputs.v), set()
        for step in range(ranks.size):
            travel.begin_next(step)
            for block in travel.blocks(inputs, options, step):
                own = o[:, block.queries], lse[:, :, block.queries]
                if block.queries.start in begun:
                    _merge(*own, *block.forward(wide))
                else:
                    block.forward(wide, own)
                begun.add(block.queries.start)
            travel.finish_next(step)
        o = o.to(inputs.v.dtype)
        ctx.ranks, ctx.rows, ctx.options = ranks, rows, options
        ctx.save_for_backward(*inputs, o, lse)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse):
        *inputs, o, lse = ctx.saved_tensors
        inputs, wide = AttentionInputs(*inputs), lse.dtype
        needs = ATTENTION.wanted_of(ctx.needs_input_grad[3:])
        wanted = dict(zip(ATTENTION_WANTED, needs))
        sums = {n: torch.zeros_like(getattr(inputs, n), dtype=wide) if w and n not in ("k", "v") else None
                for n, w in wanted.items()}
        travel = _Travel(ctx.ranks, ctx.rows, inputs.k, inputs.v, with_gradients=wide)
        for step in range(ctx.ranks.size):
            travel.begin_next(step)
            for block in travel.blocks(inputs, ctx.options, step):
                block.backward(wide, o, lse, do, dlse, sums, travel.gradients, wanted)
            travel.finish_next(step)
            travel.move_gradients()
        sums["k"], sums["v"] = travel.gradients
        grads = [sums[n].to(getattr(inputs, n).dtype) if w else None for n, w in wanted.items()]
        return None, None, None, *ATTENTION.gradients(grads)


class _Block:
    """A segment of this rank's queries and a segment of the keys that this rank holds now."""

    def __init__(self, inputs: AttentionInputs, options: AttentionOptions, queries: slice, keys: slice):
        self.inputs, self.options, self.queries, self.keys = inputs, options, queries, keys

    def forward(self, wide, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        q, v = self.inputs.q, self.inputs.v
        if into is None:
            into = (torch.empty((*q.shape[:3], v.shape[3]), dtype=wide, device=q.device),
                    torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide, device=q.device))
        _native.attention_forward(self.inputs, self.options, into, _calls.AUTOMATIC, _calls.threads(), False)
        return into

    def backward(self, wide, o, lse, do, dlse, sums, key_sums, wanted) -> None:
        names = [n for n in ATTENTION_WANTED if wanted[n] and getattr(self.inputs, n) is not None]
        grads = {n: torch.empty_like(getattr(self.inputs, n), dtype=wide, memory_format=torch.contiguous_format)
                 for n in names}
        o, do = o[:, self.queries], do[:, self.queries]
        lse, dlse = lse[:, :, self.queries], dlse[:, :, self.queries]
        if not self._takes_saved():
            o, lse, do, dlse = self._of_own_keys(wide, o, lse, do, dlse)
        _native.attention_backward(self.inputs, self.options,
                                   (o, lse, do, dlse, *(grads.get(n) for n in ATTENTION_WANTED)), _calls.AUTOMATIC,
                                   _calls.threads(), False)
        for name, gradient in grads.items():
            if name == "q":
                sums["q"][:, self.queries] += gradient
            elif name == "bias":
                self.of_plane(sums["bias"]).add_(gradient)
            elif name == "sink":
                sums["sink"] += gradient
            else:
                key_sums["kv".index(name)][:, self.keys] += gradient

    def _takes_saved(self) -> bool:
        """Whether the backward pass uses the saved o and lse. The reference computes its own, and so do the gradients of a
        sink and of a bias that is the same for all keys of a row."""
        x = self.inputs
        alone = x.sink is None and (x.bias is None or x.bias.shape[3] > 1)
        return alone and not any(t is not None and t.dtype == torch.float64 for t in x) and (
            x.q.is_cuda or _has_kernels())

    def _of_own_keys(self, wide, o, lse, do, dlse):
        """o, lse, do and dlse for attention over the keys of this block alone (see the top of this file)."""
        o_step, lse_step = self.forward(wide)
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


def _merge(o: Tensor, lse: Tensor, o_step: Tensor, lse_step: Tensor) -> None:
    """Merges a step into o and lse. The library merges tensors of the CPU; those of a GPU are merged here."""
    if not o.is_cuda:
        merged, merged_lse = torch.empty_like(o_step), torch.empty_like(lse_step)
        _native.attention_merge(((o, lse), (o_step, lse_step)), (merged, merged_lse), _calls.threads(), False)
        o.copy_(merged)
        lse.copy_(merged_lse)
        return
    total = torch.logaddexp(lse, lse_step)
    for x, of, add in ((o, lse, False), (o_step, lse_step, True)):
        share = torch.where(of == -torch.inf, 0.0, torch.exp(of - total)).transpose(1, 2).unsqueeze(-1)
        o.addcmul_(share, x) if add else o.mul_(share)
    lse.copy_(total)


@functools.cache
def _has_kernels() -> bool:
    return any(level["available"] for level in _native.isa_levels())


class _Travel:
    """The keys and values that this rank holds now, and their gradients."""

    def __init__(self, ranks: Ranks, rows, k: Tensor, v: Tensor, with_gradients: torch.dtype | None = None):
        self.ranks, self.rows = ranks, rows
        self.here = (k.contiguous(), v.contiguous())
        self.gradients = None
        if with_gradients is not None:
            self.gradients = tuple(torch.zeros_like(t, dtype=with_gradients) for t in self.here)
        self._coming = None

    def source(self, step: int) -> int:
        """The rank whose keys are held here in this step."""
        return (self.ranks.rank - step) % self.ranks.size

    def _move(self, tensors, source_rows: int):
        """Starts to send tensors to the next rank and to receive those of the previous rank."""
        P, rank = self.ranks.size, self.ranks.rank
        coming = tuple(t.new_empty((t.shape[0], source_rows, *t.shape[2:])) for t in tensors)
        return coming, (self.ranks.pass_on(tensors, (rank + 1) % P, coming, (rank - 1) % P), tensors)

    def _wait(self, work) -> None:
        for transfer in work[0]:  # work[1] keeps what is sent alive until it has arrived
            with self.ranks.naming("while keys travelled"):
                transfer.wait()

    def _count(self, rank: int) -> int:
        return sum(n for _, n in self.rows.keys[rank])

    def begin_next(self, step: int) -> None:
        if step + 1 < self.ranks.size:
            self._coming = self._move(self.here, self._count(self.source(step + 1)))

    def finish_next(self, step: int) -> None:
        if step + 1 < self.ranks.size:
            self._wait(self._coming[1])
            self.here = self._coming[0]
        self._step = step

    def move_gradients(self) -> None:
        """Sends the gradients on with their keys; after the last step each rank has its own again."""
        if self.ranks.size > 1:
            self.gradients, work = self._move(self.gradients, self._count(self.source(self._step + 1)))
            self._wait(work)

    def _whole_blocks(self, inputs: AttentionInputs, options: AttentionOptions, step: int):
        """For causal attention in zigzag order without masks: each half of the queries sees another rank's keys all or not
        at all, so that both halves of the keys are one range. That gives larger calls and fewer merges."""
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

    def _are_whole(self, inputs: AttentionInputs, options: AttentionOptions) -> bool:
        return (options.causal != 0 and options.window_left < 0 and options.window_right < 0 and inputs.mask is None
                and inputs.bias is None and self.rows.queries == self.rows.keys and len(self.rows.queries[0]) == 2)

    def blocks(self, inputs: AttentionInputs, options: AttentionOptions, step: int):
        if self._are_whole(inputs, options):
            yield from self._whole_blocks(inputs, options._replace(causal=_TOP_LEFT), step)
            return
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
