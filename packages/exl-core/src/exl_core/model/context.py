"""Sequences that a caller drives by hand: a contiguous cache, and passes over it.

For custom loops, without requests, scheduler or sampler. Each row is a sequence with its own
length, so a batch of texts of different lengths needs neither padding nor a mask. A greedy loop:

    context = Context(model, max_len=256, batch_size=2)
    logits = context.feed([prompt_ids, other_prompt_ids], LogitRows.LAST)
    for _ in range(20):
        newest = [row[-1].argmax() for row in logits]
        logits = context.feed([[int(token_id)] for token_id in newest])

Assigning a smaller `length` or `lengths` rewinds: later tokens are dropped. Keys and values depend
on the adapters of the pass that computed them. The caller must not mix them within a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat, pages_for
from exl_core.cache.store import KVStore
from exl_core.errors import RequestError, wrong_type
from exl_core.model.adapters import AdapterUse
from exl_core.model.embedded import EMBEDDED_FROM, EmbeddedSpan
from exl_core.model.observe import Observer
from exl_core.model.runner import make_batch, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer


class Context:
    """Cache of `batch_size` rows of up to `max_len` tokens each.

    One model can serve several contexts. On the CPU, memory becomes resident as it is written.
    """

    def __init__(
        self,
        model: Transformer,
        max_len: int,
        *,
        batch_size: int = 1,
        kv_format: KVFormat = KVFormat.FP16,
        store: KVStore | None = None,
    ) -> None:
        """`store`: memory that the caller owns, of at least the pages of all rows; its precision
        then replaces `kv_format`."""
        _check_model(model)
        max_len, batch_size = _whole(max_len, "max_len"), _whole(batch_size, "batch_size")
        if max_len < 1 or batch_size < 1:
            raise RequestError(
                "a context needs at least one row and one token",
                got=f"{batch_size} rows of {max_len} tokens",
            )
        self.model = model
        self.max_len = max_len
        self.batch_size = batch_size
        self._pages_each = pages_for(max_len)
        num_pages = batch_size * self._pages_each
        if store is None:
            store = store_for(model, kv_format, num_pages, num_states=batch_size)
        self.store = store
        self.kv_format = self.store.kv_format
        if self.store.num_pages < num_pages:
            raise RequestError(
                "the store is too small for this context",
                expected=f"{num_pages} pages",
                got=self.store.num_pages,
            )
        self._lengths = [0] * batch_size

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens in each row."""
        return tuple(self._lengths)

    @lengths.setter
    def lengths(self, lengths: Sequence[int]) -> None:
        wanted = [_whole(length, "a length") for length in _listed(lengths, "lengths")]
        if len(wanted) != self.batch_size:
            raise RequestError("not a length for each row", expected=self.batch_size, got=wanted)
        for row, (length, held) in enumerate(zip(wanted, self._lengths, strict=True)):
            if not 0 <= length <= held:
                raise RequestError(
                    "a row can only be cut back",
                    where=f"row {row}",
                    expected=f"0 to {held} tokens",
                    got=length,
                )
            if self.store.states is not None and length not in (0, held):
                raise RequestError(
                    "a row of a model with recurrent layers can only be emptied",
                    where=f"row {row}",
                    expected=f"0 or {held} tokens",
                    got=length,
                )
        self._lengths = wanted

    @property
    def length(self) -> int:
        """Number of tokens in every row. Raises RequestError if the rows differ."""
        if len(set(self._lengths)) != 1:
            raise RequestError("the rows have different lengths", got=self._lengths)
        return self._lengths[0]

    @length.setter
    def length(self, length: int) -> None:
        self.lengths = [length] * self.batch_size

    def forward(
        self,
        token_ids: Tensor,
        logits: LogitRows = LogitRows.ALL,
        *,
        adapters: Sequence[AdapterUse] = (),
        embeddings: Sequence[EmbeddedSpan] = (),
        observe: Observer | None = None,
    ) -> Tensor:
        """`feed` for rows of equal size: ids [b, q] -> [b, q (or 1, or 0), vocab]."""
        if token_ids.dim() != 2:
            raise RequestError("expected ids of all rows", got=f"shape {list(token_ids.shape)}")
        rows = self.feed(
            token_ids.tolist(), logits, adapters=adapters, embeddings=embeddings, observe=observe
        )
        return torch.stack(rows)

    def feed(
        self,
        token_ids: Sequence[Sequence[int] | Tensor] | Tensor,
        logits: LogitRows = LogitRows.ALL,
        *,
        adapters: Sequence[AdapterUse] = (),
        embeddings: Sequence[EmbeddedSpan] = (),
        observe: Observer | None = None,
    ) -> list[Tensor]:
        """Runs one pass over the new tokens of every row. A row is a list, a tensor or an array of
        ids, and may be empty.

        Returns each row's logits, float32 [n, vocab_size]: for all of its new tokens, for the last
        one, or for none. Ids from `EMBEDDED_FROM` on are looked up in `embeddings`. `observe` gets
        the states of all rows concatenated. Memory grows with the number of tokens in the pass, so
        feed a long text in pieces.
        """
        rows = self._checked(token_ids)
        counts = [_logit_count(logits, len(ids)) for ids in rows]
        self.model.check_adapters(adapters)
        segments = [
            Segment(
                tuple(ids),
                self._lengths[row],
                tuple(self._pages(row, self._lengths[row] + len(ids))),
                logits,
                tuple(adapters),
                tuple(embeddings),
                None if self.store.states is None else row,
            )
            for row, ids in enumerate(rows)
            if ids
        ]
        if not segments:
            return [torch.empty(0, self.model.config.vocab_size) for _ in counts]
        found = self.model.forward(make_batch(segments, PAGE_SIZE), self.store, observe)
        self._lengths = [held + len(ids) for held, ids in zip(self._lengths, rows, strict=True)]
        return list(found.split_with_sizes(counts))

    def clone(self) -> Context:
        """A new context with a copy of all rows."""
        other = Context(
            self.model, self.max_len, batch_size=self.batch_size, kv_format=self.kv_format
        )
        for row in range(self.batch_size):
            self.copy_row(row, [row], to=other)
        return other

    def copy_row(
        self,
        source: int,
        targets: Sequence[int],
        *,
        length: int | None = None,
        to: Context | None = None,
    ) -> None:
        """Copies row `source` to the rows `targets` of this context, or of `to`.

        `length`: copies the first `length` tokens only.
        """
        other = self if to is None else to
        source = _row(source, self.batch_size, "source row")
        listed = _listed(targets, "the target rows")
        rows = [_row(target, other.batch_size, "target row") for target in listed]
        held = self._lengths[source]
        length = held if length is None else _whole(length, "length")
        if not 0 <= length <= min(held, other.max_len):
            raise RequestError(
                "so many tokens cannot be copied",
                expected=f"at most {min(held, other.max_len)}",
                got=length,
            )
        if other.kv_format is not self.kv_format:
            raise RequestError(
                "contexts of different precision",
                expected=self.kv_format.value,
                got=other.kv_format.value,
            )
        if self.store.states is not None and length != held:
            raise RequestError(
                "a row of a model with recurrent layers can only be copied whole",
                expected=held,
                got=length,
            )
        for target in rows:
            self.store.transfer_state(other.store, source, target)
            self._copy_pages(other, self._pages(source, length), other._pages(target, length))
            other._lengths[target] = length

    def _copy_pages(self, other: Context, sources: range, targets: range) -> None:
        if (other is self and sources == targets) or not sources:
            return
        self.store.transfer_pages(other.store, list(zip(sources, targets, strict=True)))

    def _pages(self, row: int, length: int) -> range:
        """Pages that hold the first `length` tokens of a row."""
        first = row * self._pages_each
        return range(first, first + pages_for(length))

    def _checked(self, token_ids: object) -> list[list[int]]:
        """The ids by row, as lists."""
        rows = [_listed(ids, "a row of ids") for ids in _listed(token_ids, "the rows of ids")]
        if len(rows) != self.batch_size:
            raise RequestError(
                "not the tokens of each row", expected=self.batch_size, got=len(rows)
            )
        for row, (ids, held) in enumerate(zip(rows, self._lengths, strict=True)):
            if held + len(ids) > self.max_len:
                raise RequestError(
                    f"{len(ids)} tokens more than the {held} it holds do not fit",
                    where=f"row {row}",
                    expected=f"at most {self.max_len} in all",
                    got=held + len(ids),
                )
            vocab_size = self.model.config.vocab_size
            odd = [i for i in ids if not _is_token(i, vocab_size)]
            if odd:
                raise RequestError(
                    "not a token of the model",
                    where=f"row {row}",
                    expected=f"0 to {vocab_size - 1}",
                    got=repr(odd[0]),
                )
        return rows


def _check_model(model: object) -> None:
    """Refuses a LoadedModel, which this package may not import, by its attribute `model`."""
    if isinstance(getattr(model, "model", None), Transformer):
        raise wrong_type(
            "the model of a context",
            "a Transformer",
            type(model).__name__,
            next_step="Pass its attribute 'model': Context(loaded.model, ...).",
        )


def _listed(items: object, name: str) -> list[Any]:
    """Items of a list, a tensor or an array. Numbers of a tensor or an array become Python's."""
    found: Any = items.tolist() if hasattr(items, "tolist") else items
    try:
        return list(found)
    except TypeError:
        raise wrong_type(name, "a list, a tensor or an array", items) from None


def _whole(number: object, name: str) -> int:
    try:
        return index(number)  # type: ignore[arg-type]  # refuses texts and floats
    except TypeError:
        raise wrong_type(name, "a whole number", number) from None


def _row(row: object, batch_size: int, name: str) -> int:
    number = _whole(row, name)
    if not 0 <= number < batch_size:
        raise RequestError(f"no such {name}", expected=f"0 to {batch_size - 1}", got=number)
    return number


def _is_token(token: object, vocab_size: int) -> bool:
    """Whether `token` is an id of the vocabulary, or stands for an embedding vector."""
    try:
        number = index(token)  # type: ignore[arg-type]  # refuses texts and floats
    except TypeError:
        return False
    return 0 <= number < vocab_size or number >= EMBEDDED_FROM


def _logit_count(logits: object, num_tokens: int) -> int:
    """Number of logit rows for `num_tokens` new tokens."""
    if not isinstance(logits, LogitRows):
        raise wrong_type("logits", "LogitRows." + ", ".join(LogitRows.__members__), logits)
    return {
        LogitRows.ALL: num_tokens,
        LogitRows.LAST: min(1, num_tokens),
        LogitRows.NONE: 0,
    }[logits]
