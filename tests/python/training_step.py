"""A training step of a tiny model, in a process of its own: what transformers takes from flash-linear-attention is
decided when it is imported.

    training_step.py NAME plain|softdelta|fla cpu|cuda FILE    writes the loss and every gradient
"""
import subprocess
import sys

WIDE = {"qwen3_next": dict(linear_key_head_dim=64, linear_value_head_dim=64), "kimi_linear": dict(linear_head_dim=64)}
EVERY_EXPERT = dict(num_experts_per_tok=4)  # of 2 of 4, rounding to tf32 (fla) may choose others: gradients jump


def run(name, way, device, file):
    """(loss, gradients by name) of such a process, or None where the model, or fla, is missing."""
    import torch
    done = subprocess.run([sys.executable, __file__, name, way, device, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(file)


def main(name, way, device, file):
    if way != "fla":
        sys.modules["fla"] = None  # as if it were not installed
    import contextlib

    import softdelta.transformers
    import torch
    import transformers_tiny as tiny
    from transformers.utils import import_utils

    result = None
    ids = tiny.draw(2, 80).to(device)
    with softdelta.transformers.enable(attention=False) if way == "softdelta" else contextlib.nullcontext():
        model = tiny.build(name, **WIDE[name], **EVERY_EXPERT)
        if model is not None and (way != "fla" or import_utils.is_flash_linear_attention_available()):
            model.train().to(device)
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            result = loss.item(), {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    torch.save(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
