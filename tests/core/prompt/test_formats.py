"""Named prompt formats write the text of the models' cards and of their own templates."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from exl_core.errors import RequestError, TemplateError
from exl_core.prompt.formats import PromptFormat, all_formats, find_format
from exl_core.prompt.reasoning import ReasoningSplitter, ends_inside
from exl_core.prompt.template import ChatTemplate

CARDS = tomllib.loads((Path(__file__).with_name("card_templates.toml")).read_text("utf-8"))
NAMES = tuple(all_formats())
TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you?"},
]
SYSTEM = {"role": "system", "content": "Be brief."}


SHAPES = {"system": [SYSTEM, *TURNS], "one": TURNS[:1], "two": TURNS}


def template_card_of(name: str) -> dict[str, str]:
    """Card with the template of a format; two formats may share one."""
    return CARDS[CARDS[name].get("template_of", name)]


def written(known: PromptFormat, shape: str) -> str:
    """Text of a conversation in a format, BOS and default system prompt included."""
    messages = SHAPES[shape]
    if shape != "system" and known.default_system is not None:
        messages = [{"role": "system", "content": known.default_system}, *messages]
    bos = template_card_of(known.name).get("bos", "") if known.bos else ""
    return bos + known.render(messages)


def confirmed(name: str, shape: str) -> str:
    """Text of the same conversation by the source, or by the model's own template."""
    card, template_card = CARDS[name], template_card_of(name)
    if shape in template_card:
        return template_card[shape]
    template = ChatTemplate(
        template_card["template"],
        bos_token=template_card.get("bos", ""),
        eos_token=template_card.get("eos", ""),
        where=name,
    )
    text: str = template.render(SHAPES[shape], **card.get("variables", {}))
    text = re.sub(card["date"], "", text) if "date" in card else text
    return text + card.get("opened", "")


def test_every_format_has_a_card() -> None:
    assert set(NAMES) == set(CARDS)
    assert len(NAMES) > 20
    assert all(card["source"] for card in CARDS.values())
    names = [name for one in all_formats().values() for name in (one.name, *one.also)]
    assert len(names) == len(set(names))


def test_well_known_formats_exist() -> None:
    asked = (
        "raw llama llama3 codellama qwq chatml tinyllama zephyr deepseek solar openchat nous gemma "
        "cohere phi3 granite granite3 glm vicuna mistral qwen2.5 gemma3 llama2 command-r yi hermes "
        "mistral3 gemma4 falcon3 apertus gptoss glm3x"
    )
    assert all(find_format(name) for name in asked.split())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_equals_that_of_the_source(name: str, shape: str) -> None:
    assert written(find_format(name), shape) == confirmed(name, shape)


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_tags_of_the_format_separate_reasoning_and_answer(name: str) -> None:
    known = find_format(name)
    opening, closing = known.reasoning
    begins_inside = ends_inside(known.render(TURNS), opening)
    reply = f"{'' if begins_inside else opening} hm {closing} Yes"
    pieces = ReasoningSplitter(opening, closing, begins_inside).feed(reply)
    assert [(piece.is_reasoning, piece.text) for piece in pieces] == [(True, "hm"), (False, "Yes")]


@pytest.mark.parametrize("name", NAMES)
def test_placeholders_inside_messages_are_text(name: str) -> None:
    messages = [
        {"role": "system", "content": "{user} {reply}"},
        {"role": "user", "content": "{system} } {x}"},
        {"role": "assistant", "content": "{user}"},
        {"role": "user", "content": "{"},
    ]
    text = find_format(name).render(messages)
    for message in messages:
        assert message["content"] in text


@pytest.mark.parametrize("name", NAMES)
def test_all_turns_are_written_without_a_system_prompt(name: str) -> None:
    known = find_format(name)
    text = known.render(TURNS)
    assert all(str(turn["content"]) in text for turn in TURNS)
    assert text.endswith(known.opening)


def test_a_stop_text_is_a_token_if_the_vocabulary_has_it() -> None:
    chatml, tinyllama = find_format("chatml"), find_format("tinyllama")
    assert chatml.stops({"<|im_end|>": 7}) == (frozenset({7}), ())
    assert chatml.stops({}) == (frozenset(), ("<|im_end|>",))
    assert tinyllama.stops({"<|im_end|>": 7}) == (frozenset({7}), ("<|im_end|>",))


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(RequestError, match="lama3"):
        find_format("lama3")


def test_other_roles_are_refused() -> None:
    with pytest.raises(TemplateError, match="no place"):
        find_format("chatml").render([{"role": "tool", "content": "x"}])
