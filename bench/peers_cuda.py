#!/usr/bin/env python3
"""The delta rules on one NVIDIA GPU: ours against flash-linear-attention (Triton) and FlashQLA where they are installed.

    bench/peers_cuda.py --library build-cuda/src/libsoftdelta.so [--only kda] [--forward] [--packed] [--repeats 20]
                        [--compile 16]

Both compute on the same bf16 tensors, by turns, timed by CUDA events; a row shows medians in ms. Ours has a workspace, as
the peers have PyTorch's cache. "kept" are passes of which the first keeps what both need: ours with gpu.kept, KDA of fla
with disable_recompute. A peer is called once before, so that what it compiles is not timed. That takes minutes, for it tries many
forms of each kernel: --compile N lets N processes compile a share of them each before, into Triton's cache. With FlashQLA
installed, fla calls it for Gated DeltaNet: the row names what was asked.
"""
import argparse
import ctypes
import importlib
import statistics
import subprocess
import sys

import torch

import softdelta_ctypes as c


def execution_on_gpu():
    return c.filled(c.Execution, engine=b"cuda", stream=torch.cuda.current_stream().cuda_stream)


def on_gpu(struct, tensors):
    views = {name: c.view(t) for name, t in tensors.items()}
    for view in views.values():
        view.device_type = 2
    return c.filled(struct, **{name: ctypes.pointer(view) for name, view in views.items()})


def delta_options(given):
    return c.filled(c.DeltaOptions, **{**c.DeltaOptions.defaults, **given})


class Library(c.Library):
    def prepare_on_gpu(self, name, inputs, options, results, kept=None):
        """A call of this function of the C interface, with a workspace."""
        execution = execution_on_gpu()
        if kept is not None:
            execution.gpu = ctypes.pointer(c.filled(c.Gpu, kept=kept.data_ptr(), kept_size=kept.numel()))
        arguments = [ctypes.byref(s) for s in (inputs, results, options, execution)]
        size = ctypes.c_size_t()
        self.check(getattr(self.c, name + "_workspace")(*arguments, ctypes.byref(size)))
        workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
        execution.workspace, execution.workspace_size = workspace.data_ptr(), size.value
        function = getattr(self.c, name)

        def call():
            self.check(function(*arguments))

        call.memory = (inputs, options, execution, results, workspace, kept)
        return call

    def delta(self, name, inputs, results, kept=None, **options):
        return self.prepare_on_gpu("softdelta_delta_" + name, on_gpu(c.DeltaInputs, inputs), delta_options(options), results,
                                   kept)

    def delta_kept(self, inputs, **options):
        """Memory for what a forward pass keeps, or None."""
        size = ctypes.c_size_t()
        arguments = on_gpu(c.DeltaInputs, inputs), delta_options(options), execution_on_gpu()
        self.check(self.c.softdelta_delta_kept_size(*map(ctypes.byref, arguments), ctypes.byref(size)))
        return torch.empty(size.value, dtype=torch.uint8, device="cuda") if size.value else None

    def attention(self, name, inputs, results, **options):
        return self.prepare_on_gpu("softdelta_attention_" + name, on_gpu(c.AttentionInputs, inputs),
                                   c.filled(c.AttentionOptions, **{**c.AttentionOptions.defaults, **options}), results)


def our_backward(library, x, d_o, kept=None, **options):
    gradients = {"d_o": d_o, **{"d" + name: torch.empty_like(t) for name, t in x.items()}}
    return library.delta("backward", x, on_gpu(c.DeltaGradients, gradients), kept, **options)


RULES = {"delta": c.DELTA_RULE, "gdn": c.GATED_DELTA_RULE, "kda": c.KDA, "comba": c.COMBA, "simple_gla": c.SIMPLE_GLA}
FLA = {"delta": ("fla.ops.delta_rule", "chunk_delta_rule"),
       "gdn": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
       "kda": ("fla.ops.kda", "chunk_kda"),
       "comba": ("fla.ops.comba", "chunk_comba"),
       "simple_gla": ("fla.ops.simple_gla", "chunk_simple_gla")}
FLASH_QLA = {"gdn": ("flash_qla", "chunk_gated_delta_rule")}
RAW, BOUNDED = "raw gate, l2norm", "raw gate above -5, l2norm"
SHAPES = [("delta", 8, 4096, 32, 32, ""), ("gdn", 8, 4096, 32, 32, ""), ("gdn", 1, 32768, 16, 32, ""),
          ("kda", 8, 4096, 32, 32, ""), ("kda", 8, 4096, 32, 32, RAW), ("kda", 8, 4096, 32, 32, BOUNDED),
          ("comba", 8, 4096, 32, 32, ""), ("simple_gla", 8, 4096, 32, 32, "")]
# Packed: few long, many short, one long among many short.
PACKED = [("8 x 4096", [4096] * 8), ("64 x 1024", [1024] * 64), ("512 x 128", [128] * 512),
          ("256 x 128, 32768", [128] * 256 + [32768])]
OPTIONS = {"": {}, RAW: {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True},
           BOUNDED: {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "lower_bound": -5.0}}


def operands(rule, B, T, H, HV, way="", D=128):
    random = torch.Generator("cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=random)

    def keys():
        return torch.nn.functional.normalize(normal(B, T, H, D), dim=-1).bfloat16()

    x = {"q": keys(), "k": keys(), "v": normal(B, T, HV, D).bfloat16()}
    if rule == "comba":
        x["p"] = keys()
    if rule != "delta":
        x["g"] = torch.nn.functional.logsigmoid(normal(B, T, HV, D) if rule == "kda" else normal(B, T, HV))
    if way:
        x["g"] = normal(B, T, HV, D).bfloat16()
        x["A_log"], x["dt_bias"] = normal(HV), normal(HV * D)
    if rule != "simple_gla":
        x["beta"] = normal(B, T, HV).sigmoid()
    return x


def peer(names, rule, x, d_o, way, **more):
    """Calls of a peer: forward, and forward with backward; None where it is not installed."""
    if rule not in names:
        return None
    module, name = names[rule]
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None

    options = {**OPTIONS[way], **({"safe_gate": True} if way == BOUNDED else {}), **more}

    def forward():
        with torch.no_grad():
            function(**x, **options)

    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}

    def both():
        torch.autograd.grad(function(**leaves, **options)[0], list(leaves.values()), d_o)

    return forward, both


def medians(calls, repeats):
    """ms of each call, by turns; None for one that fails."""
    times = {name: [] for name in calls}
    failed = {}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            if name in failed:
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            try:
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
            except Exception as error:  # a peer's own: the row says so
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
                continue
            if turn >= 2:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(t) if t else failed.get(name) for name, t in times.items()}


def wanted_shapes(only):
    return [shape for shape in SHAPES if only in (None, shape[0])]


def try_a_share(share, shares):
    """From now on Triton tries every shares-th form of each kernel, and times none."""
    import triton.runtime.autotuner as tuner
    whole = tuner.Autotuner.__init__

    def in_part(self, *args, **kwargs):
        whole(self, *args, **kwargs)
        self.configs = self.configs[share::shares] or self.configs[:1]

    def once(call, **_):
        call()
        return [1.0] * 3

    tuner.Autotuner.__init__ = in_part
    type(tuner.driver.active).get_benchmarker = lambda self: once


def compile_share(share, shares, only, packed):
    """Compiles a share of fla's kernels."""
    try_a_share(share, shares)
    shapes = [(rule, 32, 32, "") for rule in ("gdn", "kda") if only in (None, rule)] if packed else [
        (rule, H, HV, way) for rule, _, _, H, HV, way in wanted_shapes(only)]
    more = {"cu_seqlens": torch.tensor([0, 1024, 4096], device="cuda")} if packed else {}
    for rule, H, HV, way in shapes:
        x = operands(rule, 1 if packed else 2, 4096 if packed else 2048, H, HV, way)
        calls = peer(FLA, rule, x, torch.randn_like(x["v"]), way, **more)
        if calls:
            calls[1]()


def time_packed(library, rule, name, lengths, repeats):
    """Packed sequences beside the same as a batch, where they are as long, and beside fla's."""
    x = operands(rule, 1, sum(lengths), 32, 32)
    d_o = torch.randn_like(x["v"])
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    calls = {"forward": {}, "forward + backward": {}}

    def add(who, x, d_o, **more):
        o = torch.empty_like(x["v"])
        forward = library.delta("forward", {**x, **more}, on_gpu(c.DeltaOutputs, {"o": o}), rule=RULES[rule])
        gradients = {"d_o": d_o, **{"d" + n: torch.empty_like(t) for n, t in x.items()}}
        backward = library.delta("backward", {**x, **more}, on_gpu(c.DeltaGradients, gradients), rule=RULES[rule])
        calls["forward"][who] = forward
        calls["forward + backward"][who] = lambda: (forward(), backward())

    add("ours", x, d_o, cu_seqlens=cu_seqlens)
    if len(set(lengths)) == 1:
        rows = {n: t.view(-1, lengths[0], *t.shape[2:]) for n, t in {**x, "d_o": d_o}.items()}
        add("ours as a batch", {n: t for n, t in rows.items() if n in x}, rows["d_o"])
    if (of_fla := peer(FLA, rule, x, d_o, "", cu_seqlens=cu_seqlens)):
        calls["forward"]["fla"], calls["forward + backward"]["fla"] = of_fla
    for of_pass, each in calls.items():
        print_row(f"{rule} packed {name} H32 D128, {of_pass}", medians(each, repeats))


def print_row(what, row):
    text = "   ".join(f"{who} {ms:.3f}" if isinstance(ms, float) else f"{who}: {ms}" for who, ms in row.items())
    print(f"{what}: {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build-cuda/src/libsoftdelta.so")
    parser.add_argument("--only", choices=sorted(RULES), help="one rule")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--forward", action="store_true", help="the forward pass alone")
    parser.add_argument("--packed", action="store_true", help="packed sequences alone")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="compile fla's kernels in N processes before")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)  # of those processes
    given = parser.parse_args()
    if given.share is not None:
        return compile_share(given.share, given.compile, given.only, given.packed)
    for child in [subprocess.Popen([sys.executable, *sys.argv, "--share", str(i)]) for i in range(given.compile)]:
        child.wait()
    library = Library(given.library, threads=1)
    print(torch.cuda.get_device_name())
    for rule in ("gdn", "kda") if given.packed else ():
        for name, lengths in PACKED if given.only in (None, rule) else ():
            time_packed(library, rule, name, lengths, given.repeats)
            torch.cuda.empty_cache()
    if given.packed:
        return
    for rule, B, T, H, HV, way in wanted_shapes(given.only):
        x = operands(rule, B, T, H, HV, way)
        o, d_o = torch.empty_like(x["v"]), torch.randn_like(x["v"])
        options = {"rule": RULES[rule], **OPTIONS[way]}
        forward = library.delta("forward", x, on_gpu(c.DeltaOutputs, {"o": o}), **options)
        passes = {"forward": {"ours": forward}}
        backward = None
        if not given.forward:
            backward = our_backward(library, x, d_o, **options)
            passes["forward + backward"] = {"ours": lambda: (forward(), backward())}
            kept = library.delta_kept(x, **options)
            if kept is not None:
                first = library.delta("forward", x, on_gpu(c.DeltaOutputs, {"o": o}), kept, **options)
                second = our_backward(library, x, d_o, kept, **options)
                passes["forward + backward"]["ours, kept"] = lambda: (first(), second())
        for name, names in (("fla", FLA), ("FlashQLA", FLASH_QLA)):
            calls = peer(names, rule, x, d_o, way)
            if calls:
                for calls_of_pass, call in zip(passes.values(), calls):
                    calls_of_pass[name] = call
        if backward and rule == "kda" and (calls := peer(FLA, rule, x, d_o, way, disable_recompute=True)):
            passes["forward + backward"]["fla, kept"] = calls[1]
        for name, calls in passes.items():
            print_row(f"{rule} B{B} T{T} H{H}/{HV} D128 {way + ', ' if way else ''}{name}", medians(calls, given.repeats))
        del forward, backward, passes, calls
        first = second = kept = None
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
