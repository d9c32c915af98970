"""Sources of texts: files of each kind, and data sets with and without a reachable hub."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from exl_core.errors import ExlError, RequestError
from exl_eval.texts import as_text, read_dataset, read_text

ROWS = ["First row.", "", "Grüße, zweite Zeile.\nStill the second.", " ", "Third."]
FILLED = (ROWS[0], ROWS[2], ROWS[4])


def jsonl(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_plain_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"Zeile\r\n\r\nzwei\n")
    text = read_text(path)
    assert (text.documents, text.name) == (("Zeile\r\n\r\nzwei\n",), str(path))
    assert text.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("text", [None, 5, b"x", Path("wiki.txt"), ["a", "b"]], ids=repr)
def test_a_text_is_a_string_or_a_text(text: Any) -> None:
    with pytest.raises(RequestError, match=r"text has the wrong type .*a str or a Text.*read_text"):
        as_text(text)


def test_rows_of_jsonl_are_documents(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": row, "id": 1} for row in ROWS])
    text = read_text(path)
    assert text.documents == FILLED
    assert text.joined == "\n\n".join(FILLED)
    assert read_text(path, rows=2).documents == FILLED[:1]


def test_rows_from_another_column(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"content": "a", "text": None}, "", {"content": "b"}])
    assert read_text(path, column="content").documents == ("a", "b")
    with pytest.raises(RequestError, match="there is no text"):
        read_text(path, rows=1)


def test_rows_of_parquet_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"text": ROWS, "id": list(range(5))}).to_parquet(str(path))
    assert read_text(path).documents == FILLED
    assert read_text(path, rows=3).documents == FILLED[:2]
    with pytest.raises(
        RequestError, match=r"row 1: there is no column 'body'.*--column text or id"
    ):
        read_text(path, column="body")
    with pytest.raises(RequestError, match="column 'id' holds no text"):
        read_text(path, column="id")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(RequestError, match=r"rows\.parquet: the data set cannot be read"):
        read_text(path)
    with pytest.raises(RequestError, match=r"none\.parquet"):
        read_text(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}, "{"], "line 2: is not valid JSON"),
        (["[1]"], "line 1: holds no JSON object"),
        ([{"text": 5}], "line 1: column 'text' holds no text .got int"),
        ([{"body": "a", "id": 1}], "line 1: there is no column 'text' .expected --column body or"),
        ([], "there is no text"),
    ],
)
def test_damaged_jsonl_is_refused_with_the_line(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        read_text(jsonl(tmp_path / "rows.jsonl", rows))


def test_a_plain_file_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("text", encoding="utf-8")
    with pytest.raises(RequestError, match="has no rows"):
        read_text(path, rows=3)


@pytest.mark.parametrize("name", ["wikitext", "c4", "somebody/something:config"])
def test_an_unreachable_hub_is_an_error_that_suggests_local_files(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ExlError, match=r"the hub cannot be reached.*: FILE\.parquet or") as error:
        read_dataset(name)
    assert error.value.exit_code == 1


def test_a_data_set_name_is_split_into_path_config_and_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    asked = []

    def load(**source: object) -> list[dict[str, str]]:
        asked.append(source)
        return [{"text": row} for row in ROWS]

    monkeypatch.setattr(datasets, "load_dataset", load)
    text = read_dataset("wikitext")
    assert (text.documents, text.name) == (
        FILLED,
        "Salesforce/wikitext:wikitext-2-raw-v1, test",
    )
    read_dataset("c4", rows=1)
    read_dataset("owner/name:config", split="train")
    wanted = [(one["path"], one["name"], one["split"], one["streaming"]) for one in asked]
    assert wanted == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", True),
        ("allenai/c4", "en", "validation", True),
        ("owner/name", "config", "train", True),
    ]


def test_a_string_is_one_document() -> None:
    assert as_text("text").documents == ("text",)
    assert as_text(as_text("text")).name == "text"
