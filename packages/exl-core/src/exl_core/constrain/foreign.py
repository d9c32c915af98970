"""Filters that were written for exllamav2, as filters of this project.

What is asked of such an object is little: `begin(prefix)`, `feed(token)` with a tensor of shape
(1, 1), and `next()`, which gives the tokens that may come (None: all) and those that end the reply
once they are drawn. It may have more: `clone()`, masks of its own (`can_mask_logits` and its kin,
then no token ends the reply but EOS), and `use_background_worker()`. If it lets EOS come, or
anything at all, then the reply may end.

A filter holds the state of one reply, so each reply works on a copy: `clone()`, else a deep copy
that shares its `model` and `tokenizer`. An object that cannot be copied serves as it is, one reply
at a time, and must take a second `begin` as a new start. Tokens are taken back by going back to a
copy that was made before they came, else by beginning anew and repeating what stays.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl_core.constrain.filter import ConstraintError, Filter
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ExlError

_SNAPSHOTS = 32  # copies kept, of the latest tokens; more than a banned string has
_SHARED = ("model", "tokenizer")  # attributes that are not copied with the object


@dataclass(frozen=True, eq=False, slots=True)
class Foreign:
    """`wrapped`: the object. Its `begin` is always given the empty text."""

    wrapped: Any

    def filter(self, vocabulary: Vocabulary) -> ForeignFilter:
        missing = [n for n in ("begin", "feed", "next") if not hasattr(self.wrapped, n)]
        if missing:
            raise ConstraintError(
                "the object is no filter",
                expected="the methods begin, feed and next",
                got=f"{type(self.wrapped).__name__} without {', '.join(missing)}",
            )
        return ForeignFilter(self.wrapped, vocabulary)


class ForeignFilter(Filter):
    wrapped: Any
    """The copy that follows this reply, for whoever wants to know what it has collected."""

    def __init__(self, original: Any, vocabulary: Vocabulary) -> None:
        self._original = original
        self._vocabulary = vocabulary
        self._token_ids: list[int] = []
        self._snapshots: deque[tuple[int, Any]] = deque(maxlen=_SNAPSHOTS)
        self._is_ended = False
        self._mask: Tensor | None = None
        self._end_tokens: Collection[int] | None = None  # None: the state was not asked yet
        self.wrapped = self._begun()
        self.runs_in_background = _says(self.wrapped, "use_background_worker")

    def mask(self) -> Tensor | None:
        self._ask()
        return self._mask

    def accept(self, token_id: int) -> None:
        self._ask()
        if hasattr(self.wrapped, "clone"):
            with self._blamed("clone"):
                self._snapshots.append((len(self._token_ids), self.wrapped.clone()))
        self._is_ended = token_id in (self._end_tokens or ())
        self._feed(self.wrapped, token_id)
        self._token_ids.append(token_id)
        self._end_tokens = None

    def rewind(self, count: int) -> None:
        length = len(self._token_ids) - count
        if count == 0:
            return
        del self._token_ids[length:]
        while self._snapshots and self._snapshots[-1][0] > length:
            self._snapshots.pop()
        if self._snapshots and self._snapshots[-1][0] == length:
            self.wrapped = self._snapshots.pop()[1]
        else:
            self.wrapped = self._begun()
            for token_id in self._token_ids:
                self._next_of(self.wrapped)  # as a generator would, who asks before each token
                self._feed(self.wrapped, token_id)
        self._end_tokens = None
        self._is_ended = False  # or the reply would have ended before what is taken back

    @property
    def is_complete(self) -> bool:
        if self._is_ended:
            return True
        self._ask()
        if self._mask is None:
            return True
        eos = self._vocabulary.mask_of(self._vocabulary.eos_ids)
        return bool((self._mask & eos).any())

    @property
    def is_finished(self) -> bool:
        return self._is_ended

    def _ask(self) -> None:
        """What may come, once for each state."""
        if self._end_tokens is not None:
            return
        if self._is_ended:
            self._mask, self._end_tokens = self._vocabulary.mask_of(()), ()
        else:
            self._mask, self._end_tokens = self._next_of(self.wrapped)

    def _next_of(self, wrapped: Any) -> tuple[Tensor | None, Collection[int]]:
        if _says(wrapped, "can_mask_logits"):
            with self._blamed("mask_logits"):
                wrapped.prepare_logit_mask()
                logits = wrapped.mask_logits(torch.zeros(self._vocabulary.size))
                allowed = (logits.flatten() != float("-inf")).nonzero().flatten().tolist()
            return self._vocabulary.mask_of(allowed), ()
        with self._blamed("next"):
            pass_tokens, end_tokens = wrapped.next()
            mask = None if pass_tokens is None else self._vocabulary.mask_of(pass_tokens)
        return mask, () if end_tokens is None else end_tokens

    def _feed(self, wrapped: Any, token_id: int) -> None:
        with self._blamed("feed"):
            wrapped.feed(torch.tensor([[token_id]]))

    def _begun(self) -> Any:
        wrapped = _copy_of(self._original)
        with self._blamed("begin"):
            wrapped.begin("")
        return wrapped

    @contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        """A stranger's failure is this reply's, not the engine's."""
        try:
            yield
        except ExlError:
            raise
        except Exception as error:
            raise ConstraintError(
                f"the filter {type(self._original).__name__} failed in {method}",
                where=f"token {len(self._token_ids)} of the reply",
                got=repr(error)[:200],
            ) from error


def _says(wrapped: Any, question: str) -> bool:
    return hasattr(wrapped, question) and bool(getattr(wrapped, question)())


def _copy_of(wrapped: Any) -> Any:
    if hasattr(wrapped, "clone"):
        return wrapped.clone()
    shared = [getattr(wrapped, name) for name in _SHARED if hasattr(wrapped, name)]
    try:
        return copy.deepcopy(wrapped, {id(part): part for part in shared})
    except Exception:  # noqa: BLE001 - a lock, a generator: whatever it holds, it cannot be copied
        return wrapped
