"""Tiny models with random weights of every architecture of transformers that reads text, built without a network."""
import copy
import re

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

VOCABULARY = 64

MAPPINGS = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

# Fields of configurations and what they shrink to. Windows and what indexers keep are shorter than the prompt.
SIZES = {
    r"hidden_size|d_model|n_embd|dim|embed_dim|out_hidden_size|text_hidden_size|embedding_size|word_embed_proj_dim|"
    r"projection_dim|encoder_hidden_size|hidden_size_global|adapter_out_dim|pooler_hidden_size|emb_dim|"
    r"backbone_hidden_size|embedding_dim|attention_hidden_size|input_embedding_size|output_embedding_size|"
    r"projector_hidden_size|decoder_hidden_size|audio_hidden_size|lru_width|hidden_dim|"
    r"vision_output_dim|projector_input_dim|projector_output_dim|prediction_head_size|image_text_hidden_size|"
    r"output_dim|patch_embed_hidden_size|t2u_d_model|dim_model_base": 64,
    r".*intermediate_size(_mlp)?|.*ffn_dim|d_ff|dff|dim_ff|ffn_hidden_size|expert_ffn_hidden_size|mlp_dim|n_inner|"
    r"d_inner|.*feed_forward_size|projection_hidden_dim|projection_intermediate_size": 96,
    r"num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|num_encoder_layers|num_decoder_layers|"
    r"layers|num_layers_per_stack|.*speech_encoder_layers|t2u_encoder_layers|t2u_decoder_layers|num_blocks|"
    r"conf_num_hidden_layers": 2,
    r"depth|num_global_layers|resampler_depth|n_recurrent_layers|n_input_layers|n_output_layers": 2,
    r"num_attention_heads|num_heads|n_heads?|attention_heads|.*encoder_attention_heads|.*decoder_attention_heads|"
    r"num_encoder_attention_heads|num_decoder_attention_heads|swa_num_attention_heads|linear_num_heads|"
    r"conf_num_attention_heads|resampler_n_heads": 4,
    r"num_key_value_heads|swa_num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups|linear_num_key_heads": 2,
    r"linear_num_value_heads": 4,
    r"head_dim|swa_head_dim|dim_head|d_kv|d_head|kv_channels|linear_head_dim|linear_key_head_dim|linear_value_head_dim|"
    r"index_head_dim|qk_nope_head_dim|v_head_dim|swa_v_head_dim|q_lora_rank|kv_lora_rank|attention_head_size|"
    r"attention_head_dim|resampler_head_dim|o_lora_rank|swa_q_lora_rank|swa_kv_lora_rank|gated_norm_rank|"
    r"loop_gate_rank|hc_lowrank": 16,
    r"qk_rope_head_dim|rotary_dim": 8,
    r"qk_head_dim": 24,
    r"n_routed_experts|num_experts|num_local_experts|moe_num_experts": 4,
    r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|moe_top_k|top_k_experts": 2,
    r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups|first_k_dense_replace|"
    r"num_dense_layers": 1,
    r"sliding_window|sliding_window_size|attention_chunk_size|local_attention|attention_window_size|"
    r"keep_window_size|local_attention_window_len|rel_extent|attention_window": 16,
    r"index_topk|index_block_size|indexer_budget|local_radius|block_size": 8,
    r"index_n_heads|indexer_n_heads|index_topk_blocks": 2,
    r"vocab_size|vocab_size_per_layer_input|src_vocab_size|tgt_vocab_size|decoder_vocab_size|"
    r"unpadded_vocab_size|t2u_vocab_size": VOCABULARY,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_target_positions|"
    r"max_source_positions|max_encoder_position_embeddings|max_decoder_position_embeddings|model_max_length": 256,
    r".*dropout.*|.*pdrop|.*layerdrop|drop_path_rate": 0.0,
    r"pad_token_id|t2u_pad_token_id": 0,
    r"bos_token_id|decoder_start_token_id|t2u_bos_token_id": 1,
    r"eos_token_id|t2u_eos_token_id|sep_token_id|forced_eos_token_id": 2,
    r"mamba_d_state|ssm_state_size|state_size|mamba_chunk_size|chunk_size": 16,
    r"entity_vocab_size|ngram_vocab_size_base|codebook_size|num_embeddings|base_channels|.*vision_hidden_size": 64,
    r"image_size": 32,
    r"patch_size": 8,
}
MLA = dict(head_dim=8, num_key_value_heads=4)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16)
ALTERNATING = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
TOWER = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
HYBRID = dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, attention_head_dim=32,
              attention_hidden_size=128)


def _mrope(*section):
    return dict(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*section]})


# What a configuration of a type needs besides: layers of every kind, or fields that fit together.
OWN = {
    "apertus1p5": dict(image_token_offset=-64, audio_token_offset=0),
    "bamba": MAMBA | dict(attn_layer_indices=[1]),
    "blip-2": dict(image_token_index=3, num_query_tokens=4),
    "instructblip": dict(image_token_index=3, num_query_tokens=4),
    "instructblipvideo": dict(video_token_index=3, num_query_tokens=4),
    "blt": dict(num_hidden_layers=2, encoder_hash_byte_group_vocab=64),
    "chameleon": dict(vocabulary_map={"<image>": 5}),
    "cohere_compass_text": dict(rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"),
                                                              _mrope(4, 2, 2)["rope_parameters"])),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0)),
    "deepseek_ocr2_text": dict(num_experts_per_tok=2, mlp_layer_types=["dense", "sparse"]),
    "deepseek_v2": MLA | dict(num_experts_per_tok=2),
    "diffusion_gemma_text": dict(num_experts=4, top_k_experts=2, moe_intermediate_size=32, global_head_dim=16),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    "dory": ALTERNATING | dict(n_input_layers=1, n_recurrent_layers=1, n_output_layers=2),
    "dots3_note_vision_encoder": dict(adapter_in_dim=64, num_key_value_heads=4),
    "dots3_note_audio_encoder": dict(adapter_input_size=64),
    "ernie4_5_vl_moe_text": _mrope(3, 3, 2) | dict(moe_intermediate_size=[96, 96]),
    "esm": dict(vocab_size=VOCABULARY, pad_token_id=0, mask_token_id=3),
    "fast_vlm": dict(vision_config=dict(model_type="siglip_vision_model", **TOWER)),
    "gemma3n_text": ALTERNATING | dict(num_kv_shared_layers=2, intermediate_size=[96] * 4, hidden_size_per_layer_input=16,
                                       activation_sparsity_pattern=[0.0] * 4),
    "gemma4_text": ALTERNATING | dict(num_kv_shared_layers=2, global_head_dim=16, hidden_size_per_layer_input=16),
    "gemma4_unified_text": ALTERNATING | dict(global_head_dim=16),
    "glm4v_moe_text": _mrope(2, 1, 1),
    "glm5_next_text": dict(index_kpool=4, qk_rope_head_dim=0),
    "granite4_vision": dict(deepstack_layer_map=[], spatial_target_layers=[], downsample_rate="1/2"),
    "granitemoehybrid": MAMBA | dict(layer_types=["linear_attention", "full_attention"]),
    "hrm_text": dict(num_layers_per_stack=None),
    "hunyuan_vl_text": _mrope(4, 2, 2),
    "hy_v4_vl_text": _mrope(2, 1, 1) | dict(head_dim=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "kosmos-2": dict(latent_query_num=4),
    "lfm2_moe": dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    "longcat_flash": MLA | dict(zero_expert_num=2),
    "mamba2": dict(num_heads=8),
    "minimax_m3_vl_text": dict(layer_types=["full_attention", "minimax_m3_sparse"]),
    "mistral4": dict(qk_nope_head_dim=8),
    "molmo2_adapter": dict(vision_feature_layer=[0, 1]),
    "nemotron": dict(head_dim=16, num_key_value_heads=2),
    "nemotron3_5_transcribe_word_timestamp": dict(blank_token_id=3),
    "perceiver": dict(num_self_attends_per_block=2, num_latents=16, d_latents=64, d_model=64),
    "qwen4_exp_text": dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
                           indexer_compress_ratio=4, hc_count=2),
    "radio": dict(video_temporal_patch_size=2),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": dict(is_decoder=True, axial_pos_shape=[8, 8], axial_pos_embds_dim=[32, 32], max_position_embeddings=64),
    "roc_bert": dict(shape_vocab_size=64, pronunciation_vocab_size=64),
    "step3p5": dict(num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"],
                    mlp_layer_types=["dense", "dense", "sparse"], sliding_window=16),
    "vibevoice_acoustic_tokenizer_encoder": dict(depths=[1] * 7, num_filters=4),
    "wavtokenizer_encoder": dict(codebook_dim=64),
    "xlstm": dict(qk_dim_factor=1.0),
    "xmod": dict(default_language="en_XX"),
    "zamba": HYBRID,
    "zamba2": HYBRID | dict(n_mamba_heads=8),
}
# Of the full configuration, where a type has no valid one by default.
_DRAFTS = dict(text_config=dict(
    model_type="gemma4_text", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, global_head_dim=16, num_hidden_layers=2, layer_types=ALTERNATING["layer_types"][:2],
    sliding_window=16, num_kv_shared_layers=2, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0))
OWN["gemma4_assistant"] = _DRAFTS
FULL = {"gemma4_assistant": _DRAFTS}
for _types, _fields in (
        ("axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear minicpm3 sarvam_mla "
         "youtu mistral_large4_text", MLA),
        ("glm4v_text glm_ocr_text paddleocr_vl_text qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text", _mrope(4, 2, 2)),
        ("hunyuan_v1_dense hunyuan_v1_moe ministral", dict(head_dim=16))):
    OWN |= dict.fromkeys(_types.split(), _fields)

_SIZES = [(re.compile(pattern), value) for pattern, value in SIZES.items()]



def architectures():
    """model type → name of its class: with a head for text where there is one."""
    found = {}
    for mapping in MAPPINGS:
        for name, of in mapping.items():
            found.setdefault(name, of if isinstance(of, str) else of[0])
    return found


def configuration(name, of=None):
    """A small configuration of a model type, or of a class of configurations, with the kinds of layers that the full
    one has."""
    of = of or configuration_auto.CONFIG_MAPPING[name]
    full = of(**FULL.get(of.model_type, {}))
    small = {n: configuration(name, type(getattr(full, n))) for n in full.sub_configs if getattr(full, n, None) is not None}
    values = {n: x for n, x in full.to_dict().items() if n not in small}
    for n, x in values.items():
        if n == "use_sliding_window":
            small |= dict(use_sliding_window=True, max_window_layers=1)
        size = next((size for pattern, size in _SIZES if pattern.fullmatch(n)), None)
        if size is not None and isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0:
            small[n] = min(size, x)
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    small |= _layers(values)
    small |= _rope(values, small)
    return of(**(small | OWN.get(of.model_type, {})))


def _layers(values):
    """Lists with an entry for each layer, cut down to layers that show every kind; at least two."""
    number = next((values[n] for n in ("num_hidden_layers", "num_layers", "n_layers", "n_layer") if values.get(n)), 0)
    lists = {n: x for n, x in values.items() if isinstance(x, list) and len(x) == number > 1}
    kept = {0, 1} if lists else set()
    for x in lists.values():
        if all(isinstance(kind, str) for kind in x):
            kept |= {x.index(kind) for kind in x}
    return {n: [x[i] for i in sorted(kept)] for n, x in lists.items()} | (
        {n: len(kept) for n in ("num_hidden_layers",) if kept and n in values})


def _rope(values, small):
    rope = copy.deepcopy(values.get("rope_parameters"))
    sections = [r for r in (rope, *(rope or {}).values()) if isinstance(r, dict) and "mrope_section" in r]
    for r in sections:
        half = int(small.get("head_dim", 16) * r.get("partial_rotary_factor", 1)) // 2
        r["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_parameters": rope} if sections else {}


def build(name, seed=0):
    """The small model in f32, ready to infer; random weights of such a size that every part matters."""
    torch.manual_seed(seed)
    small, of = configuration(name), getattr(transformers, architectures()[name])
    if not isinstance(small, of.config_class):  # a head over the text model alone
        small = next((x for x in map(small.__getattribute__, small.sub_configs) if isinstance(x, of.config_class)), small)
    small._attn_implementation = "eager"
    model = of(small).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
            else:
                summed = p.shape[-1] if p.dim() < 4 else p[0].numel()  # of a convolution over images, all but the first
                p.copy_(torch.randn(p.shape, generator=generator) / summed**0.5)
    return model


def draw(rows, length, seed=1):
    """Token numbers that are not special."""
    return torch.randint(4, VOCABULARY - 4, (rows, length), generator=torch.Generator().manual_seed(seed))


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _shared_keys(rows):
    """Keys and values of a larger model that drafts for it read."""
    return dict.fromkeys(("full_attention", "sliding_attention"), (_noise(rows, 2, 50, 16), _noise(rows, 2, 50, 16)))


def _image(ids):
    return dict(pixel_values=_noise(len(ids), 3, 32, 32))


def _placed(ids, number):
    """Tokens of an image before the others."""
    return torch.cat([torch.full((len(ids), number), 3), ids[:, number:]], 1)


# What a model needs beside tokens [B, T], or in their place.
BESIDES = {
    "blip": _image,
    "blip-2": lambda ids: _image(ids) | dict(input_ids=_placed(ids, 4)),
    "gemma4_assistant": lambda ids: dict(inputs_embeds=_noise(len(ids), 1, 128), shared_kv_states=_shared_keys(len(ids))),
    "gemma4_unified_assistant": lambda ids: dict(inputs_embeds=_noise(len(ids), 1, 128),
                                                 shared_kv_states=_shared_keys(len(ids))),
    "idefics": lambda ids: dict(pixel_values=_noise(len(ids), 1, 3, 32, 32),
                                image_attention_mask=torch.ones(*ids.shape, 1, dtype=torch.long)),
    "instructblip": lambda ids: _image(ids) | dict(qformer_input_ids=ids, input_ids=_placed(ids, 4)),
    "instructblipvideo": lambda ids: dict(pixel_values=_noise(len(ids), 4, 3, 32, 32), qformer_input_ids=ids,
                                          input_ids=_placed(ids, 16)),
    "kosmos-2": lambda ids: _image(ids) | dict(
        image_embeds_position_mask=torch.arange(ids.shape[1]).lt(4).expand(ids.shape)),
    "musicgen": lambda ids: dict(input_ids=ids.repeat_interleave(4, 0)),
    "musicgen_melody": lambda ids: dict(input_ids=ids.repeat_interleave(4, 0)),
    "pi0": lambda ids: dict(state=_noise(len(ids), 32), noise=_noise(len(ids), 16, 32), timestep=torch.ones(len(ids)),
                            pixel_values=_noise(len(ids), 1, 3, 32, 32),
                            pixel_attention_mask=torch.ones(len(ids), 1, dtype=torch.bool)),
    "pix2struct": lambda ids: dict(input_ids=None, decoder_input_ids=ids, flattened_patches=torch.ones(len(ids), 16, 66)),
    "pp_formulanet": lambda ids: _image(ids) | dict(input_ids=None, decoder_input_ids=ids),
    "udop": lambda ids: dict(bbox=torch.zeros(len(ids), 40, 4)),
    "vision-encoder-decoder": lambda ids: _image(ids) | dict(input_ids=None, decoder_input_ids=ids),
    "voxtral_realtime": lambda ids: dict(input_features=_noise(len(ids), 128, 400)),
}


def arguments(name, model, ids):
    """A model's arguments for tokens [B, T]; where it has an encoder, that reads others."""
    given = dict(input_ids=ids)
    if model.config.is_encoder_decoder:
        given = dict(input_ids=draw(len(ids), 40, seed=2), decoder_input_ids=ids)
    given |= BESIDES.get(name, lambda ids: {})(ids)
    return {n: x for n, x in given.items() if x is not None}
