"""Long texts: a lower bound on the number of tokens, and the positions where a text may be cut.

With both, refusing a text that is too long takes a time independent of its length. `TokenLengths`
proves that a text exceeds a number of tokens without tokenizing it. `Cuts` splits a text into parts
whose ids, concatenated, are exactly the ids of the whole. Tokenization can then stop at the limit,
and every call of a tokenizer library is short. This module knows bytes and characters only.
`bpe_rules.py` and `spm.py` decide which bound and which cuts are valid for a tokenizer.

Invariants, checked in the property tests:
  * `TokenLengths.lower_bound(text)` is at most the number of tokens of `text`;
  * the ids of `Cuts.parts(text)`, concatenated, are the ids of `text`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from exl_core.tokenizer.decoders import META_SPACE, byte_of_token

PART_CHARS = 32 * 1024
"""A part takes about 10 ms. BPE over larger parts is slower per character, because the heap of
merges no longer fits in the CPU's caches."""

_CHUNK_CHARS = 64 * 1024  # per call of a function that holds the GIL: less than 1 ms
# Bytes of one character after Unicode composition (NFC) come from at most three times as many
# bytes before it (U+0390: two bytes from six). Four leaves a margin.
_MAX_COMPOSITION = 4
_ASCII = "".join(map(chr, range(128)))
_ALPHANUMERIC = "".join(filter(str.isalnum, _ASCII))


class TokenLengths:
    """Lower bound on the number of tokens of a text, from the longest tokens of a vocabulary.

    Each byte of a text belongs to one token. Let `longest[b]` be the length in bytes of the longest
    token that contains byte `b`. In a token of n bytes every byte has `longest[b] >= n`, so the sum
    of `1 / longest[b]` over its bytes is at most 1. The sum over a text is therefore at most its
    number of tokens.

    Bytes that may be removed before tokens are formed get weight 0: characters that the vocabulary
    lacks, and spaces that a normalizer or an added token absorbs.
    """

    def __init__(
        self, tokens: Iterable[bytes], covered: Collection[int], *, composes: bool = False
    ) -> None:
        """Computes one weight per byte value.

        tokens    longest text that each token of the vocabulary can represent
        covered   bytes that always become part of a token
        composes  the text is first normalized to NFC. ASCII characters followed by ASCII do not
                  change. All other bytes get the weight of the longest token, divided by
                  `_MAX_COMPOSITION`
        """
        self._composes = composes
        self._weights = np.zeros(256)
        unseen = set(range(256))
        longest = 1
        for token in sorted(tokens, key=len, reverse=True):
            longest = max(longest, len(token))
            found = unseen.intersection(token)
            if found:
                unseen -= found
                self._weights[list(found)] = 1 / len(token)
        if composes:
            is_complete = all(byte in covered for byte in _UTF8_BYTES)
            self._weights[128:] = is_complete / (_MAX_COMPOSITION * longest)
        self._weights[[byte for byte in range(256) if byte not in covered]] = 0

    def lower_bound(self, text: str, enough: int | None = None) -> int:
        """Lower bound on the number of tokens of `text`. Counting stops soon after `enough`."""
        total = 0.0
        for start in range(0, len(text), _CHUNK_CHARS):
            data = text[start : start + _CHUNK_CHARS].encode("utf-8", "surrogatepass")
            values = np.frombuffer(data, np.uint8)
            if self._composes:  # the last byte does not count: its successor is unknown
                is_kept = (values[:-1] >= 128) | (values[1:] < 128)
                values = values[:-1][is_kept]
            total += float(np.bincount(values, minlength=256) @ self._weights)
            if enough is not None and total > enough + 1:
                break
        return math.ceil(total * (1 - 1e-9))  # rounding errors of the sum are below 1e-12


# All bytes that UTF-8 uses for characters beyond ASCII.
_UTF8_BYTES = (*range(0x80, 0xC0), *range(0xC2, 0xF5))


def is_long(text: str) -> bool:
    return len(text) > PART_CHARS


@dataclass(frozen=True, slots=True)
class Cuts:
    """A text may be cut before a space or newline between two ASCII letters or digits.

    newlines     cuts before newlines are valid, not only before spaces
    drops_space  the tokenizer adds a space before every text. The part after a cut therefore
                 starts after its own space
    """

    newlines: bool
    drops_space: bool = False

    def parts(self, text: str) -> Iterator[str]:
        """Yields parts of about `PART_CHARS`. A part without a valid cut is longer."""
        place = _AT_SPACE_OR_NEWLINE if self.newlines else _AT_SPACE
        start, length = 0, len(text)
        while length - start > PART_CHARS:
            found = _search(place, text, start + PART_CHARS - 1)
            if found is None:
                break
            yield text[start : found + 1]
            start = found + 2 if self.drops_space else found + 1
        yield text[start:]


_AT_SPACE = re.compile(r"[A-Za-z0-9] [A-Za-z0-9]")
_AT_SPACE_OR_NEWLINE = re.compile(r"[A-Za-z0-9][ \n][A-Za-z0-9]")


def _search(place: re.Pattern[str], text: str, start: int) -> int | None:
    """Index of the first match at or after `start`, searched in steps, as each holds the GIL."""
    while start < len(text):
        found = place.search(text, start, start + _CHUNK_CHARS + 2)
        if found is not None:
            return found.start()
        start += _CHUNK_CHARS
    return None


def bytes_of_marked(piece: str) -> bytes:
    """Bytes of text that a piece represents, in a vocabulary that encodes a space as U+2581."""
    byte = byte_of_token(piece)
    return piece.replace(META_SPACE, " ").encode() if byte is None else bytes([byte])


def covered_bytes(pieces: Collection[str], *, has_bytes: bool) -> set[int]:
    """Bytes that always become part of a token, in a vocabulary that encodes a space as U+2581.

    `has_bytes`: every byte has its own token. Otherwise characters without a piece are dropped, or
    fused into one unknown token. U+2581 in a text becomes a space, so its bytes are not covered.
    """
    covered = set(range(256)) if has_bytes else {ord(c) for c in _ASCII if c in pieces}
    covered -= {ord(" "), *META_SPACE.encode()}
    return covered | {ord(" ")} if META_SPACE in pieces else covered


def cuts_of_marked_pieces(pieces: Collection[str], *, adds_space: bool) -> Cuts | None:
    """Cuts for BPE without pre-tokenization that encodes a space as U+2581. None: no valid cuts.

    BPE merges neighbors whose concatenation is a piece. If no piece contains a letter or digit
    followed by U+2581, no merge crosses such a position, and the merges on one side do not depend
    on the other side. Letters, digits and U+2581 must be pieces themselves: runs of unknown
    characters could be fused across the cut.

    `adds_space`: the tokenizer adds U+2581 before every text.
    """
    if not all(char in pieces for char in (*_ALPHANUMERIC, META_SPACE)):
        return None
    crossing = {match[1] for piece in pieces for match in _CROSSING.finditer(piece)}
    if META_SPACE in crossing:
        return None
    newlines = not adds_space and "\n" in pieces and "\n" not in crossing
    return Cuts(newlines=newlines, drops_space=adds_space)


_CROSSING = re.compile(f"(?<=[A-Za-z0-9])([{META_SPACE}\n])")
