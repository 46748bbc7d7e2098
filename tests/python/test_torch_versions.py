"""The oldest torch, and a torch that has lost what it keeps to itself."""
import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import softdelta.torch as sd


def test_the_oldest_torch_is_that_of_the_package():
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
    declared = re.search(r'torch = \["torch>=([0-9.]+)"\]', text).group(1)
    assert declared == ".".join(map(str, sd.OLDEST))


def test_an_older_torch_is_refused(monkeypatch):
    for version in ("2.9.1+cpu", "1.13.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(ImportError, match=re.escape(f"softdelta.torch needs torch 2.10 or later, and this is torch {version}")):
            importlib.reload(sd)
    for version in ("2.10.0a0", "2.11.1", "3.0"):
        monkeypatch.setattr(torch, "__version__", version)
        importlib.reload(sd)


CALL = """
x, g, beta = torch.linspace(-1, 1, 80).view(1, 5, 2, 8).requires_grad_(), -torch.ones(1, 5, 2), torch.ones(1, 5, 2)
o, state = sd.chunk_gated_delta_rule(x, x, x, g, beta, output_final_state=True)
a = sd.flash_attn_func(x, x, x, causal=True)
dx, = torch.autograd.grad(o.sin().sum() + a.sin().sum() + state.sum(), x)
results = [t.tolist() for t in (o, a, dx)]
"""
WITHOUT = f"""
import torch
torch.ones(1, requires_grad=True).sum().backward()  # imports what torch needs them for
del torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
import softdelta.torch as sd
from softdelta.torch import _route
assert not _route._knows_torch
{CALL}
print(results)
"""


def test_without_what_torch_keeps_to_itself():
    """Calls are ops, with the same results."""
    other = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert other.returncode == 0, other.stderr
    names = {"torch": torch, "sd": sd}
    exec(CALL, names)
    assert other.stdout == f"{names['results']}\n"
