"""What every tokenizer can do, and text that grows one token at a time.

A tokenizer turns text into ids with its own library and ids into text through bytes: each id has
the bytes that it adds (`token_bytes`), a text is the joined bytes read as UTF-8, and some
tokenizers drop spaces at the very start. `decode` and `StreamDecoder` both follow these two rules
and nothing else, which is why the pieces of a stream always join to the decoded whole, at a cost
per token that does not depend on the length of the text. Bytes that are not UTF-8 read as U+FFFD.

This module knows no file format (`detect.py`) and no library (`hf_json.py`, `spm.py`).
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exl_core.errors import ContextLengthError, RequestError
from exl_core.tokenizer.long_text import TokenLengths

REPLACEMENT = "\ufffd"
_NO_TOKEN = REPLACEMENT.encode()
_CHECKED_CHARS = 256 * 1024  # at a time: the interpreter is held meanwhile


@dataclass(frozen=True, slots=True)
class ControlIds:
    """The ids with a role, and what the model's own tokenizer adds around a text."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    unk_id: int | None = None
    pad_id: int | None = None
    adds_bos: bool = False
    adds_eos: bool = False


class Tokenizer(ABC):
    """Text to ids and back. Immutable after construction and safe to share between threads."""

    kind: str  # "bpe", "unigram", "wordpiece", "wordlevel" or "sentencepiece"
    where: str  # what it was loaded from, for messages

    def __init__(self, control: ControlIds, special_tokens: Mapping[str, int], where: str) -> None:
        self.where = where
        self.control = control
        self.special_tokens = dict(special_tokens)
        self._special_text = {number: text for text, number in special_tokens.items()}

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id; ids below it may be unused."""

    @property
    def bos_id(self) -> int | None:
        return self.control.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.control.eos_ids

    @property
    def unk_id(self) -> int | None:
        return self.control.unk_id

    @property
    def pad_id(self) -> int | None:
        return self.control.pad_id

    @property
    def adds_bos(self) -> bool:
        """Whether the model's own tokenizer puts BOS before a text."""
        return self.control.adds_bos

    @property
    def adds_eos(self) -> bool:
        """Whether the model's own tokenizer puts EOS after a text. `encode` never does."""
        return self.control.adds_eos

    def encode(
        self,
        text: str,
        *,
        allow_special: bool = False,
        add_bos: bool | None = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The ids of `text`.

        With `allow_special` the text of a special token becomes that token, as a chat template
        needs it; without it such text is text like any other. `add_bos=None` does what the model's
        own tokenizer does; a BOS that the text itself spells out is not looked for.

        A text of more than `max_tokens` raises ContextLengthError, after time that depends on
        `max_tokens` and not on the text, as far as the tokenizer's kind allows.
        """
        wants_bos = self.adds_bos if add_bos is None else add_bos
        if wants_bos and self.bos_id is None:
            raise RequestError("BOS was asked for, but this tokenizer has none", where=self.where)
        head = [self.bos_id] if wants_bos and self.bos_id is not None else []
        limit = None if max_tokens is None else max_tokens - len(head)
        try:
            ids = self._encode_checked(text, limit, allow_special=allow_special)
        except ContextLengthError as error:
            num_tokens = error.num_tokens + len(head)
            raise ContextLengthError(num_tokens, error.max_tokens + len(head)) from None
        return [*head, *ids] if head else ids

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raises ContextLengthError if `text` is certain to have more than `max_tokens`. Takes
        milliseconds; the text is not tokenized."""
        if len(text) <= max_tokens or self._token_lengths is None:
            return
        at_least = self._token_lengths.lower_bound(text, max_tokens)
        if at_least > max_tokens:
            raise ContextLengthError(at_least, max_tokens)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; special tokens are left out, or written as their own text."""
        decoder = self.stream_decoder(skip_special=skip_special)
        return decoder.feed_all(ids) + decoder.flush()

    def stream_decoder(self, *, skip_special: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special=skip_special)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, for display; special tokens show theirs."""
        return self.token_bytes(token_id, skip_special=False).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """What the id adds to a text. An id without a token reads as U+FFFD."""
        if token_id < 0:
            raise RequestError("a token id is negative", where=self.where, got=token_id)
        special = self._special_text.get(token_id)
        if special is not None:
            return b"" if skip_special else special.encode()
        piece = self._piece(token_id)
        return _NO_TOKEN if piece is None else piece

    def tokens_with(self, characters: str) -> frozenset[int]:
        """The ordinary tokens whose text has one of these characters."""
        wanted = frozenset(characters)
        ids = (i for i in range(self.vocab_size) if not self.is_special(i) and self.has_token(i))
        return frozenset(i for i in ids if not wanted.isdisjoint(self.token_text(i)))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_text

    def has_token(self, token_id: int) -> bool:
        """Whether the id stands for anything; a vocabulary may have gaps."""
        return token_id in self._special_text or self._piece(token_id) is not None

    @property
    def leading_spaces_dropped(self) -> int:
        """How many spaces at the very start of a text `decode` takes away."""
        return 0

    def _encode_checked(
        self, text: str, max_tokens: int | None, *, allow_special: bool
    ) -> list[int]:
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        _check_unicode(text)
        ids = self._encode_within(text, max_tokens, allow_special=allow_special) if text else []
        if max_tokens is not None and len(ids) > max_tokens:
            raise ContextLengthError(len(ids), max_tokens)
        return ids

    @property
    def _token_lengths(self) -> TokenLengths | None:
        """Gives a lower bound on the length of texts; None: none is known for this tokenizer."""
        return None

    def _encode_within(
        self, text: str, max_tokens: int | None, *, allow_special: bool
    ) -> list[int]:
        """`_encode` that may stop, with more than `max_tokens` ids, once there are so many."""
        del max_tokens  # overridden by tokenizers that can cut a text
        return self._encode(text, allow_special=allow_special)

    @abstractmethod
    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        """The ids of text that is not empty, without BOS and EOS."""

    @abstractmethod
    def _piece(self, token_id: int) -> bytes | None:
        """The bytes of an ordinary token, None when the id has no token."""


def _check_unicode(text: str) -> None:
    for start in range(0, len(text), _CHECKED_CHARS):
        try:
            text[start : start + _CHECKED_CHARS].encode("utf-8")
        except UnicodeEncodeError as error:
            place = start + error.start
            raise RequestError(
                f"the text holds half of a surrogate pair at character {place}",
                expected="text that can be written as UTF-8",
                got=ascii(text[place]),
            ) from error


class StreamDecoder:
    """Text from ids, one at a time; gives out only what later ids cannot change."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._spaces_to_drop = tokenizer.leading_spaces_dropped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that is now certain; '' while a character is incomplete."""
        return self.feed_bytes(
            self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        )

    def feed_bytes(self, piece: bytes) -> str:
        """The same for bytes that are no whole token."""
        if self._spaces_to_drop and piece:
            piece = self._without_leading_spaces(piece)
        return self._utf8.decode(piece)

    def feed_all(self, ids: Iterable[int]) -> str:
        return "".join(map(self.feed, ids))

    def copy(self) -> StreamDecoder:
        """One that goes on from here by itself."""
        other = StreamDecoder(self._tokenizer, skip_special=self._skip_special)
        other._spaces_to_drop = self._spaces_to_drop
        other._utf8.setstate(self._utf8.getstate())
        return other

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        return self._utf8.decode(b"", final=True)

    def _without_leading_spaces(self, piece: bytes) -> bytes:
        rest = piece.lstrip(b" ")
        dropped = min(len(piece) - len(rest), self._spaces_to_drop)
        # Only spaces at the very start count: anything else that is written ends the search.
        self._spaces_to_drop = self._spaces_to_drop - dropped if dropped == len(piece) else 0
        return piece[dropped:]
