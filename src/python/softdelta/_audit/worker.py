"""The process that runs the function under audit. It knows torch and the function, and nothing of softdelta.

Requests and answers are messages on two pipes: 8 bytes of length, then what torch.save writes.
"""
import hashlib
import importlib
import importlib.util
import inspect
import io
import os
import sys
import time

import torch

REFUSALS = (ValueError, NotImplementedError, TypeError, AssertionError)


def load(name):
    """The function of "module:function" or "path/file.py:function"."""
    place, _, path = name.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("audited", place)
        module = importlib.util.module_from_spec(spec)
        sys.modules["audited"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = module
    for part in path.split("."):
        function = getattr(function, part)
    return function


def parameters_of(function):
    """Names of its parameters; None where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin, as torch's scaled_dot_product_attention
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]


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
    return x


def bits(x):
    return x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() if x.numel() else b""


def memory_of(x):
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


# Adapters: canonical names (softdelta.dump's) to a signature and back. Each returns {"o": …, …}.

def as_fla(function, parameters, x, options):
    """flash-linear-attention's chunk_kda and the like: rows [B, T, H, D], (o, final_state)."""
    names = [n for n in ("q", "k", "v", "g", "beta", "p") if n in x]
    positional = [] if parameters is None or set(names) <= set(parameters) else names
    keywords = {n: x[n] for n in [*names, "initial_state", "cu_seqlens", "do", "dfinal_state"]
                if n in x and n not in positional}
    for name in "do", "dfinal_state":  # only of functions that write their own backward pass
        if parameters is None or name not in parameters:
            keywords.pop(name, None)
    if parameters is None or "output_final_state" in parameters:
        keywords["output_final_state"] = options.get("output_final_state", True)
    for name in "scale", "use_qk_l2norm_in_kernel":
        if name in options:
            keywords[name] = options[name]
    out = function(*(x[n] for n in positional), **keywords)
    if isinstance(out, dict):
        return out
    out = out if isinstance(out, (tuple, list)) else (out,)
    return dict(zip(("o", "final_state"), out))


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
    """flash-attention's flash_attn_func: rows [B, L, H, D]; causal ends in the bottom right corner."""
    keywords = {"causal": options.get("causal") == "bottom_right"}
    if "scale" in options:
        keywords["softmax_scale"] = options["scale"]
    if "window_left" in options:
        keywords["window_size"] = (options["window_left"], options["window_right"])
    if "softcap" in options:
        keywords["softcap"] = options["softcap"]
    out = function(x["q"], x["k"], x["v"], **keywords)
    if isinstance(out, dict):
        return out
    return {"o": out[0] if isinstance(out, (tuple, list)) else out}


def as_flashinfer(function, parameters, x, options):
    """FlashInfer's single_prefill_with_kv_cache, one batch row at a time: rows [L, H, D], no gradients."""
    keywords = {"causal": options.get("causal") == "bottom_right"}
    if "scale" in options:
        keywords["sm_scale"] = options["scale"]
    if "softcap" in options:
        keywords["logits_soft_cap"] = options["softcap"]
    return {"o": torch.stack([function(*rows, **keywords) for rows in zip(x["q"], x["k"], x["v"])])}


ADAPTERS = {"fla": as_fla, "sdpa": as_sdpa, "flash": as_flash, "flashinfer": as_flashinfer}


def adapter_of(op, parameters):
    """By the names of the parameters."""
    if op != "attention":
        return "fla"
    names = parameters or ()
    return "flashinfer" if "sm_scale" in names else "flash" if "softmax_scale" in names else "sdpa"


def compute(function, request, x):
    """Results of one call: what the function returns, and gradients of what has one."""
    wanted = [n for n in request["gradients"] if n in x]
    for n in wanted:
        x[n].requires_grad_(True)
    with torch.set_grad_enabled(bool(wanted)):
        out = ADAPTERS[request["adapter"]](function, parameters_of(function), x, request["options"])
    results = {n: t for n, t in out.items() if torch.is_tensor(t)}
    pairs = [(results[n], x["d" + n]) for n in ("o", "lse", "final_state")
             if n in results and "d" + n in x and results[n].requires_grad]
    pairs = [(t, d.to(t.dtype)) for t, d in pairs if t.shape == d.shape]
    if wanted and pairs:
        names = [n for n in wanted if "d" + n not in results]
        gradients = torch.autograd.grad([t for t, _ in pairs], [x[n] for n in names], [d for _, d in pairs],
                                        allow_unused=True)
        results.update({"d" + n: t for n, t in zip(names, gradients) if t is not None})
    for n in wanted:
        x[n].requires_grad_(False)
    return results


def answer(function, request):
    """One call, or several of the same inputs: results of the first, and what it did besides."""
    device = torch.device(request["device"])
    kept = {n: lay_out(t.to(device), request["layout"].get(n)) for n, t in request["tensors"].items()}
    before = {n: bits(t) for n, t in kept.items()}
    first, digests, mutated, aliased = None, [], set(), set()
    start = time.monotonic()
    filled = request.get("fill", False)
    if filled:  # memory that nobody wrote is NaN
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(request.get("repeats", 1)):
            x = {n: lay_out(t.clone(), request["layout"].get(n)) for n, t in kept.items()}
            spans = {n: memory_of(t) for n, t in x.items()}
            results = compute(function, request, x)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            for n, t in results.items():
                begin, end = memory_of(t)
                aliased |= {f"{n} is memory of {m}" for m, (b, e) in spans.items() if begin < e and b < end}
            mutated |= {n for n, t in x.items() if bits(t) != before[n]}
            results = {n: t.detach().contiguous().cpu() for n, t in results.items()}
            digests.append({n: hashlib.blake2b(bits(t)).hexdigest() for n, t in results.items()})
            first = first or results
    finally:
        if filled:
            torch.use_deterministic_algorithms(False)
    unstable = sorted({n for d in digests for n in first if d.get(n) != digests[0][n]})
    return {"results": first, "mutated": sorted(mutated), "aliased": sorted(aliased), "unstable": unstable,
            "seconds": time.monotonic() - start}


def answer_or_say_why(function, request):
    try:
        return answer(function, request)
    except REFUSALS as e:
        return {"refused": f"{type(e).__name__}: {e}"}
    except Exception as e:
        return {"raised": f"{type(e).__name__}: {e}"}


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
    try:
        start = read(requests)
        sys.path[:0] = [p for p in start["path"] if p not in sys.path]
        function = load(start["function"])
        if start["compile"]:
            function = torch.compile(function)
        write(answers, {"parameters": parameters_of(function)})
    except BaseException as e:
        write(answers, {"raised": f"{type(e).__name__}: {e}"})
        return
    while (request := read(requests)) is not None:
        reply = answer_or_say_why(function, request)
        reply["softdelta"] = any(m.partition(".")[0] == "softdelta" for m in sys.modules)
        write(answers, reply)


if __name__ == "__main__":
    main()
