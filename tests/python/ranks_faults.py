"""What each rank checks where something is wrong, and what the library judges of all ranks."""
import os
import time

import torch
import torch.distributed as dist

import softdelta
import softdelta.torch as sd
import softdelta.torch.distributed as sdd
from drawing import draw
from ranks_agree import Raises
from ranks_delta import draw_call, shared


def _error(call) -> str:
    begin = time.monotonic()
    try:
        call()
    except Exception as e:
        assert time.monotonic() - begin < 20
        return f"{type(e).__name__}: {e}"
    return "no error"


def faults():
    """The errors of faults that one rank alone has."""
    rank = dist.get_rank()
    q, k, v = (draw(1, 3, 2, 4, dtype=torch.float32) for _ in range(3))
    beta = torch.rand(1, 3, 2)

    def delta(**how):
        given = {"q": q, "k": k, "v": v, "beta": beta} | how
        rule = given.pop("rule", "delta_rule")
        return lambda: sdd.delta_rule(rule, given.pop("q"), given.pop("k"), given.pop("v"), **given)

    def attention(**how):
        given = {"q": q, "k": k, "v": v} | how
        return lambda: sdd.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)

    def context(**given):
        given = {"is_first_rank": rank == 0, "is_last_rank": rank == 1, "group": dist.group.WORLD} | given
        made = type("Context", (), given)()
        return lambda: sd.chunk_gated_delta_rule(q, k, v, g=-beta, beta=beta, cp_context=made)

    one = rank == 1
    return [_error(call) for call in (
        delta(v=v[..., :3] if one else v),
        delta(beta=beta[:, :2] if one else beta),
        delta(q=None if one else q),
        delta(rule="kda" if one else "delta_rule"),
        delta(scale=0.5 if one else None),
        delta(method="fast"),
        delta(method="relay", q=q.clone().requires_grad_(one)),
        delta(cu_seqlens=[0, 3, 7]),
        delta(k=k.to(torch.bfloat16) if one else k),
        attention(v=v[:, :2] if one else v),
        attention(causal="top_left" if one else "none"),
        attention(mask=torch.ones(1, 1, 3, 5 if one else 6, dtype=torch.bool)),
        attention(order="zigzag"),
        attention(method="ring", bias=torch.zeros(1, 1, 3, 6), top_w=2),
        attention(method="ring", bias=torch.full((1, 1, 3, 6), -1e6 if one else 0.0)),
        lambda: sdd.short_convolution(q.flatten(2), torch.ones(8, 5 if one else 4)),
        attention(method="heads", bias=torch.zeros(1, 1, 1, 6 if one else 1)),
        attention(q=q.to("meta") if one else q),
        delta(beta=beta.to("meta") if one else beta),
        delta(q=q.to("meta") if one else q),
        delta(q=q.numpy() if one else q),
        delta(head_groups=Raises(MemoryError) if one else None),
        _without_gradients(delta(q=q.clone().requires_grad_()), one),
        attention() if one else delta(),
        context(**{} if one else {"cu_seqlens": torch.tensor([0, 3])}),
        context(cu_seqlens=torch.tensor([0, 3]), is_last_rank=not one),
        lambda: sdd.unshard(q, order="odd" if one else "zigzag"),
        (lambda: torch.func.grad(lambda x: delta(q=x)()[0].sum())(q)) if one else delta(),
        delta(group=torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))),
        delta(),  # and nothing is left over: the ranks still work together
    )]


def _without_gradients(call, here):
    def without():
        with torch.set_grad_enabled(not here):
            return call()

    return without


def killed(last):
    """The last rank ends in the middle of a relay. Returns the errors of the others, and after how many seconds they came."""
    q, k, v = (draw(1, 64, 4, 16, dtype=torch.float32) for _ in range(3))
    sdd.delta_rule("delta_rule", q, k, v, method="relay")
    if dist.get_rank() == last:
        os._exit(1)
    begin = time.monotonic()
    try:
        sdd.delta_rule("delta_rule", q, k, v, method="scan")
    except RuntimeError as e:
        return str(e), time.monotonic() - begin
    return "no error", 0.0


def _state(call, options):
    K, (HV, V) = call["q"].shape[3], call["v"].shape[2:]
    return torch.empty(call["q"].shape[0], HV, *((V, K) if options["state_v_first"] else (K, V)), dtype=torch.float64)


def judged(seeds, dtype, method):
    """Verdicts of the library on what all ranks computed together."""
    found = []
    for seed in seeds:
        rule, call, options, bounds = draw_call(seed, dtype, 150, heads=2, sizes=(16, 16), plain=True)
        torch.manual_seed(5)
        do = torch.randn(call["v"].shape).to(dtype)
        dstate = torch.randn(_state(call, options).shape)
        lengths = [40, 110, 0, 0][:dist.get_world_size()] if dist.get_world_size() < 4 else [1, 70, 0, 79]
        at, o, state, grads = shared(rule, call, options, bounds, do, dstate, lengths, method=method)
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (o, state, {n: g for n, g in grads.items() if n in ("q", "k", "v", "p", "g", "beta")}))
        results = {"o": torch.cat([p[0] for p in parts], 1), "final_state": parts[-1][1]}
        results |= {"d" + n: torch.cat([p[2][n] for p in parts], 1) for n in parts[0][2]}
        if dist.get_rank() == 0:
            named = {n: x for n, x in options.items() if x is not None}
            case = {"op": rule, **call, **named, "do": do, "dfinal_state": dstate}
            report = softdelta.judge(results, case, threads=1)
            found.append((report.verdict, str(report)))
    return found
