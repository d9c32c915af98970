"""Interfaces of constraints, and of filters, which hold a constraint's state in one reply.

A `Constraint` is a frozen value that a request carries. Its `filter` method compiles it into a
`Filter`. A filter accepts every token of the reply and yields the mask of the next one. It reads
text as the bytes of tokens and does not see the prompt. Filters do not handle EOS: `is_complete`
states whether the reply may end, and `filter_set.py` adds the ids of EOS to the mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from exl_core.errors import ConstraintError

if TYPE_CHECKING:
    from exl_core.constrain.vocabulary import Vocabulary


def check_text(text: str, what: str) -> None:
    """Raise ConstraintError if `text` cannot be encoded as UTF-8."""
    if not isinstance(text, str):
        raise ConstraintError(f"{what} is not a text", got=repr(text)[:100])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConstraintError(f"{what} holds half of a surrogate pair", got=ascii(text)) from error


class Filter(ABC):
    """State of one constraint in one reply.

    One thread uses it at a time, but not always the same thread.
    """

    runs_in_background = True
    """Whether `mask` may run on another thread than the other methods."""

    sees_healed = False
    """Whether the filter also limits and accepts the healed token, the last one of the prompt."""

    @abstractmethod
    def mask(self) -> Tensor | None:
        """Bitmask of the allowed next tokens; None allows every token.

        The filter owns the tensor; the caller does not write to it. An empty mask is not an error
        here: it is correct after the last token of a complete reply.
        """

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """Advance by one token of the reply, which is not EOS."""

    @abstractmethod
    def rewind(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the text so far satisfies the constraint, so that the reply may end."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether the text satisfies the constraint and no token may follow."""


class Constraint(Protocol):
    """A frozen value that states which texts a reply may be."""

    def filter(self, vocabulary: Vocabulary) -> Filter:
        """Compile the constraint for one reply.

        Raises ConstraintError if it is invalid or cannot be satisfied. May take seconds, so the
        engine's thread does not call it. Safe on any thread.
        """
