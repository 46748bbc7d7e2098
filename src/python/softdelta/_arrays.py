"""Arrays of whatever library the caller uses: what the native module reads, and new ones for results.

NumPy has no bf16: arrays of ml_dtypes.bfloat16 are understood, and arrays of uint16 with dtype="bf16".
"""
from __future__ import annotations

import sys

DTYPES = ("f64", "f32", "bf16", "f16", "bool", "i32", "i64")


class Arrays:
    """How to read this call's arrays and make new ones; `example` tells whose they are. `recording`: the function that
    takes tensors of torch whose gradients are recorded."""

    def __init__(self, example, dtype: str | None, recording: str = ""):
        if dtype not in (None, "bf16"):
            raise ValueError(f"dtype is {dtype!r}, expected None or 'bf16', which is what arrays of uint16 then hold")
        self.uint16_is_bf16, self.recording = dtype == "bf16", recording
        torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
        self.kind = "numpy"
        if torch is not None and isinstance(example, torch.Tensor):
            self.kind = "torch"
        elif jax is not None and isinstance(example, jax.Array):
            self.kind = "jax"

    @property
    def bf16(self) -> bool:
        """Whether uint16 means bf16 to the native module: bfloat16 of ml_dtypes is handed over as uint16."""
        return self.uint16_is_bf16 or self._saw_bfloat16

    _saw_bfloat16 = False

    def readable(self, x):
        """x for the native module."""
        if getattr(getattr(x, "dtype", None), "name", None) == "bfloat16" and hasattr(x, "view") and _is_numpy(x):
            self._saw_bfloat16 = True
            return x.view("uint16")
        return x

    def read(self, record):
        """A record of tensors for the native module."""
        for name, x in zip(record._fields, record):
            self._refuse_recorded(name, x)
        return record._make(map(self.readable, record))

    def _refuse_recorded(self, name: str, x) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and this function records none: expected {self.recording}, or "
                             f"{name}.detach()")

    def swapped(self, name: str, x):
        """A view of x with rows and heads exchanged."""
        if x is None:
            return None
        if not hasattr(x, "swapaxes"):
            raise TypeError(f"{name} is {type(x).__name__}, expected an array with swapaxes for layout 'bhtd'")
        return x.swapaxes(1, 2)

    def writable(self, name: str, x):
        self._refuse_recorded(name, x)
        if self.kind == "jax" and x is not None and not _is_numpy(x):
            raise ValueError(f"{name} is a JAX array, which nobody can write to, expected None or a NumPy array")
        return self.readable(x)

    def dtype_of(self, x) -> str:
        """f64, f32, bf16 or f16 of an input; what else comes is refused by the library."""
        name = str(x.dtype).removeprefix("torch.")
        return {"float64": "f64", "bfloat16": "bf16", "float16": "f16", "uint16": "bf16"}.get(name, "f32")

    def empty(self, shape, dtype: str, example=None):
        """A new array of this shape and type; bf16 as the example's type has it."""
        if self.kind == "torch":
            import torch
            types = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
            return torch.empty(tuple(shape), dtype=types[dtype])
        import numpy
        if dtype == "bf16" and self.kind == "jax" or dtype == "bf16" and str(example.dtype) == "bfloat16":
            import ml_dtypes
            return numpy.empty(shape, ml_dtypes.bfloat16)
        types = {"f64": "float64", "f32": "float32", "bf16": "uint16", "f16": "float16"}
        return numpy.empty(shape, types[dtype])

    def finish(self, x):
        """A result that is written, as the caller's library has it."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(x, torch.Tensor):
            torch.autograd.graph.increment_version(x)  # a graph that has saved it must not use it
        if x is None or self.kind != "jax":
            return x
        import jax.numpy
        return jax.numpy.asarray(x)


def _is_numpy(x) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def shape_of(name: str, x, rank: int, meaning: str) -> tuple:
    """The shape of an input; ValueError unless it has `rank` dimensions."""
    if not hasattr(x, "shape"):
        raise TypeError(f"{name} is {type(x).__name__}, expected an array {meaning}")
    if len(x.shape) != rank:
        raise ValueError(f"{name} has {len(x.shape)} dimensions, expected {rank}: {meaning}")
    return tuple(x.shape)


def bounds_of(name: str, x) -> int:
    """How many bounds an array of sequence bounds has; ValueError unless there is one."""
    count, = shape_of(name, x, 1, "[N+1]")
    if count == 0:
        raise ValueError(f"{name} has shape [0], expected [N+1]: where each sequence begins, and the end of the last")
    return count
