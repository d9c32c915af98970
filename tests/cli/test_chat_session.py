"""A chat session on a scripted model: turns, commands, reasoning, a full context."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from exl_cli.chat.prompt_style import PromptStyle
from exl_cli.chat.session import ChatSession
from exl_cli.chat.settings import ChatOptions, ChatSettings
from exl_cli.sampling_options import SamplingOptions
from exl_core.engine.engine import Engine
from exl_core.engine.request import Request
from exl_core.prompt.formats import find_format
from exl_core.prompt.template import ChatTemplate
from exl_core.session.runtime import Runtime
from exl_core.speculate.ngram import NgramDrafter
from support.driving import engine_for
from support.profiles import first_by_default
from support.scripted import BOS_ID, EOS_ID, VOCAB_SIZE, ByteTokenizer, Rule, reply_with

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Typist:
    """Types the given lines, then leaves. Records the notes and the drafts that it receives."""

    def __init__(self, lines: Iterable[str | type[BaseException]]) -> None:
        self._lines = iter(lines)
        self.notes: list[str] = []
        self.drafts: list[str] = []

    def ask(self, draft: str = "") -> str:
        self.drafts.append(draft)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def note(self, text: str) -> None:
        self.notes.append(text)


class Chat:
    """A session on a scripted model. `prompts`: text of each prompt that the engine received."""

    def __init__(
        self,
        rule: Rule,
        lines: Iterable[str | type[BaseException]],
        *,
        ctx_size: int = 2048,
        template: str = TEMPLATE,
        prompt_format: str | None = None,
        system: str | None = None,
        no_system: bool = False,
        drafter: NgramDrafter | None = None,
        allow_special: bool = False,
        **chat: Any,
    ) -> None:
        tokenizer = ByteTokenizer()
        engine = engine_for(rule, max_seq_len=ctx_size, drafter=drafter, adapt_drafts=False)
        loaded: Any = SimpleNamespace(
            name="scripted",
            path=Path("scripted"),
            tokenizer=tokenizer,
            config=SimpleNamespace(eos_ids=(EOS_ID,), max_seq_len=ctx_size, vocab_size=VOCAB_SIZE),
            template=ChatTemplate(template, bos_token="", eos_token="", where="made"),
        )
        known = None if prompt_format is None else find_format(prompt_format)
        self.typist: Any = Typist(lines)
        self.style = PromptStyle(loaded, known, allow_special=allow_special)
        first_system = self.style.no_system() if no_system else system
        self.session = ChatSession(
            lambda _: (Runtime(loaded, engine, ctx_size), self.style, first_system),
            None,
            ChatSettings(SamplingOptions(temp=0), ChatOptions(**chat)),
            stop=(),
            terminal=cast(Any, self.typist),
        )
        self.prompts: list[str] = []
        submit = engine.submit

        def remember(request: Request, *filters: Any) -> object:
            self.prompts.append(tokenizer.decode(request.prompt_ids, skip_special=False))
            return submit(request, *filters)

        engine.submit = remember  # type: ignore[method-assign, assignment]

    def run(self) -> Chat:
        assert self.session.run() == 0
        return self

    @property
    def said(self) -> list[str]:
        return [turn["content"] for turn in self.session.conversation.turns]


def test_prompt_has_the_system_prompt_and_all_turns(capfd: pytest.CaptureFixture[str]) -> None:
    chat = Chat(reply_with("Fine."), ["Hello", "", "Again"], system="Be kind.").run()
    first = "[system]Be kind.[user]Hello[assistant]"
    assert chat.prompts == [first, first + "Fine.[user]Again[assistant]"]
    assert chat.said == ["Hello", "Fine.", "Again", "Fine."]
    assert capfd.readouterr().out == "Fine.\nFine.\n"


def test_special_text_in_a_message_is_text_unless_allowed() -> None:
    for allowed in (False, True):
        chat = Chat(reply_with("Fine."), ["Hi<eos>[user]"], system="<bos>", allow_special=allowed)
        ids = chat.style.encode(
            [{"role": "system", "content": "<bos>"}, {"role": "user", "content": "Hi<eos>[user]"}]
        )
        assert chat.run().prompts == ["[system]<bos>[user]Hi<eos>[user][assistant]"]
        assert [i for i in ids if i >= 256] == ([BOS_ID, EOS_ID] if allowed else [])


def test_amnesia_forgets_each_turn() -> None:
    chat = Chat(reply_with("Fine."), ["Hello", "Again"], system="S", amnesia=True).run()
    assert chat.prompts == [f"[system]S[user]{text}[assistant]" for text in ("Hello", "Again")]


def test_set_ban_and_bias_change_the_next_reply() -> None:
    lines = ["Hi", "/set ban cd", "Hi", "/set ban off", f"/set bias {ord('c')}=-inf", "Hi"]
    chat = Chat(reply_with("abcd"), lines, amnesia=True, max_response_tokens=4)
    replies: list[str] = []
    answer = chat.session.conversation.answer

    def remember(text: str, reasoning: str = "") -> None:
        replies.append(text)
        answer(text, reasoning)

    chat.session.conversation.answer = remember  # type: ignore[method-assign]
    chat.run()
    assert replies[0] == "abcd"
    assert "cd" not in replies[1]
    assert "c" not in replies[2]
    assert "ban is now off." in chat.typist.notes


def test_retry_undo_edit_and_clear() -> None:
    lines: list[Any] = ["One", "Two", "/retry", "/undo", "/edit", "Uno", "/edit", KeyboardInterrupt]
    chat = Chat(reply_with("Yes"), lines).run()
    one, two = "[user]One[assistant]", "Yes[user]Two[assistant]"
    assert chat.prompts == [one, one + two, one + two, "[user]Uno[assistant]"]
    assert chat.typist.drafts[5] == "One"
    assert chat.said == ["Uno", "Yes"]  # an edit that is interrupted changes nothing
    chat = Chat(reply_with("Yes"), ["One", "/clear", "Two"], system="S").run()
    assert chat.prompts[-1] == "[system]S[user]Two[assistant]"


def test_failed_commands_are_reported_and_the_chat_continues(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = ["/retry", "/undo", "/edit", "/save", f"/load {tmp_path / 'none'}", "/set", "/set tmep"]
    lines += [
        "/set temp x",
        "/nonsense",
        f"/save {tmp_path}/no/folder",
        "Hello",
        "/oops",
        "",
        "/bye",
    ]
    chat = Chat(reply_with("Yes"), lines).run()
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 10
    assert all(line.startswith("exl: error: ") for line in errors)
    assert chat.said == ["Hello", "Yes"]
    assert not any(chat.typist.drafts)


def test_message_that_does_not_fit_comes_back_as_draft() -> None:
    chat = Chat(reply_with("Yes"), ["Hello", "x" * 300, "Again"], ctx_size=200).run()
    assert chat.typist.drafts == ["", "", "x" * 300, ""]
    assert chat.said == ["Hello", "Yes", "Again", "Yes"]


def test_the_system_prompt_can_be_changed() -> None:
    lines = ["/system Rhyme.", "One", "/system", "/system none", "Two"]
    chat = Chat(reply_with("Yes"), lines).run()
    assert chat.prompts[0] == "[system]Rhyme.[user]One[assistant]"
    assert chat.prompts[1].startswith("[user]One")
    assert "Rhyme." in chat.typist.notes


HAS_DEFAULT = "{% if messages[0].role != 'system' %}[system]Usual.{% endif %}" + TEMPLATE


@pytest.mark.parametrize(
    ("chat", "commands", "is_default"),
    [
        ({}, [], True),
        ({"template": HAS_DEFAULT}, [], True),
        ({"template": HAS_DEFAULT}, ["/system none"], False),
        ({"template": HAS_DEFAULT, "no_system": True}, [], False),
        ({"prompt_format": "chatml", "system": "Brief."}, ["/system none"], False),
    ],
)
def test_suppressed_default_system_prompt_is_shown_as_none(
    chat: dict[str, Any], commands: list[str], is_default: bool
) -> None:
    notes = Chat(reply_with("Yes"), [*commands, "/system", "/show"], **chat).run().typist.notes
    assert ("the model's default" in notes[-2]) is is_default
    assert notes[-1].splitlines()[-1].endswith("the model's default" if is_default else " none")


def test_saved_chat_continues_after_load(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    first = Chat(reply_with("Yes"), ["One", f"/save {path}"], system="S").run()
    second = Chat(reply_with("Yes"), [f"/load {path}", "Two"]).run()
    assert second.prompts == [first.prompts[0] + "Yes[user]Two[assistant]"]
    assert json.loads(path.read_text(encoding="utf-8"))["model"] == "scripted"


@pytest.mark.parametrize("quote", ['"', "'"])
def test_quotes_around_a_path_are_not_part_of_it(tmp_path: Path, quote: str) -> None:
    path = tmp_path / "my chat.json"
    named = f"{quote}{path}{quote}"
    chat = Chat(reply_with("Yes"), ["One", f"/save {named}", "/clear", f"/load {named}"]).run()
    assert [file.name for file in tmp_path.iterdir()] == ["my chat.json"]
    assert chat.said == ["One", "Yes"]


@pytest.mark.parametrize("name", ['a"b".json', '"half.json', "'mixed\"", '"'])
def test_other_quotes_are_part_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Chat(reply_with("Yes"), ["One", f"/save {name}"]).run()
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_reasoning_is_separate_and_not_kept_in_the_context(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rule = reply_with("<think>Hm, two?</think>\n\nTwo.")
    chat = Chat(rule, ["1+1?", "Sure?"]).run()
    out, err = capfd.readouterr()
    assert out == "Two.\nTwo.\n"
    assert "Hm" not in out + err
    assert chat.prompts[1] == "[user]1+1?[assistant]Two.[user]Sure?[assistant]"
    assert chat.session.conversation.turns[1]["reasoning_content"] == "Hm, two?"
    Chat(rule, ["1+1?"], reasoning=True).run()
    assert "Hm, two?" in capfd.readouterr().err


def test_a_template_may_keep_the_reasoning() -> None:
    keeping = TEMPLATE.replace(
        "{{ message.content }}", "({{ message.reasoning_content }}){{ message.content }}"
    )
    chat = Chat(reply_with("<think>Hm</think>Two."), ["1+1?", "Sure?"], template=keeping).run()
    assert "[assistant](Hm)Two.[user]" in chat.prompts[1]


def test_template_may_open_the_reasoning(capfd: pytest.CaptureFixture[str]) -> None:
    opening = TEMPLATE.replace("[assistant]", "[assistant]<think>\n")
    chat = Chat(reply_with("Hm</think>Two."), ["1+1?"], template=opening).run()
    assert chat.said == ["1+1?", "Two."]
    assert capfd.readouterr().out == "Two.\n"


STORY = "".join(f"{number:02} éüöä " for number in range(40)) + "Ende ü."


def rule_for_c(history: Sequence[int]) -> Tensor:
    """A long reply to a message of "c"s, a short one to any other."""
    last = bytes(history).rpartition(b"[user]")[2]
    return reply_with(STORY if last.startswith(b"c") else "short")(history)


@pytest.mark.parametrize(  # with these sizes the context ends at each byte of a character
    "beyond", first_by_default(range(4))
)
def test_reply_that_fills_the_context_continues_with_fewer_turns(
    beyond: int, capfd: pytest.CaptureFixture[str]
) -> None:
    ctx_size = len(STORY.encode()) + 210 + beyond
    lines = ["a" * 120, "b" * 120, "c" * 10]
    chat = Chat(rule_for_c, lines, ctx_size=ctx_size, system="Be kind.").run()
    assert chat.said[-1] == STORY
    assert capfd.readouterr().out.endswith(f"{STORY}\n")
    assert len(chat.prompts) > 3  # the last reply took more than one request
    assert all(prompt.startswith("[system]Be kind.") for prompt in chat.prompts)
    assert "[user]aaa" not in chat.prompts[-1]
    assert any("were dropped" in note for note in chat.typist.notes)
    assert chat.said[0] == "a" * 120  # dropped from the context, kept in the conversation


def test_a_reply_that_alone_fills_the_context_is_cut_off() -> None:
    chat = Chat(reply_with(STORY), ["Hello"], ctx_size=300).run()
    assert 180 < len(chat.said[1]) < 300
    assert STORY.startswith(chat.said[1])
    assert any("Cut off" in note for note in chat.typist.notes)


def test_token_limit_counts_over_all_requests_of_a_reply() -> None:
    rule = reply_with("abcdefgh" * 100)
    chat = Chat(rule, ["A" * 30, "B"], ctx_size=400, max_response_tokens=220).run()
    assert [len(text) for text in chat.said] == [30, 220, 1, 220]
    assert len(chat.prompts) > 2


def test_ctrl_c_keeps_the_partial_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = Engine.step, iter(range(1000))

    def interrupted(engine: Engine, *request_ids: Any) -> Any:
        events = step(engine, *request_ids)
        if next(count) == 10:
            signal.raise_signal(signal.SIGINT)
        return events

    monkeypatch.setattr(Engine, "step", interrupted)
    chat = Chat(
        reply_with(STORY), ["Hello", "/stats", "/set max-response-tokens 20", "Go on"]
    ).run()
    assert chat.said[1] and STORY.startswith(chat.said[1])
    assert chat.typist.notes[0] == "Stopped."
    assert chat.said[1] in chat.prompts[1]
    assert any(note.startswith("context ") and "tok/s" in note for note in chat.typist.notes)


def test_stats_show_accepted_drafts() -> None:
    rule = reply_with("one two three one two three one two three. ")
    chat = Chat(rule, ["Hello"], stats=True, drafter=NgramDrafter(max_tokens=4)).run()
    (figures,) = chat.typist.notes
    found = re.search(
        r"reply (\d+) tokens .* (\d+) of (\d+) draft tokens accepted · efficiency", figures
    )
    assert found is not None
    reply, right, guessed = map(int, found.groups())
    assert 0 < right <= guessed
    assert reply == 44  # including the stop token


def test_named_format_sets_stop_text_and_system_prompt() -> None:
    chat = Chat(
        reply_with("Yes.<|im_end|>never"),
        ["Hello", "Again"],
        prompt_format="smollm2",
        system=find_format("smollm2").default_system,
    ).run()
    assert chat.said == ["Hello", "Yes.", "Again", "Yes."]
    assert chat.prompts[1].endswith(
        "Yes.<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "named SmolLM" in chat.prompts[0]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "prompt_format", "uses_default", "expected"),
    [
        (CHATML, "chatml", True, None),
        (CHATML, "qwq", True, "'<think>"),
        (REFUSING + CHATML, "chatml", True, None),
        (REFUSING + CHATML, "phi4", True, "im_sep"),
        ("{{ raise_exception('never') }}", "chatml", True, None),
        (CHATML, "smollm2", True, "AI assistant"),  # the format's default system prompt
        (CHATML, "smollm2", False, None),
    ],
)
def test_format_that_differs_from_the_template_names_the_difference(
    template: str, prompt_format: str, uses_default: bool, expected: str | None
) -> None:
    chat = Chat(reply_with("x"), [], template=template, prompt_format=prompt_format)
    said = chat.style.disagreement(uses_default=uses_default)
    assert (said is None) == (expected is None), said
    assert said is None or (expected is not None and expected in said)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATE, "[user]Hi[assistant]"),
        (HAS_DEFAULT, "[system][user]Hi[assistant]"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
            + TEMPLATE,
            "[user]Hi[assistant]",
        ),
    ],
    ids=["none of its own", "one of its own", "none allowed"],
)
def test_no_system_prompt_means_none(template: str, expected: str) -> None:
    chat = Chat(reply_with("Yes"), ["Hi"], template=template, no_system=True).run()
    assert chat.prompts == [expected]
