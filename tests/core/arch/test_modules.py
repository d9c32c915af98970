"""Module table: rows against the tensors of other writers, row orders in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH, get_tensor_name_map

from exl_core.arch import modules
from exl_core.arch.hf_config import read_hf_config
from exl_core.arch.layers import MoE, NormPlacement
from exl_core.arch.modules import Kind, ModuleTable, Shard, module_table
from exl_core.arch.names import GGUF, HF
from exl_core.arch.naming import Owner
from exl_core.arch.parts import expert_parts
from exl_core.arch.places import RowPermutation
from exl_core.errors import UnsupportedModelError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.formats.containers.source import StoredTensor
from exl_core.session.open import open_checkpoint
from support.mixed_model import CONFIG
from support.model_configs import LLAMA, write
from support.published_moe_configs import MOE_FAMILIES
from support.renamed_models import as_internlm2
from support.tiny_models import (
    save,
    tiny_arcee,
    tiny_cohere,
    tiny_cohere2,
    tiny_ernie,
    tiny_ernie_moe,
    tiny_exaone4,
    tiny_gemma,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gemma4,
    tiny_gemma4_moe,
    tiny_glm4,
    tiny_glm4_moe,
    tiny_granite,
    tiny_granite4,
    tiny_granite_moe,
    tiny_hunyuan,
    tiny_hunyuan_moe,
    tiny_llama,
    tiny_minimax_m2,
    tiny_mistral,
    tiny_mixtral,
    tiny_olmo3,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen2_moe,
    tiny_qwen3,
    tiny_qwen3_moe,
    tiny_seed_oss,
    tiny_smollm3,
    tiny_starcoder2,
)

FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (tiny_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": (tiny_llama, {"tie_word_embeddings": True}),
    "mistral": (tiny_mistral, {}),
    "qwen2": (tiny_qwen2, {}),
    "qwen3": (tiny_qwen3, {}),
    "seed-oss": (tiny_seed_oss, {}),
    "phi3": (tiny_phi3, {}),
    "glm4": (tiny_glm4, {}),
    "ernie4_5": (tiny_ernie, {}),
    "smollm3": (tiny_smollm3, {}),
    "olmo3": (tiny_olmo3, {}),
    "exaone4": (tiny_exaone4, {}),
    "granite": (tiny_granite, {}),
    "gemma4": (tiny_gemma4, {}),
    "granite4": (tiny_granite4, {}),
    "hunyuan": (tiny_hunyuan, {}),
    "cohere": (tiny_cohere, {}),
    "cohere2": (tiny_cohere2, {}),
    "starcoder2": (tiny_starcoder2, {}),
    "arcee": (tiny_arcee, {}),
    "qwen3moe": (tiny_qwen3_moe, {}),
    "mixtral": (tiny_mixtral, {}),
    "qwen2moe": (tiny_qwen2_moe, {}),
    "glm4moe": (tiny_glm4_moe, {"use_qk_norm": True}),
    "ernie4_5-moe": (tiny_ernie_moe, {}),
    "hunyuan-moe": (tiny_hunyuan_moe, {}),
    "minimax-m2": (tiny_minimax_m2, {}),
    "granitemoe": (tiny_granite_moe, {}),
    "gemma4-moe": (tiny_gemma4_moe, {}),
    "gemma": (tiny_gemma, {}),
    "gemma2": (tiny_gemma2, {}),
    "gemma3": (tiny_gemma3, {}),
}
GGUF_ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "seed-oss": MODEL_ARCH.SEED_OSS,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "olmo3": MODEL_ARCH.OLMO2,
    "exaone4": MODEL_ARCH.EXAONE4,
    "granite": MODEL_ARCH.GRANITE,
    "hunyuan": MODEL_ARCH.HUNYUAN_DENSE,
    "cohere": MODEL_ARCH.COMMAND_R,
    "cohere2": MODEL_ARCH.COHERE2,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "arcee": MODEL_ARCH.ARCEE,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3": MODEL_ARCH.GEMMA3,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_cover_every_tensor_of_transformers(tmp_path: Path, family: str) -> None:
    build, changes = FAMILIES[family]
    model = build(**changes)
    source, config, _ = open_checkpoint(save(model, tmp_path))
    table = module_table(config)
    covered: dict[str, list[tuple[int, int]]] = {}
    for row in table.rows:
        place = next(place for place in row.safetensors if place.name in source.tensors)
        stored = source.tensors[place.name]
        assert stored.num_rows == place.num_rows or row.kind is Kind.ROUTER_VECTOR, row.name
        assert stored.shape[-1:] == row.shape[-1:], row.name
        last = place.first_row + row.shape[0]
        covered.setdefault(place.name, []).append((place.first_row, last))
    assert covered.keys() == source.tensors.keys()
    for name, ranges in covered.items():
        ends = [last for _, last in sorted(ranges)]
        assert [first for first, _ in sorted(ranges)] == [0, *ends[:-1]], name
        assert ends[-1] == source.tensors[name].num_rows or "correction_bias" in name
    assert table.is_tied == family.startswith(
        ("llama-tied", "gemma", "ernie", "smollm", "co", "star")
    )


@pytest.mark.parametrize("family", GGUF_ARCHITECTURES)
def test_gguf_names_are_those_of_the_gguf_package(tmp_path: Path, family: str) -> None:
    build, changes = FAMILIES[family]
    _, config, _ = open_checkpoint(save(build(**changes), tmp_path))
    names = get_tensor_name_map(GGUF_ARCHITECTURES[family], config.num_layers)
    for row in module_table(config).rows:
        expected = names.get_name(row.name, (".weight", ".bias"))
        assert row.own_name("gguf") == expected, row.name


def test_every_tensor_of_a_real_gguf_file_is_used(smollm2_path: Path) -> None:
    source, config, quantization = open_checkpoint(smollm2_path)
    checkpoint = Checkpoint(source, config, quantization)
    assert checkpoint.used_names == set(source.tensors)
    assert len(checkpoint.rows) == 1 + 30 * 9 + 1


@pytest.mark.parametrize("rotary_dim", [20, 12, 4])
def test_row_permutations_are_those_of_other_writers_in_both_directions(rotary_dim: int) -> None:
    heads, size = 3, 20
    weight = torch.arange(heads * size).view(heads, size)
    rotated = weight[:, :rotary_dim].reshape(heads, 2, rotary_dim // 2).transpose(1, 2)
    stored = torch.cat([rotated.reshape(heads, -1), weight[:, rotary_dim:]], 1).view(-1)
    permutation = RowPermutation(heads, size, rotary_dim)
    assert torch.equal(stored[permutation.stored_rows()], weight.view(-1))
    assert torch.equal(weight.view(-1)[permutation.model_rows()], stored)


def test_rows_fused_by_groups_of_heads_are_found(tmp_path: Path) -> None:
    plain = open_checkpoint(save(tiny_llama(), tmp_path / "llama"))
    fused = open_checkpoint(as_internlm2(save(tiny_llama(), tmp_path / "internlm2")))
    expected, found = Checkpoint(*plain), Checkpoint(*fused)
    for row in module_table(plain[1]).rows:
        name = row.name.replace("mlp.gate_proj", "feed_forward.w1")
        name = name.replace("mlp.up_proj", "feed_forward.w3")
        name = name.replace("mlp.down_proj", "feed_forward.w2")
        name = name.replace("input_layernorm", "attention_norm")
        name = name.replace("post_attention_layernorm", "ffn_norm")
        values = [
            torch.cat([part.values for part in checkpoint.chunks(own, torch.float32)])
            for checkpoint, own in ((expected, row.name), (found, name))
        ]
        assert torch.equal(*values), name
    target = module_table(fused[1]).lora_targets["model.layers.0.attention.wqkv"]
    heads = [*(0, 1, 2, 5, 6, 7), *(3, 8), *(4, 9)]  # q, k, v: heads in the file, 20 rows each
    assert target.stored_rows() == [head * 20 + i for head in heads for i in range(20)]


def test_a_row_says_how_its_matrix_is_packed_split_and_converted() -> None:
    layer = module_table(CONFIG).layers[2]
    found = {
        role: (row.packed, row.first_out, row.shard, row.is_converted)
        for role, row in layer.items()
        if row.kind is Kind.LINEAR
    }
    wide, narrow = Shard.OUT_FEATURES, Shard.IN_FEATURES
    assert found == {
        "q": ("qkv", 0, wide, True),
        "k": ("qkv", 192, wide, True),
        "v": ("qkv", 384, wide, True),
        "output": ("output", 0, narrow, True),
        "gate": ("gate_up", 0, wide, True),
        "up": ("gate_up", 128, wide, True),
        "down": ("down", 0, narrow, True),
    }
    assert layer["q"].bias == "model.layers.2.self_attn.q_proj.bias"
    assert layer["output"].bias is None
    table = module_table(CONFIG)
    assert [row.role for row in table.packed_with(layer["k"])] == ["q", "k", "v"]
    assert table.packed_with(table.head) == (table.head,)


def test_lora_modules_are_found_by_their_names_in_checkpoints() -> None:
    targets = module_table(CONFIG).lora_targets
    fused = targets["model.layers.1.self_attn.qkv_proj"]
    assert [row.role for row in fused.rows] == ["q", "k", "v"]
    assert (fused.in_features, fused.out_features) == (48, (6 + 1 + 1) * 32)
    assert (targets["model.embed_tokens"].in_features, targets["lm_head"].out_features) == (50, 50)
    assert fused.stored_rows() is None


def test_a_layer_whose_tensors_the_family_does_not_name_is_refused() -> None:
    arch = replace(CONFIG.arch, safetensors=HF, gguf=GGUF)
    assert CONFIG.layers[1].norms is NormPlacement.SANDWICH
    with pytest.raises(UnsupportedModelError, match="no name for the tensor of role 'attention_po"):
        ModuleTable(replace(CONFIG, arch=arch))


def test_locating_experts_takes_time_linear_in_their_number(tmp_path: Path) -> None:
    """Counts look-ups of names instead of seconds."""
    counts = []
    for experts in (8, 32):
        model = tiny_qwen3_moe(num_experts=experts, moe_intermediate_size=8)
        source, config, _ = open_checkpoint(save(model, tmp_path / str(experts)))
        names = _CountedNames(source.tensors)
        source.tensors = names
        Checkpoint(source, config)
        counts.append(names.look_ups)
    assert counts[1] <= 4 * counts[0]


class _CountedNames(dict[str, StoredTensor]):
    look_ups = 0

    def get(self, name: str, default: Any = None) -> Any:
        self.look_ups += 1
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.look_ups += 1
        return super().__contains__(name)

    def values(self) -> Any:
        self.look_ups += len(self)
        return super().values()


def test_rows_of_experts_equal_those_derived_one_by_one(tmp_path: Path) -> None:
    for number, keys in enumerate(MOE_FAMILIES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = read_hf_config(write(folder, {**LLAMA, "num_hidden_layers": 3}, **keys[0]))
        forms, table = (config.arch.safetensors, config.arch.gguf), module_table(config)
        for layer, spec in enumerate(config.layers):
            if not isinstance(spec.feed_forward, MoE):
                continue
            parts = expert_parts(config.hidden_size, spec.feed_forward)
            count = spec.feed_forward.router.num_experts
            for expert in range(count):
                rows = modules._rows(parts, forms, Owner(layer, expert, count))
                own = [row for row in table.rows_of(layer) if row.expert == expert]
                assert own == rows
