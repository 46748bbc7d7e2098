"""What a function is tried for besides right numbers. Each check is a generator of sentences: its faults."""
from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from .._attention import attention_backward, attention_forward
from .._cases import judge
from .._delta_rule import delta_backward, delta_forward
from .inputs import Attention, Call, DeltaShape, Draw, delta_call
from .signatures import Signature, parts_of

REPEATS = 5
ROWS = ("q", "k", "v", "g", "beta", "p", "b", "w")  # operands with a row for each token
STEPS = ("k", "v", "beta", "p")  # of those, the ones with a row for each step
CHANCE = 8  # standard deviations: beyond, errors that favour a direction do so for a reason
HARMLESS = 1 / 8  # of an ulp: a bias that nobody would see


def clean(call: Call, **changes) -> Call:
    """The call with other tensors, forward only."""
    tensors = {n: t for n, t in call.tensors.items() if n not in ("do", "dfinal_state", "dlse")}
    return replace(call, tensors={**tensors, **changes}, layout={}, forward_only=True)


def with_nan(call: Call, name: str, at) -> dict:
    """Of tensor `name` a copy that is NaN there."""
    copy = call.tensors[name].clone()
    copy[at] = float("nan")
    return {name: copy}


def spread(results: dict, name: str, may) -> str | None:
    """Where a result is not finite though it should be: `may` marks what a NaN may reach."""
    if name not in results:
        return None
    stray = (~torch.isfinite(results[name])) & ~may
    return f"{name}{stray.nonzero()[0].tolist()}" if stray.any() else None


def swallowed(results: dict, name: str, must) -> str | None:
    """Where a result is finite though it depends on a NaN."""
    lost = torch.isfinite(results[name]) & must
    return f"{name}{lost.nonzero()[0].tolist()}" if lost.any() else None


def begin_of_chunk(results: dict, may) -> int:
    """The first row that a NaN reached, of earlier rows in the same heads; else 0. A chunk's masked products 0 · NaN are NaN,
    so that a NaN reaches its own chunk. A NaN in the first row of that chunk reaches no other."""
    stray = ~torch.isfinite(results["o"]) & ~may
    if not stray.any() or (stray & ~may[:, -1:]).any():
        return 0
    return int(stray.nonzero()[:, 1].min())


def marks(shape, *at):
    m = torch.zeros(shape, dtype=torch.bool)
    m[at] = True
    return m


def delta_shape(op):
    return DeltaShape(op, 2, 170, 2, 16, 24)


def change_before(a, b, start):
    """Sentences, if o of two calls differs in rows before the first that they do not share."""
    eps = torch.finfo(a.dtype).eps
    a, b = a[:, :start].double(), b[:, :start].double()
    change = (a - b).square().mean().sqrt() / a.square().mean().sqrt()
    if not change <= eps:
        row = ((a - b).abs().amax((0, 2, 3)) > 0).nonzero()
        yield (f"other rows from {start} on change o before it by {change:.1e} of its RMS, first in row "
               f"{int(row[0]) if len(row) else 0}")


def truth(call: Call) -> dict:
    """The results of the rule in f64, by the reference."""
    tensors, options = call.signature.case(call.tensors, call.options)
    x = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()} | {"engine": "reference"}
    given = {n: x.pop(n) for n in ("do", "dfinal_state") if n in x}
    options = {n: o for n, o in options.items() if n != "output_final_state"}
    if call.op == "attention":
        found = dict(zip(("o", "lse"), attention_forward(**x, **options)))
        return {**found, **attention_backward(**x, **given, **options)} if given else found
    found = dict(zip(("o", "final_state"), delta_forward(call.op, **x, **options)))
    return {**found, **delta_backward(call.op, **given, **x, **options)} if given else found


def of_rule(call: Call, results: dict) -> dict:
    """What the function's results say of the rule's."""
    return call.signature.to_case(call, {n: x for n, x in results.items() if n in call.results}, cache(lambda: truth(call)))


def judge_results(call: Call, results: dict) -> list:
    """Findings on the function's results."""
    exact, sign = cache(lambda: truth(call)), call.signature
    case = call.case()

    def ask(x):
        return {f.name: f for f in judge(x, case).results}
    own = sign.to_case(call, results, exact)
    found = ask(own) if own else {}
    for name in [n for n, f in found.items() if f.verdict == "wrong" and "NaN" not in f.note]:
        part, of = (sign.other_parts(call, exact()) if name in ("dk", "dg", "ddt_bias") else {}).get(name, (None, None))
        if part is None or own[name].shape != part.shape:
            continue
        error, size, beside = (parts_of(x) for x in (own[name].double() - exact()[name], exact()[name], part))
        size, beside = (torch.maximum(x, x.mean()) for x in (size, beside))
        limits = found[name].limit, ask({of: exact()[of].float()})[of].limit
        if of in found and found[of].verdict != "wrong":  # an f32 recurrence may err by more, and does in this part too
            limits = limits[0], max(limits[1], 3 * found[of].ratio)
        if bool((error <= limits[0]**2 * size + limits[1]**2 * beside).all()):
            found[name] = replace(found[name], verdict="right", note="")
    named = [replace(f, name=sign.names.get(n, n)) for n, f in found.items()]
    for name, of, x in sign.twins(call, results, exact):
        named.append(replace(ask({of: x})[of], name=name))
    return named


def direction(x, exact, along) -> tuple[float, float]:
    """Of what multiple of `along` an error is: its mean over blocks of 64 rows of a head, and how many standard
    deviations of that mean it is away from 0."""
    error, along = (x.double() - exact).flatten(3), along.flatten(3)  # [B, T, H, ·]
    parts = [(e * t).sum((1, 3)) / t.square().sum((1, 3)) for e, t in zip(error.split(64, 1), along.split(64, 1))]
    found = torch.stack(parts).flatten()
    found = found[torch.isfinite(found)]
    return float(found.mean()), float(found.mean().abs() * len(found)**0.5 / found.std()) if len(found) > 3 else 0


class Checks:
    """Of any operation."""

    def common(self):
        yield "memory that nobody wrote is not read", self.unwritten
        yield f"{REPEATS} calls give the same bits", self.repeats
        yield "new numbers at the same addresses count", self.new_numbers
        yield "options of a call count, not those of the one before", self.options
        if self.call.gradients:
            yield "each gradient is right when asked for alone", self.alone
            yield "two backward passes give the same bits", self.backward_twice
        if self.run.is_isolated:
            yield "inputs are only read", self.read_only
        if self.call.tensors["q"].dtype != torch.float32:
            yield "errors have no direction", self.no_direction

    def read_only(self):
        self.run(self.call, read_only=True)
        return ()

    def no_direction(self):
        """Rounding errs up and down alike, in every block."""
        exact = self.call.signature.to_user(self.call, truth(self.call))
        for name, x in self.run(self.call).items():
            if x.dim() != 4 or name not in exact or name in ("final_state", "dinitial_state") or x.dtype == torch.float32:
                continue
            for along, words in (exact[name], "times the truth"), (exact[name].abs(), "times its size"):
                mean, deviations = direction(x, exact[name], along)
                if deviations > CHANCE and abs(mean) > HARMLESS * torch.finfo(x.dtype).eps:
                    yield f"{name} errs by {mean:.1e} {words} in every block, which rounding to nearest would not"

    def unwritten(self):
        for name, x in self.run(self.call, fill=True).items():
            if not torch.isfinite(x).all():
                at = (~torch.isfinite(x)).nonzero()[0].tolist()
                yield f"{name} holds numbers that were never written, first at {at}"

    def repeats(self):
        yield from self.run.unstable(self.call)

    def alone(self):
        """Each gradient without the others: what nobody asks for may be left out, and nothing else."""
        found = {}
        for name in self.call.gradients:
            results = self.run(replace(self.call, only=name))
            if "d" + name in results:
                found["d" + name] = results["d" + name]
        if found:
            for f in judge_results(self.call, found):
                if f.verdict == "wrong":
                    yield f"{f.name} alone is wrong: {f.note}"

    def new_numbers(self):
        names = self.run.refilled(clean(self.call))
        if names:
            yield f"{', '.join(names)} of new numbers at the same addresses are others"

    def options(self):
        """Calls of the same shapes. b of chunk_gdn2 was drawn for one of both norms."""
        call, parameters = clean(self.call), self.run.process.parameters
        named = {"scale": {"scale", "softmax_scale", "sm_scale"}, "use_qk_l2norm_in_kernel": {"use_qk_l2norm_in_kernel"}}
        for name, value in ("scale", 0.6), ("use_qk_l2norm_in_kernel", True):
            known = name not in call.options if name == "scale" else name in call.options and "b" not in call.tensors
            if not known or parameters is not None and not named[name] & set(parameters):
                continue
            other = replace(call, options={**call.options, name: value})
            for f in judge_results(other, self.run(other)):
                if f.verdict == "wrong":
                    yield f"{f.name} is wrong with another {name} at the same shapes: {f.note}"

    def backward_twice(self):
        names = self.run.second_backward(self.call)
        if names:
            yield f"{', '.join(names)} of a second backward pass are others"


class DeltaChecks(Checks):
    """Of delta rules: forward and backward calls of B 2, T 170, two key heads."""

    def __init__(self, op, seed, dtype, run, has_states, packed, signature=Signature()):
        self.run, self.has_states, self.packed_call = run, has_states, packed
        self.shape = delta_shape(op)
        self.call = delta_call("checks", Draw(seed, "checks"), self.shape, dtype,
                               g=Draw(seed, "gates").uniform(-0.2, 0, *self.shape.gates))
        self.call = signature.dress(self.call, Draw(seed, "operands of checks"))
        if not has_states:
            for name in "initial_state", "dfinal_state":
                self.call.tensors.pop(name, None)
            self.call.options["output_final_state"] = False

    def all(self):
        yield "NaN shows, and stays in its row, head and batch row", self.nan
        yield "NaN in do shows, and stays in its batch row and head", self.nan_backward
        if self.packed_call is not None:
            yield "NaN stays in its packed sequence", self.nan_packed
        yield "the future changes nothing", self.future
        if self.has_states:
            yield "two calls give what one gives", self.split
        yield from self.common()

    def row(self, name, token):
        """Of an operand, at a token's last step."""
        steps = self.call.options.get("steps", 1)
        return token * steps + steps - 1 if name in STEPS else token

    def rows(self, name, x, tokens):
        steps = self.call.options.get("steps", 1) if name in STEPS else 1
        return x[:, slice(*(n if n is None else n * steps for n in (tokens.start, tokens.stop)))]

    def nan(self):
        s, group = self.shape, self.shape.HV // self.shape.H
        o, state = s.values, s.states
        heads = slice(group, 2 * group)
        last = s.HV - 1
        tries = [("q", (1, 130, 1), marks(o, 1, 130, heads), marks(state), marks(o, 1, 130, heads)),
                 ("v", (1, 128, last), marks(o, 1, slice(128, None), last), marks(state, 1, last), marks(o, 1, 128, last)),
                 ("k", (0, 128, 1), marks(o, 0, slice(128, None), heads), marks(state, 0, heads), marks(o, 0, 128, heads))]
        if self.has_states:
            tries.append(("initial_state", (0, 0), marks(o, 0, slice(None), 0), marks(state, 0, 0), marks(o, 0, 0, 0)))
        for name, at, in_o, in_state, must in tries:
            if name in STEPS:
                at = (at[0], self.row(name, at[1]), at[2])
            results = self.run(clean(self.call, **with_nan(self.call, name, at)))
            if lost := swallowed(results, "o", must):
                yield f"a NaN in {name}{list(at)} does not show in {lost}"
            if name in ("k", "v") and (start := begin_of_chunk(results, in_o)):
                at = (at[0], self.row(name, start), at[2])
                results = self.run(clean(self.call, **with_nan(self.call, name, at)))
                in_o = in_o | in_o[:, -1:]
                in_o[:, :start] = False
            for result, may in ("o", in_o), ("final_state", in_state):
                if stray := spread(results, result, may):
                    yield f"a NaN in {name}{list(at)} reaches {stray}"

    def nan_backward(self):
        s = self.shape
        at = (1, 128, s.HV - 1)
        call = replace(self.call, tensors={**self.call.tensors, **with_nan(self.call, "do", at)})
        results = self.run(call)
        in_dq = marks(s.keys, 1, 128, s.H - 1)
        if "dq" in results and (lost := swallowed(results, "dq", in_dq)):
            yield f"a NaN in do{list(at)} does not show in {lost}"
        for name, head in ("dk", s.H), ("dp", s.H), ("dv", s.HV), ("dbeta", s.HV), ("dg", s.HV), ("db", s.H), ("dw", s.HV):
            if name in results and (stray := spread(results, name, marks(results[name].shape, 1, slice(None), head - 1))):
                yield f"a NaN in do{list(at)} reaches {stray}"
        for name, may in ("dq", in_dq), ("dinitial_state", marks(s.states, 1, s.HV - 1)):
            if stray := spread(results, name, may):
                yield f"a NaN in do{list(at)} reaches {stray}"

    def nan_packed(self):
        call = self.packed_call
        begin, end = call.tensors["cu_seqlens"][1:3].tolist()
        results = self.run(clean(call, **with_nan(call, "v", (0, self.row("v", begin + 3)))))
        in_state = marks((len(call.tensors["cu_seqlens"]) - 1, *results["o"].shape[2:3], 1, 1), 1)
        for name, may in ("o", marks(results["o"].shape, 0, slice(begin, end))), ("final_state", in_state):
            if stray := spread(results, name, may):
                yield f"a NaN in v[0, {begin + 3}], of sequence 1 (tokens {begin}-{end - 1}), reaches {stray}"

    def future(self):
        first, start = self.run(clean(self.call)), 101
        other = {}
        for i, name in enumerate(n for n in ROWS if n in self.call.tensors):
            x = other[name] = self.call.tensors[name].clone()
            later = self.rows(name, x, slice(start, None))
            later.copy_(later.roll(2 * (9 + i), 1) * (50 if name == "v" else 1))
        yield from change_before(first["o"], self.run(clean(self.call, **other))["o"], start)

    def split(self):
        whole, at = clean(self.call), 70
        rows = [n for n in ROWS if n in whole.tensors]
        one = self.run(clean(whole, **{n: self.rows(n, whole.tensors[n], slice(at)) for n in rows}))
        if "final_state" not in one:
            return
        two = self.run(clean(whole, **{n: self.rows(n, whole.tensors[n], slice(at, None)) for n in rows},
                             initial_state=one["final_state"]))
        both = {"o": torch.cat([one["o"], two["o"]], 1), "final_state": two["final_state"]}
        for f in judge_results(whole, both):
            if f.verdict == "wrong":
                yield (f"tokens 0-{at - 1} and the rest in two calls: error of {f.name} {f.ratio:.1e}, limit "
                       f"{f.limit:.1e}")


class AttentionChecks(Checks):
    """Of attention, causal, with groups of two query heads."""

    def __init__(self, seed, dtype, run, adapter, named=()):
        self.run = run
        self.family = Attention(adapter, named)
        self.call = self.family.call("checks", Draw(seed, "checks"), dtype, 150, 150, causal=self.family.causal)

    def all(self):
        yield "NaN shows, and stays in its row, head and batch row", self.nan
        if self.call.gradients:
            yield "NaN in do shows, and stays in its batch row and head", self.nan_backward
        yield "the future changes nothing", self.future
        yield from self.common()

    def nan(self):
        shape = self.run(clean(self.call))["o"].shape
        for name, at, may, must in (
                ("q", (1, 130, 1), marks(shape, 1, 130, 1), marks(shape, 1, 130, 1)),
                ("k", (0, 128, 1), marks(shape, 0, slice(None), slice(2, 4)), marks(shape, 0, 128, slice(2, 4))),
                ("v", (1, 128, 0), marks(shape, 1, slice(None), slice(0, 2)), marks(shape, 1, 128, slice(0, 2)))):
            results = self.run(clean(self.call, **with_nan(self.call, name, at)))
            if stray := spread(results, "o", may):
                yield f"a NaN in {name}{list(at)} reaches {stray}"
            if lost := swallowed(results, "o", must):
                yield f"a NaN in {name}{list(at)} does not show in {lost}"

    def nan_backward(self):
        at = (1, 128, 0)
        results = self.run(replace(self.call, tensors={**self.call.tensors, **with_nan(self.call, "do", at)}))
        in_dq = marks(self.call.tensors["q"].shape, *at)
        for name, may in (("dq", in_dq), ("dk", marks(self.call.tensors["k"].shape, 1, slice(None), 0)),
                          ("dv", marks(self.call.tensors["v"].shape, 1, slice(None), 0))):
            if stray := spread(results, name, may):
                yield f"a NaN in do{list(at)} reaches {stray}"
        if "dq" in results and (lost := swallowed(results, "dq", in_dq)):
            yield f"a NaN in do{list(at)} does not show in {lost}"

    def future(self):
        start, other = 101, {}
        for i, name in enumerate(("q", "k", "v")):
            x = other[name] = self.call.tensors[name].clone()
            x[:, start:] = x[:, start:].roll(17 + i, 1) * (50 if name == "v" else 1)
        yield from change_before(self.run(clean(self.call))["o"], self.run(clean(self.call, **other))["o"], start)
