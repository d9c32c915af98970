"""`exl inspect tokens`: ids and texts agree with the tokenizer, in both forms of output."""

from __future__ import annotations

import json
from pathlib import Path

from support.commands import Command

TEXT = "Grüße, 🦊!\n"


def test_tokens_spell_the_text(exl: Command) -> None:
    done = exl("inspect", "tokens", "-p", TEXT, "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["schema_version"] == 1
    raw = b"".join(
        bytes.fromhex(one[1:-1]) if one.startswith("<") else one.encode() for one in found["tokens"]
    )
    assert raw.decode() == TEXT
    assert any(one.startswith("<") for one in found["tokens"]), "the fox takes several tokens"


def test_the_table_has_every_token_and_the_count(exl: Command) -> None:
    ids = json.loads(exl("inspect", "tokens", "-p", TEXT, "--json").out)["token_ids"]
    done = exl("inspect", "tokens", "-p", TEXT)
    assert (done.code, done.err) == (0, "")
    assert all(str(token_id) in done.out for token_id in ids)
    assert f"Tokens: {len(ids)}, characters: {len(TEXT)}, " in done.out


def test_special_tokens_only_if_requested(exl: Command) -> None:
    name = "<|im_start|>"
    plain = json.loads(exl("inspect", "tokens", "-p", name, "--json").out)
    special = json.loads(exl("inspect", "tokens", "-p", name, "--parse-special", "--json").out)
    assert len(plain["token_ids"]) > 1
    assert special["tokens"] == [name]


def test_bos_comes_first_once_where_the_tokenizer_adds_it(exl: Command, gemma3_path: Path) -> None:
    def tokens(*options: object) -> list[str]:
        found: list[str] = json.loads(
            exl("inspect", "tokens", gemma3_path, "--json", *options).out
        )["tokens"]
        return found

    assert tokens("-p", "Hi") == tokens("-p", "<bos>Hi", "--parse-special") == ["<bos>", "Hi"]
    assert tokens("-p", "<bos>Hi")[:2] == ["<bos>", "<"]


def test_text_comes_from_a_file_or_stdin(exl: Command, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two", encoding="utf-8")
    from_file = exl("inspect", "tokens", "-f", path, "--json").out
    assert json.loads(from_file)["tokens"] == ["one", " two"]
    assert exl("inspect", "tokens", "--json", stdin=b"one two").out == from_file


def test_no_text_and_no_model_are_one_line(exl: Command, tmp_path: Path) -> None:
    assert "the prompt is empty" in exl("inspect", "tokens", "-p", "").error_line(2)
    assert "nowhere" in exl("inspect", "tokens", tmp_path / "nowhere", "-p", "x").error_line(3)
