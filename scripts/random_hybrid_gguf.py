"""Write a recurrent hybrid with random weights as a GGUF file in Q4_0, to measure speed.

    python scripts/random_hybrid_gguf.py lfm2-1.2b lfm2.gguf
    python scripts/compare_llama_cpp.py --only-file -m lfm2.gguf

Speed depends on shapes and widths, not on values. As in files that llama.cpp quantizes to Q4_0, the
embedding, which is also the output matrix, is in Q6_K, and norms and convolutions are in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from random_moe_gguf import add_vocabulary, random_q4_0

Matrix = Callable[..., None]
Q6_K_VALUES, Q6_K_BYTES = 256, 210  # of a block; its float16 scale comes last


class Tensors:
    """Random tensors of one file."""

    def __init__(self, writer: GGUFWriter) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(0)

    def matrix(self, name: str, *sizes: int) -> None:
        kind = GGMLQuantizationType.Q4_0
        self._writer.add_tensor(f"{name}.weight", random_q4_0(self._rng, *sizes), raw_dtype=kind)

    def embedding(self, rows: int, size: int) -> None:
        shape = rows, size // Q6_K_VALUES, Q6_K_BYTES
        raw = self._rng.integers(0, 256, shape, dtype=np.uint8)
        scale = np.float16(1.0 / (18.5 * 74.0 * size**0.5))  # deviations of codes and of scales
        raw[..., -2:] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
        kind = GGMLQuantizationType.Q6_K
        self._writer.add_tensor("token_embd.weight", raw.reshape(rows, -1), raw_dtype=kind)

    def floats(self, name: str, *sizes: int, mean: float = 1.0, spread: float = 0.0) -> None:
        values = self._rng.normal(mean, spread, sizes).astype(np.float32)
        self._writer.add_tensor(name, values)


def add_mlp(tensors: Tensors, at: str, hidden: int, inner: int) -> None:
    tensors.matrix(at + "ffn_gate", inner, hidden)
    tensors.matrix(at + "ffn_up", inner, hidden)
    tensors.matrix(at + "ffn_down", hidden, inner)


def add_sizes(writer: GGUFWriter, layers: int, hidden: int, inner: int, heads: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)


def write_lfm2(path: Path) -> GGUFWriter:
    """LFM2-1.2B."""
    vocab, hidden, inner, heads, kv_heads, head_dim, taps = 65_536, 2048, 8192, 32, 8, 64, 3
    attention = (2, 5, 8, 10, 12, 14)
    writer = GGUFWriter(path, "lfm2")
    add_sizes(writer, 16, hidden, inner, heads)
    writer.add_head_count_kv([kv_heads * (layer in attention) for layer in range(16)])
    writer.add_shortconv_l_cache(taps)
    add_vocabulary(writer, vocab)
    tensors = Tensors(writer)
    tensors.embedding(vocab, hidden)
    tensors.floats("token_embd_norm.weight", hidden)
    for layer in range(16):
        at = f"blk.{layer}."
        tensors.floats(at + "attn_norm.weight", hidden)
        tensors.floats(at + "ffn_norm.weight", hidden)
        add_mlp(tensors, at, hidden, inner)
        if layer not in attention:
            tensors.matrix(at + "shortconv.in_proj", 3 * hidden, hidden)
            tensors.floats(at + "shortconv.conv.weight", hidden, taps, mean=0.0, spread=0.5)
            tensors.matrix(at + "shortconv.out_proj", hidden, hidden)
            continue
        tensors.matrix(at + "attn_q", hidden, hidden)
        tensors.matrix(at + "attn_k", kv_heads * head_dim, hidden)
        tensors.matrix(at + "attn_v", kv_heads * head_dim, hidden)
        tensors.matrix(at + "attn_output", hidden, hidden)
        tensors.floats(at + "attn_q_norm.weight", head_dim)
        tensors.floats(at + "attn_k_norm.weight", head_dim)
    return writer


def write_qwen35(path: Path) -> GGUFWriter:
    """Qwen3.5-0.8B: one layer in four has attention, whose queries come with a gate."""
    vocab, hidden, inner, heads, kv_heads, head_dim = 248_320, 1024, 3584, 8, 2, 256
    delta_heads, delta_dim, taps = 16, 128, 4
    writer = GGUFWriter(path, "qwen35")
    add_sizes(writer, 24, hidden, inner, heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(delta_dim)
    writer.add_ssm_group_count(delta_heads)
    writer.add_ssm_time_step_rank(delta_heads)
    writer.add_ssm_inner_size(delta_heads * delta_dim)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    add_vocabulary(writer, vocab)
    tensors = Tensors(writer)
    tensors.embedding(vocab, hidden)
    tensors.floats("output_norm.weight", hidden)
    for layer in range(24):
        at = f"blk.{layer}."
        tensors.floats(at + "attn_norm.weight", hidden)
        tensors.floats(at + "post_attention_norm.weight", hidden)
        add_mlp(tensors, at, hidden, inner)
        if layer % 4 == 3:
            tensors.matrix(at + "attn_q", 2 * heads * head_dim, hidden)
            tensors.matrix(at + "attn_k", kv_heads * head_dim, hidden)
            tensors.matrix(at + "attn_v", kv_heads * head_dim, hidden)
            tensors.matrix(at + "attn_output", hidden, heads * head_dim)
            tensors.floats(at + "attn_q_norm.weight", head_dim)
            tensors.floats(at + "attn_k_norm.weight", head_dim)
            continue
        values = delta_heads * delta_dim
        tensors.matrix(at + "attn_qkv", 3 * values, hidden)
        tensors.matrix(at + "attn_gate", values, hidden)
        tensors.matrix(at + "ssm_beta", delta_heads, hidden)
        tensors.matrix(at + "ssm_alpha", delta_heads, hidden)
        tensors.floats(at + "ssm_conv1d.weight", 3 * values, taps, mean=0.0, spread=0.5)
        tensors.floats(at + "ssm_a", delta_heads, mean=-1.0)
        tensors.floats(at + "ssm_dt.bias", delta_heads, mean=-3.0)
        tensors.floats(at + "ssm_norm.weight", delta_dim)
        tensors.matrix(at + "ssm_out", hidden, values)
    return writer


SHAPES = {"lfm2-1.2b": write_lfm2, "qwen3.5-0.8b": write_qwen35}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    writer = SHAPES[args.shape](args.path)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
