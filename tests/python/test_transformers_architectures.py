"""A tiny model of every architecture that reads text: with all that is replaced, and attn_implementation="softdelta",
against the unmodified model with eager attention."""
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

import softdelta.transformers  # noqa: E402
import transformers_architectures as architectures  # noqa: E402
from transformers_tiny import disabled_after  # noqa: E402, F401

transformers.logging.set_verbosity_error()
LENGTH = 50

# Architectures that go to eager attention, with the reason that is named in the warning.
EAGER = dict.fromkeys(("inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text"), "sinks of each token")

# Calls whose tokens see what padding tokens became. A padding token before the first one sees no key: its attention is 0
# here, as in torch's scaled_dot_product_attention, and the mean of all values in eager attention.
SEE_PADDING = {
    "blt": "it pools tokens, padding too, into patches",
    "diffusion_gemma": "its decoder sees all that its encoder made of the prompt",
    "minimax_m3_vl": "its indexer ranks blocks of keys, those of padding too",
    "minimax_m3_vl_text": "as minimax_m3_vl",
}

# Models in which a few tokens have no influence on those behind them that would show.
DEAF = {
    "mra": "its attention without its CUDA kernel is 0",
}

# What cannot be built without a network or other packages.
NOT_BUILT = {
    "gemma3n": "its image tower is timm's, which is not installed; its text model is gemma3n_text",
    "perception_lm": "its image tower is timm's, which is not installed; its text model is llama",
}


GENERATE = dict(max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True)


def batches(name, model):
    """name of a call → its arguments, and which tokens of its logits count."""
    ids = architectures.draw(2, LENGTH)
    whole, one = (architectures.arguments(name, model, x) for x in (ids, ids[:1]))
    mask = torch.ones_like(ids)
    mask[0, :17] = mask[1, -13:] = 0  # on the left, on the right
    mask_name = "decoder_attention_mask" if "decoder_input_ids" in whole else "attention_mask"
    padded = {mask_name: mask}
    if "decoder_input_ids" in whole:
        if whole.get("input_ids") is not None:
            padded["attention_mask"] = torch.ones_like(whole["input_ids"])
            padded["attention_mask"][1, -11:] = 0
    return {
        "prompt": (whole, None),
        "loss": (whole | dict(labels=ids), None),
        "padded": (whole | padded, mask.bool()),
        "packed": (one | dict(position_ids=torch.cat([torch.arange(20), torch.arange(30)])[None]), None),
        "logits_to_keep": (whole | dict(logits_to_keep=3), None),
        "generate": (whole | padded | {mask_name: mask.index_fill(0, torch.tensor([1]), 1)} | GENERATE, None),
    }


def others(name, model):
    """The arguments of the prompt, where five tokens before the last five are others."""
    ids = architectures.draw(2, LENGTH)
    ids[:, 40:45] = architectures.draw(2, 5, seed=9)
    given = architectures.arguments(name, model, ids)
    if "inputs_embeds" in given:  # in the place of tokens
        given["inputs_embeds"] = -given["inputs_embeds"]
    return given


def run(model, implementation, arguments):
    """Logits, or hidden states, and the loss if there is one; None where the model refuses the call."""
    model.set_attn_implementation(implementation)
    torch.manual_seed(0)  # some models draw, and some write to what they are given
    arguments = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    with torch.no_grad():
        if "max_new_tokens" in arguments:
            y = model.generate(**arguments)
            return torch.stack(y.logits, 1), None
        y = model(**arguments)
    logits = getattr(y, "logits", None)
    return y[0] if logits is None else logits, getattr(y, "loss", None)


def tokens(logits, counted):
    """Those that count; a model of several streams has a row for each."""
    if counted is None or logits.shape[1] != counted.shape[1]:
        return logits
    return logits[counted.repeat_interleave(len(logits) // len(counted), 0)]


def off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", architectures.architectures())
def test_architecture(name):
    if name in NOT_BUILT:
        with pytest.raises(ImportError, match="PIL|timm"):
            architectures.build(name)
        return
    model = architectures.build(name)
    calls, expected = batches(name, model), {}
    for call, (arguments, _) in calls.items():
        try:
            expected[call] = run(model, "eager", arguments)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            assert call != "prompt"  # others are not for every model
        if call in expected and call in ("padded", "generate") and name in SEE_PADDING:
            expected[call], by_eager = run(model, "sdpa", arguments), expected[call]
            assert off(*(tokens(y[0], calls["padded"][1]) for y in (by_eager, expected[call]))) > 1e-3
    heard, prompt = run(model, "eager", others(name, model))[0], expected["prompt"][0]
    heard = off(heard[:, 45:], prompt[:, 45:]) if prompt.shape[1] >= LENGTH else off(heard, prompt)
    assert (heard > 1e-3) == (name not in DEAF), "random weights hide what attention does"
    softdelta.transformers.fallback._warned.clear()
    with softdelta.transformers.enable(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for call, (logits, loss) in expected.items():
            arguments, counted = calls[call]
            found, found_loss = run(model, "softdelta", arguments)
            assert found.shape == logits.shape and off(tokens(found, counted), tokens(logits, counted)) < 2e-5, call
            if loss is not None:
                torch.testing.assert_close(found_loss, loss, atol=2e-5, rtol=1e-5)
    reasons = {str(w.message).rsplit(": ", 1)[-1] for w in warned if str(w.message).startswith("softdelta")}
    assert reasons == ({EAGER[name]} if name in EAGER else set())
