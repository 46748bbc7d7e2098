"""What each rank checks of softdelta.torch.distributed.attention and short_convolution."""
import random

import torch
import torch.distributed as dist

import softdelta.torch.distributed as sdd
from drawing import draw
from ranks_delta import cut
from softdelta._records import AttentionInputs, AttentionOptions
from softdelta.torch import _ops
from softdelta.torch._families import SOFTMAX_ATTENTION
from softdelta.torch.distributed import _ranks, _ring

CAUSAL = {"none": 0, "top_left": 1, "bottom_right": 2}
PLANES = ("mask", "bias")


def draw_call(seed, dtype, size, heads=None, sizes=(3, 4)):
    """Tensors and options of a call. The caller decides whether its rows are in zigzag order."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    Hk = heads or dice.choice((1, 2, 4))
    H = Hk * dice.choice((1, 2))
    (D, Dv), B = sizes, dice.choice((1, 2))
    Lq = size
    Lk = size if dice.random() < 0.5 else size // 2 * 2 + 16
    call = {"q": draw(B, Lq, H, D, dtype=dtype), "k": draw(B, Lk, Hk, D, dtype=dtype),
            "v": draw(B, Lk, Hk, Dv, dtype=dtype)}
    shape = (dice.choice((1, B)), dice.choice((1, Hk, H)), dice.choice((1, Lq)), dice.choice((1, Lk)))
    if dice.random() < 0.4:
        call["mask"] = torch.rand(*shape[:2], Lq, Lk) > 0.3
    if dice.random() < 0.4:
        call["bias"] = draw(*shape, dtype=dtype)
    if dice.random() < 0.4:
        call["sink"] = draw(H, dtype=dtype)
    options = {"causal": dice.choice(tuple(CAUSAL)), "softcap": dice.choice((0.0, 0.0, 2.0)),
               "window_left": dice.choice((-1, -1, size // 3)), "window_right": dice.choice((-1, -1, size // 4)),
               "scale": dice.choice((None, 0.4))}
    return call, options


def records(options):
    more = {n: x for n, x in options.items() if n not in ("causal", "scale")}
    if options["scale"] is not None:
        more["scale"] = options["scale"]
    return AttentionOptions(causal=CAUSAL[options["causal"]], **more)


def rows_of(total, lengths, order, rank=None):
    """The rows of a rank, of this one by default, by their places in the sequence."""
    rank, size = dist.get_rank() if rank is None else rank, dist.get_world_size()
    if order == "zigzag":
        half = total // size // 2
        return torch.cat([torch.arange(rank * half, rank * half + half),
                          torch.arange((2 * size - 1 - rank) * half, (2 * size - rank) * half)])
    return torch.arange(sum(lengths[:rank]), sum(lengths[:rank + 1]))


def compare(call, options, query_rows, key_rows, same, keys_without=(), **how):
    torch.manual_seed(7)
    q, v = call["q"], call["v"]
    do = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64).to(v)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float64).to(
        q.device, torch.float64 if q.dtype == torch.float64 else torch.float32)
    whole = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in call.items()}
    o, lse = _ops.call(SOFTMAX_ATTENTION, AttentionInputs(**whole), records(options))
    weight = torch.where(lse.isfinite(), dlse, 0)
    torch.autograd.backward([o, lse], [do, weight])

    def part(name, t):
        if name == "q":
            return t[:, query_rows]
        if name in ("k", "v"):
            return t[:, key_rows]
        return t if name == "sink" or t.shape[2] == 1 else t[:, :, query_rows]

    own = {n: part(n, t).clone().requires_grad_(t.is_floating_point()) for n, t in call.items()}
    if dist.get_rank() in keys_without:
        own |= {n: own[n].detach() for n in "kv"}
    o2, lse2 = sdd.attention(own["q"], own["k"], own["v"], **{n: t for n, t in own.items() if n not in "qkv"},
                             **options, **how)
    torch.autograd.backward([o2, lse2], [do[:, query_rows], weight[:, :, query_rows]])
    same("o", o2.detach(), o.detach()[:, query_rows])
    same("lse", lse2.detach(), lse.detach()[:, :, query_rows])
    for name, t in own.items():
        if not t.requires_grad:
            continue
        gradient, truth = t.grad, whole[name].grad
        if name == "sink" or (name == "bias" and call["bias"].shape[2] == 1):
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            same("sum of d" + name, gradient, truth)
        else:
            same("d" + name, gradient, part(name, truth))


def check_truth(seeds, methods):
    for seed in seeds:
        dice = random.Random(seed + 500)
        ranks = dist.get_world_size()
        order = dice.choice(("contiguous", "zigzag"))
        size = 2 * ranks * dice.choice((1, 3)) if order == "zigzag" else dice.choice((1, 7, 24))
        call, options = draw_call(seed, torch.float64, size)
        if order == "zigzag" and dice.random() < 0.4:  # causal attention and nothing else
            call |= {n: torch.randn(call["q"].shape[0], size, *call[n].shape[2:], dtype=torch.float64) for n in "kv"}
            call = {n: t for n, t in call.items() if n not in PLANES}
            options |= {"causal": "top_left", "window_left": -1, "window_right": -1}
        if order == "zigzag":
            Lk = call["k"].shape[1] // (2 * ranks) * 2 * ranks
            for n in ("k", "v"):
                call[n] = call[n][:, :Lk]
            for n in PLANES:
                if n in call and call[n].shape[3] > 1:
                    call[n] = call[n][..., :Lk]
        lengths = [cut(call[n].shape[1], ranks, 1, dice) for n in "qk"]
        rows = [rows_of(call[n].shape[1], of, order) for n, of in zip("qk", lengths)]
        _ring.MOST_KEPT = dice.choice((0, 1 << 28))
        for method in methods:
            if method == "heads" and call["k"].shape[2] < ranks:
                continue

            def same(name, x, truth):
                torch.testing.assert_close(x, truth, rtol=1e-9, atol=1e-9, msg=lambda m: (
                    f"seed {seed} {method} {order} {options} {lengths} {sorted(call)} {name}: {m}"))

            without = range(1, ranks) if seed % 3 == 0 else ()  # gradients of keys that rank 0 alone wants
            compare(call, options, *rows, same, without, method=method, order=order)


def check_bits(seeds, dtype):
    """Method heads has the bits of one process, gradients too; method ring agrees within rounding."""
    for seed in seeds:
        ranks = dist.get_world_size()
        dice = random.Random(seed)
        call, options = draw_call(seed, dtype, 96, heads=max(4, ranks), sizes=(16, 24))
        order = "zigzag" if call["k"].shape[1] % (2 * ranks) == 0 and 96 % (2 * ranks) == 0 else "contiguous"
        lengths = [cut(call[n].shape[1], ranks, 1, dice) for n in "qk"]
        rows = [rows_of(call[n].shape[1], of, order) for n, of in zip("qk", lengths)]
        for method in ("heads", "ring"):

            def same(name, x, truth):
                what = f"seed {seed} {method} {order} {options} {name}"
                summed = name.startswith("sum") or (name == "dbias" and call["bias"].shape[1] == 1)  # over ranks
                if method == "heads" and not summed:
                    assert torch.equal(x, truth), what
                elif x.numel():
                    unit = 1e-5 if dtype == torch.float32 else 2e-2
                    dead = truth.isinf()
                    assert torch.equal(x[dead], truth[dead]), what
                    error = (x[~dead].double() - truth[~dead].double()).norm()
                    assert error <= unit * (truth[~dead].double().norm() + 1e-3), f"{what}: {error}"

            compare(call, options, *rows, same, method=method, order=order)


def check_kept_keys(dtype):
    """Keys that the forward pass keeps give the same bits, and do not travel again."""
    exchange, sent = _ranks.Ranks.exchange, []

    def counted(own, sends, receives):
        sent.append(sum(t.nbytes for t, _ in sends))
        return exchange(own, sends, receives)

    _ranks.Ranks.exchange = counted
    for order in ("contiguous", "zigzag"):
        torch.manual_seed(dist.get_rank())
        rows = 8 if order == "zigzag" else 2 * dist.get_rank() + 8
        q, k, v, do = (draw(2, rows, 2, 16, dtype=dtype) for _ in range(4))
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        found, bytes_sent = [], []
        size = torch.tensor(k.nbytes + v.nbytes)
        dist.all_reduce(size)
        for most in (size.item(), size.item() - 1):
            _ring.MOST_KEPT = most
            sent.clear()
            o, _ = sdd.attention(q, k, v, method="ring", order=order, causal="top_left")
            forward = sum(sent)
            found.append([o.detach(), *torch.autograd.grad(o, (q, k, v), do)])
            bytes_sent.append(sum(sent) - forward)
        for x, y in zip(*found):
            assert torch.equal(x, y)
        assert bytes_sent[1] - bytes_sent[0] == forward > 0, (bytes_sent, forward)
        with torch.no_grad():
            assert not sdd.attention(q, k, v, method="ring", order=order)[0].requires_grad


def check_gpus(seeds, dtype, methods):
    """Ranks with a GPU each against one GPU, within rounding."""
    for seed in seeds:
        ranks, dice = dist.get_world_size(), random.Random(seed)
        call, options = draw_call(seed, dtype, 320, heads=2, sizes=(64, 64))
        call = {n: t.cuda() for n, t in call.items()}
        order = "zigzag" if call["k"].shape[1] % (2 * ranks) == 0 else "contiguous"
        lengths = [cut(call[n].shape[1], ranks, 1, dice) for n in "qk"]
        rows = [rows_of(call[n].shape[1], of, order).cuda() for n, of in zip("qk", lengths)]
        for method in methods:

            def same(name, x, truth):
                unit = 2e-5 if dtype == torch.float32 else 2e-2
                seen = ~truth.isinf()
                error = (x[seen].double() - truth[seen].double()).norm()
                assert error <= unit * (truth[seen].double().norm() + 1e-2), (
                    f"seed {seed} {method} {order} {options} {name}: {error}")

            compare(call, options, *rows, same, method=method, order=order)


def check_convolution(seeds):
    """Any shards give the same bits; they are right by a convolution of torch."""
    for seed in seeds:
        dice = random.Random(seed)
        torch.manual_seed(seed)
        T, C, W = dice.choice((1, 6, 30)), 3, dice.choice((1, 2, 4))
        B = dice.choice((1, 2))
        dtype = dice.choice((torch.float64, torch.float32))
        x, weight, do = draw(B, T, C, dtype=dtype), draw(C, W, dtype=dtype), draw(B, T, C, dtype=dtype)
        bias = draw(C, dtype=dtype) if dice.random() < 0.5 else None
        activation = dice.choice((None, "silu"))
        bounds = sorted({0, dice.randrange(T + 1), T}) if B == 1 and dice.random() < 0.5 else None
        whole = [t if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
        parts = []
        for a, b in zip(bounds or [0], (bounds or [0, T])[1:]):
            padded = torch.nn.functional.pad(whole[0][:, a:b].transpose(1, 2), (W - 1, 0))
            parts.append(torch.nn.functional.conv1d(padded, whole[1].unsqueeze(1), whole[2], groups=C).transpose(1, 2))
        y = torch.cat(parts, 1)
        y = torch.nn.functional.silu(y) if activation else y
        y.backward(do)
        lengths = cut(T, dist.get_world_size(), 1, dice)
        at = slice(sum(lengths[:dist.get_rank()]), sum(lengths[:dist.get_rank() + 1]))
        own = [t if t is None else t.clone().requires_grad_() for t in (x[:, at], weight, bias)]
        y2 = sdd.short_convolution(*own, activation=activation, cu_seqlens=bounds)
        y2.backward(do[:, at])
        limit = 1e-12 if dtype == torch.float64 else 1e-4
        for name, a, b in (("y", y2, y[:, at]), ("dx", own[0].grad, whole[0].grad[:, at])):
            torch.testing.assert_close(a, b, rtol=limit, atol=limit, msg=lambda m: f"seed {seed} {bounds} {lengths} {name}: {m}")
        for a, b in zip(own[1:], whole[1:]):
            if a is not None:
                total = a.grad.clone()
                dist.all_reduce(total)
                torch.testing.assert_close(total, b.grad, rtol=limit, atol=limit)
