"""An audit from its first call to its report."""
from __future__ import annotations

import os
import secrets
import shlex
import time
import warnings
from dataclasses import replace

import torch

from .. import _cases, _native
from .._diagnose import diagnose
from . import inputs
from .checks import REPEATS, AttentionChecks, DeltaChecks, judge_results, of_rule, truth
from .inputs import facts
from .process import Here, Isolated, name_of
from .report import Audit, Check, Row
from .signatures import GATE_PARAMETERS, SIGNATURES, Signature, normalised
from .worker import adapter_of, load

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NAMES = {t: n for n, t in DTYPES.items()}
NARROW = 5e-5  # a quarter of what rounding to f16 costs: what errs less was not rounded, what errs by all is no number rounded


class Failed(Exception):
    """The function did not answer: refused (True) what it was given, or failed."""

    def __init__(self, text, refused):
        super().__init__(text)
        self.refused = refused


class Runner:
    """Calls of the function, and what it did besides to be named."""

    def __init__(self, process, adapter, device, budget_s):
        self.process, self.adapter, self.device = process, adapter, device
        self.end = time.monotonic() + budget_s
        self.manners = {}  # sentences, in the order seen
        self.saw_softdelta = False

    @property
    def is_isolated(self):
        """Whether the function may die, and shares this machine's memory."""
        return isinstance(self.process, Isolated) and self.device == "cpu"

    @property
    def left(self):
        return self.end - time.monotonic()

    def answer(self, call, **flags):
        options = {**call.options, **call.signature.extra}
        request = {"tensors": call.tensors, "options": options, "layout": call.layout, "gradients": call.gradients, "op": call.op,
                   "adapter": self.adapter, "device": self.device, **flags}
        reply = self.process.call(request, max(self.left, 1) + 5)
        self.saw_softdelta |= reply.get("softdelta", False)
        if "results" not in reply:
            text = reply.get("refused") or reply.get("raised") or reply["died"]
            raise Failed(text.split("\n")[0][:200], "refused" in reply or reply.get("late", False))
        self.manners.update(dict.fromkeys(reply["manners"]))
        if self.adapter == "dplr":
            self.complete(call, reply["results"])
        return reply

    @staticmethod
    def complete(call, results):
        """A token has two steps here, of which the function sees one v and one a: gradients of the others are no question."""
        exact = {}
        for name, first in ("dv", 0), ("dp", 1):
            if name in results and tuple(results[name].shape) == tuple(shape_of(call, name)):
                exact = exact or truth(call)
                results[name][:, first::2] = exact[name][:, first::2].to(results[name].dtype)

    def __call__(self, call, **flags):
        """Results of the right shapes, o among them."""
        results = self.answer(call, **flags)["results"]
        if "o" not in results:
            raise Failed("o is missing", True)
        for name in set(results) & set(call.results):
            if tuple(results[name].shape) != tuple(shape_of(call, name)):
                raise Failed(f"{name} has shape {list(results[name].shape)}", False)
        return results

    def unstable(self, call):
        """Sentences: which results differ from call to call, where, and by how much."""
        yield from self.answer(call, repeats=REPEATS)["unstable"]

    def refilled(self, call):
        """Names of results that are others where numbers lie in memory that held others before."""
        return self.answer(call, refill=True)["second"]

    def second_backward(self, call):
        """Names of gradients that a second backward pass of one forward pass gives otherwise."""
        return self.answer(call, twice=True)["second"]


def wanted(call, require):
    if require == "all":
        return call.results
    if require == "forward":
        return [n for n in call.results if not n.startswith("d")]
    return [n for n in call.results if n in require]


def shape_of(call, result):
    t = call.tensors
    if result == "lse":
        return t["q"].shape[0], t["q"].shape[2], t["q"].shape[1]
    if result == "o":
        return t["q"].shape[:-2] + t["v"].shape[-2:] if call.op != "attention" else (*t["q"].shape[:3], t["v"].shape[3])
    if result == "final_state":
        n = len(t["cu_seqlens"]) - 1 if "cu_seqlens" in t else t["q"].shape[0]
        return n, t["v"].shape[2], t["q"].shape[3], t["v"].shape[3]
    return t[result[1:]].shape


def hidden_type(x):
    """The narrower type that holds every number of an f32 result."""
    x = x[x != 0]
    if x.dtype != torch.float32 or x.numel() < 64:
        return None
    return next((n for n in ("bf16", "f16") if torch.equal(x.to(DTYPES[n]).float(), x)), None)


def judge_reply(call, dtype, reply, require) -> Row:
    row = Row(call.name, dtype, seconds=reply["seconds"])
    judged = {}
    for name in wanted(call, require):
        x = reply["results"].get(name)
        if x is None:
            row.missing.append(f"{name} is missing")
        elif tuple(x.shape) != tuple(shape_of(call, name)):
            row.faults.append(f"{name} has shape {list(x.shape)}, expected {list(shape_of(call, name))}")
        else:
            if x.dtype != call.dtype_of(name):
                row.faults.append(f"{name} is {NAMES.get(x.dtype, x.dtype)}, expected {NAMES[call.dtype_of(name)]}")
            judged[name] = x if x.dtype in NAMES else x.float()
    if judged:
        row.findings = {f.name: f for f in judge_results(call, judged)}
    for name, f in row.findings.items():
        if NARROW < f.ratio < 1 and (dtype == "f32" or name == "final_state") and name in judged and \
                (narrow := hidden_type(judged[name])):
            row.faults.append(f"{name} is f32 and holds only numbers of {narrow}")
    return row


def audit_call(runner, call, dtype, require) -> Row:
    try:
        return judge_reply(call, dtype, runner.answer(call), require)
    except Failed as e:
        row = Row(call.name, dtype)
        (row.missing if e.refused else row.faults).append(f"{'refused' if e.refused else 'failed'}: {e}")
        return row


def fit(call, parameters, named=()):
    """The call for a function that lacks some of the options: as close as it can be, or None; and what is lacking."""
    if call.options.get("use_gate_in_kernel"):
        if "use_gate_in_kernel" not in named:
            return None, []
        if "use_beta_sigmoid_in_kernel" not in named:
            beta = call.tensors["beta"]
            call = replace(call, tensors={**call.tensors, "beta": beta.double().sigmoid().to(beta.dtype)},
                           options={n: x for n, x in call.options.items() if n != "use_beta_sigmoid_in_kernel"})
    if parameters is None and facts(call.op).erases == "nothing" and "use_qk_l2norm_in_kernel" not in named:
        call = normalised(call)  # fla's functions take any keyword, and those of rules that erase nothing ignore it
    if parameters is None or call.signature.extra:
        return call, []
    lacking = [n for n in ("use_qk_l2norm_in_kernel", "initial_state", "cu_seqlens", "scale", "beta", "g")
               if n not in parameters and (n in call.tensors or call.options.get(n))]
    if "beta" in lacking or "g" in lacking:  # positional, under other names
        lacking = [n for n in lacking if n not in ("beta", "g")]
    if "cu_seqlens" in lacking or "scale" in lacking:
        return None, lacking
    if "use_qk_l2norm_in_kernel" not in parameters:
        call = normalised(call)
    tensors, options = dict(call.tensors), dict(call.options)
    if "initial_state" in lacking:
        tensors.pop("initial_state")
    if "output_final_state" not in parameters:
        options["output_final_state"] = options.get("output_final_state", True)
    return replace(call, tensors=tensors, options=options), lacking


def smaller(call):
    """The call with less of it, largest steps first."""
    t = call.tensors
    if "cu_seqlens" in t or call.options.get("steps", 1) > 1:
        return
    if call.op == "attention":
        B = t["q"].shape[0]
        if B > 1:
            for b in 0, B - 1:
                tensors = {n: (x[b:b + 1] if x.shape[0] == B else x).contiguous() for n, x in t.items()}
                yield replace(call, tensors=tensors)
        return
    B, T, H = t["q"].shape[:3]
    rows = [n for n in t if n in ("q", "k", "v", "g", "beta", "p", "b", "w", "do")]
    states = [n for n in t if n in ("initial_state", "dfinal_state")]
    heads = {n: x.shape[2] // H for n, x in t.items() if n in rows}

    def cut(b, tokens, h):
        tensors = {n: t[n][b, tokens, :h * heads[n]] for n in rows}
        tensors.update({n: t[n][b, :h * (t["v"].shape[2] // H)] for n in states})
        tensors.update({n: t[n] for n in GATE_PARAMETERS if n in t})
        return replace(call, tensors={n: x.contiguous() for n, x in tensors.items()})

    everything = slice(None)
    if B > 1:
        yield cut(slice(0, 1), everything, H)
        yield cut(slice(B - 1, B), everything, H)
    if H > 1 and "A" not in t:
        yield cut(everything, everything, 1)
    if T > 1:
        yield cut(everything, slice(0, T // 2), H)
        yield cut(everything, slice(0, T - max(T // 8, 1)), H)


def shrink(runner, call, dtype, require, seconds):
    """The smallest call that is still wrong, and its row."""
    end, best = time.monotonic() + seconds, None
    found = True
    while found:
        found = False
        for candidate in smaller(call):
            if time.monotonic() > end:
                return call, best
            row = audit_call(runner, candidate, dtype, require)
            if row.wrong:
                call, best, found = candidate, row, True
                break
    return call, best


def save_case(audit, runner, call, row, dtype, require, output):
    call, smallest = shrink(runner, call, dtype, require, min(max(runner.left / 3, 3), 10))
    row = smallest or row
    try:
        results = of_rule(call, runner(call))
    except Failed:
        results = {}
    path = output or f"audit-{audit.op}-{audit.seed}.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _cases.dump(path, producer=audit.function, **call.case(), **results)
    wrong = [f for f in row.findings.values() if f.verdict == "wrong"]
    shape = "×".join(str(n) for n in call.tensors["q"].shape)
    audit.case = str(path)
    audit.case_says = f"{row.name} {dtype}, q {shape}: " + (
        row.faults[0] if row.faults else f"{wrong[0].name} {wrong[0].ratio:.2g}, limit {wrong[0].limit:.2g}" if wrong
        else next(iter(runner.manners)))


def names_of(op, dtypes):
    """Names of storage types, checked, as is op."""
    names = [NAMES.get(n, n) for n in ([dtypes] if isinstance(dtypes, str) else dtypes)]
    for n in names:
        if n not in DTYPES:
            raise ValueError(f"dtypes holds {n!r}, expected {', '.join(DTYPES)}")
    if not names:
        raise ValueError("dtypes is empty, expected at least one type")
    if op not in ("attention", *_native.RULES, *inputs.NAMED):
        raise ValueError(f"op is {op!r}, expected attention, {', '.join((*_native.RULES, *inputs.NAMED))}")
    return names


def in_type(call, first, dtype):
    """The same numbers in another storage type than the first, in which they were drawn."""
    always_f32 = (*GATE_PARAMETERS, "initial_state", "dfinal_state", "sink", *(() if "A" in call.tensors else ("g",)))
    return replace(call, tensors={n: t.to(dtype) if t.dtype == first and not (first == torch.float32 and n in always_f32) else t
                                  for n, t in call.tensors.items()})


def has_limits(call, dtype):
    """Where hardly anything is rounded, right kernels of a delta rule that round other operands than the baseline does
    would be beyond its limit."""
    return call.name != "exact" or dtype == "f32" or call.op == "attention"


def write_calls(op, folder, dtypes, seed, adapter):
    names = names_of(op, dtypes)
    seed = secrets.randbelow(10**9) if seed is None else int(seed)
    first, paths = DTYPES[names[0]], []
    os.makedirs(folder, exist_ok=True)
    for dtype in names:
        for call in draw_calls(op, adapter or {"gdn2": "fla"}.get(op) or adapter_of(op, None), seed, first):
            if not has_limits(call, dtype):
                continue
            path = os.path.join(folder, f"{call.name.replace(' ', '-')}-{dtype}.safetensors")
            _cases.dump(path, producer=f"inputs of softdelta audit, seed {seed}",
                        **in_type(call, first, DTYPES[dtype]).case())
            paths.append(path)
    return paths


def run_audit(fn, op, device, dtypes, seed, require, budget_s, isolate, adapter, without, compile, output) -> Audit:
    names = names_of(op, dtypes)
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}, expected a positive number")
    start = time.monotonic()
    seed = secrets.randbelow(10**9) if seed is None else int(seed)
    name = fn if isinstance(fn, str) else name_of(fn) if isolate else getattr(fn, "__qualname__", repr(fn))
    if isolate:
        process = Isolated(name, compile)
    else:
        function = load(fn) if isinstance(fn, str) else fn
        process = Here(torch.compile(function) if compile else function)
    audit = Audit(name, op, str(device), seed)
    others = {"--device": str(device) if str(device) != "cpu" else "", "--adapter": adapter or "",
              "--require": require if isinstance(require, str) else ",".join(require), "--without": ",".join(without)}
    audit.repeat = shlex.join(
        ["softdelta", "audit", name, "--op", op, "--dtypes", ",".join(names), "--seed", str(seed),
         *(x for option, value in others.items() if value not in ("", "all") for x in (option, value)),
         *(["--no-isolate"] if not isolate else []), *(["--compile"] if compile else [])])
    adapter = "c" if name.endswith(".so") else adapter or adapter_of(op, process.parameters or process.named)
    of_op = {"dplr": {"c", "dplr"}, "gdn2": {"c", "fla", "gdn2"}, "gated_delta_product": {"c", "product"}, "mamba2": {"mamba2"},
             "lightning": {"lightning"}, "attention": {"c", "sdpa", "flash", "flashinfer"}}.get(op, {"c", "fla"})
    try:
        if adapter not in of_op:
            raise ValueError(f"adapter is {adapter!r}, expected fla for delta rules, sdpa, flash or flashinfer for attention")
        expect_parameters(op, adapter, name, process.parameters)
    except ValueError:
        process.close()
        raise
    runner = Runner(process, adapter, str(device), budget_s)
    try:
        run_classes(audit, runner, process.parameters, names, require, without, output)
    finally:
        process.close()
    audit.checks.append(Check("inputs and settings stay as they are, results are memory of their own", list(runner.manners)))
    if isolate and runner.saw_softdelta and not name.startswith("softdelta"):
        audit.checks.append(Check("the function's process does not import softdelta", ["it does"]))
    audit.seconds = time.monotonic() - start
    return audit


def expect_parameters(op, adapter, name, parameters):
    """Operands of which one could be taken for another are given by name."""
    wanted = {"dplr": ("k", "v", "a", "b"), "gdn2": ("k", "v", "b", "w"), "product": ("num_householder",),
              "lightning": ("layer_idx", "num_layers"), "mamba2": ("chunk_size",)}.get(adapter) or \
        (("k", "v", "beta", "p") if op != "attention" and "p" in facts(op).operands else ())
    missing = [n for n in wanted if parameters is not None and n not in parameters]
    if missing:
        raise ValueError(f"{name} has parameters {', '.join(parameters)}, expected {', '.join(missing)} among them for {op}")


def draw_calls(op, adapter, seed, dtype, named=()):
    if op == "attention":
        return [draw(inputs.Draw(seed, f"attention {i}"), dtype)
                for i, draw in enumerate(inputs.Attention(adapter, named).classes())]
    signature = SIGNATURES.get(adapter, Signature())
    calls = [draw(op, inputs.Draw(seed, f"{op} {i}"), dtype) for i, draw in enumerate(inputs.DELTA)
             if draw is not inputs.raw or op in inputs.GROUPED and op != "mamba2"]
    return [signature.dress(call, inputs.Draw(seed, f"{call.name} of {adapter}")) for call in calls]


def hide(audit, call):
    """Leaves those mistakes that no input so far can show."""
    hidden = dict(_native.hidden_mistakes(*_cases.split_case(call.case(), None)))
    audit.hidden = {n: x for n, x in hidden.items() if audit.hidden is None or n in audit.hidden}


def run_classes(audit, runner, parameters, dtypes, require, without, output):
    lacking, worst, packed = set(), None, None
    first = DTYPES[dtypes[0]]
    calls = []
    for call in draw_calls(audit.op, runner.adapter, audit.seed, first, runner.process.parameters):
        call, lacks = (call, []) if audit.op == "attention" else fit(call, parameters, runner.process.named)
        lacking |= set(lacks)
        if call is None or call.name in without:
            continue
        calls.append(call)
        packed = call if call.name == "packed" else packed
    if without:
        audit.left_out.append(", ".join(without) + ": by the caller")
    audit.left_out += [f"{n}: the function has no such parameter" for n in sorted(lacking)]
    for dtype in dtypes:
        for call in calls if worst is None else [c for c in calls if c.name == worst[1].name]:
            if not has_limits(call, dtype):
                continue
            if runner.left <= 0:
                audit.not_reached.append(f"{call.name} {dtype}")
                continue
            typed = in_type(call, first, DTYPES[dtype])
            row = audit_call(runner, typed, dtype, require)
            audit.rows.append(row)
            hide(audit, typed)
            if row.wrong and worst is None:  # of other types this class alone is asked then
                worst = typed, row, dtype
        if dtype == dtypes[0]:
            run_checks(audit, runner, parameters, first, without, packed)
    if output is False:
        return
    if worst is None and runner.manners and audit.rows:  # any call shows it
        worst = calls[0], audit.rows[0], dtypes[0]
    if worst is None:
        return
    call, row, dtype = worst
    if any(f.verdict == "wrong" for f in row.findings.values()):
        try:
            found = diagnose(call.case(), of_rule(call, runner(call)))
            audit.diagnosis = list(found.conclusion) + list(found.where)
        except Failed:
            pass
    save_case(audit, runner, call, row, dtype, require, output)


def run_checks(audit, runner, parameters, dtype, without, packed):
    if audit.op == "attention":
        checks = AttentionChecks(audit.seed, dtype, runner, runner.adapter, parameters)
    else:
        has_states = parameters is None or bool({"initial_state", "initial_states"} & set(parameters))
        checks = DeltaChecks(audit.op, audit.seed, dtype, runner, has_states, packed,
                             SIGNATURES.get(runner.adapter, Signature()))
        checks.call, _ = fit(checks.call, parameters)
    for name, check in checks.all():
        if name in without:
            continue
        if runner.left <= 0:
            audit.not_reached.append(name)
        else:
            start = time.monotonic()
            try:
                found = Check(name, list(check()))
            except Failed as e:
                found = Check(name, [], f"refused: {e}") if e.refused else Check(name, [f"failed: {e}"])
            found.seconds = time.monotonic() - start
            audit.checks.append(found)
