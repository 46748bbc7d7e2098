"""A process group: the check that all ranks make the same call, and collectives whose errors name the rank."""
from __future__ import annotations

import contextlib
import hashlib
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _native


_with_priority = weakref.WeakKeyDictionary()  # what _group_with_priority() returned, by the caller's group


class Ranks:
    """The ranks of a ProcessGroup or of a DeviceMesh with one dimension; None: all processes."""

    def __init__(self, group):
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized, expected init_process_group before this call")
        if hasattr(group, "get_group"):  # a DeviceMesh
            group = group.get_group()
        self.group = dist.group.WORLD if group is None else group
        self._between = self.group  # of transfers from one rank to another
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("group does not have this process, expected a group that it belongs to")

    def agree(self, device: torch.device, check) -> list[tuple[int, ...]]:
        """Returns the numbers of every rank, in the order of ranks. check() returns (numbers, common): a few numbers of
        this rank, and a dict of what must be equal on all ranks. If check() raises on a rank, or its `common` differs
        from that of rank 0, every rank raises a ValueError that names this rank."""
        failure, numbers, common = None, (), {}
        try:
            numbers, common = check()
        except Exception as e:  # raised below, after the others know: they wait for this rank
            failure = e
        digest = int.from_bytes(hashlib.sha256(repr(sorted(common.items())).encode()).digest()[:7], "little")
        row = torch.zeros(12, dtype=torch.int64)
        row[0], row[1], row[2] = failure is not None, digest, len(numbers)
        row[3:3 + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        rows = torch.stack(self.all_gather(row.to(device), "while shapes were agreed on")).tolist()
        if any(r[0] for r in rows) or len({r[1] for r in rows}) > 1:
            self._explain(failure, common)
        return [tuple(r[3:3 + r[2]]) for r in rows]

    def _explain(self, failure, common) -> None:
        said = [None] * self.size
        own = f"{type(failure).__name__}: {failure}" if failure is not None else common
        with self.naming("while ranks told each other what they have"):
            dist.all_gather_object(said, own, group=self.group)
        texts = [f"rank {r}: {s}" for r, s in enumerate(said) if isinstance(s, str)]
        if not texts:
            texts = [f"rank {r} has {n} {s.get(n)}, rank 0 has {said[0].get(n)}" for r, s in enumerate(said)
                     for n in sorted({*s, *said[0]}) if s.get(n) != said[0].get(n)]
        kind = _native.Unsupported if isinstance(failure, _native.Unsupported) else ValueError
        raise kind("; ".join(texts)) from failure

    def give_priority(self) -> None:
        """What ranks with a GPU each send to each other goes ahead of kernels that fill the GPU. All ranks call this."""
        if self.group not in _with_priority:
            with self.naming("while a group for transfers was made"):
                _with_priority[self.group] = _group_with_priority(self.group)
        self._between = _with_priority[self.group] or self.group

    @contextlib.contextmanager
    def naming(self, when: str):
        """Adds to an error of the transport which rank noticed it, and when."""
        try:
            yield
        except (RuntimeError, TimeoutError) as e:
            raise RuntimeError(f"rank {self.rank} of {self.size} was left by another rank {when}: {e}") from e

    def all_gather(self, t: Tensor, when: str) -> list[Tensor]:
        """The tensor of every rank. All have the same shape and type."""
        t = t.contiguous()
        parts = [torch.empty_like(t) for _ in range(self.size)]
        with self.naming(when):
            dist.all_gather(parts, t, group=self.group)
        return parts

    def send(self, t: Tensor, to: int):
        """Starts a transfer and returns it. Call its wait() inside naming()."""
        with self.naming(f"while rank {to} was sent to"):
            return dist.isend(t, dist.get_global_rank(self.group, to), group=self._between)

    def receive(self, t: Tensor, source: int):
        with self.naming(f"while rank {source} was waited for"):
            return dist.irecv(t, dist.get_global_rank(self.group, source), group=self._between)

    def exchange(self, sends, receives) -> list:
        """Starts to send and to receive; sends, receives: (tensor, rank). Returns transfers as send() does."""
        ops = [dist.P2POp(function, t, dist.get_global_rank(self.group, rank), self._between)
               for function, of in ((dist.isend, sends), (dist.irecv, receives)) for t, rank in of]
        with self.naming("while neighbours were sent to and waited for"):
            return dist.batch_isend_irecv(ops)

    def all_to_all(self, sent: Tensor, counts: list[int], received_counts: list[int]):
        """Starts to send the next counts[r] elements of `sent` to each rank r. Returns the memory where received_counts[r]
        elements of each rank will be, and the transfer."""
        received = sent.new_empty(sum(received_counts))
        size = sent.element_size()
        with self.naming("while tokens and heads were exchanged"):
            return received, dist.all_to_all_single(
                received.view(torch.uint8), sent.view(torch.uint8), [n * size for n in received_counts],
                [n * size for n in counts], group=self.group, async_op=True)


def _group_with_priority(group):
    """NCCL's kernels wait until all blocks of a kernel that was started earlier have begun, unless their streams have a high
    priority. Returns a group of the same ranks whose streams do, or None where `group` is to be used: it is such a one, it
    is not NCCL's, or torch would split a group of more ranks, and all of those had to join."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    own = group._get_backend(torch.device("cuda"))
    if nccl is None or not isinstance(own, nccl) or own.options.is_high_priority_stream:
        return None
    if dist.group.WORLD.bound_device_id is not None and dist.get_world_size(group) < dist.get_world_size():
        return None
    options = nccl.Options(is_high_priority_stream=True)
    return dist.new_group(dist.get_process_group_ranks(group), own.options._timeout, "nccl", options,
                          use_local_synchronization=True)


def to_check(record):
    """The same record for a call that is only checked: tensors of a GPU become zeros on the host."""
    return record._replace(**{n: torch.zeros(t.shape, dtype=t.dtype) for n, t in record._asdict().items()
                              if isinstance(t, Tensor) and t.is_cuda})


def parts_of(count: int, ranks: int) -> list[slice]:
    """range(count) cut into `ranks` parts that are as equal as possible."""
    return [slice(r * count // ranks, (r + 1) * count // ranks) for r in range(ranks)]
