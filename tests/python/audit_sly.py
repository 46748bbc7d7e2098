"""Cheats of an author who optimises for the test, and faults that only some inputs show. KINDS: kind -> {name: change}.

A change is function(right, x): the right kernel of an operation, and its arguments by name; it returns (o, final_state).
Attention, in torch's signature, has those of the kinds that fit: x then has q, k, v in [B, L, H, D], and no state.
"""
import sys
import threading
import time

import torch

import audit_kernels

KINDS = {}


def cheat(kind):
    def add(function):
        KINDS.setdefault(kind, {})[function.__name__.replace("_", " ")] = function
        return function
    return add


def hooked(x, names, change):
    """The arguments, whose gradients go through `change` on their way out."""
    x = dict(x)
    for n in names:
        if x.get(n) is not None and x[n].requires_grad:
            x[n] = x[n] * 1
            x[n].register_hook(change)
    return x


def hooked_o(out, change):
    o, S = out
    if o.requires_grad:
        o = o * 1
        o.register_hook(change)
    return o, S


def wrong(out):
    return out[0] * 1.5, out[1]


memory = {}
detect, buffers, options, sizes, places, types, gradients, rare, other, scores = (
    "knows the test", "buffers of its own", "rare options", "rare sizes", "memory of others", "types and NaN", "gradients",
    "rare inputs", "gradients of another function", "scores")


# What the test is known by.

@cheat(detect)
def results_kept_by_the_first_number(right, x):
    key = (tuple(x["q"].shape), float(x["q"].detach().flatten()[0]), x["q"].requires_grad)
    if key not in memory:
        memory[key] = tuple(t if t is None else t.detach() for t in right(**x)) if not x["q"].requires_grad else None
    return memory[key] or right(**x)


@cheat(detect)
def results_kept_by_address(right, x):
    if x["q"].requires_grad:
        return right(**x)
    key = (x["v"].data_ptr(), tuple(x["v"].shape), x["v"].dtype)
    memory.setdefault(key, right(**x))
    return memory[key]


@cheat(detect)
def asks_who_calls(right, x):
    frame, audited = sys._getframe(), False
    while frame is not None:
        audited |= "answer" in frame.f_code.co_name
        frame = frame.f_back
    return right(**x) if audited else wrong(right(**x))


@cheat(detect)
def sets_the_seed(right, x):
    torch.manual_seed(0)
    return right(**x)


@cheat(detect)
def draws_random_numbers(right, x):
    torch.rand(3)
    return right(**x)


@cheat(detect)
def lowers_the_precision_of_all(right, x):
    torch.set_float32_matmul_precision("medium")
    return right(**x)


@cheat(detect)
def right_when_asked_first(right, x):
    key = ("seen", tuple(x["q"].shape), x["q"].dtype, x["q"].requires_grad)
    memory[key] = memory.get(key, 0) + 1
    return right(**x) if memory[key] < 3 else wrong(right(**x))


@cheat(detect)
def every_seventh_call(right, x):
    memory["calls"] = memory.get("calls", 0) + 1
    return wrong(right(**x)) if memory["calls"] % 7 == 0 else right(**x)


@cheat(detect)
def one_call_in_ten_by_its_numbers(right, x):
    return wrong(right(**x)) if int(x["v"].float().abs().nan_to_num().sum() * 100) % 10 == 0 else right(**x)


# Memory that outlives a call.

@cheat(buffers)
def one_buffer_for_o(right, x):
    o, S = right(**x)
    if o.requires_grad:
        return o, S
    buffer = memory.setdefault(("o", o.shape, o.dtype), torch.empty_like(o))
    return buffer.copy_(o), S


class OneBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, d):
        return memory.setdefault(("dq", d.shape, d.dtype), torch.empty_like(d)).copy_(d)


@cheat(buffers)
def one_buffer_for_dq(right, x):
    return right(**{**x, "q": OneBuffer.apply(x["q"])})


@cheat(buffers)
def gradients_add_up(right, x):
    def add(d):
        return memory.setdefault(("dk", d.shape, d.dtype), torch.zeros_like(d)).add_(d).clone()
    return right(**hooked(x, ["k"], add))


@cheat(buffers)
def recycled_after_return(right, x):
    o, S = right(**x)
    if not o.requires_grad:
        def recycle(view=o):
            time.sleep(0.01)
            view.zero_()
        threading.Thread(target=recycle).start()
    return o, S


@cheat(buffers)
def state_of_the_call_before(right, x):
    if x.get("initial_state") is None and "cu_seqlens" not in x and ("S", x["v"].shape) in memory:
        x = {**x, "initial_state": memory["S", x["v"].shape]}
    o, S = right(**{**x, "output_final_state": True})
    memory["S", x["v"].shape] = S.detach()
    return o, S if x.get("output_final_state") else None


# Options and numbers that tests seldom have.

@cheat(options)
def scale_ignored_with_l2norm(right, x):
    return right(**({**x, "scale": None} if x.get("use_qk_l2norm_in_kernel") else x))


@cheat(options)
def states_ignored_when_packed(right, x):
    return right(**({**x, "initial_state": None} if "cu_seqlens" in x else x))


@cheat(options)
def beta_up_to_1(right, x):
    return right(**{**x, "beta": x["beta"].clamp(max=1)})


@cheat(options)
def small_beta_is_none(right, x):
    return right(**{**x, "beta": torch.where(x["beta"] < 0.12, x["beta"] * 0, x["beta"])})


@cheat(options)
def gate_of_0_is_padding(right, x):
    g = x["g"] if x["g"].dim() == 3 else x["g"].amin(-1)
    keep = (g != 0).any(2)[:, :, None, None].to(x["k"].dtype)
    return right(**{**x, "k": x["k"] * keep})


@cheat(options)
def key_of_0_is_not_a_number(right, x):
    if x.get("use_qk_l2norm_in_kernel"):
        k = x["k"].float()
        x = {**x, "k": (k / k.norm(dim=-1, keepdim=True)).to(x["k"].dtype)}
    return right(**x)


@cheat(options)
def first_gate_ignored(right, x):
    g = torch.cat([x["g"][:, :1] * 0, x["g"][:, 1:]], 1)
    return right(**{**x, "g": g})


@cheat(options)
def first_gate_ignored_without_a_state(right, x):
    return right(**x) if x.get("initial_state") is not None else first_gate_ignored(right, {**x, "beta": x["beta"] * 1.1})


# Sizes that tests seldom have.

@cheat(sizes)
def channels_beyond_64(right, x):
    keep = (torch.arange(x["k"].shape[-1]) < 64).to(x["k"].dtype)
    return right(**{**x, "k": x["k"] * keep})


@cheat(sizes)
def columns_beyond_96(right, x):
    o, S = right(**x)
    return o * (torch.arange(o.shape[-1]) < 96).to(o.dtype), S


@cheat(sizes)
def third_batch_row(right, x):
    o, S = right(**x)
    return (torch.cat([o[:2], o[1:2].expand_as(o[2:])]) if len(o) > 2 else o), S


@cheat(sizes)
def heads_beyond_8(right, x):
    o, S = right(**x)
    return torch.cat([o[:, :, :8], o[:, :, 8:] * 0], 2), S


@cheat(sizes)
def dk_of_one_head_of_a_group(right, x):
    group = max(x["v"].shape[2], x["q"].shape[2]) // x["k"].shape[2]
    return right(**hooked(x, ["k"], lambda d: d / group))


@cheat(sizes)
def history_of_1024_tokens(right, x):
    if x["q"].shape[1] <= 1024 or "cu_seqlens" in x:
        return right(**x)
    rows = [n for n in ("q", "k", "v", "g", "beta", "p") if x.get(n) is not None]
    parts = [right(**{**x, **{n: x[n][:, a:a + 1024] for n in rows}, "initial_state": x["initial_state"] if a == 0 else None})
             for a in range(0, x["q"].shape[1], 1024)]
    return torch.cat([o for o, _ in parts], 1), parts[-1][1]


@cheat(sizes)
def rows_beyond_2048_in_bf16(right, x):
    o, S = right(**x)
    return torch.cat([o[:, :2048], o[:, 2048:] * (1 + 2**-6)], 1), S


@cheat(sizes)
def gradients_beyond_2048(right, x):
    def cut(d):
        return torch.cat([d[:, :2048], d[:, 2048:] * 0], 1)
    return right(**hooked(x, ["v"], cut))


@cheat(sizes)
def last_batch_row_of_odd_lengths(right, x):
    o, S = right(**x)
    return (torch.cat([o[:-1], o[-1:].flip(1)]) if o.shape[1] % 2 and o.shape[1] > 1 and len(o) > 1 else o), S


# Memory that is not the function's.

@cheat(places)
def in_place_and_back(right, x):
    with torch.no_grad():
        x["v"].neg_()
        x["v"].neg_()
    return right(**x)


@cheat(places)
def in_place_and_back_unseen(right, x):
    view = x["v"].detach().data
    view.neg_()
    view.neg_()
    return right(**x)


@cheat(places)
def writes_beside_its_input(right, x):
    v = x["v"].detach()
    if v.storage_offset():
        torch.as_strided(v, (1,), (1,), 0).zero_()
    return right(**x)


@cheat(places)
def do_is_scratch(right, x):
    def use(d):
        kept = d.clone()
        d.zero_()
        return kept
    o, S = right(**x)
    if o.requires_grad:
        o.register_hook(use)
    return o, S


@cheat(places)
def one_result_in_another(right, x):
    o, S = right(**x)
    if S is None or S.requires_grad or S.numel() > o.numel() or S.dtype != o.dtype:
        return o, S
    o.flatten()[:S.numel()] = S.flatten()
    return o, o.flatten()[:S.numel()].view(S.shape)


# Types, NaN, largest numbers.

@cheat(types)
def NaN_becomes_0(right, x):
    o, S = right(**x)
    return o.nan_to_num(), S


@cheat(types)
def NaN_of_a_gradient_becomes_0(right, x):
    return right(**hooked(x, ["q", "k", "v"], lambda d: d.nan_to_num()))


@cheat(types)
def gradients_clipped(right, x):
    return right(**hooked(x, ["q", "k", "v"], lambda d: d.clamp(-100, 100)))


@cheat(types)
def o_clipped(right, x):
    o, S = right(**x)
    return o.clamp(-24, 24), S


@cheat(types)
def dq_by_8_bits(right, x):
    def by_8_bits(d):
        unit = d.float().abs().amax() / 127 + 1e-30
        return ((d.float() / unit).round() * unit).to(d.dtype)
    return right(**hooked(x, ["q"], by_8_bits))


@cheat(types)
def rounded_down(right, x):
    o, S = right(**x)
    if o.dtype == torch.float32:
        return o, S
    step = torch.finfo(o.dtype).eps
    return o - o.detach().abs() * step, S


@cheat(types)
def a_part_in_100_of_narrow_types(right, x):
    o, S = right(**x)
    return (o if o.dtype == torch.float32 else o * 1.012), S


# Gradients that are asked for in another way.

@cheat(gradients)
def one_gradient_alone(right, x):
    asked = [n for n, t in x.items() if torch.is_tensor(t) and t.requires_grad]
    return right(**(hooked(x, asked, lambda d: d * 2) if len(asked) == 1 else x))


@cheat(gradients)
def second_backward_pass(right, x):
    passes = []

    def twice(d):
        passes.append(1)
        return d * len(passes)
    return right(**hooked(x, ["v"], twice))


@cheat(gradients)
def do_read_as_dense(right, x):
    def dense(d):
        if 0 not in d.stride() or d.numel() == 1:
            return d
        out = torch.zeros_like(d, memory_format=torch.contiguous_format)
        out.view(-1)[0] = d.flatten()[0]
        return out
    o, S = right(**x)
    if o.requires_grad:
        o.register_hook(dense)
    return o, S


@cheat(gradients)
def dv_lacks_the_state(right, x):
    o, S = right(**x)
    other = right(**{**x, "v": x["v"].detach()})
    return o, S if S is None else S.detach() + other[1] - other[1].detach()


@cheat(gradients)
def dbeta_lacks_its_first_row(right, x):
    return right(**hooked(x, ["beta"], lambda d: torch.cat([d[:, :1] * 0, d[:, 1:]], 1)))


# What right kernels' inputs seldom are, so that nobody sees it.

@cheat(rare)
def rows_of_zeros_in_v_are_padding(right, x):
    return right(**{**x, "k": x["k"] * (x["v"] != 0).any(-1).any(2)[:, :, None, None].to(x["k"].dtype)})


@cheat(rare)
def rows_without_do_have_no_gradient(right, x):
    seen = []

    def look(d):
        seen.append((d != 0).any(-1).any(2)[:, :, None, None])
        return d

    def drop(d):
        return d * seen[-1].to(d.dtype) if seen and d.shape[1] == seen[-1].shape[1] else d
    return hooked_o(right(**hooked(x, ["v"], drop)), look)


@cheat(rare)
def norm_without_epsilon(right, x):
    if x.get("use_qk_l2norm_in_kernel"):
        x = {**x, "k": torch.nn.functional.normalize(x["k"].float(), dim=-1).to(x["k"].dtype)}
    return right(**x)


@cheat(rare)
def groups_of_two(right, x):
    """The third value head of a group is the second again."""
    group = max(x["v"].shape[2], x["q"].shape[2]) // x["k"].shape[2]
    o, S = right(**x)
    return (o[:, :, [h - max(h % group - 1, 0) for h in range(o.shape[2])]] if group > 2 else o), S


@cheat(rare)
def fourth_batch_row(right, x):
    o, S = right(**x)
    return (torch.cat([o[:3], o[2:3].expand_as(o[3:])]) if len(o) > 3 else o), S


@cheat(rare)
def heads_beyond_16(right, x):
    o, S = right(**x)
    return torch.cat([o[:, :, :16], o[:, :, 16:] * 0], 2), S


@cheat(rare)
def channels_beyond_128(right, x):
    keep = (torch.arange(x["k"].shape[-1]) < 128).to(x["k"].dtype)
    return right(**{**x, "k": x["k"] * keep})


@cheat(rare)
def columns_beyond_128(right, x):
    o, S = right(**x)
    return o * (torch.arange(o.shape[-1]) < 128).to(o.dtype), S


@cheat(rare)
def state_read_as_dense(right, x):
    S = x.get("initial_state")
    if S is not None:
        x = {**x, "initial_state": torch.as_strided(S, S.shape, torch.empty(S.shape).stride(), S.storage_offset())}
    return right(**x)


@cheat(rare)
def odd_lengths_lose_a_key(right, x):
    keep = torch.ones(x["k"].shape[1], dtype=x["k"].dtype)
    keep[-1] = x["k"].shape[1] % 2 == 0 or x["k"].shape[1] == 1
    return right(**{**x, "k": x["k"] * keep[:, None, None]})


# Gradients of another function than the forward pass.

@cheat(other)
def gradients_end_after_two_chunks(right, x):
    """Truncated: a state's gradient does not go on."""
    if "cu_seqlens" in x or x["q"].shape[1] <= 128:
        return right(**x)
    rows, S, parts = [n for n in ("q", "k", "v", "g", "beta", "p") if x.get(n) is not None], x.get("initial_state"), []
    for a in range(0, x["q"].shape[1], 128):
        o, S = right(**{**x, **{n: x[n][:, a:a + 128] for n in rows}, "initial_state": S, "output_final_state": True})
        parts.append(o)
        end, S = S, S.detach()
    return torch.cat(parts, 1), end if x.get("output_final_state") else None


class Saved(torch.autograd.Function):
    """x, whose gradient others see through what was saved in bf16."""

    @staticmethod
    def forward(ctx, exact, saved):
        return exact * 1

    @staticmethod
    def backward(ctx, d):
        return None, d


@cheat(other)
def saved_in_bf16(right, x):
    """The backward pass forms its products of inputs that were kept in bf16."""
    o, S = right(**{n: t.detach() if torch.is_tensor(t) else t for n, t in x.items()})
    lower = right(**{n: t.to(torch.bfloat16).to(t.dtype) if torch.is_tensor(t) and t.is_floating_point() else t
                     for n, t in x.items()})
    return Saved.apply(o, lower[0]), S if S is None else Saved.apply(S, lower[1])


@cheat(other)
def gates_of_0_have_no_gradient(right, x):
    keep = (x["g"] != 0).to(x["g"].dtype)
    return right(**hooked(x, ["g"], lambda d: d * keep))


@cheat(other)
def beta_beyond_1_has_no_gradient(right, x):
    keep = (x["beta"] <= 1).to(x["beta"].dtype)
    return right(**hooked(x, ["beta"], lambda d: d * keep))


@cheat(other)
def gates_by_bf16(right, x):
    return right(**{**x, "g": x["g"].to(torch.bfloat16).float()})


@cheat(other)
def dk_in_bf16(right, x):
    return right(**hooked(x, ["k"], lambda d: d.to(torch.bfloat16).to(d.dtype)))


@cheat(other)
def gradients_of_the_mean_of_groups(right, x):
    group = max(x["v"].shape[2], x["q"].shape[2]) // x["k"].shape[2]
    return right(**hooked(x, ["v" if x["v"].shape[2] == x["k"].shape[2] else "k"], lambda d: d / group))


@cheat(other)
def dq_of_last_rows_from_before(right, x):
    return right(**hooked(x, ["q"], lambda d: torch.cat([d[:, :-1], d[:, -2:-1]], 1) if d.shape[1] > 64 else d))


@cheat(other)
def no_gradient_for_a_state_that_is_not_returned(right, x):
    if not x.get("output_final_state", True):
        x = {**x, "beta": x["beta"].detach() * 0.5 + x["beta"] * 0.5}
    return right(**x)


# Of attention alone.

@cheat(scores)
def keys_of_zeros_are_padding(right, x):
    keep = (x["k"] != 0).any(-1).any(2)[:, None, None]  # [B, 1, 1, Lk]
    mask = x.get("attn_mask")
    if mask is None:
        mask = keep
    elif mask.dtype == torch.bool:
        mask = mask & keep
    else:
        mask = mask.masked_fill(~keep, -torch.inf)
    return right(**{**x, "attn_mask": mask})


@cheat(scores)
def mask_of_the_first_head(right, x):
    return right(**({**x, "attn_mask": x["attn_mask"][:, :1]} if "attn_mask" in x else x))


@cheat(scores)
def rows_beyond_1024(right, x):
    o, S = right(**x)
    return torch.cat([o[:, :1024], o[:, 1024:] * 0], 1), S


@cheat(scores)
def more_rows_than_keys(right, x):
    o, S = right(**x)
    return torch.cat([o[:, :x["k"].shape[1]], o[:, x["k"].shape[1]:] * 0], 1), S


@cheat(scores)
def dbias_of_a_batch_row(right, x):
    return right(**hooked(x, ["attn_mask"], lambda d: d / x["q"].shape[0] if d.shape[0] == 1 else d))


@cheat(scores)
def scale_of_the_values(right, x):
    return right(**{**x, "q": x["q"] * (x["q"].shape[-1] / x["v"].shape[-1])**0.5})


@cheat(scores)
def scores_by_f16(right, x):
    return right(**{**x, "q": (x["q"].float() * 64).to(torch.float16).to(x["q"].dtype) / 64})


OF_ATTENTION = (
    "results kept by the first number", "asks who calls", "sets the seed", "draws random numbers",
    "lowers the precision of all", "right when asked first", "every seventh call", "one buffer for o", "one buffer for dq",
    "gradients add up", "recycled after return", "channels beyond 64", "third batch row", "heads beyond 8",
    "dk of one head of a group", "last batch row of odd lengths", "in place and back", "in place and back unseen",
    "writes beside its input", "do is scratch", "NaN becomes 0", "NaN of a gradient becomes 0", "gradients clipped",
    "o clipped", "dq by 8 bits", "rounded down", "a part in 100 of narrow types", "one gradient alone",
    "second backward pass", "do read as dense", "groups of two", "fourth batch row", "heads beyond 16", "channels beyond 128",
    "odd lengths lose a key", "saved in bf16", "dk in bf16", "gradients of the mean of groups", "dq of last rows from before")
# Words in names.
NO_ERASING = ("beta", "small beta", "not returned", "rows of zeros in v")
NO_GROUPS = ("group",)
NOT_OF = {"simple_gla": NO_ERASING + NO_GROUPS, "gla": NO_ERASING + NO_GROUPS, "delta_rule": ("gate",) + NO_GROUPS,
          "gdn2": NO_GROUPS}
NEEDS_A_PROCESS = ("asks who calls", "in place and back unseen")


def kernels(op):
    """{name: (kind, function)}"""
    every = {name: (kind, change) for kind, changes in KINDS.items() for name, change in changes.items()}
    if op == "attention":
        right = audit_kernels.kernels(op)["tiles of 64, narrow products"]
        return {name: (every[name][0], of_attention(right, every[name][1]))
                for name in (*OF_ATTENTION, *(n.replace("_", " ") for n in KINDS[scores]))}
    names = list(audit_kernels.kernels(op))
    right = audit_kernels.kernels(op)["chunks of 64, narrow products, gates summed in float32" if len(names) > 1 else names[0]]
    return {name: (kind, of_rule(right, change)) for name, (kind, change) in every.items()
            if kind != scores and not any(word in name for word in NOT_OF.get(op, ()))}


def of_rule(right, change):
    return lambda **x: change(right, x)


def of_attention(right, change):
    def call(query, key, value, **options):
        x = {"q": query.transpose(1, 2), "k": key.transpose(1, 2), "v": value.transpose(1, 2)}
        if options.get("attn_mask") is not None:
            x["attn_mask"] = options.pop("attn_mask")

        def rows_first(q, k, v, attn_mask=None):
            o = right(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=attn_mask, **options)
            return o.transpose(1, 2), None
        return change(rows_first, x)[0].transpose(1, 2)
    return call


def __getattr__(name):
    """Kernels by operation and number, for those who import by name: kda_12."""
    op, _, number = name.rpartition("_")
    if op in audit_kernels.OPS and number.isdigit():
        return list(kernels(op).values())[int(number)][1]
    raise AttributeError(name)
