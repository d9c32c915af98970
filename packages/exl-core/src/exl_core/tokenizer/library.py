"""Safe use of the tokenizers library on untrusted files: typed errors and bounded memory.

The library raises bare `Exception`s. If its Rust code panics, it raises a `PanicException`, which
is not an `Exception`, and Rust writes a line to stderr that cannot be suppressed from Python. Every
call goes through `library_errors`. A `Replace` step can make a text longer, and the factors of a
chain multiply. A chain that could make a text more than `MAX_GROWTH` times as long is therefore
refused before the library reads it. This module knows nothing of ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from exl_core.errors import ExlError, TokenizerError

# Two steps in a row that each replace a character by a word stay below this factor.
MAX_GROWTH = 256
_PANIC = "PanicException"
# A pattern with any of these may match the empty string, and so insert text between characters.
_MAY_MATCH_NOTHING = re.compile(r"[*?|^$]|\{[0,]|\\[bBAzZGK]")
# The key "normalizer" in every spelling that JSON allows.
_NORMALIZER_KEY = re.compile(
    '"' + "".join(rf"(?:{c}|\\u00{ord(c):02x})" for c in "normalizer") + r'"\s*:\s*',
    re.IGNORECASE,
)


@contextmanager
def library_errors(what: str, where: object) -> Iterator[None]:
    """Converts any exception of the library to a `TokenizerError`. Interrupts pass through."""
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
    """Applies `check_growth` to the normalizers of a `tokenizer.json`.

    This must precede loading, because the library normalizes added tokens while it opens the file.
    Only the normalizers are parsed. Parsing the vocabulary of up to 262144 entries would be slow.
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
    """Refuses a chain of steps, as JSON, whose `Replace` steps could make a text far too long."""
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
    """Upper bound on the factor by which a step makes a text longer."""
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
