"""Files beside the weights: they are read back, and differences are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from exl_core.convert import side_files
from exl_core.errors import ConfigError, TokenizerError, UnsupportedModelError
from exl_core.session.open import open_checkpoint
from support import tiny_models
from support.gguf_families import GGUF_FAMILIES
from support.gguf_hybrids import write_hybrid
from support.gguf_models import write_gguf
from support.tiny_hybrids import tiny_lfm2

SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}


def test_changed_config_or_tokenizer_is_an_error(tmp_path: Path) -> None:
    gguf = write_gguf(tiny_models.tiny_llama(**SHAPE), tmp_path / "tiny.gguf")
    source, config, _ = open_checkpoint(gguf)
    files = side_files.collect(gguf, source, config, {"quant_method": "exl2"})
    folder = tmp_path / "out"
    folder.mkdir()
    files.write(folder)
    side_files.check(folder, gguf, source, config)

    changed = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**changed, "rope_theta": 5.0}))
    with pytest.raises(ConfigError, match="differently"):
        side_files.check(folder, gguf, source, config)
    files.write(folder)
    shutil.copyfile(
        tiny_models.save(tiny_models.tiny_llama(), tmp_path / "o") / "tokenizer.json",
        folder / "tokenizer.json",
    )  # a tokenizer without the merge of 'ab'
    with pytest.raises(TokenizerError, match="differently"):
        side_files.check(folder, gguf, source, config)


UNSTATED = ("apertus", "dbrx", "llama4")
"""Families for which no `config.json` can be made from a GGUF file."""


@pytest.mark.parametrize("name", [name for name in GGUF_FAMILIES if name not in UNSTATED])
def test_a_written_configuration_reads_back_the_same(tmp_path: Path, name: str) -> None:
    arch, build = GGUF_FAMILIES[name]
    gguf = write_gguf(build(), tmp_path / "tiny.gguf", arch=arch)
    source, config, _ = open_checkpoint(gguf)
    files = side_files.collect(gguf, source, config, {"quant_method": "exl2"})

    files.write(tmp_path)

    side_files.check(tmp_path, gguf, source, config)


def test_numbers_in_the_metadata_alone_are_refused(tmp_path: Path) -> None:
    gguf = write_gguf(GGUF_FAMILIES["apertus"][1](), tmp_path / "tiny.gguf")
    source, config, _ = open_checkpoint(gguf)
    with pytest.raises(UnsupportedModelError, match="activation's numbers"):
        side_files.collect(gguf, source, config, {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dbrx", "config.json of dbrx models cannot be made"),
        ("llama4", "differ in ways that config.json cannot state"),
        ("lfm2", "config.json of lfm2 models cannot be made"),
    ],
)
def test_configurations_that_cannot_be_made_are_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    path = tmp_path / "tiny.gguf"
    if name == "lfm2":
        gguf = write_hybrid(tiny_lfm2(), path, name)
    else:
        gguf = write_gguf(GGUF_FAMILIES[name][1](), path)
    source, config, _ = open_checkpoint(gguf)
    with pytest.raises(UnsupportedModelError, match=message):
        side_files.collect(gguf, source, config, {})


TEXT = {"hidden_size": 96, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}


@pytest.mark.parametrize(
    "settings",
    [
        {**TEXT, "vision_config": {"depth": 1}, "eos_token_id": 5, "tie_word_embeddings": True},
        {
            "text_config": {**TEXT, "eos_token_id": None},
            "vision_config": {"depth": 1},
            "eos_token_id": 5,
            "tie_word_embeddings": True,
        },
    ],
    ids=["flat", "nested"],
)
def test_a_language_model_is_written_without_the_larger_model(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    folder = tiny_models.save(tiny_models.tiny_qwen2(**SHAPE), tmp_path / "source")
    source, config, _ = open_checkpoint(folder)
    larger = {"architectures": ["Qwen2VLForConditionalGeneration"], **settings}
    (folder / "config.json").write_text(json.dumps(larger))

    files = side_files.collect(folder, source, config, {"quant_method": "exl2"})

    assert json.loads(files.written["config.json"]) == {
        **TEXT,
        "architectures": ["Qwen2ForCausalLM"],
        "eos_token_id": 5,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "exl2"},
    }
