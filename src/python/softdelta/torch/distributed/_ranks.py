"""A process group: the check that all ranks make the same call, and collectives whose errors name the rank."""
from __future__ import annotations

import contextlib
import hashlib
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _native
from .._route import is_transformed

try:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
except ImportError:  # torch keeps it to itself. Calls within torch.func then fail in the transport
    temporarily_clear_interpreter_stack = contextlib.nullcontext

# Of an error that ranks share: the class of the first rank's exception, or else the last one.
_CLASSES = (ValueError, TypeError, MemoryError, _native.Unsupported, RuntimeError)
_with_priority = weakref.WeakKeyDictionary()  # what _group_with_priority() returned, by the caller's group


class Agreed(NamedTuple):
    numbers: list[tuple[int, ...]]  # of every rank, in the order of ranks
    wanted: frozenset[str]          # the tensors that require a gradient on some rank


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

    def agree(self, call: str, given: dict, check) -> Agreed:
        """All ranks tell each other what they have, in one message of a fixed size. Whatever does not fit is the same error
        on every rank, which names a rank that has it.

        call    what is called
        given   its operands by their names
        check   raises for arguments that are wrong, or returns (tensors, numbers, common): the operands as they are used, up
                to 9 numbers of this rank, and a dict of what must be equal on all ranks"""
        failure, grads, numbers, common = None, 0, (), {}
        try:
            self._expect_operands(given)
            tensors, numbers, common = check()
            grads = _grads_of(tensors)
        except Exception as e:  # raised below, after the others know: they wait for this rank
            failure = e
        common["call"] = call
        digest = int.from_bytes(hashlib.sha256(repr(sorted(common.items())).encode()).digest()[:7], "little")
        row = [failure is not None, digest, grads, *numbers]
        at = self._place_of_messages(given)
        row = torch.tensor(row + [0] * (12 - len(row)), dtype=torch.int64)
        rows = torch.stack(self.all_gather(row.to(at), "while operands were agreed on")).tolist()
        if any(r[0] for r in rows) or len({r[1] for r in rows}) > 1:
            self._explain(failure, common, at)
        wanted = {n: rank for rank, r in enumerate(rows) for i, n in enumerate(tensors) if r[2] > 0 and r[2] >> i & 1}
        for rank, r in enumerate(rows):
            if wanted and r[2] < 0:
                name = min(wanted)
                raise ValueError(f"rank {rank} records no gradients (torch.no_grad, or a tensor of inference mode), expected "
                                 f"them: {name} of rank {wanted[name]} requires one")
        return Agreed([tuple(r[3:]) for r in rows], frozenset(wanted))

    def _expect_operands(self, given: dict) -> None:
        if is_transformed():
            raise _native.Unsupported("a call that ranks share stands in torch.func or forward mode, expected backward()")
        first, reached = None, self._reached() or ["cpu", "cuda"]
        for name, t in given.items():
            if t is None:
                continue
            if not isinstance(t, Tensor) or type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                raise TypeError(f"{name} is {type(t).__name__}, expected a torch.Tensor with memory of its own")
            first = first or (name, t.device)
            if t.device.type not in reached:
                raise ValueError(f"{name} lies on {t.device}, expected {' or '.join(reached)}, which the group reaches")
            if t.device != first[1]:
                raise ValueError(f"{name} lies on {t.device}, expected {first[1]}, as {first[0]}")

    def _reached(self) -> list[str]:
        """The kinds of devices between which the group sends; none: it has yet to find out."""
        return sorted({"cpu", "cuda"} & {device.type for device in self.group._device_types})

    def _place_of_messages(self, given: dict) -> torch.device:
        """The host, or a GPU where the group reaches GPUs alone."""
        if self._reached() != ["cuda"]:
            return torch.device("cpu")
        on_gpu = (t.device for t in given.values() if isinstance(t, Tensor) and t.is_cuda)
        return next(on_gpu, None) or torch.device("cuda", torch.cuda.current_device())

    def _explain(self, failure, common, at: torch.device) -> None:
        said = [None] * self.size
        own = common if failure is None else (_class_of(failure), f"{type(failure).__name__}: {failure}")
        # Transforms of torch.func would wrap what travels.
        with self.naming("while ranks told each other what they have"), temporarily_clear_interpreter_stack(), _on(at):
            dist.all_gather_object(said, own, group=self.group)
        failed = {r: s for r, s in enumerate(said) if isinstance(s, tuple)}
        if failed:
            kind = _CLASSES[next(iter(failed.values()))[0]]
            raise kind("; ".join(f"rank {r}: {text}" for r, (_, text) in failed.items())) from failure
        names = ["call"] if len({s["call"] for s in said}) > 1 else sorted({n for s in said for n in s})
        raise ValueError("; ".join(f"rank {r} has {n} {s.get(n)}, rank 0 has {said[0].get(n)}" for r, s in enumerate(said)
                                   for n in names if repr(s.get(n)) != repr(said[0].get(n))))

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


def _class_of(failure: Exception) -> int:
    return next((i for i, kind in enumerate(_CLASSES) if isinstance(failure, kind)), len(_CLASSES) - 1)


def _on(place: torch.device):
    return torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext()


def _grads_of(tensors: dict) -> int:
    """A bit for each tensor that requires a gradient; -1: no gradients can be recorded here."""
    if not torch.is_grad_enabled() or any(t is not None and t.is_inference() for t in tensors.values()):
        return -1
    return sum(1 << i for i, t in enumerate(tensors.values()) if t is not None and t.requires_grad)


def described(tensors: dict, rows: dict) -> dict:
    """What must be equal on all ranks: the type, the kind of device, and the shape but for dimensions `rows`, by names."""
    return {n: (t.dtype, t.device.type, torch.Size(s for i, s in enumerate(t.shape) if i not in rows.get(n, ())))
            for n, t in tensors.items() if t is not None}


def with_gradients(record, wanted):
    """The same record, whose tensors require a gradient on this rank if they do on some rank. Backward passes communicate, so
    that all ranks must have the same graph. A gradient that this rank itself does not want goes nowhere."""
    given = {n: getattr(record, n) for n in wanted}
    return record._replace(**{n: t.detach().requires_grad_() for n, t in given.items()
                              if t is not None and not t.requires_grad})


def to_check(record):
    """The same record for a call that is only checked: tensors of a GPU become zeros on the host."""
    return record._replace(**{n: torch.zeros(t.shape, dtype=t.dtype) for n, t in record._asdict().items()
                              if isinstance(t, Tensor) and t.is_cuda})


def parts_of(count: int, ranks: int) -> list[slice]:
    """range(count) cut into `ranks` parts that are as equal as possible."""
    return [slice(r * count // ranks, (r + 1) * count // ranks) for r in range(ranks)]
