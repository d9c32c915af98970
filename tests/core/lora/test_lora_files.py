"""Adapters that do not fit the model are refused by name, before any large tensor is read."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from exl_core.arch.modules import module_table
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.request import Request
from exl_core.errors import AdapterError, ModelError, OutOfMemoryError, RequestError
from exl_core.lora import reader
from exl_core.lora.adapter import LoraAdapter, load_adapter
from exl_core.lora.config import read_adapter_config
from exl_core.lora.targets import find_target, parse_name
from exl_core.model.adapters import AdapterUse
from exl_core.model.context import Context
from exl_core.model.transformer import Transformer
from exl_core.session.load import LoadOptions, load_model
from support.adapters import PREFIX, write_adapter
from support.tiny_models import save, tiny_gemma3, tiny_llama

Q = f"{PREFIX}model.layers.1.self_attn.q_proj"
DOWN, UP = torch.ones(4, 72), torch.ones(120, 4)
GOOD = {f"{Q}.lora_A.weight": DOWN, f"{Q}.lora_B.weight": UP}


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Transformer:
    return load_model(str(save(tiny_llama(), tmp_path_factory.mktemp("llama")))).model


def test_properties_of_a_loaded_adapter(model: Transformer, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "mine", GOOD, lora_alpha=8, base_model_name_or_path="a/b")
    adapter, again = load_adapter(folder, model), load_adapter(str(folder), model)
    assert adapter.name == "mine"
    assert adapter.modules == ("self_attn.q_proj",)
    assert adapter.config.base_model == "a/b"
    assert adapter.size_bytes == 4 * (4 * 72 + 120 * 4)
    assert adapter.ends is None
    assert adapter.deltas(0, "qkv") == adapter.deltas(1, "output") == ()
    (delta,) = adapter.deltas(1, "qkv")
    assert delta.first_out == 0
    assert delta.down.shape == (72, 4)
    assert delta.up.shape == (4, 120)
    assert delta.up.unique().tolist() == [2.0]
    assert len({adapter, again}) == 2, "compared by identity: each has its own serial"
    assert adapter.serial != again.serial


def test_deltas_have_the_output_offsets_of_packed_matrices(
    model: Transformer, tmp_path: Path
) -> None:
    a = torch.ones(4, 72)
    tensors = {}
    for module, rows in (("self_attn.k_proj", 40), ("self_attn.v_proj", 40), ("mlp.up_proj", 112)):
        tensors[f"{PREFIX}model.layers.0.{module}.lora_A.default.weight"] = a.clone()
        tensors[f"{PREFIX}model.layers.0.{module}.lora_B.default.weight"] = torch.ones(rows, 4)
    adapter = load_adapter(write_adapter(tmp_path, tensors), model)
    assert sorted(d.first_out for d in adapter.deltas(0, "qkv")) == [120, 160]
    assert [d.first_out for d in adapter.deltas(0, "gate_up")] == [112]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no LoRA tensors"),
        ({f"{Q}.lora_A.weight": DOWN}, "without its other half"),
        (GOOD | {f"{Q}.lora_A.weight": torch.ones(3, 72)}, r"wrong shape .*\[4, 72\], got \[3, 72"),
        (GOOD | {f"{Q}.lora_B.weight": torch.ones(72, 4)}, r"wrong shape .*\[120, 4\], got \[72"),
        (GOOD | {f"{Q}.lora_B.weight": UP * math.nan}, "lora_B.weight' holds NaN"),
        (GOOD | {f"{Q}.lora_B.weight": UP.int()}, "no type of weights .*got I32"),
        (GOOD | {f"{Q}.lora_A.default.weight": DOWN}, "is there twice"),
        (GOOD | {f"{Q}.lora_magnitude_vector": torch.ones(120)}, "belongs to nothing in this"),
        (GOOD | {f"{Q}.base_layer.weight": torch.ones(120, 72)}, "replaces a matrix of a layer"),
        (GOOD | {f"{Q}.bias": torch.ones(120)}, "bias that is not zero"),
        (GOOD | {f"{Q}.lora_B.bias": torch.ones(120)}, "bias that is not zero"),
        ({f"{PREFIX}model.layers.3.mlp.up_proj.lora_A.weight": DOWN}, "linear of layers 0 to 2"),
        ({f"{PREFIX}model.layers.0.mlp.fc1.lora_A.weight": DOWN}, "fc1.lora_A.weight' belongs to"),
        ({f"{PREFIX}model.layers.x.mlp.up_proj.lora_A.weight": DOWN}, "belongs to nothing"),
        ({f"{PREFIX}model.norm.weight": torch.ones(72)}, "norm.weight' belongs to nothing"),
        ({f"{PREFIX}lm_head.lora_embedding_A": DOWN}, "of another kind than its module"),
        ({f"{PREFIX}model.embed_tokens.lora_A.weight": DOWN}, "of another kind than its module"),
        ({f"{PREFIX}lm_head.weight": torch.ones(301, 72)}, r"wrong shape .*\[300, 72\], got \[301"),
        ({f"{PREFIX}model.embed_tokens.weight": torch.ones(72, 300)}, "has the wrong shape"),
        ({"x" * 300: DOWN}, "endless name"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    model: Transformer, tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    folder = write_adapter(tmp_path, tensors)
    with pytest.raises(AdapterError, match=message) as raised:
        load_adapter(folder, model)
    assert raised.value.where == str(folder / "adapter_model.safetensors")
    assert raised.value.exit_code == 3


def test_two_pairs_for_one_matrix_are_refused(model: Transformer, tmp_path: Path) -> None:
    again = {f"other.{name}": tensor.clone() for name, tensor in GOOD.items()}
    with pytest.raises(AdapterError, match="has another pair"):
        load_adapter(write_adapter(tmp_path, GOOD | again), model)


def test_zero_biases_are_ignored(model: Transformer, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, GOOD | {f"{Q}.bias": torch.zeros(120)}, bias="all")
    assert load_adapter(folder, model).modules == ("self_attn.q_proj",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "not a LoRA adapter .*got IA3"),
        ({"peft_type": None}, "not a LoRA adapter"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is not supported"),
        ({"init_lora_weights": "pissa_niter_16"}, "changed copy of its model"),
        ({"r": 0}, "r is not a rank"),
        ({"r": True}, "r is not a rank"),
        ({"r": 2.5}, "r is not a rank"),
        ({"r": None}, "r is not a rank"),
        ({"lora_alpha": "8"}, "lora_alpha is not a number"),
        ({"lora_alpha": -1}, "lora_alpha is not a number"),
        ({"use_rslora": "yes"}, "neither true nor false"),
        ({"rank_pattern": [1]}, "rank_pattern is no table"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern of 'q_proj' is not a rank"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern of 'q_proj' is not a number"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "too intricate a pattern"),
        ({"alpha_pattern": {".*.*.*b": 1}}, "too intricate a pattern"),
        ({"alpha_pattern": {"[": 1}}, "broken pattern"),
    ],
)
def test_unsupported_configurations_are_refused(
    model: Transformer, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path, GOOD, **fields)
    with pytest.raises(AdapterError, match=message) as raised:
        load_adapter(folder, model)
    assert raised.value.where == str(folder / "adapter_config.json")


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_initializations_that_keep_the_base_weights_are_accepted(
    tmp_path: Path, start: object
) -> None:
    read_adapter_config(write_adapter(tmp_path, GOOD, init_lora_weights=start))


def test_missing_or_damaged_files_are_refused(model: Transformer, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
        load_adapter(tmp_path, model)
    folder = write_adapter(tmp_path / "a", GOOD)
    file = folder / "adapter_model.safetensors"
    shutil.copy(file, folder / "adapter_model.bin")
    load_adapter(folder, model)  # the safetensors file is used
    file.unlink()
    with pytest.raises(AdapterError, match=r"adapter_model.bin: is a pickle.*save it again"):
        load_adapter(folder, model)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match=r"holds no adapter_model.safetensors"):
        load_adapter(folder, model)
    file.write_bytes(b"\x08")
    with pytest.raises(ModelError, match="header is cut off"):
        load_adapter(folder, model)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="no JSON object"):
        load_adapter(folder, model)


def test_a_header_with_an_absurd_shape_allocates_nothing(
    model: Transformer, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, {}, r=10**8)
    shape = [10**8, 72]
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * 72 * 10**8]}
    header = json.dumps({f"{Q}.lora_A.weight": entry}).encode()
    file = folder / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="lies outside the file"):
        load_adapter(folder, model)


def test_memory_is_checked_before_loading(
    model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path, GOOD)
    monkeypatch.setattr(reader, "available_memory_bytes", lambda: 3071)
    with pytest.raises(OutOfMemoryError, match="adapter does not fit"):
        load_adapter(folder, model)
    monkeypatch.setattr(reader, "available_memory_bytes", lambda: 3072)
    load_adapter(folder, model)


def test_tied_embedding_and_head_must_both_be_present(tmp_path: Path) -> None:
    model = load_model(str(save(tiny_gemma3(), tmp_path / "model"))).model
    table = torch.ones(300, 72)
    one = {f"{PREFIX}model.embed_tokens.weight": table}
    folder = write_adapter(tmp_path / "one", one, ensure_weight_tying=True)
    with pytest.raises(AdapterError, match="trained as one, and only one of them is here"):
        load_adapter(folder, model)
    both = one | {f"{PREFIX}lm_head.weight": table.clone()}
    load_adapter(write_adapter(tmp_path / "both", both, ensure_weight_tying=True), model)


def test_adapters_of_multimodal_checkpoints_match_the_language_model(tmp_path: Path) -> None:
    folder = save(tiny_gemma3(), tmp_path / "model")
    table = module_table(load_model(str(folder)).config)
    for root in ("model.", "base_model.model.model.", "base_model.model.model.language_model."):
        name = f"{root}layers.2.mlp.down_proj.lora_A.weight"
        target = find_target(table, parse_name(name).module)
        assert target is not None, name
        assert [(row.layer, row.packed) for row in target.rows] == [(2, "down")]
    tower = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj"
    assert find_target(table, tower) is None


def test_a_truncated_file_raises_model_error(model: Transformer, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, GOOD)
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for size in range(0, len(whole), 97):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            load_adapter(folder, model)
    save_file(GOOD, file)
    load_adapter(folder, model)


def test_an_adapter_of_a_different_model_is_refused(model: Transformer, tmp_path: Path) -> None:
    use = AdapterUse(load_adapter(write_adapter(tmp_path / "a", GOOD), model))
    loaded = load_model(str(save(tiny_llama(num_hidden_layers=4), tmp_path / "model")))
    deeper = loaded.model
    with pytest.raises(RequestError, match="loaded for another model"):
        Context(deeper, 8).feed([[5]], adapters=[use])
    engine = Engine(deeper, loaded.tokenizer, EngineOptions(cache_tokens=256))
    with pytest.raises(RequestError, match="loaded for another model"):
        engine.submit(Request((5,), adapters=(use,)))
    assert engine.is_idle
    longer = load_model(str(tmp_path / "model"), LoadOptions(max_seq_len=77)).model
    own = AdapterUse(load_adapter(tmp_path / "a", deeper))
    Context(longer, 8).feed([[5]], adapters=[own])  # only the dimensions must match


@pytest.mark.parametrize("scale", ["0.5", None, True, math.nan, math.inf, 1e39, 10**400])
def test_a_scale_that_is_no_finite_number_is_refused(
    model: Transformer, tmp_path: Path, scale: Any
) -> None:
    adapter = load_adapter(write_adapter(tmp_path, GOOD), model)
    assert AdapterUse(adapter, -2).scale == -2
    with pytest.raises(RequestError, match=r"scale of an adapter .*a finite number"):
        AdapterUse(adapter, scale)


@pytest.mark.parametrize("adapter", [None, "folder", LoraAdapter])
def test_other_objects_than_adapters_are_refused(adapter: Any) -> None:
    with pytest.raises(RequestError, match="adapter has the wrong type"):
        AdapterUse(adapter)


def test_other_objects_than_folders_are_refused(model: Transformer) -> None:
    with pytest.raises(RequestError, match=r"path has the wrong type .*a text or a Path, got 5"):
        load_adapter(5, model)  # type: ignore[arg-type]
