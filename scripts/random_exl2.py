"""Write a Llama-shaped model with random quantized weights. Usage: random_exl2.py OUT [--size 8b]

Speed depends on shapes and widths, not on values. No download is needed to measure it. As in files
of converters, matrices that read the same input have one common feature order, the head has its own
width, and embedding and norms are float16. `--mix` gives the shares of input features by width, the
widest first. `--format gptq` writes 4 bits in groups of 128 with act-order and a float16 head
instead, `--format exl3` trellis codes of `--bits` with the codebook mul1. `--repeat-layer` writes a
file for each layer, with the bytes of the first layer: a model of 35 GB takes some 10 s. The last
line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

GROUP = 128
MIXES = {
    "3": "3:0.5,2:0.5",
    "4": "5:0.05,4:0.85,3:0.10",
    "5": "6:0.25,5:0.75",
    "8": "8:1",
}
"""Mixes by their most frequent width. 4 is similar to a converter's mix at 4.0 bits per weight."""

TRELLIS_BITS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
MUL1 = 0x83DCD12D - (1 << 32)  # marker of the codebook in EXL3 files

SCALE = 0.004  # scale of the largest scale code; keeps states of order one over dozens of layers


class Size(NamedTuple):
    """Numbers of `config.json` that differ between sizes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SIZES = {
    "8b": Size(4096, 14336, 32, 32, 8, 128256),
    "70b": Size(8192, 28672, 80, 64, 8, 128256),
    "1b": Size(2048, 8192, 16, 32, 8, 128256),
    "tiny": Size(256, 512, 2, 4, 2, 512),
}

Parts = dict[str, Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--format", choices=("exl2", "gptq", "exl3"), default="exl2")
    parser.add_argument(
        "--mix", default="4", help=f"{', '.join(MIXES)}, or BITS:SHARE,... (default: 4)"
    )
    parser.add_argument("--bits", type=float, choices=TRELLIS_BITS, default=4, help="of exl3")
    parser.add_argument("--head-bits", type=int, default=6)
    parser.add_argument("--own-orders", action="store_true", help="an order for every matrix")
    parser.add_argument("--repeat-layer", action="store_true", help="layers with the same bytes")
    parser.add_argument("--layers", type=int, help="another number of layers than the size has")
    args = parser.parse_args()
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"{args.out} is in use")
    try:
        mix = parse_mix(MIXES.get(args.mix, args.mix))
    except ValueError:
        parser.error(f"--mix is not a list such as {MIXES['4']}: {args.mix}")
    size = SIZES[args.size]
    size = size._replace(num_hidden_layers=args.layers or size.num_hidden_layers)
    writer: Writer
    match args.format:
        case "gptq":
            writer = GptqWriter()
        case "exl3":
            writer = Exl3Writer(args.bits, args.head_bits)
        case _:
            writer = Exl2Writer(mix, args.head_bits, has_own_orders=args.own_orders)
    print(json.dumps(write_model(args.out, size, writer, repeats=args.repeat_layer)))
    return 0


def parse_mix(text: str) -> list[tuple[int, float]]:
    """Pairs of width and share, the widest first."""
    pairs = [part.split(":") for part in text.split(",")]
    mix = [(int(bits), float(share)) for bits, share in pairs]
    if any(bits not in (2, 3, 4, 5, 6, 8) or share <= 0 for bits, share in mix):
        raise ValueError(text)
    return sorted(mix, reverse=True)


class Exl2Writer:
    """Writer of EXL2 linears with random codes."""

    file_name = "output.safetensors"
    first_part = "q_weight"

    def __init__(
        self, mix: list[tuple[int, float]], head_bits: int, *, has_own_orders: bool
    ) -> None:
        self._mix, self._head_bits = mix, head_bits
        self._has_own_orders = has_own_orders
        self._orders: dict[tuple[str, int], Tensor] = {}
        self.settings: dict[str, Any] = {
            "quant_method": "exl2",
            "version": "0.3.2",
            "bits": round(sum(b * s for b, s in mix) / sum(s for _, s in mix), 2),
            "head_bits": head_bits,
            "calibration": {"rows": 0, "length": 0, "dataset": "(none: random)"},
        }

    def linear(self, name: str, rows: int, columns: int, source: str) -> Parts:
        """`source` names the input. Linears with the same input share the order of features."""
        mix = [(self._head_bits, 1.0)] if name == "lm_head" else self._mix
        widths = group_widths(rows // GROUP, mix)
        table, packed = [], 0
        for bits in widths:
            table += [bits, packed]
            packed += GROUP * bits // 32
        source = name if self._has_own_orders else source
        key = (source, rows)
        if key not in self._orders:
            self._orders[key] = torch.randperm(rows).int()
        return {
            "q_weight": words(packed, columns),
            "q_scale": words(len(widths), columns // 8),
            "q_scale_max": torch.full((len(widths),), SCALE, dtype=torch.float16),
            "q_groups": torch.tensor(table, dtype=torch.int16),
            "q_invperm": self._orders[key].clone(),
        }


class GptqWriter:
    """Writer of GPTQ linears: 4 bits in groups of 128 with act-order, float16 head."""

    file_name = "model.safetensors"
    bits = 4

    def __init__(self) -> None:
        self._orders: dict[tuple[str, int], Tensor] = {}
        self.settings: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": GROUP,
            "sym": True,
            "desc_act": True,
            "checkpoint_format": "gptq",
        }

    def linear(self, name: str, rows: int, columns: int, source: str) -> Parts:
        if name == "lm_head":
            return {"weight": halves(columns, rows, rows**-0.5)}
        groups, step = rows // GROUP, 32 // self.bits
        if (source, rows) not in self._orders:
            self._orders[source, rows] = (torch.randperm(rows) // GROUP).int()
        return {
            "qweight": words(rows // step, columns),
            # Symmetric: the zero point is 8 in every field, and the format stores it minus one.
            "qzeros": torch.full((groups, columns // step), 0x77777777, dtype=torch.int32),
            "scales": (torch.rand(groups, columns) * SCALE).half(),
            "g_idx": self._orders[source, rows].clone(),
        }


class Exl3Writer:
    """Writer of EXL3: random rings of trellis codes with the codebook mul1. Sizes are padded to
    multiples of 128."""

    file_name = "model.safetensors"
    first_part = "trellis"

    def __init__(self, bits: float, head_bits: int) -> None:
        self._bits, self._head_bits = bits, head_bits
        self.settings: dict[str, Any] = {
            "quant_method": "exl3",
            "version": "1.6.5",
            "bits": bits,
            "head_bits": head_bits,
            "calibration": {"rows": 0, "cols": 0},
            "out_scales": "always",
            "codebook": "mul1",
        }

    def linear(self, name: str, rows: int, columns: int, source: str) -> Parts:  # noqa: ARG002
        bits = self._head_bits if name == "lm_head" else self._bits
        rows, columns = -(-rows // GROUP) * GROUP, -(-columns // GROUP) * GROUP
        tiles = words(rows * columns // 256, int(8 * bits)).view(torch.int16)
        return {
            "trellis": tiles.view(rows // 16, columns // 16, int(16 * bits)),
            "suh": signs(rows) * rows**-0.5,
            "svh": signs(columns),
            "mul1": torch.tensor(MUL1, dtype=torch.int32),
        }


Writer = Exl2Writer | GptqWriter | Exl3Writer


def signs(count: int) -> Tensor:
    """Random signs, float16."""
    return (torch.randint(0, 2, (count,)) * 2 - 1).half()


def group_widths(groups: int, mix: list[tuple[int, float]]) -> list[int]:
    widths: list[int] = []
    for bits, share in mix[:-1]:
        widths += [bits] * min(round(groups * share), groups - len(widths))
    return widths + [mix[-1][0]] * (groups - len(widths))


def words(rows: int, columns: int) -> Tensor:
    """Random bits, int32 [rows, columns]."""
    empty = torch.empty(rows, columns, dtype=torch.int32, device=fast_device())
    return empty.random_(-(2**31), 2**31).cpu()


def halves(rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """Normally distributed, float16 [rows, columns]."""
    return (torch.randn(rows, columns, device=fast_device()) * scale).half().cpu()


def fast_device() -> str:
    """A GPU if there is one, because it generates random gigabytes much faster."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def layer_linears(size: Size, prefix: str) -> Iterator[tuple[str, int, int, str]]:
    """Name, input features, output features and input of every linear of a layer."""
    hidden, inner = size.hidden_size, size.intermediate_size
    kv = hidden // size.num_attention_heads * size.num_key_value_heads
    for name, columns in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
        yield f"{prefix}self_attn.{name}", hidden, columns, f"{prefix}attention"
    yield f"{prefix}self_attn.o_proj", hidden, hidden, f"{prefix}mixed"
    for name in ("gate_proj", "up_proj"):
        yield f"{prefix}mlp.{name}", hidden, inner, f"{prefix}mlp"
    yield f"{prefix}mlp.down_proj", inner, hidden, f"{prefix}gated"


def layer_parts(size: Size, writer: Writer, index: int) -> Parts:
    """Tensors of a layer."""
    prefix = f"model.layers.{index}."
    tensors: Parts = {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = torch.ones(size.hidden_size).half()
    for name, rows, columns, source in layer_linears(size, prefix):
        parts = writer.linear(name, rows, columns, source)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return tensors


def outer_parts(size: Size, writer: Writer) -> Parts:
    """Tensors of the model outside of its layers."""
    hidden, vocab = size.hidden_size, size.vocab_size
    tensors: Parts = {"model.norm.weight": torch.ones(hidden, dtype=torch.float16)}
    parts = writer.linear("lm_head", hidden, vocab, "head")
    tensors |= {f"lm_head.{part}": tensor for part, tensor in parts.items()}
    tensors["model.embed_tokens.weight"] = halves(vocab, hidden)
    return tensors


def write_repeated(out: Path, name: str, first: Parts, count: int) -> None:
    """Writes a file for each of `count` layers with the tensors of layer 0."""

    def write(index: int) -> None:
        prefix = f"model.layers.{index}."
        own = {part.replace("model.layers.0.", prefix, 1): one for part, one in first.items()}
        write_file(out / name.replace(".", f"-{index + 1:05}-of-{count:05}.", 1), own)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(count)))


def write_file(path: Path, tensors: Parts) -> None:
    """`save_file` without copies of the tensors, and without the interpreter's lock."""
    names = {torch.float16: "F16", torch.int16: "I16", torch.int32: "I32"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, one in tensors.items():
        place = [end, end := end + one.nbytes]
        header[name] = {"dtype": names[one.dtype], "shape": one.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in tensors.values():
            file.write(one.contiguous().flatten().view(torch.uint8).numpy().data)


def write_model(out: Path, size: Size, writer: Writer, *, repeats: bool) -> dict[str, object]:
    out.mkdir(parents=True, exist_ok=True)
    tensors = outer_parts(size, writer)
    held = [
        layer_parts(size, writer, index)
        for index in range(1 if repeats else size.num_hidden_layers)
    ]
    bytes_read = sum(one.nbytes for name, one in tensors.items() if "embed" not in name)
    layers = sum(one.nbytes for layer in held for one in layer.values())
    bytes_read += layers * (size.num_hidden_layers if repeats else 1)
    if repeats:
        write_repeated(out, writer.file_name, held[0], size.num_hidden_layers)
    else:
        tensors |= {name: one for layer in held for name, one in layer.items()}
    save_file(tensors, out / writer.file_name, metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
        **size._asdict(),
        "quantization_config": writer.settings,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    byte_tokenizer().save(str(out / "tokenizer.json"))
    return {
        "out": str(out),
        **size._asdict(),
        **writer.settings,
        "bytes_read_per_token": bytes_read,
    }


def byte_tokenizer() -> Tokenizer:
    """Three special tokens, then one token for each byte; the rest of the vocabulary is unused."""
    special = ["<unk>", "<s>", "</s>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
