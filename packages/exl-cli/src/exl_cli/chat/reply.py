"""One reply of a chat: text, reasoning and statistics. A reply may take several requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from exl_cli.chat.screen import ReplyScreen
from exl_core.engine.events import FinishEvent, FinishReason, PrefillEvent, TextEvent
from exl_core.prompt.reasoning import Piece, ReasoningSplitter
from exl_core.speculate.stats import DraftStats
from exl_core.tokenizer.base import REPLACEMENT, Tokenizer


@dataclass(slots=True)
class Reply:
    """Text and reasoning of one reply, with the result of each request that it took."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    parts: list[FinishEvent] = field(default_factory=list)
    was_stopped: bool = False

    def add(self, part: FinishEvent) -> None:
        self.parts.append(part)
        self.token_ids += part.token_ids

    def has_room(self, limit: int | None) -> bool:
        return limit is None or len(self.token_ids) < limit

    @property
    def is_cut_off(self) -> bool:
        return self.parts[-1].reason is FinishReason.LENGTH

    def statistics(self) -> str:
        """One line with context size, cache hits, speed, and accepted drafts if there were any."""
        last = self.parts[-1]
        tokens = sum(len(part.token_ids) for part in self.parts)
        seconds = sum(part.decode_s for part in self.parts)
        rate = (tokens - len(self.parts)) / seconds if seconds > 0 else 0.0
        context = last.prompt_tokens + len(last.token_ids)
        figures = [
            f"context {context} tokens",
            f"{self.parts[0].cached_tokens} of {self.parts[0].prompt_tokens} from the cache",
            f"reply {tokens} tokens at {max(rate, 0.0):.1f} tok/s",
        ]
        stats = [part.drafting for part in self.parts if part.drafting is not None]
        if stats:
            drafting = sum(stats, DraftStats())
            figures.append(f"{drafting.accepted} of {drafting.drafted} draft tokens accepted")
            figures.append(f"efficiency {drafting.efficiency or 0.0:.0%}")
        return " · ".join(figures)


class ReplyWriter:
    """Collects a reply and shows it. A context manager: leaving it completes the reply."""

    def __init__(self, screen: ReplyScreen, splitter: ReasoningSplitter) -> None:
        self.reply = Reply()
        self._screen = screen
        self._splitter = splitter
        self._half = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._take([*self._splitter.feed(self._half), *self._splitter.finish()], 0)
        self._screen.close()
        self.reply.text = self.reply.text.strip()

    def write(self, event: TextEvent) -> None:
        """Show the text of an event.

        An incomplete UTF-8 character is held back: a later event may complete it.
        """
        text = self._half + event.text
        whole = text.rstrip(REPLACEMENT)
        self._half = text[len(whole) :]
        self._take(self._splitter.feed(whole), len(event.token_ids))

    def note_progress(self, event: PrefillEvent) -> None:
        self._screen.read(event.done, event.total)

    def drop_half_character(self, tokenizer: Tokenizer) -> None:
        """Drop the tokens of an incomplete character at the end of a request.

        The next request samples them again.
        """
        if self._half:
            ids = self.reply.token_ids
            while ids and tokenizer.decode(ids).endswith(REPLACEMENT):
                ids.pop()
            self._half = ""

    def _take(self, pieces: list[Piece], tokens: int) -> None:
        if not pieces and self._splitter.is_inside:
            self._screen.think("", tokens)
        for piece in pieces:
            if piece.is_reasoning:
                self.reply.reasoning += piece.text
                self._screen.think(piece.text, tokens)
            else:
                self.reply.text += piece.text
                self._screen.say(piece.text)
