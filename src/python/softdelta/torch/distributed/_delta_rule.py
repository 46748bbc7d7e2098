"""The delta rules on a sequence that ranks share."""
from __future__ import annotations

import torch
from torch import Tensor

from ... import _native, _options
from ..._delta_rule import options_of
from ..._records import DELTA_ROWS, DeltaInputs, DeltaOptions
from .. import _calls
from .._families import DELTA_RULE
from .._route import autocast
from ._by_heads import Call, batches_of, by_heads
from ._plan import Plan, part_of
from ._ranks import Agreed, Ranks, described, to_check, with_gradients
from ._relay import relay
from ._scan import scan

METHODS = ("auto", "relay", "scan", "heads")
_FILL_A_GPU = 64  # heads: a scan has two blocks for each
_RELAYING_GPUS = 5  # for each group of heads; more would wait for scans longer than method scan computes them again


@torch.compiler.disable
def delta_rule(rule: str, q: Tensor, k: Tensor, v: Tensor, *, group=None, method: str = "auto", g: Tensor | None = None,
               g_gamma: Tensor | None = None, beta: Tensor | None = None, p: Tensor | None = None,
               initial_state: Tensor | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
               cu_seqlens=None, scale: float | None = None, use_qk_l2norm_in_kernel: bool = False,
               use_gate_in_kernel: bool = False, lower_bound: float | None = None,
               use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
               output_final_state: bool = False, head_groups: int | None = None) -> tuple[Tensor, Tensor | None]:
    """softdelta.delta_forward with gradients, on a sequence of which each rank of `group` has a part.

    group           a ProcessGroup, a DeviceMesh of one dimension, or None, which is all processes
    q, k, p         [B, T, H, K], T of this rank; v [B, T, HV, V]; g, beta as delta_forward's
    A_log, dt_bias, g_gamma  of all heads, the same on every rank
    initial_state   [B, HV, K, V] before the first token of all; rank 0's counts
    cu_seqlens      [N+1] where packed sequences begin in the tokens of all ranks, the same on every rank: then B is 1,
                    and a sequence may cross ranks; there are no initial and final states
    method          "relay"  ranks hand states on, a group of heads at a time. The bits of one process where ranks
                             begin at multiples of 64 tokens (sums for A_log and dt_bias within rounding)
                    "scan"   summaries of all ranks are gathered and folded; no rank waits for another's scan
                    "heads"  all to all: each rank computes all tokens of some heads. The bits of one process
                    "auto"   relay where waiting adds 2/5 to its time at most, heads where there are as many heads as
                             ranks, else scan; on up to 5 GPUs relay, else scan (docs/distributed.md says why)
    head_groups     of relay; by default as many as make it shortest, with H, P and the threads of a rank

    Returns o [B, T, HV, V] of this rank, and on the last rank the final state if output_final_state, else None. Every
    rank raises the same error, as attention's. After Sun et al. 2025 (LASP-2), Qin et al. 2024 (state passing), Jacobs et
    al. 2023 (heads by all to all).
    """
    ranks = Ranks(group)
    inputs = DeltaInputs(q=q, k=k, v=v, g=g, g_gamma=g_gamma, beta=beta, p=p, A_log=A_log, dt_bias=dt_bias,
                         initial_state=initial_state if ranks.rank == 0 else None)
    state: dict = {}

    def check():
        state["options"] = options = options_of(
            rule, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, state_v_first)
        state["inputs"] = x = autocast(inputs, DELTA_RULE.casts)
        state["bounds"] = bounds = None if cu_seqlens is None else [int(b) for b in cu_seqlens]
        return x._asdict(), *_check(x, options, bounds, method, output_final_state, head_groups)

    numbers, wanted = _agree(ranks, inputs, check)
    lengths, has_initial = [n[0] for n in numbers], bool(numbers[0][1])
    options, x, bounds = state["options"], with_gradients(state["inputs"], wanted), state["bounds"]
    if bounds is not None and bounds[-1] != sum(lengths):
        raise ValueError(f"cu_seqlens ends with {bounds[-1]}, expected {sum(lengths)}, the tokens of all ranks")
    count = x.q.shape[2]
    method = chosen(method, ranks.size, x, numbers)
    if method == "heads":
        if count < ranks.size:
            raise ValueError(f"q has {count} heads, expected {ranks.size} at least, one for each rank: method is heads")
        batches = batches_of(ranks, count, x.v.shape[2] // count, count if x.q.is_cuda else _threads(numbers))
        call = Call(ranks, options, lengths, has_initial, output_final_state, wanted,
                    None if bounds is None else torch.tensor(bounds), batches)
        return by_heads(call, x)
    groups = groups_of(ranks.size, x, numbers) if head_groups is None else min(count, head_groups)
    plan = Plan(ranks, options, *part_of(ranks, lengths, bounds), groups, output_final_state, bool(wanted))
    return (relay if method == "relay" else scan)(plan, x)


def _agree(ranks: Ranks, inputs: DeltaInputs, check) -> Agreed:
    numbers, wanted = ranks.agree("delta_rule", inputs._asdict(), check)
    # The gradient of initial_state, which rank 0 alone has, passes through all ranks, and these have v.
    return Agreed(numbers, wanted | {"v"} if "initial_state" in wanted else wanted)


@torch.compiler.disable
def with_context(context, inputs: DeltaInputs, options: DeltaOptions) -> tuple[Tensor, None]:
    """A call with what flash-linear-attention's build_cp_context returns: its group, this rank's cu_seqlens, and
    whether the first sequence begins and the last one ends here."""
    _expect_of_context(context, "group")
    ranks, inputs, state = Ranks(context.group), inputs._replace(cu_seqlens=None), {}

    def check():
        for name in ("cu_seqlens", "is_first_rank", "is_last_rank"):
            _expect_of_context(context, name)
        layout, given = getattr(context, "layout", "contiguous"), getattr(context, "cu_seqlens_cpu", None)
        if layout != "contiguous":
            raise ValueError(f"cp_context.layout is {layout!r}, expected 'contiguous'")
        if inputs.initial_state is not None:
            raise ValueError("initial_state is given, expected None with cp_context")
        state["inputs"] = x = autocast(inputs, DELTA_RULE.casts)
        state["local"] = local = [int(b) for b in (context.cu_seqlens if given is None else given)]
        if x.q is not None and x.q.dim() == 4 and (x.q.shape[0] != 1 or not local or local[0] != 0
                                                   or local[-1] != x.q.shape[1] or sorted(local) != local):
            raise ValueError(f"q has shape {list(x.q.shape)} and cp_context.cu_seqlens is {local}, expected [1, T, ..] and "
                             "numbers that ascend from 0 to T")
        crosses = ranks.rank > 0 and not context.is_first_rank, not context.is_last_rank
        numbers, common = _check(x, options, None, "auto", False, None)
        return x._asdict(), (*numbers, *crosses), common

    numbers, wanted = _agree(ranks, inputs, check)
    crosses = [n[3:5] for n in numbers]
    for rank, ((_, leaves), (enters, _)) in enumerate(zip(crosses, [*crosses[1:], (0, 0)])):
        if leaves != enters:
            raise ValueError(f"cp_context.is_last_rank is {not leaves} on rank {rank}, expected {not enters}: the last sequence "
                             f"{'goes' if enters else 'does not go'} on behind it")
    x, (enters, leaves) = with_gradients(state["inputs"], wanted), map(bool, crosses[ranks.rank])
    groups = groups_of(ranks.size, x, numbers)
    plan = Plan(ranks, options, state["local"], enters, leaves, groups, False, bool(wanted))
    by_relay = ranks.size <= (_RELAYING_GPUS * groups if x.q.is_cuda else x.q.shape[2])
    return (relay if by_relay else scan)(plan, x)


def _expect_of_context(context, name: str) -> None:
    if not hasattr(context, name):
        raise ValueError(f"cp_context is {type(context).__name__} without {name}, expected what build_cp_context returns")


def chosen(method: str, ranks: int, x: DeltaInputs, numbers) -> str:
    """The method that "auto" stands for. The relay waits for other ranks; heads sends every operand once. The scan computes
    three scans instead of one, which costs less than the relay's waiting when there are more ranks than heads. On a GPU the
    relay waits for scans alone."""
    if method != "auto":
        return method
    if x.q.is_cuda:
        return "relay" if ranks <= _RELAYING_GPUS * groups_of(ranks, x, numbers) else "scan"
    heads, threads = x.q.shape[2], _threads(numbers)
    if 5 * _relay_steps(groups_of(ranks, x, numbers), ranks, heads, threads) <= 7 * -(-heads // threads):
        return "relay"
    return "heads" if ranks <= heads else "scan"


def groups_of(ranks: int, x: DeltaInputs, numbers) -> int:
    """The number of groups of heads in the relay: the smallest whose time is within 3 % of the shortest, since each group is
    a call. A group fills a GPU, if there are so many heads."""
    heads = x.q.shape[2]
    if x.q.is_cuda:
        return max(1, min(heads, x.q.shape[0] * x.v.shape[2] // _FILL_A_GPU))
    steps = [_relay_steps(n, ranks, heads, _threads(numbers)) for n in range(1, heads + 1)]
    return 1 + next(i for i, n in enumerate(steps) if n <= 1.03 * min(steps))


def _relay_steps(groups: int, ranks: int, heads: int, threads: int) -> int:
    """The time of the relay, as multiples of one head on one thread: groups + P − 1 groups, one after the other."""
    return (groups + ranks - 1) * -(-heads // groups // threads)


def _threads(numbers) -> int:
    return min(n[2] for n in numbers)


def _check(x: DeltaInputs, options: DeltaOptions, bounds, method, output_final_state, head_groups):
    """Checks this rank's arguments. Returns its numbers, and what must be equal on all ranks."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
    if head_groups is not None and _options.whole("head_groups", head_groups) < 1:
        raise ValueError(f"head_groups is {head_groups}, expected 1 at least")
    if x.q is None or x.v is None or x.q.dim() != 4 or x.v.dim() != 4:
        _calls.refuse_ranks(x.q, x.v)
    tokens = x.q.shape[1]
    for name in DELTA_ROWS:
        t = getattr(x, name)
        if t is not None and (t.dim() < 3 or t.shape[1] != tokens):
            raise ValueError(f"{name} has shape {list(t.shape)}, expected {tokens} tokens in dimension 1, as q")
    if bounds is not None:
        if x.q.shape[0] != 1:
            raise ValueError(f"q has {x.q.shape[0]} batch rows, expected 1: sequences are packed")
        if x.initial_state is not None or output_final_state:
            raise ValueError("initial_state or output_final_state is given, expected neither: packed sequences that "
                             "cross ranks begin with the state 0")
        if not bounds or bounds[0] != 0 or sorted(bounds) != bounds:
            raise ValueError(f"cu_seqlens is {bounds}, expected numbers that ascend from 0")
    empty = x._replace(**{n: getattr(x, n)[:, :0] for n in DELTA_ROWS if getattr(x, n) is not None})
    empty = to_check(empty)
    _native.delta_forward(empty, options, (torch.empty_like(empty.v),), _calls.AUTOMATIC, 1, False)  # its checks
    common = described(x._replace(initial_state=None)._asdict(), dict.fromkeys(DELTA_ROWS, (1,)))
    common |= {n: str(o) for n, o in options._asdict().items()}
    common |= {"method": method, "head_groups": head_groups, "cu_seqlens": bounds,
               "output_final_state": bool(output_final_state)}
    return (tokens, x.initial_state is not None, _calls.threads()), common
