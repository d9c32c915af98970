"""Constraint: the whole reply matches a regular expression.

The syntax is that of Rust's regex crate, without look-around and back-references. `.` matches any
character except a newline, unless the expression sets `(?s)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from exl_core.constrain.filter import Filter, check_text
from exl_core.constrain.guided import Source, guided_filter
from exl_core.constrain.limits import check_length, check_regex
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError

_NAME = "the regular expression"
_ANCHOR_AT_END = re.compile(r"(?<!\\)((?:\\\\)*)\$\Z")
_ESCAPE_AT_END = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")


@dataclass(frozen=True, slots=True)
class Regex:
    """`pattern` matches the whole reply; a leading `^` and a trailing `$` are redundant."""

    pattern: str

    def filter(self, vocabulary: Vocabulary) -> Filter:
        from llguidance import regex_to_lark

        check_text(self.pattern, _NAME)
        check_length(self.pattern, vocabulary.limits, _NAME)
        check_regex(self.pattern, _NAME)
        bare = _ANCHOR_AT_END.sub(r"\1", self.pattern.removeprefix("^"))
        if _ESCAPE_AT_END.search(bare):  # it would escape the closing slash of the literal
            raise ConstraintError(f"{_NAME} ends in a backslash", got=repr(self.pattern[-60:]))
        # An empty expression, `//`, would start a comment.
        body = f"/{regex_to_lark(bare, '')}/" if bare else '""'
        return guided_filter(f"start: {body}", vocabulary, Source(_NAME))
