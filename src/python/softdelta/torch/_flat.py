"""A call's records as flat rows and back. Autograd, torch.vmap and torch's ops know nothing but tensors and numbers in a
row; what stands where is said here alone."""
from __future__ import annotations

import typing

from .._records import (ATTENTION_WANTED, CONVOLUTION_WANTED, DELTA_WANTED, NORM_WANTED, AttentionInputs,
                        AttentionOptions, ConvolutionInputs, ConvolutionOptions, DeltaInputs, DeltaOptions, NormInputs,
                        NormOptions)

REQUIRED = ("q", "k", "v", "x")


class Flat:
    """Of one family. `hidden` are tensors and options that its differentiable ops do not have. `late` are tensors
    without a gradient that came later: an op has them last and they may be missing, so that saved graphs stay right."""

    def __init__(self, inputs, wanted: tuple[str, ...], options, hidden: tuple[str, ...] = (),
                 late: tuple[str, ...] = ()):
        self.inputs, self.wanted, self.options = inputs, wanted, options
        self._wanted_at = self.places(*wanted)
        self._shown = tuple(i for i, n in enumerate(inputs._fields) if n not in hidden + late)
        self._late = self.places(*late)
        self._option_count = sum(n not in hidden for n in options._fields)

    def places(self, *names: str) -> tuple[int, ...]:
        """Where inputs stand."""
        return tuple(self.inputs._fields.index(n) for n in names)

    def wanted_of(self, needs) -> tuple:
        """Of needs_input_grad, a flag for each input: those of `wanted`."""
        return tuple(needs[i] for i in self._wanted_at)

    def gradients(self, wanted: list) -> list:
        """Gradients of `wanted` as one for each input."""
        row = [None] * len(self.inputs._fields)
        for i, gradient in zip(self._wanted_at, wanted):
            row[i] = gradient
        return row

    # An op's arguments begin with its tensors, then its options, then what is its own; its late tensors are last.

    @property
    def tensor_count(self) -> int:
        return len(self._shown)

    @property
    def count(self) -> int:
        return len(self._shown) + self._option_count

    def shown(self, row) -> list:
        """Of a row with an entry for each input: those of an op's tensors."""
        return [row[i] for i in self._shown]

    def to_op(self, inputs, options) -> tuple:
        return (*(inputs[i] for i in self._shown), *self.shown_options(options))

    def shown_options(self, options) -> tuple:
        """Those of an op: hidden ones are last."""
        return tuple(options[i] for i in range(self._option_count))  # slices of records stop the compiler of torch 2.8

    def late(self, inputs) -> list:
        return [inputs[i] for i in self._late]

    def tensors_from_op(self, args, own: int = 0):
        """own: how many arguments stand between the options and the late tensors."""
        row = [None] * len(self.inputs._fields)
        for i, tensor in zip(self._shown, args):
            row[i] = tensor
        for i, tensor in zip(self._late, args[self.count + own:]):
            row[i] = tensor
        return self.inputs._make(row)

    def from_op(self, args, own: int | None = None) -> tuple:
        """inputs, options, and the op's own arguments; None: all that follow."""
        options = self.options(*args[self.tensor_count:self.count])
        own = len(args) - self.count if own is None else own
        return self.tensors_from_op(args, own), options, args[self.count:self.count + own]

    def schema(self) -> str:
        """Of an op's tensors and options, "Tensor q, …, Tensor? g, …, SymInt rule, float scale, …"."""
        return ", ".join(self.tensor_schema(self.inputs._fields[i]) for i in self._shown) + ", " + self.option_schema()

    def late_schema(self) -> str:
        return "".join(f", Tensor? {self.inputs._fields[i]}=None" for i in self._late)

    @staticmethod
    def tensor_schema(name: str) -> str:
        return f"Tensor {name}" if name in REQUIRED else f"Tensor? {name}"

    def option_schema(self, first: int = 0) -> str:
        types = typing.get_type_hints(self.options)
        names = {int: "SymInt", float: "float", bool: "bool"}
        return ", ".join(f"{names[types[n]]} {n}" for n in self.options._fields[first:self._option_count])


# There are no gradients through a pool of states, and ops do not return states between chunks.
DELTA = Flat(DeltaInputs, DELTA_WANTED, DeltaOptions, hidden=("state_indices", "state_interval", "head_order", "float_products"))
# Only the ranks of softdelta.torch.distributed know offsets, and they call the library themselves.
ATTENTION = Flat(AttentionInputs, ATTENTION_WANTED, AttentionOptions,
                 hidden=("query_offset", "key_offset"), late=("alibi_slopes", "bias_slopes", "k_scale", "v_scale"))
CONVOLUTION = Flat(ConvolutionInputs, CONVOLUTION_WANTED, ConvolutionOptions, hidden=("state_indices",))
NORM = Flat(NormInputs, NORM_WANTED, NormOptions)
