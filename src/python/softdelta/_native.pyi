"""The C interface (include/softdelta/softdelta.h) for Python objects, in the order of its structures. Rules, causal,
empty_row are its numbers, engine a name; NaN is a default; threads 0 is OpenMP's default; bf16: uint16 arrays hold bf16."""
from typing import Any, Callable

Array = Any  # speaks DLPack or the buffer protocol

class Unsupported(NotImplementedError):
    """The call is legal, but this engine, build or machine cannot do it."""

def attention_forward(
    q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None, sink: Array | None,
    cu_seqlens_q: Array | None, cu_seqlens_k: Array | None, cache_seqlens: Array | None, block_table: Array | None,
    scale: float, causal: int, window_left: int, window_right: int, softcap: float, empty_row: int, top_w: int,
    o: Array | None, lse: Array | None, engine: str, threads: int, bf16: bool, heads_first: bool = False,
) -> None: ...
def attention_backward(
    q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None, sink: Array | None,
    cu_seqlens_q: Array | None, cu_seqlens_k: Array | None, cache_seqlens: Array | None, block_table: Array | None,
    scale: float, causal: int, window_left: int, window_right: int, softcap: float, empty_row: int, top_w: int,
    o: Array | None, lse: Array | None, d_o: Array, dlse: Array | None, dq: Array | None, dk: Array | None,
    dv: Array | None, dbias: Array | None, dsink: Array | None, engine: str, threads: int, bf16: bool,
    heads_first: bool = False,
) -> None: ...
def delta_forward(
    rule: int, q: Array, k: Array, v: Array, g: Array | None, g_gamma: Array | None, beta: Array | None,
    p: Array | None, initial_state: Array | None, A_log: Array | None, dt_bias: Array | None, cu_seqlens: Array | None,
    state_indices: Array | None, scale: float, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
    lower_bound: float, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, state_v_first: bool,
    state_interval: int, o: Array | None, final_state: Array | None, states: Array | None, engine: str, threads: int,
    bf16: bool,
) -> None: ...
def delta_backward(
    rule: int, q: Array, k: Array, v: Array, g: Array | None, g_gamma: Array | None, beta: Array | None,
    p: Array | None, initial_state: Array | None, A_log: Array | None, dt_bias: Array | None, cu_seqlens: Array | None,
    scale: float, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool, lower_bound: float,
    use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, state_v_first: bool, d_o: Array | None,
    dfinal_state: Array | None, dq: Array | None, dk: Array | None, dv: Array | None, dg: Array | None,
    dg_gamma: Array | None, dbeta: Array | None, dp: Array | None, dinitial_state: Array | None, dA_log: Array | None,
    ddt_bias: Array | None, engine: str, threads: int, bf16: bool,
) -> None: ...
def version() -> str: ...
def engines() -> list[str]: ...
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
def diagnose_case(
    metadata: dict[str, str], tensors: dict[str, Array], actual: dict[str, Array], top: int, plot: bool, threads: int,
    progress: Callable[[float, str], object] | None, bf16: bool,
) -> dict[str, Any]: ...
