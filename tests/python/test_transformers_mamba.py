"""Models with Mamba-2 or lightning attention layers, with softdelta enabled, against themselves without: prefill, training, decode, packed."""
import warnings
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

import softdelta.transformers  # noqa: E402
import transformers_architectures as architectures  # noqa: E402
from softdelta.transformers import state_space  # noqa: E402
from transformers_tiny import disabled_after  # noqa: E402, F401

MODELS = ["mamba2", "bamba", "granitemoehybrid", "nemotron_h", "zamba2", "falcon_h1", "minimax"]


def counted(name):
    return mock.patch.object(softdelta.torch, name, wraps=getattr(softdelta.torch, name))


def logits_and_gradients(model, ids, **arguments):
    y = model(ids, use_cache=False, **arguments).logits
    parameters = list(model.parameters())
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad(y, parameters, weights, allow_unused=True)
    return [y.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_training_prefill_and_decode(name):
    model, ids = architectures.build(name), architectures.draw(2, 40)
    generate = dict(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    plain, tokens = logits_and_gradients(model, ids), model.generate(ids, **generate)
    with warnings.catch_warnings(), softdelta.transformers.enable([name], attention=False), \
            counted("chunk_simple_gla" if name == "minimax" else "mamba_chunk_scan_combined") as scan, \
            counted("chunk_simple_gla" if name == "minimax" else "selective_state_update") as step:
        warnings.simplefilter("error", RuntimeWarning)  # a call that goes back to transformers
        ours, our_tokens = logits_and_gradients(model, ids), model.generate(ids, **generate)
    assert scan.call_count > 0 and step.call_count > 0
    size = max(g.norm() for g in plain[1:])
    for i, (a, b) in enumerate(zip(ours, plain)):
        assert (a - b).norm() <= 1e-4 * (b.norm() if i == 0 else max(b.norm(), 1e-3 * size)), i
    assert torch.equal(our_tokens.sequences, tokens.sequences)
    torch.testing.assert_close(torch.stack(our_tokens.logits), torch.stack(tokens.logits), rtol=1e-4, atol=1e-4)


def test_packed_sequences_do_not_see_each_other():
    """Which transformers' own functions refuse."""
    model, ids = architectures.build("mamba2").backbone, architectures.draw(1, 40)
    seq_idx = (torch.arange(40) >= 17).int()[None]
    with softdelta.transformers.enable(["mamba2"]), torch.no_grad():
        packed = model(ids, seq_idx=seq_idx, use_cache=False)[0]
        apart = [model(part, use_cache=False)[0] for part in (ids[:, :17], ids[:, 17:])]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-5, atol=1e-5)


def test_what_is_outside_goes_back():
    """With one warning."""
    def original(*args, **kwargs):
        return "transformers"

    original.__module__, x = "m", torch.zeros(1, 3, 2, 4, dtype=torch.int32)
    softdelta.transformers.fallback._warned.clear()
    scan, update = state_space.chunk_scan(original), state_space.state_update(original)
    with pytest.warns(RuntimeWarning, match="tensors of torch.int32"):
        assert scan(x, x[..., 0], x[0, 0, :, 0], x, x, 16) == "transformers"
    x = torch.zeros(1, 2, 4)
    with pytest.warns(RuntimeWarning, match="A has 3 numbers along dimension 2|A has 4 numbers along dimension 1"):
        assert update(torch.zeros(1, 2, 4, 3), x, x, torch.zeros(2, 4, 3), x[..., :3], x[..., :3]) == "transformers"
