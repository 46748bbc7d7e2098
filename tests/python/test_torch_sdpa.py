"""Softmax attention against torch's, forward and gradients, under masks as models make them: 500 drawn calls.

The truth is the formula in f64. Beside a finite mask that is large enough f32 keeps nothing of a score, as in every
kernel. The truth of such rows is the f64 softmax of what f32 keeps. How far a result may be off
is measured by torch's own attention of the same type on the same call.
"""
import math
import random

import pytest
import torch
import torch.nn.functional as F

import softdelta.torch as sd

CALLS = 25  # of each kind and type
INF = math.inf
ROUNDINGS = {torch.float32: 6, torch.bfloat16: 1}  # in all, as multiples of the type's epsilon
FILLS = ("bool", "minimum", -1e4, -1e9, -1e10, -1e20, -INF)  # what stands at keys that are not seen; minimum: finfo.min


def lengths(r, B, L):
    """How many tokens each row has; some have none."""
    return torch.tensor([r.choice((0, 1, L, r.randint(0, L))) for _ in range(B)])[:, None, None]


# --- what a query sees, [B, Lq, Lk] or less; the last query stands at the last key, as with a cache


def causal(r, B, i, j):
    return j <= i


def right_padded(r, B, i, j):
    return j < lengths(r, B, j.numel())


def left_padded(r, B, i, j):
    return j >= j.numel() - lengths(r, B, j.numel())


def causal_left_padded(r, B, i, j):
    """As in generation: rows of padding see nothing at all."""
    return causal(r, B, i, j) & left_padded(r, B, i, j)


def causal_right_padded(r, B, i, j):
    return causal(r, B, i, j) & right_padded(r, B, i, j)


def sliding_window(r, B, i, j):
    return (j <= i) & (j > i - r.randint(1, j.numel()))


def packed(r, B, i, j):
    bounds = torch.tensor(sorted(r.sample(range(1, 64), 3)))
    return (torch.bucketize(j, bounds, right=True) == torch.bucketize(i, bounds, right=True)) & (j <= i)


def prefix(r, B, i, j):
    return (j <= i) | (j < lengths(r, B, j.numel()))


def anything(r, B, i, j):
    seen = torch.rand(B, i.numel(), j.numel()) < 0.5
    seen[:, r.randrange(i.numel())] = False
    return seen


KINDS = (causal, right_padded, left_padded, causal_left_padded, causal_right_padded, sliding_window, packed, prefix,
         anything, None)  # None: is_causal, no mask


def filled(r, seen, fill, dtype):
    """The mask that a model would give: bool, or floats of its own type."""
    if fill == "bool":
        return seen
    value = torch.finfo(dtype).min if fill == "minimum" else fill
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, value)
    if r.random() < 0.2 and value != -INF:  # two masks were added, as of padding and order
        mask = mask + mask * (torch.rand(mask.shape) < 0.3)
    if r.random() < 0.2:  # a position bias
        mask = mask + torch.randn(mask.shape).to(dtype)
    return mask


def draw(seed, kind, dtype):
    """q, k, v [B, H, L, D], mask, is_causal, do."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    B, Hk, group = r.randint(1, 3), r.randint(1, 2), r.choice((1, 1, 2, 3))
    Lq, D, Dv = r.choice((1, 2, 7, 16, 33, 70)), r.choice((4, 8, 16, 33, 64)), r.choice((4, 8, 16, 33, 64))
    Lk = Lq if kind in (None, packed) else Lq + r.choice((0, 0, 1, 20))
    q, k, v, do = (torch.randn(B, h, n, d).to(dtype) for h, n, d in ((Hk * group, Lq, D), (Hk, Lk, D), (Hk, Lk, Dv),
                                                                     (Hk * group, Lq, Dv)))
    if kind is None:
        return q, k, v, None, True, do
    seen = kind(r, B, torch.arange(Lq)[:, None] + Lk - Lq, torch.arange(Lk))
    seen = seen.expand(-1, Lq, -1)[:, None] if seen.dim() == 3 else seen[None, None]
    if r.random() < 0.3:
        seen = seen.expand(B, Hk * group, -1, -1)
    return q, k, v, filled(r, seen, r.choice(FILLS), dtype), False, do


def truth(q, k, v, mask, is_causal):
    """In f64, of f64."""
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * q.shape[-1]**-0.5
    addend = torch.zeros(1, 1, *s.shape[-2:], dtype=torch.float64) if mask is None else mask
    if is_causal:
        addend = addend.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -INF)
    elif mask.dtype == torch.bool:
        addend = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -INF)
    top = addend.detach().amax(-1, keepdim=True)
    spacing = torch.exp2(top.abs().clamp(1e-30, 1e300).log2().floor() - 23)  # of f32, near the row's largest
    swallowed = top.isfinite() & (spacing > 4 * s.detach().abs().amax(-1, keepdim=True))
    t = s + addend
    t = torch.where(swallowed, t.float().double(), t)
    dead = top == -INF
    p = t.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return p @ v.repeat_interleave(group, 1)


def results(attend, q, k, v, mask, is_causal, do):
    """o and the gradients, of a float mask too."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.detach().clone().requires_grad_()
        o = attend(*leaves, mask, is_causal)
        leaves.append(mask)
    else:
        o = attend(*leaves, mask, is_causal)
    return dict(zip(("o", "dq", "dk", "dv", "dmask"), (o.detach(), *torch.autograd.grad(o, leaves, do))))


def ours(q, k, v, mask, is_causal):
    return sd.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)


def torchs(q, k, v, mask, is_causal):
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)


def lost(mask):
    """What f32 may lose of scores beside finite masks that leave some of them: twice the spacing of f32 there."""
    if mask is None or mask.dtype == torch.bool:
        return 0
    sizes = mask.detach().double().abs()
    return 2 * torch.exp2(sizes[sizes < 1e6].clamp_min(1).log2().floor() - 23).amax().item() if (sizes < 1e6).any() else 0


def error(x, true):
    return (x.double() - true).norm().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__ if kind else "is_causal")
def test_as_far_from_the_truth_as_torch(kind, dtype):
    for seed in range(CALLS):
        call = draw(seed, kind, dtype)
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in call]
        true, found, peer = results(truth, *wide), results(ours, *call), results(torchs, *call)
        for name, x in true.items():
            assert found[name].isfinite().all(), f"seed {seed}: {name} is not finite"
            # Everybody rounds what is written, and intermediates in the type, do·v among them, which may cancel; scores
            # near a mask lose digits to it.
            size = x.norm().item() + call[-1].double().norm().item()
            limit = max((ROUNDINGS[dtype] * torch.finfo(dtype).eps + lost(call[3])) * size, 2 * error(peer[name], x))
            assert error(found[name], x) <= limit, \
                f"seed {seed}: {name} is off by {error(found[name], x):.1e}, torch by {error(peer[name], x):.1e}, " \
                f"the truth is {x.norm():.1e}"
