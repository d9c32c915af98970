"""Converts the decoder of a `tokenizer.json` to a function from one token to its bytes.

The tokenizers library decodes whole lists of tokens, but a stream needs the bytes of each token.
Every decoder that language models use is equivalent to a function per token and a number of spaces
to remove at the start of the text. Any other decoder is refused by name instead of being
approximated. This module knows the JSON form of decoders and no tokenizer.

One difference to the library is deliberate. If byte tokens do not form valid UTF-8, the library
replaces the whole run of bytes. This module replaces only the invalid bytes, because it cannot look
ahead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from exl_core.errors import TokenizerError
from exl_core.tokenizer.library import check_growth

SUPPORTED = "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip at the start, Sequence, none"
META_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceRule:
    """Decodes single tokens.

    to_bytes        for tokens of the model's vocabulary
    added_to_bytes  for tokens that were added to it
    dropped_spaces  number of spaces that are removed at the start of a text
    """

    to_bytes: Callable[[str], bytes]
    added_to_bytes: Callable[[str], bytes]
    dropped_spaces: int = 0


def byte_of_token(token: str) -> int | None:
    """Byte value of a token such as <0x0A>."""
    match = _BYTE_TOKEN.fullmatch(token)
    return None if match is None else int(match[1], 16)


def byte_alphabet() -> dict[str, int]:
    """Characters that byte-level BPE uses for bytes, as defined by GPT-2.

    Printable Latin-1 characters stand for their own bytes. The other bytes use the characters from
    U+0100 on, in order, so that no token contains a space or a control character.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token. With other characters it is plain text, as in the library."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def added_byte_level_bytes(token: str) -> bytes:
    """Bytes of an added token, which is plain text.

    The library would decode '<café>' as byte-level characters and corrupt it. The exception is a
    single character of the alphabet: it shares its id with the token of a byte.
    """
    return byte_level_bytes(token) if len(token) == 1 else token.encode()


BYTE_LEVEL = PieceRule(byte_level_bytes, added_byte_level_bytes)


def piece_rule(decoder: Mapping[str, object] | None, where: str) -> PieceRule:
    """The rule that is equivalent to a decoder, given as JSON."""
    if decoder is None:  # the library then joins tokens with spaces
        return PieceRule(_spaced, _spaced, dropped_spaces=1)
    steps = _flatten(decoder, where)
    check_growth(steps, where)
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return BYTE_LEVEL
    replacements: list[tuple[str, str]] = []
    has_bytes = False
    is_fused = False
    dropped = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if is_fused:
                dropped = start
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                dropped = 0 if step.get("prepend_scheme") == "never" else 1
            case _:
                raise _unsupported(step, where)
    to_bytes = _replacing(replacements, has_bytes=has_bytes)
    return PieceRule(to_bytes, to_bytes, dropped)


def _spaced(token: str) -> bytes:
    return b" " + token.encode()


def _flatten(decoder: Mapping[str, object], where: str) -> list[Mapping[str, object]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    inner = decoder.get("decoders")
    if not isinstance(inner, Sequence):
        raise _unsupported(decoder, where)
    return [step for entry in inner for step in _flatten(entry, where)]


def _replacing(replacements: list[tuple[str, str]], *, has_bytes: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = byte_of_token(token) if has_bytes else None
        return token.encode() if byte is None else bytes([byte])

    return to_bytes


def _unsupported(step: Mapping[str, object], where: str) -> TokenizerError:
    return TokenizerError(
        "unsupported decoder in tokenizer.json",
        where=where,
        expected=SUPPORTED,
        got=repr(dict(step))[:200],
        next_step="Please report the model: such a decoder has no known rule per token",
    )
