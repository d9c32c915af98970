"""`exl eval compare-layers`: table, JSON and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import tiny_models

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
def compare(exl: Any, tiny_llama_dir: Path, tmp_path: Path) -> Callable[..., Any]:
    """`compare(*args)` of the tiny model with itself, its weights rounded to bfloat16."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    model: Any = tiny_models.tiny_llama(max_position_embeddings=512)
    near = tiny_models.save(model.to(torch.bfloat16), tmp_path / "near")
    common = ("--text", text, "--ctx", 64, "--windows", 3)

    def run(*args: object, first: Path = tiny_llama_dir, second: Path = near) -> Any:
        return exl("eval", "compare-layers", first, second, *common, *args)

    return run


def test_table_has_the_figures_of_json(compare: Callable[..., Any]) -> None:
    result = json.loads(compare("--json").out)
    assert (result["schema_version"], result["measurement"]) == (1, "layers")
    assert (result["tokens"], result["windows"], result["model"]) == (192, 3, "near")
    assert [one["layer"] for one in result["layers"]] == list(range(len(result["layers"])))
    for one in result["layers"]:
        for kind in ("propagated", "local"):
            assert 0 < one[kind]["relative_error"]["mean"] < 0.1
            assert 0.99 < one[kind]["cosine"]["mean"] < 1
    page = compare()
    assert (page.code, page.err) == (0, "")
    assert result["text_sha256"] in page.out
    for one in result["layers"]:
        (line,) = [x for x in page.out.splitlines() if x.startswith(f" layer {one['layer']} ")]
        for kind in ("propagated", "local"):
            error = one[kind]["relative_error"]
            assert f"{error['mean']:.5f} ± {error['stderr']:.5f}" in line


def test_models_of_other_shapes_are_refused(compare: Callable[..., Any], tmp_path: Path) -> None:
    other = tiny_models.save(tiny_models.tiny_llama(num_hidden_layers=1), tmp_path / "one")
    assert "different number of layers" in compare(second=other).error_line(2)
