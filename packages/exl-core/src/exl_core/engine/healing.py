"""Token healing: the last prompt token is sampled again among the tokens that begin with its text.

A prompt that ends inside a word was tokenized as if the word ended there. With its last token
removed, the model can continue with a longer token that begins the whole word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from exl_core.constrain.vocabulary import Vocabulary
from exl_core.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Healing:
    """`piece`: bytes of the removed token. `mask`: packed bits of the tokens that begin with it."""

    piece: bytes
    mask: Tensor
    tokenizer: Tokenizer

    def grown_by(self, token_id: int) -> bytes:
        """Bytes that the new token adds to those of the removed token."""
        return self.tokenizer.token_bytes(token_id)[len(self.piece) :]


def healing_of(prompt_ids: Sequence[int], vocabulary: Vocabulary) -> Healing | None:
    """Healing of a prompt; None if it has a single token, or if its last token is not text."""
    tokenizer, last = vocabulary.tokenizer, prompt_ids[-1]
    if len(prompt_ids) < 2 or last >= tokenizer.vocab_size:
        return None
    piece = tokenizer.token_bytes(last)  # empty for a special token
    return Healing(piece, vocabulary.starting_with(piece), tokenizer) if piece else None
