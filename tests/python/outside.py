"""Mistakes that the catalogue has no point for (races, memory that nothing wrote, a condition on numbers): are they said where they
are, and never by a name that is not theirs?

    PYTHONPATH=src/python python tests/python/outside.py [--draws 2] [--seed 1] [--processes 16] [--only NAME …]

Kernels are those of audit_kernels.py in f32 or bf16; a mistake changes their results, or what they compute from. It is located when
each of its expressions is found in what the diagnosis says. Exit status 1 where less than 80 % are, or a name is wrong.
"""
import argparse
import multiprocessing
import os
import random
import re
import time
from collections import Counter

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import audit_kernels  # noqa: E402
import torch  # noqa: E402

import softdelta  # noqa: E402
from softdelta._audit import inputs, worker  # noqa: E402

MISTAKES = {}


def mistake(op, *expected, noise=False, names=None):
    """expected: expressions that the diagnosis must hold, numbers by {name} of what the mistake returns. noise: it is one. names: an
    expression of names that are true."""
    def add(function):
        MISTAKES[function.__name__.replace("_", " ")] = (op, expected, noise, names, function)
        return function
    return add


class Case:
    """A drawn call: run(**changes) gives results of the right kernel on changed operands; x are its own."""

    def __init__(self, op, rng, packed=False):
        self.rng, self.op = rng, op
        draw = inputs.Draw(rng.randrange(10**9), "outside")
        dtype = rng.choice([torch.bfloat16, torch.float32])
        if op == "attention":
            family = inputs.Attention("sdpa")
            self.call = family.call("outside", draw, dtype, 150 + rng.randrange(20), 200 + rng.randrange(40),
                                    causal="none")
            self.kernel = audit_kernels.kernels("attention")["from lse, tiles of 64, 1 splits"]
        else:
            lengths = [37 + rng.randrange(9), 64, 70, 90 + rng.randrange(9)] if packed else None
            shape = inputs.DeltaShape(op, 1 if packed else 2, sum(lengths) if packed else 150 + rng.randrange(30), 2, 16, 24, lengths)
            self.call = inputs.delta_call("outside", draw, shape, dtype, l2norm=True, g=draw.uniform(-0.2, 0, *shape.gates))
            self.kernel = audit_kernels.kernels(op)["chunks of 64, narrow products, gates summed in float32"]
        self.x = self.call.tensors
        self.T = self.x["q"].shape[1]

    def run(self, **changes):
        x = {n: t.clone() for n, t in {**self.x, **changes}.items()}
        adapter = worker.adapter_of(self.call.op, ["query"] if self.call.op == "attention" else ["q"])
        request = {"gradients": self.call.gradients, "op": self.call.op, "adapter": adapter, "options": self.call.options}
        return {n: t.detach().clone() for n, t in worker.compute(self.kernel, request, x)[0].items()}

    def garbage(self, like):
        return (3 * torch.randn(like.shape, generator=torch.Generator().manual_seed(self.rng.randrange(10**9)))).to(like.dtype)

    def some(self, shape, part):
        return torch.rand(shape, generator=torch.Generator().manual_seed(self.rng.randrange(10**9))) < part


RULES = ("gated_delta_rule", "kda", "comba", "gla", "simple_gla", "delta_rule", "gdn2")
ERASING = ("gated_delta_rule", "kda", "comba", "delta_rule", "gdn2")
GATED = ("gated_delta_rule", "kda", "comba", "gla", "simple_gla", "gdn2")


# Memory that nothing wrote, and races.

@mistake(RULES, r"\b{n} of \d+ rows")
def a_race_of_rows(c):
    r = c.run()
    hit = c.some(r["o"].shape[:3], 0.04)
    r["o"][hit] = c.garbage(r["o"][hit])
    return r, {"n": int(hit.sum())}


@mistake(RULES, r"from {a} on|{a} to {b}", r"heads {h}\b", r"(batch|sequences) \D*{n}\b")
def rows_never_written(c):
    r, a = c.run(), c.T - 20
    h, n = c.rng.randrange(r["o"].shape[2]), c.rng.randrange(2)
    r["o"][n, a:, h] = c.garbage(r["o"][n, a:, h])
    return r, {"a": a, "b": c.T - 1, "h": h, "n": n}


@mistake(RULES, r"dk.*\b{n} .*(NaN|infinite)")
def NaN_in_rows_of_dk(c):
    r = c.run()
    hit = c.some(r["dk"].shape[:3], 0.05)
    r["dk"][hit] = float("nan")
    return r, {"n": int(hit.sum())}


@mistake(RULES, r"channels 16\D+23")
def columns_never_written(c):
    r = c.run()
    r["o"][..., 16:] = c.garbage(r["o"][..., 16:])
    return r, {}


@mistake(RULES, r"dv", r"(\d+ of \d+ rows|no row stands out)")
def lost_updates_of_dv(c):
    r = c.run()
    hit = c.some(r["dv"].shape, 0.02)
    r["dv"] = torch.where(hit, r["dv"] / 2, r["dv"])
    return r, {}


@mistake(RULES, r"o: 1 of \d+ rows", r"\b{t}\b", r"heads {h}\b")
def one_bit_flipped(c):
    r = c.run()
    t, h = c.rng.randrange(5, c.T), c.rng.randrange(r["o"].shape[2])
    r["o"][1, t, h, 7] = 1e4
    return r, {"t": t, "h": h}


@mistake(RULES, r"final_state", r"(batch|sequence)s? \D*1\b", r"heads? \D*{h}\b")
def state_never_written(c):
    r = c.run()
    h = c.rng.randrange(r["final_state"].shape[1])
    r["final_state"][1, h] = c.garbage(r["final_state"][1, h])
    return r, {"h": h}


@mistake(RULES, r"final_state", r"rows 8 (to 15|on)|rows from 8 on")
def state_rows_of_an_older_chunk(c):
    r, half = c.run(), c.run(**{n: torch.cat([c.x[n][:, :64], 0 * c.x[n][:, 64:]], 1) for n in ("k", "v")})
    r["final_state"][:, :, 8:] = half["final_state"][:, :, 8:]
    return r, {}


@mistake(RULES, r"dinitial_state", r"heads? \D*{h}\b")
def dinitial_state_of_a_head_lost(c):
    r = c.run()
    h = c.rng.randrange(r["dinitial_state"].shape[1])
    r["dinitial_state"][:, h] = 0
    return r, {"h": h}


# Rows in wrong places.

@mistake(RULES, r"row 7 of every 8")
def every_eighth_row_is_zero(c):
    r = c.run()
    r["o"][:, 7::8] = 0
    return r, {}


@mistake(RULES, r"o: \d+ of \d+ rows")
def pairs_of_rows_swapped(c):
    r = c.run()
    n = c.T // 2 * 2
    r["o"][:, :n] = r["o"][:, :n].reshape(2, n // 2, 2, *r["o"].shape[2:]).flip(2).reshape(2, n, *r["o"].shape[2:])
    return r, {}


@mistake(RULES, r"dq", r"rows 32 to 47")
def a_warp_of_dq_lost(c):
    r = c.run()
    for a in range(32, c.T, 64):
        r["dq"][:, a:a + 16] = 0
    return r, {}


@mistake(RULES, r"dv", r"rows 64 to 127")
def a_chunk_of_dv_added_to_the_next(c):
    r = c.run()
    r["dv"][:, 64:128] += r["dv"][:, :64]
    return r, {}


@mistake(GATED, r"dg", r"(last row of each chunk|row 63 of every 64)")
def dg_of_last_rows_lost(c):
    r = c.run()
    r["dg"][:, 63::64] = 0
    return r, {}


@mistake(ERASING, r"dbeta: \d+ of \d+ rows")
def heads_of_dbeta_in_reverse(c):
    r = c.run()
    r["dbeta"] = r["dbeta"].flip(2)
    return r, {}


@mistake(RULES, r"o", r"from 128 on|only tails")
def rows_of_the_third_chunk_shifted(c):
    r = c.run()
    r["o"][:, 128:] = r["o"][:, 128:].roll(5, 1)
    return r, {}


@mistake(RULES, r"dk", r"heads 1\b")
def a_head_of_dk_by_8_bits(c):
    r = c.run()
    unit = r["dk"][:, :, 1].float().abs().max() / 60
    r["dk"][:, :, 1] = ((r["dk"][:, :, 1].float() / unit).round() * unit).to(r["dk"].dtype)
    return r, {}


@mistake(RULES, r"channel")
def columns_in_pairs(c):
    r = c.run()
    r["o"][..., 0::2] = r["o"][..., 1::2]
    return r, {}


@mistake(RULES, r"dq", r"batch \D*1\b")
def dq_of_a_batch_row_negated_in_part(c):
    r = c.run()
    r["dq"][1, :, :, ::3] *= -1
    return r, {}


# Another condition: what a kernel computes from.

@mistake(ERASING, r"heads? \D*1\b")
def beta_of_another_batch_row_in_a_head(c):
    beta = c.x["beta"].clone()
    beta[0, :, 1] = beta[1, :, 1]
    return c.run(beta=beta), {}


@mistake(GATED, r"o: \d+ of \d+ rows|final_state")
def steep_gates_clamped(c):
    return c.run(g=c.x["g"].clamp(min=-0.1)), {}


@mistake(ERASING, r"rows")
def large_betas_are_one(c):
    return c.run(beta=torch.where(c.x["beta"] > 0.8, torch.ones_like(c.x["beta"]), c.x["beta"])), {}


@mistake(RULES, r"rows")
def keys_with_a_large_epsilon(c):
    k = c.x["k"].float()
    return c.run(k=(k * (k.square().sum(-1, keepdim=True) / (k.square().sum(-1, keepdim=True) + 3)).sqrt()).to(
        c.x["k"].dtype)), {}


@mistake(RULES, r"o: \d+ of \d+ rows|final_state")
def values_beyond_2_clipped(c):
    return c.run(v=c.x["v"].clamp(-1.5, 1.5)), {}


@mistake(RULES, r"noise|precision|rounding|bf16|at v\b", noise=True)
def values_by_6_bits(c):
    v = c.x["v"].float()
    return c.run(v=((v * 8).round() / 8).to(c.x["v"].dtype)), {}


@mistake(RULES, r"batch \D*1\b", r"\b{t}\b")
def a_token_skipped(c):
    k, t = c.x["k"].clone(), c.rng.randrange(20, 120)
    k[1, t] = 0
    return c.run(k=k), {"t": t}


@mistake(("packed gated_delta_rule", "packed kda"), r"sequences? \D*2\b")
def a_packed_sequence_begins_with_the_state_before(c):
    r = c.run()
    state = c.x["initial_state"].clone()
    state[2] = r["final_state"][1]
    return c.run(initial_state=state), {}


@mistake(("packed gated_delta_rule", "packed gla"), r"final_state", r"(sequences?|batch) \D*3\b")
def the_last_packed_state_never_written(c):
    r = c.run()
    r["final_state"][3] = c.garbage(r["final_state"][3])
    return r, {}


@mistake(("packed kda", "packed comba"), r"dv", r"sequences? \D*1\b")
def dv_of_a_packed_sequence_from_the_one_after(c):
    r, b = c.run(), c.x["cu_seqlens"].tolist()
    r["dv"][:, b[1]:b[2]] = r["dv"][:, b[2]:b[2] + b[2] - b[1]]
    return r, {}


# Attention.

@mistake(("attention",), r"o", r"from 128 on|only tails", r"batch \D*1\b")
def last_tile_of_queries_never_written(c):
    r = c.run()
    r["o"][1, 128:] = c.garbage(r["o"][1, 128:])
    return r, {}


@mistake(("attention",), r"heads? \D*2\b")
def a_tile_of_keys_twice_in_a_head(c):
    twice = c.run(**{n: torch.cat([c.x[n], c.x[n][:, 64:128]], 1) for n in ("k", "v")})
    r = c.run()
    r["o"][:, :, 2] = twice["o"][:, :, 2]
    return r, {}


@mistake(("attention",), r"dk", r"heads? \D*1\b")
def a_query_head_lacks_in_dk(c):
    do = c.x["do"].clone()
    do[:, :, 3] = 0
    r, less = c.run(), c.run(do=do)
    r["dk"] = less["dk"]
    return r, {}


@mistake(("attention",), r"dq", r"from (9\d|1[0-4]\d) on")
def a_split_of_keys_lost_in_late_rows(c):
    less = c.run(**{n: c.x[n][:, :150] for n in ("k", "v")})
    r = c.run()
    r["dq"][:, 100:] = less["dq"][:, 100:]
    return r, {}


@mistake(("attention",), r"(last row of each tile|row 63 of every 64)")
def every_64th_row_sees_fewer_keys(c):
    less = c.run(**{n: c.x[n][:, :-7] for n in ("k", "v")})
    r = c.run()
    r["o"][:, 63::64] = less["o"][:, 63::64]
    return r, {}


@mistake(("attention",), r"o", r"heads 0\D+1\b", r"(odd|row 1 of every 2)")
def two_heads_swapped_in_odd_rows(c):
    r = c.run()
    r["o"][:, 1::2, :2] = r["o"][:, 1::2, :2].flip(2)
    return r, {}


@mistake(("attention",), r"dv", r"other channels")
def columns_of_dv_swapped(c):
    r = c.run()
    r["dv"][..., :8], r["dv"][..., 8:16] = r["dv"][..., 8:16].clone(), r["dv"][..., :8].clone()
    return r, {}


@mistake(("attention",), r"rows")
def large_scores_are_clipped(c):
    q = c.x["q"].float()
    return c.run(q=(q * (3 / q.norm(dim=-1, keepdim=True)).clamp(max=1)).to(c.x["q"].dtype)), {}


@mistake(("attention",), r"\bdk\b", r"\b{n} of \d+ rows")
def a_race_of_dk(c):
    r = c.run()
    hit = c.some(r["dk"].shape[:3], 0.06)
    r["dk"][hit] *= 0.5
    return r, {"n": int(hit.sum())}


@mistake(("attention",), r"batch \D*1\b")
def keys_of_the_neighbour_batch_row(c):
    k = c.x["k"].clone()
    k[1, 20:40] = k[0, 20:40]
    return c.run(k=k), {}


# Other formulas, by automatic differentiation: their results and gradients belong together.

def attention_by(bug, q, k, v, options, bias, sink):
    B, Lq, H, D = q.shape
    Lk, Hk = k.shape[1:3]
    head = torch.arange(H) // (H // Hk)
    if bug == "rows and keys are normalised":
        q, k = (x / x.norm(dim=-1, keepdim=True) * 4 for x in (q, k))
    if bug == "rows are turned by their position":
        at = (torch.arange(Lq) * 0.05)[:, None, None]
        q = torch.cat([q[..., ::2] * at.cos() - q[..., 1::2] * at.sin(), q[..., ::2] * at.sin() + q[..., 1::2] * at.cos()], -1)
    s = torch.einsum("bihd,bjhd->bhij", q, k[:, :, head])
    scale, cap = options["scale"], options["softcap"]
    if bug == "half of the channels":
        s = torch.einsum("bihd,bjhd->bhij", q[..., :D // 2], k[:, :, head][..., :D // 2])
    s = s * (1 / D if bug == "scale is 1/D" else scale)
    if bug == "cap before the scale":
        s = cap * torch.tanh(s / scale / cap) * scale
    else:
        capped = cap * torch.tanh(s / cap)
        s = s + (capped - s).detach() if bug == "the cap has no derivative" else capped
    if bug == "scores grow with the length":
        s = s * torch.log(torch.arange(Lq) + Lk - Lq + 1.0)[:, None] / 4
    if bug == "bias of the next key":
        bias = bias.roll(-1, 3)
    if bug == "bias of the neighbour head":
        bias = bias.roll(1, 1)
    if bug == "bias of each other row":
        bias = bias[:, :, (torch.arange(Lq) // 2) * 2]
    s = s + (bias * 0.5 if bug == "half of the bias" else bias)
    far = torch.arange(Lk) - torch.arange(Lq)[:, None] - (Lk - Lq)
    left = options["window_left"] * (2 if bug == "a window twice as wide" else 1)
    seen = (far <= 0) & (far >= -left)
    if bug == "window by tiles":
        seen = (far <= 0) & (torch.arange(Lk)[None] >= (torch.arange(Lq)[:, None] + Lk - Lq - left) // 16 * 16)
    if bug == "distance is not causal in the first tile":
        seen = seen | ((torch.arange(Lk) < 16)[None] & (torch.arange(Lq) < 64)[:, None])
    if bug == "no row sees its own key":
        seen = seen & (far < 0)
    if bug == "every seventh key is hidden":
        seen = seen & (torch.arange(Lk) % 7 != 3)
    s = s.masked_fill(~seen, -torch.inf)
    if bug == "sink scaled":
        sink = sink * scale
    if bug == "sink capped":
        sink = cap * torch.tanh(sink / cap)
    if bug == "sink of the key head":
        sink = sink[head]
    if bug == "sink of the neighbour head":
        sink = sink.roll(1)
    top = torch.cat([s, sink[None, :, None, None].expand(B, H, Lq, 1)], 3)
    p = top.softmax(3)[..., :-1]
    if bug == "the sum has no gradient":
        p = (top - top.logsumexp(3, keepdim=True).detach()).exp()[..., :-1]
    if bug == "sink counted twice":
        p = p / (1 + top.softmax(3)[..., -1:])
    if bug == "p dropped at random":
        p = p * (torch.rand(p.shape, generator=torch.Generator().manual_seed(1)) > 0.1)
    if bug == "dropout's factor":
        p = p / 0.9
    if bug == "small p dropped":
        p = p.masked_fill(p < 0.02, 0)
    o = torch.einsum("bhij,bjhd->bihd", p, v[:, :, head])
    lse = top.logsumexp(3)
    return o, lse / scale if bug == "lse of unscaled scores" else lse


def delta_by(op, bug, q, k, v, scale, S, g=None, beta=None, p=None, steps=1):
    """Rows of tokens and steps, state by state; g of channels or heads."""
    rows = []
    p = k if p is None else p
    for t in range(q.shape[1]):
        gt = g[:, max(t - 1, 0) if bug == "gate of the token before" else t]
        gt = gt[..., None] if gt.dim() == 2 else gt
        decay = gt.exp()[..., None, :] if bug == "gates along the columns of values" else gt.exp()[..., None]
        if bug == "gate of the mean":
            decay = gt.mean(-1, keepdim=True).exp()[..., None]
        if bug == "gates of halves swapped":
            decay = gt.roll(gt.shape[-1] // 2, -1).exp()[..., None]
        own = S
        for n in range(steps):
            i = t * steps + (steps - 1 - n if bug == "steps in reverse" else n)
            if n == 0 or bug == "a gate a step":
                S = S * decay
            if op in ("comba", "dplr") and n == 0 and bug != "erases after the decay":
                read = torch.einsum("bhkv,bhk->bhv", own, p[:, i])
            else:
                read = torch.einsum("bhkv,bhk->bhv", S, p[:, i])
            u = v[:, i] if op in ("gla", "simple_gla") else beta[:, i, :, None] * (v[:, i] - read)
            if bug == "beta on the write only":
                u = beta[:, i, :, None] * v[:, i] - read
            if bug == "beta on the erasing only":
                u = v[:, i] - beta[:, i, :, None] * read
            if bug == "erases twice":
                u = u - 0.5 * beta[:, i, :, None] * read
            key = k[:, i].roll(1, -1) if bug == "keys turned by a channel" else k[:, i]
            if bug == "writes by a step of sizes":
                u = u * (1 + 0.3 * torch.tanh(u.detach()))
            S = S + key[..., None] * u[..., None, :]
            if bug == "the write decays too" and n == 0:
                S = S + (decay - 1) * key[..., None] * u[..., None, :]
            if bug == "the state is clipped":
                S = S.clamp(-0.8, 0.8)
            if bug == "reads after the first step" and n == 0:
                first = S
        o = torch.einsum("bhkv,bhk->bhv", first if bug == "reads after the first step" else S, q[:, t]) * scale
        if bug == "v beside the state":
            o = o + 0.1 * v[:, t * steps]
        rows.append(o)
    return torch.stack(rows, 1), S


class Formula:
    """A call in f32 or bf16 whose results are those of a formula with a bug."""

    def __init__(self, op, rng, packed):
        self.op, self.rng = op, rng
        draw = inputs.Draw(rng.randrange(10**9), "formula")
        dtype = rng.choice([torch.bfloat16, torch.float32])
        if op == "attention":
            Lq, Lk = 100 + rng.randrange(20), 130 + rng.randrange(30)
            self.call = inputs.Attention("sdpa").call("formula", draw, dtype, Lq, Lk, D=32, bias=draw.normal(1, 4, Lq, Lk), size=1.3,
                                                      sink=draw.normal(4) + 1, causal="bottom_right", softcap=4.0, window_left=40,
                                                      window_right=0, scale=0.2)
            self.call.lse = True
        else:
            steps = 2 if op in ("gated_delta_product", "dplr") else 1
            shape = inputs.DeltaShape(op, 2, 140 + rng.randrange(20), 2, 24, 24, group=1)
            self.call = inputs.delta_call("formula", draw, shape, dtype, g=draw.uniform(-0.3, 0, *shape.gates), scale=0.3)
            assert self.call.options.get("steps", 1) == steps

    def of(self, bug):
        x = {n: t.float().requires_grad_(n in self.call.gradients) for n, t in self.call.tensors.items()}
        if self.op == "attention":
            o, lse = attention_by(bug, x["q"], x["k"], x["v"], self.call.options, x["bias"], x["sink"])
            found, ends, given = {"o": o, "lse": lse}, [o], [x["do"]]
        else:
            o, S = delta_by(self.op, bug, x["q"], x["k"], x["v"], 0.3, x["initial_state"], x.get("g"), x.get("beta"), x.get("p"),
                            self.call.options.get("steps", 1))
            found, ends, given = {"o": o, "final_state": S}, [o, S], [x["do"], x["dfinal_state"]]
        names = self.call.gradients
        grads = torch.autograd.grad(ends, [x[n] for n in names], given, allow_unused=True)
        found |= {"d" + n: t for n, t in zip(names, grads) if t is not None}
        return {n: t.detach().to(self.call.dtype_of(n)) for n, t in found.items()}, {}


def formula(ops, bug, *expected, names=None, noise=False):
    ops = [f"formula {op}" for op in ops.split()]
    MISTAKES[bug] = (ops, expected, noise, names, lambda c: c.of(bug))


ROWS = r"rows are wrong|no row stands out"
for bug, names in (("half of the channels", None), ("scale is 1/D", "scale"), ("cap before the scale", "cap"),
                   ("bias of the next key", "bias"), ("bias of the neighbour head", "bias"), ("bias of each other row", None),
                   ("half of the bias", "bias"), ("a window twice as wide", "the window counts twice"), ("window by tiles", None), ("distance is not causal in the first tile", None),
                   ("sink scaled", "sink"), ("sink capped", "sink"), ("sink of the key head", "sink"), ("sink of the neighbour head", "sink"),
                   ("p dropped at random", None), ("dropout's factor", None), ("small p dropped", None),
                   ("lse of unscaled scores", "lse"), ("rows and keys are normalised", None), ("rows are turned by their position", None),
                   ("the cap has no derivative", "softcap"), ("scores grow with the length", None), ("no row sees its own key", "causal|diagonal|own|window_right"),
                   ("every seventh key is hidden", None), ("the sum has no gradient", r"\bD\b"), ("sink counted twice", "sink")):
    formula("attention", bug, ROWS, names=names)
for ops, bug, names in (("gla kda", "gate of the token before", "g .*row before|gate of the row before|G|E "), ("gla kda gdn2 dplr", "gates along the columns of values", None),
                        ("gla kda gdn2 dplr", "gate of the mean", None), ("gla kda gdn2 dplr", "gates of halves swapped", None),
                        ("dplr comba", "erases after the decay", "E |own gate|decay|previous"),
                        ("gla simple_gla kda gdn2", "the write decays too", "gate|decay|G|E "),
                        ("gla simple_gla gdn2 dplr gated_delta_product", "writes by a step of sizes", None),
                        ("gla simple_gla gdn2 dplr gated_delta_product", "the state is clipped", None),
                        ("gated_delta_product", "steps in reverse", None), ("gated_delta_product", "a gate a step", None),
                        ("gated_delta_product", "reads after the first step", None),
                        ("gated_delta_rule kda gdn2 comba", "beta on the write only", "beta"), ("gated_delta_rule kda gdn2 comba", "beta on the erasing only", "beta"),
                        ("gated_delta_rule kda comba gdn2", "erases twice", None), ("gated_delta_rule gla gdn2 simple_gla gated_delta_product dplr", "keys turned by a channel", None),
                        ("gated_delta_rule gla gdn2 comba simple_gla gated_delta_product dplr", "v beside the state", None)):
    formula(ops, bug, ROWS, names=names)


def try_one(task):
    name, seed = task
    torch.set_num_threads(1)
    ops, expected, noise, names, change = MISTAKES[name]
    rng = random.Random(f"{name} {seed}")
    op = rng.choice(ops)
    case = (Formula if op.startswith("formula") else Case)(op.split()[-1], rng, op.startswith("packed"))
    start = time.monotonic()
    results, numbers = change(case)
    results = {n: x for n, x in results.items() if n in case.call.results}
    found = softdelta.diagnose(case.call.case(), results, threads=1)
    said = [*found.conclusion, *found.where]
    if found.right:
        return task, op, "hidden", said, len(str(found).splitlines()), time.monotonic() - start
    text = " ".join(said)
    located = all(re.search(e.format(**numbers) if "{" in e else e, text) for e in expected)
    named = names is not None and re.search(names, " ".join(found.conclusion))
    verdict = ("named" if named else "wrong name") if found.explained_by else "empty" if found.noise and not noise else \
        "located" if located or noise and found.noise else "not located"
    return task, op, verdict, said, len(str(found).splitlines()), time.monotonic() - start


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--draws", type=int, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--processes", type=int, default=1)
    p.add_argument("--only", nargs="*")
    a = p.parse_args()
    tasks = [(name, seed) for seed in range(a.seed, a.seed + a.draws) for name in MISTAKES if not a.only or name in a.only]
    counts, lengths = {False: Counter(), True: Counter()}, []
    with multiprocessing.get_context("spawn").Pool(a.processes) as pool:
        for (name, seed), op, verdict, said, lines, seconds in pool.imap_unordered(try_one, tasks):
            counts[op.startswith("formula")][verdict] += 1
            lengths.append(lines)
            print(f"{verdict}: {name}, {op}, draw {seed}, {seconds:.0f} s, {lines} lines" +
                  "".join(f"\n    {s}" for s in said), flush=True)
    failed = False
    for formulas, c in counts.items():
        shown = c.total() - c["hidden"]
        failed |= c["wrong name"] > 0 or 10 * (c["located"] + c["named"]) < 8 * shown
        print(f"{'other formulas' if formulas else 'memory, races, conditions'}: {shown} wrong dumps, " +
              ", ".join(f"{n} {v}" for v, n in sorted(c.items())))
    print(f"lines of a report: median {sorted(lengths)[len(lengths) // 2]}, most {max(lengths)}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
