"""What each rank checks of softdelta.transformers with a group, and the torchrun example."""
import copy
import importlib.util
import pathlib

import torch
import torch.distributed as dist

import softdelta.transformers
import transformers_tiny as tiny


def _loss_and_gradients(model, batch):
    result = model(**batch)
    model.zero_grad()
    result.loss.backward()
    return result.logits.detach(), result.loss.detach(), {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def _off(actual, expected):
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-6)).item()


def check_model(name, methods):
    """A training step: logits, loss and the gradient of every parameter, against the whole sequence on one process in
    f64. In f64 nothing but the order of sums differs, and gates, which transformers has in f32. In f32 nothing is farther
    from it than what transformers' own step on one process is farthest with: gradients of a gate's parameters are small
    differences of large terms."""
    model, ids = tiny.build(name), tiny.draw(2, 45)
    ids[1, 7:11] = 5
    labels = ids.masked_fill(ids == 5, -100)  # of which some do not count
    batch = {"input_ids": ids, "labels": labels, "use_cache": False}
    exact = copy.deepcopy(model).double()
    with softdelta.transformers.enable():
        truth = _loss_and_gradients(exact, batch)
    own = _loss_and_gradients(model, batch)[2]
    in_f32 = max(_off(own[n], g) for n, g in truth[2].items() if g.norm() > 1e-5)
    at = slice(*(r * 45 // dist.get_world_size() for r in (dist.get_rank(), dist.get_rank() + 1)))

    def check(actual, expected, what):
        limit = in_f32 if actual.dtype == torch.float32 else 1e-6
        assert (error := _off(actual, expected)) < limit, f"{name} {what} in {actual.dtype}: off by {error:.1e}"

    for method in methods:
        for shared in (exact, model):
            with softdelta.transformers.enable(group=dist.group.WORLD, method=method):
                logits, loss, gradients = _loss_and_gradients(shared, softdelta.transformers.shard(ids, labels))
            check(logits, truth[0][:, at], f"{method} logits")
            dist.all_reduce(loss)
            check(loss, truth[1], f"{method} loss")
            for n, gradient in gradients.items():
                dist.all_reduce(gradient)
                if truth[2][n].norm() > 1e-5:
                    check(gradient, truth[2][n], f"{method} gradient of {n}")


def off_by_name():
    """How far this rank's logits of attn_implementation="softdelta" are from eager attention's on one process."""
    model, ids = tiny.build_ordinary("llama"), tiny.draw(1, 40)
    own = slice(*(r * 40 // dist.get_world_size() for r in (dist.get_rank(), dist.get_rank() + 1)))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, own]
        with softdelta.transformers.enable(models=[], group=dist.group.WORLD):
            model.set_attn_implementation("softdelta")
            found = model(**softdelta.transformers.shard(ids)).logits
    return ((found - expected).norm() / expected.norm()).item()


def refusals(name):
    """The errors of calls that ranks cannot share, and of enabling twice."""
    model, batch = tiny.build(name), softdelta.transformers.shard(tiny.draw(2, 12))
    errors = []

    def call(**others):
        try:
            with torch.no_grad():
                model(**(batch | others))
        except ValueError as e:
            return str(e)
        return "no error"

    with softdelta.transformers.enable(group=dist.group.WORLD):
        errors.append(call(use_cache=True))
        mask = torch.ones_like(batch["input_ids"])
        mask[1, :2] = 0
        errors.append(call(attention_mask=mask))
        errors.append(call(attention_mask=mask) if dist.get_rank() == 0 else call())  # the other rank waits for it
        errors.append(call(cu_seq_lens_q=torch.tensor([0, 2, 6])))
        try:
            softdelta.transformers.enable(group=dist.group.WORLD)
        except ValueError as e:
            errors.append(str(e))
        errors.append(call())
    return errors


def trained(method):
    """The losses of the torchrun example."""
    path = pathlib.Path(__file__).parents[2] / "examples/torchrun/train.py"
    spec = importlib.util.spec_from_file_location("train", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.train(method)
