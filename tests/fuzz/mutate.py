"""Corrupt inputs: changes of bytes, of JSON values, and of binary numbers, from a seeded generator.

A change is small, so that most inputs pass the first checks of a reader and reach later ones.
"""

from __future__ import annotations

import json
import random
import struct
from typing import Any

NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 31, 32, 127, 255, 256, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0.5, 1e308, -0.0, float("nan"), float("inf"), "", "a", "\ud800", "\0"),
    *([], {}, [[]], [0, 1], {"a": 1}, "x" * 300, [None] * 40, "F16", "I64", "llama", "../x"),
)
MAX_BYTES = 1 << 16


def bytes_of(rng: random.Random, seed: bytes, others: list[bytes]) -> bytes:
    """`seed` after one to four changes; `others` are inputs of the same kind."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, data, others)
    return bytes(data[:MAX_BYTES])


def _change(rng: random.Random, data: bytearray, others: list[bytes]) -> None:
    at, kind = rng.randrange(len(data) + 1), rng.randrange(9)
    size = rng.choice((1, 1, 2, 4, 8, 16, 64))
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:
        data[at % len(data)] = rng.randrange(256)
    elif kind == 2:
        del data[at : at + size]
    elif kind == 3:
        data[at:at] = rng.randbytes(size)
    elif kind == 4:
        data[at:at] = data[at : at + size]
    elif kind == 5:
        del data[at:]
    elif kind == 6:  # a little-endian number, often a length or a type
        form = rng.choice(("<Q", "<I", "<H", "<q"))
        bits = 8 * struct.calcsize(form)
        number = rng.choice(NUMBERS) % (1 << bits)
        if form == "<q":
            number = -rng.choice((1, 2, 1 << 62))
        data[at : at + bits // 8] = struct.pack(form, number)
    elif kind == 7:
        other = rng.choice(others)
        start = rng.randrange(len(other) + 1)
        data[at:] = other[start:]
    else:  # a decimal number in text
        digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
        if digits:
            where = rng.choice(digits)
            data[where : where + 1] = str(rng.choice(NUMBERS)).encode()


def json_of(rng: random.Random, seed: bytes) -> bytes:
    """`seed`, a JSON document, with one to three values replaced, removed, renamed or nested."""
    document = json.loads(seed)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change_value(rng, document)
    return json.dumps(document).encode()[:MAX_BYTES]


def _change_value(rng: random.Random, document: Any) -> None:
    containers = [document]
    for one in containers:  # grows while it is read: all containers below the document
        below = one.values() if isinstance(one, dict) else one
        containers += [part for part in below if isinstance(part, dict | list) and part]
        if len(containers) > 400:
            break
    container = rng.choice(containers)
    if not container:
        return
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    key, kind = rng.choice(keys), rng.randrange(5)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = rng.choice(NUMBERS) * rng.choice((1, 1, -1))
    elif kind == 2:
        container[key] = [container[key]] * rng.choice((0, 1, 3))
    elif kind == 3 and isinstance(container, dict):
        container[str(key) + rng.choice(("s", "", "_", "0"))] = container.pop(key)
    else:
        container[key] = rng.choice(VALUES)
