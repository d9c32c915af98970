"""Constraints that the llguidance library understands: one filter for grammars of all kinds.

Owns what the library needs to be told (a grammar in its Lark, never to force tokens: which way to
write a text is the model's choice) and what its failures mean. It reports most bad grammars when it
compiles them; one that no text satisfies may only show as an empty first mask, so the first mask is
computed here, before a request is accepted.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from exl_core.constrain.filter import ConstraintError, Filter
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.ops.masks import WORD_BITS

if TYPE_CHECKING:
    from llguidance import LLMatcher

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_PLACE = re.compile(r"^at \d+\(\d+\): |^failed to compile JSON schema: ")
_ECHO = re.compile(r"^\s*(\d+ \||\^+$)")  # lines that show the grammar, or point at it
_DEAD_END = "NoExtension"
_MESSAGE_LENGTH = 300


def guided_filter(lark: str, vocabulary: Vocabulary, *, what: str, names_place: bool) -> Filter:
    """The filter of a grammar; `what` it is called in messages.

    `names_place`: the caller's own text is the grammar, so line numbers mean something to them.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.guide, lark + _OPTIONS, log_level=0)
    if matcher.is_error():
        said = _one_line(matcher.get_error(), names_place=names_place)
        raise ConstraintError(f"{what} cannot be used: {said}")
    guided = GuidedFilter(matcher, vocabulary)
    if not guided.is_complete and not bool(guided.mask().any()):
        raise ConstraintError(f"{what} cannot be satisfied: no token of this model can begin it")
    return guided


class GuidedFilter(Filter):
    """The state of llguidance in one reply."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_accepted = 0
        self._mask: Tensor | None = None

    def mask(self) -> Tensor:
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def accept(self, token_id: int) -> None:
        if self._matcher.try_consume_tokens([token_id]) != 1:
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
        size = self._vocabulary.size  # and the library's own EOS behind it
        words = np.zeros(-(-(size + 1) // WORD_BITS), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, 4 * len(words))
        if size % WORD_BITS:  # else that EOS is alone in the word that is left out below
            words[-1] &= np.uint32((1 << size % WORD_BITS) - 1)
        self._check_error()
        return torch.from_numpy(words[: self._vocabulary.num_words].view(np.int32))

    def _check_error(self) -> None:
        message = self._matcher.get_error()
        if message and not message.startswith(_DEAD_END):  # which the empty mask says already
            said = _one_line(message, names_place=False)
            raise ConstraintError(f"the constraint became too complex: {said}")


def _one_line(message: str, *, names_place: bool) -> str:
    """What the library said, without the grammar that it repeats."""
    message = message.partition("<state>")[0]
    lines = [line for line in message.splitlines() if not _ECHO.match(line)]
    said = " ".join(" ".join(lines).split())
    while not names_place and _PLACE.match(said):
        said = _PLACE.sub("", said)
    return said if len(said) <= _MESSAGE_LENGTH else f"{said[:_MESSAGE_LENGTH]} ..."
