"""Reading a model's chat template from its files.

In a directory, the sources are, in this order: `chat_template.jinja`, the key `chat_template` of
`tokenizer_config.json` (a text, or a list of named texts from which 'default' is used), and
`chat_template.json`. In a `.gguf` file it is the key `tokenizer.chat_template`. A model without a
chat template is a base model, which is not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exl_core.errors import TemplateError
from exl_core.files import (
    CONFIG_LIMIT_BYTES,
    is_present,
    read_bytes,
    read_optional_json_object,
)
from exl_core.prompt.template import ChatTemplate

DEFAULT_NAME = "default"


def load_template(
    path: Path, gguf_fields: Mapping[str, object] | None = None
) -> ChatTemplate | None:
    """Chat template of a model, or None.

    For a `.gguf` file the caller passes its metadata as `gguf_fields`; this package does not read
    GGUF files.
    """
    if gguf_fields is not None:
        return template_from_gguf_fields(gguf_fields, str(path))
    if not path.is_dir():
        raise TemplateError(
            "no chat template can be read from this path",
            where=path,
            expected="a model directory, or the metadata of a GGUF file",
        )
    return _from_directory(path)


def template_from_gguf_fields(fields: Mapping[str, object], where: str) -> ChatTemplate | None:
    """Chat template in the metadata of a GGUF file, or None."""
    source = fields.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise _not_a_template(where, source)
    tokens = fields.get("tokenizer.ggml.tokens")

    def text_of(role: str) -> str:
        number = fields.get(f"tokenizer.ggml.{role}_token_id")
        if not isinstance(tokens, list) or not isinstance(number, int):
            return ""
        return str(tokens[number]) if 0 <= number < len(tokens) else ""

    return ChatTemplate(source, bos_token=text_of("bos"), eos_token=text_of("eos"), where=where)


def _from_directory(folder: Path) -> ChatTemplate | None:
    config = read_optional_json_object(folder / "tokenizer_config.json", TemplateError)
    special = read_optional_json_object(folder / "special_tokens_map.json", TemplateError)
    found = _directory_source(folder, config)
    if found is None:
        return None
    source, where = found
    return ChatTemplate(
        source,
        bos_token=_token_text(config, special, "bos_token"),
        eos_token=_token_text(config, special, "eos_token"),
        where=str(where),
    )


def _directory_source(folder: Path, config: Mapping[str, object]) -> tuple[str, Path] | None:
    """Source of the template, and the file that contains it."""
    jinja = folder / "chat_template.jinja"
    if is_present(jinja, TemplateError):
        try:
            # Windows line ends become "\n", as they do in the JSON files.
            data = read_bytes(jinja, TemplateError, CONFIG_LIMIT_BYTES)
            return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n"), jinja
        except UnicodeDecodeError as error:
            raise TemplateError("cannot read the template", where=jinja, got=error) from error
    older = folder / "chat_template.json"
    for path, source in (
        (folder / "tokenizer_config.json", config.get("chat_template")),
        (older, read_optional_json_object(older, TemplateError).get("chat_template")),
    ):
        if isinstance(source, str):
            return source, path
        if isinstance(source, list):
            return _named(source, path), path
        if source is not None:
            raise _not_a_template(str(path), source)
    return None


def _named(entries: list[object], where: Path) -> str:
    names: dict[str, str] = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(source)}:
                names[name] = source
            case _:
                raise _not_a_template(str(where), entry)
    if DEFAULT_NAME in names:
        return names[DEFAULT_NAME]
    raise TemplateError(
        "the list of chat templates has none for plain chat",
        where=where,
        expected=f"one named '{DEFAULT_NAME}'",
        got=", ".join(map(repr, sorted(names)))[:200] or "an empty list",
    )


def _token_text(config: Mapping[str, object], special: Mapping[str, object], key: str) -> str:
    for source in (config, special):
        value = source.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            return value
    return ""


def _not_a_template(where: str, got: object) -> TemplateError:
    return TemplateError(
        "the chat template is not a text", where=where, expected="a text", got=type(got).__name__
    )
