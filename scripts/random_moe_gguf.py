"""Write a mixture of experts with random weights as a GGUF file in Q4_0, to measure speed.

    python scripts/random_moe_gguf.py moe-1b.gguf
    exl bench moe-1b.gguf --prefill 512 --decode 128
    llama-bench -m moe-1b.gguf -p 512 -n 128

Speed depends on shapes, widths and on which experts the rows choose. Random routers choose all
experts about equally often. The default shape has 1.0e9 parameters, of which a token uses 0.3e9.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

VOCAB_SIZE = 32_000
HEAD_DIM = 64
BLOCK = 32  # values, in 2 bytes of scale and 16 bytes of codes
NORMAL, UNUSED = 1, 5  # types of tokens


def random_q4_0(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random blocks, uint8 [..., bytes], whose values have a variance of 1 / in_features."""
    blocks = shape[-1] // BLOCK
    raw = rng.integers(0, 256, (*shape[:-1], blocks, 18), dtype=np.uint8)
    scale = np.float16(1.0 / (4.6 * shape[-1] ** 0.5))  # uniform codes deviate by 4.6
    raw[..., :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    return raw.reshape(*shape[:-1], blocks * 18)


def add_vocabulary(writer: GGUFWriter, size: int = VOCAB_SIZE) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, "ab", *(f"<unused{i}>" for i in range(size - 27))]
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * 27 + [UNUSED] * (size - 27))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(27)
    writer.add_eos_token_id(28)


def add_tensors(writer: GGUFWriter, shape: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    hidden, inner, kv = shape.hidden, shape.inner, shape.kv_heads * HEAD_DIM

    def matrix(name: str, *sizes: int) -> None:
        blocks = random_q4_0(rng, *sizes)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_0)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    matrix("token_embd", VOCAB_SIZE, hidden)
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        for name, size in (("attn_norm", hidden), ("ffn_norm", hidden)):
            ones(at + name, size)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(at + name, HEAD_DIM)
        matrix(at + "attn_q", shape.heads * HEAD_DIM, hidden)
        matrix(at + "attn_k", kv, hidden)
        matrix(at + "attn_v", kv, hidden)
        matrix(at + "attn_output", hidden, shape.heads * HEAD_DIM)
        router = rng.normal(size=(shape.experts, hidden)).astype(np.float32) / hidden**0.5
        writer.add_tensor(at + "ffn_gate_inp.weight", router)
        matrix(at + "ffn_gate_exps", shape.experts, inner, hidden)
        matrix(at + "ffn_up_exps", shape.experts, inner, hidden)
        matrix(at + "ffn_down_exps", shape.experts, hidden, inner)
    ones("output_norm", hidden)
    matrix("output", VOCAB_SIZE, hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    for name, default in (("layers", 18), ("hidden", 1024), ("inner", 512), ("experts", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("used", 8), ("heads", 16), ("kv-heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    shape = parser.parse_args()
    writer = GGUFWriter(shape.path, "qwen3moe")
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_expert_feed_forward_length(shape.inner)
    add_vocabulary(writer)
    add_tensors(writer, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
