"""softdelta: softmax attention and delta rules on CPUs, forward and backward."""
from ._native import Unsupported, isa_levels
from ._native import version as _version
from ._options import get_num_threads, set_num_threads

__version__ = _version()
__all__ = ["Unsupported", "get_num_threads", "isa_levels", "set_num_threads"]
