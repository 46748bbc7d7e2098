"""Rows of the rules beside GDN and KDA: Mamba-2 beside transformers and ggml, RWKV-7 beside ggml, and every rule beside ours
of the same shape."""
import importlib

import torch

import softdelta_ctypes as c
from peers_attention import ERROR_LIMIT, TYPE, draw, relative_error
from peers_delta import CHUNK, KEPT_INTERVAL, in_turn
from peers_row import Row, Work


def mamba2_function():
    """The published torch function, or None where transformers is missing."""
    try:
        return importlib.import_module("transformers.models.mamba2.modeling_mamba2").mamba2_chunk_scan
    except (ImportError, AttributeError):
        return None


class Mamba2:
    """Simple GLA with q = C, k = B, v = dt·x, g = dt·A. Peers get x and dt."""

    def __init__(self, T=4096, heads=64, size=64, groups=8, state=128, dtype="f32"):
        self.dtype = dtype
        self.C, self.B = draw(1, T, groups, state, dtype=dtype, seed=1), draw(1, T, groups, state, dtype=dtype, seed=2)
        self.x, self.do = (draw(1, T, heads, size, dtype=dtype, seed=seed) for seed in (3, 4))
        self.raw_dt = draw(1, T, heads, seed=5) - 2
        self.dt = torch.nn.functional.softplus(self.raw_dt)
        self.A = -torch.linspace(1, 16, heads)
        self.v, self.g = (self.x * self.dt[..., None]).to(TYPE[dtype]), self.dt * self.A
        self.o, self.final_state = torch.empty_like(self.x), torch.empty(1, heads, state, size)
        self.forward_flops = T * heads * (6 * state * size + 2 * CHUNK * (state + size))  # as of a rule that erases

    def inputs(self):
        return dict(q=self.C, k=self.B, v=self.v, g=self.g)

    def forward(self, m):
        return m.library.delta_forward(self.inputs(), dict(o=self.o, final_state=self.final_state), rule=c.SIMPLE_GLA,
                                       scale=1.0)

    def both(self, m):
        """Forward and backward; the forward pass keeps what the backward pass takes."""
        _, T, heads, size = self.x.shape
        kept = dict(states=torch.empty(1, -(-T // KEPT_INTERVAL), heads, self.B.shape[-1], size),
                    u=torch.empty(1, heads, T, size, dtype=self.x.dtype).transpose(1, 2))
        self.gradients = {"d" + name: torch.empty_like(x) for name, x in self.inputs().items()}
        options = dict(rule=c.SIMPLE_GLA, scale=1.0, state_interval=KEPT_INTERVAL)
        return in_turn(m.library.delta_forward(self.inputs(), dict(o=self.o, final_state=self.final_state, **kept), **options),
                       m.library.delta_backward(self.inputs(), dict(d_o=self.do, **self.gradients, **kept), **options))

    def peer(self, x=None):
        f, x = mamba2_function(), x or [self.x, self.dt, self.B, self.C]
        return f and (lambda: f(x[0], x[1], self.A, *x[2:], chunk_size=256, return_final_states=True))

    def peer_both(self):
        leaves = [x.clone().requires_grad_() for x in (self.x, self.dt, self.B, self.C)]
        forward = self.peer(leaves)
        return forward and (lambda: torch.autograd.grad(forward()[0], leaves, self.do.float()))

    def check_forward(self, gradients=False):
        """Of the first and the last group and their value heads, by the quadratic form, the first 512 tokens."""
        errors, each = [], self.x.shape[2] // self.B.shape[2]
        if gradients:
            return None
        for group in (0, self.B.shape[2] - 1):
            q, k = (x[0, :512, group].double() for x in (self.C, self.B))
            for head in (group * each, (group + 1) * each - 1):
                G = self.g[0, :512, head].double().cumsum(0)
                score = (q @ k.T * (G[:, None] - G).exp()).tril()
                errors.append(relative_error(self.o[0, :512, head], score @ self.v[0, :512, head].double()))
        return max(errors)


def mamba2_forward(**shape):
    def setup(m):
        p = Mamba2(**shape)
        return Work(p.forward(m), p.peer(), flops=p.forward_flops, ceiling=p.dtype, check=p.check_forward,
                    error_limit=ERROR_LIMIT[p.dtype])
    return setup


def mamba2_both(**shape):
    def setup(m):
        p = Mamba2(**shape)
        return Work(p.both(m), p.peer_both(), flops=3 * p.forward_flops, ceiling=p.dtype)
    return setup


def mamba2_ggml(**shape):
    def setup(m):
        p = Mamba2(**shape)
        return Work(p.forward(m), m.ggml and m.ggml.ssm_scan(p.x, p.raw_dt, p.A, p.B, p.C), flops=p.forward_flops,
                    ceiling=p.dtype)
    return setup


class Rule:
    """A call of a rule by its number: T tokens of n steps, one key head for each value head."""

    def __init__(self, rule, T, H=32, D=128, n=1, dtype="f32"):
        rows, self.options = n * T, dict(rule=rule, steps=n)
        channel, erases = rule in (c.KDA, c.GLA, c.GDN2, c.DPLR), rule not in (c.GLA, c.SIMPLE_GLA)
        unit = torch.nn.functional.normalize
        self.q, self.k = (unit(draw(1, t, H, D, seed=seed), dim=-1).to(TYPE[dtype]) for t, seed in ((T, 1), (rows, 2)))
        self.v = draw(1, rows, H, D, dtype=dtype, seed=3)
        self.g = torch.nn.functional.logsigmoid(draw(*((1, T, H, D) if channel else (1, T, H)), seed=6) + 3)
        self.beta = draw(1, rows, H, seed=5).sigmoid().to(TYPE[dtype]) if erases else None
        self.p = None
        if rule == c.GDN2:
            self.p, self.beta = (self.k * draw(1, rows, H, D, seed=7).sigmoid()).to(TYPE[dtype]), None
        if rule == c.DPLR:  # RWKV-7: k = b, p = -a, v = 0, then k, v, p = 0
            a = unit(draw(1, T, H, D, seed=7), dim=-1)
            b = a * draw(1, T, H, D, seed=8).sigmoid()
            steps = lambda first, second: torch.stack((first, second), 2).flatten(1, 2).to(TYPE[dtype])
            self.a, self.b, self.once_k, self.once_v = -a, b, self.k[:, ::2], self.v[:, ::2]
            self.k, self.v = steps(b, self.once_k), steps(torch.zeros_like(self.once_v), self.once_v)
            self.p, self.beta = steps(a, torch.zeros_like(a)), None
        self.o = self.v.new_empty(1, T, H, D)
        self.final_state = torch.empty(1, H, D, D)

    def forward(self, m):
        inputs = dict(q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta, p=self.p)
        return m.library.delta_forward(inputs, dict(o=self.o, final_state=self.final_state), **self.options)


def beside_rule(rule, peer):
    def setup(m):
        return Work(Rule(**rule).forward(m), Rule(**peer).forward(m))
    return setup


def rwkv7_ggml(T):
    def setup(m):
        p = Rule(c.DPLR, T, D=64, n=2)
        return Work(p.forward(m), m.ggml and m.ggml.rwkv_wkv7(p.q * 64 ** -0.5, p.g.exp(), p.once_k, p.once_v, p.a, p.b))
    return setup


def rows(machine):
    shape = "H8/64 D64 state 128"
    for dtype in ("f32", "bf16"):
        yield Row(f"delta Mamba-2 forward T4096 {shape} {dtype}", "transformers", mamba2_forward(dtype=dtype), 6,
                  0.55 if dtype == "f32" else None)
        yield Row(f"delta Mamba-2 forward + backward T4096 {shape} {dtype}", "transformers", mamba2_both(dtype=dtype), 6)
    one_group = dict(T=2048, heads=16, groups=1)
    for name, work in (("forward", mamba2_forward), ("forward + backward", mamba2_both)):
        yield Row(f"delta Mamba-2 {name} T2048 H1/16 D64 state 128 f32", "transformers", work(**one_group), 6)
    for T in (512, 4096):
        yield Row(f"delta Mamba-2 forward T{T} {shape} f32: ggml", "ggml ssm_scan", mamba2_ggml(T=T), 3)
    yield Row("delta RWKV-7 forward T512 H32 D64 f32: ggml", "ggml rwkv_wkv7", rwkv7_ggml(512), 3)
    for name, rule, peer, against, floor in (
            ("GLA forward T4096 H32 D128 f32", dict(rule=c.GLA, T=4096), dict(rule=c.KDA, T=4096), "KDA", 1),
            ("GDN-2 forward T4096 H32 D128 f32", dict(rule=c.GDN2, T=4096), dict(rule=c.KDA, T=4096), "KDA", 0.9),
            ("RWKV-7 forward T4096 H32 D64 f32", dict(rule=c.DPLR, T=4096, D=64, n=2), dict(rule=c.KDA, T=8192, D=64),
             "KDA of T8192", 0.95),
            ("Gated DeltaProduct n 2 forward T4096 H32 D128 f32", dict(rule=c.GATED_DELTA_PRODUCT, T=4096, n=2),
             dict(rule=c.GATED_DELTA_RULE, T=8192), "GDN of T8192", 0.95)):
        yield Row(f"delta {name}: beside {against}", f"ours, {against}", beside_rule(rule, peer), floor)
