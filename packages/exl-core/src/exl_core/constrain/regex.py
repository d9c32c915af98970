"""The reply, from its first to its last character, matches a regular expression.

The syntax is that of Rust's regex crate: no look-around and no back-references. `.` is any
character but a newline, unless the expression says `(?s)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from exl_core.constrain.filter import ConstraintError, Filter, check_text
from exl_core.constrain.guided import Source, guided_filter
from exl_core.constrain.limits import check_length, check_regex
from exl_core.constrain.vocabulary import Vocabulary

_WHAT = "the regular expression"
_ANCHOR_AT_END = re.compile(r"(?<!\\)((?:\\\\)*)\$\Z")
_ESCAPE_AT_END = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")


@dataclass(frozen=True, slots=True)
class Regex:
    """`pattern` matches the whole reply, so a `^` before and a `$` behind it add nothing."""

    pattern: str

    def filter(self, vocabulary: Vocabulary) -> Filter:
        from llguidance import regex_to_lark

        check_text(self.pattern, _WHAT)
        check_length(self.pattern, vocabulary.limits, _WHAT)
        check_regex(self.pattern, _WHAT)
        bare = _ANCHOR_AT_END.sub(r"\1", self.pattern.removeprefix("^"))
        if _ESCAPE_AT_END.search(bare):  # it would take the end of the literal with it
            raise ConstraintError(f"{_WHAT} ends in a backslash", got=repr(self.pattern[-60:]))
        # An empty expression would read as the beginning of a comment.
        body = f"/{regex_to_lark(bare, '')}/" if bare else '""'
        return guided_filter(f"start: {body}", vocabulary, Source(_WHAT))
