"""Combination of all filters of one reply into one mask, EOS included.

A token is allowed if every filter allows it. The ids of EOS are allowed if and only if every filter
is complete; the filters' own masks do not count for them. With `prefer_eos`, EOS is then the only
token allowed. The reply ends without EOS as soon as one filter is finished, whether the others are
complete or not, because no token can follow. `is_complete` distinguishes the two cases.

With an executor, the next mask is computed while the model computes logits: the caller calls
`start` after `accept`, and `mask` when the logits are available. All other methods first wait for
that computation or cancel it, so that two threads never use one filter at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from exl_core.constrain.filter import Filter
from exl_core.constrain.vocabulary import Vocabulary
from exl_core.errors import ConstraintError


class FilterSet:
    def __init__(
        self,
        filters: Sequence[Filter],
        eos_ids: Collection[int],
        vocabulary: Vocabulary,
        *,
        prefer_eos: bool = False,
        executor: Executor | None = None,
    ) -> None:
        """`eos_ids` are all tokens that end this reply, with bytes or without."""
        self._filters = tuple(filters)
        self._vocabulary = vocabulary
        self._prefer_eos = prefer_eos
        self._background = executor if any(f.runs_in_background for f in filters) else None
        self._pending: Future[list[Tensor | None]] | None = None
        self._mask: Tensor | None = None
        self._has_mask = False
        self._was_fed: list[bool] = []  # for each accepted token: False if no filter has seen it
        self.set_eos(eos_ids)

    def set_eos(self, eos_ids: Collection[int]) -> None:
        """Let these tokens end the reply, instead of the earlier ones, from the next mask on."""
        self._eos_ids = frozenset(eos_ids)
        self._eos_mask = self._vocabulary.mask_of(self._eos_ids)
        words = self._eos_mask.numpy().view(np.uint32)
        self._eos_words = [(int(place), int(words[place])) for place in words.nonzero()[0]]
        self._has_mask = False

    @property
    def is_complete(self) -> bool:
        """Whether the text so far satisfies every constraint, so that the reply may end."""
        self._finish_pending()
        return all(f.is_complete for f in self._filters)

    @property
    def is_finished(self) -> bool:
        """Whether no token can follow, so that the reply ends without EOS."""
        self._finish_pending()
        return any(f.is_finished for f in self._filters)

    def start(self) -> None:
        """Start computing the next mask in the background. Without an executor, do nothing."""
        if self._background is not None and self._pending is None and not self._has_mask:
            self._pending = self._background.submit(self._masks, in_background=True)

    def mask(self, *, may_end: bool = True) -> Tensor | None:
        """Bitmask of the allowed next tokens; None allows every token. Not to be written to.

        Without `may_end`, EOS is not allowed even if the text is complete. Calls between two
        `accept` must agree on `may_end`: the first result is kept. Raises ConstraintError if no
        token is allowed.
        """
        if not self._has_mask:
            pending, self._pending = self._pending, None
            masks = self._masks(in_background=True) if pending is None else pending.result()
            self._mask = self._combined(masks + self._masks(in_background=False), may_end)
            self._has_mask = True
        return self._mask

    def accept(self, token_id: int, *, is_fed: bool = True) -> None:
        """Advance by one token of the reply. Without `is_fed`, the filters do not see it."""
        self._finish_pending()
        is_fed = is_fed and token_id not in self._eos_ids
        if is_fed:
            for f in self._filters:
                f.accept(token_id)
        self._was_fed.append(is_fed)
        self._has_mask = False

    def healed_mask(self, mask: Tensor) -> Tensor:
        """`mask` of the tokens that may replace the last prompt token, limited by the filters that
        see that token."""
        given = [f.mask() for f in self._filters if f.sees_healed]
        combined = reduce(Tensor.bitwise_and, [mask, *(one for one in given if one is not None)])
        if not combined.numpy().any():
            raise ConstraintError(
                "no token that begins with the last prompt token satisfies the constraints",
                next_step="Turn token healing off, or end the prompt elsewhere.",
            )
        return combined

    def accept_healed(self, token_id: int) -> None:
        """Advance the filters that see the token that replaces the last prompt token."""
        for f in self._filters:
            if f.sees_healed:
                f.accept(token_id)

    def rewind(self, count: int) -> None:
        """Undo the last `count` tokens."""
        self._finish_pending()
        if count == 0:
            return
        num_fed = sum(self._was_fed[-count:])
        del self._was_fed[-count:]
        if num_fed:
            for f in self._filters:
                f.rewind(num_fed)
        self._has_mask = False

    def _finish_pending(self) -> None:
        """Wait for the background computation, or cancel it."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.cancel():
            pending.exception()  # waits; an error is raised again by the next call of `mask`

    def _masks(self, *, in_background: bool) -> list[Tensor | None]:
        return [f.mask() for f in self._filters if f.runs_in_background == in_background]

    def _combined(self, masks: list[Tensor | None], may_end: bool) -> Tensor | None:
        may_end = may_end and all(f.is_complete for f in self._filters)
        if may_end and self._prefer_eos and self._eos_words:
            return self._eos_mask
        given = [mask for mask in masks if mask is not None]
        if not given:
            if may_end:
                return None
            given = [self._vocabulary.everything()]
        combined = self._with_eos(reduce(Tensor.bitwise_and, given), may_end)
        if not combined.numpy().any():
            raise ConstraintError(
                "no token may come next under the constraints of this reply",
                where=f"token {len(self._was_fed)} of the reply",
                next_step="Do the constraints contradict each other, or this vocabulary?",
            )
        return combined

    def _with_eos(self, mask: Tensor, may_end: bool) -> Tensor:
        """The mask with all ids of EOS set or cleared. Not copied if it needs no change."""
        # Only the words that hold EOS are touched, because a forward pass evicts the mask from the
        # CPU caches. numpy is several times as fast as torch on tensors this small.
        words = mask.numpy().view(np.uint32)
        found = [(place, int(words[place]), eos) for place, eos in self._eos_words]
        if all(word & eos == (eos if may_end else 0) for _, word, eos in found):
            return mask
        words = words.copy()
        for place, word, eos in found:
            words[place] = word | eos if may_end else word & ~eos
        return torch.from_numpy(words.view(np.int32))
