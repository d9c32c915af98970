"""Adapter for filter objects that were written for exllamav2.

Such an object has `begin(prefix)`, `feed(token)` with a tensor of shape (1, 1), and `next()`, which
returns the allowed tokens (None: all) and the tokens that end the reply once they are sampled. It
may also have `clone()`, `use_background_worker()`, and masks of its own (`can_mask_logits`,
`prepare_logit_mask`, `mask_logits`; then only EOS ends the reply). The reply may end if the object
allows EOS or allows every token.

Each reply uses its own copy, because the object holds the state of one reply: `clone()` if it
returns another object, else a deep copy that shares its `model` and `tokenizer`, and the
`token_enforcer` of lm-format-enforcer, which serves any number of replies. Attributes that a clone
lacks are taken from the original, and a `_formatter` is copied: formatron's `clone` leaves some
attributes out and shares the parser. With `in_place` the object itself follows one reply at a time,
so that its owner can read the collected state afterwards. An object that is used in place, or that
cannot be copied, must treat a second `begin` as a restart. `rewind` restores a copy that was made
before the undone tokens, or else begins again and feeds the remaining tokens.

Masks that an object cannot compute on this machine (formatron's need pinned memory, so a GPU) are
replaced by the tokens that `next` lists. A warning names the error.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl_core.constrain.filter import Filter
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError, ExlError, printable

_SNAPSHOTS = 32  # copies kept, one per token; more than a banned string has tokens
_SHARED = ("model", "tokenizer", "token_enforcer")  # attributes that are not copied
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class Foreign:
    """A filter object of exllamav2 as a constraint.

    in_place  the reply uses `wrapped` itself, not a copy. The caller uses the constraint for one
              reply at a time
    healed    text of the last prompt token, for a request that heals it. `begin` of the object gets
              this text, and the object sees the token that replaces it, as in exllamav2's
              streaming generator. None: `begin` gets "", and the object sees the reply alone
    """

    wrapped: Any
    in_place: bool = False
    healed: str | None = None

    def filter(self, vocabulary: Vocabulary) -> ForeignFilter:
        missing = [n for n in ("begin", "feed", "next") if not hasattr(self.wrapped, n)]
        if missing:
            raise ConstraintError(
                "the object is no filter",
                expected="the methods begin, feed and next",
                got=f"{type(self.wrapped).__name__} without {', '.join(missing)}",
            )
        return ForeignFilter(self.wrapped, vocabulary, in_place=self.in_place, healed=self.healed)


class ForeignFilter(Filter):
    wrapped: Any
    """Copy of the object that follows this reply; callers may read the state that it collects."""

    def __init__(
        self,
        original: Any,
        vocabulary: Vocabulary,
        *,
        in_place: bool = False,
        healed: str | None = None,
    ) -> None:
        self._original = original
        self._begins_with = healed or ""
        self.sees_healed = healed is not None
        self._in_place = in_place
        self._vocabulary = vocabulary
        self._token_ids: list[int] = []
        self._snapshots: deque[tuple[int, Any]] = deque(maxlen=_SNAPSHOTS)
        self._is_ended = False
        self._mask: Tensor | None = None
        self._end_tokens: Collection[int] | None = None  # None: `next` was not called in this state
        self.wrapped = self._begun_copy()
        self._has_masks = self._can_mask()
        self.runs_in_background = _supports(self.wrapped, "use_background_worker")

    def mask(self) -> Tensor | None:
        self._update()
        return self._mask

    def accept(self, token_id: int) -> None:
        self._update()
        if not self._in_place:
            with self._errors_of("clone"):
                clone = _clone_of(self.wrapped)
            if clone is not None:
                self._snapshots.append((len(self._token_ids), clone))
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
            self.wrapped = self._begun_copy()
            for token_id in self._token_ids:
                self._next_of(self.wrapped)  # generators call `next` before each token
                self._feed(self.wrapped, token_id)
        self._end_tokens = None
        self._is_ended = False  # tokens that can be undone never follow an end

    @property
    def is_complete(self) -> bool:
        if self._is_ended:
            return True
        self._update()
        if self._mask is None:
            return True
        eos = self._vocabulary.mask_of(self._vocabulary.eos_ids)
        return bool((self._mask & eos).any())

    @property
    def is_finished(self) -> bool:
        return self._is_ended

    def _update(self) -> None:
        """Call `next` of the object, once in each state."""
        if self._end_tokens is not None:
            return
        if self._is_ended:
            self._mask, self._end_tokens = self._vocabulary.mask_of(()), ()
        else:
            self._mask, self._end_tokens = self._next_of(self.wrapped)

    def _next_of(self, wrapped: Any) -> tuple[Tensor | None, Collection[int]]:
        if self._has_masks:
            with self._errors_of("mask_logits"):
                allowed = self._ids_of_mask(wrapped)
            return self._vocabulary.mask_of(allowed), ()
        with self._errors_of("next"):
            pass_tokens, end_tokens = wrapped.next()
            mask = None if pass_tokens is None else self._vocabulary.mask_of(pass_tokens)
        return mask, () if end_tokens is None else end_tokens

    def _can_mask(self) -> bool:
        """The object computes masks, and they work on this machine."""
        if not _supports(self.wrapped, "can_mask_logits"):
            return False
        try:
            self._ids_of_mask(self.wrapped)
        except RuntimeError as error:  # from torch, for memory or a device that is not there
            name, text = type(self._original).__name__, printable(str(error))[:200]
            _LOG.warning("exl: warning: the masks of %s fail; its tokens are used (%s)", name, text)
            return False
        return True

    def _ids_of_mask(self, wrapped: Any) -> list[int]:
        wrapped.prepare_logit_mask()
        logits: Tensor = wrapped.mask_logits(torch.zeros(self._vocabulary.size))
        return [int(i) for i in (logits.flatten() != float("-inf")).nonzero()]

    def _feed(self, wrapped: Any, token_id: int) -> None:
        with self._errors_of("feed"):
            wrapped.feed(torch.tensor([[token_id]]))

    def _begun_copy(self) -> Any:
        wrapped = self._original if self._in_place else _copy_of(self._original)
        with self._errors_of("begin"):
            wrapped.begin(self._begins_with)
        return wrapped

    @contextmanager
    def _errors_of(self, method: str) -> Iterator[None]:
        """Turn an exception of the object into the error of this reply."""
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


def _supports(wrapped: Any, question: str) -> bool:
    return hasattr(wrapped, question) and bool(getattr(wrapped, question)())


def _clone_of(wrapped: Any) -> Any | None:
    """Result of `clone()`, complete; None without such a method, or if it makes no copy."""
    clone = wrapped.clone() if hasattr(wrapped, "clone") else None
    if clone is None or clone is wrapped:
        return None
    if hasattr(clone, "__dict__"):
        for name, value in vars(wrapped).items():
            vars(clone).setdefault(name, value)
        if getattr(clone, "_formatter", None) is not None:
            clone._formatter = copy.deepcopy(clone._formatter)
    return clone


def _copy_of(wrapped: Any) -> Any:
    clone = _clone_of(wrapped)
    if clone is not None:
        return clone
    shared = [getattr(wrapped, name) for name in _SHARED if hasattr(wrapped, name)]
    try:
        return copy.deepcopy(wrapped, {id(part): part for part in shared})
    except Exception:  # noqa: BLE001 - it holds a lock, a generator or the like
        return wrapped
