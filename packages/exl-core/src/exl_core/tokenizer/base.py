"""Interface of all tokenizers, and incremental decoding of a stream of ids.

Encoding is done by a tokenizer library. Decoding goes through bytes. Each id has the bytes that it
adds to a text (`token_bytes`). The text is the concatenation of these bytes, decoded as UTF-8. Some
tokenizers remove spaces at the very start of a text. `decode` and `StreamDecoder` follow these
rules only. Therefore the pieces of a stream always join to the decoded whole, and the cost per
token does not depend on the length of the text. Invalid UTF-8 decodes to U+FFFD.

This module knows no file format (`detect.py`) and no library (`hf_json.py`, `spm.py`).
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import index

from exl_core.errors import ContextLengthError, RequestError, wrong_type
from exl_core.tokenizer.long_text import TokenLengths
from exl_core.tokenizer.special_text import SpecialText, Trust

REPLACEMENT = "\ufffd"
_NO_TOKEN = REPLACEMENT.encode()
_CHECKED_CHARS = 256 * 1024  # per step of the Unicode check, each of which holds the GIL


@dataclass(frozen=True, slots=True)
class ControlIds:
    """Ids of the control tokens, and which of them the model's own tokenizer adds to a text."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    unk_id: int | None = None
    pad_id: int | None = None
    adds_bos: bool = False
    adds_eos: bool = False


class Tokenizer(ABC):
    """Converts text to ids and back. Immutable, and safe to share between threads."""

    kind: str  # "bpe", "unigram", "wordpiece", "wordlevel" or "sentencepiece"
    where: str  # path it was loaded from, for messages

    def __init__(self, control: ControlIds, special_tokens: Mapping[str, int], where: str) -> None:
        self.where = where
        self.control = control
        self.special_tokens = dict(special_tokens)
        self._special_text = {number: text for text, number in special_tokens.items()}

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id. Ids below it may be unused."""

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
        """None also for an id outside the vocabulary. Published models have such ids, often the
        size of the vocabulary, and no text needs PAD."""
        pad_id = self.control.pad_id
        return pad_id if pad_id is not None and 0 <= pad_id < self.vocab_size else None

    @property
    def adds_bos(self) -> bool:
        """Whether the model's own tokenizer adds BOS before a text."""
        return self.control.adds_bos

    @property
    def adds_eos(self) -> bool:
        """Whether the model's own tokenizer adds EOS after a text. `encode` never adds EOS."""
        return self.control.adds_eos

    def encode(
        self,
        text: str,
        *,
        allow_special: bool = False,
        add_bos: bool | None = False,
        max_tokens: int | None = None,
        trust: Trust | None = None,
    ) -> list[int]:
        """Token ids of `text`.

        allow_special  convert the text of a special token to that token, as chat templates need.
                       Otherwise such text is tokenized like any other text
        trust          with `allow_special`: do so only where all characters are trusted. A prompt
                       without untrusted special tokens has the same ids as without `trust`
        add_bos        None: as the model's own tokenizer does, unless the text begins with BOS as
                       a special token
        max_tokens     a longer text raises ContextLengthError. Where the tokenizer's kind allows,
                       the time until then depends on `max_tokens` and not on the text's length
        """
        wants_bos = self.adds_bos if add_bos is None else add_bos
        if wants_bos and self.bos_id is None:
            raise RequestError("BOS was asked for, but this tokenizer has none", where=self.where)
        head = [self.bos_id] if wants_bos and self.bos_id is not None else []
        may_have_bos = add_bos is None and allow_special
        kept = 0 if may_have_bos else len(head)
        limit = None if max_tokens is None else max_tokens - kept
        try:
            ids = self._encode_checked(text, limit, trust, allow_special=allow_special)
        except ContextLengthError as error:
            raise ContextLengthError(error.num_tokens + kept, error.max_tokens + kept) from None
        if not head or (may_have_bos and ids[:1] == head):
            return ids
        if max_tokens is not None and len(ids) >= max_tokens:
            raise ContextLengthError(len(ids) + 1, max_tokens)
        return [*head, *ids]

    def prepare_trust(self, template: str) -> None:
        """Builds what `encode` needs for untrusted special tokens: seconds for large vocabularies.

        Without this call, the first text that holds one takes that time.
        """
        del template  # matters where the tokenizer library has to be copied

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raises ContextLengthError if a lower bound proves that `text` exceeds `max_tokens`.

        Takes milliseconds, because the text is not tokenized.
        """
        if len(text) <= max_tokens or self._token_lengths is None:
            return
        at_least = self._token_lengths.lower_bound(text, max_tokens)
        if at_least > max_tokens:
            raise ContextLengthError(at_least, max_tokens)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Special tokens are skipped, or written as their own text."""
        try:
            listed = list(map(index, ids))  # numbers of a tensor or an array become ints
        except TypeError as error:
            raise wrong_type("ids", "a list of token ids", ids, where=self.where) from error
        decoder = self.stream_decoder(skip_special=skip_special)
        return decoder.feed_all(listed) + decoder.flush()

    def stream_decoder(self, *, skip_special: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special=skip_special)

    def token_text(self, token_id: int) -> str:
        """Text of a single token, for display. A special token gives its own text."""
        return self.token_bytes(token_id, skip_special=False).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Bytes that the id adds to a text. An id without a token gives U+FFFD."""
        if token_id < 0:
            raise RequestError("a token id is negative", where=self.where, got=token_id)
        special = self._special_text.get(token_id)
        if special is not None:
            return b"" if skip_special else special.encode()
        piece = self._piece(token_id)
        return _NO_TOKEN if piece is None else piece

    @property
    def base_size(self) -> int:
        """Number of tokens in the vocabulary without tokens that were added to it later."""
        return self.vocab_size

    def raw_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, such as `Ġthe`, `▁the` or `<0x0A>`.

        None for an id without a token.
        """
        return self.token_text(token_id) if self.has_token(token_id) else None

    def tokens_with(self, characters: str) -> frozenset[int]:
        """Ids of the ordinary tokens whose text contains one of these characters."""
        wanted = frozenset(characters)
        ids = (i for i in range(self.vocab_size) if not self.is_special(i) and self.has_token(i))
        return frozenset(i for i in ids if not wanted.isdisjoint(self.token_text(i)))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_text

    def has_token(self, token_id: int) -> bool:
        """Whether the id has a token. A vocabulary may have gaps."""
        return token_id in self._special_text or self._piece(token_id) is not None

    @property
    def leading_spaces_dropped(self) -> int:
        """Number of spaces that `decode` removes at the very start of a text."""
        return 0

    def _encode_checked(
        self, text: str, max_tokens: int | None, trust: Trust | None, *, allow_special: bool
    ) -> list[int]:
        if not isinstance(text, str):
            raise wrong_type("the text", "a str", text, where=self.where)
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        _check_unicode(text)
        if not text:
            ids = []
        elif trust is not None and allow_special:
            ids = self._encode_trusted(text, max_tokens, trust)
        else:
            ids = self._encode_within(text, max_tokens, allow_special=allow_special)
        if max_tokens is not None and len(ids) > max_tokens:
            raise ContextLengthError(len(ids), max_tokens)
        return ids

    @property
    def _token_lengths(self) -> TokenLengths | None:
        """Lower bound on the length of texts. None: no bound is known for this tokenizer."""
        return None

    def _encode_within(
        self, text: str, max_tokens: int | None, *, allow_special: bool
    ) -> list[int]:
        """Like `_encode`, but may stop once there are more than `max_tokens` ids."""
        del max_tokens  # only tokenizers that can cut a text use it
        return self._encode(text, allow_special=allow_special)

    def _encode_trusted(self, text: str, max_tokens: int | None, trust: Trust) -> list[int]:
        del max_tokens
        marks = self._marks(trust.template)
        ids: list[int] = []
        for part in SpecialText(marks, marks).split(text, trust.characters):
            ids += [part] if isinstance(part, int) else self._encode(part, allow_special=False)
        return ids

    def _marks(self, template: str) -> dict[str, int]:
        """Tokens that only trusted text may become."""
        del template  # matters where a vocabulary has added tokens
        return self.special_tokens

    @abstractmethod
    def _encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Ids of a text that is not empty, without BOS and EOS."""

    @abstractmethod
    def _piece(self, token_id: int) -> bytes | None:
        """Bytes of an ordinary token, or None if the id has no token."""


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
    """Decodes ids one at a time. Returns only text that later ids cannot change."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._spaces_to_drop = tokenizer.leading_spaces_dropped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Text that is now complete, or '' while a character lacks bytes."""
        return self.feed_bytes(
            self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        )

    def feed_bytes(self, piece: bytes) -> str:
        """Like `feed`, for bytes that are not a whole token."""
        if self._spaces_to_drop and piece:
            piece = self._without_leading_spaces(piece)
        return self._utf8.decode(piece)

    def feed_all(self, ids: Iterable[int]) -> str:
        return "".join(map(self.feed, ids))

    def copy(self) -> StreamDecoder:
        """Independent decoder with the same state."""
        other = StreamDecoder(self._tokenizer, skip_special=self._skip_special)
        other._spaces_to_drop = self._spaces_to_drop
        other._utf8.setstate(self._utf8.getstate())
        return other

    def flush(self) -> str:
        """Remaining text at the end: U+FFFD for a character that lacks bytes."""
        return self._utf8.decode(b"", final=True)

    def _without_leading_spaces(self, piece: bytes) -> bytes:
        rest = piece.lstrip(b" ")
        dropped = min(len(piece) - len(rest), self._spaces_to_drop)
        # Only spaces at the very start are removed. Any other output ends the removal.
        self._spaces_to_drop = self._spaces_to_drop - dropped if dropped == len(piece) else 0
        return piece[dropped:]
