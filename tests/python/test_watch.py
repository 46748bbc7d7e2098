"""softdelta.watch on calls of a run that trains."""
import audit_kernels
import pytest
import torch

import softdelta

right = audit_kernels.kernels("kda")["chunks of 64, f32 products, gates summed in float64"]


class Larger(torch.autograd.Function):
    """Its gradient is a tenth too large."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, d):
        return d * 1.1


def draw(seed=0, heads_first=False):
    torch.manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 70, 2, 8), dim=-1).requires_grad_() for _ in range(2))
    v, beta = torch.randn(2, 70, 4, 12, requires_grad=True), torch.rand(2, 70, 4, requires_grad=True)
    g = (-torch.rand(2, 70, 4, 8)).requires_grad_()
    return q, k, v, g, beta


def test_right_calls_are_left_alone(tmp_path):
    watched = softdelta.watch(right, op="kda", calls=2, path=tmp_path / "case")
    for seed in range(3):
        inputs = draw(seed)
        o, state = watched(*inputs, scale=0.4, output_final_state=True)
        expected = torch.autograd.grad(right(*inputs, scale=0.4)[0].square().sum(), inputs)
        assert all(map(torch.equal, torch.autograd.grad(o.square().sum(), inputs), expected))
    assert watched.judged == 2 and watched.found is None and not (tmp_path / "case").exists()


def test_the_first_wrong_call_is_saved(tmp_path):
    calls = []

    def kernel(q, k, v, g, beta, **options):
        calls.append(1)
        return right(Larger.apply(q) if len(calls) > 1 else q, k, v, g, beta, **options)

    watched = softdelta.watch(kernel, op="kda", path=tmp_path / "case")
    watched(*draw())[0].sum().backward()
    assert watched.found is None
    with pytest.warns(UserWarning, match=r"call 2 is wrong: dq \("):
        watched(*draw())[0].sum().backward()
    watched(*draw())[0].sum().backward()
    assert watched.judged == 2
    verdicts = {f.name: f.verdict for f in softdelta.verify(tmp_path / "case").results}
    assert verdicts.pop("dq") == "wrong" and len(verdicts) == 5 and set(verdicts.values()) == {"right"}


def test_attention(tmp_path):
    q, k, v = (torch.randn(2, 2, 30, 8, requires_grad=True) for _ in range(3))
    mask = torch.randn(30, 30, requires_grad=True)
    watched = softdelta.watch(torch.nn.functional.scaled_dot_product_attention, op="attention", path=tmp_path / "case")
    watched(q, k, v, attn_mask=mask, scale=0.3).sum().backward()
    watched(q, k, v, is_causal=True)
    assert watched.judged == 2 and watched.found is None
    with pytest.warns(UserWarning, match="call 1 is wrong: o "):
        softdelta.watch(lambda query, key, value: query, op="attention", path=tmp_path / "case")(q, k, v)
    with pytest.raises(ValueError, match="dropout_p is 0.5"):
        watched(q, k, v, dropout_p=0.5)
    with pytest.raises(ValueError, match="op is 'softmax'"):
        softdelta.watch(right, op="softmax")
