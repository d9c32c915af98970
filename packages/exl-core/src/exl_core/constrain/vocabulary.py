"""Tokens of a model as bytes, and sets of tokens as bitmasks.

A mask is int32 [ceil(vocab_size / 32)]. Bit `i % 32` of word `i // 32` states whether token `i` is
allowed. Special tokens and EOS are not text and have no bytes. A model's vocabulary is often
padded: ids that the tokenizer does not have are in no mask. All requests and threads of an engine
share one vocabulary. Its tables are built once, at first use or by `prepare`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from exl_core.constrain.limits import CompileLimits
from exl_core.ops.masks import WORD_BITS, pack, unpack
from exl_core.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")


class Vocabulary:
    """Tokens that can be sampled: those of the tokenizer below the model's `vocab_size`."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, limits: CompileLimits | None = None
    ) -> None:
        """`limits` apply to each constraint that is compiled for this vocabulary."""
        self.tokenizer = tokenizer
        self.limits = limits or CompileLimits()
        self.size = vocab_size
        self.num_words = -(-vocab_size // WORD_BITS)
        self.num_tokens = min(vocab_size, tokenizer.vocab_size)
        self.eos_ids = tuple(i for i in tokenizer.eos_ids if i < self.num_tokens)
        self._lock = Lock()
        self._token_bytes: tuple[bytes, ...] | None = None
        self._sorted: SortedTokens | None = None
        self._guide: LLTokenizer | None = None
        self._everything: Tensor | None = None

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """Bytes that each token adds to a text, by id; b"" if it adds none."""
        with self._lock:
            return self._read_bytes()

    @property
    def sorted_tokens(self) -> SortedTokens:
        """Tokens sorted by their bytes."""
        with self._lock:
            if self._sorted is None:
                self._sorted = SortedTokens(self._read_bytes())
            return self._sorted

    @property
    def guide(self) -> LLTokenizer:
        """Token trie of the llguidance library.

        Its EOS is the id `size`, which is not a token of the model. The library's masks therefore
        never allow one of the model's tokens as the end of the text.
        """
        with self._lock:
            if self._guide is None:
                self._guide = _guide_of(self.tokenizer, self._read_bytes(), self.size)
            return self._guide

    def prepare(self) -> None:
        """Build the tables that compiling a constraint needs.

        Takes up to 1 s for 49,000 tokens and up to 5 s for 262,000. The library holds the global
        interpreter lock most of that time, so that no other thread of the process runs.
        """
        self.guide  # noqa: B018 - builds it

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens; a grammar may name them."""
        return tuple(text for text, i in self.tokenizer.special_tokens.items() if i < self.size)

    def _read_bytes(self) -> tuple[bytes, ...]:
        if self._token_bytes is None:
            tokenizer, eos_ids = self.tokenizer, frozenset(self.eos_ids)
            self._token_bytes = tuple(
                tokenizer.token_bytes(i) if i not in eos_ids and tokenizer.has_token(i) else b""
                for i in range(self.num_tokens)
            )
        return self._token_bytes

    def mask_of(self, ids: Iterable[int]) -> Tensor:
        """Mask of these ids; ids that are not tokens of the model are left out."""
        return pack((i for i in ids if i < self.num_tokens), self.size)

    def everything(self) -> Tensor:
        """Mask of all tokens, special tokens and EOS included. Not to be written to."""
        with self._lock:
            if self._everything is None:
                ids = filter(self.tokenizer.has_token, range(self.num_tokens))
                self._everything = self.mask_of(ids)
            return self._everything

    def starting_with(self, prefix: bytes) -> Tensor:
        """Mask of the tokens whose bytes start with `prefix` or equal it."""
        return self.mask_of(self.sorted_tokens.starting_with(prefix))

    def ids_of(self, mask: Tensor) -> list[int]:
        """Ids in a mask, ascending."""
        found: list[int] = unpack(mask, len(mask) * WORD_BITS).nonzero().flatten().tolist()
        return found


class SortedTokens:
    """Tokens sorted by their bytes, so that tokens with a common prefix are adjacent."""

    def __init__(self, token_bytes: Iterable[bytes]) -> None:
        named = sorted((text, number) for number, text in enumerate(token_bytes) if text)
        self._texts = [text for text, _ in named]
        self._ids = [number for _, number in named]

    def starting_with(self, prefix: bytes) -> list[int]:
        """Ids of the tokens that start with `prefix`."""
        return self._ids[self._first(prefix) : self._end(prefix)]

    def has_prefix(self, prefix: bytes) -> bool:
        """Whether any token starts with `prefix`."""
        first = self._first(prefix)
        return first < len(self._texts) and self._texts[first].startswith(prefix)

    def exactly(self, text: bytes) -> list[int]:
        """Ids of the tokens whose bytes are `text`: several, one or none."""
        first = self._first(text)
        return self._ids[first : bisect_left(self._texts, text + b"\0", first)]

    def _first(self, prefix: bytes) -> int:
        return bisect_left(self._texts, prefix)

    def _end(self, prefix: bytes) -> int:
        """Index after the last token that starts with `prefix`."""
        head = prefix.rstrip(b"\xff")
        if not head:
            return len(self._texts)
        return bisect_left(self._texts, head[:-1] + bytes([head[-1] + 1]))


class _GuideSource:
    """Interface that llguidance expects of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_ids: list[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = len(tokens) - 1
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        # Called only when the library forces tokens, which the grammars here disable.
        return self._encode(text if isinstance(text, str) else text.decode())


def _guide_of(tokenizer: Tokenizer, token_bytes: tuple[bytes, ...], size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [*token_bytes, *[b""] * (size + 1 - len(token_bytes))]
    # A grammar may name special tokens, as in `<|tool|>`; no other constraint allows them.
    special = {i: text.encode() for text, i in tokenizer.special_tokens.items() if i < size}
    for number, text in special.items():
        tokens[number] = text
    source = _GuideSource(tokens, sorted(special), tokenizer.encode)
    return LLTokenizer(TokenizerWrapper(source), n_vocab=len(tokens))
