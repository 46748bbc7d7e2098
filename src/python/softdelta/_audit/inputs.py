"""Inputs by class. Each class shows mistakes that the others hide; tests/python/audit_table.py measures which."""
from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import torch

from .._options import FACTS
from .signatures import Signature
from .worker import LSE, SINKS

GROUPED = ("gated_delta_rule", "kda", "comba", "mamba2")  # rules whose kernels have groups of value heads
NAMED = {"mamba2": "simple_gla", "lightning": "simple_gla"}  # rules under the names of their models


def facts(op):
    return FACTS[NAMED.get(op, op)]


@dataclass
class Call:
    """Inputs of one call under the names of softdelta.dump."""
    name: str  # of its class
    op: str
    tensors: dict
    options: dict = field(default_factory=dict)
    layout: dict = field(default_factory=dict)
    forward_only: bool = False
    only: str | None = None  # the one input whose gradient is asked for
    signature: Signature = Signature()
    lse: bool = False  # it is a result, of which no gradient is asked

    @property
    def gradients(self):
        """Inputs that have one."""
        if self.forward_only:
            return []
        if self.only is not None:
            return [self.only]
        fixed = ("do", "dlse", "dfinal_state", "mask", *(("beta",) if self.op == "dplr" else ()),
                 *self.signature.fixed(self.tensors))
        return [n for n, t in self.tensors.items() if n not in fixed and t.is_floating_point()]

    @property
    def results(self):
        forward = ["o", "lse"] if self.lse else ["o"]
        if self.op != "attention" and self.options.get("output_final_state", True):
            forward.append("final_state")
        return forward + ["d" + n for n in self.gradients]

    def case(self) -> dict:
        """Arguments of softdelta.judge and dump."""
        tensors, options = self.signature.case(self.tensors, self.options)
        options = {n: x for n, x in options.items() if n != "output_final_state"}
        return {"op": self.op, **options, **tensors}

    def dtype_of(self, result):
        t = self.tensors
        if result in ("final_state", "lse"):
            return torch.float32
        return t["v" if result == "o" else result[1:]].dtype


class Draw:
    """Random numbers of one class."""

    def __init__(self, seed: int, name: str):
        self.generator = torch.Generator().manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % 2**62)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integer(self, low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def whole(self, most, *shape):
        """Whole numbers of at most this size, without 0."""
        x = self.integer(1, most, *shape).double()
        return x * (2 * self.integer(0, 1, *shape) - 1)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


class DeltaShape:
    def __init__(self, op, B, T, H, K, V, lengths=None, group=2):
        self.op, self.B, self.T, self.H, self.K, self.V = op, B, T, H, K, V
        self.HV = group * H if op in GROUPED else H
        self.N = len(lengths) if lengths else B
        self.lengths = lengths

    @property
    def keys(self):
        return self.B, self.T, self.H, self.K

    @property
    def values(self):
        return self.B, self.T, self.HV, self.V

    @property
    def scalars(self):
        return self.B, self.T, self.HV

    @property
    def gates(self):
        return (*self.scalars, self.K) if facts(self.op).gate == "channel" else self.scalars

    @property
    def states(self):
        return self.N, self.HV, self.K, self.V


def delta_call(name, draw, shape, dtype, *, k=None, q=None, v=None, g=None, beta=None, state=None, l2norm=False,
               gradients=True, scale=None, d=None, dstate=None):
    """A call; what is not given is ordinary. Numbers are drawn in the same order in every type."""
    s = shape
    drawn = {
        "q": draw.normal(*s.keys) if q is None else q,
        "k": draw.normal(*s.keys) if k is None else k,
        "v": draw.normal(*s.values) if v is None else v,
    }
    if not l2norm:
        drawn["q"] = drawn["q"] if q is not None else unit(drawn["q"])
        drawn["k"] = drawn["k"] if k is not None else unit(drawn["k"]) * draw.uniform(0.6, 1.1, *s.keys[:3], 1)
    operands = facts(s.op).operands
    if "p" in operands:
        drawn["p"] = unit(drawn["k"] + 0.3 * draw.normal(*s.keys))
    if "g" in operands:
        drawn["g"] = draw.uniform(-1, 0, *s.gates) if g is None else g
    if "beta" in operands:
        drawn["beta"] = draw.uniform(0.1, 1, *s.scalars) if beta is None else beta
    drawn["initial_state"] = draw.normal(*s.states) if state is None else state
    if gradients:
        drawn["do"] = draw.normal(*s.values) if d is None else d
        drawn["dfinal_state"] = draw.normal(*s.states) if dstate is None else dstate
    wide = ("g", "initial_state", "dfinal_state")
    options = {"use_qk_l2norm_in_kernel": l2norm}
    if s.op == "dplr":
        two_steps(draw, drawn)
        options = {"steps": 2}
    if s.op == "gated_delta_product":
        options["steps"] = 3 if name == "length 65" else 2
        for n in "k", "v", "beta":
            drawn[n] = interleaved(*(drawn[n].roll(3 * i, 1) for i in range(options["steps"])))
    tensors = {n: x.float() if n in wide else x.to(dtype) for n, x in drawn.items()}
    if scale is not None:
        options["scale"] = scale
    if s.lengths:
        tensors["cu_seqlens"] = torch.tensor([0, *s.lengths]).cumsum(0)
    return Call(name, NAMED.get(s.op, s.op), tensors, options, forward_only=not gradients)


def interleaved(*steps):
    return torch.stack(steps, 2).flatten(1, 2)


def two_steps(draw, x):
    """S ← diag(e^g) S + b (aᵀS) + k vᵀ as two steps of a token: p = a, k = b, v = 0, β = −1; then p = 0, β = 1
    (docs/math.md). b is −a times numbers below 1, as of RWKV-7."""
    if x["beta"].eq(1).all():  # nothing is to be rounded
        a, rate = x["k"].roll(3, 1), torch.ones_like(x["k"])
    else:
        a, rate = unit(x["p"]), draw.uniform(0.2, 0.9, *x["p"].shape)
        for name in "q", "k":
            x[name] = x[name] / x[name].norm(dim=-1, keepdim=True).clamp(min=1)
    x["k"], x["v"] = interleaved(-a * rate, x["k"]), interleaved(torch.zeros_like(x["v"]), x["v"])
    x["p"] = interleaved(a, torch.zeros_like(a))
    ones = torch.ones_like(x["beta"])
    x["beta"] = interleaved(-ones, ones)


def exact(op, draw, dtype):
    """Few keys, β 1, gates 0 or −ln 2, small whole numbers: nothing is rounded, and every error shows."""
    s = DeltaShape(op, 2, 130 + int(draw.integer(0, 15)), 1, 16, 24)
    eye = torch.eye(s.K, dtype=torch.float64)
    few = eye[draw.integer(0, 4, *s.keys[:3])]
    halves = draw.uniform(0, 1, *s.gates) < 0.2
    halves[:, 4::9] = False  # in no channel
    return delta_call("exact", draw, s, dtype, k=few, q=few.flip(1) + eye[draw.integer(0, 4, *s.keys[:3])],
                      v=draw.whole(2, *s.values), g=-math.log(2) * halves,
                      beta=torch.ones(s.scalars), state=draw.whole(2, *s.states), scale=0.5, d=draw.whole(2, *s.values),
                      dstate=draw.whole(2, *s.states))


def ordinary(op, draw, dtype):
    s = DeltaShape(op, 3, 140 + int(draw.integer(0, 15)), 2, 16, 24)
    return delta_call("ordinary", draw, s, dtype, l2norm=True)


def correlated(op, draw, dtype):
    """Keys that resemble each other, β near 1, hardly a gate: inverses of many terms, long erasing."""
    s = DeltaShape(op, 2, 150 + int(draw.integer(0, 15)), 1, 32, 24)
    k = draw.normal(s.B, 1, s.H, s.K) + 0.5 * draw.normal(*s.keys)
    beta = draw.uniform(0.8, 1, *s.scalars)
    return delta_call("correlated", draw, s, dtype, k=k, l2norm=True, beta=beta, g=draw.uniform(-0.02, 0, *s.gates),
                      scale=0.3)


def slow(op, draw, dtype):
    """Gates so slow that the first of five chunks is still heard in the last; keys that are not of length 1."""
    s = DeltaShape(op, 2, 5 * 64 + 5 + int(draw.integer(0, 15)), 1, 32, 16)
    return delta_call("slow", draw, s, dtype, g=draw.uniform(-6e-3, -1e-3, *s.gates),
                      beta=draw.uniform(0.05, 0.3, *s.scalars), state=3 * draw.normal(*s.states))


def mixed(op, draw, dtype):
    """Slow and steep channels (heads, where a gate is of a head) beside each other; gates and β of 0, and β up to 2. Of some
    rows, as of padding, no gradient comes."""
    s = DeltaShape(op, 2, 140 + int(draw.integer(0, 15)), 2, 16, 24)
    slow = torch.arange(s.gates[-1]) % 2 == 0
    g = torch.where(slow, draw.uniform(-4e-3, 1e-3, *s.gates).clamp(max=0), draw.uniform(-3, -2, *s.gates))
    beta = draw.uniform(-0.3, 2, *s.scalars).clamp(min=0)
    d = draw.normal(*s.values)
    d[:, 1::6] = 0
    return delta_call("mixed", draw, s, dtype, g=g, l2norm=True, beta=beta, d=d)


def steep(op, draw, dtype):
    """Gates of −5 and −50 among slow ones."""
    s = DeltaShape(op, 2, 140 + int(draw.integer(0, 15)), 1, 16, 24)
    g = torch.tensor([-0.01, -0.01, -0.01, -0.05, -5, -50])[draw.integer(0, 5, *s.gates)].double()
    return delta_call("steep", draw, s, dtype, g=g)


def rising(op, draw, dtype):
    """Gates above 0 among falling ones; groups of three value heads."""
    s = DeltaShape(op, 2, 140 + int(draw.integer(0, 15)), 1, 16, 24, group=3)
    return delta_call("rising", draw, s, dtype, g=draw.uniform(-0.1, 0.04, *s.gates))


def packed(op, draw, dtype):
    """Sequences that begin off every grid and end ragged, one of a single token."""
    lengths = [37 + int(draw.integer(0, 9)), 64, 1, 70, 90 + int(draw.integer(0, 9))]
    s = DeltaShape(op, 1, sum(lengths), 1, 16, 24, lengths)
    return delta_call("packed", draw, s, dtype, l2norm=True, g=draw.uniform(-0.2, 0, *s.gates))


def of_length(T, H=1, B=2):
    def lengths(op, draw, dtype):
        s = DeltaShape(op, B, T, H, 16, 24)
        call = delta_call(f"length {T}", draw, s, dtype, l2norm=T % 2 == 0, g=draw.uniform(-0.2, 0, *s.gates))
        if T == 63:  # the last state is returned, and nothing is asked of it
            del call.tensors["dfinal_state"]
        return call
    return lengths


def usual(size, T):
    """Sizes that models have, of which kernels have forms of their own: no groups, tiles and chunks that are full. A state goes in
    or comes out, not both."""
    def sizes(op, draw, dtype):
        s = DeltaShape(op, 1, T, 2, size, size, group=1)
        call = delta_call(f"size {size}", draw, s, dtype, l2norm=True, g=draw.uniform(-0.1, 0, *s.gates),
                          scale=1.0 if size == 128 else None)
        if size == 128:
            call.options["output_final_state"] = False
        del call.tensors["dfinal_state" if size == 128 else "initial_state"]
        return call
    return sizes


def short(op, draw, dtype):
    """Many packed sequences."""
    lengths = draw.integer(1, 7, 20).tolist()
    s = DeltaShape(op, 1, sum(lengths), 1, 16, 24, lengths)
    return delta_call("short sequences", draw, s, dtype, g=draw.uniform(-0.2, 0, *s.gates))


def documents(op, draw, dtype):
    """Packed, without states."""
    lengths = [30 + int(draw.integer(0, 9)), 1, 70, 3]
    s = DeltaShape(op, 1, sum(lengths), 1, 16, 24, lengths)
    call = delta_call("documents", draw, s, dtype, g=draw.uniform(-0.2, 0, *s.gates))
    for name in "initial_state", "dfinal_state":
        del call.tensors[name]
    call.options["output_final_state"] = False
    return call


def prompts(op, draw, dtype):
    """Packed, and forward only."""
    lengths = [70, 5, 40 + int(draw.integer(0, 9))]
    s = DeltaShape(op, 1, sum(lengths), 1, 16, 24, lengths)
    return delta_call("prompts", draw, s, dtype, l2norm=True, g=draw.uniform(-0.2, 0, *s.gates), gradients=False)


def single(op, draw, dtype):
    """One packed sequence."""
    s = DeltaShape(op, 1, 70, 2, 16, 24, [70])
    return delta_call("one sequence", draw, s, dtype, l2norm=True, g=draw.uniform(-0.2, 0, *s.gates))


def forward(op, draw, dtype):
    """Without gradients: kernels have another path then. No state comes in, as where a prompt is read."""
    s = DeltaShape(op, 2, 4 * 64 + 5 + int(draw.integer(0, 15)), 2, 16, 24)
    call = delta_call("forward", draw, s, dtype, l2norm=True, g=draw.uniform(-0.05, 0, *s.gates), gradients=False)
    del call.tensors["initial_state"]
    return call


def raw(op, draw, dtype):
    """Gates and β that the kernel makes of raw numbers; for functions that have these options."""
    s = DeltaShape(op, 2, 80 + int(draw.integer(0, 15)), 2, 16, 24)
    call = delta_call("raw", draw, s, dtype, l2norm=True, g=draw.normal(*s.gates), beta=draw.normal(*s.scalars))
    call.tensors["A_log"] = draw.uniform(0.5, 1.5, s.HV).log().float()
    call.tensors["dt_bias"] = (draw.normal(s.HV * s.K if facts(op).gate == "channel" else s.HV) - 3).float()
    call.options.update(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    return call


def wide(op, draw, dtype):
    """Heads beyond a tile of 128, and no power of two."""
    s = DeltaShape(op, 1, 66 + int(draw.integer(0, 15)), 1, 136, 152)
    return delta_call("wide", draw, s, dtype, g=draw.uniform(-0.2, 0, *s.gates))


def long(op, draw, dtype):
    """4097 tokens of slow gates: hundreds are heard. Of thousands a right recurrence in f32 would have lost digits."""
    s = DeltaShape(op, 1, 4097, 1, 16, 16)
    return delta_call("length 4097", draw, s, dtype, g=draw.uniform(-0.01, 0, *s.gates),
                      beta=draw.uniform(0.02, 0.2, *s.scalars))


def views(op, draw, dtype):
    """Operands with other strides: heads first, rows of a larger tensor, one row for the whole batch. Large numbers."""
    s = DeltaShape(op, 2, 80 + int(draw.integer(0, 15)), 2, 16, 24)
    call = delta_call("views", draw, s, dtype, scale=0.7, beta=draw.uniform(0.1, 1, 1, *s.scalars[1:]).expand(s.scalars),
                      v=32 * draw.normal(*s.values), d=16 * draw.normal(*s.values), state=32 * draw.normal(*s.states))
    call.layout.update(q="transposed", k="padded", v="padded", g="transposed", beta="expanded", do="transposed",
                       initial_state="transposed")
    return call


def stateless(op, draw, dtype):
    """No state comes in or goes out; do is one number, as of o.sum().backward(); rows of q, k and v of 0, rows of large numbers,
    and keys so small that the ε of their norm counts."""
    s = DeltaShape(op, 2, 80 + int(draw.integer(0, 15)), 2, 16, 24)
    q, k = draw.normal(*s.keys), draw.normal(*s.keys)
    q[:, ::7], k[:, ::5] = 0, 0
    k[:, 3::10] *= 3e-4
    v = draw.normal(*s.values)
    v[:, 4::11] = 0
    q[:, 2::13], k[:, 6::17] = 50 * q[:, 2::13], 50 * k[:, 6::17]
    call = delta_call("stateless", draw, s, dtype, q=q, k=k, v=v, l2norm=True, d=torch.ones(s.values))
    for name in "initial_state", "dfinal_state":
        del call.tensors[name]
    call.options["output_final_state"] = False
    call.layout["do"] = "constant"
    return call


DELTA = (ordinary, exact, slow, correlated, packed, mixed, steep, views, of_length(65), of_length(64), of_length(63, 5),
         of_length(1, 17, 12), rising, stateless, forward, usual(64, 256), usual(128, 128), short, documents, prompts, single, raw, wide, long)


class Attention:
    """Classes of attention, for a signature that has some of the features; named: its parameters."""

    def __init__(self, adapter, named=()):
        self.sinks, self.lse, self.packs = (adapter == "flash" and bool(set(n) & set(named or ()))
                                            for n in (SINKS, LSE, ["cu_seqlens_q"]))
        self.causal = "top_left" if adapter == "sdpa" else "bottom_right"
        self.masks = adapter in ("sdpa", "c")
        self.windows = adapter in ("flash", "c")
        self.softcap = adapter in ("flash", "flashinfer", "c")
        self.gradients = adapter != "flashinfer"

    def call(self, name, draw, dtype, Lq, Lk, B=2, H=4, Hk=2, D=16, size=1.0, gradients=True, **given):
        Dv = D + 8 if self.masks else D
        drawn = {"q": size * draw.normal(B, Lq, H, D), "k": size * draw.normal(B, Lk, Hk, D), "v": draw.normal(B, Lk, Hk, Dv),
                 "do": draw.normal(B, Lq, H, Dv)}
        drawn.update({n: x for n, x in given.items() if torch.is_tensor(x)})
        if not (gradients and self.gradients):
            del drawn["do"]
        tensors = {n: x if x.dtype == torch.bool else x.float() if n == "sink" else x.to(dtype) for n, x in drawn.items()}
        options = {n: x for n, x in given.items() if not torch.is_tensor(x)}
        return Call(name, "attention", tensors, options, forward_only="do" not in drawn, lse=self.lse)

    def classes(self):
        yield self.ordinary
        yield self.forward
        yield self.exact
        yield self.scores
        if self.masks:
            yield from (self.dead_rows, self.finite_mask, self.bias, self.padding, self.shared_row, self.one_bias)
        if self.windows:
            yield from (self.window, self.two_sided, self.one_sided)
        if self.softcap:
            yield self.capped
        if self.sinks:
            yield self.sink
        if self.packs:
            yield from (self.packed, self.packed_window)
        yield self.views
        for Lq, Lk, H, Hk, B in ((65, 65, 2, 1, 2), (64, 64, 2, 1, 2), (63, 130, 12, 12, 2), (1, 1, 34, 17, 12), (1, 1030, 12, 2, 2)):
            yield lambda draw, dtype, Lq=Lq, Lk=Lk, H=H, Hk=Hk, B=B: self.of_length(draw, dtype, Lq, Lk, H, Hk, B)
        yield self.wide
        yield self.long
        yield from (self.usual, self.usual_128, self.one_row)
        yield lambda draw, dtype: self.of_length(draw, dtype, 96, 33, 4, 2, 2)
        yield lambda draw, dtype: self.of_length(draw, dtype, 4097, 5, 2, 1, 1)
        yield lambda draw, dtype: self.of_length(draw, dtype, 1090, 1090, 1, 1, 1)
        if self.masks:
            yield self.mask_of_heads

    def ordinary(self, draw, dtype):
        """Some keys are 0, which hides none."""
        n = 70 + int(draw.integer(0, 15))
        k = draw.normal(3, n + 21, 2, 16)
        k[:, 2::9] = 0
        return self.call("ordinary", draw, dtype, n, n + 21, B=3, k=k, causal=self.causal)

    def forward(self, draw, dtype):
        """Without gradients: kernels have another path then."""
        return self.call("forward", draw, dtype, 130, 140, causal=self.causal, gradients=False)

    def exact(self, draw, dtype):
        """Scores of 0, small whole values: probabilities are powers of 2, and every lost or doubled key shows."""
        return self.call("exact", draw, dtype, 65, 128, q=torch.zeros(2, 65, 4, 16), k=draw.whole(2, 2, 128, 2, 16),
                         v=draw.whole(2, 2, 128, 2, 24 if self.masks else 16), scale=0.5, causal="none",
                         do=draw.whole(2, 2, 65, 4, 24 if self.masks else 16))

    def scores(self, draw, dtype):
        """Scores to 200: exponentials without a maximum overflow, and so do products in f16. Those of some rows are all below −100,
        where a maximum that begins at 0 leaves none."""
        Lq = 80 + int(draw.integer(0, 9))
        q, k = 4 * draw.normal(2, Lq, 4, 16), 4 * draw.normal(2, 96, 2, 16)
        k[..., 0] = k[..., 0].abs() + 8
        q[:, 3::8] *= 0.1
        q[:, 3::8, :, 0] = -14
        return self.call("scores to 200", draw, dtype, Lq, 96, q=q, k=k, causal="none", scale=1.0)

    def dead_rows(self, draw, dtype):
        """Rows, and a tile of 64 of them, that see no key; a mask for each batch row."""
        mask = draw.uniform(0, 1, 2, 1, 150, 192) < 0.5
        mask[:, :, 64:128] = False
        mask[1, :, 130:] = False
        mask[0, :, 40, 1:] = False
        mask[:, :, 7:21, 128:] = False
        mask[:, :, 7:21, :64] = False  # a tile of keys that a row does not see, and one that it sees
        mask[1, :, :64, :128] = False  # the same of a tile of rows
        return self.call("dead rows", draw, dtype, 150, 192, mask=mask, causal="none")

    def mask_of_heads(self, draw, dtype):
        return self.call("mask of heads", draw, dtype, 40, 70, mask=draw.uniform(0, 1, 1, 4, 40, 70) < 0.7, causal="none")

    def finite_mask(self, draw, dtype):
        """Keys hidden by a large finite number, and rows of which all are."""
        hidden = draw.uniform(0, 1, 2, 1, 70, 90) < 0.5
        hidden[1, :, 33] = True
        return self.call("finite mask", draw, dtype, 70, 90, bias=torch.where(hidden, -3e4, 0.0).double(), causal="none")

    def bias(self, draw, dtype):
        return self.call("bias", draw, dtype, 70, 90, bias=2 * draw.normal(1, 4, 70, 90), causal="none")

    def padding(self, draw, dtype):
        """Keys at the end hidden, by one row of memory for all rows."""
        mask = (torch.arange(70) < torch.tensor([70, 51])[:, None])[:, None, None].expand(2, 1, 60, 70)
        call = self.call("padding", draw, dtype, 60, 70, mask=mask, causal="none")
        call.layout["mask"] = "one row"
        return call

    def shared_row(self, draw, dtype):
        """A bias of one row for all, minus infinity in places."""
        bias = draw.normal(2, 1, 1, 70)
        bias[1, :, :, 40::5] = -torch.inf
        return self.call("shared row", draw, dtype, 50, 70, bias=bias, causal="none")

    def one_bias(self, draw, dtype):
        """For all heads and batch rows."""
        return self.call("one bias", draw, dtype, 50, 70, bias=draw.normal(1, 1, 50, 70), causal="none")

    def sink(self, draw, dtype):
        return self.call("sink", draw, dtype, 60, 70, sink=2 * draw.normal(4), causal=self.causal)

    def _packed(self, name, draw, dtype, queries, keys, **given):
        call = self.call(name, draw, dtype, sum(queries), sum(keys), B=1, **given)
        call.tensors.update({f"cu_seqlens_{n}": torch.tensor([0, *x]).cumsum(0) for n, x in (("q", queries), ("k", keys))})
        return call

    def packed(self, draw, dtype):
        """Many sequences that begin off every grid, one without queries, one without keys; more keys than queries and fewer."""
        first, few = int(draw.integer(0, 9)), draw.integer(1, 7, 2, 12).tolist()
        return self._packed("packed", draw, dtype, [37 + first, 64, 1, 0, 70, 3, 2, *few[0]],
                            [50 + first, 64, 33, 5, 90, 1, 0, *few[1]], causal="none")

    def packed_window(self, draw, dtype):
        first = int(draw.integer(0, 9))
        given = {"window_left": 12, "window_right": 0} if self.windows else {}
        return self._packed("packed, causal", draw, dtype, [37 + first, 70, 1, 20], [50 + first, 70, 40, 33], causal=self.causal,
                            **given)

    def two_sided(self, draw, dtype):
        cap = {"softcap": 5.0} if self.softcap else {}
        return self.call("window to both sides", draw, dtype, 90, 100, size=2.0, window_left=9, window_right=13, causal="none", **cap)

    def one_sided(self, draw, dtype):
        """As models of sinks have them, where there are such."""
        sink = {"sink": 2 * draw.normal(4)} if self.sinks else {}
        return self.call("window to one side", draw, dtype, 70, 90, window_left=-1, window_right=5, causal="none", **sink)

    def usual(self, draw, dtype):
        """Sizes that models have, of which kernels have forms of their own."""
        return self.call("size 64", draw, dtype, 128, 128, B=1, H=2, D=64, causal=self.causal)

    def usual_128(self, draw, dtype):
        """Fewer columns of values than of keys, where they may differ."""
        given = {"v": draw.normal(1, 128, 1, 64), "do": draw.normal(1, 64, 2, 64)} if self.masks else {}
        return self.call("size 128", draw, dtype, 64, 128, B=1, H=2, Hk=1, D=128, causal="none", **given)

    def one_row(self, draw, dtype):
        return self.call("one row, causal", draw, dtype, 1, 70, causal=self.causal)

    def window(self, draw, dtype):
        return self.call("window", draw, dtype, 140, 150, window_left=20, window_right=0, causal="bottom_right")

    def capped(self, draw, dtype):
        return self.call("softcap", draw, dtype, 70, 70, softcap=5.0, size=2.0, causal=self.causal)

    def views(self, draw, dtype):
        call = self.call("views", draw, dtype, 50, 66, k=draw.normal(1, 66, 2, 16).expand(2, -1, -1, -1), causal="none",
                         v=16 * draw.normal(2, 66, 2, 24 if self.masks else 16),
                         do=16 * draw.normal(2, 50, 4, 24 if self.masks else 16), scale=0.4)
        call.layout.update(q="transposed", k="expanded", v="padded", do="transposed")
        return call

    def of_length(self, draw, dtype, Lq, Lk, H, Hk, B):
        causal = "none" if Lq % 2 else self.causal
        call = self.call(f"lengths {Lq} {Lk}", draw, dtype, Lq, Lk, B=B, causal=causal, H=H, Hk=Hk)
        if "do" in call.tensors and (Lq, Lk) == (65, 65):  # one number for all, as of o.sum().backward()
            call.tensors["do"] = torch.ones_like(call.tensors["do"])
            call.layout["do"] = "constant"
        return call

    def wide(self, draw, dtype):
        """Heads beyond a tile of 128."""
        return self.call("wide", draw, dtype, 40, 70, B=1, H=2, Hk=1, D=136, causal="none")

    def long(self, draw, dtype):
        return self.call("length 4097", draw, dtype, 5, 4097, B=1, causal="none")
