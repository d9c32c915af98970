"""Changes to single logits by history and settings, as ids and new values.

This is the incremental form of the steps in `penalties.py`. It keeps the history as an array, and
the ids of biases, bans and allowed tokens as tensors, from token to token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from exl_core.ops.masks import pack, unpack
from exl_core.sampling.chain import dry_of, penalties_of
from exl_core.sampling.history import History
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.penalties import bias_tensors, dry_losses, penalized
from exl_core.sampling.steps import DROPPED, as_ids

_Edit = Callable[[Tensor], tuple[Tensor, Tensor]]


class Edits:
    """Changes of one sampler. The vocabulary size is the same in every call."""

    def __init__(self, params: SamplerParams) -> None:
        self._params = params
        self._history = History()
        self._penalties = penalties_of(params)
        self._dry = dry_of(params)
        self._needs_history = params.has_penalties or params.dry_multiplier > 0.0
        # Without weights and counts, the set of tokens that occurred is sufficient.
        self._is_distinct = params.penalty_range is None and params.frequency_penalty == 0.0
        self._bias: tuple[Tensor, Tensor] | None = None
        self._banned: tuple[frozenset[int], Tensor] | None = None
        self._allowed: Tensor | None = None

    @property
    def read_logits(self) -> bool:
        """Some new value depends on the logit that it replaces."""
        return self._needs_history or bool(self._params.token_bias)

    def fixed(
        self, banned: Collection[int], vocab_size: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Ids and values of bans, which depend on no logits."""
        if not (self._params.banned_tokens or banned):
            return None, None
        dropped = self._banned_ids(banned, vocab_size)
        return dropped, torch.full((len(dropped),), DROPPED)

    def sparse(
        self, logits: Tensor, history: Sequence[int], banned: Collection[int]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits, and ids with values that the caller still has to write to them, in order."""
        edits = self._edits(history, len(logits))
        ids: Tensor | None = None
        values: Tensor | None = None
        if len(edits) == 1:
            ids, values = edits[0](logits)
        elif edits:
            logits = logits.clone()
            for edit in edits:
                ids, values = edit(logits)
                logits[ids] = values
            ids = values = None
        dropped, infinite = self.fixed(banned, len(logits))
        if ids is None or values is None:
            return logits, dropped, infinite
        if dropped is not None and infinite is not None:
            ids, values = torch.cat((ids, dropped)), torch.cat((values, infinite))
        return logits, ids, values

    def dense(
        self, logits: Tensor, history: Sequence[int], banned: Collection[int], mask: Tensor | None
    ) -> Tensor:
        """New logits with all changes applied."""
        vocab_size = len(logits)
        logits = logits.clone()
        for edit in self._edits(history, vocab_size):
            ids, values = edit(logits)
            logits[ids] = values
        if self._params.banned_tokens or banned:
            logits[self._banned_ids(banned, vocab_size)] = DROPPED
        mask = self.allowed(mask, vocab_size)
        if mask is not None:
            logits.masked_fill_(~unpack(mask, vocab_size), DROPPED)
        return logits

    def allowed(self, mask: Tensor | None, vocab_size: int) -> Tensor | None:
        """Intersection of the call's mask and the allowed tokens of the settings."""
        if self._params.allowed_tokens is None:
            return mask
        if self._allowed is None or len(self._allowed) != -(-vocab_size // 32):
            self._allowed = pack(self._params.allowed_tokens, vocab_size)
        return self._allowed if mask is None else self._allowed & mask[: len(self._allowed)]

    def rewind(self, length: int) -> None:
        self._history.rewind(length)

    def _edits(self, history: Sequence[int], vocab_size: int) -> list[_Edit]:
        edits: list[_Edit] = []
        past = self._history.follow(history) if self._needs_history else None
        if past is not None and self._params.has_penalties:
            occurred = self._history.distinct if self._is_distinct else past
            edits.append(lambda logits: penalized(logits, occurred, self._penalties))
        if self._params.token_bias:
            edits.append(self._biased)
        if past is not None and self._params.dry_multiplier > 0.0:
            tokens, losses = dry_losses(past, self._dry, vocab_size)
            if len(tokens) > 0:
                edits.append(lambda logits: (tokens, logits[tokens] - losses))
        return edits

    def _biased(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self._bias is None:
            self._bias = bias_tensors(self._params.token_bias, len(logits))
        ids, bias = self._bias
        return ids, logits[ids] + bias

    def _banned_ids(self, banned: Collection[int], vocab_size: int) -> Tensor:
        """Banned ids as a tensor, reused while the set of banned tokens is the same."""
        key = self._params.banned_tokens.union(banned)
        if self._banned is None or self._banned[0] != key:
            self._banned = (key, as_ids(key, vocab_size))
        return self._banned[1]
