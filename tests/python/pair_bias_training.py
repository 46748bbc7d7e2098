"""Training steps of attention with a learnable bias, ours beside torch's math path on the same tensors: loss curves.
bench/bias_training.py times them.

    python tests/python/pair_bias_training.py [--device cuda] [--steps 20] [--kind pair|relative] [--dtype bfloat16]

pair      AlphaFold-like: one protein, bias [1, H, S, S] made of a pair representation by a projection, S 512, D 32
relative  T5-like: bias [1, H, S, S] gathered from a table of 32 buckets of distances for each head
"""
import argparse

import torch

import softdelta.torch as sd

SHAPES = {"pair": dict(B=1, H=8, S=512, D=32), "relative": dict(B=2, H=8, S=512, D=64)}


def math_attention(q, k, v, bias, dtype=torch.float32):
    """q, k, v [B, S, H, D]."""
    q, k, v = (t.transpose(1, 2).to(dtype) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias.to(dtype)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def exact_attention(q, k, v, bias):
    """In f64: what every other way is measured by."""
    return math_attention(q, k, v, bias, torch.float64)


def our_attention(q, k, v, bias):
    o = sd.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=bias)
    return o.transpose(1, 2)


def flex_attention():
    from torch.nn.attention.flex_attention import flex_attention
    torch._dynamo.reset()  # other shapes would make these dynamic, and the kernels slower
    compiled = torch.compile(flex_attention, dynamic=False)

    def attention(q, k, v, bias):
        def add(score, _b, h, i, j):
            return score + bias[0, h, i, j]
        return compiled(*(t.transpose(1, 2) for t in (q, k, v)), score_mod=add).transpose(1, 2)

    return attention


def buckets(S, device, count=32, farthest=128):
    """T5's, both ways: half for each sign, near distances one by one, far ones by logarithms."""
    distance = torch.arange(S, device=device)[None, :] - torch.arange(S, device=device)[:, None]
    half = count // 2
    far = distance.abs().clamp(min=1)
    near = half // 2
    log = near + (torch.log(far / near) / torch.log(torch.tensor(farthest / near)) * (half - near)).long()
    return torch.where(far < near, distance.abs(), log.clamp(max=half - 1)) + half * (distance > 0)


class Model(torch.nn.Module):
    def __init__(self, kind, attention, B, H, S, D):
        super().__init__()
        self.kind, self.attention, self.shape = kind, attention, (B, S, 3, H, D)
        self.qkv = torch.nn.Linear(H * D, 3 * H * D, bias=False)
        self.out = torch.nn.Linear(H * D, H * D, bias=False)
        if kind == "pair":
            self.bias = torch.nn.Linear(16, H, bias=False)
        else:
            self.bias = torch.nn.Embedding(32, H)

    def forward(self, x, extra):
        q, k, v = self.qkv(x).reshape(self.shape).unbind(2)
        bias = self.bias(extra)
        bias = (bias if bias.dim() == 4 else bias[None]).permute(0, 3, 1, 2).contiguous()
        o = self.attention(q, k, v, bias).to(x.dtype)
        return x + self.out(o.flatten(2))


def step(model, optimizer, x, target, extra, device, dtype):
    """The loss before the step."""
    with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
        loss = (model(x, extra).float() - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def losses(kind, attention, device, dtype, steps, **shape):
    """The loss before each step."""
    torch.manual_seed(0)
    B, H, S, D = (shape[name] for name in "BHSD")
    model = Model(kind, attention, B, H, S, D).to(device)
    x, target = (torch.randn(B, S, H * D, device=device) for _ in range(2))
    extra = torch.randn(1, S, S, 16, device=device) if kind == "pair" else buckets(S, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [loss.item() for loss in [step(model, optimizer, x, target, extra, device, dtype) for _ in range(steps)]]


def difference(kind, device, dtype, steps, **shape):
    """The largest relative distance between our loss curve and that with attention in f64, all else in f32."""
    exact = losses(kind, exact_attention, device, torch.float32, steps, **shape)
    ours = losses(kind, our_attention, device, dtype, steps, **shape)
    assert exact[-1] < exact[0]
    return max(abs(a - e) / e for a, e in zip(ours, exact))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kind", choices=SHAPES, action="append")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    for kind in given.kind or SHAPES:
        far = difference(kind, given.device, dtype, given.steps, **SHAPES[kind])
        print(f"{kind} {given.device} {given.dtype}: loss within {far:.1e} of the math path in f64, {given.steps} steps",
              flush=True)


if __name__ == "__main__":
    main()
