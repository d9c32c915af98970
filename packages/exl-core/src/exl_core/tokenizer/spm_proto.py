"""Serialized SentencePiece models: written from the vocabulary of a GGUF file, and their settings.

Owns the few fields of sentencepiece's `ModelProto` that make a processor. The protobuf package
would be a dependency for a hundred lines. This module knows nothing of GGUF.

Wire format: a field is a varint (number << 3 | kind) and its value. Kind 0 is a varint, 1 eight
bytes, 2 a length and bytes, 5 four bytes. If a field of a message appears twice, the two are merged
and the later value has precedence. `without_dummy_prefix` uses this to change a model without
parsing it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum


class PieceType(IntEnum):
    """Types of pieces, numbered as in sentencepiece and in GGUF's `token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# ModelProto
_PIECES = b"\x0a"  # field 1, bytes
_TRAINER = b"\x12"  # field 2, bytes
_NORMALIZER = b"\x1a"  # field 3, bytes
_TAIL_BYTES = 7  # a tag and four bytes of score, a tag and one byte of type
_COMMON_LENGTH = 64  # heads of shorter pieces (nearly all) are made once per length
# TrainerSpec
_MODEL_TYPE_BPE = b"\x18\x02"  # field 3 = BPE
_BYTE_FALLBACK = b"\x98\x02"  # field 35, varint
# NormalizerSpec
_CHARSMAP = b"\x12"  # field 2, bytes
_ADD_DUMMY_PREFIX = b"\x18"  # field 3, varint
_REMOVE_EXTRA_SPACES = b"\x20"  # field 4, varint
_ESCAPE_SPACES = b"\x28\x01"  # field 5 = true


def bpe_model(
    pieces: Iterable[tuple[str, float, PieceType | int]],
    *,
    byte_fallback: bool,
    add_dummy_prefix: bool,
    remove_extra_spaces: bool,
    charsmap: bytes = b"",
) -> bytes:
    """Serializes a model of type BPE. `pieces` are in the order of their ids."""
    heads = [_piece_head(length) for length in range(_COMMON_LENGTH)]
    tail = struct.Struct("<cfcB").pack  # field 2: score, four bytes; field 3: type
    parts: list[bytes] = []
    for text, score, kind in pieces:
        raw = text.encode()
        size = len(raw)
        head = heads[size] if size < _COMMON_LENGTH else _piece_head(size)
        parts += (head, raw, tail(b"\x15", score, b"\x18", kind))
    trainer = _MODEL_TYPE_BPE + _BYTE_FALLBACK + _flag(byte_fallback)
    normalizer = _ADD_DUMMY_PREFIX + _flag(add_dummy_prefix)
    normalizer += _REMOVE_EXTRA_SPACES + _flag(remove_extra_spaces) + _ESCAPE_SPACES
    if charsmap:
        normalizer += _CHARSMAP + _varint(len(charsmap)) + charsmap
    parts += (_TRAINER, _varint(len(trainer)), trainer)
    parts += (_NORMALIZER, _varint(len(normalizer)), normalizer)
    return b"".join(parts)


def without_dummy_prefix(model: bytes) -> bytes:
    """The same model, except that it adds no space before a text."""
    change = _ADD_DUMMY_PREFIX + _flag(False)
    return model + _NORMALIZER + _varint(len(change)) + change


@dataclass(frozen=True, slots=True)
class TextRules:
    """Settings of a model that apply to a text before pieces are matched."""

    is_bpe: bool
    has_charsmap: bool
    removes_extra_spaces: bool
    escapes_spaces: bool
    puts_spaces_behind: bool


def text_rules(model: bytes) -> TextRules:
    """Reads the settings from a serialized model, with the defaults of sentencepiece's schema."""
    trainer: dict[int, object] = {}
    normalizer: dict[int, object] = {}
    for field, value in _fields(model):
        if field == 2 and isinstance(value, bytes):
            trainer.update(_fields(value))
        elif field == 3 and isinstance(value, bytes):
            normalizer.update(_fields(value))
    return TextRules(
        is_bpe=trainer.get(3, 1) == 2,
        has_charsmap=bool(normalizer.get(2, b"")),
        removes_extra_spaces=bool(normalizer.get(4, True)),
        escapes_spaces=bool(normalizer.get(5, True)),
        puts_spaces_behind=bool(trainer.get(24, False)),
    )


def pieces_of(model: bytes) -> list[tuple[str, float, PieceType]]:
    """Text, score and type of each piece of a serialized model, by id."""
    kinds: dict[object, PieceType] = {int(kind): kind for kind in PieceType}
    found: list[tuple[str, float, PieceType]] = []
    for field, value in _fields(model):
        if field != 1 or not isinstance(value, bytes):
            continue
        piece = dict(_fields(value))
        text, score = piece.get(1, b""), piece.get(2, b"\0\0\0\0")
        assert isinstance(text, bytes), "sentencepiece has read the model before"
        assert isinstance(score, bytes), "sentencepiece has read the model before"
        found.append((text.decode(), struct.unpack("<f", score)[0], kinds[piece.get(3, 1)]))
    return found


def _fields(message: bytes) -> Iterator[tuple[int, object]]:
    """Yields number and value of each field: an int for varints, bytes for all other kinds."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        kind = tag & 7
        if kind == 0:
            value, position = _read_varint(message, position)
            yield tag >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            size, position = _read_varint(message, position)
        yield tag >> 3, message[position : position + size]
        position += size


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7


def _piece_head(size: int) -> bytes:
    """Tags and lengths that precede the text of a piece of `size` bytes."""
    text = b"\x0a" + _varint(size)
    return _PIECES + _varint(len(text) + size + _TAIL_BYTES) + text


def _flag(value: bool) -> bytes:
    return b"\x01" if value else b"\x00"


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
