"""The plugin of scripts/test-fla on a checkout in miniature, written here."""
import os
import subprocess
import sys
from pathlib import Path

FILES = {
    "fla/__init__.py": 'raise ImportError("not to be imported")\n__version__ = "0"',
    "fla/utils/_testing.py": """
import torch
from ._config import FLA_CI_ENV
def assert_close(prefix, ref, tri, ratio):
    assert (ref - tri).norm() <= ratio * ref.norm(), prefix
""",
    "fla/ops/simple_gla/naive.py": """
import torch
def naive_recurrent_simple_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=True):
    state, rows = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) + initial_state, []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None] + k[:, t, ..., None] * v[:, t, :, None]
        rows.append((q[:, t, :, None] @ state)[:, :, 0] * scale)
    return torch.stack(rows, 1), state
""",
    "fla/ops/kda/gate.py": """
import torch
import triton
from fla.ops.utils.op import exp
@triton.jit
def gate_kernel(x): pass
def naive_kda_gate(g): return -g.exp()
def fused_kda_gate(g): return gate_kernel[(1,)](g)
""",
    "tests/ops/test_all.py": """
import pytest
import torch
import triton
from fla.ops.kda.gate import fused_kda_gate, naive_kda_gate
from fla.ops.simple_gla.chunk import chunk_simple_gla
from fla.ops.simple_gla.fused_recurrent import fused_recurrent_simple_gla
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
from fla.utils import IS_NVIDIA, assert_close, device

assert device == "cpu" and not IS_NVIDIA and triton.next_power_of_2(60) == 64

def both(reference, factor=1):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 300, 2, n) for n in (3, 3, 4)] + [naive_kda_gate(torch.randn(1, 300, 2))]
    inputs = [t.requires_grad_() for t in inputs]
    options = dict(scale=1.0, initial_state=torch.randn(1, 2, 3, 4), output_final_state=True)
    results = []
    for function in (reference, chunk_simple_gla):
        o, state = function(*inputs, **options)
        results.append([o, state, *torch.autograd.grad((o * o).sum() + state.sum(), inputs)])
    for a, b in zip(*results):
        assert_close("all", a, factor * b, 1e-5)

def test_ours():
    both(naive_recurrent_simple_gla)

def test_ours_against_f64():
    both(fused_recurrent_simple_gla)

def test_a_mistake():
    both(naive_recurrent_simple_gla, 1.001)

def test_their_kernels():
    fused_kda_gate(torch.zeros(1))
""",
}


def test_what_the_adapter_replaces(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run = subprocess.run([sys.executable, "-m", "pytest", "-p", "fla_adapter", "--fla", str(tmp_path), "-p",
                          "no:cacheprovider", "-rfs", "--rootdir", str(tmp_path), str(tmp_path / "tests")], text=True,
                         env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, capture_output=True)
    assert "2 passed" in run.stdout and "1 failed" in run.stdout and "1 skipped" in run.stdout, run.stdout + run.stderr
    assert "::test_a_mistake" in run.stdout.partition("FAILED ")[2]
    assert "fla.ops.kda.gate.fused_kda_gate is a part of fla's own kernels" in run.stdout
