"""ExLlamaV2MMEmbedding: vectors with ids that stand for them in a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exl_core.model.embedded import EmbeddedSpan
from exl_exllamav2.errors import old_types


class ExLlamaV2MMEmbedding:
    """`embeddings` [n, hidden_size]. `text_alias` is the text that stands for them in a prompt."""

    def __init__(
        self,
        model: Any,
        embeddings: Tensor,
        text_alias: str | None = None,
        thw_grid: Any = None,
        pre_tokens: int = 0,
        post_tokens: int = 0,
    ) -> None:
        with old_types():
            self.span = EmbeddedSpan(embeddings)
        self.model = model
        self.embeddings = embeddings
        self.first_index = self.span.first_id
        self.length = len(embeddings)
        self.text_alias = text_alias or f"<$EMB_{self.first_index}$>"
        self.thw_grid = thw_grid
        self.mrope_merge_size = None
        self.pre_tokens = pre_tokens
        self.post_tokens = post_tokens
        self.metadata: dict[str, Any] = {}

    def get_ids(self) -> list[int]:
        return list(self.span.token_ids)

    def get_ids_tensor(self) -> Tensor:
        return torch.tensor([self.get_ids()], dtype=torch.long)

    def get_vision_token_range(self) -> tuple[int, int]:
        first = self.first_index + self.pre_tokens
        return first, self.first_index + self.length - self.post_tokens

    def get_size_in_bytes(self) -> int:
        return self.embeddings.numel() * self.embeddings.element_size()


def spans_of(embeddings: Iterable[ExLlamaV2MMEmbedding] | None) -> tuple[EmbeddedSpan, ...]:
    """Spans for a request."""
    return tuple(one.span for one in embeddings or ())
