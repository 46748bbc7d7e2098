"""When a call goes back to the function of transformers."""
import warnings

import torch

from softdelta import _options

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_warned = set()


def outside(*tensors, gpu=False):
    """Why tensors are outside what the kernels take, or None. gpu: GPUs' kernels do this, too."""
    for x in tensors:
        if x.device.type != "cpu" and not (gpu and x.device.type in _options.engines()):
            return f"tensors on {x.device.type}"
        if x.device.type != "cpu" and x.dtype == torch.float64:
            return "tensors of f64 on a GPU"
        if x.dtype not in TYPES:
            return f"tensors of {x.dtype}"
    return None


def warn_once(original, reason):
    """One warning for each function and reason."""
    key = original.__module__, original.__name__, str(reason)
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"softdelta: {original.__name__} of {original.__module__} is used instead: {reason}",
                      RuntimeWarning, stacklevel=4)
