#!/usr/bin/env python3
"""Writes tiny case files of every operation, for the fuzzer to start from: make_seeds.py FOLDER"""

import json
import pathlib
import random
import struct
import sys

WIDTH = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "BOOL": 1, "U8": 1, "I32": 4, "I64": 8}


def numbers(dtype, count):
    """Between −1 and 1, so that results are wrong; indices and masks of zeros."""
    values = [random.uniform(-1, 1) for _ in range(count)]
    if dtype == "BF16":
        return b"".join(struct.pack("<f", x)[2:] for x in values)
    code = {"F64": "d", "F32": "f", "F16": "e"}.get(dtype)
    return struct.pack(f"<{count}{code}", *values) if code else bytes(count * WIDTH[dtype])


def make_case(metadata, tensors):
    """tensors: name -> (dtype, shape) of drawn numbers, or (dtype, shape, bytes)."""
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, shape, *content) in tensors.items():
        count = 1
        for size in shape:
            count *= size
        begin = len(data)
        data += content[0] if content else numbers(dtype, count)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def lengths(*numbers, dtype="I32"):
    return dtype, [len(numbers)], struct.pack(f"<{len(numbers)}{'i' if dtype == 'I32' else 'q'}", *numbers)


def make_attention():
    qkv = {"q": ("BF16", [1, 2, 2, 2]), "k": ("BF16", [1, 3, 1, 2]), "v": ("F16", [1, 3, 1, 1])}
    results = {"o": ("F16", [1, 2, 2, 1]), "lse": ("F32", [1, 2, 2])}
    gradients = {"do": ("F16", [1, 2, 2, 1]), "dlse": ("F32", [1, 2, 2]), "dq": ("BF16", [1, 2, 2, 2])}
    masks = {"mask": ("BOOL", [1, 1, 2, 3]), "bias": ("F32", [1, 1, 1, 3]), "sink": ("F32", [2]),
             "dbias": ("F32", [1, 1, 1, 3]), "dsink": ("F64", [2])}
    yield {"op": "attention", "scale": "0.5", "causal": "bottom_right", "window_left": "1"}, {**qkv, **results}
    yield {"op": "attention", "softcap": "20", "top_w": "2", "empty_row": "zero"}, {**qkv, **gradients, **masks}
    stages = {"delta": ("F32", [1, 2, 2]), "ds": ("F32", [1, 2, 2, 3]), "dbias_tiles": ("BF16", [1, 2, 1, 3])}
    yield {"op": "attention", "window_right": "9223372036854775807"}, {**qkv, **results, **gradients, **stages}
    yield {"op": "attention"}, {**qkv, **results, "cu_seqlens_q": lengths(0, 1, 2), "cu_seqlens_k": lengths(0, 3, 3)}
    yield {"op": "attention"}, {**qkv, **results, "cache_seqlens": lengths(3), "block_table": ("I32", [1, 2])}
    yield {"op": "attention"}, {**qkv, "cu_seqlens_q": lengths(0, 1, 2), "cache_seqlens": lengths(3, 2),
                                "block_table": ("I32", [2, 1])}


def make_delta_rules():
    for op in ("delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla", "gla", "gdn2"):
        tensors = {"q": ("BF16", [1, 2, 1, 2]), "k": ("BF16", [1, 2, 1, 2]), "v": ("BF16", [1, 2, 2, 1])}
        metadata = {"op": op, "scale": "1", "use_qk_l2norm_in_kernel": "true"}
        if op != "delta_rule":
            tensors["g"] = ("F32", [1, 2, 2, 2] if op in ("kda", "gla", "gdn2") else [1, 2, 2])
        if op in ("comba", "gdn2"):
            tensors["p"] = ("BF16", [1, 2, 1, 2])
        if op not in ("simple_gla", "gla"):
            tensors["beta"] = ("F32", [1, 2, 2])
        yield metadata, {**tensors, "o": ("BF16", [1, 2, 2, 1]), "cu_seqlens": lengths(0, 1, 2, dtype="I64")}
        tensors["do"] = ("BF16", [1, 2, 2, 1])
        tensors["initial_state"] = tensors["dfinal_state"] = tensors["dinitial_state"] = ("F32", [1, 2, 2, 1])
        if op in ("kda", "comba"):
            metadata |= {"use_gate_in_kernel": "true", "lower_bound": "-5.0", "safe_gate": "true", "chunk_size": "16"}
            tensors["A_log"] = tensors["dA_log"] = ("F32", [1, 1, 2, 1])
        yield metadata, {**tensors, "dq": ("BF16", [1, 2, 1, 2]), "h": ("F32", [1])}
        stages = {"A": ("F32", [1, 2, 2, 16]), "h": ("BF16", [1, 1, 2, 2, 1]), "dw": ("F32", [1, 2, 2, 2])}
        yield {**metadata, "chunk_size": "16"}, {**tensors, **stages, "dk": ("BF16", [1, 2, 1, 2])}


def make_layers():
    x, z = ("BF16", [1, 3, 2]), ("BF16", [1, 3, 2, 2])
    convolution = {"x": x, "weight": ("F32", [2, 2]), "bias": ("F32", [2]), "y": x, "initial_state": ("F32", [2, 2, 1])}
    gradients = {"dy": x, "dx": x, "dweight": ("F32", [2, 2]), "dfinal_state": ("F32", [2, 2, 1])}
    yield {"op": "causal_convolution", "activation": "silu"}, {**convolution, "cu_seqlens": lengths(0, 1, 3), **gradients}
    norm = {"x": z, "z": z, "weight": ("F32", [2]), "y": z, "dy": z, "dz": z}
    yield {"op": "gated_norm", "gate": "sigmoid", "epsilon": "1e-5"}, norm


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    random.seed(1)
    for i, case in enumerate([*make_attention(), *make_delta_rules(), *make_layers()]):
        (folder / f"seed_{i:02}.safetensors").write_bytes(make_case(*case))
    for i in range(300):  # cases that the fuzzers draw from bytes
        (folder / f"drawn_{i:03}").write_bytes(bytes([255]) * 8 + random.randbytes(1500))


if __name__ == "__main__":
    main()
