"""All constraints of one reply together, and the end of the reply.

A token may come if every filter lets it. The ids of EOS may come if, and only if, every filter is
complete, whatever the filters' masks say of them; with `prefer_eos` nothing else may come then.
The reply ends by itself as soon as any one filter is finished, be the others complete or not: a
finished filter lets nothing follow, so there is no way on. `is_complete` tells both cases apart.

With an executor the next mask can be computed while the model computes logits: `start` after
`accept`, `mask` when the logits are there. The other methods wait for that computation, or call it
off, so that no filter is ever used by two threads at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from exl_core.constrain.filter import ConstraintError, Filter
from exl_core.constrain.vocabulary import Vocabulary


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
        """`eos_ids`: whatever ends this reply as a token, with bytes or without."""
        self._filters = tuple(filters)
        self._eos_ids = frozenset(eos_ids)
        self._vocabulary = vocabulary
        self._eos_mask = vocabulary.mask_of(self._eos_ids)
        words = self._eos_mask.numpy().view(np.uint32)
        self._eos_words = [(int(place), int(words[place])) for place in words.nonzero()[0]]
        self._prefer_eos = prefer_eos
        self._background = executor if any(f.runs_in_background for f in filters) else None
        self._pending: Future[list[Tensor | None]] | None = None
        self._mask: Tensor | None = None
        self._has_mask = False
        self._was_fed: list[bool] = []  # by token accepted: EOS is no filter's business

    @property
    def is_complete(self) -> bool:
        """Every constraint is satisfied by the text so far: the reply may end here."""
        self._settle()
        return all(f.is_complete for f in self._filters)

    @property
    def is_finished(self) -> bool:
        """Nothing can follow: the reply ends here, without EOS."""
        self._settle()
        return any(f.is_finished for f in self._filters)

    def start(self) -> None:
        """Begin computing the next mask in the background; without an executor, do nothing."""
        if self._background is not None and self._pending is None and not self._has_mask:
            self._pending = self._background.submit(self._masks, in_background=True)

    def mask(self, *, may_end: bool = True) -> Tensor | None:
        """Packed bits of the tokens that may come next, None: any may. Read it, do not write it.

        Without `may_end` EOS may not come, complete or not; as long as the same tokens were
        accepted, all calls say the same. `ConstraintError` where nothing may come.
        """
        if not self._has_mask:
            pending, self._pending = self._pending, None
            masks = self._masks(in_background=True) if pending is None else pending.result()
            self._mask = self._combined(masks + self._masks(in_background=False), may_end)
            self._has_mask = True
        return self._mask

    def accept(self, token_id: int) -> None:
        """The reply goes on with this token."""
        self._settle()
        is_fed = token_id not in self._eos_ids
        if is_fed:
            for f in self._filters:
                f.accept(token_id)
        self._was_fed.append(is_fed)
        self._has_mask = False

    def rewind(self, count: int) -> None:
        """Take back the last `count` tokens."""
        self._settle()
        if count == 0:
            return
        num_fed = sum(self._was_fed[-count:])
        del self._was_fed[-count:]
        if num_fed:
            for f in self._filters:
                f.rewind(num_fed)
        self._has_mask = False

    def _settle(self) -> None:
        """After this nothing runs in the background."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.cancel():
            pending.exception()  # waits; a mask that failed will fail again where it is asked for

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
        """The mask with all of EOS, or none of it; the mask itself where that is so already."""
        # In numpy, and only in the words of EOS: a pass leaves nothing of a mask in the caches, and
        # on tensors as small as these torch takes several times as long.
        words = mask.numpy().view(np.uint32)
        found = [(place, int(words[place]), eos) for place, eos in self._eos_words]
        if all(word & eos == (eos if may_end else 0) for _, word, eos in found):
            return mask
        words = words.copy()
        for place, word, eos in found:
            words[place] = word | eos if may_end else word & ~eos
        return torch.from_numpy(words.view(np.int32))
