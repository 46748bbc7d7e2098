"""A tiny hybrid of Kimi Delta Attention and softmax attention, trained on one sequence that all ranks share.

    torchrun --nproc-per-node 4 examples/torchrun/train.py            # the same losses as with 1 rank
    torchrun --nproc-per-node 4 examples/torchrun/train.py scan

Each rank has some of the tokens. Parameters are the same everywhere; gradients are summed over the ranks.
"""
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import softdelta.torch.distributed as sdd

VOCABULARY, WIDTH, HEADS, SIZE, TOKENS, STEPS = 64, 64, 4, 16, 256, 20


class Mixer(nn.Module):
    """Queries, keys and values after a short convolution; a delta rule or attention; a projection back."""

    def __init__(self, method: str | None):
        super().__init__()
        self.method = method  # of the delta rule; None: attention
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.taps = nn.Parameter(torch.randn(3 * WIDTH, 4) * 0.3)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.beta = nn.Linear(WIDTH, HEADS)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        heads = (*x.shape[:2], HEADS, SIZE)
        x_norm = F.rms_norm(x, (WIDTH,))
        qkv = sdd.short_convolution(self.qkv(x_norm), self.taps, activation="silu")
        q, k, v = (t.reshape(heads) for t in qkv.chunk(3, -1))
        if self.method is None:
            o, _ = sdd.attention(q, k, v, causal="top_left", method="ring")
        else:
            o, _ = sdd.delta_rule("kda", q, k, v, g=self.gate(x_norm).view(heads), beta=self.beta(x_norm).sigmoid(),
                                  A_log=self.A_log, dt_bias=self.dt_bias, use_gate_in_kernel=True,
                                  use_qk_l2norm_in_kernel=True, method=self.method)
        return x + self.out(o.flatten(2))


def train(method: str) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    model = nn.Sequential(embedding, Mixer(method), Mixer(None), Mixer(method), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.cumsum(torch.randint(0, 3, (1, TOKENS + 1)), 1) % VOCABULARY
    inputs, labels = sdd.shard(tokens[:, :-1]), sdd.shard(tokens[:, 1:])
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step, loss in enumerate(train(sys.argv[1] if len(sys.argv) > 1 else "relay")):
        if dist.get_rank() == 0:
            print(f"step {step:2d}  loss {loss:.6f}")
    dist.destroy_process_group()
