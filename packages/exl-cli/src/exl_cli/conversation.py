"""The turns of a chat, and which of them still fit.

Knows messages and a function that turns them into token ids; neither model nor terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from exl_core.errors import RequestError

Encode = Callable[[Sequence[Mapping[str, object]]], list[int]]


class Conversation:
    """System prompt and turns. When the context is full, the oldest turns go first."""

    def __init__(self, system: str | None) -> None:
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.dropped_turns = 0

    @property
    def messages(self) -> list[dict[str, str]]:
        return self._with_system(self._messages)

    def clear(self) -> None:
        self._messages.clear()

    def say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forget the last message: it could not be answered."""
        self._messages.pop()

    def fit(self, encode: Encode, ctx_size: int, reserve: int) -> list[int]:
        """Token ids of the conversation with room for a reply of `reserve` tokens.

        Drops whole turns (a user message and its reply) from the front. The last user message is
        never dropped: where it alone is too long, less room for the reply is taken, and where it
        does not fit at all the error has the numbers and nothing is forgotten.
        """
        kept = self._messages
        token_ids = encode(self._with_system(kept))
        while len(token_ids) + reserve > ctx_size and len(kept) > 1:
            kept = kept[2:]
            token_ids = encode(self._with_system(kept))
        if len(token_ids) + 1 > ctx_size:
            raise RequestError(
                "the message does not fit into the context",
                expected=f"at most {ctx_size - 1} tokens with its template",
                got=len(token_ids),
                next_step="Shorten it, or give more room with --ctx-size.",
            )
        self.dropped_turns += (len(self._messages) - len(kept)) // 2
        self._messages = kept
        return token_ids

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*head, *messages]
