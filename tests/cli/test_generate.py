"""`exl generate` on a tiny model: stdout, the fields of --json, limits, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands import Command, JsonCommand

GREEDY = ("--temp", "0")


@pytest.fixture
def generate(exl: Command, tiny_llama_dir: Path) -> Command:
    """`generate(*args)` on the tiny model."""
    return lambda *args, **kwargs: exl("generate", "-m", tiny_llama_dir, *args, **kwargs)


@pytest.fixture
def generate_json(generate: Command) -> JsonCommand:
    def run(*args: object, **kwargs: bytes) -> dict[str, object]:
        done = generate("--json", *args, **kwargs)
        assert (done.code, done.err) == (0, "")
        assert done.out.count("\n") == 1
        return json.loads(done.out)

    return run


def test_stdout_is_the_text_and_nothing_else(generate: Command, generate_json: JsonCommand) -> None:
    args = ("-p", "Hello", "-n", 24, *GREEDY)
    answer = generate_json(*args)
    plain = generate(*args)
    assert (plain.code, plain.err) == (0, "")
    assert plain.out == answer["text"] != ""


def test_json_holds_everything(generate_json: JsonCommand, tiny_llama_dir: Path) -> None:
    answer = generate_json("-p", "Hello", "-n", 24, "--seed", 7)
    assert set(answer) == {
        *("schema_version", "model", "text", "token_ids", "finish_reason", "stopped_by", "seed"),
        *("usage", "timings"),
    }
    assert answer["schema_version"] == 1
    assert answer["model"] == tiny_llama_dir.name
    assert answer["seed"] == 7
    assert answer["finish_reason"] in ("length", "stop")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len("Hello")
    assert usage["completion_tokens"] == len(answer["token_ids"]) <= 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    timings = answer["timings"]
    assert set(timings) == {"load_s", "prefill_s", "prefill_tok_s", "decode_s", "decode_tok_s"}
    assert all(value >= 0 for value in timings.values())


def test_random_seed_is_shown_and_repeats_the_text(generate_json: JsonCommand) -> None:
    first = generate_json("-p", "Hello", "-n", 16)
    again = generate_json("-p", "Hello", "-n", 16, "--seed", first["seed"])
    other = generate_json("-p", "Hello", "-n", 16)
    assert again["token_ids"] == first["token_ids"]
    assert other["seed"] != first["seed"]
    assert other["token_ids"] != first["token_ids"]


def test_n_limits_the_length(generate_json: JsonCommand) -> None:
    answer = generate_json("-p", "Hello", "-n", 5, *GREEDY)
    assert len(answer["token_ids"]) == 5
    assert answer["finish_reason"] == "length"


def test_unlimited_reply_fills_the_context(generate_json: JsonCommand) -> None:
    answer = generate_json("-p", "Hello", "-n", -1, "-c", 40, "--seed", 3)
    filled = answer["usage"]["total_tokens"]
    assert filled == 40 if answer["finish_reason"] == "length" else filled <= 40


def test_stop_text_ends_the_reply_and_is_not_part_of_it(generate_json: JsonCommand) -> None:
    whole = generate_json("-p", "Hello", "-n", 24, *GREEDY)["text"]
    stop = whole[6:8]
    answer = generate_json("-p", "Hello", "-n", 24, *GREEDY, "--stop", "\0never", "--stop", stop)
    assert answer["text"] == whole[: whole.index(stop)]
    assert (answer["finish_reason"], answer["stopped_by"]) == ("stop", stop)


def test_prompt_sources_give_the_same_prompt(
    generate_json: JsonCommand, generate: Command, tmp_path: Path
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Hello\nyou\n", encoding="utf-8")
    args = ("-n", 12, *GREEDY)
    texts = {
        generate_json("-p", "Hello\nyou", *args)["text"],
        generate_json("-f", path, *args)["text"],
        generate_json(*args, stdin=b"Hello\nyou\n")["text"],
        generate_json("-p", "-", *args, stdin=b"Hello\nyou\n")["text"],
        generate_json("-p", "Hello", *args, stdin=b"you\n")["text"],
    }
    assert len(texts) == 1


def test_chat_applies_the_template(generate_json: JsonCommand) -> None:
    plain = generate_json("-p", "<s>[user]Hello[assistant]", "--parse-special", "-n", 8, *GREEDY)
    chat = generate_json("--chat", "-p", "Hello", "-n", 8, *GREEDY)
    assert chat["usage"]["prompt_tokens"] == 1 + len("[user]Hello[assistant]")
    assert chat["token_ids"] == plain["token_ids"]
    system = generate_json("--chat", "--system", "Be brief", "-p", "Hello", "-n", 1)
    assert system["usage"]["prompt_tokens"] == 1 + len("[system]Be brief[user]Hello[assistant]")


def test_format_replaces_the_template(
    generate_json: JsonCommand, exl: Command, tiny_llama_dir: Path
) -> None:
    chat = ("--chat", "-p", "Hello", "-n", 8, *GREEDY)
    text = "<s>System:\nBe brief.\n\nQuestion:\nHello\n\nAnswer:\n"
    plain = generate_json("-p", text, "--parse-special", "-n", 8, *GREEDY)
    named = exl(
        "generate", "-m", tiny_llama_dir, *chat, "--format", "granite", "--system", "Be brief.",
        "--json",
    )  # fmt: skip
    assert "--format granite and the model's own template disagree" in named.err
    parsed = json.loads(named.out)
    assert (
        parsed["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] - 1
    )  # the format adds no BOS
    assert generate_json(*chat, "--no-system")["text"] == generate_json(*chat)["text"]


def test_format_without_template_stops_at_the_end_of_turn(exl: Command, damaged_dir: Path) -> None:
    (damaged_dir / "chat_template.jinja").unlink()
    done = exl("generate", damaged_dir, "--chat", "--format", "raw", "-p", "Hello", "-n", 4)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--format", "llama3"), "--chat"),
        (("--no-system",), "--chat"),
        (("--chat", "--format", "lama3"), "llama3"),
        (("--chat", "--system", "x", "--no-system"), "--no-system"),
    ],
)
def test_conversation_options_are_checked_before_the_model_is_resolved(
    exl: Command, args: tuple[str, ...], expected: str
) -> None:
    assert expected in exl("generate", "-m", "no-such-model", "-p", "x", *args).error_line(2)


def test_special_tokens_in_a_prompt_are_text_by_default(generate_json: JsonCommand) -> None:
    assert generate_json("-p", "</s>", "-n", 1)["usage"]["prompt_tokens"] == 4
    special = generate_json("-p", "</s>", "--parse-special", "-n", 1)
    assert special["usage"]["prompt_tokens"] == 1


def test_special_text_in_a_message_is_text_unless_allowed(
    generate_json: JsonCommand, generate: Command
) -> None:
    asked = ("--chat", "-p", "Hello</s>", "-n", 1)
    text = "[user]Hello</s>[assistant]"
    assert generate_json(*asked)["usage"]["prompt_tokens"] == 1 + len(text)
    allowed = generate_json(*asked, "--allow-special")
    assert allowed["usage"]["prompt_tokens"] == 1 + len(text) - 3
    assert "Add --chat" in generate("-p", "x", "--allow-special").error_line(2)


def test_a_context_beyond_the_model_is_a_warning(generate: Command) -> None:
    done = generate("-p", "x" * 600, "-n", 4, "-c", 1024, *GREEDY, "-q")
    assert done.code == 0
    assert "warning: a context of 1024 tokens is longer than the model's 512" in done.err
    assert done.out


def test_rope_options_change_the_reply_and_stretch_the_context(
    generate: Command, generate_json: JsonCommand
) -> None:
    args = ("-p", "Hello there, you", "-n", 24, *GREEDY)
    plain = generate_json(*args)["token_ids"]
    for option in ("--rope-scale", "--rope-alpha", "--rope-yarn"):
        stretched = generate_json(*args, option, 4, "-c", 1024)  # no warning: stderr is empty
        assert stretched["token_ids"] != plain, option
    assert "longer than" in generate(*args, "--rope-yarn", 2, "-c", 2048).err
    assert "--rope-scale or --rope-yarn" in generate(
        *args, "--rope-scale", 2, "--rope-yarn", 2
    ).error_line(2)
    assert "above 0" in generate(*args, "--rope-alpha", 0).error_line(2)


def test_truncate_left_keeps_the_end_of_the_prompt(
    generate: Command, generate_json: JsonCommand
) -> None:
    text = "".join(chr(97 + i % 26) for i in range(600))
    args = ("-n", 12, "-c", 64, *GREEDY)
    assert "leaves no room" in generate("-p", text, *args).error_line(2)
    done = generate("-p", text, *args, "--truncate-left", "-q")
    assert done.code == 0
    kept = 64 - 12
    assert f"dropped {600 - kept} of the prompt's 600 tokens" in done.err
    assert done.out == generate("-p", text[-kept:], *args).out != ""
    fitting = generate("-p", text[:40], *args, "--truncate-left")
    assert (fitting.code, fitting.err) == (0, ""), "nothing dropped, nothing said"
    assert "no room for a prompt" in generate(
        "-p", text, "-n", 64, "-c", 64, "--truncate-left"
    ).error_line(2)
    assert "--chat or" in generate("-p", text, "--chat", "--truncate-left").error_line(2)


def test_prompt_longer_than_the_context_is_refused_with_counts(generate: Command) -> None:
    line = generate("-p", "x" * 600, "-n", 4).error_line(2)
    assert "600 tokens" in line
    assert "512" in line
    line = generate("-p", "x" * 64, "-c", 64).error_line(2)
    assert "at most 63 tokens" in line
    assert "own context is 512" in line


def test_prompt_of_megabytes_is_refused_without_full_tokenization(generate: Command) -> None:
    text = b"many words " * 700_000
    for options in ((), ("--chat",)):
        line = generate("-c", 64, *options, stdin=text).error_line(2)
        assert "the prompt has at least" in line and "at most 63 tokens" in line
        num_tokens = int(line.split("at least ")[1].split()[0])
        assert num_tokens < len(text) / 10, "counting stopped early"


def test_chat_without_a_template_is_an_error(exl: Command, damaged_dir: Path) -> None:
    (damaged_dir / "chat_template.jinja").unlink()
    line = exl("generate", "-m", damaged_dir, "--chat", "-p", "Hello").error_line(3)
    assert "no chat template" in line


def test_broken_template_is_an_error(exl: Command, damaged_dir: Path) -> None:
    (damaged_dir / "chat_template.jinja").write_text("{% if %}", encoding="utf-8")
    line = exl("generate", "-m", damaged_dir, "--chat", "-p", "Hello").error_line(3)
    assert "template" in line


def test_model_as_argument(exl: Command, tiny_llama_dir: Path) -> None:
    done = exl("generate", tiny_llama_dir, "-p", "Hello", "-n", 4, *GREEDY)
    assert (done.code, done.err) == (0, "")
    assert done.out


@pytest.mark.thorough
def test_exact_computes_with_dequantized_weights(exl: Command) -> None:
    prompt = ("generate", "-p", "The capital of France is", "-n", "8", "--temp", "0", "-q")
    fast, exact = exl(*prompt), exl(*prompt, "--exact")
    assert (exact.code, exact.err) == (0, "")
    assert " Paris" in fast.out
    assert " Paris" in exact.out
