"""Tiny models with random weights: of every architecture that has a delta rule, and ordinary ones of softmax attention."""
import importlib

import pytest
import softdelta.transformers
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
    "lara_mini": ("lara_mini", "LaraMiniConfig", "LaraMiniForCausalLM",
                  GATED_DELTA_NET | EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=32)),
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


def _build(model, seed, common, fields):
    module, configuration, model, own = model
    try:
        classes = importlib.import_module(f"transformers.models.{module}")
    except ImportError:
        return None
    torch.manual_seed(seed)
    return getattr(classes, model)(getattr(classes, configuration)(**(common | own | fields))).eval()


def build(name, seed=0, **fields):
    """The tiny model in f32, ready to infer, or None where this transformers lacks it."""
    common = COMMON | dict(experts_implementation="eager")  # the grouped product has no f64
    return _build(MODELS[name], seed, common, fields)


def draw(*shape, seed=1):
    """Token numbers that are not special."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, ids, **arguments):
    """Logits, or the last hidden states of a model without a head."""
    result = model(ids, **arguments)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


# Ordinary models of softmax attention, with what makes them different: sinks, soft caps, windows, position biases.
ORDINARY_COMMON = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                       num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
                       pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.1)
ORDINARY_EXPERTS = dict(num_experts_per_tok=2, experts_implementation="eager")
LAYERS = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=12)

ORDINARY = {
    "gpt2": ("gpt2", "GPT2Config", "GPT2LMHeadModel",
             dict(n_embd=64, n_layer=3, n_head=4, n_positions=512, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)),
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("mistral", "MistralConfig", "MistralForCausalLM", dict(sliding_window=12)),
    "qwen2": ("qwen2", "Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                  ORDINARY_EXPERTS | dict(moe_intermediate_size=32, num_experts=4)),
    "gemma2": ("gemma2", "Gemma2Config", "Gemma2ForCausalLM",
               LAYERS | dict(query_pre_attn_scalar=16, attn_logit_softcapping=2.0)),
    "gemma3": ("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", LAYERS | dict(query_pre_attn_scalar=16)),
    "phi3": ("phi3", "Phi3Config", "Phi3ForCausalLM", {}),
    "gpt_oss": ("gpt_oss", "GptOssConfig", "GptOssForCausalLM", LAYERS | ORDINARY_EXPERTS | dict(num_local_experts=4)),
    "t5": ("t5", "T5Config", "T5ForConditionalGeneration",
           dict(d_model=64, d_kv=16, d_ff=96, num_layers=3, num_decoder_layers=3, num_heads=4, dropout_rate=0.0,
                decoder_start_token_id=0, initializer_factor=1.0)),
    "olmo2": ("olmo2", "Olmo2Config", "Olmo2ForCausalLM", {}),
}


def build_ordinary(name, seed=0, **fields):
    """As build; None where this transformers lacks the model."""
    common = dict(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=2) if name in ("t5", "gpt2") else ORDINARY_COMMON
    built = _build(ORDINARY[name], seed, common, fields)
    if built is None:
        return None
    for what, parameter in built.named_parameters():
        if what.endswith("sinks"):  # left empty by the class
            torch.nn.init.normal_(parameter)
    return built


@pytest.fixture(autouse=True)
def disabled_after():
    """Each test of a file that imports this ends with transformers as it was."""
    yield
    softdelta.transformers.disable()


@pytest.fixture(params=MODELS)
def name(request):
    """Each model that this transformers has."""
    if build(request.param) is None:
        pytest.skip(f"this transformers has no {request.param}")
    return request.param
