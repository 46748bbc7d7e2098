"""Masks of attn_implementation="softdelta", keywords of its attention function, and both under torch.compile."""
import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

import softdelta.transformers  # noqa: E402
import transformers_architectures as architectures  # noqa: E402
import transformers_tiny as tiny  # noqa: E402
from softdelta.transformers.masks import Mask  # noqa: E402
from transformers import AttentionInterface, masking_utils  # noqa: E402
from transformers_tiny import disabled_after  # noqa: E402, F401

transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def enabled():
    softdelta.transformers.fallback._warned.clear()
    with softdelta.transformers.enable(models=[]):
        yield


def make(name, *args, **kwargs):
    return masking_utils.AttentionMaskInterface._global_mapping[name](*args, **kwargs)


PADDING = {"none": lambda L: None, "all there": lambda L: torch.ones(2, L, dtype=torch.bool),
           "left": lambda L: torch.arange(L).ge(3).expand(2, L), "right": lambda L: torch.arange(L).lt(L - 2).expand(2, L)}
# queries, keys, offset of the queries: a prompt, one token of decode, several, a static cache's prefill
LENGTHS = [(9, 9, 0), (1, 9, 8), (3, 9, 6), (5, 9, 0)]


@pytest.mark.parametrize("skip", list(itertools.product([False, True], [False, True])))
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_is_that_of_eager_attention_and_never_none(lengths, padding, skip):
    functions = [(masking_utils.causal_mask_function, None), (masking_utils.bidirectional_mask_function, None),
                 (masking_utils.sliding_window_causal_mask_function(4), 4)]
    for function, local_size in functions:
        causal, bidirectional = skip
        if function is masking_utils.bidirectional_mask_function and causal or (
                function is not masking_utils.bidirectional_mask_function and bidirectional):
            continue  # not what transformers asks for
        Lq, Lk, offset = lengths
        arguments = dict(mask_function=function, attention_mask=PADDING[padding](Lk), local_size=local_size,
                         dtype=torch.bfloat16)
        expected = make("eager", 2, Lq, Lk, offset, 0, **arguments)
        found = make("softdelta", 2, Lq, Lk, offset, 0, **arguments, allow_is_causal_skip=causal,
                     allow_is_bidirectional_skip=bidirectional)
        assert isinstance(found, Mask) and (found.shape, found.dtype) == ((2, 1, Lq, Lk), torch.bfloat16)
        assert torch.equal(found + 0, expected)
        seen, as_causal = found.meaning()
        said = torch.ones(Lq, Lk, dtype=torch.bool).tril() if as_causal and Lq > 1 else torch.ones(Lq, Lk, dtype=torch.bool)
        assert torch.equal((said if seen is None else seen).expand(expected.shape), expected == 0)


def test_a_mask_that_was_written_to_counts_as_written():
    def fresh():
        return make("softdelta", 1, 6, 6)

    def by_view(mask):
        mask[..., 2] = -7

    for change in (by_view, lambda mask: mask[:, :, 3:].fill_(-1), lambda mask: mask.add_(1)):
        mask, floats = fresh(), make("eager", 1, 6, 6)
        for m in (mask, floats):
            change(m)
        assert torch.equal(mask.meaning()[0], floats) and torch.equal(mask.detach(), floats)
    mask = fresh()
    assert mask.clone().sum() < 0 and (mask == 0).any() and mask.meaning() == (None, True)
    assert isinstance(mask.detach(), Mask) and mask.detach().meaning() == (None, True)


def test_floats_are_not_made(monkeypatch):
    """A prompt and its backward pass, with reentrant checkpoints too, ask what a mask means."""
    monkeypatch.setattr(Mask, "floats", None)
    model, ids = tiny.build_ordinary("llama", attn_implementation="softdelta").train(), tiny.draw(2, 20)
    gradients = []
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.embed_tokens.weight.grad.clone())
    for x in gradients[1:]:
        torch.testing.assert_close(x, gradients[0])


def attend(model, mask, **more):
    """What a layer of llama's function answers, queries' gradients with it."""
    generator = torch.Generator().manual_seed(3)
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(2, heads, 12, 16, generator=generator).requires_grad_() for heads in (4, 2, 2))
    o, _ = AttentionInterface._global_mapping["softdelta"](module, q, k, v, mask, scaling=0.25, **more)
    return o.detach(), *torch.autograd.grad(o.sin().sum(), (q, k, v))


def close(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_an_unknown_keyword_goes_to_eager_attention():
    model, mask = tiny.build_ordinary("llama"), make("softdelta", 2, 12, 12)
    expected = attend(model, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(attend(model, mask, riddle=None, other=False, num_items_in_batch=torch.tensor(3), use_cache=True), expected)
    with pytest.warns(RuntimeWarning, match="eager_attention_forward of .*llama.* is used instead: riddle"):
        close(attend(model, mask, riddle=torch.ones(1)), expected)


@pytest.mark.parametrize("dropout", [0.0, 1e-9])  # with it, eager attention answers
def test_keys_that_an_indexer_has_not_chosen_are_not_seen(dropout):
    model, generator = tiny.build_ordinary("llama"), torch.Generator().manual_seed(5)
    indices = torch.rand(2, 12, 12, generator=generator).argsort(-1)[..., :5]
    indices[:, :, 0] = torch.arange(12)
    chosen = torch.zeros(2, 12, 12, dtype=torch.bool).scatter_(-1, indices, True)[:, None]
    none = torch.tensor([-1, 12]).expand(2, 12, 2)  # no keys
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    for mask, seen in ((None, causal), (make("softdelta", 2, 12, 12), causal), (causal[None, None], causal),
                       (make("eager", 2, 12, 12), causal),
                       (make("softdelta", 2, 12, 12, mask_function=masking_utils.bidirectional_mask_function,
                             allow_is_causal_skip=False, allow_is_bidirectional_skip=True), torch.ones_like(causal))):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = attend(model, mask, indices=torch.cat([indices, none], -1), dropout=dropout)
        close(found, attend(model, seen & chosen))
        assert dropout or not warned


@pytest.mark.parametrize("name", ["llama", "inkling2_text"])
def test_compiled(name):
    """A whole model, where the mask is made within; or its layers one by one, which are given a mask."""
    model, ids = architectures.build(name), architectures.draw(2, 50)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model.set_attn_implementation("softdelta")
        found = [torch.compile(model, backend="eager")(ids, use_cache=False).logits]
        if name == "llama":
            for layer in model.model.layers:
                layer.compile(backend="eager")
            found.append(model(ids, use_cache=False).logits)
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
