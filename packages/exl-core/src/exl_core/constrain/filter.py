"""What every constraint on a reply is, and what it is while one reply is written.

A `Constraint` is a frozen value that a request carries. Its `filter` makes a `Filter`: the state of
that constraint in one reply, which is told every token and says which may come next. A filter
reads text as the bytes of its tokens; the prompt is not part of it. EOS is nobody's business here:
whether the reply may end is `is_complete`, and `filter_set.py` turns it into the ids of EOS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from exl_core.errors import RequestError

if TYPE_CHECKING:
    from exl_core.constrain.vocabulary import Vocabulary


class ConstraintError(RequestError):
    """A constraint that cannot be read or met, or that this reply can no longer meet."""


def check_text(text: str, what: str) -> None:
    """Text that cannot be written as UTF-8 can be no part of a constraint."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConstraintError(f"{what} holds half of a surrogate pair", got=ascii(text)) from error


class Filter(ABC):
    """One constraint in one reply. Used by one thread at a time, not always by the same one."""

    runs_in_background = True
    """Whether `mask` may be called on another thread than the other methods."""

    @abstractmethod
    def mask(self) -> Tensor | None:
        """Packed bits of the tokens that may come next; None: any may.

        The tensor belongs to the filter: it is read, not written. An empty mask is not an error
        here: it is right after the last token of a reply that is complete.
        """

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """The reply goes on with this token, which is not EOS."""

    @abstractmethod
    def rewind(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """The text so far satisfies the constraint: the reply may end here."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """The text satisfies the constraint and nothing may follow: the reply ends here."""


class Constraint(Protocol):
    """A frozen value that says what a reply must look like."""

    def filter(self, vocabulary: Vocabulary) -> Filter:
        """The state of a new reply. What cannot be read or met is a `ConstraintError` here.

        May take seconds, so the engine's thread does not call it. Safe on any thread.
        """
