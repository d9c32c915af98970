"""Files of a family with interleaved RoPE rows, norms under other names and fused GGUF tensors.

The family is synthetic: only its `FileForm`s differ from the mixed model's. Its files are written
here, from the tensors in the model's order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor

from exl_core.arch.modules import module_table
from exl_core.arch.names import GGUF_SANDWICH, HF_SANDWICH, Fused
from exl_core.arch.spec import ModelConfig
from exl_core.formats import checkpoint as checkpoint_module
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.gguf import GgufSource
from exl_core.formats.containers.safetensors import SafetensorsSource
from exl_core.lora.targets import find_target
from support.mixed_model import CONFIG, random_tensors
from support.runtime_form import evaluate

HF_FORM = replace(
    HF_SANDWICH,
    names={
        **HF_SANDWICH.names,
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
    is_interleaved=True,
    norm_addend=1.0,
)
GGUF_FORM = replace(
    GGUF_SANDWICH,
    fused=(Fused("attn_qkv", ("q", "k", "v")), Fused("ffn_up", ("gate", "up"))),
    is_interleaved=True,
)
ARCH = replace(CONFIG.arch, safetensors=HF_FORM, gguf=GGUF_FORM)
FAMILY = replace(CONFIG, arch=ARCH, hidden_size=64)
PARTIAL = replace(FAMILY, ropes=(replace(FAMILY.ropes[0], rotary_dim=8), *FAMILY.ropes[1:]))
CONFIGS = {"full": FAMILY, "partial": PARTIAL}


def as_stored(config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Interleaves the RoPE pairs of q, k and their biases and head norms."""
    row = module_table(config)[name]
    if row.role not in ("q", "k", "q_norm", "k_norm") or row.layer is None:
        return tensor
    spec = config.layers[row.layer].attention
    rope = config.rope_of(spec)
    if rope is None:
        return tensor
    rotary_dim = rope.rotary_dim
    half = rotary_dim // 2
    heads = tensor.view(-1, spec.head_dim, *tensor.shape[1:])
    pairs = torch.stack([heads[:, :half], heads[:, half:rotary_dim]], 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, rotary_dim:]], 1).reshape(tensor.shape)


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "CHUNK_VALUES", 999)


def read(checkpoint: Checkpoint, name: str) -> Tensor:
    if checkpoint.rows[name].is_norm:
        return checkpoint.norm(name)
    return torch.cat([c.values.clone() for c in checkpoint.chunks(name, torch.float32)])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_checkpoints_are_read_in_the_models_order(tmp_path: Path, config: ModelConfig) -> None:
    tensors = random_tensors(config)
    assert "model.layers.1.post_self_attn_layernorm.weight" in tensors
    assert "model.layers.0.post_attention_layernorm.weight" in tensors
    stored = {}
    for name, tensor in tensors.items():
        minus = 1.0 if module_table(config)[name].is_norm else 0.0
        stored[name] = as_stored(config, name, tensor - minus).contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(SafetensorsSource(tmp_path), config)
    for name, tensor in tensors.items():
        assert (read(checkpoint, name) - tensor).abs().max() < 1e-6, name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_fused_gguf_tensors_are_split_in_the_models_order(
    tmp_path: Path, config: ModelConfig, kind: str
) -> None:
    table, tensors = module_table(config), random_tensors(config)
    raw = GGMLQuantizationType[kind]
    writer = GGUFWriter(tmp_path / "m.gguf", "mixed")
    merged: dict[str, list[np.ndarray]] = {}
    expected: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = table[name].gguf[0]
        values = as_stored(config, name, tensor).numpy()
        merged.setdefault(place.name, []).append(values)
        expected[name] = tensor
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            exact = quantize(tensor.numpy(), raw)
            expected[name] = torch.from_numpy(dequantize(exact, raw))
    assert {"blk.0.attn_qkv.weight", "blk.3.attn_qkv.bias", "blk.1.ffn_up.weight"} <= set(merged)
    assert "blk.0.ffn_gate.weight" not in merged
    for name, parts in merged.items():
        whole = np.concatenate(parts)
        is_blocks = whole.ndim == 2 and whole.shape[1] % 32 == 0
        own = raw if is_blocks else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(whole, own) if is_blocks else whole, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = Checkpoint(GgufSource(tmp_path / "m.gguf"), config)
    for name, tensor in expected.items():
        assert torch.equal(read(checkpoint, name), tensor), name
        if checkpoint.rows[name].is_matrix:
            weights = torch.from_numpy(evaluate(checkpoint.matrix(name), step=32)).T
            assert (weights - tensor).abs().max() < 2**-10 * tensor.abs().max(), name
    assert checkpoint.size_bytes == sum(t.size_bytes for t in checkpoint._source.tensors.values())


def test_outputs_of_an_adapter_are_put_into_the_models_order() -> None:
    target = find_target(module_table(FAMILY), "model.layers.1.self_attn.qkv_proj")
    assert target is not None
    rows = target.stored_rows()
    assert rows is not None
    wanted = torch.arange(8 * 32)
    heads = [
        as_stored(FAMILY, f"model.layers.1.self_attn.{part}_proj.weight", x)
        for part, x in zip("qkv", wanted.split([6 * 32, 32, 32]), strict=True)
    ]
    assert torch.equal(torch.cat(heads)[rows], wanted)
