"""softdelta.watch: judges the first calls of a function in a real run, and saves the first that is wrong."""
from __future__ import annotations

import functools
import inspect
import warnings

from . import _cases
from ._records import DELTA_WANTED

# How a signature says it: softdelta.dump's name of each tensor; heads before rows; options.
_RULE = {n: n for n in (*DELTA_WANTED, "cu_seqlens")}
_RULE_OPTIONS = ("scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "lower_bound", "use_beta_sigmoid_in_kernel",
                 "allow_neg_eigval", "state_v_first")
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def watch(function, *, op, calls=20, path=None):
    """The function, whose first calls are judged as softdelta.verify would: o and final_state when it returns, gradients
    when the backward pass has brought them all. The first wrong call becomes a case file, with a warning, and nothing is
    judged after it.

    function  flash-linear-attention's signature for delta rules; torch's or flash_attn_func's for attention
    calls     so many are judged; each costs as much as softdelta.verify, and copies of its tensors
    path      of the case file; None: watch-OP-NUMBER.safetensors

    The result has `judged`, a number of calls, and `found`: the Report of the wrong one, or None.
    """
    return Watch(function, op, calls, path)


class Watch:
    def __init__(self, function, op, calls, path):
        from ._audit.run import names_of
        names_of(op, "f32")  # op is checked
        self.function, self.op, self.calls, self.path = function, op, calls, path
        self.judged, self.found, self._started = 0, None, 0
        functools.update_wrapper(self, function)

    def __call__(self, *arguments, **keywords):
        if self.found is not None or self._started >= self.calls:
            return self.function(*arguments, **keywords)
        self._started += 1
        given = self._bind(arguments, keywords)
        call = _Call(self, self._started, *(self._rule(given) if self.op != "attention" else self._attention(given)))
        aliases = {id(t): call.alias(name, t) for name, t in call.sources.items()}
        swap = lambda x: aliases.get(id(x), x)  # noqa: E731
        out = self.function(*(swap(x) for x in arguments), **{n: swap(x) for n, x in keywords.items()})
        call.returned(out)
        return out

    def _bind(self, arguments, keywords):
        try:
            bound = inspect.signature(self.function).bind(*arguments, **keywords)
        except ValueError:  # a builtin, as torch's
            return {**dict(zip(_SDPA, arguments)), **keywords}
        given = dict(bound.arguments)
        for p in bound.signature.parameters.values():
            if p.kind is p.VAR_KEYWORD:
                given.update(given.pop(p.name, {}))
        return given

    def _rule(self, given):
        tensors = {name: given[n] for n, name in _RULE.items() if given.get(n) is not None}
        return tensors, {n: given[n] for n in _RULE_OPTIONS if given.get(n) is not None}, False

    def _attention(self, given):
        if given.get("dropout_p"):
            raise ValueError(f"dropout_p is {given['dropout_p']}, expected 0: random results cannot be judged")
        if "query" not in given:
            left, right = given.get("window_size", (-1, -1))
            options = {"causal": "bottom_right" if given.get("causal") else "none", "window_left": left,
                       "window_right": right, "softcap": given.get("softcap", 0.0), "scale": given.get("softmax_scale")}
            return {n: given[n] for n in ("q", "k", "v")}, {n: x for n, x in options.items() if x is not None}, False
        tensors = {"q": given["query"], "k": given["key"], "v": given["value"]}
        mask = given.get("attn_mask")
        if mask is not None:
            tensors["mask" if str(mask.dtype) == "torch.bool" else "bias"] = mask
        options = {"causal": "top_left" if given.get("is_causal") else "none"}
        if given.get("scale") is not None:
            options["scale"] = given["scale"]
        return tensors, options, True

    def _judge(self, number, case, results):
        report = _cases.judge(results, case)
        self.judged = max(self.judged, number)
        if report.verdict != "wrong" or self.found is not None:
            return
        self.found = report
        path = self.path or f"watch-{self.op}-{number}.safetensors"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _cases.dump(path, producer=f"softdelta.watch, call {number}", **case, **results)
        wrong = ", ".join(f"{f.name} ({f.note})" for f in report.results if f.verdict == "wrong")
        warnings.warn(f"softdelta.watch: call {number} is wrong: {wrong}; saved as {path}", stacklevel=3)


class _Call:
    """One call: copies of what went in, and what came out so far."""

    def __init__(self, watcher, number, sources, options, heads_first):
        self.watcher, self.number, self.sources, self.heads_first = watcher, number, sources, heads_first
        self.case = {"op": watcher.op, **options, **{n: self._copy(n, t) for n, t in sources.items()}}
        self.wanted = [n for n, t in sources.items() if t.requires_grad]
        self.results = {}

    def _copy(self, name, t):
        t = t.detach().clone()
        if name in ("mask", "bias"):
            return t[(None,) * (4 - t.dim())]
        return t.transpose(1, 2) if self.heads_first else t

    def alias(self, name, t):
        """The same tensor, whose gradient is of this call alone."""
        if not t.requires_grad:
            return t
        alias = t.view_as(t)
        alias.register_hook(lambda d: self._gradient(name, d))
        return alias

    def _gradient(self, name, d):
        self.results["d" + name] = self._copy(name, d)
        if all("d" + n in self.results for n in self.wanted) and "do" in self.case:
            self.watcher._judge(self.number, self.case, self.results)

    def returned(self, out):
        out = out if isinstance(out, (tuple, list)) else (out,)
        names = ("o",) if self.watcher.op == "attention" else ("o", "final_state")
        for name, t in zip(names, out):
            if t is None:
                continue
            self.results[name] = self._copy(name, t) if name == "o" else t.detach().clone()
            if t.requires_grad:
                t.register_hook(lambda d, name=name: self._incoming(name, d))
        self.watcher._judge(self.number, self.case, self.results)

    def _incoming(self, name, d):
        self.case["d" + name] = self._copy(name, d) if name == "o" else d.detach().clone()
