"""What a delta rule's forward pass keeps for its backward pass, from one to the other: shown by a library that keeps 64 bytes,
for only those of GPUs keep something (test_torch_cuda.py)."""
import ctypes

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import softdelta.torch as sd
from drawing import delta_call
from softdelta.torch import _calls


class Keeping:
    size = 64

    def __init__(self, native):
        self.native, self.read = native, []

    def __getattr__(self, name):
        return getattr(self.native, name)

    def delta_forward(self, *args):
        for address, size in [args[8:]] if len(args) > 8 else []:
            ctypes.memset(address, 7, size)
        self.native.delta_forward(*args[:6])

    def delta_backward(self, *args):
        self.read += [ctypes.string_at(address, size) for address, size in ([args[8:]] if len(args) > 8 else [])]
        self.native.delta_backward(*args[:6])


@pytest.fixture
def read(monkeypatch):
    """What backward passes read of what was kept."""
    native = Keeping(_calls._native)
    monkeypatch.setattr(_calls, "_native", native)
    monkeypatch.setattr(_calls, "new_kept", lambda inputs, options: torch.zeros(64, dtype=torch.uint8))
    return native.read


@pytest.fixture
def call():
    torch.manual_seed(0)
    return delta_call("kda", torch.float32, requires_grad=True)


def expected(call, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(_calls, "new_kept", lambda *_: None)
        o, _ = sd.chunk_kda(**call)
        return torch.autograd.grad(o.sum(), _leaves(call))


def _leaves(call):
    return [t for t in call.values() if isinstance(t, torch.Tensor) and t.requires_grad]


def _is_right(grads, call, monkeypatch):
    return all(torch.equal(g, e) for g, e in zip(grads, expected(call, monkeypatch), strict=True))


def test_a_backward_pass_reads_it_as_often_as_it_runs(read, call, monkeypatch):
    o, _ = sd.chunk_kda(**call)
    for _ in range(2):
        assert _is_right(torch.autograd.grad(o.sum(), _leaves(call), retain_graph=True), call, monkeypatch)
    assert read == [bytes([7]) * 64] * 2


def test_without_gradients_nothing_is_kept(monkeypatch, call):
    monkeypatch.setattr(_calls, "new_kept", lambda *_: pytest.fail("kept"))
    with torch.no_grad():
        sd.chunk_kda(**call)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_it_in_its_second_forward_pass(read, call, monkeypatch, reentrant):
    names, leaves = zip(*((n, t) for n, t in call.items() if isinstance(t, torch.Tensor)))
    rest = {n: t for n, t in call.items() if n not in names}
    o = checkpoint(lambda *t: sd.chunk_kda(**dict(zip(names, t)), **rest)[0], *leaves, use_reentrant=reentrant)
    o.sum().backward()
    assert read == [bytes([7]) * 64]
    assert _is_right([t.grad for t in _leaves(call)], call, monkeypatch)


def test_hooks_of_saved_tensors_see_it(read, call, monkeypatch):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        o, _ = sd.chunk_kda(**call)
    assert _is_right(torch.autograd.grad(o.sum(), _leaves(call)), call, monkeypatch)
    assert read == [bytes([7]) * 64]


def test_traced_and_transformed_calls_keep_nothing(read, call, monkeypatch):
    def loss(v):
        return sd.chunk_kda(**(call | {"v": v}))[0].sum()

    by = torch.func.grad(loss)(call["v"].detach())
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    again, = torch.autograd.grad(compiled(call["v"]), call["v"])
    assert torch.equal(by, again)
    assert read == []


def test_a_limit_is_a_number_of_bytes():
    for n in (-1, 0.5, "1"):
        with pytest.raises(ValueError, match="^n is"):
            sd.set_most_kept(n)
