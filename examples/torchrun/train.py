"""A tiny Kimi Linear of transformers, trained on one sequence that all ranks share.

    torchrun --nproc-per-node 4 examples/torchrun/train.py            # the same losses as with 1 rank
    torchrun --nproc-per-node 4 examples/torchrun/train.py scan

Each rank has some of the tokens. Parameters are the same everywhere; gradients are summed over the ranks.
"""
import sys

import torch
import torch.distributed as dist
from transformers import KimiLinearConfig, KimiLinearForCausalLM

import softdelta.transformers

VOCABULARY, TOKENS, STEPS = 64, 256, 20

CONFIGURATION = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, initializer_range=0.1,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    mlp_layer_types=["dense", "sparse", "dense", "sparse"], num_local_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=24, linear_num_heads=4, linear_head_dim=16, pad_token_id=0, bos_token_id=1,
    eos_token_id=2)


def train(method: str) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = KimiLinearForCausalLM(KimiLinearConfig(**CONFIGURATION))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.cumsum(torch.randint(0, 3, (1, TOKENS)), 1) % VOCABULARY
    batch, losses = softdelta.transformers.shard(tokens, labels=tokens), []
    with softdelta.transformers.enable(group=dist.group.WORLD, method=method):
        for _ in range(STEPS):
            loss = model(**batch).loss  # this rank's share
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                if p.requires_grad:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # of an expert that no token here has
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
