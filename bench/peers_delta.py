"""Rows of the delta rules: the torch functions of transformers, ggml's gated_delta_net, and ours on the same tensors."""
import importlib

import torch

from peers_attention import ERROR_LIMIT, TYPE, draw, relative_error
from peers_row import Row, Work
from softdelta_ctypes import GATED_DELTA_RULE, KDA, Unsupported

CHUNK = 64  # of the work counted, whatever chunk is used
KEPT_INTERVAL = 384  # tokens between the states that a forward pass keeps for the backward pass
RULE = {"GDN": GATED_DELTA_RULE, "KDA": KDA}


def transformers_function(rule, step=False):
    """The published torch function, or None where transformers is missing."""
    module, names = {"GDN": ("qwen3_next", ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")),
                     "KDA": ("kimi_linear", ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"))}[rule]
    try:
        return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), names[step])
    except ImportError:
        return None


class Problem:
    """Operands of one call, with results for ours to write."""

    def __init__(self, rule="GDN", T=4096, H=32, HV=32, D=128, dtype="f32", state=False, l2norm=True):
        self.rule, self.H, self.HV, self.l2norm = rule, H, HV, l2norm
        self.q, self.k = draw(1, T, H, D, dtype=dtype, seed=1), draw(1, T, H, D, dtype=dtype, seed=2)
        if not l2norm:
            self.q, self.k = [torch.nn.functional.normalize(x, dim=-1) for x in (self.q, self.k)]
        self.v, self.do = draw(1, T, HV, D, dtype=dtype, seed=3), draw(1, T, HV, D, dtype=dtype, seed=4)
        self.beta = draw(1, T, HV, seed=5).sigmoid().to(TYPE[dtype])
        gates = (1, T, HV, D) if rule == "KDA" else (1, T, HV)
        self.g = torch.nn.functional.logsigmoid(draw(*gates, seed=6) + 3)  # mild: e^g is 0.95 typically
        self.state = draw(1, HV, D, D, seed=7) if state else None
        self.o, self.final_state = torch.empty_like(self.v), torch.empty(1, HV, D, D)
        self.forward_flops = T * HV * (6 * D * D + 4 * CHUNK * D)
        self.backward_flops = T * HV * (12 * D * D + 8 * CHUNK * D)
        self.dtype = dtype

    def inputs(self):
        return dict(q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta)

    # --- ours
    def forward(self, m, threads=None):
        return m.library.delta_forward(self.inputs() | dict(initial_state=self.state),
                                       dict(o=self.o, final_state=self.final_state), threads, rule=RULE[self.rule],
                                       use_qk_l2norm_in_kernel=self.l2norm)

    def at_level(self, m, level):
        """The forward pass by the kernels of another level."""
        call = self.forward(m)

        def run():
            m.library.select_isa_level(level)
            try:
                call()
            finally:
                m.library.select_isa_level(None)

        return run

    def backward(self, m, threads=None):
        self.gradients = {"d" + name: torch.empty_like(x) for name, x in self.inputs().items()}
        return m.library.delta_backward(self.inputs(), dict(d_o=self.do, **self.gradients), threads,
                                        rule=RULE[self.rule], use_qk_l2norm_in_kernel=self.l2norm)

    def both(self, m, threads=None):
        """Forward and backward; the forward pass keeps what the backward pass takes, where the library can."""
        T, HV, D = self.v.shape[1:]
        kept = dict(states=torch.empty(1, -(-T // KEPT_INTERVAL), HV, D, D),
                    u=torch.empty(1, HV, T, D, dtype=self.v.dtype).transpose(1, 2))
        self.gradients = {"d" + name: torch.empty_like(x) for name, x in self.inputs().items()}
        options = dict(rule=RULE[self.rule], use_qk_l2norm_in_kernel=self.l2norm, state_interval=KEPT_INTERVAL)
        calls = (m.library.delta_forward(self.inputs(), dict(o=self.o, final_state=self.final_state, **kept), threads,
                                         **options),
                 m.library.delta_backward(self.inputs(), dict(d_o=self.do, **self.gradients, **kept), threads,
                                          **options))
        try:
            calls[0]()
        except Unsupported:  # an older library
            calls = self.forward(m, threads), self.backward(m, threads)
        return in_turn(*calls)

    def step(self, m, state):
        """One token, the state in place."""
        return m.library.delta_forward(self.inputs() | dict(initial_state=state), dict(o=self.o, final_state=state),
                                       rule=RULE[self.rule], use_qk_l2norm_in_kernel=self.l2norm)

    # --- transformers
    def peer(self, inputs=None, step=False, state=None):
        f, x = transformers_function(self.rule, step), inputs or self.inputs()
        group = self.HV // self.H
        if group > 1:  # it wants a key for each value head
            x = x | {name: x[name].repeat_interleave(group, dim=2) for name in "qk"}
        return f and (lambda: f(x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=state,
                                output_final_state=True, use_qk_l2norm_in_kernel=self.l2norm))

    def peer_both(self):
        leaves = {name: x.clone().requires_grad_() for name, x in self.inputs().items()}
        forward = self.peer(leaves)
        return forward and (lambda: torch.autograd.grad(forward()[0], list(leaves.values()), self.do))

    # --- truth: the first and the last key head with their value heads
    def heads(self):
        group = self.HV // self.H
        return [(slice(h, h + 1), slice(h * group, (h + 1) * group)) for h in (0, self.H - 1)]

    def check_forward(self):
        return self.check(gradients=False)

    def check_both(self):
        return self.check(gradients=True)

    def check(self, gradients):
        errors = []
        for key_heads, value_heads in self.heads():
            part = {name: x[:, :, key_heads if name in "qk" else value_heads].double()
                    for name, x in self.inputs().items()}
            if gradients:
                for x in part.values():
                    x.requires_grad_()
            state = None if self.state is None else self.state[:, value_heads].double()
            o = recurrence(**part, l2norm=self.l2norm, state=state)
            errors.append(relative_error(self.o[:, :, value_heads], o.detach()))
            if gradients:
                truths = torch.autograd.grad(o, list(part.values()), self.do[:, :, value_heads].double())
                for name, truth in zip(part, truths):
                    ours = self.gradients["d" + name][:, :, key_heads if name in "qk" else value_heads]
                    errors.append(relative_error(ours, truth))
        return max(errors)


def recurrence(q, k, v, g, beta, l2norm, state=None):
    """Gated delta rule or KDA, token by token, as written: q, k [1, T, H, K], v [1, T, HV, V]."""
    if l2norm:
        q, k = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    group = v.shape[2] // q.shape[2]
    q, k = [x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (q, k)]
    v, g, beta = [x.transpose(1, 2) for x in (v, g, beta)]
    S = q.new_zeros(1, v.shape[1], q.shape[-1], v.shape[-1]) if state is None else state
    decay = g.exp()[..., None] if g.dim() == 4 else g.exp()[..., None, None]  # [1, HV, T, K|1, 1]
    o = []
    for t in range(q.shape[2]):
        S = decay[:, :, t] * S
        d = beta[:, :, t, None] * (v[:, :, t] - (k[:, :, t, None] @ S)[:, :, 0])
        S = S + k[:, :, t, :, None] * d[:, :, None]
        o.append((q[:, :, t, None] @ S)[:, :, 0])
    return torch.stack(o, 1) * q.shape[-1] ** -0.5


def forward(**shape):
    def setup(m):
        p = Problem(**shape)
        return Work(p.forward(m), p.peer(), flops=p.forward_flops, ceiling=p.dtype, check=p.check_forward,
                    error_limit=ERROR_LIMIT[p.dtype])
    return setup


def in_turn(*calls):
    def run():
        for call in calls:
            call()
    return run


def both(**shape):
    def setup(m):
        p = Problem(**shape)
        return Work(p.both(m), p.peer_both(), flops=p.forward_flops + p.backward_flops,
                    ceiling=p.dtype, check=p.check_both, error_limit=ERROR_LIMIT[p.dtype])
    return setup


def forward_ggml(**shape):
    def setup(m):
        p = Problem(l2norm=False, **shape)
        return Work(p.forward(m), m.ggml and m.ggml.delta_rule(**p.inputs()), flops=p.forward_flops, ceiling=p.dtype)
    return setup


def type_against_f32(direction, dtype, **shape):
    def setup(m):
        low, f32 = Problem(dtype=dtype, **shape), Problem(**shape)
        return Work(getattr(low, direction)(m), getattr(f32, direction)(m))
    return setup


def backward_against_forward(**shape):
    def setup(m):
        p = Problem(**shape)
        return Work(p.backward(m), p.forward(m))
    return setup


def linear_in_length(T, times, **shape):
    def setup(m):
        small, large = Problem(T=T, **shape), Problem(T=T * times, **shape)
        return Work(large.forward(m), small.forward(m), peer_scale=times)
    return setup


def threads_against_one(direction="forward", **shape):
    def setup(m):
        p = Problem(**shape)
        call = getattr(p, direction)
        return Work(call(m, threads=m.threads), call(m, threads=1))
    return setup


def tiles_against_vectors(**shape):
    def setup(m):
        p = Problem(**shape)
        return Work(p.forward(m), p.at_level(m, "avx512"), flops=p.forward_flops, ceiling=p.dtype,
                    check=p.check_forward, error_limit=ERROR_LIMIT[p.dtype])
    return setup


def step_hot(rule, against):
    def setup(m):
        p = Problem(rule=rule, T=1, state=True, l2norm=against == "transformers")
        ours = p.step(m, p.state.clone())
        if against == "ggml":
            peer = m.ggml and m.ggml.delta_rule(**p.inputs(), state=p.state)
        else:
            peer = p.peer(step=True, state=p.state)
        checked = p.forward(m)  # from the state that the truth starts with

        def check():
            checked()
            return p.check_forward()

        return Work(ours, peer, check=check, calls=50)
    return setup


def step_cold(rule, layers):
    def setup(m):
        p = Problem(rule=rule, T=1, state=True)
        states = [p.state.clone() for _ in range(layers)]
        peer = p.peer(step=True) and in_turn(*(p.peer(step=True, state=s) for s in states))
        return Work(in_turn(*(p.step(m, s) for s in states)), peer, bytes=2 * layers * p.state.numel() * 4,
                    ceiling="copy")
    return setup


def rows(machine):
    for dtype, ratio in (("f32", 6), ("bf16", 8)):
        yield Row(f"delta GDN forward T4096 H16/32 D128 {dtype}", "transformers", forward(H=16, dtype=dtype), ratio,
                  0.52 if dtype == "f32" else None)
    for dtype, ratio in (("f32", 80), ("bf16", 130)):
        yield Row(f"delta KDA forward T4096 H32 D128 {dtype}", "transformers", forward(rule="KDA", dtype=dtype), ratio,
                  0.40 if dtype == "f32" else None)
    yield Row("delta GDN forward T1024 H32 D128 f32: ggml", "ggml gated_delta_net", forward_ggml(T=1024), 3.5)
    for rule, ratio, ceiling in (("GDN", 4.5, 0.48), ("KDA", 90, 0.35)):
        yield Row(f"delta {rule} forward + backward T1024 H32 D128 f32", "transformers", both(rule=rule, T=1024),
                  ratio, ceiling)
    for rule in RULE:
        for direction, ratio in (("forward", 1.5), ("backward", 1.4)):
            yield Row(f"delta {rule} {direction} T4096 H32 D128: bf16 storage", "ours, f32",
                      type_against_f32(direction, "bf16", rule=rule), ratio)
        yield Row(f"delta {rule} backward T4096 H32 D128 f32: cost", "ours, forward",
                  backward_against_forward(rule=rule), 1 / 2.8)
        yield Row(f"delta {rule} step HV32 D128 hot", "transformers", step_hot(rule, "transformers"), 8)
        yield Row(f"delta {rule} step HV32 D128 hot: ggml", "ggml gated_delta_net", step_hot(rule, "ggml"), 3)
        yield Row(f"delta {rule} step HV32 D128, 40 layers cold", "transformers", step_cold(rule, 40), None, 0.80)
        yield Row(f"delta {rule} forward HV4 D128 T65536 f32: linear in T", "ours, T4096, 16 times",
                  linear_in_length(4096, 16, rule=rule, H=4, HV=4), 0.95)
        for direction in ("forward", "backward"):
            yield Row(f"delta {rule} {direction} H1 T8192 D128 f32: all threads", "ours on one thread",
                      threads_against_one(direction, rule=rule, T=8192, H=1, HV=1),
                      1.6 if direction == "forward" else None)
        yield Row(f"delta {rule} forward + backward T4096 H32 D128 f32: all threads", "ours on one thread",
                  threads_against_one("both", rule=rule))
        if machine.library.isa() == "amxbf16":
            yield Row(f"delta {rule} forward T4096 H32 D128 bf16: tiles", "ours, level avx512",
                      tiles_against_vectors(rule=rule, dtype="bf16"), 2.7 if rule == "GDN" else 2.4)
