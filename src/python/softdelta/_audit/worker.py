"""The process that runs the function under audit. It knows torch and the function, and nothing of softdelta.

Requests and answers are messages on two pipes: 8 bytes of length, then what torch.save writes.
"""
import collections
import ctypes
import hashlib
import importlib
import importlib.util
import inspect
import io
import mmap
import os
import random
import sys
import sysconfig
import time

import torch

HERE = __file__
REFUSALS = (ValueError, NotImplementedError, TypeError, AssertionError)


def load(name):
    """The function of "module:function" or "path/file.py:function"; of "path/library.so" its kernels."""
    if ":" not in name:
        spec = importlib.util.spec_from_file_location("audited_library",
                                                      os.path.join(os.path.dirname(HERE), "shared_library.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Kernels(os.path.abspath(name))
    place, _, path = name.rpartition(":")
    if place.endswith(".py"):
        name = os.path.splitext(os.path.basename(place))[0]  # as for any other caller
        name += "_" * (name in sys.modules)
        spec = importlib.util.spec_from_file_location(name, place)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = module
    for part in path.split("."):
        function = getattr(function, part)
    return function


def parameters_of(function):
    """Names of its parameters; None where it takes any."""
    if type(function).__module__ == "audited_library":
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin, as torch's scaled_dot_product_attention
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]


def named_of(function):
    """Names of parameters that its signature has, whatever else it takes."""
    if type(function).__module__ == "audited_library":
        return ["use_gate_in_kernel", "use_beta_sigmoid_in_kernel"]
    try:
        return [p.name for p in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return []


def lay_out(x, kind):
    """The same numbers in other places."""
    if kind == "transposed":  # heads before rows
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "padded":  # part of a larger tensor, whose rest is NaN
        big = x.new_full([x.shape[0], x.shape[1] + 3, x.shape[2] + 1, *x.shape[3:]], float("nan"))
        view = big[:, 2:2 + x.shape[1], 1:]
        return view.copy_(x)
    if kind == "expanded":  # the first batch row stands for all
        return x[:1].expand(x.shape)
    if kind == "one row":  # of a mask
        return x[:, :, :1].contiguous().expand(x.shape)
    if kind == "constant":  # the first number stands for all: what a sum's backward pass gives
        return x[(slice(1),) * x.dim()].expand(x.shape)
    return x


def read_only(x):
    """The same numbers in memory of which a write ends the process."""
    pages = mmap.mmap(-1, -(-max(x.numel() * x.element_size(), 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
    copy = torch.frombuffer(pages, dtype=x.dtype, count=x.numel()).view(x.shape).copy_(x)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(copy.data_ptr()), ctypes.c_size_t(len(pages)), 1):  # PROT_READ
        raise OSError("mprotect failed")
    return copy


def bits(x):
    return x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() if x.numel() else b""


def digest(x):
    return hashlib.blake2b(bits(x)).hexdigest()


def around(x):
    """All of the memory that a tensor is a part of."""
    return hashlib.blake2b(bits(torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()))).hexdigest()


# What a call must leave as it was: name: (look, set back). Random numbers go on: noise must not be the same each time.
SETTINGS = {
    "torch's random numbers": (lambda: torch.get_rng_state().numpy().tobytes(), None),
    "Python's random numbers": (random.getstate, None),
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_float32_matmul_precision()": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.are_deterministic_algorithms_enabled()": (torch.are_deterministic_algorithms_enabled,
                                                     lambda on: set_deterministic(on)),
}


def set_deterministic(on):
    """As torch.use_deterministic_algorithms, which would import torch's compiler for it: seconds."""
    getattr(torch._C, "_set_deterministic_algorithms", torch.use_deterministic_algorithms)(on, warn_only=True)


def settings():
    return {name: look() for name, (look, _) in SETTINGS.items()}


def changed_settings(before):
    """Their names."""
    changed = [name for name, x in settings().items() if x != before[name]]
    for name in changed:
        if SETTINGS[name][1] is not None:
            SETTINGS[name][1](before[name])
    return changed


class Curiosity:
    """What the function's own code (not a library's) asks about who calls it: a kernel has no use for that."""
    EVENTS = {"sys._getframe": "the frames of its callers", "sys._current_frames": "the frames of its callers",
              "gc.get_objects": "the objects of its callers", "gc.get_referrers": "the objects of its callers"}
    FILES = ("/cmdline", "/environ", "/mem", "/maps")  # of /proc
    LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

    def __init__(self):
        self.seen, self.busy = set(), True

    def hook(self, event, arguments):
        what = self.EVENTS.get(event)
        if event == "object.__getattr__" and arguments[1] in ("tb_frame", "gi_frame", "cr_frame", "ag_frame"):
            what = "the frames of its callers"
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith("/proc/") and \
                arguments[0].endswith(self.FILES):
            what = arguments[0]
        if what is None or self.busy:
            return
        self.busy = True
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(("/inspect.py", "/traceback.py", "/pathlib.py")):
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith((*self.LIBRARIES, "<frozen", HERE)):
            self.seen.add(what)
        self.busy = False


curiosity = Curiosity()
kept = collections.deque(maxlen=8)  # of calls before: results, and their digests when the call returned


def memory_of(x):
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def share_an_element(a, b):
    """Whether two results have a byte in common: parts of one buffer have not."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not a.numel() or not b.numel():
        return False
    touched = torch.zeros(a.untyped_storage().nbytes(), dtype=torch.bool)

    def bytes_of(x):
        offsets = torch.full((1,), x.storage_offset())
        for size, stride in zip(x.shape, x.stride()):
            offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
        return (offsets[:, None] * x.element_size() + torch.arange(x.element_size())).flatten()
    touched[bytes_of(a)] = True
    return bool(touched[bytes_of(b)].any())


# Adapters: canonical names (softdelta.dump's) to a signature and back. Each returns {"o": …, …}.

def as_fla(function, parameters, x, options):
    """flash-linear-attention's chunk_kda and the like: rows [B, T, H, D], (o, final_state)."""
    names = [n for n in ("q", "k", "v", "g", "beta", "p", "b", "w") if n in x]
    positional = [] if parameters is None or set(names) <= set(parameters) else names
    keywords = {n: x[n] for n in [*names, "initial_state", "A_log", "dt_bias", "cu_seqlens", "do", "dfinal_state"]
                if n in x and n not in positional}
    for name in "do", "dfinal_state":  # only of functions that write their own backward pass
        if parameters is None or name not in parameters:
            keywords.pop(name, None)
    if parameters is None or "output_final_state" in parameters:
        keywords["output_final_state"] = options.get("output_final_state", True)
    for name in ("scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "layer_idx",
                 "num_layers", "num_householder"):
        if name in options:
            keywords[name] = options[name]
    out = function(*(x[n] for n in positional), **keywords)
    if isinstance(out, dict):
        return out
    out = out if isinstance(out, (tuple, list)) else (out,)
    return dict(zip(("o", "final_state"), out))


def as_dplr(function, parameters, x, options):
    """chunk_dplr_delta_rule (q, k, v, a, b, gk) and chunk_rwkv7 (r, w, k, v, a, b): a token's two steps made one."""
    parameters = parameters or ("q", "gk", "output_final_state")
    keywords = {"k": x["k"][:, 1::2], "b": x["k"][:, 0::2], "v": x["v"][:, 1::2], "a": x["p"][:, 0::2],
                "r" if "r" in parameters else "q": x["q"], next(n for n in ("gk", "w", "g") if n in parameters): x["g"],
                "scale": options.get("scale", x["q"].shape[-1]**-0.5)}
    keywords.update({n: x[n] for n in ("initial_state", "cu_seqlens") if n in x})
    if "output_final_state" in parameters:
        keywords["output_final_state"] = options.get("output_final_state", True)
    out = function(**keywords)
    out = out if isinstance(out, (tuple, list)) else (out,)
    return dict(zip(("o", "final_state"), out))


def as_mamba(function, parameters, x, options):
    """mamba_ssm's mamba_chunk_scan_combined: states [B, H, P, N], packed sequences by number."""
    keywords = {n: x[n] for n in ("dt_bias",) if n in x}
    if "initial_state" in x:
        keywords["initial_states"] = x["initial_state"].transpose(-1, -2)
    if "cu_seqlens" in x:
        bounds = x["cu_seqlens"]
        numbers = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
        keywords["seq_idx"] = numbers.repeat_interleave(bounds.diff())[None]
    ends = options.get("output_final_state", True)
    out = function(x["v"], x["g"], x["A"], x["k"], x["q"], options["chunk_size"], dt_softplus="dt_bias" in x,
                   return_final_states=ends, **keywords)
    if isinstance(out, dict):
        return out
    return {"o": out[0], "final_state": out[1].transpose(-1, -2)} if ends else {"o": out}


def as_sdpa(function, parameters, x, options):
    """torch.nn.functional.scaled_dot_product_attention: heads [B, H, L, D]; is_causal begins in the top left corner."""
    q, k, v = (x[n].transpose(1, 2) for n in ("q", "k", "v"))
    keywords = {"is_causal": options.get("causal") == "top_left"}
    if "mask" in x or "bias" in x:
        keywords["attn_mask"] = x["mask"] if "mask" in x else x["bias"]
    if "scale" in options:
        keywords["scale"] = options["scale"]
    if q.shape[1] != k.shape[1]:
        keywords["enable_gqa"] = True
    out = function(q, k, v, **keywords)
    if isinstance(out, dict):
        return out
    return {"o": (out[0] if isinstance(out, (tuple, list)) else out).transpose(1, 2)}


def as_flash(function, parameters, x, options):
    """flash-attention's flash_attn_func: rows [B, L, H, D]; causal ends in the bottom right corner. flash_attn_varlen_func: rows
    [ΣL, H, D]."""
    keywords = {"causal": options.get("causal") == "bottom_right"}
    if "scale" in options:
        keywords["softmax_scale"] = options["scale"]
    if "window_left" in options:
        keywords["window_size"] = (options["window_left"], options["window_right"])
    if "softcap" in options:
        keywords["softcap"] = options["softcap"]
    if "sink" in x:
        keywords[next(n for n in SINKS if n in parameters)] = x["sink"]
    if asks := next((n for n in LSE if n in (parameters or ())), None):
        keywords[asks] = True
    if packed := "cu_seqlens_q" in (parameters or ()):
        q, k, v = (x[n].flatten(0, 1) for n in ("q", "k", "v"))
        for n, rows in ("q", x["q"]), ("k", x["k"]):  # batch rows are sequences of one length
            bounds = x.get("cu_seqlens_" + n, torch.arange(len(rows) + 1, device=rows.device) * rows.shape[1]).int()
            keywords |= {"cu_seqlens_" + n: bounds, "max_seqlen_" + n: int(bounds.diff().max())}
    else:
        q, k, v = x["q"], x["k"], x["v"]
    out = function(q, k, v, **keywords)
    if isinstance(out, dict):
        return out
    out = out if isinstance(out, (tuple, list)) else (out,)
    results = {"o": out[0].unflatten(0, x["q"].shape[:2]) if packed else out[0]}
    if asks and len(out) > 1:  # [B, H, L]; packed [H, ΣL]; of a row without keys it may be plus infinity
        lse = out[1].unflatten(1, x["q"].shape[:2]).transpose(0, 1) if packed else out[1]
        results["lse"] = torch.where(lse == torch.inf, -torch.inf, lse)
    return results


SINKS = "sinks", "s_aux", "learnable_sink", "sink"
LSE = "return_attn_probs", "return_softmax_lse", "return_lse"


def as_flashinfer(function, parameters, x, options):
    """FlashInfer's single_prefill_with_kv_cache, one batch row at a time: rows [L, H, D], no gradients."""
    keywords = {"causal": options.get("causal") == "bottom_right"}
    if "scale" in options:
        keywords["sm_scale"] = options["scale"]
    if "softcap" in options:
        keywords["logits_soft_cap"] = options["softcap"]
    return {"o": torch.stack([function(*rows, **keywords) for rows in zip(x["q"], x["k"], x["v"])])}


def as_c(function, parameters, x, options):
    """The C interface (shared_library.py): it computes gradients itself."""
    with torch.no_grad():
        return function(options["op"], x, options, options["gradients"])


ADAPTERS = {"c": as_c, **dict.fromkeys(("fla", "gdn2", "product", "lightning"), as_fla), "mamba2": as_mamba, "dplr": as_dplr,
            "sdpa": as_sdpa, "flash": as_flash, "flashinfer": as_flashinfer}


def adapter_of(op, parameters):
    """By the names of the parameters."""
    if op == "gdn2":
        return "gdn2" if {"b", "w"} <= set(parameters or ()) else "fla"
    if op != "attention":
        return {"gated_delta_product": "product"}.get(op, op if op in ("dplr", "mamba2", "lightning") else "fla")
    names = parameters or ()
    return "flashinfer" if "sm_scale" in names else "flash" if "softmax_scale" in names else "sdpa"


def compute(function, request, x):
    """Results of one call: what the function returns, and gradients of what has one. Of two backward passes, the names of
    gradients whose bits differ."""
    wanted = [n for n in request["gradients"] if n in x]
    for n in wanted:
        x[n].requires_grad_(True)
    before = {n: t._version for n, t in x.items()}
    with torch.set_grad_enabled(bool(wanted)):
        options = {**request["options"], "op": request["op"], "gradients": wanted}
        out = ADAPTERS[request["adapter"]](function, parameters_of(function), x, options)
    results = {n: t for n, t in out.items() if torch.is_tensor(t)}
    pairs = [(results[n], x["d" + n]) for n in ("o", "lse", "final_state")
             if n in results and "d" + n in x and results[n].requires_grad]
    pairs = [(t, d.to(t.dtype)) for t, d in pairs if t.shape == d.shape]
    second = []
    if wanted and pairs:
        names = [n for n in wanted if "d" + n not in results]
        twice = request.get("twice", False)

        def gradients(keep):
            found = torch.autograd.grad([t for t, _ in pairs], [x[n] for n in names], [d for _, d in pairs],
                                        allow_unused=True, retain_graph=keep)
            return {"d" + n: t for n, t in zip(names, found) if t is not None}
        first = gradients(twice)
        results.update(first)
        if twice:
            digests = {n: digest(t) for n, t in first.items()}
            passes = gradients(False), first
            second = sorted({n for found in passes for n, t in found.items() if digest(t) != digests[n]})
    for n in wanted:
        x[n].requires_grad_(False)
    return results, second, [n for n, t in x.items() if t._version != before[n]]


def finish(device, results):
    """Waits for the device. Names of results that the current stream would have read before they were written."""
    if device.type != "cuda":
        return []
    read = {n: t.detach().clone() for n, t in results.items()}  # as the caller's next kernel reads them
    torch.cuda.synchronize(device)
    return [n for n, t in read.items() if digest(t) != digest(results[n])]


def describe_spread(name, low, high):
    """Which rows of a result differ from call to call, by how much, and why that may be."""
    wide = high.double() - low.double()
    size = torch.maximum(high.double().abs(), low.double().abs())
    rms = size.square().mean().sqrt()
    is_order = bool((wide <= 4 * torch.finfo(high.dtype).eps * size + 2**-16 * rms).all())
    rows = (wide.amax(-1) if high.dim() > 3 else wide) != 0
    text = f"{name} differs from call to call in {int(rows.sum())} of {rows.numel()} rows"
    if high.dim() > 3 and "state" not in name and not rows.all():
        numbers, heads = (rows.nonzero()[:, i].unique().tolist() for i in (1, 2))
        some = ", ".join(str(n) for n in numbers[:6]) + (" …" if len(numbers) > 6 else "")
        of = f" of head {', '.join(str(h) for h in heads[:4])}" if len(heads) < rows.shape[2] else ""
        text += f" ({some}{of})"
    return text + f", by up to {float(wide.max() / rms):.1e} of its RMS: " + (
        "sums in another order, as of atomic additions" if is_order else "a race, or memory that nothing wrote")


def overwritten():
    """Names of results of calls before that are not what they were."""
    return sorted({n for call in kept for n, (t, before) in call.items() if digest(t) != before})


def answer(function, request):
    """One call, or several of the same inputs: results of the first, and what it did besides."""
    device = torch.device(request["device"])
    inputs = {n: lay_out(t.to(device), request["layout"].get(n)) for n, t in request["tensors"].items()}
    before = {n: bits(t) for n, t in inputs.items()}
    first, digests, spans_of, second, manners = None, [], {}, set(), {}
    start = time.monotonic()
    filled = request.get("fill", False)
    if filled:  # memory that nobody wrote is NaN
        set_deterministic(True)
    try:
        for _ in range(request.get("repeats", 1)):
            x = {n: read_only(t) if request.get("read_only", False) and t.numel() else
                 lay_out(t.clone(), request["layout"].get(n)) for n, t in inputs.items()}
            torch.rand(()), random.random()  # or a seed that was set before, and is set again, would change nothing
            spans, memory, was = {n: memory_of(t) for n, t in x.items()}, {n: around(t) for n, t in x.items()}, settings()
            curiosity.busy = False
            try:
                results, unequal, versions = compute(function, request, x)
            finally:
                curiosity.busy = True
            if request.get("refill", False):  # other numbers at the same place
                for t in x.values():
                    t.copy_(t.flip(0))
                again = [compute(function, request, y)[0] for y in (x, {n: t.clone() for n, t in x.items()})]
                second.update(n for n, t in again[0].items() if digest(t) != digest(again[1][n]))
                x = {n: t.copy_(t.flip(0)) for n, t in x.items()}
                versions = []
            unfinished = finish(device, results)
            own = {n: memory_of(t) for n, t in results.items()}
            said = [f"{n} is memory of {m}" for n, (b, e) in own.items() for m, (c, d) in spans.items() if b < d and c < e]
            said += [f"{n} and {m} share memory" for n in results for m in results
                     if n < m and share_an_element(results[n], results[m])]
            for n, t in x.items():
                said += [f"{n} was changed" if bits(t) != before[n] else f"memory around {n} was changed" if
                         around(t) != memory[n] else f"{n} was changed for a while"] if \
                    bits(t) != before[n] or around(t) != memory[n] or n in versions else []
            said += [f"{name} changed" for name in changed_settings(was)]
            said += [f"{n} was not finished when the current stream went on" for n in unfinished]
            said += [f"{n} of a call before changed when it was called again, or after it returned" for n in overwritten()]
            said += [f"the function looks at {what}" for what in sorted(curiosity.seen)]
            manners.update(dict.fromkeys(said))
            second.update(unequal)
            kept.append({n: (t.detach(), digest(t)) for n, t in results.items()})
            results = {n: t.detach().contiguous().cpu().clone() for n, t in results.items()}
            digests.append({n: digest(t) for n, t in results.items()})
            for n, t in results.items():
                low, high = spans_of.get(n, (t, t))
                if t.shape == low.shape:
                    spans_of[n] = torch.minimum(low, t), torch.maximum(high, t)
            first = first or results
    finally:
        if filled:
            set_deterministic(False)
    unstable = sorted({n for d in digests for n in first if d.get(n) != digests[0][n]})
    return {"results": first, "manners": list(manners), "unstable": [describe_spread(n, *spans_of[n]) for n in unstable], "second": sorted(second),
            "seconds": time.monotonic() - start}


def answer_or_say_why(function, request):
    try:
        return answer(function, request)
    except REFUSALS as e:
        return {"refused": f"{type(e).__name__}: {e}"}
    except Exception as e:
        return {"raised": f"{type(e).__name__}: {e}", "device_lost": is_lost(torch.device(request["device"]))}


def is_lost(device):
    """Whether a fault, as an illegal access, has left a GPU that refuses whatever this process asks next."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def read(pipe):
    head = pipe.read(8)
    if len(head) < 8:
        return None
    return torch.load(io.BytesIO(pipe.read(int.from_bytes(head, "little"))), weights_only=True)


def write(pipe, message):
    buffer = io.BytesIO()
    torch.save(message, buffer)
    pipe.write(len(buffer.getvalue()).to_bytes(8, "little") + buffer.getvalue())
    pipe.flush()


def main():
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints is no answer
    sys.argv = [""]
    sys.addaudithook(curiosity.hook)
    try:
        start = read(requests)
        sys.path[:0] = [p for p in start["path"] if p not in sys.path]
        function = load(start["function"])
        if start["compile"]:
            function = torch.compile(function)
        write(answers, {"parameters": parameters_of(function), "named": named_of(function)})
    except BaseException as e:
        write(answers, {"raised": f"{type(e).__name__}: {e}"})
        return
    while (request := read(requests)) is not None:
        reply = answer_or_say_why(function, request)
        reply["softdelta"] = any(m.partition(".")[0] == "softdelta" for m in sys.modules)
        write(answers, reply)


if __name__ == "__main__":
    main()
