"""torch's own samples of scaled_dot_product_attention: the right results, or a ValueError."""
import sys
import types
import unittest

import pytest
import torch

import softdelta
import softdelta.torch as sd

with pytest.MonkeyPatch.context() as patch:  # torch's tests want expecttest, and its samples do not
    if "expecttest" not in sys.modules:
        patch.setitem(sys.modules, "expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def samples(dtype):
    """q divided by 9. As they are, scores reach 200, and the rounding of one lse to f32 is most of a gradient's error."""
    torch.manual_seed(0)
    drawn = list(invocations.sample_inputs_scaled_dot_product_attention(None, "cpu", dtype, requires_grad=True))
    for sample in drawn:
        sample.input = (sample.input.detach() / 9).requires_grad_()
    return drawn


@pytest.mark.parametrize("number", range(len(samples(torch.float32))))
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_of_torch(dtype, number):
    sample = samples(dtype)[number]
    q, k, v, options = sample.input, *sample.args, sample.kwargs
    if options["dropout_p"] or q.dim() != k.dim():
        with pytest.raises(ValueError, match="dropout_p is 0.5|query, key and value have 3, 4 and 4 dimensions"):
            sd.scaled_dot_product_attention(q, k, v, **options)
        return
    o = sd.scaled_dot_product_attention(q, k, v, **options)
    do = torch.randn_like(o)
    names = {"dq": q, "dk": k, "dv": v}
    case = dict(op="attention", causal="top_left" if options["is_causal"] else "none")
    if "attn_mask" in options:
        names["dbias"] = options["attn_mask"]
        case["bias"] = options["attn_mask"].detach()[None, None]
    grads = dict(zip(names, torch.autograd.grad(o, list(names.values()), do)))

    def rows_first(t):
        return (t if t.dim() == 4 else t[:, None]).detach().transpose(1, 2)

    grads = {n: t[None, None] if n == "dbias" else rows_first(t) for n, t in grads.items()}
    case.update(q=rows_first(q), k=rows_first(k), v=rows_first(v), do=rows_first(do))
    softdelta.testing.assert_close({"o": rows_first(o), **grads}, case)
