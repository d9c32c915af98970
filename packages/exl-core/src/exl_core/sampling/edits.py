"""Changes to single logits by history and settings, as one edit per token.

This is the incremental form of the steps in `penalties.py`. It keeps the history as an array, and
the ids of biases, bans and allowed tokens as tensors, from token to token. No edit depends on the
value of a logit, so that a GPU can apply all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from exl_core.ops.masks import pack, unpack
from exl_core.ops.sampling import LogitEdits
from exl_core.sampling.chain import dry_of, penalties_of
from exl_core.sampling.history import History
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.penalties import (
    bias_edits,
    dry_edits,
    edited,
    merged,
    penalty_edits,
    shifts,
    uniform_penalty_edits,
)
from exl_core.sampling.steps import DROPPED, as_ids


class Edits:
    """Changes of one sampler. The vocabulary size is the same in every call."""

    def __init__(self, params: SamplerParams) -> None:
        self._params = params
        self._history = History()
        self._penalties = penalties_of(params)
        self._dry = dry_of(params)
        self._needs_history = params.has_penalties or params.dry_multiplier > 0.0
        # Without weights and counts, the set of tokens that occurred is sufficient.
        self._is_uniform = params.penalty_range is None and params.frequency_penalty == 0.0
        self._bias: LogitEdits | None = None
        self._banned: tuple[frozenset[int], LogitEdits] | None = None
        self._allowed: Tensor | None = None

    def edits(
        self, history: Sequence[int], banned: Collection[int], vocab_size: int
    ) -> LogitEdits | None:
        """One edit for each token that penalties, biases, DRY or bans change."""
        parts: list[LogitEdits] = []
        past = self._history.follow(history) if self._needs_history else None
        if past is not None and self._params.has_penalties:
            parts.append(
                uniform_penalty_edits(self._history.distinct, self._penalties, vocab_size)
                if self._is_uniform
                else penalty_edits(past, self._penalties, vocab_size)
            )
        if self._params.token_bias:
            if self._bias is None:
                self._bias = bias_edits(self._params.token_bias, vocab_size)
            parts.append(self._bias)
        if past is not None and self._params.dry_multiplier > 0.0:
            parts.append(dry_edits(past, self._dry, vocab_size))
        if self._params.banned_tokens or banned:
            parts.append(self._bans(banned, vocab_size))
        parts = [part for part in parts if len(part.ids) > 0]
        return merged(parts) if parts else None

    def dense(
        self, logits: Tensor, history: Sequence[int], banned: Collection[int], mask: Tensor | None
    ) -> Tensor:
        """New logits with all changes applied."""
        vocab_size = len(logits)
        edits = self.edits(history, banned, vocab_size)
        logits = logits.clone() if edits is None else edited(logits, edits)
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

    def _bans(self, banned: Collection[int], vocab_size: int) -> LogitEdits:
        """Edits of banned ids, reused while the set of banned tokens is the same."""
        key = self._params.banned_tokens.union(banned)
        if self._banned is None or self._banned[0] != key:
            ids = as_ids(key, vocab_size)
            self._banned = (key, shifts(ids, torch.full((len(ids),), DROPPED)))
        return self._banned[1]
