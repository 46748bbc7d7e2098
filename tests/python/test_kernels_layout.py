"""integrations/kernels, as the package `kernels` loads it from its folder."""
import pathlib

import pytest
import torch

import softdelta.torch as sd
from drawing import delta_call

kernels = pytest.importorskip("kernels")  # with it installed, transformers asks the hub for kernels: not in the environment of all tests

FOLDER = pathlib.Path(__file__).parents[2] / "integrations" / "kernels"


def test_functions_and_layers():
    kernel = kernels.get_local_kernel(FOLDER, backend="cpu")
    assert kernel.chunk_gated_delta_rule is sd.chunk_gated_delta_rule
    c = delta_call("gated_delta_rule")
    state = c["initial_state"]
    for layer, function in ((kernel.layers.chunk_gated_delta_rule, sd.chunk_gated_delta_rule),
                            (kernel.layers.recurrent_gated_delta_rule, sd.fused_recurrent_gated_delta_rule)):
        found = layer()(c["q"], c["k"], c["v"], c["g"], c["beta"], initial_state=state, output_final_state=True)
        for a, b in zip(found, function(**c, output_final_state=True)):
            assert torch.equal(a, b)
    x, weight, held = torch.randn(2, 5, 9), torch.randn(5, 4), torch.randn(2, 5, 4)
    assert torch.equal(kernel.layers.causal_conv1d_fn()(x, weight, None, "silu"), sd.causal_conv1d_fn(x, weight, activation="silu"))
    other = held.clone()
    assert torch.equal(kernel.layers.causal_conv1d_update()(x[..., :1], held, weight),
                       sd.causal_conv1d_update(x[..., :1], other, weight)) and torch.equal(held, other)
    norm = kernel.layers.FusedRMSNormGated()
    norm.weight, norm.activation, norm.variance_epsilon = torch.nn.Parameter(weight[0]), "silu", 1e-5
    assert torch.equal(norm(x.view(-1, 9)[:, :4], x.view(-1, 9)[:, 4:8]),
                       sd.rms_norm_gated(x.view(-1, 9)[:, :4], x.view(-1, 9)[:, 4:8], weight[0], eps=1e-5))
