"""Samples with a step of its own among exl's steps. Usage: custom_sampling.py [MODEL]"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from exl_core import Context, LogitRows, load_model
from exl_core.sampling.steps import MinP, Temperature


@dataclass(frozen=True)
class NoRepeatedPair:
    """Drop every token that has followed the last token before: no pair of tokens occurs twice."""

    history: tuple[int, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        last = self.history[-1]
        seen = [after for before, after in pairwise(self.history) if before == last]
        return logits.index_fill(0, torch.tensor(seen, dtype=torch.int64), float("-inf"))


loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
generator = torch.Generator().manual_seed(1)
token_ids = loaded.tokenizer.encode("The best thing about the sea is")
start = len(token_ids) - 1  # number of pairs of the prompt
context = Context(loaded.model, max_len=256)
new = token_ids
for _ in range(32):
    logits = context.feed([new], LogitRows.LAST)[0][-1].cpu()  # float32 [vocab_size]
    for step in (NoRepeatedPair(tuple(token_ids)), Temperature(0.8), MinP(0.1)):
        logits = step(logits)
    new = [int(torch.multinomial(logits.softmax(-1), 1, generator=generator))]
    token_ids += new
print(loaded.tokenizer.decode(token_ids))
pairs = list(pairwise(token_ids))
print(f"{sum(pair in pairs[:n] for n, pair in enumerate(pairs) if n >= start)} repeated pairs")
