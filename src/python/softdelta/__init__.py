"""softdelta: softmax attention and delta rules on CPUs, forward and backward.

Functions here take arrays of NumPy, torch, JAX: all that speak DLPack or the buffer protocol. softdelta.torch has the
signatures people know, with autograd; softdelta.testing judges your kernel.
"""
from . import testing
from ._attention import AttentionPlan, attention_backward, attention_forward
from ._audit import Audit, audit
from ._cases import Finding, Report, dump, judge, verify
from ._delta_rule import delta_backward, delta_forward, delta_step
from ._diagnose import Candidate, Diagnosis, Stage, diagnose
from ._layer import (causal_convolution_backward, causal_convolution_forward, causal_convolution_step,
                     gated_norm_backward, gated_norm_forward)
from ._native import Unsupported, isa_levels
from ._native import version as _version
from ._options import Rule, get_num_threads, set_num_threads
from ._watch import watch

__version__ = _version()
__all__ = [
    "AttentionPlan", "Audit", "Candidate", "Diagnosis", "Finding", "Report", "Rule", "Stage", "Unsupported",
    "attention_backward", "attention_forward", "audit", "causal_convolution_backward", "causal_convolution_forward",
    "causal_convolution_step", "delta_backward", "delta_forward", "delta_step", "diagnose", "dump",
    "gated_norm_backward", "gated_norm_forward", "get_num_threads", "isa_levels", "judge", "set_num_threads",
    "testing", "verify", "watch"
]
