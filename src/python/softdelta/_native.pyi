"""The C interface (include/softdelta/softdelta.h) for Python objects, in the order of its structures. Rules, causal,
empty_row are its numbers, engine a name; NaN is a default; threads 0 is OpenMP's default; bf16: uint16 arrays hold bf16;
events and kept memory of a GPU are their addresses."""
from typing import Any, Callable

Array = Any  # speaks DLPack or the buffer protocol

class Unsupported(NotImplementedError):
    """The call is legal, but this engine, build or machine cannot do it."""

# Tensors and options are the records of _records: tuples in the order of softdelta.h.
RULES: tuple[str, ...]
RULE_NUMBERS: dict[str, int]
RULE_FACTS: dict[str, tuple[str, str, bool]]
ATTENTION_INPUTS: tuple[str, ...]
ATTENTION_OUTPUTS: tuple[str, ...]
ATTENTION_GRADIENTS: tuple[str, ...]
DELTA_INPUTS: tuple[str, ...]
DELTA_OUTPUTS: tuple[str, ...]
DELTA_GRADIENTS: tuple[str, ...]
CONVOLUTION_INPUTS: tuple[str, ...]
CONVOLUTION_OUTPUTS: tuple[str, ...]
CONVOLUTION_GRADIENTS: tuple[str, ...]
NORM_INPUTS: tuple[str, ...]
NORM_OUTPUTS: tuple[str, ...]
NORM_GRADIENTS: tuple[str, ...]

def attention_forward(
    inputs: tuple[Array | None, ...], options: tuple, outputs: tuple[Array | None, ...], engine: str, threads: int,
    bf16: bool, heads_first: bool = False,
) -> None: ...
def attention_backward(
    inputs: tuple[Array | None, ...], options: tuple, gradients: tuple[Array | None, ...], engine: str, threads: int,
    bf16: bool, heads_first: bool = False,
) -> None: ...
class AttentionPlan:
    def __init__(
        self, inputs: tuple[Array | None, ...], options: tuple, outputs: tuple[Array | None, ...], engine: str,
        threads: int, bf16: bool, heads_first: bool = False,
    ) -> None: ...
    def forward(
        self, inputs: tuple[Array | None, ...], outputs: tuple[Array | None, ...], bf16: bool,
    ) -> None: ...
def delta_forward(
    inputs: tuple[Array | None, ...], options: tuple, outputs: tuple[Array | None, ...], engine: str, threads: int,
    bf16: bool, state_ready: int = 0, state_done: int = 0, kept: int = 0, kept_size: int = 0,
) -> None: ...
def delta_backward(
    inputs: tuple[Array | None, ...], options: tuple, gradients: tuple[Array | None, ...], engine: str, threads: int,
    bf16: bool, state_ready: int = 0, state_done: int = 0, kept: int = 0, kept_size: int = 0,
) -> None: ...
def delta_kept_size(inputs: tuple[Array | None, ...], options: tuple, engine: str) -> int: ...
def convolution_forward(
    inputs: tuple[Array | None, ...], options: tuple, results: tuple[Array | None, ...], engine: str, threads: int,
    bf16: bool,
) -> None: ...
def convolution_backward(
    inputs: tuple[Array | None, ...], options: tuple, results: tuple[Array | None, ...], engine: str, threads: int,
    bf16: bool,
) -> None: ...
def norm_forward(
    inputs: tuple[Array | None, ...], options: tuple, results: tuple[Array | None, ...], engine: str, threads: int,
    bf16: bool,
) -> None: ...
def norm_backward(
    inputs: tuple[Array | None, ...], options: tuple, results: tuple[Array | None, ...], engine: str, threads: int,
    bf16: bool,
) -> None: ...
def xla_handler() -> Any: ...  # where it was built beside jaxlib
def version() -> str: ...
def engines() -> list[str]: ...
def program(arguments: list[bytes]) -> int: ...
def isa_levels() -> list[dict[str, Any]]: ...
def expect_output(path: bytes, input: bytes) -> None: ...
def write_text(path: bytes, text: str) -> None: ...
def write_case(path: bytes, metadata: dict[str, str], tensors: dict[str, Array], bf16: bool) -> list[str]: ...
def verify_file(
    path: bytes, actual: dict[str, Array], limits: dict[str, float], engine: str, threads: int, bf16: bool,
) -> dict[str, Any]: ...
def verify_case(
    metadata: dict[str, str], tensors: dict[str, Array], actual: dict[str, Array], limits: dict[str, float],
    engine: str, threads: int, bf16: bool,
) -> dict[str, Any]: ...
def diagnose_file(
    path: bytes, actual: dict[str, Array], top: int, plot: bool, threads: int,
    progress: Callable[[float, str], object] | None, bf16: bool,
) -> dict[str, Any]: ...
def hidden_mistakes(metadata: dict[str, str], tensors: dict[str, Array], bf16: bool) -> list[tuple[str, str]]: ...
def diagnose_case(
    metadata: dict[str, str], tensors: dict[str, Array], actual: dict[str, Array], top: int, plot: bool, threads: int,
    progress: Callable[[float, str], object] | None, bf16: bool,
) -> dict[str, Any]: ...
