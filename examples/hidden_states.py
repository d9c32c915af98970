"""Compares texts by the model's hidden states. Usage: hidden_states.py [MODEL]"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from exl_core import Context, LogitRows, StateRecorder, load_model

TEXTS = ("The cat sleeps on the sofa.", "A kitten naps on the couch.", "Stocks fell on Monday.")

loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
middle = loaded.config.num_layers // 2


def vector(text: str) -> Tensor:
    """Mean state after the middle layer: float32 [hidden_size], of length 1."""
    recorder = StateRecorder(layers=[middle])
    token_ids = loaded.tokenizer.encode(text)
    context = Context(loaded.model, max_len=len(token_ids))
    context.feed([token_ids], LogitRows.NONE, observe=recorder)  # no logits are needed
    states = recorder.layers[middle][1:]  # [rows, hidden_size], without the first token
    return torch.nn.functional.normalize(states.mean(0), dim=0)


vectors = [vector(text) for text in TEXTS]
for number, text in enumerate(TEXTS[1:], start=1):
    print(f"{float(vectors[0] @ vectors[number]):.3f}  {TEXTS[0]} / {text}")
