"""torch.autograd.gradcheck over all ranks. Every rank has the whole operands, computes its part, and gathers all parts.
The check perturbs the same element on every rank."""
import torch
import torch.distributed as dist
from torch.autograd import Function, gradcheck

import softdelta.torch.distributed as sdd
from drawing import draw
from ranks_delta import ROWS, RULES, draw_call


class _Shared(Function):
    """Marks an operand that all ranks have: its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, *tensors):
        return tuple(t.clone() for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        sums = [g.contiguous().clone() for g in gradients]
        for total in sums:
            dist.all_reduce(total)
        return tuple(sums)


class _Gathered(Function):
    """The parts of all ranks, one after the other."""

    @staticmethod
    def forward(ctx, x, lengths, dim):
        ctx.at, ctx.dim = (sum(lengths[:dist.get_rank()]), x.shape[dim]), dim
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, x)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.narrow(ctx.dim, *ctx.at).clone(), None, None


def _check(function, tensors):
    """function(operands by name) → (result, dimension of its rows, rows of each rank) for each result."""
    names = list(tensors)

    def whole(*given):
        return tuple(_Gathered.apply(*result) for result in function(dict(zip(names, _Shared.apply(*given)))))

    assert gradcheck(whole, tuple(t.requires_grad_() for t in tensors.values()), fast_mode=True, atol=1e-6)


def check_delta_rules(method):
    rank, lengths = dist.get_rank(), [2, 3]
    at = slice(2 * rank, 2 + 3 * rank)
    for seed in range(len(RULES) + 2):
        rule, call, options, bounds = draw_call(seed, torch.float64, 5, heads=2)

        def shared(given):
            own = {n: t[:, at] if n in ROWS else t for n, t in given.items()}
            q, k, v = (own.pop(n) for n in "qkv")
            o, state = sdd.delta_rule(rule, q, k, v, **own, **options, method=method, cu_seqlens=bounds,
                                      output_final_state=bounds is None)
            yield o, lengths, 1
            if bounds is None:
                B, K, (HV, V) = q.shape[0], q.shape[3], v.shape[2:]
                sizes = (V, K) if options["state_v_first"] else (K, V)
                yield o.new_zeros(0, HV, *sizes) + 0 * o.sum() if state is None else state, [0, B], 0

        _check(shared, call)


def check_attention(method):
    rank = dist.get_rank()
    for seed, causal in enumerate(("none", "top_left", "bottom_right", "top_left")):
        torch.manual_seed(seed)
        call = {n: draw(1, 8, 2, 3, dtype=torch.float64) for n in "qkv"}
        call |= {"bias": draw(1, 2, 8, 8, dtype=torch.float64), "sink": draw(2, dtype=torch.float64)}
        if seed == 3:
            del call["bias"]
        order = "zigzag" if causal == "top_left" else "contiguous"
        rows = [*range(2 * rank, 2 * rank + 2), *range(6 - 2 * rank, 8 - 2 * rank)]
        rows = torch.tensor(rows if order == "zigzag" else range(4 * rank, 4 * rank + 4))

        def shared(given):
            own = {n: given[n].index_select(1, rows) for n in "qkv"}
            own["bias"] = given["bias"].index_select(2, rows) if "bias" in given else None
            o, lse = sdd.attention(**own, sink=given["sink"], causal=causal, method=method, order=order, softcap=2.0)
            yield o, [4, 4], 1
            yield lse, [4, 4], 2

        _check(shared, call)


def check_convolution():
    at = slice(4 * dist.get_rank(), 4 + 2 * dist.get_rank())
    call = {"x": draw(2, 6, 3, dtype=torch.float64), "weight": draw(3, 4, dtype=torch.float64),
            "bias": draw(3, dtype=torch.float64)}

    def shared(given):
        yield sdd.short_convolution(given["x"][:, at], given["weight"], given["bias"], activation="silu"), [4, 2], 1

    _check(shared, call)
