"""The tokenizers library on files from strangers: its failures as errors, and its appetite bounded.

The library raises bare `Exception`s, and where its Rust code panics, a `PanicException` that is not
even one of those (Rust also writes a line of its own on stderr, which cannot be kept back from
here). Every call goes through `library_errors`. A `Replace` step can make a text longer, and a
chain of them multiplies, so a chain that could grow a text more than `MAX_GROWTH` times is refused
before the library sees it. Knows nothing of ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from exl_core.errors import ExlError, TokenizerError

# A normalizer that writes a word for a character, twice over, stays below it.
MAX_GROWTH = 256
_PANIC = "PanicException"
# A pattern with any of these may match nothing at all, and so put its text between characters.
_MAY_MATCH_NOTHING = re.compile(r"[*?|^$]|\{[0,]|\\[bBAzZGK]")
# The key in every spelling that JSON allows for it.
_NORMALIZER_KEY = re.compile(
    '"' + "".join(rf"(?:{c}|\\u00{ord(c):02x})" for c in "normalizer") + r'"\s*:\s*',
    re.IGNORECASE,
)


@contextmanager
def library_errors(what: str, where: object) -> Iterator[None]:
    """Turns whatever the library throws into a `TokenizerError`; interruptions pass."""
    try:
        yield
    except (ExlError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise TokenizerError(
            what,
            where=where,
            got=ascii(str(error)[:200]),
            next_step="Download the file again, or upgrade the tokenizers package",
        ) from error


def check_growth_of_json(text: str, where: object) -> None:
    """`check_growth` of the normalizers in a `tokenizer.json`.

    The library already normalizes its added tokens while it opens the file, so this comes first.
    Only the normalizers are parsed: the vocabulary beside them has a quarter of a million entries.
    """
    decoder = json.JSONDecoder()
    for match in _NORMALIZER_KEY.finditer(text):
        try:
            value, _ = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError) as error:
            raise TokenizerError(
                "the normalizer is not valid JSON", where=where, got=str(error)[:200]
            ) from error
        if isinstance(value, Mapping):
            check_growth([value], where)


def check_growth(steps: Sequence[object], where: object) -> None:
    """Refuses a chain of steps, as JSON, whose `Replace`s could make a text far too long."""
    growth = 1.0
    for step in steps:
        growth *= _growth(step)
    if growth > MAX_GROWTH:
        raise TokenizerError(
            "the replacements in the tokenizer can make a text far too long",
            where=where,
            expected=f"at most {MAX_GROWTH} times as long",
            got=f"up to {growth:.3g} times",
            next_step="The file is damaged or hostile",
        )


def _growth(step: object) -> float:
    """How many times as long a text can get, at most."""
    match step:
        case {"type": "Sequence", "normalizers": [*inner]} | {
            "type": "Sequence",
            "decoders": [*inner],
        }:
            growth = 1.0
            for part in inner:
                growth *= _growth(part)
            return growth
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return max(1.0, len(new) / len(old)) if old else len(new) + 1.0
        case {"type": "Replace", "pattern": {"Regex": str(old)}, "content": str(new)}:
            between = 1.0 if new and _MAY_MATCH_NOTHING.search(old) else 0.0
            return max(1.0, len(new) + between)
        case _:
            return 1.0
