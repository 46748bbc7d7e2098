"""A context in which torch's attention is ours."""
from __future__ import annotations

import contextlib
import types

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ._attention import scaled_dot_product_attention

_TORCHS = F.scaled_dot_product_attention


def _attend(*args, **kwargs):
    query = args[0] if args else kwargs["query"]
    if query.device.type == "cpu" and not query.is_nested:
        return scaled_dot_product_attention(*args, **kwargs)
    return _TORCHS(*args, **kwargs)


# torch shows a mode this Python function as a whole, and then no call within it: there the name stands for ours.
_HEADS = F.multi_head_attention_forward
_with_ours = types.FunctionType(_HEADS.__code__, {**_HEADS.__globals__, "scaled_dot_product_attention": _attend},
                                _HEADS.__name__, _HEADS.__defaults__)
_INSTEAD = {_TORCHS: _attend, _HEADS: _with_ours}


class _Ours(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def sdpa_kernel():
    """Within it, torch.nn.functional.scaled_dot_product_attention of tensors on the CPU is softdelta's, as
    torch.nn.attention.sdpa_kernel chooses among torch's own kernels.

        with softdelta.torch.sdpa_kernel():
            loss = model(batch).sum()
        loss.backward()

    It holds for this thread, may stand in itself, in torch.compile and before a function (@sdpa_kernel()), and ends with
    an exception. What softdelta refuses is its error: dropout, five dimensions. Nested tensors and other devices remain
    torch's. C++ code calls no such function. torch.utils.checkpoint computes again in the backward pass, which torch
    shields: give it context_fn=lambda: (sdpa_kernel(), sdpa_kernel()).
    """
    with _Ours():
        yield
