"""Who wants to see a call: nobody, autograd, a transform of torch.func, a tracer. And torch.autocast."""
from __future__ import annotations

import torch
from torch import Tensor

from .. import _native

PLAIN, GRADIENT, TRACED, TRANSFORMED = range(4)

_plain_types = (Tensor, torch.nn.Parameter)

# Names of this file: in a model every look-up finds its dictionaries pushed out of the caches.
_is_compiling, _is_grad_enabled, _autocasts = torch.compiler.is_compiling, torch.is_grad_enabled, torch.is_autocast_enabled
try:
    _is_jit_tracing = torch._C._is_tracing
    _dispatch_modes, _function_mode = torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
    _functorch_level, _is_batched = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.is_legacy_batchedtensor
    _forward_mode = torch.autograd.forward_ad
    _forward_mode._current_level
    _knows_torch = True
except AttributeError:  # torch keeps these to itself. Without them every call is an op, which torch looks after: slower
    _knows_torch = False


def route(tensors) -> int:
    """TRACED when something wants to see the call as an op (a compiler, torch.jit.trace, a dispatch mode, a subclass, a
    tensor without memory), TRANSFORMED within torch.func or forward mode. Else GRADIENT when gradients are recorded, else
    PLAIN."""
    if not _knows_torch or _is_compiling() or _is_jit_tracing():
        return TRACED
    return TRANSFORMED if _functorch_level() is not None or _forward_mode._current_level >= 0 else route_below(tensors)


def route_back(tensors, incoming) -> int:
    """route of a backward pass. Gradients that come in batched (is_grads_batched) are batched as in the first vmap of
    torch, which knows ops alone. The forward pass looked at `tensors`: all of them matter where gradients are recorded."""
    for t in incoming:
        if not _knows_torch or t is not None and _is_batched(t):
            return TRACED
    return route((*(tensors if _is_grad_enabled() else tensors[:1]), *incoming))


def is_transformed() -> bool:
    """Whether torch.func or forward mode want to see a call."""
    return route(()) == TRANSFORMED


def route_below(tensors) -> int:
    """route where transforms have taken their part of the call."""
    if not _knows_torch or _dispatch_modes() or _function_mode():
        return TRACED
    recorded, way = _is_grad_enabled(), PLAIN
    for t in tensors:
        if t is not None:
            if type(t) not in _plain_types:
                expect_tensors(**dict(zip(getattr(tensors, "_fields", ()), tensors)))
                return TRACED
            if recorded and t.requires_grad:
                way = GRADIENT
    return TRACED if tensors and tensors[0] is not None and tensors[0].is_meta else way


def expect_tensors(**given) -> None:
    """Tensors, or what torch takes for one: a subclass, a proxy of a tracer. None is left to the caller."""
    for name, t in given.items():
        if t is not None and not isinstance(t, Tensor) and not hasattr(type(t), "__torch_function__"):
            raise TypeError(f"{name} is {type(t).__name__}, expected a tensor")


def needs_gradient(tensors) -> bool:
    return is_transformed() or _is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocast(tensors, which) -> tuple:
    """Tensors, a record or a tuple of them, as torch.autocast wants them: those of `which` in its type, as torch casts the
    operands of its own attention. Gates, β, states, lse and parameters of gates keep their types, for they are kept in
    f32 on purpose, and so do f64 and numbers of 8 bits."""
    if not which or not _autocasts("cpu") and not _autocasts("cuda"):
        return tensors
    first = tensors[which[0]]
    device = "cpu" if first is None else first.device.type
    if device not in ("cpu", "cuda") or not _autocasts(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    cast = (t.to(dtype) if i in which and t is not None and t.is_floating_point() and t.element_size() in (2, 4) else t
            for i, t in enumerate(tensors))
    return tensors._make(cast) if hasattr(tensors, "_make") else tuple(cast)


def without_autocast(t: Tensor):
    """A context for ops on t and its like, whose casts are made."""
    return torch.autocast("cpu" if t.is_meta else t.device.type, enabled=False)


def refuse_forward_mode(*_):
    raise _native.Unsupported("softdelta has no forward-mode derivatives (torch.func.jvp, jacfwd, hessian), expected "
                              "reverse mode: backward, torch.func.grad, vjp, jacrev")


def refuse_second_derivative(*_):
    raise _native.Unsupported("softdelta has no second derivatives, and this asks for the gradient of one of its "
                              "gradients; expected first derivatives alone, or torch's own functions in this part of "
                              "the model")
