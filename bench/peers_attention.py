"""Rows of attention: torch's scaled_dot_product_attention (SDPA), ggml's flash_attn_ext, and ours on the same tensors.

All tensors are [B, L, H, D] in memory, as projections leave them; torch sees transposed views."""
import torch
import torch.nn.functional as F

from peers_row import Row, Work
from softdelta_ctypes import TOP_LEFT, NO_CAUSAL

TYPE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ERROR_LIMIT = {"f32": 1e-4, "bf16": 3e-2, "f16": 3e-3}


def draw(*shape, dtype="f32", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(TYPE[dtype])


class Problem:
    """Operands of one call, with results for ours to write."""

    def __init__(self, B=1, H=8, Hk=None, Lq=2048, Lk=None, D=64, dtype="f32", causal=False, window=None, mask=None,
                 bias=None):
        Lk, Hk = Lk or Lq, Hk or H
        self.dtype, self.causal, self.window, self.H, self.Hk = dtype, causal, window, H, Hk
        self.q = draw(B, Lq, H, D, dtype=dtype, seed=1)
        self.k = draw(B, Lk, Hk, D, dtype=dtype, seed=2)
        self.v = draw(B, Lk, Hk, D, dtype=dtype, seed=3)
        self.do = draw(B, Lq, H, D, dtype=dtype, seed=4)
        # one pair in a hundred is masked: every tile is partial, and no implementation can skip any
        self.mask = torch.rand(*mask, generator=torch.Generator().manual_seed(5)) > 0.01 if mask else None
        self.bias = draw(*bias, dtype=dtype, seed=6) if bias else None
        self.o = torch.empty_like(self.q)
        self.lse = torch.empty(B, H, Lq)
        pairs = Lq * Lk
        if causal:
            w = min(window or Lk, Lk)
            pairs = w * (w + 1) // 2 + (Lq - w) * w
        if mask:
            pairs = int(self.mask.expand(B, 1, Lq, Lk).sum())
        self.flops = 4 * B * H * pairs * D  # forward

    # --- ours
    def inputs(self):
        return dict(q=self.q, k=self.k, v=self.v, mask=self.mask, bias=self.bias)

    def options(self):
        return dict(causal=TOP_LEFT if self.causal else NO_CAUSAL, window_left=self.window - 1 if self.window else -1)

    def forward(self, m, threads=None, lse=False):
        """Of o alone, which is what SDPA returns."""
        outputs = dict(o=self.o, lse=self.lse) if lse else dict(o=self.o)
        return m.library.attention_forward(self.inputs(), outputs, threads, **self.options())

    def backward(self, m, dbias=False, threads=None):
        """The backward alone; its first call runs the forward whose o and lse it needs."""
        self.gradients = {"d" + n: torch.empty_like(getattr(self, n)) for n in ["q", "k", "v"] + ["bias"] * dbias}
        call = m.library.attention_backward(self.inputs(), dict(o=self.o, lse=self.lse, d_o=self.do, **self.gradients),
                                            threads, **self.options())
        forward = [self.forward(m, lse=True)]

        def backward():
            if forward:
                forward.pop()()
            call()

        return backward

    # --- torch
    def torch_mask(self):
        if self.window:
            L = self.q.shape[1]
            return torch.ones(L, L, dtype=torch.bool).tril_().triu_(1 - self.window)
        return self.bias if self.mask is None else self.mask

    def torch_forward(self, *leaves):
        q, k, v = [x.transpose(1, 2) for x in leaves[:3] or (self.q, self.k, self.v)]
        mask = leaves[3] if len(leaves) > 3 else self.torch_mask()
        causal = self.causal and not self.window
        return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal,
                                                      enable_gqa=self.H != self.Hk)

    def torch_backward(self, dbias=False):
        leaves = [x.clone().requires_grad_() for x in [self.q, self.k, self.v] + [self.bias] * dbias]
        o, do = self.torch_forward(*leaves)(), self.do.transpose(1, 2)
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    # --- truth: the first and the last head, some rows of the forward, the whole backward
    def check_forward(self):
        L, rows = self.q.shape[1], torch.randperm(self.q.shape[1])[:256]
        allowed = None
        if self.causal:
            distance = rows[:, None] - torch.arange(self.k.shape[1])[None, :]
            allowed = (distance >= 0) & (distance < (self.window or L))
        return max(relative_error(self.o[:, rows, h], self.truth(h, rows, allowed)) for h in (0, self.H - 1))

    def check_backward(self, dbias=False):
        rows = torch.arange(self.q.shape[1])
        allowed = rows[:, None] >= rows[None, :] if self.causal else None
        errors = []
        for h in (0, self.H - 1):
            leaves = [x[:, :, h].double().requires_grad_() for x in (self.q, self.k, self.v)]
            bias = self.bias[:, h].double().requires_grad_() if self.bias is not None else None
            o = attend(*leaves, bias=bias, allowed=allowed)
            truths = torch.autograd.grad(o, leaves + [bias] * dbias, self.do[:, :, h].double())
            ours = [self.gradients[n][:, :, h] for n in ("dq", "dk", "dv")]
            ours += [self.gradients["dbias"][:, h]] if dbias else []
            errors += [relative_error(x, y) for x, y in zip(ours, truths)]
        return max(errors)

    def truth(self, h, rows, allowed):
        part = lambda x: None if x is None else x[:, h if x.shape[1] > 1 else 0][:, rows if x.shape[2] > 1 else [0]]
        bias, mask = part(self.bias), part(self.mask)
        if mask is not None:
            allowed = mask
        kh = h // (self.H // self.Hk)
        return attend(self.q[:, rows, h].double(), self.k[:, :, kh].double(), self.v[:, :, kh].double(),
                      bias=None if bias is None else bias.double(), allowed=allowed)


def attend(q, k, v, bias=None, allowed=None):
    """Softmax attention of one head, as written: q [B, Lq, D], k, v [B, Lk, D]."""
    s = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if bias is not None:
        s = s + bias
    if allowed is not None:
        s = s.masked_fill(~allowed, float("-inf"))
    return torch.softmax(s, -1) @ v


def relative_error(ours, truth):
    return ((ours.double() - truth).pow(2).mean() / truth.pow(2).mean()).sqrt().item()


def forward(**shape):
    def setup(m):
        p = Problem(**shape)
        return Work(p.forward(m), p.torch_forward(), flops=p.flops, ceiling=p.dtype, check=p.check_forward,
                    error_limit=ERROR_LIMIT[p.dtype])
    return setup


def backward(dbias=False, **shape):
    def setup(m):
        p = Problem(**shape)
        return Work(p.backward(m, dbias), p.torch_backward(dbias), flops=2.5 * p.flops, ceiling=p.dtype,
                    check=lambda: p.check_backward(dbias), error_limit=ERROR_LIMIT[p.dtype])
    return setup


def bias_gradient_cost(**shape):
    """The same backward with and without the gradient of its bias."""
    def setup(m):
        p = Problem(**shape)
        return Work(p.backward(m, dbias=True), p.backward(m))
    return setup


def threads_against_one(direction, **shape):
    def setup(m):
        p = Problem(**shape)
        call = lambda threads: getattr(p, direction)(m, threads=threads)
        return Work(call(m.threads), call(1))
    return setup


def linear_in_length(length, times, **shape):
    def setup(m):
        small, large = Problem(Lq=length, **shape), Problem(Lq=length * times, **shape)
        return Work(large.forward(m), small.forward(m), peer_scale=times)
    return setup


def decode_problem(dtype, length=32768):
    p = Problem(H=32, Hk=8, Lq=1, Lk=length, D=128, dtype=dtype)
    return p, 2 * p.k.numel() * p.k.element_size()


def decode(dtype, paged=False):
    def setup(m):
        p, size = decode_problem(dtype)
        inputs = p.inputs()
        if paged:
            blocks = p.k.shape[1] // 64
            order = torch.randperm(blocks)
            for name in ("k", "v"):  # block order[i] holds keys 64 i ...
                pages = torch.empty(blocks, 64, *p.k.shape[2:], dtype=p.k.dtype)
                pages[order] = inputs[name].reshape(blocks, 64, *p.k.shape[2:])
                inputs[name] = pages
            inputs |= dict(block_table=order.to(torch.int32)[None], cache_seqlens=torch.tensor([p.k.shape[1]]))
        ours = m.library.attention_forward(inputs, dict(o=p.o, lse=p.lse))
        return Work(ours, p.torch_forward(), bytes=size, ceiling="read", check=p.check_forward,
                    error_limit=ERROR_LIMIT[dtype])
    return setup


def decode_ggml(dtype, ggml_dtype):
    def setup(m):
        p, size = decode_problem(dtype)
        peer = m.ggml and m.ggml.attention(p.q, p.k.to(TYPE[ggml_dtype]), p.v.to(TYPE[ggml_dtype]))
        return Work(p.forward(m), peer, bytes=size, ceiling="read")
    return setup


def forward_ggml(**shape):
    def setup(m):
        p = Problem(**shape)
        return Work(p.forward(m), m.ggml and m.ggml.attention(p.q, p.k, p.v), flops=p.flops, ceiling=p.dtype)
    return setup


def rows(machine):
    sizes, S = (64, 128), 2048
    kinds = {"full": {}, "causal": dict(causal=True), "bool mask [1,1,S,S]": dict(mask=(1, 1, S, S)),
             "bias [1,H,S,S]": dict(bias=(1, 8, S, S))}
    floors = {("f32", "full"): ((1.1, 1.05), (0.78, 0.82)), ("f32", "causal"): ((1.35, 1.35), (0.70, 0.70)),
              ("f32", "bool mask [1,1,S,S]"): ((1.2, 1.1), (0.68, 0.68)),
              ("f32", "bias [1,H,S,S]"): ((1.15, 1.1), (0.68, 0.68)),
              ("bf16", "full"): ((3.5, 1.7), (0.58, 0.68)), ("bf16", "causal"): ((4, 1.9), (0.55, 0.62))}
    tiles = machine.library.isa() == "amxbf16"
    if tiles:  # torch has them, too
        floors |= {("bf16", "full"): ((3, 3.3), (0.85, 0.95)), ("bf16", "causal"): ((3.8, 4.5), (None, None)),
                   ("bf16", "bool mask [1,1,S,S]"): ((2.5, 2.2), (None, None)),
                   ("bf16", "bias [1,H,S,S]"): ((2.5, 2.2), (None, None))}
    for (dtype, kind), (ratios, ceilings) in floors.items():
        for D, ratio, ceiling in zip(sizes, ratios, ceilings):
            yield Row(f"attention forward {dtype} {kind} D{D}", "torch SDPA", forward(D=D, dtype=dtype, **kinds[kind]),
                      ratio, ceiling)
    if tiles:
        yield Row("attention forward bf16 full S8192 D128", "torch SDPA", forward(D=128, dtype="bf16", Lq=8192), 3.3, 1.05)
    floors = {("f32", "full"): ((1.2, 1.05), 0.68), ("f32", "causal"): ((1.3, 1.2), 0.68),
              ("bf16", "full"): ((1.25, 1.15), 0.52), ("bf16", "causal"): ((1.4, 1.3), 0.52)}
    for (dtype, kind), (ratios, ceiling) in floors.items():
        for D, ratio in zip(sizes, ratios):
            yield Row(f"attention backward {dtype} {kind} D{D}", "torch SDPA backward",
                      backward(D=D, dtype=dtype, **kinds[kind]), ratio, ceiling)
    for kind, bias, cost in (("[1,H,S,S]", (1, 8, S, S), 1.25), ("[1,H,1,S]", (1, 8, 1, S), 1.05)):
        for dtype, D, ratio in (("f32", 64, 3), ("f32", 128, 3), ("bf16", 64, 3.5), ("bf16", 128, 2)):
            shape = dict(D=D, dtype=dtype, bias=bias)
            yield Row(f"attention backward with dbias {kind} {dtype} D{D}", "torch SDPA backward",
                      backward(dbias=True, **shape), ratio if bias[2] > 1 else 3)
            yield Row(f"attention backward with dbias {kind} {dtype} D{D}: cost", "ours without dbias",
                      bias_gradient_cost(**shape), 1 / cost)
    for dtype, ratio, against, floor in (("f32", 8, "f32", 2), ("bf16", 16, "f16", 2.5)):
        yield Row(f"attention decode H32/8 K32768 D128 {dtype}", "torch SDPA", decode(dtype), ratio, 0.80)
        yield Row(f"attention decode H32/8 K32768 D128 {dtype} paged", "torch SDPA, contiguous", decode(dtype, True),
                  ratio, 0.80)
        yield Row(f"attention decode H32/8 K32768 D128 {dtype}: ggml", f"ggml flash_attn_ext, {against} K, V",
                  decode_ggml(dtype, against), floor)
    for D in sizes:
        yield Row(f"attention forward f32 full D{D}: ggml", "ggml flash_attn_ext", forward_ggml(D=D))
    window = dict(D=64, causal=True, window=1024)
    yield Row("attention window 1024 causal S16384 f32 D64", "torch SDPA, same mask", forward(Lq=16384, **window), 14)
    yield Row("attention window 1024 causal S65536 f32 D64: linear in S", "ours, S16384, 4 times",
              linear_in_length(16384, 4, **window), 0.95)
    scaling = machine.scaling or machine.threads
    for direction in ("forward", "backward"):
        yield Row(f"attention {direction} f32 H1 S8192 D64: all threads", "ours on one thread",
                  threads_against_one(direction, H=1, Lq=8192, D=64), 0.93 * scaling)
