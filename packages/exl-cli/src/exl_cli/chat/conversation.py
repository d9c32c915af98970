"""Turns of a chat, and the selection of those that fit into the context.

Knows messages and a function that encodes them to token ids; neither the model nor the terminal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from exl_core.errors import RequestError

Message = dict[str, str]
"""Keys `role` and `content`; a reply with reasoning also has `reasoning_content`."""
Encode = Callable[[Sequence[Mapping[str, object]]], list[int]]


class Conversation:
    """System prompt and turns.

    When the context is full, the oldest turns are dropped from it first. They remain part of the
    conversation.
    """

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[Message] = []
        self._first = 0  # index of the first turn in the context; even: a user message

    @property
    def messages(self) -> list[Message]:
        """System prompt and turns that are in the context."""
        return self._with_system(self._first)

    @property
    def dropped_turns(self) -> int:
        """Number of message and reply pairs that are no longer in the context."""
        return self._first // 2

    def clear(self) -> None:
        self.replace(())

    def replace(self, turns: Iterable[Message]) -> None:
        self.turns = list(turns)
        self._first = 0

    def say(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str, reasoning: str = "") -> None:
        message = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        self.turns.append(message)

    def take_back(self) -> str | None:
        """Remove and return the last user message, with its reply if any; None if there is none."""
        if not self.turns:
            return None
        last = self.turns.pop()
        if last["role"] != "user":
            last = self.turns.pop()
        self._first = min(self._first, len(self.turns))
        return last["content"]

    def fit(
        self, encode: Encode, ctx_size: int, reserve: int, *, advice: str = "Shorten it."
    ) -> list[int]:
        """Token ids of the conversation, leaving space for a reply of `reserve` tokens.

        Drops whole turns (a user message and its reply) from the front. The last user message is
        never dropped. If it is too long to leave `reserve` tokens, the reply gets less space. If it
        does not fit at all, RequestError has the numbers and `advice`, and no turn is dropped.
        """
        first = self._first
        token_ids = encode(self._with_system(first))
        later = range(first + 2, len(self.turns), 2)
        if len(token_ids) + reserve > ctx_size and later:

            def fits(candidate: int) -> bool:
                return len(encode(self._with_system(candidate))) + reserve <= ctx_size

            first = later[min(bisect_left(later, True, key=fits), len(later) - 1)]
            token_ids = encode(self._with_system(first))
        if len(token_ids) + 1 > ctx_size:
            raise RequestError(
                "the message does not fit into the context",
                expected=f"at most {ctx_size - 1} tokens with its template",
                got=len(token_ids),
                next_step=advice,
            )
        self._first = first
        return token_ids

    def _with_system(self, first: int) -> list[Message]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.turns[first:]]
