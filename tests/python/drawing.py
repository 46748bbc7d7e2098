"""Small random calls."""
import torch

from softdelta._options import FACTS


def draw(*shape, dtype, requires_grad=False, scale=1.0):
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype).requires_grad_(requires_grad)


def delta_call(rule, dtype=torch.float32, requires_grad=False, v_first=False, packed=False, tokens=7, heads=(1, 2),
               sizes=(3, 4), batch=2, seed=0):
    """Operands of a delta rule by their names; g and states f32, or f64 with f64."""
    torch.manual_seed(seed)
    (H, HV), (K, V), T = heads, sizes, tokens
    B, N = (1, 3) if packed else (batch, batch)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kind = dict(dtype=dtype, requires_grad=requires_grad)
    call = {"q": draw(B, T, H, K, **kind), "k": draw(B, T, H, K, **kind, scale=K**-0.5), "v": draw(B, T, HV, V, **kind)}
    facts = FACTS.get(rule, rule)
    if "p" in facts.operands:
        call["p"] = draw(B, T, H, K, **kind, scale=K**-0.5)
    if "g" in facts.operands:
        shape = (B, T, HV, K) if facts.gate == "channel" else (B, T, HV)
        call["g"] = (-torch.rand(shape, dtype=torch.float64)).to(wide).requires_grad_(requires_grad)
    if "beta" in facts.operands:
        call["beta"] = torch.rand(B, T, HV, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
    shape = (V, K) if v_first else (K, V)
    call["initial_state"] = draw(N, HV, *shape, dtype=wide, requires_grad=requires_grad)
    if packed:
        call["cu_seqlens"] = torch.tensor([0, 3, 3, T])
    return call


def attention_call(dtype=torch.float32, requires_grad=False, batch=2, rows=(5, 6), heads=(4, 2), sizes=(3, 4), seed=0):
    """Operands of attention by their names, [B, L, H, D]."""
    torch.manual_seed(seed)
    (Lq, Lk), (H, Hk), (D, Dv), B = rows, heads, sizes, batch
    kind = dict(dtype=dtype, requires_grad=requires_grad)
    return {"q": draw(B, Lq, H, D, **kind), "k": draw(B, Lk, Hk, D, **kind), "v": draw(B, Lk, Hk, Dv, **kind),
            "mask": torch.rand(B, 1, Lq, Lk) > 0.2, "bias": draw(1, H, Lq, Lk, **kind), "sink": draw(H, **kind)}


def expanded(x):
    """x with one of its rows for all, dimension by dimension, and then with one number: strides of 0."""
    for dim in range(x.dim()):
        yield x.narrow(dim, 0, 1).expand(x.shape)
    yield x[(0,) * x.dim()].expand(x.shape)


def quantised_call(kind, dtype=torch.float32, batch=2, rows=(3, 7), heads=(4, 2), seed=0):
    """q [B, Lq, H, 64], k and v of `kind` [B, Lk, Hk, ..], their scales, and what k and v stand for, f64 [B, Lk, Hk, 64].
    kinds: "rows" (int8), "f8", "q8_0", "q4_0"."""
    torch.manual_seed(seed)
    (Lq, Lk), (H, Hk), B = rows, heads, batch
    shape = {"rows": (B, Lk, Hk, 64), "f8": (B, Lk, Hk, 64), "q8_0": (B, Lk, Hk, 2, 32), "q4_0": (B, Lk, Hk, 2, 16)}[kind]

    def few_bits():
        if kind == "f8":
            numbers = torch.randn(shape).to(torch.float8_e4m3fn)
            scale = torch.rand(1, 1, Hk, 1) + 0.5
            return numbers, scale, numbers.double() * scale
        if kind == "q4_0":
            numbers, scale = torch.randint(0, 256, shape, dtype=torch.uint8), torch.rand(B, Lk, Hk, 2).half() / 4
            meant = torch.cat([numbers & 15, numbers >> 4], -1).double() - 8
            return numbers, scale, (meant * scale[..., None]).flatten(3)
        numbers = torch.randint(-127, 128, shape, dtype=torch.int8)
        if kind == "q8_0":
            scale = torch.rand(B, Lk, Hk, 2).half() / 64
            return numbers, scale, (numbers.double() * scale[..., None]).flatten(3)
        scale = (torch.rand(B, Lk, Hk, 1) / 64).bfloat16()
        return numbers, scale, numbers.double() * scale

    (k, k_scale, k_meant), (v, v_scale, v_meant) = few_bits(), few_bits()
    return draw(B, Lq, H, 64, dtype=dtype), k, v, k_scale, v_scale, k_meant, v_meant
