"""The tokens of a model as bytes, and sets of them as packed bits.

A mask is int32 [ceil(vocab_size / 32)], where bit `i % 32` of word `i // 32` says whether token `i`
may come. Special tokens and EOS have no bytes: they are no text. Ids that the tokenizer does not
have, because a model's vocabulary is often padded, are in no mask. One vocabulary serves all
requests and threads of an engine; what costs time is built at first use, once.
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
    """The tokens that a model can draw: those of its tokenizer, below its own `vocab_size`."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, limits: CompileLimits | None = None
    ) -> None:
        """`limits`: of the constraints that are compiled for it."""
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

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """By id, what a token adds to a text; b"" where it adds nothing."""
        with self._lock:
            return self._read_bytes()

    @property
    def sorted_tokens(self) -> SortedTokens:
        """The tokens in the order of their bytes."""
        with self._lock:
            if self._sorted is None:
                self._sorted = SortedTokens(self._read_bytes())
            return self._sorted

    @property
    def guide(self) -> LLTokenizer:
        """The same tokens for the llguidance library. Its EOS is the id `size`, which is no token:
        so its masks do not mix the end of the text with the model's own tokens."""
        with self._lock:
            if self._guide is None:
                self._guide = _guide_of(self.tokenizer, self._read_bytes(), self.size)
            return self._guide

    def prepare(self) -> None:
        """Build now what compiling a constraint needs.

        Takes up to 1 s for 49,000 tokens and up to 5 s for 262,000. The library holds the
        interpreter's lock most of that time: no other thread of the process runs meanwhile.
        """
        self.guide  # noqa: B018 - builds it

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens, which a grammar may name."""
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
        """The mask of these ids; ids that are no tokens of the model are left out."""
        return pack((i for i in ids if i < self.num_tokens), self.size)

    def everything(self) -> Tensor:
        """The mask of all tokens, special ones and EOS among them."""
        return self.mask_of(filter(self.tokenizer.has_token, range(self.num_tokens)))

    def starting_with(self, prefix: bytes) -> Tensor:
        """The mask of the tokens whose bytes start with `prefix`, it itself among them."""
        return self.mask_of(self.sorted_tokens.starting_with(prefix))

    def ids_of(self, mask: Tensor) -> list[int]:
        """The ids in a mask, ascending."""
        found: list[int] = unpack(mask, len(mask) * WORD_BITS).nonzero().flatten().tolist()
        return found


class SortedTokens:
    """Tokens that have bytes, in their order: all that share a beginning lie side by side."""

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
        """Ids of the tokens that are `text`; there may be several, one, or none."""
        first = self._first(text)
        return self._ids[first : bisect_left(self._texts, text + b"\0", first)]

    def _first(self, prefix: bytes) -> int:
        return bisect_left(self._texts, prefix)

    def _end(self, prefix: bytes) -> int:
        """Behind the last token that starts with `prefix`."""
        head = prefix.rstrip(b"\xff")
        if not head:
            return len(self._texts)
        return bisect_left(self._texts, head[:-1] + bytes([head[-1] + 1]))


class _GuideSource:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_ids: list[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = len(tokens) - 1
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        # Only asked for where the library would force tokens, which our grammars forbid.
        return self._encode(text if isinstance(text, str) else text.decode())


def _guide_of(tokenizer: Tokenizer, token_bytes: tuple[bytes, ...], size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [*token_bytes, *[b""] * (size + 1 - len(token_bytes))]
    # A grammar may name special tokens, as in `<|tool|>`; nothing else ever lets one through.
    special = {i: text.encode() for text, i in tokenizer.special_tokens.items() if i < size}
    for number, text in special.items():
        tokens[number] = text
    source = _GuideSource(tokens, sorted(special), tokenizer.encode)
    return LLTokenizer(TokenizerWrapper(source), n_vocab=len(tokens))
