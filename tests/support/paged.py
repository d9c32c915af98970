"""Drives a model through a paged cache whose pages are in scattered order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from exl_core.cache.format import PAGE_SIZE, KVFormat
from exl_core.cache.state_store import StateStore
from exl_core.cache.store import KVStore
from exl_core.model.batch import Batch
from exl_core.model.transformer import Transformer
from exl_core.session.load import LoadOptions, load_model


class PagedRun:
    """Several sequences in one cache. Each pass feeds tokens to some of them."""

    def __init__(
        self, model: Transformer, num_seqs: int, max_len: int, kv_format: KVFormat = KVFormat.FP32
    ) -> None:
        config = model.config
        pages_each = -(-max_len // PAGE_SIZE)
        num_pages = num_seqs * pages_each + 1
        self.model = model
        device = model.ops.device
        states = None
        if config.state_bytes:
            devices = (device,) * config.num_layers
            states = StateStore(config.state_shapes, num_seqs + 1, devices)
        self.store = KVStore(kv_format, config.kv_shapes, num_pages, device=device, states=states)
        scattered = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3))
        self.pages = scattered[: num_seqs * pages_each].view(num_seqs, pages_each)
        self.lengths = [0] * num_seqs

    def feed(self, tokens: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        """Logits [len, vocab] of all fed tokens, by sequence."""
        ids: list[int] = []
        positions: list[Tensor] = []
        slots: list[Tensor] = []
        row_starts = [0]
        for seq, new in tokens.items():
            at = torch.arange(self.lengths[seq], self.lengths[seq] + len(new))
            ids.extend(new)
            positions.append(at)
            slots.append(self.pages[seq][at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
            row_starts.append(len(ids))
        batch = Batch(
            token_ids=torch.tensor(ids),
            positions=torch.cat(positions),
            row_starts=torch.tensor(row_starts, dtype=torch.int32),
            past_lens=torch.tensor([self.lengths[seq] for seq in tokens], dtype=torch.int32),
            page_table=self.pages[list(tokens)].to(torch.int32),
            slots=torch.cat(slots),
            logit_rows=torch.arange(len(ids)),
            states=torch.tensor([seq + 1 for seq in tokens]),
        )
        logits = self.model.forward(batch, self.store)
        for seq, new in tokens.items():
            self.lengths[seq] += len(new)
        sizes = [len(new) for new in tokens.values()]
        return dict(zip(tokens, logits.split(sizes), strict=True))


def logits_of(path: Path, ids: Sequence[int], options: LoadOptions | None = None) -> Tensor:
    """Logits [len(ids), vocab] of the model at `path`, all tokens in one pass."""
    return logits_of_model(load_model(str(path), options).model, ids)


def logits_of_model(model: Transformer, ids: Sequence[int]) -> Tensor:
    """Logits [len(ids), vocab], all tokens in one pass."""
    return PagedRun(model, num_seqs=1, max_len=len(ids)).feed({0: ids})[0]
