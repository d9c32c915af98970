"""Looking into a pass, and reaching into it: hidden states between the parts of a model.

For custom loops: steering, probing, early exits, comparing layers. A pass without an observer pays
nothing for them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from exl_core.errors import RequestError


class Part(NamedTuple):
    """A part of a model. Attention and MLP have a layer, and add to the states that they get.

    The embedding makes the first states, vectors in place of tokens included. The head gets normed
    states of the rows whose logits are wanted, and makes logits.
    """

    kind: Literal["embedding", "attention", "mlp", "head"]
    layer: int | None = None


class Observer:
    """Is shown the states before and after every part; what it returns goes on in their place.

    States are float32 [rows, hidden_size], logits [rows wanted, vocab_size]. They are the pass's
    own memory and are overwritten later: change them in place or return others of the same shape,
    and clone what is to be kept. An exception ends the pass; the keys and values written so far
    stay in the store. Nothing comes before the embedding.
    """

    def before(self, part: Part, states: Tensor) -> Tensor:  # noqa: ARG002 - overriders use it
        return states

    def after(self, part: Part, states: Tensor) -> Tensor:  # noqa: ARG002 - overriders use it
        return states


class StateRecorder(Observer):
    """Keeps the states after some layers, and the last: what the head gets.

    `layers[i]` [rows, hidden_size] are the states after block i; `last` [rows wanted, hidden_size]
    are normed. Each pass replaces those of the one before.
    """

    def __init__(self, layers: Collection[int] = ()) -> None:
        self.layers: dict[int, Tensor] = {}
        self.last = torch.empty(0)
        self._wanted = frozenset(layers)

    def before(self, part: Part, states: Tensor) -> Tensor:
        if part.kind == "head":
            self.last = states.clone()
        return states

    def after(self, part: Part, states: Tensor) -> Tensor:
        if part.kind == "mlp" and part.layer in self._wanted:
            self.layers[part.layer] = states.clone()
        return states


def taken_on(part: Part, given: Tensor, shown: Tensor) -> Tensor:
    """What an observer gave back for the states it was shown, fit to go on with."""
    if given.shape != shown.shape:
        raise RequestError(
            f"an observer changed the shape of the states at {part.kind}",
            where=None if part.layer is None else f"layer {part.layer}",
            expected=list(shown.shape),
            got=list(given.shape),
        )
    return given.to(shown.dtype).contiguous()
