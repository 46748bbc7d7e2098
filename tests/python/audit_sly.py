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
detect, buffers, options, sizes, places, types, gradients, rare, other, usual, scores, flash, varlen = (
    "knows the test", "buffers of its own", "rare options", "rare sizes", "memory of others", "types and NaN", "gradients",
    "rare inputs", "gradients of another function", "what models do", "scores", "options of flash-attention", "packed attention")


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
def asks_who_calls_by_an_exception(right, x):
    try:
        raise ValueError
    except ValueError as e:
        frame, audited = e.__traceback__.tb_frame, False
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
    return right(**x) if x.get("initial_state") is not None else first_gate_ignored(right, {**x, "v": x["v"] * 1.1})


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


# What models do all the time, and tests of odd numbers never.

@cheat(usual)
def head_size_64(right, x):
    return wrong(right(**x)) if x["q"].shape[-1] == 64 else right(**x)


@cheat(usual)
def head_size_128(right, x):
    return wrong(right(**x)) if x["q"].shape[-1] == 128 else right(**x)


@cheat(usual)
def as_many_value_heads_as_key_heads(right, x):
    return wrong(right(**x)) if x["q"].shape[2] == x["v"].shape[2] else right(**x)


@cheat(usual)
def lengths_that_are_multiples_of_128(right, x):
    o, S = right(**x)
    return (torch.cat([o[:, :-1], o[:, -2:-1]], 1) if o.shape[1] % 128 == 0 else o), S


@cheat(usual)
def state_out_without_a_state_in(right, x):
    o, S = right(**x)
    return o, S if S is None or x.get("initial_state") is not None else S + 0.1


@cheat(usual)
def state_in_without_a_state_out(right, x):
    return right(**(x if x.get("output_final_state", True) else {**x, "initial_state": None}))


@cheat(usual)
def state_has_a_gradient_only_if_the_last_one_has(right, x):
    seen = []
    o, S = right(**hooked(x, ["initial_state"], lambda d: d * bool(seen)))
    if S is not None and S.requires_grad:
        S = S * 1
        S.register_hook(lambda d: seen.append(1))
    return o, S


@cheat(usual)
def scale_of_the_first_call_of_a_shape(right, x):
    key = ("scale", *x["q"].shape, x["q"].dtype)
    return right(**{**x, "scale": memory.setdefault(key, x.get("scale"))})


@cheat(usual)
def norms_of_the_first_call_of_a_shape(right, x):
    key = ("norm", *x["q"].shape, x["q"].dtype)
    on = bool(x.get("use_qk_l2norm_in_kernel"))
    return right(**({**x, "use_qk_l2norm_in_kernel": memory.setdefault(key, on)} if on != memory.get(key, on) or on else x))


@cheat(usual)
def scale_beyond_1_is_1(right, x):
    return right(**({**x, "scale": 0.99} if (x.get("scale") or 0) >= 1 else x))


@cheat(usual)
def one_packed_sequence(right, x):
    o, S = right(**x)
    return (o, S * 0) if "cu_seqlens" in x and len(x["cu_seqlens"]) == 2 and S is not None else (o, S)


@cheat(usual)
def more_than_16_packed_sequences(right, x):
    o, S = right(**x)
    return (o, torch.cat([S[:16], S[:1].expand_as(S[16:])])) if S is not None and "cu_seqlens" in x and len(S) > 16 else (o, S)


@cheat(usual)
def first_call_tunes(right, x):
    """Tries two forms on the caller's memory and leaves what the wrong one wrote in a gradient."""
    key = ("tuned", *x["q"].shape, x["q"].dtype, x["q"].requires_grad)
    if key not in memory:
        memory[key] = True
        return right(**hooked(x, ["v"], lambda d: d * 2))
    return right(**x)


@cheat(usual)
def gradients_by_finite_steps(right, x):
    """dq as if the rows were rounded to f16 and scaled down first: small gradients are lost."""
    return right(**hooked(x, ["q"], lambda d: (d.float() * 1e-5).to(torch.float16).to(d.dtype) * 1e5))


@cheat(usual)
def o_is_added_in_its_type(right, x):
    """Two halves of the value columns' sum, each rounded: an error of one more rounding, whose mean is not 0."""
    o, S = right(**x)
    if o.dtype == torch.float32:
        return o, S
    part = (o.detach().float() * 0.37).to(o.dtype)
    return o - o.detach() + (part.float() + (o.detach().float() * 0.62).to(o.dtype).float()).to(o.dtype), S


@cheat(usual)
def last_column_of_keys_lost_where_wide(right, x):
    keep = torch.ones(x["k"].shape[-1], dtype=x["k"].dtype)
    keep[-1] = x["k"].shape[-1] < 64
    return right(**{**x, "k": x["k"] * keep})


@cheat(usual)
def packed_without_a_state_is_one_sequence(right, x):
    return right(**({**x, "cu_seqlens": x["cu_seqlens"][[0, -1]]} if "cu_seqlens" in x and x.get("initial_state") is None and
                    not x.get("output_final_state") else x))


@cheat(usual)
def packed_and_forward_alone(right, x):
    """The last sequence of a prompt batch."""
    o, S = right(**x)
    if "cu_seqlens" not in x or o.requires_grad:
        return o, S
    return torch.cat([o[:, :int(x["cu_seqlens"][-2])], o[:, int(x["cu_seqlens"][-2]):] * 1.1], 1), S


@cheat(usual)
def norms_of_large_rows(right, x):
    return right(**({**x, "k": x["k"].clamp(-12, 12)} if x.get("use_qk_l2norm_in_kernel") else x))


@cheat(usual)
def tenth_batch_row(right, x):
    o, S = right(**x)
    return (torch.cat([o[:9], o[8:9].expand_as(o[9:])]) if len(o) > 9 else o), S


# Of attention alone.

@cheat(scores)
def causal_history_of_256_keys(right, x):
    Lq, Lk = x["q"].shape[1], x["k"].shape[1]
    if not x.get("is_causal") or Lk <= 256:
        return right(**x)
    far = torch.arange(Lq)[:, None] - torch.arange(Lk)
    return right(**{**x, "is_causal": False, "attn_mask": ((far >= 0) & (far < 256))[None, None]})


@cheat(scores)
def one_row_of_many_keys(right, x):
    """Decoding by splits: the last one is not merged."""
    if x["q"].shape[1] > 1 or x["k"].shape[1] <= 512 or "attn_mask" in x:
        return right(**x)
    return right(**{**x, **{n: x[n][:, :512] for n in ("k", "v")}})


@cheat(scores)
def dbias_of_one_for_all(right, x):
    return right(**hooked(x, ["attn_mask"], lambda d: d / 2 if d.shape[0] == d.shape[1] == 1 else d))


@cheat(scores)
def last_tile_of_dbias(right, x):
    n = x["k"].shape[1] // 64 * 64
    return right(**hooked(x, ["attn_mask"], lambda d: torch.cat([d[..., :n], d[..., n:] * 0], 3) if n else d))


@cheat(scores)
def one_causal_row_sees_all(right, x):
    return right(**({**x, "is_causal": False} if x["q"].shape[1] == 1 else x))


@cheat(scores)
def row_of_a_mask_shared_wrongly(right, x):
    """A mask of one row for all, [B, 1, 1, Lk]: the first batch row's."""
    m = x.get("attn_mask")
    return right(**({**x, "attn_mask": m[:1]} if m is not None and m.shape[2] == 1 else x))


@cheat(scores)
def dbias_of_a_shared_row(right, x):
    rows = x["q"].shape[1]
    return right(**hooked(x, ["attn_mask"], lambda d: d / rows if d.shape[2] == 1 else d))


@cheat(scores)
def mask_read_as_dense(right, x):
    m = x.get("attn_mask")
    if m is not None and not m.is_contiguous():
        some = torch.as_strided(m, (m.untyped_storage().nbytes() // m.element_size(),), (1,), 0)
        x = {**x, "attn_mask": some.repeat(-(-m.numel() // some.numel()))[:m.numel()].view(m.shape)}
    return right(**x)


@cheat(scores)
def minus_infinity_in_a_bias(right, x):
    m = x.get("attn_mask")
    return right(**({**x, "attn_mask": m.clamp(min=-10)} if m is not None and m.dtype != torch.bool and bool(
        torch.isinf(m).any()) else x))


@cheat(scores)
def fewer_value_columns_than_keys(right, x):
    return wrong(right(**x)) if x["v"].shape[-1] < x["q"].shape[-1] else right(**x)


@cheat(flash)
def softcap_ignored_where_causal(right, x):
    return right(**({**x, "softcap": 0.0} if x.get("causal") else x))


@cheat(flash)
def softcap_without_its_derivative(right, x):
    if not x.get("softcap"):
        return right(**x)
    return right(**hooked(x, ["q", "k"], lambda d: d * 1.1))


@cheat(flash)
def window_to_the_right_ignored(right, x):
    left, after = x.get("window_size", (-1, -1))
    return right(**({**x, "window_size": (left, -1)} if after > 0 else x))


@cheat(flash)
def window_from_the_top(right, x):
    """Windows follow i instead of i + Lk − Lq."""
    left, after = x.get("window_size", (-1, -1))
    shift = x["k"].shape[1] - x["q"].shape[1]
    return right(**({**x, "window_size": (left + shift, after)} if left >= 0 and shift > 0 else x))


@cheat(flash)
def window_in_tiles(right, x):
    """Keys of a tile of 16 that a window only begins in are seen whole."""
    left, after = x.get("window_size", (-1, -1))
    return right(**({**x, "window_size": (-(-left // 16) * 16, after)} if left >= 0 else x))


@cheat(flash)
def causal_where_lengths_differ(right, x):
    return right(**({**x, "causal": False} if x["q"].shape[1] > x["k"].shape[1] else x))

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


@cheat(flash)
def sink_counted_as_a_value(right, x):
    o, lse = right(**x)
    return (o if x.get("sinks") is None else o * 1.02), lse


@cheat(flash)
def sink_in_base_2(right, x):
    return right(**({**x, "sinks": x["sinks"] * 0.6931} if x.get("sinks") is not None else x))


@cheat(flash)
def sink_without_gradient_of_a_head(right, x):
    return right(**hooked(x, ["sinks"], lambda d: torch.cat([d[:1] * 0, d[1:]])))


@cheat(flash)
def lse_without_the_sink(right, x):
    o, lse = right(**x)
    return o, lse if x.get("sinks") is None else right(**{**x, "sinks": None})[1]


@cheat(flash)
def lse_in_base_2(right, x):
    o, lse = right(**x)
    return o, lse * 1.4427


@cheat(flash)
def softcap_where_causal_alone(right, x):
    return right(**(x if x.get("causal") else {**x, "softcap": 0.0}))


@cheat(flash)
def windows_of_one_side(right, x):
    left, after = x.get("window_size", (-1, -1))
    return right(**({**x, "window_size": (-1, -1)} if (left < 0) != (after < 0) and not x.get("causal") else x))


@cheat(flash)
def sink_beside_a_window(right, x):
    alone = x.get("sinks") is None or max(x.get("window_size", (-1,))) < 0
    return right(**(x if alone else {**x, "sinks": 0 * x["sinks"] - 1e4}))


@cheat(flash)
def running_maximum_from_0(right, x):
    """Exponentials of rows whose scores are all far below 0 vanish."""
    o, lse = right(**x)
    dead = (lse <= -88).mT[..., None]
    return torch.where(~dead, o, torch.zeros_like(o)), lse


@cheat(flash)
def windows_and_softcap(right, x):
    return right(**({**x, "softcap": 0.0} if max(x.get("window_size", (-1,))) >= 0 else x))


@cheat(flash)
def causal_keys_beyond_256(right, x):
    left, after = x.get("window_size", (-1, -1))
    return right(**({**x, "window_size": (255, after)} if x.get("causal") and left < 0 else x))


@cheat(varlen)
def more_than_8_sequences(right, x):
    o, lse = right(**x)
    a = int(x["cu_seqlens_q"][:9][-1])
    return torch.cat([o[:a], o[a:] * 0.9]), lse


@cheat(varlen)
def rows_without_keys_see_the_sequence_before(right, x):
    o, lse = right(**x)
    dead = (x["cu_seqlens_k"].diff() == 0).repeat_interleave(x["cu_seqlens_q"].diff().long())
    return torch.where(dead[:, None, None], o.roll(1, 0), o), lse


@cheat(varlen)
def lse_by_rows(right, x):
    """[ΣL, H] as if it were [H, ΣL]."""
    o, lse = right(**x)
    return o, lse.mT.reshape(lse.shape)


@cheat(varlen)
def keys_follow_the_bounds_of_queries(right, x):
    same = x["cu_seqlens_q"] if int(x["cu_seqlens_q"][-1]) <= len(x["k"]) else x["cu_seqlens_k"]
    return right(**{**x, "cu_seqlens_k": same})


@cheat(varlen)
def one_key_of_the_sequence_before(right, x):
    bounds = x["cu_seqlens_k"].clone()
    bounds[1:-1] -= 1
    return right(**{**x, "cu_seqlens_k": bounds})


@cheat(varlen)
def dk_of_the_last_sequence(right, x):
    a = int(x["cu_seqlens_k"][-2])
    return right(**hooked(x, ["k"], lambda d: torch.cat([d[:a], d[a:] * 0]) if len(x["cu_seqlens_k"]) > 3 else d))


@cheat(varlen)
def sequences_of_one_query(right, x):
    """As of decoding: the window is not looked at."""
    o, lse = right(**x)
    other = right(**{**x, "window_size": (-1, -1), "causal": False})[0]
    one = (x["cu_seqlens_q"].diff() == 1).repeat_interleave(x["cu_seqlens_q"].diff().long())
    return torch.where(one[:, None, None], other, o), lse


@cheat(varlen)
def tiles_of_the_longest_sequence_only(right, x):
    """A grid of ⌊max / 16⌋ tiles: rows of a tail are never written."""
    o, lse = right(**x)
    a = x["cu_seqlens_q"].tolist()
    n = max(j - i for i, j in zip(a, a[1:])) // 16 * 16
    keep = torch.cat([torch.arange(j - i) < max(n, 1) for i, j in zip(a, a[1:])])
    return o * keep[:, None, None], lse


@cheat(varlen)
def empty_sequences_shift_the_rest(right, x):
    o, lse = right(**x)
    return (o.roll(1, 0) if bool((x["cu_seqlens_q"].diff() == 0).any()) else o), lse


OF_ATTENTION = (
    "results kept by the first number", "asks who calls", "sets the seed", "draws random numbers",
    "lowers the precision of all", "right when asked first", "every seventh call", "one buffer for o", "one buffer for dq",
    "gradients add up", "recycled after return", "channels beyond 64", "third batch row", "heads beyond 8",
    "dk of one head of a group", "last batch row of odd lengths", "in place and back", "in place and back unseen",
    "writes beside its input", "do is scratch", "NaN becomes 0", "NaN of a gradient becomes 0", "gradients clipped",
    "o clipped", "dq by 8 bits", "rounded down", "a part in 100 of narrow types", "one gradient alone",
    "second backward pass", "do read as dense", "groups of two", "fourth batch row", "heads beyond 16", "channels beyond 128",
    "odd lengths lose a key", "saved in bf16", "dk in bf16", "gradients of the mean of groups", "dq of last rows from before",
    "head size 64", "head size 128", "as many value heads as key heads", "lengths that are multiples of 128",
    "scale of the first call of a shape", "gradients by finite steps", "o is added in its type",
    "last column of keys lost where wide")
# Words in names.
NO_ERASING = ("beta", "small beta", "not returned", "rows of zeros in v")
NO_GROUPS = ("group",)
NO_FLAGS = ("norm", "scale ignored")
# Cheats with an operand's memory or first call, which a model's signature makes anew.
OWN_MEMORY = ("address", "one buffer", "in place", "writes beside", "scratch", "one result in", "read as dense", "asks who", "by its numbers",
              "state given", "key of 0", "rows of zeros", "as many value heads", "of a shape", "not returned", "without a state out")
NOT_OF = {**dict.fromkeys(("simple_gla", "gla"), NO_ERASING + NO_GROUPS + NO_FLAGS + ("key of 0",)), "delta_rule": ("gate",) + NO_GROUPS,
          "gdn2": NO_GROUPS, "dplr": (*NO_ERASING, *NO_GROUPS, *NO_FLAGS, *OWN_MEMORY, "gate of 0"),
          "model:gdn2": (*NO_GROUPS, *NO_FLAGS, *OWN_MEMORY, "beta"),
          "model:mamba2": (*NO_ERASING, *NO_FLAGS, *OWN_MEMORY, "gate", "scale", "state", "one packed", "more than 16"),
          "model:lightning": (*NO_ERASING, *NO_GROUPS, *NO_FLAGS, *OWN_MEMORY, "gate"),
          "model:gated_delta_product": (*NO_GROUPS, *NO_FLAGS, *OWN_MEMORY, "gate", "odd lengths", "beta up", "beta beyond")}
NEEDS_A_PROCESS = ("asks who calls", "asks who calls by an exception", "in place and back unseen")
ARGUMENTS = ("q", "k", "v", "g", "beta", "p", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")
FORM = "chunks of 64, narrow products, gates summed in float32"


def kernels(op):
    """{name: (kind, function)}"""
    every = {name: (kind, change) for kind, changes in KINDS.items() for name, change in changes.items()}
    adapt, form, own = {"attention": (of_attention, "tiles of 64, narrow products", (scores,)),
                        "attention:flash": (of_flash, "tiles of 64", (flash,)),
                        "attention:varlen": (of_varlen, "tiles of 64", (varlen,))}.get(op, (None, None, ()))
    if adapt is not None:
        right = audit_kernels.kernels(op)[form]
        names = [*(OF_ATTENTION if op == "attention" else ()), *(n for kind in own for n in KINDS[kind])]
        return {n: (every[n][0], adapt(right, every[n][1])) for n in names}
    model, found = op.removeprefix("model:"), {}
    for name, (kind, change) in every.items():
        if kind in (scores, flash, varlen) or any(word in name for word in NOT_OF.get(op, ())):
            continue
        if model != op:
            signature, rule, _ = audit_kernels.MODELS[model]
            inner = of_positions(audit_kernels.kernels(rule)[FORM], change)
            found[name] = kind, audit_kernels.named(signature, inner, "")
        elif op == "dplr":
            found[name] = kind, of_dplr(audit_kernels.dplr, change)
        else:
            right = audit_kernels.kernels(op)
            found[name] = kind, of_rule(right.get(FORM) or next(iter(right.values())), change)
    return found


def of_rule(right, change):
    return lambda **x: change(right, x)


def of_positions(right, change):
    return lambda *x: change(right, dict(zip(ARGUMENTS, x)) if x[-1] is not None else dict(zip(ARGUMENTS, x[:-1])))


def of_dplr(right, change):
    """b and a under the names of k's own and p; gates as g."""
    def inner(g, p, **x):
        return right(a=p, gk=g, **x)
    return lambda q, k, v, a, b, gk, **x: change(inner, {"q": q, "k": k, "v": v, "p": a, "b": b, "g": gk, **x})


def of_attention(right, change):
    def call(query, key, value, **options):
        def rows_first(q, k, v, **x):
            o = right(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **x)
            return o.transpose(1, 2), None
        options = {n: x for n, x in options.items() if x is not None}
        x = {"q": query.transpose(1, 2), "k": key.transpose(1, 2), "v": value.transpose(1, 2), **options}
        return change(rows_first, x)[0].transpose(1, 2)
    return call


def of_flash(right, change):
    def call(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, sinks=None, return_lse=False):
        return change(right, {"q": q, "k": k, "v": v, "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
                              "softcap": softcap, "sinks": sinks, "return_lse": True})
    return call


def of_varlen(right, change):
    def call(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
             window_size=(-1, -1), softcap=0.0, return_attn_probs=False):
        def inner(**x):
            return right(**x, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_attn_probs=True)[:2]
        return change(inner, {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
                              "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap})
    return call


def __getattr__(name):
    """Kernels by operation and number, for those who import by name: kda_12."""
    op, _, number = name.rpartition("_")
    if number.isdigit():
        return list(kernels(op.replace("__", ":")).values())[int(number)][1]
    raise AttributeError(name)
