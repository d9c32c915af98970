"""Sources of text: a plain file, rows of a JSONL or parquet file, a Hugging Face data set.

A text is a list of documents: a plain file is one document, each row of a data set is one. Rows are
streamed and not stored on disk. Knows neither tokens nor models. `datasets` is imported only for
parquet files and data sets.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from exl_core.errors import ExlError, RequestError, wrong_type
from exl_core.files import open_regular, read_text_file

SEPARATOR = "\n\n"
"""Separator of documents that are joined into one text, as in papers that use WikiText."""

TEXT_COLUMN = "text"
"""Column of a row with its text, unless the caller names another one."""

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)


@dataclass(frozen=True)
class Text:
    """Documents in order, and their common name."""

    documents: tuple[str, ...]
    name: str

    @cached_property
    def joined(self) -> str:
        return SEPARATOR.join(self.documents)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the joined text in UTF-8."""
        return hashlib.sha256(self.joined.encode("utf-8")).hexdigest()


@dataclass(frozen=True, slots=True)
class HubText:
    """A data set of the hub, and the configuration and split that are read by default."""

    path: str
    config: str | None
    split: str


KNOWN_DATASETS: Mapping[str, HubText] = {
    "wikitext": HubText("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    "c4": HubText("allenai/c4", "en", "validation"),
}


def as_text(text: str | Text) -> Text:
    """Turns a string into a `Text` of one document. Other types are a RequestError."""
    given: object = text
    if isinstance(given, str):
        return Text((given,), "text")
    if not isinstance(given, Text):
        raise wrong_type(
            "the text",
            "a str or a Text",
            given,
            next_step="Read a file with exl_eval.texts.read_text, and join a list of texts.",
        )
    return given


PACKAGED_CTX = 256
"""Window of the packaged text, which has 800 to 1000 tokens."""


def packaged_text() -> Text:
    """A small text for a first measurement: the beginning of the Declaration of Independence of the
    United States (1776, public domain).

    Every model was trained on it. Figures on it compare with nothing that is published.
    """
    data = files("exl_eval").joinpath("data/declaration.txt").read_text(encoding="utf-8")
    return Text((data,), "declaration.txt of exl (public domain)")


def read_text(path: Path, *, column: str | None = TEXT_COLUMN, rows: int | None = None) -> Text:
    """Reads a file by its suffix: the first `rows` rows (None: all) of a JSONL or parquet file, or
    else a plain UTF-8 text. Empty rows are skipped. A malformed file is a RequestError that names
    the position.

    `column` None: the column TEXT_COLUMN, for commands without an option --column. Errors then do
    not advise that option.
    """
    if path.suffix in PARQUET_SUFFIXES:
        open_regular(path, RequestError).close()
        found = _dataset_rows(column, path="parquet", data_files=str(path), split="train")
        return _text_of(found, rows, path)
    if path.suffix in JSONL_SUFFIXES:
        return _text_of(_jsonl_rows(path, column), rows, path)
    if rows is not None:
        raise RequestError(
            "a plain text has no rows", where=path, expected="a JSONL or parquet file"
        )
    return Text((read_text_file(path),), str(path))


def read_dataset(
    name: str,
    *,
    split: str | None = None,
    column: str | None = TEXT_COLUMN,
    rows: int | None = None,
) -> Text:
    """Reads the first `rows` rows of a data set: a name of KNOWN_DATASETS, `owner/name` or
    `owner/name:config`. `column` is that of `read_text`. ExlError if the hub cannot be reached."""
    path, _, config = name.partition(":")
    known = KNOWN_DATASETS.get(path, HubText(path, None, "test"))
    found = _dataset_rows(
        column, path=known.path, name=config or known.config, split=split or known.split
    )
    label = ":".join(part for part in (known.path, config or known.config) if part)
    return _text_of(found, rows, f"{label}, {split or known.split}")


def _text_of(found: Iterator[str], rows: int | None, where: object) -> Text:
    documents = tuple(row for row in islice(found, rows) if row.strip())
    if not documents:
        raise RequestError("there is no text", where=where, expected="a row that is not empty")
    return Text(documents, str(where))


def _jsonl_rows(path: Path, column: str | None) -> Iterator[str]:
    for number, line in enumerate(read_text_file(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError("is not valid JSON", where=where, got=str(error)[:200]) from error
        if not isinstance(row, dict):
            raise RequestError("holds no JSON object", where=where, got=type(row).__name__)
        yield _cell(row, column, where)


def _cell(row: Mapping[str, Any], column: str | None, where: object) -> str:
    """Text of a row; a null value counts as empty."""
    name = TEXT_COLUMN if column is None else column
    if name not in row:
        what = f"there is no column {name!r}"
        if column is None:
            raise RequestError(
                what,
                where=where,
                got=", ".join(map(str, row)) or "no columns",
                next_step=f"Rename the column that holds the text to {name!r}.",
            )
        raise RequestError(
            what,
            where=where,
            expected=f"--column {' or '.join(map(str, row)) or 'of a row that has any'}",
        )
    value = row[name]
    if value is not None and not isinstance(value, str):
        raise RequestError(f"column {name!r} holds no text", where=where, got=type(value).__name__)
    return value or ""


def _dataset_rows(column: str | None, **source: Any) -> Iterator[str]:
    """Rows read with `datasets` in streaming mode, which downloads only the rows that are read."""
    where = source.get("data_files", source["path"])
    try:
        import datasets
    except ImportError as error:
        raise ExlError(
            "the package 'datasets' is not installed, which reads parquet files and data sets",
            where=where,
            next_step="Install it with 'pip install datasets', or give a text or JSONL file.",
        ) from error
    # Their log messages would repeat the errors that are raised below.
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        found = datasets.load_dataset(**source, streaming=True)
        for number, row in enumerate(found, start=1):
            yield _cell(row, column, f"{where}, row {number}")
    except FileNotFoundError as error:
        raise RequestError(
            "there is no such data set", where=where, got=_first_line(error)
        ) from error
    except ConnectionError as error:
        raise ExlError(
            "the hub cannot be reached",
            where=where,
            got=_first_line(error),
            next_step="A file needs no hub: FILE.parquet or FILE.jsonl in its place.",
        ) from error
    except (OSError, ValueError) as error:
        raise RequestError(
            "the data set cannot be read", where=where, got=_first_line(error)
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
