"""Drawn calls for cliffs.py. A plan is plain data: what is computed (`base`), and what is odd about it (`odd`, name →
value). The plain neighbour of a plan does the same work in one contiguous batch of one type, with nothing odd."""
import random
from dataclasses import dataclass, field

import torch

from softdelta import _native, _options
from softdelta._records import (ATTENTION_WANTED, CONVOLUTION_WANTED, DELTA_WANTED, AttentionInputs, AttentionOptions,
                                ConvolutionInputs, ConvolutionOptions, DeltaInputs, DeltaOptions)
from softdelta.torch import _calls

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
RULES = ("delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla")


@dataclass
class Plan:
    operation: str                            # attention, delta, convolution
    step: str                                 # forward, backward, decode
    base: dict                                # sizes and the type
    odd: dict = field(default_factory=dict)

    def without(self, name):
        return Plan(self.operation, self.step, self.base, {n: x for n, x in self.odd.items() if n != name})


@dataclass
class Timed:
    run: object                               # () → None
    work: float                               # in units of its operation
    plain: object                             # the neighbour's Plan, or None when this is one


def build(plan, device):
    return {"attention": attention, "delta": delta, "convolution": convolution}[plan.operation](plan, device)


def draw(random_, large):
    """A plan with one to three odd things. `large`: work that takes a CPU some milliseconds is too little for a GPU."""
    operation = random_.choices(("attention", "delta", "convolution"), (5, 5, 1))[0]
    plan = {"attention": draw_attention, "delta": draw_delta, "convolution": draw_convolution}[operation](random_, large)
    names = [n for n in ODD[operation] if plan.step in ODD[operation][n][0]]
    for name in random_.sample(names, random_.choice((1, 1, 2, 2, 3))):
        plan.odd[name] = ODD[operation][name][1](random_, plan)
    return plan


def lengths_of(random_, total):
    """Lengths of packed sequences that have about `total` tokens together: few long ones, many short ones, one long one
    among many short ones, or anything up to 500."""
    kind = random_.choice(("few", "many", "one", "any", "mixed"))
    if kind == "few":
        return [total // 3 + random_.randint(-9, 9) for _ in range(3)]
    if kind == "many":
        size = random_.choice((8, 16, 40, 64))
        return [max(1, size + random_.randint(-5, 5)) for _ in range(max(1, min(300, total // size)))]
    if kind == "one":
        return [total // 2] + [random_.randint(1, 30) for _ in range(min(200, total // 32))]
    if kind == "mixed":  # continuous batching: decode beside one prefill
        return [1] * 31 + [total // 2]
    lengths = []
    while sum(lengths) < total and len(lengths) < 300:
        lengths.append(random_.randint(0, min(500, total)))
    return lengths if sum(lengths) else [total]


def mean_length(lengths):
    """Σ L² / Σ L: a batch of such sequences has as many tokens and as many pairs of them."""
    return max(1, round(sum(n * n for n in lengths) / max(1, sum(lengths))))


LAYOUTS = ("heads first", "unaligned", "wide rows", "every second channel", "expanded batch", "expanded tokens",
           "expanded heads")


def laid_out(t, layout):
    """The numbers of t [B, L, H, ·] in another layout, or for an expanded one those of its first entry."""
    if layout == "heads first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "unaligned":
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
    if layout == "wide rows":
        return t.new_empty((*t.shape[:-1], t.shape[-1] + 24))[..., :t.shape[-1]].copy_(t)
    if layout == "every second channel":
        return t.new_empty((*t.shape[:-1], 2 * t.shape[-1]))[..., ::2].copy_(t)
    if layout and layout.startswith("expanded"):
        dim = {"batch": 0, "tokens": 1, "heads": 2}[layout.split()[1]]
        return t.narrow(dim, 0, 1).expand(t.shape)
    return t


def another_type(random_, plan):
    return random_.choice([t for t in TYPES if t != plan.base["type"]])


def bounds(lengths, device):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


class Tensors:
    """Operands of one plan: a drawn tensor of the plan's type, unless its name is the odd one."""

    def __init__(self, plan, device):
        self.odd, self.type, self.device = plan.odd, plan.base["type"], device
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, name, *shape, scale=1.0, type_=None):
        odd_name, odd_type = self.odd.get("one type", (None, None))
        dtype = TYPES[odd_type if name == odd_name else type_ or self.type]
        t = (torch.randn(shape, generator=self.generator, device=self.device) * scale).to(dtype)
        layout_name, layout = self.odd.get("layout", (None, None))
        return laid_out(t, layout) if name == layout_name else t

    def uniform(self, name, *shape, low, high, type_="f32"):
        t = self(name, *shape, type_=type_)
        return (low + (high - low) * torch.sigmoid(t.float())).to(t.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Attention


def draw_attention(random_, large):
    step = random_.choice(("forward", "backward", "decode"))
    heads = random_.choice((2, 4, 8)) * (4 if large else 1)
    base = {"type": random_.choice(("f32", "bf16", "f16")), "D": random_.choice((32, 64, 128)), "H": heads,
            "Hk": heads // random_.choice((1, 1, 2))}
    if step == "decode":
        base |= {"B": random_.choice((1, 4)), "Lq": random_.choice((1, 1, 2)), "Lk": random_.choice((512, 2048)) * (8 if large else 1)}
    else:
        size = random_.choice((128, 256, 512)) * (4 if large else 1)
        base |= {"B": random_.choice((1, 2)), "Lq": size, "Lk": size}
    return Plan("attention", step, base)


def shared(random_, plan):
    """Which dimensions [B, H, Lq, Lk] a mask or bias has, and whether the others are expanded."""
    return [random_.random() < 0.6 for _ in range(4)], random_.random() < 0.3


ANY, PASSES, BACKWARD, DECODE = (("forward", "backward", "decode"), ("forward", "backward"), ("backward",), ("decode",))
ATTENTION_ODD = {
    "packed": (PASSES, lambda r, p: lengths_of(r, p.base["B"] * p.base["Lq"])),
    "causal": (ANY, lambda r, p: r.choice((1, 2))),
    "window": (PASSES, lambda r, p: r.choice(((64, 0), (20, 20), (100, -1)))),
    "padded keys": (ANY, lambda r, p: r.choice(("false", "-inf", "finfo.min", "-10000"))),
    "rows without keys": (PASSES, lambda r, p: r.choice(("false", "-inf", "finfo.min", "-10000"))),
    "mask": (ANY, shared),
    "bias": (ANY, lambda r, p: (*shared(r, p), r.random() < 0.5, r.choice((p.base["type"], "f32")))),
    "large scores": (ANY, lambda r, p: r.choice((30.0, 300.0))),
    "softcap": (ANY, lambda r, p: 20.0),
    "sink": (ANY, lambda r, p: r.random() < 0.5),
    "alibi": (ANY, lambda r, p: True),
    "bias slopes": (ANY, lambda r, p: True),
    "layout": (ANY, lambda r, p: (r.choice(("q", "k", "v", "do")), r.choice(LAYOUTS))),
    "one type": (ANY, lambda r, p: (r.choice(("q", "k", "v", "do")), another_type(r, p))),
    "sizes": (ANY, lambda r, p: r.choice(((80, 80), (72, 40), (33, 33), (192, 128), (96, 128), (100, 100), (256, 256)))),
    "lengths": (PASSES, lambda r, p: r.choice(((37, 700), (700, 37), (300, 301), (16, 2000), (5, 900)))),
    "one gradient": (BACKWARD, lambda r, p: r.choice(("q", "k", "v"))),
    "cache": (DECODE, lambda r, p: r.choice(("lengths", "pages of 16", "pages of 256"))),
    "quantised": (DECODE, lambda r, p: r.choice(("rows", "q8_0", "q4_0"))),
}
LOWEST = {"-inf": float("-inf"), "finfo.min": torch.finfo(torch.float32).min, "-10000": -1e4}


def attention(plan, device):
    odd, base, new = plan.odd, plan.base, Tensors(plan, device)
    B, H, Hk = base["B"], base["H"], base["Hk"]
    D, Dv = odd.get("sizes", (base["D"], base["D"]))
    if "quantised" in odd:
        D = Dv = max(32, D // 32 * 32)
    Lq, Lk = odd.get("lengths", (base["Lq"], base["Lk"]))
    packed = odd.get("packed")
    pairs_of = [(n, n) for n in packed] if packed else [(Lq, Lk)] * B
    rows, options, inputs = sum(a for a, _ in pairs_of), {}, {}
    shape_q, shape_k = ((1, rows), (1, sum(b for _, b in pairs_of))) if packed else ((B, Lq), (B, Lk))
    q, k, v = new("q", *shape_q, H, D), new("k", *shape_k, Hk, D), new("v", *shape_k, Hk, Dv)
    if packed:
        inputs["cu_seqlens_q"] = inputs["cu_seqlens_k"] = bounds(packed, device)
        Lq, Lk = max(packed), max(packed)
    options["causal"] = odd.get("causal", 0)
    left, right = odd.get("window", (-1, -1))
    options |= {"scale": odd.get("large scores", 1.0) * D**-0.5, "window_left": left, "window_right": right, "softcap": odd.get("softcap", 0.0)}
    batch = len(pairs_of)
    mask, bias, wanted = None, None, set(ATTENTION_WANTED[:3])
    if "mask" in odd:  # scattered: no tile is empty, so that all pairs are work
        has, expanded = odd["mask"]
        mask = dimensions(torch.rand, (batch, H, Lq, Lk), has, expanded, device) > 0.3
    if "bias" in odd:
        has, expanded, with_gradient, type_ = odd["bias"]
        bias = dimensions(torch.randn, (batch, H, Lq, Lk), has, expanded, device, TYPES[type_])
        if with_gradient:
            wanted.add("bias")
    keys = Lk
    if "padded keys" in odd and Lk > 8:
        keys = Lk * 3 // 4
        hidden = torch.arange(Lk, device=device) >= keys
        mask, bias = hide(mask, bias, hidden[None, None, None, :], odd["padded keys"])
    first = 0
    if "rows without keys" in odd and Lq > 8:  # what padding on the left leaves: seven rows of one sequence
        first = 7
        hidden = (torch.arange(Lq, device=device) < first)[None, None, :, None] & (torch.arange(batch, device=device) == 0)[:, None, None, None]
        mask, bias = hide(mask, bias, hidden, odd["rows without keys"])
    inputs |= {"mask": mask, "bias": bias}
    if "sink" in odd:
        inputs["sink"] = torch.zeros(H, device=device)
        wanted |= {"sink"} if odd["sink"] else set()
    if "alibi" in odd:
        inputs["alibi_slopes"] = torch.full((H,), 0.1, device=device)
    if "bias slopes" in odd and bias is not None:
        inputs["bias_slopes"] = torch.full((H,), 0.5, device=device)
    if "one gradient" in odd:
        wanted = {odd["one gradient"]}
    if "cache" in odd and "quantised" not in odd:
        used = torch.full((B,), Lk - 5, dtype=torch.int32, device=device)
        inputs["cache_seqlens"] = used
        if odd["cache"].startswith("pages"):
            page = int(odd["cache"].split()[-1])
            pages = -(-Lk // page)
            order = torch.randperm(B * pages).to(torch.int32).to(device)
            inputs["block_table"] = order.view(B, pages)
            k, v = new("k", B * pages, page, Hk, D), new("v", B * pages, page, Hk, Dv)
    if "quantised" in odd:
        (k, inputs["k_scale"]), (v, inputs["v_scale"]) = (quantised(odd["quantised"], B, Lk, Hk, D, device) for _ in "kv")
    made = AttentionInputs(q, k, v, **inputs)
    chosen = AttentionOptions(**options)
    if plan.step == "backward":
        o, lse = _calls.attention_forward(made, chosen)
        do = new("do", *o.shape)
        flags = [n in wanted for n in ATTENTION_WANTED]
        run = lambda: _calls.attention_backward(made, chosen, (o, lse), (do, None), flags)
    else:
        chosen = chosen._replace(with_lse=plan.step != "decode")
        run = lambda: _calls.attention_forward(made, chosen)
    seen = max(1, sum(visible(a, b, options["causal"], left, right, b - (Lk - keys) if keys < Lk and not packed else b)
                      for a, b in pairs_of))
    work = H * seen * (D + Dv)
    if not odd:
        return Timed(run, work, None)
    mean = mean_length([a for a, _ in pairs_of])
    plain = dict(base, B=max(1, round(rows / mean)), Lq=mean, Lk=max(1, round(seen / max(1, rows))),
                 D=next((d for d in (32, 64, 128) if d >= D), 128))
    return Timed(run, work, Plan("attention", plan.step, plain))


def dimensions(make, shape, has, expanded, device, dtype=torch.float32):
    some = [n if h else 1 for n, h in zip(shape, has)]
    t = make(some, device=device).to(dtype)
    return t.expand(shape) if expanded else t


def hide(mask, bias, hidden, how):
    """A mask or bias that also hides what `hidden` says: false, or a number that is added."""
    if how == "false":
        return (~hidden if mask is None else mask & ~hidden), bias
    low = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, LOWEST[how])
    return mask, low if bias is None else (bias.float() + low).clamp(min=LOWEST[how]).to(torch.float32)


def quantised(kind, B, Lk, Hk, D, device):
    if kind == "rows":
        return (torch.randint(-127, 128, (B, Lk, Hk, D), dtype=torch.int8, device=device),
                torch.rand(B, Lk, Hk, 1, device=device) / 64)
    scale = torch.rand(B, Lk, Hk, D // 32, device=device).half() / 64
    if kind == "q8_0":
        return torch.randint(-127, 128, (B, Lk, Hk, D // 32, 32), dtype=torch.int8, device=device), scale
    return torch.randint(0, 256, (B, Lk, Hk, D // 32, 16), dtype=torch.uint8, device=device), scale


def visible(rows, keys, causal, left, right, used):
    """Pairs that position lets through."""
    shift = 0 if causal == 1 else keys - rows
    i = torch.arange(rows) + shift
    last = i if causal else torch.full_like(i, keys - 1)
    if right >= 0:
        last = torch.minimum(last, i + right)
    start = i - left if left >= 0 else torch.zeros_like(i)
    return int((torch.clamp(last, max=used - 1) - torch.clamp(start, min=0) + 1).clamp(min=0).sum())


# ----------------------------------------------------------------------------------------------------------------------
# Delta rules


def draw_delta(random_, large):
    step = random_.choice(("forward", "backward", "decode"))
    base = {"type": random_.choice(("f32", "bf16", "f16")), "rule": random_.choice(RULES), "K": random_.choice((64, 128)),
            "H": random_.choice((2, 4, 16)) * (2 if large else 1)}
    if step == "decode":
        base |= {"B": random_.choice((1, 8, 32)), "T": random_.choice((1, 1, 2))}
    else:
        base |= {"B": random_.choice((1, 2)), "T": random_.choice((64, 256, 512)) * (4 if large else 1)}
    return Plan("delta", step, base)


NOT_KDA = [r for r in RULES if r != "kda"]
DELTA_ODD = {
    "packed": (ANY, lambda r, p: [r.choice((1, 1, 2, 4)) for _ in range(p.base["B"])] if p.step == "decode" else lengths_of(r, p.base["B"] * p.base["T"])),
    "layout": (ANY, lambda r, p: (r.choice(("q", "k", "v", "g", "beta", "do")), r.choice(LAYOUTS))),
    "one type": (ANY, lambda r, p: (r.choice(("q", "k", "v", "g", "beta", "do")), another_type(r, p))),
    "sizes": (ANY, lambda r, p: r.choice(((64, 128), (128, 64), (96, 96), (33, 65), (80, 48), (256, 256), (256, 128)))),
    "value heads": (ANY, lambda r, p: (r.choice((2, 4)), r.choice(("grouped", "tiled")))),
    "l2norm": (ANY, lambda r, p: True),
    "raw gate": (ANY, lambda r, p: r.choice(("softplus", "lower bound"))),
    "logits": (ANY, lambda r, p: r.random() < 0.5),
    "no beta": (ANY, lambda r, p: True),
    "initial state": (PASSES, lambda r, p: r.random() < 0.5),
    "final state": (PASSES, lambda r, p: True),
    "v first": (ANY, lambda r, p: True),
    "steep gates": (ANY, lambda r, p: r.choice((-5.0, -50.0, -1000.0))),
    "rising gates": (ANY, lambda r, p: r.choice((0.0, 0.02))),
    "one steep token": (PASSES, lambda r, p: r.choice((-80.0, -1e4, float("-inf"), 1.0))),
    "one large row": (PASSES, lambda r, p: r.choice((1e19, float("inf"), float("nan")))),
    "one gradient": (BACKWARD, lambda r, p: r.choice(("q", "k", "v", "g", "beta"))),
    "few tokens": (PASSES, lambda r, p: r.choice((1, 3, 9, 17, 33, 65))),
    "pool": (DECODE, lambda r, p: r.random() < 0.5),
}


def delta(plan, device):
    odd, base, new = plan.odd, plan.base, Tensors(plan, device)
    rule, B, H = base["rule"], base["B"], base["H"]
    T = odd.get("few tokens", base["T"])
    K, V = odd.get("sizes", (base["K"], base["K"]))
    group, order = odd.get("value heads", (1, "grouped"))
    HV = H
    H = max(1, HV // group)
    packed = odd.get("packed") if "few tokens" not in odd else None
    lengths = packed or [T] * B
    shape = (1, sum(lengths)) if packed else (B, T)
    N = len(lengths)
    q, k, v = new("q", *shape, H, K), new("k", *shape, H, K, scale=K**-0.5), new("v", *shape, HV, V)
    inputs = {"cu_seqlens": bounds(packed, device) if packed else None}
    if rule == "comba":
        inputs["p"] = new("p", *shape, H, K, scale=K**-0.5)
    if rule != "delta_rule":
        size = (*shape, HV, K) if rule == "kda" else (*shape, HV)
        level = odd.get("rising gates", odd.get("steep gates", -0.1))
        g = new.uniform("g", *size, low=min(level, 2 * level), high=max(level / 2, level)) if "layout" not in odd or odd["layout"][0] != "g" else new("g", *size, type_="f32").abs() * -0.1
        if "one steep token" in odd:
            g = g.clone()
            g[:, shape[1] // 2] = odd["one steep token"]
        inputs["g"] = g
    if "one large row" in odd:
        k = k.clone()
        k[:, shape[1] // 2, 0, 0] = odd["one large row"]
    if rule != "simple_gla" and "no beta" not in odd:
        inputs["beta"] = new.uniform("beta", *shape, HV, low=0.0, high=1.0, type_=base["type"])
    options = {"rule": _options.RULES[rule], "use_qk_l2norm_in_kernel": "l2norm" in odd, "state_v_first": "v first" in odd,
               "head_order": _options.HEAD_ORDER[order]}
    if "raw gate" in odd and "g" in inputs:
        options |= {"use_gate_in_kernel": True}
        inputs["A_log"] = torch.zeros(HV, device=device)
        if odd["raw gate"] == "lower bound":
            options["lower_bound"] = -5.0
    if "logits" in odd and "beta" in inputs:
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": odd["logits"]}
    state_shape = (HV, V, K) if "v first" in odd else (HV, K, V)
    if "initial state" in odd or plan.step == "decode":
        inputs["initial_state"] = torch.randn(N, *state_shape, device=device)
    if "pool" in odd:
        inputs["initial_state"] = torch.randn(2 * N, *state_shape, device=device)
        places = torch.randperm(2 * N)[:N].to(torch.int32)
        if odd["pool"]:
            places[0] = -1
        inputs["state_indices"] = places.to(device)
    made, chosen = DeltaInputs(q, k, v, **inputs), DeltaOptions(**options)
    if plan.step == "decode":
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        run = lambda: _native.delta_forward(made, chosen, (o, made.initial_state), _calls.AUTOMATIC, _calls.threads(), False)
    elif plan.step == "forward":
        chosen = chosen._replace(output_final_state="final state" in odd)
        run = lambda: _calls.delta_forward(made, chosen)
    else:
        do = new("do", *shape, HV, V)
        wanted = [getattr(made, n) is not None and ("one gradient" not in odd or n == odd["one gradient"]) for n in DELTA_WANTED]
        if not any(wanted):
            wanted[0] = True
        run = lambda: _calls.delta_backward(made, chosen, (), (do, None), wanted)
    work = sum(lengths) * HV * K * V
    if not odd:
        return Timed(run, work, None)
    mean = mean_length(lengths)
    plain = dict(base, B=max(1, round(sum(lengths) / mean)), T=mean, K=128 if K > 64 else 64)
    return Timed(run, work, Plan("delta", plan.step, plain))


# ----------------------------------------------------------------------------------------------------------------------
# The convolution


def draw_convolution(random_, large):
    base = {"type": random_.choice(("f32", "bf16", "f16")), "B": random_.choice((1, 2)), "C": random_.choice((256, 1024)),
            "T": random_.choice((256, 1024)) * (8 if large else 1)}
    return Plan("convolution", random_.choice(PASSES), base)


CONVOLUTION_ODD = {
    "packed": (PASSES, lambda r, p: lengths_of(r, p.base["B"] * p.base["T"])),
    "one type": (PASSES, lambda r, p: (r.choice(("x", "weight")), another_type(r, p))),
    "channels first": (PASSES, lambda r, p: True),
    "sizes": (PASSES, lambda r, p: r.choice((33, 100, 1000))),
    "activation": (PASSES, lambda r, p: True),
    "width": (PASSES, lambda r, p: r.choice((2, 3))),
}


def convolution(plan, device):
    odd, base, new = plan.odd, plan.base, Tensors(plan, device)
    C, W = odd.get("sizes", base["C"]), odd.get("width", 4)
    packed = odd.get("packed")
    lengths = packed or [base["T"]] * base["B"]
    shape = (1, sum(lengths)) if packed else (base["B"], base["T"])
    x = new("x", *shape, C)
    if "channels first" in odd:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    made = ConvolutionInputs(x, new("weight", C, W), cu_seqlens=bounds(packed, device) if packed else None)
    chosen = ConvolutionOptions(activation=_options.ACTIVATION["silu" if "activation" in odd else "none"])
    if plan.step == "forward":
        run = lambda: _calls.convolution_forward(made, chosen)
    else:
        dy = new("dy", *shape, C)
        run = lambda: _calls.convolution_backward(made, chosen, (), (dy, None), [getattr(made, n) is not None for n in CONVOLUTION_WANTED])
    work = sum(lengths) * C
    if not odd:
        return Timed(run, work, None)
    mean = mean_length(lengths)
    plain = dict(base, B=max(1, round(sum(lengths) / mean)), T=mean, C=-(-C // 64) * 64)
    return Timed(run, work, Plan("convolution", plan.step, plain))


ODD = {"attention": ATTENTION_ODD, "delta": DELTA_ODD, "convolution": CONVOLUTION_ODD}
