"""Small models with random weights, as GGUF files: what scripts/llama runs llama.cpp on.

    models.py KIND FILE [--type q8_0] [--size bench]

KIND is qwen3next, kimi-linear or llama. Names and shapes of tensors are those that llama.cpp's loader wants for the
architecture. The tokenizer is its "test" one: it makes a token of every five bytes, and writes a token as its number, so
equal texts are equal tokens.
"""

import argparse
import os
import zlib

import numpy as np
import gguf

VOCABULARY = 512


class Model:
    """Writes tensors as they are made, so that a large model needs little memory."""

    def __init__(self, path, kind, embedding, layers, element_type):
        self.writer = gguf.GGUFWriter(path, kind)
        self.embedding, self.layers, self.type = embedding, layers, element_type
        w = self.writer
        w.add_context_length(1 << 18)
        w.add_embedding_length(embedding)
        w.add_block_count(layers)
        w.add_vocab_size(VOCABULARY)
        w.add_layer_norm_rms_eps(1e-6)
        w.add_tokenizer_model("test")
        w.add_token_list([f"tok_{i}" for i in range(VOCABULARY)])
        w.add_token_scores([0.0] * VOCABULARY)
        self.tensors = []  # name, shape slowest first, element type, how its numbers are made

    def weight(self, name, *shape):
        """Of a projection: rows with the variance that keeps that of its input. Its fastest dimension must fill blocks."""
        scale = np.float32(1 / np.sqrt(shape[-1]))
        blocks = self.type if shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        rows = min(int(np.prod(shape[:-1])), (1 << 22) // shape[-1])  # a large tensor repeats its first rows
        self.tensors.append((name, shape, blocks, lambda r: r.standard_normal((rows, shape[-1]), np.float32) * scale))

    def numbers(self, name, *shape, low=0.9, high=1.1):
        f32 = gguf.GGMLQuantizationType.F32
        self.tensors.append((name, shape, f32, lambda random: random.uniform(low, high, shape).astype(np.float32)))

    def embeddings(self):
        n = self.embedding
        f32 = gguf.GGMLQuantizationType.F32
        self.tensors.append(("token_embd.weight", (VOCABULARY, n), f32, lambda r: r.standard_normal((VOCABULARY, n), np.float32)))
        self.numbers("output_norm.weight", n)
        self.weight("output.weight", VOCABULARY, n)

    def write(self):
        w = self.writer
        for name, shape, kind, _ in self.tensors:
            size = int(np.prod(shape)) * 4
            quantised = kind != gguf.GGMLQuantizationType.F32
            stored = gguf.quant_shape_to_byte_shape(shape, kind) if quantised else shape
            w.add_tensor_info(name, stored, np.dtype(np.uint8 if quantised else np.float32),
                              int(np.prod(stored)) if quantised else size, raw_dtype=kind if quantised else None)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        done = 0
        for name, shape, kind, make in self.tensors:
            data = make(np.random.default_rng(zlib.crc32(name.encode())))
            if kind != gguf.GGMLQuantizationType.F32:
                data = gguf.quantize(data, kind)
            w.write_tensor_data(np.resize(data, (*shape[:-1], data.shape[-1])))
            done += 1
            print(f"\r{done} of {len(self.tensors)} tensors", end="", flush=True)
        print("\r" + " " * 40 + "\r", end="")
        w.close()


def experts(m, block, ff, count):
    n = m.embedding
    m.weight(f"{block}.ffn_gate_inp.weight", count, n)
    m.weight(f"{block}.ffn_gate_exps.weight", count, ff, n)
    m.weight(f"{block}.ffn_up_exps.weight", count, ff, n)
    m.weight(f"{block}.ffn_down_exps.weight", count, n, ff)
    m.weight(f"{block}.ffn_gate_shexp.weight", ff, n)
    m.weight(f"{block}.ffn_up_shexp.weight", ff, n)
    m.weight(f"{block}.ffn_down_shexp.weight", n, ff)


def dense(m, block, ff):
    n = m.embedding
    m.weight(f"{block}.ffn_gate.weight", ff, n)
    m.weight(f"{block}.ffn_up.weight", ff, n)
    m.weight(f"{block}.ffn_down.weight", n, ff)


def qwen3next(path, element_type, bench):
    """Three layers of gated delta rule, then one of attention with a gated output; experts. Qwen3-Next-80B-A3B has
    embedding 2048, 48 layers, 16 and 32 heads of 128, attention of 16 and 2 heads of 256, 512 experts of 512: the bench
    model has its layers, 12 of them, and 16 experts."""
    embedding, layers = (2048, 12) if bench else (256, 4)
    key_heads, heads, size, kernel = (16, 32, 128, 4) if bench else (2, 4, 64, 4)
    q_heads, kv_heads, head = (16, 2, 256) if bench else (4, 2, 64)
    ff, count, used = (512, 16, 10) if bench else (128, 4, 2)
    m = Model(path, "qwen3next", embedding, layers, element_type)
    w = m.writer
    w.add_feed_forward_length(ff)
    w.add_head_count(q_heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_rope_dimension_count(head // 4)
    w.add_rope_freq_base(1e7)
    w.add_expert_count(count)
    w.add_expert_used_count(used)
    w.add_expert_feed_forward_length(ff)
    w.add_expert_shared_feed_forward_length(ff)
    w.add_ssm_conv_kernel(kernel)
    w.add_ssm_inner_size(heads * size)
    w.add_ssm_state_size(size)
    w.add_ssm_time_step_rank(heads)
    w.add_ssm_group_count(key_heads)
    w.add_full_attention_interval(4)
    m.embeddings()
    keys, values = key_heads * size, heads * size
    for i in range(layers):
        b = f"blk.{i}"
        m.numbers(f"{b}.attn_norm.weight", embedding)
        m.numbers(f"{b}.post_attention_norm.weight", embedding)
        if (i + 1) % 4 == 0:
            m.weight(f"{b}.attn_q.weight", 2 * q_heads * head, embedding)
            m.weight(f"{b}.attn_k.weight", kv_heads * head, embedding)
            m.weight(f"{b}.attn_v.weight", kv_heads * head, embedding)
            m.weight(f"{b}.attn_output.weight", embedding, q_heads * head)
            m.numbers(f"{b}.attn_q_norm.weight", head)
            m.numbers(f"{b}.attn_k_norm.weight", head)
        else:
            m.weight(f"{b}.attn_qkv.weight", 2 * keys + values, embedding)
            m.weight(f"{b}.attn_gate.weight", values, embedding)
            m.numbers(f"{b}.ssm_conv1d.weight", 2 * keys + values, kernel, low=-0.6, high=0.6)
            m.numbers(f"{b}.ssm_dt.bias", heads, low=-4, high=1)
            m.numbers(f"{b}.ssm_a", heads, low=-4, high=-0.1)
            m.weight(f"{b}.ssm_ba.weight", 2 * heads, embedding)
            m.numbers(f"{b}.ssm_norm.weight", size)
            m.weight(f"{b}.ssm_out.weight", embedding, values)
        experts(m, b, ff, count)
        m.numbers(f"{b}.ffn_gate_inp_shexp.weight", embedding, low=-0.05, high=0.05)
    m.write()


def kimi_linear(path, element_type, bench):
    """A gate per channel (KDA) in three layers of four, latent attention (MLA) in the fourth."""
    embedding, layers, heads, size, kernel = 256, 4, 4, 64, 4
    rank, rope, nope, value, ff, count, used = 64, 32, 64, 64, 128, 4, 2
    m = Model(path, "kimi-linear", embedding, layers, element_type)
    w = m.writer
    w.add_feed_forward_length(2 * ff)
    w.add_head_count([heads] * layers)
    w.add_head_count_kv([1 if (i + 1) % 4 == 0 else 0 for i in range(layers)])
    w.add_key_length(rank + rope)
    w.add_value_length(rank)
    w.add_key_length_mla(nope + rope)
    w.add_value_length_mla(value)
    w.add_kv_lora_rank(rank)
    w.add_rope_dimension_count(rope)
    w.add_rope_freq_base(1e4)
    w.add_ssm_conv_kernel(kernel)
    w.add_kda_head_dim(size)
    w.add_expert_count(count)
    w.add_expert_used_count(used)
    w.add_expert_shared_count(1)
    w.add_expert_feed_forward_length(ff)
    w.add_expert_weights_scale(1.0)
    w.add_expert_weights_norm(True)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_leading_dense_block_count(1)
    m.embeddings()
    for i in range(layers):
        b = f"blk.{i}"
        m.numbers(f"{b}.attn_norm.weight", embedding)
        m.numbers(f"{b}.ffn_norm.weight", embedding)
        if (i + 1) % 4 == 0:
            m.weight(f"{b}.attn_q.weight", heads * (nope + rope), embedding)
            m.weight(f"{b}.attn_kv_a_mqa.weight", rank + rope, embedding)
            m.numbers(f"{b}.attn_kv_a_norm.weight", rank)
            m.weight(f"{b}.attn_k_b.weight", heads, rank, nope)
            m.weight(f"{b}.attn_v_b.weight", heads, value, rank)
            m.weight(f"{b}.attn_output.weight", embedding, heads * value)
        else:
            for x in "qkv":
                m.weight(f"{b}.attn_{x}.weight", heads * size, embedding)
                m.numbers(f"{b}.ssm_conv1d_{x}.weight", 1, heads * size, 1, kernel, low=-0.6, high=0.6)
            m.weight(f"{b}.ssm_f_a.weight", size, embedding)
            m.weight(f"{b}.ssm_f_b.weight", heads * size, size)
            m.weight(f"{b}.ssm_beta.weight", heads, embedding)
            m.numbers(f"{b}.ssm_a", heads, 1, low=-4, high=-0.1)
            m.numbers(f"{b}.ssm_dt.bias", heads * size, low=-4, high=1)
            m.weight(f"{b}.ssm_g_a.weight", size, embedding)
            m.weight(f"{b}.ssm_g_b.weight", heads * size, size)
            m.numbers(f"{b}.ssm_norm.weight", size)
            m.weight(f"{b}.attn_output.weight", embedding, heads * size)
        if i == 0:
            dense(m, b, 2 * ff)
        else:
            experts(m, b, ff, count)
            m.numbers(f"{b}.exp_probs_b.bias", count, low=-0.05, high=0.05)
    m.write()


def llama(path, element_type, bench):
    embedding, layers, heads, kv_heads, head, ff = 256, 4, 4, 2, 64, 512
    m = Model(path, "llama", embedding, layers, element_type)
    w = m.writer
    w.add_feed_forward_length(ff)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_rope_dimension_count(head)
    w.add_rope_freq_base(1e4)
    m.embeddings()
    for i in range(layers):
        b = f"blk.{i}"
        m.numbers(f"{b}.attn_norm.weight", embedding)
        m.numbers(f"{b}.ffn_norm.weight", embedding)
        m.weight(f"{b}.attn_q.weight", heads * head, embedding)
        m.weight(f"{b}.attn_k.weight", kv_heads * head, embedding)
        m.weight(f"{b}.attn_v.weight", kv_heads * head, embedding)
        m.weight(f"{b}.attn_output.weight", embedding, heads * head)
        dense(m, b, ff)
    m.write()


KINDS = {"qwen3next": qwen3next, "kimi-linear": kimi_linear, "llama": llama}


def make(kind, path, element_type="f32", bench=False):
    KINDS[kind](path + ".part", gguf.GGMLQuantizationType[element_type.upper()], bench)
    os.replace(path + ".part", path)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("kind", choices=KINDS)
    arguments.add_argument("file")
    arguments.add_argument("--type", default="f32")
    arguments.add_argument("--size", choices=["small", "bench"], default="small")
    given = arguments.parse_args()
    make(given.kind, given.file, given.type, given.size == "bench")
