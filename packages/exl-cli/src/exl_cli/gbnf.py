"""Grammars of llama.cpp (GBNF), translated to Lark by llguidance's converter."""

from __future__ import annotations

import re

from exl_core.errors import ConstraintError

MAX_CHARS = 64 * 1024
_RULE = re.compile(r"^\s*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)
_NEXT_CHOICE = re.compile(r"\n\s*(?=\|)")
_LARK_RULE = re.compile(r"^([a-z_]\w*):", re.MULTILINE)
_CODE_POINT = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
_START = re.compile(r"\bstart\b")


def is_gbnf(grammar: str) -> bool:
    """GBNF writes `name ::= ...`, Lark `name: ...`."""
    return _RULE.search(grammar) is not None


def lark_of(grammar: str) -> str:
    """The grammar in Lark. Raises ConstraintError if it is not GBNF.

    A grammar without recursion becomes one terminal, so that it means exactly the same. In
    recursive rules the library takes the longest terminal, as Lark does.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(grammar) > MAX_CHARS:
        raise ConstraintError(f"the grammar is longer than {MAX_CHARS} characters")
    try:
        lark: str = gbnf_to_lark(_NEXT_CHOICE.sub(" ", _CODE_POINT.sub(_character, grammar)))
    except Exception as error:  # the library raises plain exceptions too, as for a missing rule
        raise ConstraintError(f"the grammar is not GBNF: {str(error)[:200]}") from error
    lark = lark.replace("%llguidance {}", "", 1)
    if _LARK_RULE.findall(lark) == ["start"] and len(_START.findall(lark)) == 1:
        return "start: WHOLE_REPLY\n" + lark.replace("start:", "WHOLE_REPLY:", 1)
    return lark


def _character(match: re.Match[str]) -> str:
    """The character that an escape such as `\\u00e9` names; the converter writes such escapes in a
    form that the library does not read."""
    code = int(match[1] or match[2], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ConstraintError("the grammar names no character", got=match[0])
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
