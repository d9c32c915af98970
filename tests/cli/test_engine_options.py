"""Options for cache precision, drafts, adapters and constraints, with valid and invalid values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exl_cli import load
from exl_cli.engine_options import parse_loras
from exl_core.errors import RequestError
from exl_core.speculate.compatible import draft_rope_alpha
from support import tiny_models
from support.adapters import random_pairs, stored, write_adapter
from support.commands import Command, JsonCommand
from support.tiny_mtp import MtpCheckpoint

GREEDY = ("--temp", "0")


@pytest.fixture
def generate(exl: Command, tiny_llama_dir: Path) -> Command:
    """`generate(*args)` on the tiny model."""
    return lambda *args: exl("generate", "-m", tiny_llama_dir, "-p", "Hello", *args)


@pytest.fixture
def answer(generate: Command) -> JsonCommand:
    def run(*args: object) -> dict[str, Any]:
        done = generate("--json", *args)
        assert (done.code, done.err) == (0, "")
        return dict(json.loads(done.out))

    return run


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "given") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def adapter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = random_pairs(tiny_models.tiny_llama())
    return write_adapter(tmp_path_factory.mktemp("lora") / "one", stored(pairs))


# Constraints


def test_json_schema_constrains_the_text(answer: JsonCommand, file: Callable[..., Path]) -> None:
    schema = file('{"enum": [{"answer": 1}, {"answer": 2}]}')
    answered = answer("--json-schema", schema, "-n", 100)
    assert json.loads(answered["text"]) in ({"answer": 1}, {"answer": 2})
    assert answered["finish_reason"] == "constraint"


def test_regex_constrains_the_text(answer: JsonCommand) -> None:
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer("--regex", "[0-9]{3}-[a-f]{2}")["text"])


def test_grammars_of_llama_cpp_are_translated(
    answer: JsonCommand, file: Callable[..., Path]
) -> None:
    gbnf = 'root ::= item (", " item)*\nitem ::= "yes" | "no"\n'
    for given in (file(gbnf), gbnf):
        text = answer("--grammar", given, "--regex", ".{8,12}")["text"]
        assert re.fullmatch("(yes|no)(, (yes|no))*", str(text))
    inline = answer("--grammar", 'start: "yes" | "no"')["text"]
    assert inline in ("yes", "no")


def test_grammar_constrains_the_text(answer: JsonCommand, file: Callable[..., Path]) -> None:
    grammar = file('start: item (", " item)*\nitem: "yes" | "no"\n')
    text = answer("--grammar", grammar, "--regex", ".{8,12}")["text"]
    assert set(text.split(", ")) <= {"yes", "no"}
    assert 8 <= len(text) <= 12, "several hold at once"


def test_truncated_constrained_text_prints_a_note(generate: Command) -> None:
    done = generate("--regex", "[a-z]{20}", "-n", 5)
    assert done.code == 0
    assert len(done.out) == 5
    assert done.err == (
        "exl: note: cut off after 5 tokens (-n, -c): the text does not meet its constraint yet\n"
    )
    assert generate("--regex", "[a-z]{20}", "-n", 5, "-q").err == ""
    assert generate("--regex", "[a-z]{5,}", "-n", 5).err == "", "it is what it was to look like"
    assert generate("--regex", "[a-z]{20}", "-n", 20).err == ""
    done = generate("--regex", "aab{20}", "--stop", "b")
    assert (done.out, done.err.count("--stop")) == ("aa", 1)


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("--json-schema", "{", ["given", "not JSON", "line 1"]),
        ("--json-schema", "", ["given", "not JSON"]),
        ("--json-schema", "[1]", ["neither an object nor true or false"]),
        ("--json-schema", "false", ["JSON schema"]),
        ("--json-schema", '{"type": "integr"}', ["JSON schema", "integr"]),
        ("--json-schema", '{"type": "integer", "minimum": 5, "maximum": 3}', ["JSON schema"]),
        ("--json-schema", '{"type": "array", "uniqueItems": true}', ["JSON schema", "uniqueItems"]),
        ("--json-schema", '{"$ref": "#"}', ["JSON schema"]),
        (
            "--json-schema",
            '{"items": {"multipleOf": 62615533}}',
            ["#/items/multipleOf", "multipleOf in the JSON schema", "at most 100000", "62615533"],
        ),
        (
            "--grammar",
            'start: "a"\n  "b"{9000000}',
            ["line 2", "repeat {9000000}", "at most 1000000"],
        ),
        ("--grammar", "start: (", ["the grammar cannot be used"]),
        ("--grammar", "rule: 'a'", ["the grammar cannot be used"]),
        ("--grammar", "", ["the grammar cannot be used"]),
    ],
)
def test_bad_constraint_is_a_one_line_error(
    generate: Command, file: Callable[..., Path], option: str, text: str, words: list[str]
) -> None:
    line = generate(option, file(text)).error_line(2)
    assert not [word for word in words if word not in line], line


@pytest.mark.parametrize("option", ["--grammar", "--json-schema"])
def test_an_empty_constraint_is_named(exl: Command, tiny_llama_dir: Path, option: str) -> None:
    line = exl("generate", "-m", tiny_llama_dir, "-p", "x", option, "").error_line(2)
    assert line == f"{option} is empty. Name a file, or leave the option out."


@pytest.mark.parametrize(
    "pattern",
    ["(", "[z-a]", "a{3,1}", "a{9000000}", "(?=a)b", "[0-9&&[a-z]]", "a\udcff"],
    ids=ascii,
)
def test_bad_pattern_is_a_one_line_error(generate: Command, pattern: str) -> None:
    assert "regular expression" in generate("--regex", pattern).error_line(2)


def test_unreadable_constraint_files(
    generate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the weights were loaded"))
    for option in ("--json-schema", "--grammar"):
        line = generate(option, tmp_path / "none").error_line(2)
        assert "none" in line
        assert "cannot be read" in line
        assert "cannot be read" in generate(option, tmp_path).error_line(2)
        binary = tmp_path / "binary"
        binary.write_bytes(b"\xff\xfe")
        assert "UTF-8" in generate(option, binary).error_line(2)


# Cache


def test_unknown_cache_type_is_reported_before_loading(
    generate: Command, exl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the weights were loaded"))
    for wrong in ("fp32", "Q4", "int8", ""):
        for line in (
            generate("--cache-type", wrong).error_line(2),
            exl("chat", "--cache-type", wrong).error_line(2),
        ):
            assert "fp16 or fp8 or q8 or q6 or q4" in line


def test_streamed_layers_give_the_same_reply(generate: Command, answer: JsonCommand) -> None:
    args = ("-n", 6, "--temp", 0)
    assert answer(*args, "--held-memory", 0)["token_ids"] == answer(*args)["token_ids"]
    assert "--held-memory" in generate(*args, "--held-memory", "-1").error_line(2)


def test_quantized_cache_needs_a_suitable_head_size(generate: Command) -> None:
    assert "fp16 or fp8" in generate("--cache-type", "q4").error_line(2)
    assert generate("--cache-type", "fp8", "-n", 4).code == 0


def test_cache_that_does_not_fit_suggests_smaller_ones(
    generate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    kib = 2 * 2 * 20 * 3 * 2 * 512 // 1024  # keys and values of 2 heads of 20 in 3 layers, fp16
    for name in ("exl_core.session.runtime", "exl_core.cache.store"):
        monkeypatch.setattr(f"{name}.free_memory_bytes", lambda _: (kib - 1) * 1024)
    line = generate().error_line(4)
    assert "fp16 cache of 512 tokens" in line
    assert "--cache-type fp8 would fit." in line
    assert "A cache of 256 tokens would fit too (--ctx-size)." in line
    assert generate("--cache-type", "fp8", "-n", 4).code == 0
    assert generate("-c", 256, "-n", 4).code == 0


@pytest.mark.thorough
def test_quantized_cache_gives_the_right_answer(exl: Command) -> None:
    prompt = ("generate", "-p", "The capital of France is", "-n", "4", *GREEDY, "-q", "-c", 512)
    assert " Paris" in exl(*prompt, "--cache-type", "q6").out


# Drafts


def test_drafts_do_not_change_the_text_and_are_counted(
    answer: JsonCommand, tiny_llama_dir: Path
) -> None:
    args = ("-n", 40, *GREEDY)
    plain = answer(*args)
    assert "drafting" not in plain
    for how in (("--ngram",), ("--draft-model", tiny_llama_dir, "--draft-tokens", 3)):
        drafted = answer(*args, *how)
        assert drafted["token_ids"] == plain["token_ids"]
        counts = drafted["drafting"]
        assert set(counts) == {"rounds", "drafted", "accepted", "rejected", "emitted"}
        assert counts["emitted"] == 40
        assert counts["accepted"] <= counts["drafted"]


def test_chat_accepts_the_engine_options(
    exl: Command, tiny_llama_dir: Path, adapter_dir: Path
) -> None:
    chat = ("chat", tiny_llama_dir, *GREEDY, "-n", 12)
    plain = exl(*chat, stdin=b"Hello\nAgain\n")
    drafted = exl(*chat, "--ngram", "--cache-type", "fp8", stdin=b"Hello\nAgain\n")
    assert (drafted.code, drafted.err) == (0, "")
    assert exl(*chat, "--ngram", stdin=b"Hello\nAgain\n").out == plain.out
    assert exl(*chat, "--lora", adapter_dir, stdin=b"Hello\nAgain\n").out != plain.out


def test_only_one_kind_of_drafts(generate: Command, exl: Command, tiny_llama_dir: Path) -> None:
    both = ("--ngram", "--draft-model", tiny_llama_dir)
    assert "--draft-model and --ngram" in generate(*both).error_line(2)
    assert "--draft-model and --ngram" in exl("chat", *both).error_line(2)
    assert "--draft-model and --mtp" in generate("--mtp", *both[1:]).error_line(2)
    assert "Add --mtp, --ngram, or" in generate("--draft-tokens", 3).error_line(2)
    for wrong in (0, 65, "many"):
        assert "--draft-tokens" in generate("--ngram", "--draft-tokens", wrong).error_line(2)


def test_missing_draft_model_is_reported_before_loading(
    generate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the weights were loaded"))
    assert "nowhere" in generate("--draft-model", tmp_path / "nowhere").error_line(3)


@pytest.mark.thorough
def test_draft_model_with_another_vocabulary_is_refused_before_loading(
    exl: Command, gemma3_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    real = vars(load)["load_model"]

    def counting(spec: str, *rest: Any) -> Any:
        given.append(spec)
        return real(spec, *rest)

    monkeypatch.setattr(load, "load_model", counting)
    line = exl("generate", "-p", "Hello", "--draft-model", gemma3_path).error_line(2)
    assert "another vocabulary" in line
    assert str(gemma3_path) in line
    assert not given


def test_draft_model_with_a_shorter_context_is_stretched(
    answer: JsonCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tiny_models.save(tiny_models.tiny_llama(max_position_embeddings=128), tmp_path / "s")
    loaded = []
    real = vars(load)["load_model"]

    def keeping(*args: Any) -> Any:
        loaded.append(real(*args))
        return loaded[-1]

    monkeypatch.setattr(load, "load_model", keeping)
    args = ("-n", 200, *GREEDY, "-c", 256)
    answered = answer(*args, "--draft-model", short)
    model, draft = loaded
    assert draft.config.max_seq_len == 256
    assert draft.config.ropes[0].alpha == draft_rope_alpha(256, 128) > 1.0
    assert model.config.ropes[0].alpha == 1.0
    assert answered["token_ids"] == answer(*args)["token_ids"]
    answer("-n", 2, "-c", 128, "--draft-model", short)
    assert loaded[-1].config.ropes[0].alpha == 1.0, "what is long enough stays as it is"


# Adapters


def test_adapters_are_applied_with_their_scales(answer: JsonCommand, adapter_dir: Path) -> None:
    args = ("-n", 16, *GREEDY)
    plain = answer(*args)["token_ids"]
    whole = answer(*args, "--lora", adapter_dir)["token_ids"]
    assert whole != plain
    assert answer(*args, "--lora", f"{adapter_dir}=0")["token_ids"] == plain
    both = (*("--lora", f"{adapter_dir}=0.5"), *("--lora", f"{adapter_dir}=0.5"))
    assert answer(*args, *both)["token_ids"] == whole


def test_unusable_adapters(
    generate: Command, tmp_path: Path, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = random_pairs(tiny_models.tiny_llama(hidden_size=144))
    wrong = write_adapter(tmp_path / "wrong", stored(other))
    assert str(wrong) in generate("--lora", wrong).error_line(3)
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the weights were loaded"))
    (tmp_path / "empty").mkdir()
    for missing in ("none", "empty", "x" * 300):
        line = generate("--lora", tmp_path / missing).error_line(3)
        assert str(tmp_path / missing) in line
    for scale in ("strong", "nan", "inf", ""):
        assert "DIR=SCALE" in generate("--lora", f"{adapter_dir}={scale}").error_line(2)
    assert "no directory" in generate("--lora", "=1").error_line(2)


def test_a_directory_whose_name_has_an_equals_sign(tmp_path: Path) -> None:
    folder = tmp_path / "a=1"
    folder.mkdir()
    assert parse_loras([str(folder), f"{folder}=2"]) == ((folder, 1.0), (folder, 2.0))
    with pytest.raises(RequestError):
        parse_loras([f"{folder}="])


def test_a_json_schema_may_be_given_inline(exl: Command) -> None:
    schema = '{"enum": ["yes", "no"]}'
    done = exl("generate", "-p", "Yes or no?", "-n", 9, "--json-schema", schema)
    assert (done.code, done.out) in ((0, '"yes"'), (0, '"no"'))
    wrong = exl("generate", "-p", "x", "--json-schema", "{oops")
    assert (wrong.code, wrong.out) == (2, "")
    assert "--json-schema: the JSON schema is not JSON" in wrong.err


def test_multi_token_prediction(exl: Command, tmp_path: Path) -> None:
    checkpoint = MtpCheckpoint("qwen3.5")
    folder = checkpoint.save(tmp_path)
    args = ("generate", folder, "-p", "Hello", "-n", 12, "--temp", 0, "--device", "cpu")
    plain = exl(*args)
    drafted = exl(*args, "--mtp", "--draft-tokens", 2)
    assert (drafted.code, drafted.err, drafted.out) == (0, "", plain.out)
    assert "a layer that predicts them (MTP)" in exl("inspect", "model", folder).out
