"""A plugin of vLLM: on a CPU its gated delta rule and KDA are computed by softdelta.

vLLM calls register() in each of its processes. A function is replaced where its arguments are those known here; else it
stays as it is, and the log says so. A call that softdelta does not take (speculative decode, states that are not f32)
goes to vLLM's own function.
"""
import functools
import importlib
import inspect
import logging
import sys

import torch
from softdelta.torch import delta_step

logger = logging.getLogger(__name__)


def chunk_gated_delta_rule_cpu(original, query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first,
                               use_qk_l2norm_in_kernel, initial_state_indices=None, eps=1e-5):
    """Prompts: q, k, v [1, T, heads, K|V]; with initial_state_indices states are changed in their pool."""
    if head_first or initial_state.dtype != torch.float32:
        indices = () if initial_state_indices is None else (initial_state_indices,)
        return original(query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first,
                        use_qk_l2norm_in_kernel, *indices, eps=eps)
    state = initial_state.clone() if initial_state_indices is None else initial_state
    o = delta_step("gated_delta_rule", query, key, value, state, g=g, beta=beta, cu_seqlens=cu_seqlens,
                   state_indices=_slots(initial_state_indices), use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if not output_final_state:
        return o, None
    return o, state if initial_state_indices is None else state[initial_state_indices.clamp(min=0)]


def fused_sigmoid_gating_delta_rule_update_cpu(original, A_log, dt_bias, q, k, v, a, b, initial_state_source,
                                               initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel,
                                               softplus_beta=1.0, softplus_threshold=20.0):
    """A token of each sequence: gates from a and b [T, HV]. Returns o [T, 1, HV, V]."""
    if softplus_beta != 1 or softplus_threshold < 20 or initial_state_source.dtype != torch.float32:
        return original(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens,
                        use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold)
    o = delta_step("gated_delta_rule", q, k, v, initial_state_source, g=a.unsqueeze(0), beta=b.unsqueeze(0), A_log=A_log,
                   dt_bias=dt_bias, cu_seqlens=cu_seqlens, state_indices=_slots(initial_state_indices),
                   use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=True,
                   use_beta_sigmoid_in_kernel=True)
    return o.transpose(0, 1)


def fused_recurrent_kda(original, q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,
                        use_qk_l2norm_in_kernel=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None,
                        out=None, sigmoid_beta=False, a_log=None, g_bias=None, compute_gate=False, lower_bound=None,
                        **kwargs):
    """KDA on a pool of states [slots, H, V, K]."""
    known = (beta is not None and inplace_final_state and num_accepted_tokens is None and cu_seqlens is not None and
             initial_state is not None and initial_state.dtype == torch.float32 and ssm_state_indices is not None and
             ssm_state_indices.dim() == 1 and not kwargs)
    if not known:
        return original(q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
                        ssm_state_indices, num_accepted_tokens, out, sigmoid_beta, a_log, g_bias, compute_gate,
                        lower_bound, **kwargs)
    gate = dict(use_gate_in_kernel=True, A_log=a_log.reshape(-1), dt_bias=g_bias.reshape(-1),
                lower_bound=lower_bound) if compute_gate else {}
    o = delta_step("kda", q, k, v, initial_state, g=g, beta=beta, cu_seqlens=cu_seqlens,
                   state_indices=_slots(ssm_state_indices[:cu_seqlens.numel() - 1]), scale=scale,
                   use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=sigmoid_beta,
                   state_v_first=True, **gate)
    return (o if out is None else out.copy_(o)), initial_state


def chunk_kda_with_fused_gate(original, q, k, v, raw_g, beta, A_log, g_bias, initial_state=None, output_final_state=False,
                              use_qk_l2norm_in_kernel=True, cu_seqlens=None, safe_gate=False, lower_bound=None, **kwargs):
    """KDA over prompts: states [N, H, V, K] come and go as tensors of their own."""
    if cu_seqlens is None or kwargs:
        return original(q, k, v, raw_g, beta, A_log, g_bias, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                        cu_seqlens, safe_gate, lower_bound, **kwargs)
    shape = (cu_seqlens.numel() - 1, v.shape[2], v.shape[3], q.shape[3])
    state = torch.zeros(shape) if initial_state is None else initial_state.to(torch.float32, copy=True)
    o = delta_step("kda", q, k, v, state, g=raw_g, beta=beta, A_log=A_log.reshape(-1), dt_bias=g_bias.reshape(-1),
                   cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=True,
                   lower_bound=lower_bound if safe_gate else None, state_v_first=True)
    return o, state if output_final_state else None


FUNCTIONS = {
    "vllm._custom_ops": (chunk_gated_delta_rule_cpu, fused_sigmoid_gating_delta_rule_update_cpu),
    "vllm.models.glm5next.cpu.ops.kda": (fused_recurrent_kda, chunk_kda_with_fused_gate),
}


def register():
    """Replaces what FUNCTIONS names, everywhere in vLLM, and returns the names of what was replaced."""
    from vllm.platforms import current_platform
    replaced = []
    if not current_platform.is_cpu():
        return replaced
    for module_name, functions in FUNCTIONS.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            logger.info("softdelta: this vLLM has no %s", module_name)
            continue
        for function in functions:
            name = function.__name__
            original = getattr(module, name, None)
            if original is None or not _takes_the_same(original, function):
                logger.warning("softdelta: %s.%s of this vLLM has other arguments and stays as it is", module_name, name)
                continue
            _replace(original, functools.wraps(original)(functools.partial(function, original)))
            replaced.append(name)
    return replaced


def _slots(indices):
    """Slot 0 and -1 of vLLM's pool stand for no sequence, which is -1 here."""
    return None if indices is None else indices.masked_fill(indices <= 0, -1)


def _takes_the_same(original, function):
    """The names in their order. What this vLLM does not have yet must be optional here."""
    theirs, ours = list(inspect.signature(original).parameters), list(inspect.signature(function).parameters.values())[1:]
    missing = [p for p in ours if p.name not in theirs]
    return (theirs == [p.name for p in ours if p.name in theirs] and
            all(p.default is not inspect.Parameter.empty for p in missing))


def _replace(original, function):
    """Modules that have imported the function by its name have it, too."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "vllm":
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, function)
