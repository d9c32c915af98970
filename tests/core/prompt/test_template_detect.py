"""Files that contain a chat template, and values that are not one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from exl_core.errors import TemplateError
from exl_core.files import CONFIG_LIMIT_BYTES
from exl_core.prompt.detect import load_template, template_from_gguf_fields
from exl_core.tokenizer.detect import load_tokenizer
from exl_core.tokenizer.gguf_fields import read_gguf_fields

USER = [{"role": "user", "content": "hi"}]


def write(folder: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def config(template: object, **more: object) -> dict[str, object]:
    return {"tokenizer_config.json": {"chat_template": template, **more}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (config("config"), "config"),
        ({"chat_template.jinja": "jinja", **config("config")}, "jinja"),
        ({"chat_template.json": {"chat_template": "older"}}, "older"),
        ({"chat_template.json": {"chat_template": "older"}, **config("config")}, "config"),
        (
            config(
                [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
            ),
            "named",
        ),
        (config("{{ bos_token }}-{{ eos_token }}", bos_token="B", eos_token="E"), "B-E"),
        (config("{{ bos_token }}", bos_token={"content": "B", "special": True}), "B"),
        (config("[{{ bos_token }}]", bos_token=None), "[]"),
        ({"special_tokens_map.json": {"bos_token": "M"}, **config("{{ bos_token }}")}, "M"),
    ],
)
def test_sources_of_a_template_in_a_directory(
    tmp_path: Path, files: dict[str, object], expected: str
) -> None:
    template = load_template(write(tmp_path, files))
    assert template is not None
    assert template.render(USER) == expected


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": {}}, config(None)])
def test_a_base_model_has_none(tmp_path: Path, files: dict[str, object]) -> None:
    assert load_template(write(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("files", "message", "where"),
    [
        (config(5), "not a text", "tokenizer_config.json"),
        (config(["x"]), "not a text", "tokenizer_config.json"),
        (config([]), "none for plain chat", "tokenizer_config.json"),
        (config([{"name": "rag", "template": ""}]), "got 'rag'", "tokenizer_config.json"),
        (config("{% if %}"), "not valid", "tokenizer_config.json"),
        ({"chat_template.jinja": "{{"}, "not valid", "chat_template.jinja"),
        ({"tokenizer_config.json": "{"}, "not valid JSON", "tokenizer_config.json"),
        ({"tokenizer_config.json": "[]"}, "no JSON object", "tokenizer_config.json"),
    ],
)
def test_values_that_are_not_templates_are_refused(
    tmp_path: Path, files: dict[str, object], message: str, where: str
) -> None:
    with pytest.raises(TemplateError, match=message) as caught:
        load_template(write(tmp_path, files))
    assert caught.value.where == str(tmp_path / where)


def test_a_gguf_file_contains_its_template(smollm2_path: Path) -> None:
    template = load_template(smollm2_path, read_gguf_fields(smollm2_path))
    assert template is not None
    assert (template.bos_token, template.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = template.render(USER)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    tokenizer = load_tokenizer(smollm2_path)
    ids = tokenizer.encode(text, allow_special=True)
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert tokenizer.decode(ids, skip_special=False) == text


def test_a_gguf_file_of_a_base_model_has_none(gemma3_path: Path) -> None:
    assert load_template(gemma3_path, read_gguf_fields(gemma3_path)) is None


def test_metadata_passed_by_the_caller_is_used(tmp_path: Path) -> None:
    fields = {"tokenizer.chat_template": "given"}
    template = load_template(tmp_path / "unread.gguf", fields)
    assert template is not None
    assert template.source == "given"


@pytest.mark.parametrize(
    ("fields", "bos"),
    [
        ({"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.tokens": ["a", "b"]}, "b"),
        ({"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.tokens": ["a", "b"]}, ""),
        ({"tokenizer.ggml.tokens": ["a"]}, ""),
        ({}, ""),
    ],
)
def test_the_texts_of_bos_and_eos_come_from_the_vocabulary(
    fields: dict[str, object], bos: str
) -> None:
    template = template_from_gguf_fields({"tokenizer.chat_template": "x", **fields}, "made")
    assert template is not None
    assert template.bos_token == bos


def test_a_template_of_another_type_is_refused() -> None:
    with pytest.raises(TemplateError, match="not a text"):
        template_from_gguf_fields({"tokenizer.chat_template": 3}, "made")


def test_a_file_without_its_metadata_is_refused(smollm2_path: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template can be read from this path"):
        load_template(smollm2_path)


NAMES = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_is_not_a_file_does_not_count_as_absent(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir()
    with pytest.raises(TemplateError, match="not a regular file") as caught:
        load_template(tmp_path)
    assert caught.value.where == str(path)
    path.rmdir()
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(TemplateError, match="cannot be read"):
        load_template(tmp_path)


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(
    "content", ["[" * 200_000 + "]" * 200_000, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "digits"]
)
def test_json_that_python_cannot_read_is_an_error(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(TemplateError, match="not valid JSON"):
        load_template(write(tmp_path, {name: content}))


@pytest.mark.parametrize("name", NAMES)
def test_files_have_a_size_limit(tmp_path: Path, name: str) -> None:
    with pytest.raises(TemplateError, match="too large"):
        load_template(write(tmp_path, {name: " " * (CONFIG_LIMIT_BYTES + 1)}))


def test_windows_line_ends_are_converted(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"a\r\nb")
    template = load_template(tmp_path)
    assert template is not None
    assert template.render(USER) == "a\nb"
