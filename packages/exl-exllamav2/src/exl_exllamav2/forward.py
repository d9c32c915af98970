"""`model.forward`: passes over tensors of ids, with a cache of the old kind or without one.

Left padding is dropped: each row of exl's context has its own length. The logits are computed in
float32 and returned in half precision, padded to a multiple of 32 columns as exllamav2 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from exl_core.engine.log_probs import rows_of_logits
from exl_core.model.context import Context
from exl_core.model.observe import StateRecorder
from exl_core.model.segment import LogitRows
from exl_exllamav2.embeddings import spans_of
from exl_exllamav2.errors import OldAssertionError, no_ids, refuse
from exl_exllamav2.lora import adapters_of
from exl_exllamav2.modules import InterventionObserver

if TYPE_CHECKING:
    from exl_exllamav2.cache import ExLlamaV2CacheBase
    from exl_exllamav2.model import ExLlamaV2

PAD_LOGIT = -65504.0
"""Logit of columns beyond the vocabulary: the lowest finite half."""


class Wanted(NamedTuple):
    """Results that a call asks for."""

    nothing: bool = False
    only_last: bool = False
    state: bool = False
    on_cpu: bool = False


class ForwardOwner:
    """User of a cache that runs passes by hand. `paddings`: dropped columns, by row."""

    def __init__(self, model: ExLlamaV2, cache: ExLlamaV2CacheBase) -> None:
        self.context = Context(
            model.weights, cache.max_seq_len, batch_size=cache.batch_size, store=cache.store
        )
        self.paddings = [0] * cache.batch_size
        self.ids: list[list[int]] = [[] for _ in self.paddings]

    @property
    def held_len(self) -> int:
        return max(n + pad for n, pad in zip(self.context.lengths, self.paddings, strict=True))

    def held_ids(self) -> list[list[int]]:
        return self.ids

    def leave(self) -> None:
        self.cut(0)

    def cut(self, columns: int) -> None:
        """Keep the first columns, padding included."""
        lengths = [
            min(n, max(0, columns - pad))
            for n, pad in zip(self.context.lengths, self.paddings, strict=True)
        ]
        self.context.lengths = lengths
        self.ids = [row[:n] for row, n in zip(self.ids, lengths, strict=True)]
        if columns == 0:
            self.paddings = [0] * len(self.paddings)

    def feed(
        self, rows: Sequence[Sequence[int]], logits: LogitRows, **options: Any
    ) -> list[Tensor]:
        """Run one pass; rows that the program left out of a smaller batch get no tokens."""
        full = [*rows, *[[] for _ in range(self.context.batch_size - len(rows))]]
        found = self.context.feed(full, logits, **options)
        for held, new in zip(self.ids, full, strict=True):
            held.extend(new)
        return found[: len(rows)]


def run_each(
    model: ExLlamaV2,
    input_ids: Tensor,
    caches: Sequence[ExLlamaV2CacheBase],
    mask: Tensor | None,
    wanted: Wanted,
    loras: Any,
) -> Any:
    """One row per cache, one after the other."""
    found = [
        run(model, row[None], cache, None if mask is None else mask[i : i + 1], wanted, loras)
        for i, (row, cache) in enumerate(zip(input_ids, caches, strict=True))
    ]
    return None if wanted.nothing else torch.cat(found)


def run(
    model: ExLlamaV2,
    input_ids: Tensor,
    cache: ExLlamaV2CacheBase | None,
    mask: Tensor | None,
    wanted: Wanted,
    loras: Any = None,
    embeddings: Sequence[Any] = (),
    abort: Any = None,
) -> Any:
    """Logits [b, n or 1, Vp], a pair with the last state, or None."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise no_ids(input_ids)
    batch, count = input_ids.shape
    owner, past = _owner(model, cache, batch, count)
    pads = _left_padding(mask, batch)
    if past == 0:
        owner.paddings[:batch] = [min(pad, count) for pad in pads]
    skipped = [max(0, min(count, pad - past)) for pad in owner.paddings[:batch]]
    rows = [[max(0, i) for i in ids] for ids in input_ids.tolist()]
    recorder = StateRecorder() if wanted.state else None
    observer = InterventionObserver(model.modules, recorder)
    options = {
        "adapters": adapters_of(loras),
        "embeddings": spans_of(embeddings),
        "observe": observer if observer.is_needed else None,
    }
    kept: list[list[Tensor]] = [[] for _ in rows]
    states: list[list[Tensor]] = [[] for _ in rows]
    for start, end in _chunks(model, count, batch, wanted):
        if abort is not None and abort.is_set():
            return None
        part = [row[max(start, skip) : end] for row, skip in zip(rows, skipped, strict=True)]
        found = owner.feed(part, _rows_of(wanted, is_last=end == count), **options)
        for held, new in zip(kept, found, strict=True):
            if len(new):
                held.append(new.clone())
        if recorder is not None and not wanted.nothing:
            sizes = [len(one) for one in found]
            for held, new in zip(states, torch.split(recorder.last, sizes), strict=True):
                held.append(new.clone())
    if wanted.nothing:
        return None
    width = 1 if wanted.only_last else count
    logits = _padded(kept, width, skipped, model.config.vocab_size, wanted)
    if recorder is None:
        return logits
    return logits, _aligned(states, width, skipped, wanted, 0.0, states[0][0].shape[-1])


def _owner(
    model: ExLlamaV2, cache: ExLlamaV2CacheBase | None, batch: int, count: int
) -> tuple[ForwardOwner, int]:
    """Context of the cache with the tokens that it holds, and its number of columns."""
    if cache is None:
        from exl_exllamav2.cache import ExLlamaV2CacheBase

        limit = model.config.max_input_len * model.config.max_batch_size // batch
        if count > limit:
            raise OldAssertionError(
                "without a cache the input is too long", expected=f"at most {limit}", got=count
            )
        temporary = ExLlamaV2CacheBase(model, batch, max(1, count))
        return ForwardOwner(model, temporary), 0
    past = cache.current_seq_len
    if past + count > cache.max_seq_len:
        raise OldAssertionError(
            "the cache is full",
            expected=f"at most {cache.max_seq_len} columns",
            got=past + count,
        )
    if batch > cache.batch_size:
        raise OldAssertionError(
            "the cache has too few rows", expected=f"at least {batch}", got=cache.batch_size
        )
    owner, pending = cache.owner, cache.pending_ids
    # A model that was loaded again computes the cached tokens with its new weights.
    own = owner if isinstance(owner, ForwardOwner) else None
    if own is not None and own.context.model is model.weights and pending is None:
        return own, past
    if pending is None and owner is not None:
        pending = owner.held_ids()
    cache.pending_ids = None
    mine = ForwardOwner(model, cache)
    cache.take(mine)
    if pending is not None and any(pending):
        _feed_again(model, mine, pending)
    return mine, past


def _feed_again(model: ExLlamaV2, owner: ForwardOwner, rows: Sequence[Sequence[int]]) -> None:
    """Compute tokens that another owner had cached."""
    for start, end in _chunks(model, max(map(len, rows)), len(rows), Wanted(nothing=True)):
        owner.feed([row[start:end] for row in rows], LogitRows.NONE)


def _left_padding(mask: Tensor | None, batch: int) -> list[int]:
    """Masked columns at the left of each row. Masked columns elsewhere are refused."""
    if mask is None:
        return [0] * batch
    masked = mask.cpu().view(mask.shape[0], -1) < -1e4  # [b, width]
    if masked.shape[0] == 1:
        masked = masked.expand(batch, -1)
    counts = masked.sum(-1)
    ordered = torch.arange(masked.shape[1]) < counts[:, None]
    if not torch.equal(masked, ordered):
        refuse("input_mask", "masked columns within a row", "Mask padding at the left only.")
    return [int(n) for n in counts]


def _chunks(model: ExLlamaV2, count: int, batch: int, wanted: Wanted) -> list[tuple[int, int]]:
    """Pieces of an input, so that a pass stays small. There is at least one."""
    size = max(1, min(model.config.max_input_len, 2048) // batch)
    if not wanted.nothing and not wanted.only_last:
        size = max(1, min(size, rows_of_logits(model.config.vocab_size) // batch))
    return [(start, min(start + size, count)) for start in range(0, count, size)] or [(0, 0)]


def _rows_of(wanted: Wanted, *, is_last: bool) -> LogitRows:
    if wanted.nothing:
        return LogitRows.NONE
    if wanted.only_last:
        return LogitRows.LAST if is_last else LogitRows.NONE
    return LogitRows.ALL


def _padded(
    kept: Sequence[Sequence[Tensor]],
    width: int,
    skipped: Sequence[int],
    vocab_size: int,
    wanted: Wanted,
) -> Tensor:
    """Half [b, width, Vp]."""
    padded_vocab = -(-vocab_size // 32) * 32
    logits = _aligned(kept, width, skipped, wanted, 0.0, padded_vocab)
    logits[:, :, vocab_size:] = PAD_LOGIT
    return logits


def _aligned(
    kept: Sequence[Sequence[Tensor]],
    width: int,
    skipped: Sequence[int],
    wanted: Wanted,
    fill: float,
    size: int,
) -> Tensor:
    """Half [b, width, size]: rows of each sequence at the right, `fill` at dropped columns."""
    device = next((part.device for parts in kept for part in parts), torch.device("cpu"))
    out = torch.full(
        (len(kept), width, size), fill, dtype=torch.half, device="cpu" if wanted.on_cpu else device
    )
    for row, (parts, skip) in enumerate(zip(kept, skipped, strict=True)):
        if parts:
            values = torch.cat(list(parts))
            first = 0 if wanted.only_last else skip
            out[row, first : first + len(values), : values.shape[1]] = values.clamp(-65504, 65504)
    return out
