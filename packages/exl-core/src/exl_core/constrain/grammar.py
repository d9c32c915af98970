"""Constraint: the reply is a text of a context-free grammar.

The grammar is written in llguidance's variant of Lark, with a rule `start`. It may name special
tokens of the model, as in `<|tool|>`. No other constraint allows special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from exl_core.constrain.filter import Filter, check_text
from exl_core.constrain.guided import Source, guided_filter
from exl_core.constrain.limits import check_grammar, check_length
from exl_core.constrain.vocabulary import Vocabulary

_NAME = "the grammar"


@dataclass(frozen=True, slots=True)
class Grammar:
    """`lark` is the text of the grammar."""

    lark: str

    def filter(self, vocabulary: Vocabulary) -> Filter:
        check_text(self.lark, _NAME)
        check_length(self.lark, vocabulary.limits, _NAME)
        check_grammar(self.lark, _NAME)
        return guided_filter(self.lark, vocabulary, Source(_NAME, is_lark=True))
