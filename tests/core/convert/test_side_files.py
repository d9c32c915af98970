"""Files beside the weights: they are read back, and differences are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from exl_core.convert import side_files
from exl_core.errors import ConfigError, TokenizerError
from exl_core.session.open import open_checkpoint
from support import tiny_models
from support.gguf_models import write_gguf

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
