"""Tiny models of every architecture that has a delta rule, with random weights."""
import importlib

import torch

VOCABULARY = 96

COMMON = dict(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, pad_token_id=0, bos_token_id=1,
              eos_token_id=2, initializer_range=0.1,
              layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"])
GATED_DELTA_NET = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
                       linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24)
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
LATENT_ATTENTION = dict(num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16,
                        v_head_dim=24)

# model → (module, configuration class, model class, fields)
MODELS = {
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM",
                   GATED_DELTA_NET | EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=32)),
    "qwen3_5": ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", GATED_DELTA_NET | dict(intermediate_size=96)),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM",
                    GATED_DELTA_NET | EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=32)),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridForCausalLM",
                    GATED_DELTA_NET | dict(intermediate_size=96)),
    "qwen4_exp": ("qwen4_exp", "Qwen4ExpTextConfig", "Qwen4ExpForCausalLM",
                  GATED_DELTA_NET | EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=32, hc_count=2,
                                                   hc_lowrank=16, indexer_n_heads=2, indexer_kv_heads=1,
                                                   indexer_head_dim=16, indexer_budget=128,
                                                   indexer_compress_ratio=4)),
    "kimi_linear": ("kimi_linear", "KimiLinearConfig", "KimiLinearForCausalLM",
                    LATENT_ATTENTION | EXPERTS | dict(linear_num_heads=4, linear_head_dim=16, num_local_experts=4,
                                                      intermediate_size=96, qk_rope_head_dim=8)),
    "glm5_next": ("glm5_next", "Glm5NextTextConfig", "Glm5NextTextModel",
                  LATENT_ATTENTION | EXPERTS | dict(linear_num_heads=4, linear_head_dim=16, n_routed_experts=4,
                                                    intermediate_size=96, q_lora_rank=16, qk_rope_head_dim=0,
                                                    index_topk=64, index_head_dim=16, index_n_heads=2, index_kpool=4,
                                                    hc_mult=2)),
    "bailing_hybrid": ("bailing_hybrid", "BailingHybridConfig", "BailingHybridForCausalLM",
                       LATENT_ATTENTION | EXPERTS | dict(num_local_experts=4, intermediate_size=96, head_dim=16,
                                                         qk_rope_head_dim=8, n_group=1, topk_group=1,
                                                         num_mtp_layers=0)),
}


def build(name, seed=0, **fields):
    """The tiny model in f32, ready to infer, or None where this transformers lacks it."""
    module, configuration, model, own = MODELS[name]
    try:
        classes = importlib.import_module(f"transformers.models.{module}")
    except ImportError:
        return None
    torch.manual_seed(seed)
    fields = COMMON | own | dict(experts_implementation="eager") | fields  # the grouped product has no f64
    return getattr(classes, model)(getattr(classes, configuration)(**fields)).eval()


def draw(*shape, seed=1):
    """Token numbers that are not special."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, ids, **arguments):
    """Logits, or the last hidden states of a model without a head."""
    result = model(ids, **arguments)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state
