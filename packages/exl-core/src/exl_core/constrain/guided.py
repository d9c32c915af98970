"""Filter of all constraints that the llguidance library compiles.

The library gets a grammar in its variant of Lark, with two settings: it never forces tokens,
because the model chooses the tokenization of a text, and the work for one token is limited. Another
process compiles the grammar first (`trial.py`), then this module does. The library reports most
invalid grammars when it compiles them. A grammar that no text satisfies may only yield an empty
first mask; `guided_filter` therefore computes the first mask before the request is accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from exl_core.constrain.filter import Filter
from exl_core.constrain.trial import Trial, run
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError
from exl_core.ops.masks import WORD_BITS

if TYPE_CHECKING:
    from llguidance import LLMatcher

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_PLACE = re.compile(r"^at \d+\(\d+\): |^failed to compile JSON schema: ")
_ECHO = re.compile(r"^\s*(\d+ \||\^+$)")  # lines that quote the grammar or mark a place in it
_DEAD_END = "NoExtension"
_MESSAGE_LENGTH = 300
_LIMITS = {
    # Work for one mask. A schema with 500 optional properties takes 2,000 items in a row.
    "max_items_in_row": 2_000,
    "step_max_items": 20_000,
    "step_lexer_fuel": 200_000,
    # 1 to 2 kB each, kept until the reply ends.
    "max_lexer_states": 100_000,
}
_LARK_LIMITS = {
    # Ambiguous grammars take time that grows with the cube of these: one mask takes 1.5 s with the
    # limits above, 0.1 s with these.
    **_LIMITS,
    "max_items_in_row": 1_000,
    "step_max_items": 10_000,
}


@dataclass(frozen=True, slots=True)
class Source:
    """Constraint that a grammar was generated from.

    name     name of the constraint in messages
    is_lark  the caller wrote the grammar, so that messages may contain its line numbers
    schema   the JSON schema, if it is one
    special  special tokens that a generated grammar names
    """

    name: str
    is_lark: bool = False
    schema: object = None
    special: tuple[str, ...] = ()


def guided_filter(lark: str, vocabulary: Vocabulary, source: Source) -> GuidedFilter:
    """Compile a grammar. May take twice the time limit; the global interpreter lock is released."""
    from llguidance import LLMatcher, LLParserLimits

    grammar = lark + _OPTIONS
    limits = _LARK_LIMITS if source.is_lark else _LIMITS
    special = vocabulary.special_tokens if source.is_lark else source.special
    trial = Trial(grammar, special, limits, source.schema)
    answer = run(trial, vocabulary.limits, source.name)
    if answer.error:
        raise _unusable(answer.error, source)
    native = LLParserLimits(**limits)  # type: ignore[arg-type]
    matcher = LLMatcher(vocabulary.guide, grammar, log_level=0, limits=native)
    if matcher.is_error():
        raise _unusable(matcher.get_error(), source)
    guided = GuidedFilter(matcher, vocabulary)
    if not guided.is_complete and not bool(guided.mask().any()):
        raise ConstraintError(
            f"{source.name} cannot be satisfied: no token of this model can begin it"
        )
    if answer.is_endless:
        raise ConstraintError(f"{source.name} cannot be satisfied: its recursion never ends")
    return guided


def _unusable(message: str, source: Source) -> ConstraintError:
    message = message.replace("Unimplemented keys:", "these keywords are not supported:")
    return ConstraintError(
        f"{source.name} cannot be used: {_one_line(message, names_place=source.is_lark)}"
    )


class GuidedFilter(Filter):
    """State of llguidance's matcher in one reply."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_accepted = 0
        self._mask: Tensor | None = None

    def copy(self) -> GuidedFilter:
        """Independent filter with the same state, without compiling again."""
        other = GuidedFilter(self._matcher.deep_copy(), self._vocabulary)
        other._num_accepted, other._mask = self._num_accepted, self._mask
        return other

    def mask(self) -> Tensor:
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def accept(self, token_id: int) -> None:
        if self._matcher.try_consume_tokens([token_id]) != 1:
            self._check_error()  # a limit of the library
            raise ConstraintError(
                "the token does not fit the constraint",
                where=f"token {self._num_accepted} of the reply",
                got=f"{token_id} ({self._vocabulary.tokenizer.token_text(token_id)!r})",
            )
        self._num_accepted += 1
        self._mask = None

    def rewind(self, count: int) -> None:
        self._matcher.rollback(count)
        self._num_accepted -= count
        self._mask = None
        self._check_error()

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        return self.is_complete and (self._matcher.is_stopped() or not self.mask().numpy().any())

    def _compute(self) -> Tensor:
        size = self._vocabulary.size  # the library's own EOS follows
        words = np.zeros(-(-(size + 1) // WORD_BITS), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, 4 * len(words))
        if size % WORD_BITS:  # otherwise EOS is alone in the last word, which is dropped below
            words[-1] &= np.uint32((1 << size % WORD_BITS) - 1)
        self._check_error()
        return torch.from_numpy(words[: self._vocabulary.num_words].view(np.int32))

    def _check_error(self) -> None:
        message = self._matcher.get_error()
        if message and not message.startswith(_DEAD_END):  # a dead end yields an empty mask
            said = _one_line(message, names_place=False)
            raise ConstraintError(f"the constraint became too complex: {said}")


def _one_line(message: str, *, names_place: bool) -> str:
    """The library's message on one line, without the grammar that it quotes."""
    message = message.partition("<state>")[0]
    lines = [line for line in message.splitlines() if not _ECHO.match(line)]
    said = " ".join(" ".join(lines).split())
    while not names_place and _PLACE.match(said):
        said = _PLACE.sub("", said)
    return said if len(said) <= _MESSAGE_LENGTH else f"{said[:_MESSAGE_LENGTH]} ..."
