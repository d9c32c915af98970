"""Drafter that uses the model's own layer for multi-token prediction (MTP).

The layer reads the states that the model computed for the tokens of a sequence, which the model's
cache keeps for it. Its own keys and values are in a second cache with the same page numbers, filled
on demand like that of a draft model. Row i of a sequence stands for token i + 1.

Rows of draft tokens are not kept: they were computed from the layer's own states, and are computed
again from the model's states once the model has verified them.

The last position of a page that several sequences share depends on the first token of the next
page. It is that of the sequence which computed the page first. This changes drafts only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from exl_core.cache.page_pool import page_key
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError
from exl_core.model.mtp import MtpLayer, MtpModel
from exl_core.model.segment import Segment
from exl_core.speculate.draft_model import DEFAULT_PROBABILITY, Drawing, ModelDrafter
from exl_core.speculate.drafter import NO_DRAFT, Draft, DraftJob

_LEAST = 2
"""Tokens of a sequence with a row: the states of one, and the token after it."""


class MtpDrafter:
    """The MTP layer as a drafter of one engine. The settings are those of `ModelDrafter`."""

    def __init__(
        self,
        layer: MtpLayer,
        *,
        vocab_size: int,
        max_tokens: int = 1,
        min_probability: float = DEFAULT_PROBABILITY,
        prefill_chunk: int = 512,
    ) -> None:
        self.layer = layer
        self.max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._min_probability = min_probability
        self._prefill_chunk = prefill_chunk
        self._rows: _RowDrafter | None = None

    def attach(self, store: KVStore) -> None:
        """Makes the layer's cache, with the pages of `store`, the cache of the model."""
        self._rows = _RowDrafter(
            MtpModel(self.layer, store),
            vocab_size=self._vocab_size,
            num_pages=store.num_pages,
            kv_format=store.kv_format,
            max_tokens=self.max_tokens,
            min_probability=self._min_probability,
            prefill_chunk=self._prefill_chunk,
        )

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        drafter = self._attached
        ready = [job for job in jobs if len(job.token_ids) >= _LEAST]
        drafts = iter(drafter.propose([drafter.rows_of(job) for job in ready]))
        return [next(drafts) if len(job.token_ids) >= _LEAST else NO_DRAFT for job in jobs]

    def forget(self, request_id: str) -> None:
        self._attached.forget(request_id)

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        self._attached.moved(moves)

    @property
    def _attached(self) -> _RowDrafter:
        if self._rows is None:
            raise RequestError(
                "the drafter belongs to no engine", next_step="Pass it to Engine(drafter=...)."
            )
        return self._rows


class _RowDrafter(ModelDrafter):
    """Drafts for sequences of rows."""

    def rows_of(self, job: DraftJob) -> DraftJob:
        """The job with rows in place of tokens. The keys stay those of the text."""
        keys = self._pages.keys_of(job.token_ids[:-1], job.page_keys, job.key_root)
        root = page_key(job.key_root, job.token_ids[:1])
        return replace(job, token_ids=job.token_ids[1:], page_keys=keys, key_root=root)

    def _pages_until(self, end: int, job: DraftJob) -> tuple[int, ...]:
        return super()._pages_until(end + 1, job)  # the states of a row go to the slot after it

    def _drew(self, each: Drawing, segment: Segment) -> None:
        self._pages.drop(segment.past_len, each.job.page_ids)
