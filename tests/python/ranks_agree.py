"""Calls of which one rank's operands differ from the others': every rank has the right result, or the same error. Changes
are drawn alike on every rank, so that each knows what the others have."""
import contextlib
import random

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import softdelta.torch.distributed as sdd
from drawing import draw
from ranks_attention import draw_call as draw_attention
from ranks_attention import records, rows_of
from ranks_delta import ROWS, cut
from ranks_delta import draw_call as draw_delta
from ranks_delta import whole as whole_delta
from softdelta import _native
from softdelta._records import DELTA_SUMS, AttentionInputs
from softdelta.torch import _ops, causal_conv1d
from softdelta.torch._families import SOFTMAX_ATTENTION

# What an argument raises, and the class of what every rank then raises.
RAISED = {ValueError: ValueError, TypeError: TypeError, MemoryError: MemoryError, _native.Unsupported: _native.Unsupported,
          RuntimeError: RuntimeError, KeyError: RuntimeError, OverflowError: RuntimeError, NotImplementedError: RuntimeError}
ERRORS = {kind.__name__ for kind in RAISED.values()}


class Raises:
    """An argument that raises when it is read."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        raise self.kind("says the argument")

    __index__ = __iter__


class Delta:
    row_dims = dict.fromkeys(ROWS, (1,))
    others = {"scale": 0.123, "method": "auto", "head_groups": 7, "output_final_state": "flip", "lower_bound": -3.0,
              "state_v_first": "flip"}
    raising = "head_groups"

    def __init__(self, seed, method, dice):
        sizes = dice.choice(((3, 4), (1, 4), (3, 1)))
        self.rule, self.tensors, options, self.bounds = draw_delta(seed, torch.float64, 8, heads=2, sizes=sizes)
        self.plain = options
        self.options = options | {"cu_seqlens": self.bounds, "method": method, "output_final_state": self.bounds is None}
        self.lengths = cut(8, dist.get_world_size(), 1, dice)

    def part(self, name, t, rank):
        if name in ROWS:
            return t[:, sum(self.lengths[:rank]):sum(self.lengths[:rank + 1])]
        return None if name == "initial_state" and rank > 0 else t

    def is_shared(self, name):
        return name in DELTA_SUMS

    def whole(self, tensors):
        return [t for t in whole_delta(self.rule, tensors, self.plain, self.bounds) if t is not None]

    def of_rank(self, results, rank):
        last = rank == dist.get_world_size() - 1
        return [self.part("v", results[0], rank), *(results[1:] if last else ())]

    def run(self, own, options):
        own = {n: own.get(n) for n in "qkv"} | own
        return [t for t in sdd.delta_rule(self.rule, **own, **options) if t is not None]

    def change_legally(self, dice, who, own):
        """What rank 1 gives as the initial state does not count."""
        state = dice.choice((torch.zeros(3), torch.zeros(2, device="meta"), "none"))
        if dist.get_rank() == 1:
            own["initial_state"] = state


class Attention:
    row_dims = {"q": (1,), "k": (1,), "v": (1,), "mask": (2, 3), "bias": (2, 3)}
    others = {"scale": 0.123, "method": "auto", "softcap": 3.5, "window_left": 5, "order": "flip", "causal": "flip"}
    raising = "window_left"

    def __init__(self, seed, method, dice):
        self.tensors, options = draw_attention(seed, torch.float64, 8, heads=2)
        self.plain, order = options, dice.choice(("contiguous", "zigzag"))
        self.options = options | {"method": method, "order": order}
        self.lengths = {n: cut(self.tensors[n].shape[1], dist.get_world_size(), 1, dice) for n in "qk"}

    def _rows(self, name, rank):
        name = "k" if name in "kv" else "q"
        return rows_of(self.tensors[name].shape[1], self.lengths[name], self.options["order"], rank)

    def part(self, name, t, rank):
        if name == "sink" or name in ("mask", "bias") and t.shape[2] == 1:
            return t
        return t.index_select(2 if name in ("mask", "bias") else 1, self._rows(name, rank))

    def is_shared(self, name):
        return name == "sink" or name in ("mask", "bias") and self.tensors[name].shape[2] == 1

    def whole(self, tensors):
        return _ops.call(SOFTMAX_ATTENTION, AttentionInputs(**tensors), records(self.plain))

    def of_rank(self, results, rank):
        rows = self._rows("q", rank)
        return [results[0][:, rows], results[1][:, :, rows]]

    def run(self, own, options):
        return sdd.attention(**{n: own.get(n) for n in "qkv"} | own, **options)

    def change_legally(self, dice, who, own):
        """One rank has a mask or bias that is the same for all keys, as an operand with one key."""
        name = dice.choice(("mask", "bias"))
        q, k = self.tensors["q"], self.tensors["k"]
        full = draw(dice.choice((1, q.shape[0])), dice.choice((1, 2, q.shape[2])), 8, k.shape[1], dtype=torch.float64)
        if name == "mask":
            full = full > -1
        rows = self._rows("q", who)
        full[:, :, rows] = full[:, :, rows][..., :1]
        self.tensors[name] = full
        own[name] = self.part(name, full, dist.get_rank())
        if dist.get_rank() == who:
            own[name] = own[name][..., :1]


class Convolution:
    row_dims = {"x": (1,)}
    others = {"activation": "flip"}
    raising = "cu_seqlens"

    def __init__(self, seed, method, dice):
        torch.manual_seed(seed)
        B, C, W = dice.choice((1, 2)), 3, dice.choice((1, 2, 4))
        self.tensors = {"x": draw(B, 8, C, dtype=torch.float64), "weight": draw(C, W, dtype=torch.float64)}
        if dice.random() < 0.5:
            self.tensors["bias"] = draw(C, dtype=torch.float64)
        bounds = [0, dice.randrange(9), 8] if B == 1 and dice.random() < 0.5 else None
        self.options = {"activation": dice.choice((None, "silu")), "cu_seqlens": bounds}
        self.lengths = cut(8, dist.get_world_size(), 1, dice)

    def part(self, name, t, rank):
        return t[:, sum(self.lengths[:rank]):sum(self.lengths[:rank + 1])] if name == "x" else t

    def is_shared(self, name):
        return name != "x"

    def whole(self, tensors):
        bounds = self.options["cu_seqlens"]
        return [causal_conv1d(**tensors, activation=self.options["activation"],
                              cu_seqlens=None if bounds is None else torch.tensor(bounds))[0]]

    def of_rank(self, results, rank):
        return [self.part("x", results[0], rank)]

    def run(self, own, options):
        return [sdd.short_convolution(**{n: own.get(n) for n in ("x", "weight")} | own, **options)]

    def change_legally(self, dice, who, own):
        pass


FAMILIES = {"relay": Delta, "scan": Delta, "heads": Delta, "ring": Attention, "attention by heads": Attention,
            "convolution": Convolution}
LEGAL = ("gradients", "legal")
CHANGES = (*LEGAL, *LEGAL, "absent", "shape", "dimensions", "type", "device", "devices", "fake", "array", "option", "raises",
           "all raise", "no gradients", "another call")


def check(seeds, method):
    """Returns how often each change was drawn."""
    drawn = dict.fromkeys(CHANGES, 0)
    for seed in seeds:
        dice = random.Random(1000 * seed + 1)
        case = FAMILIES[method](seed, method.split()[-1], dice)
        change, who = CHANGES[seed % len(CHANGES)], dice.randrange(dist.get_world_size())
        drawn[change] += 1
        (kind, text), what = _alike(case, change, who, dice), f"seed {seed} {method} {change} on rank {who} {case.options}"
        kinds = ("right",) if change in LEGAL else ERRORS
        assert kind in kinds and (change in LEGAL or "rank " in text), f"{what}: {kind}: {text}"
    return drawn


def check_gradients(seeds, method, wanted):
    """Operands of each rank that require a gradient, where they are among those of the call."""
    seen = 0
    for seed in seeds:
        dice = random.Random(1000 * seed + 1)
        case = FAMILIES[method](seed, method.split()[-1], dice)
        if all(names <= case.tensors.keys() for names in wanted):
            kind, text = _alike(case, "gradients", 0, dice, wanted)
            assert kind == "right", f"seed {seed} {method} {wanted} {case.options}: {kind}: {text}"
            seen += 1
    return seen


def _alike(case, *drawn):
    """What every rank has of a call."""
    outcomes = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _outcome(case, *drawn))
    return outcomes[0] if all(outcome == outcomes[0] for outcome in outcomes) else ("different", str(outcomes))


def _outcome(case, change, who, dice, wanted=None):
    """What this rank has of a call: "right" or what is wrong; or the class and text of its error."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = {n: t for n in case.tensors if (t := case.part(n, case.tensors[n], rank)) is not None}
    if change == "legal":
        case.change_legally(dice, who, own)
    floats = [n for n, t in case.tensors.items() if t.is_floating_point()]
    alike = {n for n in floats if dice.random() < 0.7}
    wanted = wanted or [{n for n in floats if dice.random() < 0.3} if change in LEGAL else set(alike) for _ in range(ranks)]
    for names in wanted[1:]:
        names.discard("initial_state")  # of rank 0 alone
    if change == "no gradients":
        wanted[1 - who].add(floats[0])
    own = {n: t.clone().requires_grad_() if n in wanted[rank] and isinstance(t, torch.Tensor) and not t.is_meta else t
           for n, t in own.items()}
    options, around, run = dict(case.options), contextlib.nullcontext(), case.run
    expected = None
    if change not in LEGAL:
        run, around, expected = _change(case, change, who, dice, own, options)
    try:
        with around:
            results = run(own, options)
    except Exception as e:
        if expected is not None and type(e) is not expected:
            return "wrong", f"{type(e).__name__}: {e}, expected {expected.__name__}"
        return type(e).__name__, str(e)
    if change not in LEGAL:
        return "no error", ""
    try:
        _compare(case, own, wanted, results)
    except AssertionError as e:
        return "wrong", str(e)
    return "right", ""


def _change(case, change, who, dice, own, options):
    """Draws a change that ranks cannot share, and makes it on rank `who`. Returns the function to call, a context around it,
    and the class of the error if that is known."""
    here, around, expected, run = dist.get_rank() == who, contextlib.nullcontext(), None, case.run
    name = dice.choice(sorted(n for n in case.tensors if case.part(n, case.tensors[n], who) is not None
                              and not (change in ("absent", "type") and n == "initial_state")))
    t = own.get(name)
    if change == "absent" and here:
        del own[name]
    elif change == "shape":
        dims = [i for i in range(case.tensors[name].dim()) if i not in case.row_dims.get(name, ())]
        dim = dice.choice(dims)
        if here:
            own[name] = torch.cat([t, t], dim)
    elif change == "dimensions" and here:
        own[name] = t[None]
    elif change == "type" and here:
        own[name] = t.to(torch.float32)
    elif change == "device" and here:
        own[name] = t.to("meta")
    elif change == "devices" and here:
        own |= {n: x.to("meta") for n, x in own.items()}
    elif change == "fake" and here:
        mode = FakeTensorMode()
        own[name] = mode.from_tensor(t)
    elif change == "array":
        expected = TypeError
        if here:
            own[name] = t.detach().numpy()
    elif change == "option":
        option, value = dice.choice(list(case.others.items()))
        if value == "flip":
            now = options.get(option, False)
            value = {"silu": None, None: "silu", "zigzag": "contiguous", "contiguous": "zigzag", "none": "top_left",
                     "top_left": "bottom_right", "bottom_right": "none", False: True, True: False}[now]
        if here:
            options[option] = value
    elif change in ("raises", "all raise"):
        kinds = [dice.choice(list(RAISED)) for _ in range(dist.get_world_size())]
        if case.raising != "cu_seqlens":  # what says that it is no number is a ValueError
            kinds = [ValueError if kind is TypeError else kind for kind in kinds]
        expected = RAISED[kinds[who if change == "raises" else 0]]
        if here or change == "all raise":
            options[case.raising] = Raises(kinds[dist.get_rank()])
    elif change == "no gradients":
        expected, mode = ValueError, dice.choice((torch.no_grad, torch.inference_mode, None))
        if here and mode is not None:
            around = mode()
        elif here:  # gradients are recorded, but cannot pass here
            with torch.inference_mode():
                own[name] = t.clone()
    elif change == "another call":
        expected = ValueError
        if here:
            run = lambda own, options: [sdd.unshard(next(iter(own.values())))]
    return run, around, expected


def _compare(case, own, wanted, results):
    """Results and gradients against those of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in case.tensors.items()}
    truth = case.whole(whole)
    torch.manual_seed(3)
    incoming = [torch.where(t.detach().isfinite(), torch.randn_like(t), 0) for t in truth]

    def same(x, y, what):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")

    for x, y in zip(results, case.of_rank(truth, rank), strict=True):
        same(x, y, "result")
        assert x.requires_grad == any(wanted), f"a result requires a gradient: {x.requires_grad}, of operands {wanted}"
    if not any(wanted):
        return
    torch.autograd.backward(truth, incoming)
    torch.autograd.backward(results, case.of_rank(incoming, rank))
    for name, t in own.items():
        if not isinstance(t, torch.Tensor) or name not in wanted[rank]:
            assert not isinstance(t, torch.Tensor) or t.grad is None
        elif not case.is_shared(name):
            gradient = case.part(name, whole[name].grad, rank)
            same(t.grad, gradient if gradient.shape == t.shape else gradient.sum(3, keepdim=True), f"gradient of {name}")
    for name in sorted(n for n in case.tensors if case.is_shared(n) and all(n in names for names in wanted)):
        total = own[name].grad.clone()
        dist.all_reduce(total)
        same(total, whole[name].grad, f"sum of the gradient of {name}")
