"""Checkpoints of gpt-oss whose experts are stored as MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from support.tiny_models import save

EXPERTS = ("gate_up_proj", "down_proj")


def random_parts(rng: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of matrices [..., out, in] with values of about in^-1/2."""
    *outer, in_features = shape
    blocks = torch.randint(0, 256, (*outer, in_features // 32, 16), generator=rng)
    middle = 125 - round(np.log2(in_features) / 2)
    scales = torch.randint(middle - 2, middle + 2, blocks.shape[:-1], generator=rng)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


def save_as_mxfp4(model: Any, folder: Path) -> Path:
    """Saves a gpt-oss with random codes in place of its experts, and gives the model their values,
    as transformers dequantizes them."""
    save(model, folder)
    path, rng = folder / "model.safetensors", torch.Generator().manual_seed(5)
    tensors = load_file(path)
    for layer, block in enumerate(model.model.layers):
        for part in EXPERTS:
            name = f"model.layers.{layer}.mlp.experts.{part}"
            count, in_features, out_features = tensors.pop(name).shape
            blocks, scales = random_parts(rng, count, out_features, in_features)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                getattr(block.mlp.experts, part).copy_(convert_moe_packed_tensors(blocks, scales))
    save_file(tensors, path, metadata={"format": "pt"})
    config = folder / "config.json"
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    values = {**json.loads(config.read_text()), "quantization_config": section}
    config.write_text(json.dumps(values))
    return folder


def gguf_blocks(blocks: Tensor, scales: Tensor) -> np.ndarray:
    """The same codes as blocks of a GGUF file, uint8 [..., out, bytes]: a scale, then the codes of
    values 0 to 15 in low halves and of values 16 to 31 in high ones."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [..., groups, 32]
    halves = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([scales[..., None], halves], -1).flatten(-2).numpy()


def dequantized(raw: np.ndarray) -> np.ndarray:
    """Values of blocks of a GGUF file, by the gguf package."""
    return gguf.quants.dequantize(raw, GGMLQuantizationType.MXFP4)
