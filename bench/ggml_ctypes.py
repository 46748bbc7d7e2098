"""ggml's CPU operations through ctypes, for measuring: one graph with one operation, its operands copied in."""
import ctypes
import glob
import os

import torch

F32, F16, I32 = 0, 1, 26
TYPES = {torch.float32: F32, torch.float16: F16, torch.int32: I32}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    def __init__(self, folder, threads):
        """folder: a build of ggml with shared libraries somewhere below it."""
        def load(name):
            found = glob.glob(os.path.join(folder, "**", f"lib{name}.so"), recursive=True)
            if not found:
                raise FileNotFoundError(f"{folder}: no lib{name}.so below it")
            return ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)

        self.base, self.cpu = load("ggml-base"), load("ggml-cpu")
        pointer, size, f32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
        for library, name, result, arguments in (
                (self.base, "ggml_version", ctypes.c_char_p, []),
                (self.base, "ggml_init", pointer, [InitParams]),
                (self.base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int] + [ctypes.c_int64] * 4),
                (self.base, "ggml_flash_attn_ext", pointer, [pointer] * 5 + [f32] * 3),
                (self.base, "ggml_gated_delta_net", pointer, [pointer] * 7 + [ctypes.c_int64]),
                (self.base, "ggml_ssm_scan", pointer, [pointer] * 8 + [ctypes.c_int64]),
                (self.base, "ggml_rwkv_wkv7", pointer, [pointer] * 8),
                (self.base, "ggml_new_graph", pointer, [pointer]),
                (self.base, "ggml_build_forward_expand", None, [pointer, pointer]),
                (self.base, "ggml_backend_alloc_ctx_tensors", pointer, [pointer, pointer]),
                (self.base, "ggml_backend_tensor_set", None, [pointer, pointer, size, size]),
                (self.base, "ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
                (self.base, "ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer]),
                (self.cpu, "ggml_backend_cpu_init", pointer, []),
                (self.cpu, "ggml_backend_cpu_set_n_threads", None, [pointer, ctypes.c_int])):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.backend = self.cpu.ggml_backend_cpu_init()
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)

    def version(self):
        return self.base.ggml_version().decode()

    def context(self):
        return self.base.ggml_init(InitParams(1 << 20, None, True))

    def tensor(self, context, x):
        """A tensor of x's sizes, innermost first."""
        sizes = list(reversed(x.shape)) + [1] * (4 - x.dim())
        return self.base.ggml_new_tensor_4d(context, TYPES[x.dtype], *sizes)

    def tensors(self, context, *operands):
        return [(self.tensor(context, x), x) for x in operands]

    def prepare(self, context, result, operands):
        graph = self.base.ggml_new_graph(context)
        self.base.ggml_build_forward_expand(graph, result)
        self.base.ggml_backend_alloc_ctx_tensors(context, self.backend)
        for tensor, x in operands:
            x = x.contiguous()
            self.base.ggml_backend_tensor_set(tensor, x.data_ptr(), 0, x.numel() * x.element_size())

        def compute():
            if self.base.ggml_backend_graph_compute(self.backend, graph) != 0:
                raise RuntimeError("ggml: the graph failed")

        compute.result = lambda x: (self.base.ggml_backend_tensor_get(result, x.data_ptr(), 0, x.numel() * 4), x)[1]
        return compute

    def attention(self, q, k, v):
        """Full attention: q [B, Lq, H, D] f32, k, v [B, Lk, Hk, D] f32 or f16, laid out [B, H, L, D] as ggml wants."""
        context, operands = self.context(), []
        for x in (q.float(), k, v):
            x = x.transpose(1, 2).contiguous()
            operands.append((self.tensor(context, x), x))
        result = self.base.ggml_flash_attn_ext(context, *(t for t, _ in operands), None, q.shape[-1] ** -0.5, 0, 0)
        return self.prepare(context, result, operands)

    def delta_rule(self, q, k, v, g, beta, state=None):
        """GDN (g [1, T, HV]) or KDA (g [1, T, HV, K]); the state enters transposed, [1, HV, V, K]."""
        if state is None:
            state = q.new_zeros(1, v.shape[2], q.shape[-1], q.shape[-1])
        g = g if g.dim() == 4 else g[..., None]
        context = self.context()
        operands = self.tensors(context, q, k, v, g, beta[..., None], state.transpose(2, 3).contiguous())
        result = self.base.ggml_gated_delta_net(context, *(t for t, _ in operands), 1)
        return self.prepare(context, result, operands)

    def ssm_scan(self, x, dt, A, B, C):
        """Mamba-2 from a state of 0: x [1, T, H, P], dt [1, T, H] before its softplus, A [H], B, C [1, T, G, N]."""
        context = self.context()
        state = x.new_zeros(1, x.shape[2], x.shape[3], B.shape[3])
        operands = self.tensors(context, state, x, dt, A[:, None], B, C, torch.zeros(1, dtype=torch.int32))
        return self.prepare(context, self.base.ggml_ssm_scan(context, *(t for t, _ in operands), 1), operands)

    def rwkv_wkv7(self, r, w, k, v, a, b):
        """RWKV-7 from a state of 0: all [1, T, H, D], w the factor of decay."""
        context, (H, D) = self.context(), r.shape[2:]
        operands = self.tensors(context, *(x[0] for x in (r, w, k, v, a, b)), r.new_zeros(1, H * D * D))
        return self.prepare(context, self.base.ggml_rwkv_wkv7(context, *(t for t, _ in operands)), operands)
