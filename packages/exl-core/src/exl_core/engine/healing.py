"""Token healing: the last token of a prompt is sampled again, among those that begin with its text.

A prompt that ends within a word was cut into tokens as if the word ended there. Taken back by one
token, the model can go on with the token that the whole word begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from exl_core.constrain.vocabulary import Vocabulary
from exl_core.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Healing:
    """`piece`: the bytes that the new token begins with. `mask`: the tokens that do, packed."""

    piece: bytes
    mask: Tensor
    tokenizer: Tokenizer

    def grown_by(self, token_id: int) -> bytes:
        """What the token has beyond the one that it replaces."""
        return self.tokenizer.token_bytes(token_id)[len(self.piece) :]


def healing_of(prompt_ids: Sequence[int], vocabulary: Vocabulary) -> Healing | None:
    """None where there is nothing to heal: a single token, or one at the end that is no text."""
    tokenizer, last = vocabulary.tokenizer, prompt_ids[-1]
    if len(prompt_ids) < 2 or last >= tokenizer.vocab_size:
        return None
    piece = tokenizer.token_bytes(last)  # of a special token, nothing
    return Healing(piece, vocabulary.starting_with(piece), tokenizer) if piece else None
