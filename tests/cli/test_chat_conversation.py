"""Selection of the turns of a conversation that fit the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from exl_cli.chat.conversation import Conversation
from exl_core.errors import RequestError


def encode(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """One token per character."""
    return [ord(char) for message in messages for char in message["content"]]


def text(conversation: Conversation) -> str:
    return "".join(message["content"] for message in conversation.messages)


@pytest.fixture
def long() -> Conversation:
    conversation = Conversation("SYSTEM")
    for number in range(4):
        conversation.say(f"question{number}")
        conversation.answer(f"answer{number}")
    conversation.say("last")
    return conversation


def test_no_turn_is_dropped_while_all_fit(long: Conversation) -> None:
    everything = text(long)
    assert long.fit(encode, len(everything) + 10, 10) == [ord(char) for char in everything]
    assert long.dropped_turns == 0


def test_oldest_turns_go_first_and_the_system_prompt_stays(long: Conversation) -> None:
    everything = text(long)
    long.fit(encode, len(everything) + 10, 11)
    assert text(long) == everything.replace("question0answer0", "")
    assert long.dropped_turns == 1
    assert [message["role"] for message in long.messages[:2]] == ["system", "user"]


def test_last_message_may_use_the_room_reserved_for_the_reply(long: Conversation) -> None:
    assert long.fit(encode, len("SYSTEMlast") + 1, 50) == encode([{"content": "SYSTEMlast"}])
    assert long.dropped_turns == 4


def test_message_longer_than_the_context_is_refused_with_counts(long: Conversation) -> None:
    with pytest.raises(RequestError, match=r"at most 9 tokens.*got 10"):
        long.fit(encode, 10, 5)
    assert "question0" in text(long)


def test_long_conversation_is_not_encoded_once_per_turn() -> None:
    conversation = Conversation("SYSTEM")
    for number in range(1000):
        conversation.say(f"question{number:04}")
        conversation.answer(f"answer{number:04}")
    conversation.say("last")
    calls = 0

    def counted(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        nonlocal calls
        calls += 1
        return encode(messages)

    assert len(conversation.fit(counted, 200, 50)) <= 150
    assert conversation.dropped_turns == 1000 - 6  # room for 6 turns of 22 tokens
    assert calls < 15


def test_take_back_removes_the_unanswered_message() -> None:
    conversation = Conversation(None)
    conversation.say("a")
    conversation.answer("b")
    conversation.say("c")
    conversation.take_back()
    assert text(conversation) == "ab"


def test_clear_keeps_the_system_prompt(long: Conversation) -> None:
    long.clear()
    assert text(long) == "SYSTEM"
