"""Signatures whose operands are not the rule's: what a rule is given instead, and what gradients of theirs say of its own.

Calls hold the function's operands under a rule's names where there are such; b and w (fla's chunk_gdn2) and A (Mamba-2) have
none. A gradient with several parts is judged by one of them: the truth of the others is taken away.
"""
from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

GATE_PARAMETERS = "A", "dt_bias", "A_log"


def parts_of(x):
    """Mean squares over blocks of 64 rows of a head."""
    x = x.double()
    x = x.reshape(*x.shape[:2], x.shape[2], -1) if x.dim() > 2 else x.reshape(1, 1, -1, 1)
    return torch.stack([p.square().mean((1, 3)) for p in x.split(64, 1)])


def normalised(call):
    """The call without the option of norms: where it was on, q and k are normalised here."""
    options = dict(call.options)
    if not options.pop("use_qk_l2norm_in_kernel", False):
        return replace(call, options=options)
    rows = {n: call.tensors[n].double() for n in ("q", "k")}
    rows = {n: (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(call.tensors[n].dtype) for n, x in rows.items()}
    return replace(call, tensors={**call.tensors, **rows}, options=options)


class Signature:
    """The rule's own operands."""
    extra = {}  # options that only the function has
    names = {}  # of results, where the function's operand has another name than the rule's

    def fixed(self, tensors):
        """Operands whose gradients are not asked for."""
        return ()

    def dress(self, call, draw):
        return replace(call, signature=self)

    def case(self, tensors, options):
        return tensors, options

    def to_case(self, call, results, exact):
        """Results of the rule; exact() is its truth."""
        return results

    def to_user(self, call, exact):
        """The truth of the function's results."""
        return exact

    def twins(self, call, results, exact):
        """Further results of the function, each as a result of the rule: (name, the rule's name, tensor)."""
        return ()

    def other_parts(self, call, exact):
        """Of results of the rule: what was taken away, and which result of the rule it is made of."""
        return {}


def divided(x, by, otherwise):
    """x / by; `otherwise` where by is 0."""
    return torch.where(by == 0, otherwise, x.double() / torch.where(by == 0, 1.0, by))


def beyond(error, allowed):
    """What is left of errors."""
    return error.sign() * (error.abs() - allowed).clamp(min=0)


class ByChannels(Signature):
    """fla's chunk_gdn2: S ← S + k (w∘v − Sᵀ(b∘k))ᵀ; the rule has v = w∘v, p = b∘k. b and w are powers of 2, so that both are
    exact. Where rows are normalised b is ±1: then b∘k has the norm of k."""
    names = {"dp": "db"}

    def dress(self, call, draw):
        t = {n: x for n, x in call.tensors.items() if n not in ("p", "beta")}
        k, v = t["k"], t["v"]
        if call.name == "exact":
            b = torch.ones(k.shape)
        elif call.options.get("use_qk_l2norm_in_kernel"):
            b = 1 - 2 * (draw.uniform(0, 1, *k.shape) < 0.1).double()
        else:
            b = 2.0**draw.integer(-2, 0, *k.shape).double()
        t["b"] = b.to(k.dtype)
        t["w"] = (2.0**draw.integer(-1, 1, *v.shape).double() * (1 - 2 * draw.integer(0, 1, *v.shape))).to(v.dtype)
        return replace(call, tensors=t, signature=self)

    def case(self, tensors, options):
        t = {n: x for n, x in tensors.items() if n not in ("b", "w")}
        t["v"] = (tensors["w"].double() * tensors["v"].double()).to(t["v"].dtype)
        t["p"] = (tensors["b"].double() * tensors["k"].double()).to(t["k"].dtype)
        return t, options

    @staticmethod
    def _norm(call):
        k = call.tensors["k"].double()
        on = call.options.get("use_qk_l2norm_in_kernel")
        return k, (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if on else None

    def to_case(self, call, results, exact):
        t, found = call.tensors, {n: x for n, x in results.items() if n not in ("db", "dw")}
        if "dv" in found:
            found["dv"] = (found["dv"].double() / t["w"].double()).float()
        if "dk" in found:
            found["dk"] = (found["dk"].double() - t["b"].double() * exact()["dp"]).float()
        if "db" in results:
            k, r = self._norm(call)
            kind = torch.finfo(results["db"].dtype)
            least = kind.smallest_normal * kind.eps  # what rounding costs a number below those of full precision
            if r is None:
                error = divided(results["db"], k, exact()["dp"]) - exact()["dp"]
                dp = exact()["dp"] + beyond(error, least / k.abs())
            else:  # along the row nothing is known
                unit, b = k * r, t["b"].double()
                error = divided(results["db"], unit, torch.zeros(())) - exact()["dp"] / r
                along, weight = b * unit, unit.square()
                error = error - along * (weight * along * error).sum(-1, keepdim=True) / (weight * along.square()).sum(-1, keepdim=True)
                error = beyond(error, least / unit.abs())
                dp = exact()["dp"] + r * (error - along * (along * error).sum(-1, keepdim=True))
                dp = torch.where((k == 0).any(-1, keepdim=True), exact()["dp"], dp)
            found["dp"] = dp.float()
        return found

    def to_user(self, call, exact):
        t = {n: x.double() for n, x in call.tensors.items() if n in ("b", "w", "v")}
        found = {n: x for n, x in exact.items() if n != "dp"}
        if "dk" in found:
            found.update(dk=exact["dk"] + t["b"] * exact["dp"], dv=t["w"] * exact["dv"], dw=t["v"] * exact["dv"])
        return found

    def twins(self, call, results, exact):
        if "dw" in results:
            yield "dw", "dv", divided(results["dw"], call.tensors["v"].double(), exact()["dv"]).float()

    def other_parts(self, call, exact):
        return {"dk": (call.tensors["b"].double() * exact["dp"], "dp")}

class Mamba2(Signature):
    """mamba_ssm's mamba_chunk_scan_combined, without D and z: q = C, k = B, v = dt·x, g = dt·A. In some classes dt is raw:
    softplus(dt + dt_bias); these ask for the gradient of A."""
    names = {"dq": "dC", "dk": "dB", "dv": "dx", "dg": "ddt", "dA_log": "dA", "dinitial_state": "dinitial_states"}
    extra = {"chunk_size": 64}
    RAW = ("ordinary", "rising", "wide", "length 64")

    def dress(self, call, draw):
        call = normalised(call)
        t, dtype = dict(call.tensors), call.tensors["v"].dtype
        heads = t["v"].shape[2]
        t["A"] = -draw.uniform(0.5, 1.5, heads).float()
        g = t["g"].double().clamp(max=0)
        if call.name in self.RAW:
            t["g"] = draw.normal(*g.shape).to(dtype)
            t["dt_bias"] = (draw.normal(heads) - 2).float()
        elif call.name == "exact":
            t["A"] = torch.full_like(t["A"], g.min().item())
            t["g"] = (g != 0).to(dtype)
        else:
            t["g"] = (g / t["A"].double()).to(dtype)
        options = {**call.options, "scale": 1.0}
        if "cu_seqlens" in t:  # states of packed sequences have no common signature
            t.pop("initial_state", None), t.pop("dfinal_state", None)
            options["output_final_state"] = False
        return replace(call, tensors=t, options=options, signature=self)

    def fixed(self, tensors):
        return () if "dt_bias" in tensors else ("A",)

    @staticmethod
    def _steps(t):
        dt = t["g"].double()
        return F.softplus(dt + t["dt_bias"].double()) if "dt_bias" in t else dt

    def case(self, tensors, options):
        t, dt = dict(tensors), self._steps(tensors)
        A = t.pop("A").double()
        t["v"] = (dt[..., None] * t["v"].double()).to(t["v"].dtype)
        if "dt_bias" in t:
            return {**t, "A_log": (-A).log().float()}, {**options, "use_gate_in_kernel": True}
        return {**t, "g": (dt * A).float()}, options

    def _by_way_of_v(self, call, exact):
        """Terms of ddt that come by way of dt·x."""
        t = call.tensors
        terms = t["v"].double() * exact["dv"]
        return terms * torch.sigmoid(t["g"].double() + t["dt_bias"].double())[..., None] if "dt_bias" in t else \
            terms / t["A"].double()[:, None]

    def to_case(self, call, results, exact):
        t, found = call.tensors, {n: x for n, x in results.items() if n != "dA"}
        if "dv" in found:
            dt, dx = self._steps(t)[..., None], found["dv"].double()
            lost = (dx - dt * exact()["dv"]).abs() <= torch.finfo(found["dv"].dtype).smallest_normal * 2**-10  # of small dt
            found["dv"] = torch.where(lost, exact()["dv"], divided(dx, dt, exact()["dv"])).float()
        if "dg" in found:
            scale = 1 if "dt_bias" in t else t["A"].double()
            found["dg"] = (found["dg"].double() / scale - self._by_way_of_v(call, exact()).sum(-1)).float()
        if "ddt_bias" in found:
            found["ddt_bias"] = (found["ddt_bias"].double() - self._by_way_of_v(call, exact()).sum((0, 1, 3))).float()
        if "dA" in results:
            found["dA_log"] = (results["dA"].double() * t["A"].double()).float()
        return found

    def to_user(self, call, exact):
        dt = self._steps(call.tensors)
        return {**exact, "dv": dt[..., None] * exact["dv"]} if "dv" in exact else exact

    def other_parts(self, call, exact):
        terms = self._by_way_of_v(call, exact)
        return {"dg": (terms.square().sum(-1).sqrt(), "dv"), "ddt_bias": (terms.square().sum((0, 1, 3)).sqrt(), "dv")}


class Lightning(Signature):
    """fla's chunk_lightning_attn: simple GLA whose gates are the layer's and the head's."""
    extra = {"layer_idx": 1, "num_layers": 4}

    def dress(self, call, draw):
        call = normalised(call)
        return replace(call, tensors={n: x for n, x in call.tensors.items() if n != "g"}, signature=self)

    def case(self, tensors, options):
        heads = tensors["q"].shape[2]
        slope = 8 / heads * (1 - self.extra["layer_idx"] / self.extra["num_layers"])
        return {**tensors, "g_gamma": -slope * torch.arange(heads, dtype=torch.float32)}, options


class Product(Signature):
    """fla's chunk_gated_delta_product: a token has several steps."""

    def dress(self, call, draw):
        return replace(call, options={**call.options, "num_householder": call.options["steps"]}, signature=self)

    def case(self, tensors, options):
        return tensors, {n: x for n, x in options.items() if n != "num_householder"}


SIGNATURES = {"gdn2": ByChannels(), "mamba2": Mamba2(), "lightning": Lightning(), "product": Product()}
