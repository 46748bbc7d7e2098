"""A call's records as flat rows and back. Autograd, torch.vmap and torch's ops know nothing but tensors and numbers in a
row; what stands where is said here alone."""
from __future__ import annotations

import typing

from .._records import (ATTENTION_WANTED, CONVOLUTION_WANTED, DELTA_WANTED, NORM_WANTED, AttentionInputs,
                        AttentionOptions, ConvolutionInputs, ConvolutionOptions, DeltaInputs, DeltaOptions, NormInputs,
                        NormOptions)

REQUIRED = ("q", "k", "v", "x")
_TYPES = {int: "SymInt", float: "float", bool: "bool"}


class Flat:
    """Of one family. `hidden` are tensors and options that its ops do not have, `changed` a tensor that they write to."""

    def __init__(self, inputs, wanted: tuple[str, ...], options, hidden: tuple[str, ...] = (), changed: str = ""):
        self.inputs, self.wanted, self.options, self._changed = inputs, wanted, options, changed
        self._wanted_at = self.places(*wanted)
        self._shown = tuple(i for i, n in enumerate(inputs._fields) if n not in hidden)
        self._option_names = tuple(n for n in options._fields if n not in hidden)
        self._options_at = tuple(options._fields.index(n) for n in self._option_names)

    def places(self, *names: str) -> tuple[int, ...]:
        """Where inputs stand."""
        return tuple(self.inputs._fields.index(n) for n in names)

    @staticmethod
    def given(inputs) -> tuple:
        """Inputs without the absent ones at their end: autograd looks at each."""
        end = len(inputs)
        while end > 0 and inputs[end - 1] is None:
            end -= 1
        return inputs[:end]

    def wanted_of(self, needs) -> tuple:
        """Of needs_input_grad, a flag for each input that is given: those of `wanted`."""
        count = len(needs)
        return tuple([i < count and needs[i] for i in self._wanted_at])

    def gradients(self, wanted: list, count: int | None = None) -> list:
        """Gradients of `wanted` as one for each of `count` inputs, all by default."""
        row = [None] * len(self.inputs._fields)
        for i, gradient in zip(self._wanted_at, wanted):
            row[i] = gradient
        return row[:count]

    # An op's arguments begin with its tensors, then its options, then what is its own.

    @property
    def tensor_count(self) -> int:
        return len(self._shown)

    @property
    def count(self) -> int:
        return len(self._shown) + len(self._options_at)

    def shown(self, row) -> list:
        """Of a row with an entry for each input: those of an op's tensors."""
        return [row[i] for i in self._shown]

    def places_in_op(self, places) -> tuple[int, ...]:
        """Of places among the inputs."""
        return tuple(self._shown.index(i) for i in places)

    def to_op(self, inputs, options) -> tuple:
        return (*(inputs[i] for i in self._shown), *(options[i] for i in self._options_at))

    def tensors_from_op(self, args):
        row = [None] * len(self.inputs._fields)
        for i, tensor in zip(self._shown, args):
            row[i] = tensor
        return self.inputs._make(row)

    def from_op(self, args) -> tuple:
        """inputs, options, and what follows."""
        options = self.options(**dict(zip(self._option_names, args[self.tensor_count:])))
        return self.tensors_from_op(args), options, args[self.count:]

    def options_of_op(self, options):
        """Options as an op has them: hidden ones are the defaults."""
        return self.options(**{n: options[i] for n, i in zip(self._option_names, self._options_at)})

    def schema(self) -> str:
        """Of an op's tensors and options, "Tensor q, …, Tensor? g, …, SymInt rule, float scale, …"."""
        def kind(name: str) -> str:
            return "Tensor(a0!)" if name == self._changed else "Tensor" if name in REQUIRED else "Tensor?"

        types = typing.get_type_hints(self.options)
        return ", ".join([*(f"{kind(n)} {n}" for n in self.shown(self.inputs._fields)),
                          *(f"{_TYPES[types[n]]} {n}" for n in self._option_names)])


# There are no gradients through a pool of states, and differentiable ops do not return states between chunks.
_POOLS = ("state_indices", "final_state_indices", "has_initial_state", "snapshot_indices")
DELTA = Flat(DeltaInputs, DELTA_WANTED, DeltaOptions, hidden=(*_POOLS, "state_interval", "head_order", "whatever_kept"))
DELTA_STEP = Flat(DeltaInputs, (), DeltaOptions, changed="initial_state",
                  hidden=("float_products", "output_final_state", "whatever_kept"))
# Only the ranks of softdelta.torch.distributed know offsets, and they call the library themselves. An op has its lse.
ATTENTION = Flat(AttentionInputs, ATTENTION_WANTED, AttentionOptions, hidden=("query_offset", "key_offset", "with_lse"))
CONVOLUTION = Flat(ConvolutionInputs, CONVOLUTION_WANTED, ConvolutionOptions, hidden=_POOLS)
CONVOLUTION_STEP = Flat(ConvolutionInputs, (), ConvolutionOptions, hidden=("cu_seqlens", "kept"), changed="initial_state")
NORM = Flat(NormInputs, NORM_WANTED, NormOptions)
