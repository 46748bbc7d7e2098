"""libsoftdelta through ctypes, for measuring: torch tensors in, prepared calls out.

A prepared call holds its C structures, so that calling it costs one foreign call and nothing else:

    library = Library("build/src/libsoftdelta.so", threads=2)
    forward = library.attention_forward(dict(q=q, k=k, v=v), dict(o=o, lse=lse), causal=TOP_LEFT)
    forward()          # raises Unsupported or Failure with the library's message
"""
import ctypes
import math

import torch

NO_CAUSAL, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2
(DELTA_RULE, GATED_DELTA_RULE, KDA, COMBA, SIMPLE_GLA, GLA, GDN2, GATED_DELTA_PRODUCT, DPLR) = range(9)
FAST = b"fast"


class Failure(RuntimeError):
    """The call returned an error."""


class Unsupported(Failure):
    """The call is legal, but this engine, build or machine cannot do it."""


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


CPU = 1
TYPES = {torch.float64: (2, 64), torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16),
         torch.bool: (6, 8), torch.int32: (0, 32), torch.int64: (0, 64)}


def view(tensor):
    """The DLTensor of a torch tensor; keeps it alive."""
    sizes = ctypes.c_int64 * tensor.dim()
    code, bits = TYPES[tensor.dtype]
    t = DLTensor(tensor.data_ptr(), CPU, 0, tensor.dim(), code, bits, 1, sizes(*tensor.shape),
                 sizes(*tensor.stride()), 0)
    t.tensor = tensor
    return t


def tensors_struct(name, fields):
    """A structure of softdelta.h that is its size and pointers to tensors."""
    return type(name, (ctypes.Structure,),
                {"_fields_": [("size", ctypes.c_size_t)] + [(f, ctypes.POINTER(DLTensor)) for f in fields.split()]})


AttentionInputs = tensors_struct(
    "AttentionInputs", "q k v mask bias sink cu_seqlens_q cu_seqlens_k cache_seqlens block_table "
    "alibi_slopes bias_slopes k_scale v_scale")
AttentionOutputs = tensors_struct("AttentionOutputs", "o lse")
AttentionGradients = tensors_struct("AttentionGradients", "o lse d_o dlse dq dk dv dbias dsink")
DeltaInputs = tensors_struct(
    "DeltaInputs", "q k v g g_gamma beta p initial_state A_log dt_bias cu_seqlens state_indices final_state_indices "
    "has_initial_state snapshot_indices")
DeltaOutputs = tensors_struct("DeltaOutputs", "o final_state states u")
DeltaGradients = tensors_struct(
    "DeltaGradients", "d_o dfinal_state dq dk dv dg dg_gamma dbeta dp dinitial_state dA_log ddt_bias states u")


class AttentionOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("scale", ctypes.c_double), ("causal", ctypes.c_int32),
                ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64), ("softcap", ctypes.c_double),
                ("empty_row", ctypes.c_int32), ("top_w", ctypes.c_int64), ("query_offset", ctypes.c_int64),
                ("key_offset", ctypes.c_int64)]
    defaults = dict(scale=math.nan, causal=NO_CAUSAL, window_left=-1, window_right=-1, softcap=0, empty_row=0,
                    top_w=-1)


class DeltaOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("rule", ctypes.c_int32), ("scale", ctypes.c_double),
                ("use_qk_l2norm_in_kernel", ctypes.c_int32), ("use_gate_in_kernel", ctypes.c_int32),
                ("lower_bound", ctypes.c_double), ("use_beta_sigmoid_in_kernel", ctypes.c_int32),
                ("allow_neg_eigval", ctypes.c_int32), ("state_v_first", ctypes.c_int32),
                ("state_interval", ctypes.c_int64), ("head_order", ctypes.c_int32), ("steps", ctypes.c_int32)]
    defaults = dict(scale=math.nan, lower_bound=math.nan, state_interval=64)


class Gpu(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("state_ready", ctypes.c_void_p), ("state_done", ctypes.c_void_p),
                ("kept", ctypes.c_void_p), ("kept_size", ctypes.c_size_t)]


class Execution(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("engine", ctypes.c_char_p), ("threads", ctypes.c_int32),
                ("bf16_products", ctypes.c_int32), ("workspace", ctypes.c_void_p), ("workspace_size", ctypes.c_size_t),
                ("parallel_for", ctypes.c_void_p), ("parallel_context", ctypes.c_void_p), ("stream", ctypes.c_void_p),
                ("stages", ctypes.c_void_p), ("rounding", ctypes.c_void_p), ("gpu", ctypes.POINTER(Gpu))]


class IsaLevel(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("compiled", ctypes.c_int32),
                ("available", ctypes.c_int32), ("selected", ctypes.c_int32),
                ("bf16_products", ctypes.c_int32)]


def filled(struct, **values):
    return struct(size=ctypes.sizeof(struct), **values)


def filled_tensors(struct, tensors):
    return filled(struct, **{name: ctypes.pointer(view(t)) for name, t in tensors.items() if t is not None})


class Library:
    def __init__(self, path, threads, engine=FAST):
        self.path, self.c = path, ctypes.CDLL(path)
        self.threads, self.engine = threads, engine
        self.c.softdelta_last_error.restype = ctypes.c_char_p
        self.c.softdelta_version.restype = ctypes.c_char_p

    def version(self):
        return self.c.softdelta_version().decode()

    def isa(self):
        """The level of instructions that the fast engine runs; None without kernels."""
        for index in range(self.c.softdelta_isa_level_count()):
            level = IsaLevel(ctypes.sizeof(IsaLevel))
            self.check(self.c.softdelta_get_isa_level(index, ctypes.byref(level)))
            if level.selected:
                return level.name.decode()
        return None

    def select_isa_level(self, name):
        """Of all calls to come; None: the environment's."""
        self.check(self.c.softdelta_select_isa_level(None if name is None else name.encode()))

    def check(self, status):
        if status != 0:
            message = self.c.softdelta_last_error().decode()
            raise (Unsupported if status == 2 else Failure)(message)

    def prepare(self, function, inputs, options, results, threads):
        execution = filled(Execution, engine=self.engine, threads=threads or self.threads)
        arguments = [ctypes.byref(s) for s in (inputs, results, options, execution)]

        def call():
            status = function(*arguments)
            if status != 0:
                self.check(status)

        return call

    def attention_forward(self, inputs, outputs, threads=None, **options):
        return self.prepare(self.c.softdelta_attention_forward, filled_tensors(AttentionInputs, inputs),
                            filled(AttentionOptions, **{**AttentionOptions.defaults, **options}),
                            filled_tensors(AttentionOutputs, outputs), threads)

    def attention_plan(self, inputs, outputs, threads=None, **options):
        """A layer of a plan of this call; lengths and the block table are the plan's."""
        given, results = filled_tensors(AttentionInputs, inputs), filled_tensors(AttentionOutputs, outputs)
        execution = filled(Execution, engine=self.engine, threads=threads or self.threads)
        plan = ctypes.c_void_p()
        self.check(self.c.softdelta_attention_plan_create(
            ctypes.byref(given), ctypes.byref(results),
            ctypes.byref(filled(AttentionOptions, **{**AttentionOptions.defaults, **options})), ctypes.byref(execution),
            ctypes.byref(plan)))
        for name in "cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "block_table":
            setattr(given, name, None)
        arguments = plan, ctypes.byref(given), ctypes.byref(results)

        def layer():
            status = self.c.softdelta_attention_plan_forward(*arguments)
            if status != 0:
                self.check(status)

        return layer

    def attention_backward(self, inputs, gradients, threads=None, **options):
        return self.prepare(self.c.softdelta_attention_backward, filled_tensors(AttentionInputs, inputs),
                            filled(AttentionOptions, **{**AttentionOptions.defaults, **options}),
                            filled_tensors(AttentionGradients, gradients), threads)

    def delta_forward(self, inputs, outputs, threads=None, **options):
        return self.prepare(self.c.softdelta_delta_forward, filled_tensors(DeltaInputs, inputs),
                            filled(DeltaOptions, **{**DeltaOptions.defaults, **options}),
                            filled_tensors(DeltaOutputs, outputs), threads)

    def delta_backward(self, inputs, gradients, threads=None, **options):
        return self.prepare(self.c.softdelta_delta_backward, filled_tensors(DeltaInputs, inputs),
                            filled(DeltaOptions, **{**DeltaOptions.defaults, **options}),
                            filled_tensors(DeltaGradients, gradients), threads)

    def ceiling(self, name, threads):
        """Multiply-adds between registers in flop/s; None where the CPU has no instruction for them."""
        return self.measured(lambda result: self.c.softdelta_measure_ceiling(name == "bf16", threads, result))

    def bandwidth(self, threads):
        """Memory read in byte/s."""
        return self.measured(lambda result: self.c.softdelta_measure_bandwidth(threads, result))

    def measured(self, measure):
        value = ctypes.c_double()
        try:
            self.check(measure(ctypes.byref(value)))
            return value.value
        except Unsupported:
            return None
