"""Readers under test: each has seeds, changes them, and reads the result as a user's file.

A target's `read` returns if the input is still valid and raises one of `REFUSALS` if it is not.
Anything else is a finding. Files are written to a folder in memory.
"""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from gguf import GGMLQuantizationType, GGUFWriter

import exl_kernels
from exl_core.arch.gguf_config import read_gguf_config
from exl_core.arch.hf_config import read_hf_config
from exl_core.arch.quantization import read_quantization
from exl_core.errors import ExlError
from exl_core.formats.containers.gguf import GgufSource
from exl_core.formats.containers.safetensors import read_header
from exl_core.lora.config import read_adapter_config
from exl_core.lora.reader import AdapterFile
from exl_core.ops.open import available_isas
from exl_core.session.load import load_model
from exl_core.tokenizer.detect import load_tokenizer
from exl_core.tokenizer.gguf_vocab import tokenizer_from_gguf_fields
from fuzz import mutate
from support.adapters import random_pairs, stored, write_adapter
from support.gguf_hybrids import write_hybrid
from support.gguf_models import write_gguf
from support.model_configs import GEMMA, LLAMA
from support.paged import PagedRun
from support.published_configs import LATER_FAMILIES
from support.quantized_models import (
    METHODS,
    SIZES,
    quantized_llama,
)
from support.tiny_hybrids import tiny_granite_hybrid, tiny_lfm2, tiny_qwen35
from support.tiny_latent import tiny_deepseek3
from support.tiny_models import byte_tokenizer, save, tiny_llama

REFUSALS = (ExlError,)
Q4_0 = GGMLQuantizationType.Q4_0
LAYERS: dict[str, Callable[[], Any]] = {
    "short convolution": tiny_lfm2,
    "delta net": tiny_qwen35,
    "mamba": tiny_granite_hybrid,
    "latent attention": tiny_deepseek3,
}
"""Models whose layers have another mixer than attention over keys and values."""

Read = Callable[[Path, bytes], None]
Change = Callable[[random.Random, bytes, list[bytes]], bytes]


@dataclass
class Target:
    """`share`: part of all inputs. `refusals`: what `read` may raise. `growing` seeds: inputs that
    ran lines which no earlier input ran are added."""

    name: str
    share: float
    seeds: list[bytes]
    read: Read
    change: Change
    refusals: tuple[type[Exception], ...] = REFUSALS
    grown: list[bytes] = field(default_factory=list)


def make_targets(folder: Path) -> list[Target]:
    """All targets. `folder` receives the files that several inputs share."""
    return [
        *(safetensors_header(), gguf_file(folder), config_file(), adapter(folder)),
        *(tokenizer_json(), tokenizer_model(), kernel_operands()),
        *(checkpoint(quantized_llama(method, folder / method), method) for method in METHODS),
        *(checkpoint(save(build(), folder / name), name) for name, build in LAYERS.items()),
        gguf_checkpoint(write_gguf(tiny_llama(**SIZES), folder / "model.gguf", Q4_0), "GGUF"),
        gguf_checkpoint(
            write_hybrid(tiny_qwen35(), folder / "qwen35.gguf", "qwen35"), "GGUF hybrid"
        ),
    ]


def either(rng: random.Random, seed: bytes, others: list[bytes]) -> bytes:
    """Changes of a JSON file: to its values, or to its bytes."""
    try:
        return mutate.json_of(rng, seed) if rng.randrange(4) else mutate.bytes_of(rng, seed, others)
    except (ValueError, RecursionError):  # a grown seed need not be valid JSON
        return mutate.bytes_of(rng, seed, others)


# ---- headers -----------------------------------------------------------------------------------


def safetensors_bytes(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """A safetensors file of tensors of zeros: type, shape and size in bytes, by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def safetensors_header() -> Target:
    seeds = [
        safetensors_bytes({"a": ("F16", [2, 4], 16), "b": ("I32", [3], 12)}),
        safetensors_bytes({f"model.layers.{i}.w": ("BF16", [2, i], 4 * i) for i in range(5)}),
        safetensors_bytes({"x": ("F8_E4M3", [], 1), "empty": ("U8", [0, 5], 0)}),
    ]

    def change(rng: random.Random, seed: bytes, others: list[bytes]) -> bytes:
        size = struct.unpack_from("<Q", seed.ljust(8, b"\0"))[0]
        if rng.randrange(2) or not 2 <= size <= len(seed) - 8:
            return mutate.bytes_of(rng, seed, others)
        text = either(rng, seed[8 : 8 + size], [one[8:] for one in others])
        return struct.pack("<Q", len(text)) + text + seed[8 + size :]

    def read(path: Path, data: bytes) -> None:
        file = path / "model.safetensors"
        file.write_bytes(data)
        read_header(file)

    return Target("safetensors header", 0.4, seeds, read, change)


def gguf_file(folder: Path) -> Target:
    path = folder / "seed.gguf"
    writer = GGUFWriter(path, "llama")
    for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 8)):
        writer.add_uint32(f"llama.{key}", value)
    for key, value in (("feed_forward_length", 8), ("attention.head_count", 2)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count_kv", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab"])
    writer.add_token_types([3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, shape in (("token_embd.weight", (5, 8)), ("output_norm.weight", (8,))):
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def read(where: Path, data: bytes) -> None:
        file = where / "model.gguf"
        file.write_bytes(data)
        source = GgufSource(file)
        tokenizer_from_gguf_fields(source.metadata, str(file))
        read_gguf_config(source.metadata, source.tensors, file)

    return Target("GGUF header and vocabulary", 0.25, [path.read_bytes()], read, mutate.bytes_of)


def config_file() -> Target:
    later = (LLAMA | changes for changes, _ in LATER_FAMILIES.values())
    plain = [
        {key: value for key, value in config.items() if value is not ...}
        for config in (LLAMA, GEMMA, *later)
    ]
    quantized = [LLAMA | {"quantization_config": settings} for settings, _ in METHODS.values()]
    layers = [
        {**model.config.to_dict(), "architectures": [type(model).__name__]}
        for model in (build() for build in LAYERS.values())
    ]
    seeds = [json.dumps(config, default=str).encode() for config in (*plain, *quantized, *layers)]

    def read(where: Path, data: bytes) -> None:
        (where / "config.json").write_bytes(data)
        read_hf_config(where)
        read_quantization(where)

    return Target("config.json", 0.2, seeds, read, either)


def adapter(folder: Path) -> Target:
    model = tiny_llama(**SIZES)
    pairs = random_pairs(model, ("q_proj",), rank=1)
    source = write_adapter(folder / "adapter", stored(pairs), r=1)
    (folder / "llama").mkdir()
    settings = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "llama" / "config.json").write_text(json.dumps(settings, default=str))
    config = read_hf_config(folder / "llama")
    weights = (source / "adapter_model.safetensors").read_bytes()
    seeds = [b"C" + (source / "adapter_config.json").read_bytes(), b"W" + weights]

    def change(rng: random.Random, seed: bytes, others: list[bytes]) -> bytes:
        same = [one[1:] for one in others if one[:1] == seed[:1]]
        make = either if seed[:1] == b"C" else mutate.bytes_of
        return seed[:1] + make(rng, seed[1:], same)

    def read(where: Path, data: bytes) -> None:
        is_config = data[:1] == b"C"
        files = {"adapter_config.json": seeds[0][1:], "adapter_model.safetensors": weights}
        files["adapter_config.json" if is_config else "adapter_model.safetensors"] = data[1:]
        for name, content in files.items():
            (where / name).write_bytes(content)
        AdapterFile(where, read_adapter_config(where), config)

    return Target("LoRA adapter", 0.03, seeds, read, change)


def tokenizer_json() -> Target:
    def read(where: Path, data: bytes) -> None:
        (where / "tokenizer.json").write_bytes(data)
        load_tokenizer(where).encode("ab c", allow_special=False, add_bos=None)

    return Target("tokenizer.json", 0.02, [byte_tokenizer().to_str().encode()], read, either)


def tokenizer_model() -> Target:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words", "more of the words", "and a few"]),
        model_writer=out,
        model_type="bpe",
        vocab_size=30,
        normalization_rule_name="identity",
        minloglevel=2,
    )

    def read(where: Path, data: bytes) -> None:
        (where / "tokenizer.model").write_bytes(data)
        load_tokenizer(where).encode("a few", allow_special=False, add_bos=None)

    return Target("tokenizer.model", 0.02, [out.getvalue()], read, mutate.bytes_of)


# ---- codecs ------------------------------------------------------------------------------------


def checkpoint(path: Path, name: str) -> Target:
    """A whole tiny checkpoint: its tensors are changed, then the model is loaded and run."""
    weights = (path / "model.safetensors").read_bytes()
    change, read = _loading(path, "model.safetensors")
    return Target(f"{name} checkpoint", 0.0006, [weights], read, change)


def gguf_checkpoint(path: Path, name: str) -> Target:
    change, read = _loading(path.parent, path.name)
    return Target(f"{name} checkpoint", 0.0006, [path.read_bytes()], read, change)


def _loading(source: Path, name: str) -> tuple[Change, Read]:
    """An input is 12 bytes for each change to the file: position and new bytes."""
    original = (source / name).read_bytes()

    def change(rng: random.Random, seed: bytes, others: list[bytes]) -> bytes:
        count = rng.choice((1, 1, 2, 8, 64))
        header = min(len(original) - 8, 30_000)
        ends = (header, header, len(original) - 8)
        spots = [rng.randrange(rng.choice(ends)) for _ in range(count)]
        return b"".join(struct.pack("<I", spot) + rng.randbytes(8) for spot in spots)

    def read(where: Path, data: bytes) -> None:
        data = data if data != original else b""
        content = bytearray(original)
        for i in range(0, len(data) - 11, 12):
            spot, size = struct.unpack_from("<I", data, i)[0], 1 + data[i + 4] % 4
            content[spot : spot + size] = data[i + 5 : i + 5 + size]
        for file in source.iterdir() if not name.endswith(".gguf") else ():
            (where / file.name).write_bytes(file.read_bytes())
        (where / name).write_bytes(content)
        path = where / name if name.endswith(".gguf") else where
        loaded = load_model(path, device="cpu", threads=1)
        PagedRun(loaded.model, num_seqs=1, max_len=8).feed({0: [3, 4, 5]})

    return change, read


DTYPES = (torch.float16, torch.float32, torch.uint8, torch.int32, torch.int64, torch.bfloat16)
SMALL = (0, 1, 2, 3, 31, 32, 33, 64, -1, 1 << 20, 1 << 31, 1 << 62)


def kernel_operands() -> Target:
    """Calls of the extension with operands that break its contracts. An input seeds a generator."""
    tables = [exl_kernels.Table(isa, 1) for isa in available_isas()]

    def change(rng: random.Random, seed: bytes, others: list[bytes]) -> bytes:
        return rng.randbytes(8)

    def read(where: Path, data: bytes) -> None:
        rng = random.Random(data)
        k, n = rng.choice((32, 33, 64, 96)), rng.choice((2, 31, 32, 64))
        bits = rng.choice((2, 3, 4, 5, 6, 8))

        def perhaps(value: Any, *others: Any) -> Any:
            return value if rng.random() < 0.96 else rng.choice((*others, None, *SMALL))

        def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
            sizes = [max(0, min(perhaps(size, size + 1) or 0, 4096)) for size in shape]
            kind = perhaps(dtype, *DTYPES)
            made = torch.zeros(sizes, dtype=kind if kind in DTYPES else dtype)
            if made.numel() and rng.random() < 0.5:
                flat = made.view(-1).view(torch.uint8)
                flat.copy_(torch.frombuffer(bytearray(rng.randbytes(len(flat))), dtype=torch.uint8))
            return made.T if made.dim() == 2 and rng.random() < 0.05 else made

        runs = [(perhaps(bits, 7, 9), perhaps(1, 2), perhaps(k, k + 1))]
        features = tensor((k,), torch.int32) if rng.random() < 0.3 else None
        offset = perhaps(rng.choice(("middle", "zeros", "minimums")), "other")
        linear = exl_kernels.QuantLinear(
            perhaps(n), perhaps(k), runs, features, perhaps(torch.float16), offset, False
        )
        packing = perhaps(rng.choice(("words", "bytes", "q4_0", "q8_0")), "none")
        words = (k * bits // 32, n) if packing == "words" else (k, n)
        linear.fill(
            perhaps(0),
            packing,
            tensor(words, torch.int32 if packing == "words" else torch.uint8),
            tensor((k,), torch.int32) if rng.random() < 0.2 else None,
            tensor((1, n), torch.float16),
            tensor((1, n), torch.uint8) if offset != "middle" else None,
            None,
        )
        rows = rng.choice((0, 1, 5, 40))
        table = rng.choice(tables)
        table.linear(tensor((rows, k), torch.float32), linear, torch.zeros(rows, n))

    refusals = (*REFUSALS, ValueError, TypeError, OverflowError, MemoryError)
    return Target("kernel operands", 0.074, [bytes(8)], read, change, refusals)
