"""Observers: read and modify hidden states between the parts of a model during a pass.

For custom loops: steering, probing, early exits, comparing layers. A pass without an observer has
no overhead for them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from exl_core.errors import RequestError


class Part(NamedTuple):
    """One part of a model. Attention and MLP parts have a layer, and add to the states.

    The embedding produces the first states, embedded vectors included. The head maps the normed
    states of the rows that get logits to logits.
    """

    kind: Literal["embedding", "attention", "mlp", "head"]
    layer: int | None = None


class Observer:
    """Receives the states before and after every part. The returned tensor replaces them.

    States are float32 [rows, hidden_size], logits [logit rows, vocab_size]. They are the pass's own
    buffers and are overwritten later: change them in place or return other tensors of the same
    shape, and clone anything that must outlive the pass. An exception ends the pass; the keys and
    values written so far stay in the store. `before` is not called for the embedding.
    """

    def before(self, part: Part, states: Tensor) -> Tensor:  # noqa: ARG002 - overriders use it
        return states

    def after(self, part: Part, states: Tensor) -> Tensor:  # noqa: ARG002 - overriders use it
        return states


class StateRecorder(Observer):
    """Records the states after the embedding and after some layers, and the input of the head.

    `embedding` [rows, hidden_size] are the states before block 0. `layers[i]` [rows, hidden_size]
    are the states after block i. `last` [logit rows, hidden_size]
    are the normed states that the head reads. Each pass overwrites those of the previous pass.
    """

    def __init__(self, layers: Collection[int] = ()) -> None:
        self.embedding = torch.empty(0)
        self.layers: dict[int, Tensor] = {}
        self.last = torch.empty(0)
        self._wanted = frozenset(layers)

    def before(self, part: Part, states: Tensor) -> Tensor:
        if part.kind == "head":
            self.last = states.clone()
        return states

    def after(self, part: Part, states: Tensor) -> Tensor:
        if part.kind == "embedding":
            self.embedding = states.clone()
        if part.kind == "mlp" and part.layer in self._wanted:
            self.layers[part.layer] = states.clone()
        return states


def checked_states(part: Part, returned: Tensor, original: Tensor) -> Tensor:
    """An observer's result, checked for its shape, contiguous and of the original dtype."""
    if returned.shape != original.shape:
        raise RequestError(
            f"an observer changed the shape of the states at {part.kind}",
            where=None if part.layer is None else f"layer {part.layer}",
            expected=list(original.shape),
            got=list(returned.shape),
        )
    return returned.to(original.dtype).contiguous()
