"""Long texts: a lower bound on their number of tokens, and the places where they may be cut.

Both keep the cost of a text that is too long independent of its length. `TokenLengths` proves
that a text exceeds a number of tokens without tokenizing it. `Cuts` divides a text into pieces
whose ids, joined, are exactly the ids of the whole, so that counting can stop at the limit and no
call of a tokenizer library runs long. This module knows bytes and characters only; which bound and
which cuts hold for a tokenizer is decided in `bpe_rules.py` and `spm.py`.

Invariants, checked in the property tests:
  * `TokenLengths.lower_bound(text)` is at most the number of tokens of `text`;
  * the ids of `Cuts.pieces(text)`, joined, are the ids of `text`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from exl_core.tokenizer.decoders import META_SPACE, byte_of_token

PIECE_CHARS = 32 * 1024
"""A piece takes about 10 ms. BPE over larger ones is slower per character: the heap of merges no
longer fits the CPU's caches."""

_CHUNK_CHARS = 64 * 1024  # short enough that a conversion never holds the interpreter for long
# Bytes of one character after Unicode composition (NFC) come from at most three times as many
# bytes before it (U+0390: two bytes from six). Four leaves a margin.
_MAX_COMPOSITION = 4
_ASCII = "".join(map(chr, range(128)))
_ALPHANUMERIC = "".join(filter(str.isalnum, _ASCII))


class TokenLengths:
    """Lower bound on the number of tokens of a text, from the longest tokens of a vocabulary.

    Each byte of a text belongs to one token. Let `longest[b]` be the length in bytes of the longest
    token that contains byte `b`. In a token of n bytes every byte has `longest[b] >= n`, so that
    the sum of `1 / longest[b]` over its bytes is at most 1. The sum over a text is therefore at
    most its number of tokens.

    Bytes that may disappear before tokens are formed (characters that the vocabulary lacks, spaces
    that a normalizer or an added token absorbs) get weight 0.
    """

    def __init__(
        self, tokens: Iterable[bytes], covered: Collection[int], *, composes: bool = False
    ) -> None:
        """`tokens`: the text that each token of the vocabulary can stand for.

        covered   bytes that always become part of a token
        composes  the text is normalized to NFC first. ASCII characters that are followed by ASCII
                  stay as they are; all others count as `_MAX_COMPOSITION` of the longest token
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
        """At least so many tokens; counting stops soon after `enough`."""
        total = 0.0
        for start in range(0, len(text), _CHUNK_CHARS):
            data = text[start : start + _CHUNK_CHARS].encode("utf-8", "surrogatepass")
            values = np.frombuffer(data, np.uint8)
            if self._composes:  # the last byte's successor is unknown: it does not count
                is_kept = (values[:-1] >= 128) | (values[1:] < 128)
                values = values[:-1][is_kept]
            total += float(np.bincount(values, minlength=256) @ self._weights)
            if enough is not None and total > enough + 1:
                break
        return math.ceil(total * (1 - 1e-9))  # rounding errors of the sum are below 1e-12


# All bytes that UTF-8 uses for characters beyond ASCII.
_UTF8_BYTES = (*range(0x80, 0xC0), *range(0xC2, 0xF5))


def is_long(text: str) -> bool:
    return len(text) > PIECE_CHARS


@dataclass(frozen=True, slots=True)
class Cuts:
    """A text may be cut before a space or newline that stands between ASCII letters or digits.

    newlines     a newline will do as well as a space
    drops_space  the tokenizer puts a space before every text by itself. The piece after a cut
                 leaves its own out, and gets it back in this way
    """

    newlines: bool
    drops_space: bool = False

    def pieces(self, text: str) -> Iterator[str]:
        """Pieces of about `PIECE_CHARS`; longer where there is no place to cut."""
        place = _AT_SPACE_OR_NEWLINE if self.newlines else _AT_SPACE
        start, length = 0, len(text)
        while length - start > PIECE_CHARS:
            found = _search(place, text, start + PIECE_CHARS - 1)
            if found is None:
                break
            yield text[start : found + 1]
            start = found + 2 if self.drops_space else found + 1
        yield text[start:]


_AT_SPACE = re.compile(r"[A-Za-z0-9] [A-Za-z0-9]")
_AT_SPACE_OR_NEWLINE = re.compile(r"[A-Za-z0-9][ \n][A-Za-z0-9]")


def _search(place: re.Pattern[str], text: str, start: int) -> int | None:
    """Index of the first match, searched for in steps: the interpreter is held during each."""
    while start < len(text):
        found = place.search(text, start, start + _CHUNK_CHARS + 2)
        if found is not None:
            return found.start()
        start += _CHUNK_CHARS
    return None


def bytes_of_marked(piece: str) -> bytes:
    """Bytes of text that a piece stands for, where U+2581 stands for a space."""
    byte = byte_of_token(piece)
    return piece.replace(META_SPACE, " ").encode() if byte is None else bytes([byte])


def covered_bytes(pieces: Collection[str], *, has_bytes: bool) -> set[int]:
    """Bytes that always become part of a token, where U+2581 stands for a space.

    `has_bytes`: every byte has a token of its own. Without them characters that are no pieces are
    lost, or fused into one token. U+2581 itself reads as a space, so its bytes do not count.
    """
    covered = set(range(256)) if has_bytes else {ord(c) for c in _ASCII if c in pieces}
    covered -= {ord(" "), *META_SPACE.encode()}
    return covered | {ord(" ")} if META_SPACE in pieces else covered


def cuts_of_marked_pieces(pieces: Collection[str], *, adds_space: bool) -> Cuts | None:
    """Cuts for BPE over whole texts in which U+2581 stands for a space; None: there are none.

    BPE merges neighbors whose concatenation is a piece. If no piece holds a letter or digit
    followed by U+2581, nothing is ever merged across such a place, and what is merged on one side
    does not depend on the other side. The characters themselves must be pieces: runs of unknown
    characters would be fused across the cut.

    `adds_space`: the tokenizer puts U+2581 before every text.
    """
    if not all(char in pieces for char in (*_ALPHANUMERIC, META_SPACE)):
        return None
    crossing = {match[1] for piece in pieces for match in _CROSSING.finditer(piece)}
    if META_SPACE in crossing:
        return None
    newlines = not adds_space and "\n" in pieces and "\n" not in crossing
    return Cuts(newlines=newlines, drops_space=adds_space)


_CROSSING = re.compile(f"(?<=[A-Za-z0-9])([{META_SPACE}\n])")
