"""Named prompt formats write what the models' cards and their own templates write."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from exl_core.errors import RequestError, TemplateError
from exl_core.prompt.formats import PromptFormat, all_formats, find_format
from exl_core.prompt.template import ChatTemplate

CARDS = tomllib.loads((Path(__file__).with_name("card_templates.toml")).read_text("utf-8"))
NAMES = tuple(all_formats())
TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you?"},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def source_of(name: str) -> dict[str, str]:
    """The entry that has the template: two formats may be of one."""
    return CARDS[CARDS[name].get("template_of", name)]


def with_bos(prompt_format: PromptFormat, messages: list[dict[str, str]]) -> str:
    """The text that the tokens stand for, BOS included."""
    bos = source_of(prompt_format.name).get("bos", "") if prompt_format.bos else ""
    return bos + prompt_format.render(messages)


def of_the_card(name: str, messages: list[dict[str, str]]) -> str:
    """What the card says of the conversation; without a template it says it of one only."""
    card = CARDS[name]
    source = source_of(name)
    if "template" not in source:
        assert messages == [SYSTEM, *TURNS]
        return card["expected"]
    template = ChatTemplate(
        source["template"],
        bos_token=source.get("bos", ""),
        eos_token=source.get("eos", ""),
        where=name,
    )
    return template.render(messages, **card.get("variables", {}))


def has_template(name: str) -> bool:
    return "template" in source_of(name)


def test_there_are_more_than_twenty_and_each_has_its_card() -> None:
    assert set(NAMES) == set(CARDS)
    assert len(NAMES) > 20


def test_those_that_people_know_are_there() -> None:
    asked = (
        "raw llama llama3 codellama qwq chatml tinyllama zephyr deepseek solar openchat nous gemma "
        "cohere phi3 granite granite3 glm vicuna mistral qwen2.5 gemma3 llama2 command-r yi hermes"
    )
    assert all(find_format(name) for name in asked.split())


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_with_a_system_prompt_is_that_of_the_card(name: str) -> None:
    messages = [SYSTEM, *TURNS]
    assert with_bos(find_format(name), messages) == of_the_card(name, messages)


@pytest.mark.parametrize("name", [*filter(has_template, NAMES)])
@pytest.mark.parametrize("messages", [TURNS[:1], TURNS], ids=["one", "two"])
def test_without_a_system_prompt_the_default_is_that_of_the_card(
    name: str, messages: list[dict[str, str]]
) -> None:
    known = find_format(name)
    default = known.default_system
    system = [] if default is None else [{"role": "system", "content": default}]
    assert with_bos(known, [*system, *messages]) == of_the_card(name, messages)


@pytest.mark.parametrize("name", NAMES)
def test_what_looks_like_a_place_for_text_is_text(name: str) -> None:
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
def test_nothing_is_lost_without_a_system_prompt(name: str) -> None:
    known = find_format(name)
    text = known.render(TURNS)
    assert all(str(turn["content"]) in text for turn in TURNS)
    assert text.endswith(known.opening)


def test_a_stop_is_a_token_where_there_is_one() -> None:
    chatml, tinyllama = find_format("chatml"), find_format("tinyllama")
    assert chatml.stops({"<|im_end|>": 7}) == (frozenset({7}), ())
    assert chatml.stops({}) == (frozenset(), ("<|im_end|>",))
    assert tinyllama.stops({"<|im_end|>": 7}) == (frozenset({7}), ("<|im_end|>",))


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(RequestError, match="lama3"):
        find_format("lama3")


def test_other_roles_are_refused() -> None:
    with pytest.raises(TemplateError, match="no place"):
        find_format("chatml").render([{"role": "tool", "content": "x"}])
