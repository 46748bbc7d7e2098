"""Kernels of a shared library that has the C interface's names (softdelta/softdelta.h): softdelta_delta_forward,
softdelta_delta_backward, softdelta_attention_forward, softdelta_attention_backward. Loaded by the process under audit."""
import ctypes
import math

import torch

CODES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.float64: (2, 64),
         torch.bool: (6, 8), torch.int32: (0, 32), torch.int64: (0, 64)}
RULES = ("delta_rule", "gated_delta_rule", "kda", "comba", "simple_gla", "gla", "gdn2", "gated_delta_product", "dplr")
CAUSAL = ("none", "top_left", "bottom_right")
UNSUPPORTED = 2


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


def view(x):
    """A DLTensor of a tensor, which must live as long."""
    n = x.dim()
    code, bits = CODES[x.dtype]
    return DLTensor(x.data_ptr(), 2 if x.is_cuda else 1, x.device.index or 0, n, code, bits, 1,
                    (ctypes.c_int64 * n)(*x.shape), (ctypes.c_int64 * n)(*x.stride()), 0)


def record(*names):
    """A structure of the interface: its size, then pointers to tensors of these names."""
    class Record(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t)] + [(n, ctypes.POINTER(DLTensor)) for n in names]

    def make(tensors):
        made = Record(ctypes.sizeof(Record))
        for n in names:
            if tensors.get(n) is not None:
                setattr(made, n, ctypes.pointer(view(tensors[n])))
        return made
    return make


# In the order of the header, up to the last that an audit knows.
delta_inputs = record("q", "k", "v", "g", "g_gamma", "beta", "p", "initial_state", "A_log", "dt_bias", "cu_seqlens",
                      "state_indices", "final_state_indices", "has_initial_state", "snapshot_indices")
delta_outputs = record("o", "final_state", "states", "u")
delta_gradients = record("do", "dfinal_state", "dq", "dk", "dv", "dg", "dg_gamma", "dbeta", "dp", "dinitial_state", "dA_log",
                         "ddt_bias", "states", "u")
attention_inputs = record("q", "k", "v", "mask", "bias", "sink", "cu_seqlens_q", "cu_seqlens_k", "cache_seqlens",
                          "block_table", "alibi_slopes", "bias_slopes", "k_scale", "v_scale")
attention_outputs = record("o", "lse")
attention_gradients = record("o", "lse", "do", "dlse", "dq", "dk", "dv", "dbias", "dsink")


class DeltaOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("rule", ctypes.c_int32), ("scale", ctypes.c_double),
                ("use_qk_l2norm_in_kernel", ctypes.c_int32), ("use_gate_in_kernel", ctypes.c_int32),
                ("lower_bound", ctypes.c_double), ("use_beta_sigmoid_in_kernel", ctypes.c_int32),
                ("allow_neg_eigval", ctypes.c_int32), ("state_v_first", ctypes.c_int32), ("state_interval", ctypes.c_int64),
                ("head_order", ctypes.c_int32), ("steps", ctypes.c_int32)]


class AttentionOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("scale", ctypes.c_double), ("causal", ctypes.c_int32),
                ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64), ("softcap", ctypes.c_double),
                ("empty_row", ctypes.c_int32), ("top_w", ctypes.c_int64), ("query_offset", ctypes.c_int64),
                ("key_offset", ctypes.c_int64)]


class Kernels:
    """The functions of a library, called with tensors and options under softdelta.dump's names."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)

    def call(self, name, *structures):
        if not hasattr(self.library, name):
            raise NotImplementedError(f"the library has no {name}")
        status = getattr(self.library, name)(*(ctypes.byref(s) for s in structures), None)
        if status != 0:
            text = f"{name} returned {status}"
            if hasattr(self.library, "softdelta_last_error"):
                self.library.softdelta_last_error.restype = ctypes.c_char_p
                text += ": " + (self.library.softdelta_last_error() or b"").decode(errors="replace")
            raise NotImplementedError(text) if status == UNSUPPORTED else RuntimeError(text)

    def __call__(self, op, x, options, gradients):
        family = "attention" if op == "attention" else "delta"
        scale = options.get("scale", math.nan)
        if family == "delta":
            l2norm = options.get("use_qk_l2norm_in_kernel", False)
            gate, sigmoid = (options.get(n, False) for n in ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel"))
            o = DeltaOptions(ctypes.sizeof(DeltaOptions), RULES.index(op), scale, l2norm, gate, math.nan, sigmoid, 0, 0, 64, 0,
                             options.get("steps", 1))
            n = len(x["cu_seqlens"]) - 1 if "cu_seqlens" in x else len(x["q"])
            results = {"o": x["v"].new_empty(*x["q"].shape[:2], *x["v"].shape[2:])}  # v may have several rows for a token
            if options.get("output_final_state", True):
                results["final_state"] = x["q"].new_empty(n, *x["v"].shape[2:3], x["q"].shape[3], x["v"].shape[3],
                                                          dtype=torch.float32)
        else:
            o = AttentionOptions(ctypes.sizeof(AttentionOptions), scale, CAUSAL.index(options.get("causal", "none")),
                                 options.get("window_left", -1), options.get("window_right", -1),
                                 options.get("softcap", 0.0), 0, -1, 0, 0)
            results = {"o": x["q"].new_empty(*x["q"].shape[:3], x["v"].shape[3])}
        make = globals()
        inputs = make[family + "_inputs"](x)
        self.call(f"softdelta_{family}_forward", inputs, make[family + "_outputs"](results), o)
        if gradients and hasattr(self.library, f"softdelta_{family}_backward"):
            new = {"d" + n: torch.empty_like(x[n], memory_format=torch.contiguous_format) for n in gradients}
            given = {n: x.get(n) for n in ("do", "dfinal_state", "dlse")}
            self.call(f"softdelta_{family}_backward", inputs, make[family + "_gradients"]({**given, **new}), o)
            results.update(new)
        return results
