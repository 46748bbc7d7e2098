"""Layers without state, whose names and arguments are those that transformers looks for ("kernels-community/fla",
"kernels-community/causal-conv1d")."""
import softdelta.torch as sd
from torch import nn


class chunk_gated_delta_rule(nn.Module):
    has_backward = can_torch_compile = True

    def forward(self, query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False, **kwargs):
        return sd.chunk_gated_delta_rule(query, key, value, g, beta, initial_state=initial_state,
                                         output_final_state=output_final_state, cu_seqlens=kwargs.get("cu_seqlens"),
                                         use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


class recurrent_gated_delta_rule(nn.Module):
    has_backward = can_torch_compile = True

    def forward(self, query, key, value, g, beta, initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False, **kwargs):
        return sd.fused_recurrent_gated_delta_rule(query, key, value, g, beta=beta, initial_state=initial_state,
                                                   output_final_state=output_final_state,
                                                   cu_seqlens=kwargs.get("cu_seqlens"),
                                                   use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


class causal_conv1d_fn(nn.Module):
    has_backward = can_torch_compile = True

    def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
        return sd.causal_conv1d_fn(hidden_states, weight, bias, seq_idx=kwargs.get("seq_idx"), activation=activation)


class causal_conv1d_update(nn.Module):
    has_backward, can_torch_compile = False, True

    def forward(self, hidden_states, conv_state, weight, bias=None, activation=None):
        return sd.causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


class FusedRMSNormGated(nn.Module):
    has_backward = can_torch_compile = True

    def forward(self, hidden_states, gate):
        return sd.rms_norm_gated(hidden_states, gate, self.weight, activation=self.activation, eps=self.variance_epsilon)
