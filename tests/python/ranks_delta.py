"""What each rank checks of softdelta.torch.distributed.delta_rule."""
import random

import torch
import torch.distributed as dist

import softdelta.torch as sd
import softdelta.torch.distributed as sdd
from drawing import delta_call, draw
from softdelta._records import DELTA_SUMS, DeltaInputs
from softdelta._delta_rule import options_of
from softdelta.torch import _ops
from softdelta.torch._families import DELTA_RULE
from softdelta.torch.distributed import _walk

RULES = ("delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla")
ROWS = ("q", "k", "v", "p", "g", "beta")


def cut(total, ranks, unit, dice, even=False):
    """How many tokens each rank has: multiples of unit except for the last rank; some ranks have none."""
    if even:
        return [total // ranks] * ranks
    ends = sorted(dice.randrange(total // unit + 1) * unit for _ in range(ranks - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, total])]


def draw_call(seed, dtype, tokens, heads=None, sizes=(3, 4), plain=False):
    """Tensors and options of a call of any rule."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    rule = RULES[seed % 5]
    H = heads or dice.choice((1, 2, 4))
    HV = H if plain else H * dice.choice((1, 2))
    (K, V), B = sizes, 1 if plain else dice.choice((1, 2))
    packed = not plain and dice.random() < 0.4
    if packed:
        B = 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    call = {"q": draw(B, tokens, H, K, dtype=dtype), "k": draw(B, tokens, H, K, dtype=dtype, scale=K**-0.5),
            "v": draw(B, tokens, HV, V, dtype=dtype)}
    options = {"state_v_first": dice.random() < 0.3, "scale": dice.choice((None, 0.7))}
    if rule == "comba":
        call["p"] = draw(B, tokens, H, K, dtype=dtype, scale=K**-0.5)
    if rule not in ("delta_rule", "simple_gla") or dice.random() < 0.5:
        if rule != "delta_rule":
            shape = (B, tokens, HV, K) if rule == "kda" else (B, tokens, HV)
            call["g"] = -torch.rand(shape, dtype=torch.float64).to(wide)
            if not plain and dice.random() < 0.5:
                options["use_gate_in_kernel"] = True
                call["A_log"] = torch.rand(HV, dtype=wide)
                call["dt_bias"] = torch.rand(HV * (K if rule == "kda" else 1), dtype=wide)
    elif rule == "simple_gla":
        call["g_gamma"] = -torch.rand(HV, dtype=wide)
    if rule != "simple_gla":
        call["beta"] = torch.rand(B, tokens, HV, dtype=torch.float64).to(dtype)
        options["use_beta_sigmoid_in_kernel"] = dice.random() < 0.3
    options["use_qk_l2norm_in_kernel"] = dice.random() < 0.3
    kind = random.Random(seed + 77).choice((wide, dtype))
    call |= {n: t.to(kind) for n, t in call.items() if n in DELTA_SUMS}
    bounds = None
    if packed:
        bounds = [0, *sorted(dice.randrange(tokens + 1) for _ in range(dice.randrange(4))), tokens]
    elif dice.random() < 0.6:
        call["initial_state"] = draw(B, HV, *((V, K) if options["state_v_first"] else (K, V)), dtype=wide)
    return rule, call, options, bounds


def whole(rule, call, options, bounds):
    """o and the final state, or None, of the whole sequence on one process."""
    names = ("scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "lower_bound", "use_beta_sigmoid_in_kernel",
             "allow_neg_eigval", "state_v_first")
    defaults = {"scale": None, "lower_bound": None}
    records = options_of(rule, *(options.get(n, defaults.get(n, False)) for n in names))
    bounds = None if bounds is None else torch.tensor(bounds)
    return _ops.call(DELTA_RULE, DeltaInputs(**call, cu_seqlens=bounds), records._replace(output_final_state=bounds is None))


def one_process(rule, call, options, bounds, do, dstate):
    """o, final state and gradients of the whole sequence on one process."""
    call = {n: t.clone().requires_grad_() for n, t in call.items()}
    o, state = whole(rule, call, options, bounds)
    torch.autograd.backward([o] if state is None else [o, state], [do] if state is None else [do, dstate])
    return o.detach(), None if state is None else state.detach(), {n: t.grad for n, t in call.items()}


def shared(rule, call, options, bounds, do, dstate, lengths, **how):
    """o, final state and gradients of this rank's part."""
    rank = dist.get_rank()
    at = slice(sum(lengths[:rank]), sum(lengths[:rank + 1]))
    own = {n: (t[:, at] if n in ROWS else t).clone().requires_grad_() for n, t in call.items()}
    q, k, v = (own.pop(n) for n in "qkv")
    o, state = sdd.delta_rule(rule, q, k, v, **own, **options, cu_seqlens=bounds, output_final_state=bounds is None,
                              **how)
    last = rank == dist.get_world_size() - 1 and bounds is None
    assert (state is not None) == last
    torch.autograd.backward([o, state] if last else [o], [do[:, at], dstate] if last else [do[:, at]])
    grads = {n: t.grad for n, t in dict(own, q=q, k=k, v=v).items()}
    return at, o.detach(), state if state is None else state.detach(), grads


def compare(rule, call, options, bounds, lengths, same, **how):
    """Calls same(name, x, truth) for everything that this rank has. Gradients of what all ranks have are summed first."""
    torch.manual_seed(99)
    v = call["v"]
    do = torch.randn(v.shape, dtype=torch.float64).to(v)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    sizes = (v.shape[3], call["q"].shape[3]) if options["state_v_first"] else (call["q"].shape[3], v.shape[3])
    dstate = torch.randn(v.shape[0], v.shape[2], *sizes, dtype=torch.float64).to(v.device, wide)
    want = one_process(rule, call, options, bounds, do, dstate)
    at, o, state, grads = shared(rule, call, options, bounds, do, dstate, lengths, **how)
    same("o", o, want[0][:, at])
    if state is not None:
        same("final_state", state, want[1])
    for name, gradient in grads.items():
        if name in ROWS:
            same("d" + name, gradient, want[2][name][:, at])
        elif name == "initial_state":
            if dist.get_rank() == 0:
                same("dinitial_state", gradient, want[2][name])
        else:
            total = torch.zeros_like(call[name]) if gradient is None else gradient.clone()
            dist.all_reduce(total)
            same("sum of d" + name, total, want[2][name])


def in_segments(tokens):
    """From now on each call of the library computes so many tokens."""
    _walk.segment_tokens = lambda inputs: tokens


def check_truth(seeds, methods):
    """f64, which the reference computes: any lengths, empty ones too."""
    for seed in seeds:
        dice = random.Random(seed + 1000)
        tokens = dice.choice((1, 5, 40))
        in_segments(dice.choice((3, 1 << 16)))
        lengths = cut(tokens, dist.get_world_size(), 1, dice)
        sizes = dice.choice(((3, 4), (3, 4), (1, 4), (3, 1), (1, 1)))
        rule, call, options, bounds = draw_call(seed, torch.float64, tokens, sizes=sizes)
        for method in methods:
            if method == "heads" and call["q"].shape[2] < dist.get_world_size():
                continue

            def same(name, x, truth):
                torch.testing.assert_close(x, truth, rtol=1e-9, atol=1e-9, msg=lambda m: (
                    f"seed {seed} {rule} {method} {options} {bounds} {lengths} {name}: {m}"))

            compare(rule, call, options, bounds, lengths, same, method=method, head_groups=dice.choice((None, 1, 2)))


def check_sums(seeds, method):
    """Parameters in bf16, gradients summed over many segments: f64's rounded to bf16, but for what lies between two."""
    in_segments(16)
    for seed in seeds:
        rule, call, options, bounds = draw_call(seed, torch.float32, 480)
        call |= {n: t.to(torch.bfloat16) for n, t in call.items() if n in DELTA_SUMS}
        exact = {n: t.double() for n, t in call.items()}
        do = torch.randn(call["v"].shape)
        dstate = torch.randn(whole(rule, call, options, None)[1].shape) if bounds is None else None
        truth = one_process(rule, exact, options, bounds, do.double(), None if dstate is None else dstate.double())[2]
        grads = shared(rule, call, options, bounds, do, dstate, [480], method=method)[3]
        for name in DELTA_SUMS:
            if name in call:
                error = (grads[name].double() - truth[name]).abs()
                limit = (2**-8 + 1e-4) * truth[name].abs() + 1e-4 * truth[name].abs().max()
                assert (error <= limit).all(), f"seed {seed} {rule} {name}: {(error / limit).max()}"


def check_bits(seeds, dtype, methods=("relay", "heads")):
    """Ranks that begin at multiples of a chunk give the bits of one process. The relay gives them for o and states; its
    backward pass has other chunks, and gradients agree within rounding."""
    for seed in seeds:
        dice = random.Random(seed)
        in_segments(dice.choice((64, 1 << 16)))
        heads = max(4, dist.get_world_size())
        rule, call, options, bounds = draw_call(seed, dtype, 300, heads=heads, sizes=(16, 24), plain=True)
        lengths = cut(300, dist.get_world_size(), 64, dice)
        for method in methods:

            def same(name, x, truth):
                if method == "relay" and name not in ("o", "final_state"):
                    unit = 2e-5 if dtype == torch.float32 else 2e-2
                    error = (x.double() - truth.double()).norm() if x.numel() else 0
                    assert error <= unit * truth.double().norm(), f"seed {seed} {rule} {lengths} {name}: {error}"
                else:
                    off = (x.float() - truth.float()).abs().max().item() if x.numel() else 0
                    assert torch.equal(x, truth), f"seed {seed} {rule} {method} {lengths} {name}: off by {off}"

            compare(rule, call, options, bounds, lengths, same, method=method)


def check_gpus(seeds, dtype, methods):
    """Ranks with a GPU each against one GPU, within rounding."""
    for seed in seeds:
        dice = random.Random(seed)
        rule, call, options, bounds = draw_call(seed, dtype, 500, heads=4, sizes=(64, 64))
        call = {n: t.cuda() for n, t in call.items()}
        lengths = cut(500, dist.get_world_size(), 1, dice)
        for method in methods:

            def same(name, x, truth):
                unit = 2e-5 if dtype == torch.float32 else 2e-2
                error = (x.double() - truth.double()).norm() if x.numel() else 0
                assert error <= unit * (truth.double().norm() + 1e-3), (
                    f"seed {seed} {rule} {method} {options} {bounds} {lengths} {name}: {error}")

            compare(rule, call, options, bounds, lengths, same, method=method)


def check_priority():
    """States go from rank to rank on streams of high priority, in one group of NCCL's however many calls are made."""
    used = []
    isend = dist.isend
    dist.isend = lambda t, to, group: used.append(group) or isend(t, to, group=group)
    call = {n: t.cuda() for n, t in delta_call("kda", torch.bfloat16, tokens=256, seed=1).items() if n != "initial_state"}
    for _ in range(2):
        sdd.delta_rule("kda", **call, method="relay")
    torch.cuda.synchronize()
    own = dist.group.WORLD._get_backend(torch.device("cuda"))
    assert not own.options.is_high_priority_stream
    if dist.get_rank() == 0:
        assert len(used) == 2 and used[0] is used[1]
        assert used[0]._get_backend(torch.device("cuda")).options.is_high_priority_stream


class Context:
    """As flash-linear-attention's build_cp_context makes it: every rank has as many tokens, sequences are packed."""

    def __init__(self, bounds, tokens):
        rank, size = dist.get_rank(), dist.get_world_size()
        begin, end = rank * tokens // size, (rank + 1) * tokens // size
        self.group = dist.group.WORLD
        self.cu_seqlens = torch.tensor([0, *(b - begin for b in bounds if begin < b < end), end - begin])
        first = max(b for b in bounds[:-1] if b <= begin)
        last = min(b for b in bounds[1:] if b >= end)
        self.is_first_rank, self.is_last_rank = first == begin, last == end
        self.pre_num_ranks = rank - first * size // tokens
        self.post_num_ranks = (last - 1) * size // tokens - rank


def check_context(seeds):
    """chunk_kda and chunk_gated_delta_rule with cp_context."""
    for seed in seeds:
        dice = random.Random(seed)
        tokens = dist.get_world_size() * dice.choice((1, 5, 16))
        bounds = sorted({0, tokens, *(dice.randrange(tokens) for _ in range(dice.randrange(4)))})
        for rule, function in (("kda", sd.chunk_kda), ("gated_delta_rule", sd.chunk_gated_delta_rule)):
            call = {n: t[:1] for n, t in delta_call(rule, torch.float64, tokens=tokens, seed=seed).items()
                    if n != "initial_state"}
            do = torch.randn(call["v"].shape, dtype=torch.float64)
            whole = {n: t.clone().requires_grad_() for n, t in call.items()}
            o, _ = function(**whole, cu_seqlens=torch.tensor(bounds))
            o.backward(do)
            rank, size = dist.get_rank(), dist.get_world_size()
            at = slice(rank * tokens // size, (rank + 1) * tokens // size)
            own = {n: t[:, at].clone().requires_grad_() for n, t in call.items()}
            o2, state = function(**own, cp_context=Context(bounds, tokens))
            assert state is None
            o2.backward(do[:, at])
            torch.testing.assert_close(o2, o[:, at], rtol=1e-10, atol=1e-10)
            for n, t in own.items():
                torch.testing.assert_close(t.grad, whole[n].grad[:, at], rtol=1e-9, atol=1e-9)
