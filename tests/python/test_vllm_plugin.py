"""integrations/vllm beside modules that stand for vLLM's: their functions have its arguments, in its order."""
import importlib.util
import pathlib
import sys
import types

import pytest
import torch

FILE = pathlib.Path(__file__).parents[2] / "integrations" / "vllm" / "softdelta_vllm.py"
# From vllm/_custom_ops.py and vllm/models/glm5next/cpu/ops/kda.py, autumn of 2026.
ARGUMENTS = {
    "chunk_gated_delta_rule_cpu": "query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first, "
                                  "use_qk_l2norm_in_kernel, initial_state_indices, eps=1e-5",
    "fused_sigmoid_gating_delta_rule_update_cpu": "A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, "
                                                  "cu_seqlens, use_qk_l2norm_in_kernel, softplus_beta=1.0, softplus_threshold=20.0",
    "fused_recurrent_kda": "q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, "
                           "use_qk_l2norm_in_kernel=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, "
                           "out=None, sigmoid_beta=False, a_log=None, g_bias=None, compute_gate=False, lower_bound=None, **kwargs",
    "chunk_kda_with_fused_gate": "q, k, v, raw_g, beta, A_log, g_bias, initial_state=None, output_final_state=False, "
                                 "use_qk_l2norm_in_kernel=True, cu_seqlens=None, safe_gate=False, lower_bound=None, **kwargs",
}
LENGTHS, SLOTS, H, HV, K, V = [70, 1, 5], [3, 1, 4], 2, 4, 16, 32
CU = torch.tensor([0, 70, 71, 76], dtype=torch.int32)


@pytest.fixture
def vllm(monkeypatch):
    """The plugin and vLLM's modules; a function that is not replaced returns its own name."""
    modules = {name: types.ModuleType(name) for name in
               ("vllm", "vllm._custom_ops", "vllm.platforms", "vllm.models", "vllm.models.glm5next", "vllm.models.glm5next.cpu",
                "vllm.models.glm5next.cpu.ops", "vllm.models.glm5next.cpu.ops.kda", "vllm.user")}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for name, arguments in ARGUMENTS.items():
        scope = {}
        exec(f"def {name}({arguments}): return '{name}'", scope)
        setattr(modules["vllm.models.glm5next.cpu.ops.kda" if "kda" in name else "vllm._custom_ops"], name, scope[name])
    modules["vllm.user"].imported = modules["vllm.models.glm5next.cpu.ops.kda"].fused_recurrent_kda
    modules["vllm.platforms"].current_platform = types.SimpleNamespace(is_cpu=lambda: True)
    spec = importlib.util.spec_from_file_location("softdelta_vllm", FILE)
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    return types.SimpleNamespace(plugin=plugin, ops=modules["vllm._custom_ops"], kda=modules["vllm.models.glm5next.cpu.ops.kda"],
                                 user=modules["vllm.user"], platforms=modules["vllm.platforms"])


def recurrence(q, k, v, gate, beta, states):
    """The rule token by token in f64: gate [T, HV, K|1], states [N, HV, K, V] as they are before; returns o and states after."""
    q, k, v, gate, beta = (x.double() for x in (q[0], k[0], v[0], gate, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    o, after = torch.empty_like(v), states.double().clone()
    for n in range(len(CU) - 1):
        for t in range(CU[n], CU[n + 1]):
            S = gate[t].exp()[..., None] * after[n]
            u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
            after[n] = S + k[t][..., None] * u[:, None]
            o[t] = torch.einsum("hkv,hk->hv", after[n], q[t]) * q.shape[-1]**-0.5
    return o[None], after


def close(found, truth, limit):
    assert found.shape == truth.shape
    assert (found.double() - truth).norm() <= limit * truth.norm()


def drawn(heads=H):
    torch.manual_seed(0)
    T = sum(LENGTHS)
    q, k, v = torch.randn(1, T, heads, K), torch.randn(1, T, heads, K), torch.randn(1, T, HV, V)
    return (x.bfloat16() for x in (q, k, v))


def test_gated_delta_rule(vllm):
    q, k, v = drawn()
    T = v.shape[1]
    a, b, A_log, dt_bias = torch.randn(T, HV).bfloat16(), torch.randn(T, HV).bfloat16(), torch.randn(HV), torch.randn(HV).bfloat16()
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    beta = b.float().sigmoid()
    pool, slots = torch.randn(6, HV, K, V), torch.tensor(SLOTS, dtype=torch.int32)
    o, after = recurrence(q, k, v, g[..., None], beta, pool[SLOTS])
    assert len(vllm.plugin.register()) == 4
    prompts = dict(query=q, key=k, value=v, g=g[None], beta=beta[None], output_final_state=True, cu_seqlens=CU, head_first=False,
                   use_qk_l2norm_in_kernel=True)
    changed = pool.clone()
    for state, indices in (changed, slots), (pool[SLOTS], None):
        before = state.clone()
        found, final = vllm.ops.chunk_gated_delta_rule_cpu(**prompts, initial_state=state, initial_state_indices=indices)
        close(found, o, 0.01)
        close(final, after, 0.01)
        assert (indices is None) == torch.equal(before, state)
    others = [0, 2, 5]
    assert torch.equal(changed[others], pool[others])
    steps = dict(A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, initial_state_indices=slots, cu_seqlens=CU,
                 use_qk_l2norm_in_kernel=True)
    changed = pool.clone()
    close(vllm.ops.fused_sigmoid_gating_delta_rule_update_cpu(**steps, initial_state_source=changed), o.transpose(0, 1), 0.01)
    close(changed[SLOTS], after, 0.01)
    nobody = torch.tensor([3, 0, -1], dtype=torch.int32)  # the last two are nobody's
    for function, call in ((vllm.ops.chunk_gated_delta_rule_cpu, dict(prompts, initial_state_indices=nobody)),
                           (vllm.ops.fused_sigmoid_gating_delta_rule_update_cpu, dict(steps, initial_state_indices=nobody))):
        changed = pool.clone()
        function(**call, **{"initial_state" if "query" in call else "initial_state_source": changed})
        assert torch.equal(changed[[0, 1, 2, 4, 5]], pool[[0, 1, 2, 4, 5]]) and not torch.equal(changed[3], pool[3])
    # not softdelta's
    assert isinstance(vllm.ops.fused_sigmoid_gating_delta_rule_update_cpu(**steps, initial_state_source=pool.bfloat16()), str)
    assert isinstance(vllm.ops.chunk_gated_delta_rule_cpu(**prompts | dict(head_first=True), initial_state=pool,
                                                          initial_state_indices=slots), str)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda(vllm, lower_bound):
    q, k, v = drawn(HV)
    T = v.shape[1]
    raw, logits, A_log, bias = torch.randn(1, T, HV, K), torch.randn(1, T, HV), torch.randn(HV), torch.randn(HV, K)
    x = raw[0] + bias
    gate = (-A_log.exp()[:, None] * torch.nn.functional.softplus(x) if lower_bound is None else
            lower_bound * (A_log.exp()[:, None] * x).sigmoid())
    pool, beta = torch.randn(6, HV, V, K), logits.sigmoid()
    o, after = recurrence(q, k, v, gate, beta[0], pool[SLOTS].mT)
    vllm.plugin.register()
    found, final = vllm.kda.chunk_kda_with_fused_gate(q, k, v, raw, beta, A_log, bias.view(-1), initial_state=pool[SLOTS],
                                                      output_final_state=True, cu_seqlens=CU, safe_gate=lower_bound is not None,
                                                      lower_bound=lower_bound)
    close(found, o, 0.01)
    close(final, after.mT, 0.01)
    by_gate = dict(g=gate[None]) if lower_bound is None else dict(g=raw, a_log=A_log, g_bias=bias, compute_gate=True,
                                                                  lower_bound=lower_bound)
    out, changed = torch.empty_like(v), pool.clone()
    slots = torch.tensor(SLOTS[:2] + [0], dtype=torch.int32)  # the last one is nobody's
    steps = dict(q=q, k=k, v=v, beta=logits, initial_state=changed, cu_seqlens=CU, ssm_state_indices=slots, sigmoid_beta=True, out=out)
    found, states = vllm.user.imported(**steps, **by_gate)
    assert found is out and states is changed
    close(found[:, :71], o[:, :71], 0.01)
    close(changed[SLOTS[:2]], after[:2].mT, 0.01)
    others = [0, 2, 4, 5]
    assert torch.equal(changed[others], pool[others])
    assert isinstance(vllm.kda.fused_recurrent_kda(**steps, **by_gate, num_accepted_tokens=slots), str)


def test_replaces_nothing_that_it_does_not_know(vllm):
    vllm.platforms.current_platform.is_cpu = lambda: False
    assert vllm.plugin.register() == []
    vllm.platforms.current_platform.is_cpu = lambda: True
    vllm.ops.chunk_gated_delta_rule_cpu = lambda query, key, rows: "new"
    del sys.modules["vllm.models.glm5next.cpu.ops.kda"]
    assert vllm.plugin.register() == ["fused_sigmoid_gating_delta_rule_update_cpu"]
    assert vllm.ops.chunk_gated_delta_rule_cpu(1, 2, 3) == "new"
