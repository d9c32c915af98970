"""Decodes with drafts: n-grams of the text, or a smaller model with the same vocabulary.

Usage: speculative.py [MODEL [DRAFT_MODEL]]
"""

from __future__ import annotations

import sys
import time

from exl_core import (
    EngineOptions,
    ModelDrafter,
    NgramDrafter,
    SamplerParams,
    StreamingGenerator,
    load_model,
)
from exl_core.speculate.drafter import Drafter

loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
options = EngineOptions(cache_tokens=512)
drafter: Drafter = NgramDrafter()
if len(sys.argv) > 2:
    draft = load_model(sys.argv[2]).model
    vocab_size = loaded.config.vocab_size
    drafter = ModelDrafter(draft, vocab_size=vocab_size, num_pages=2)  # pages of 256 tokens
texts = []
for one in (None, drafter):
    generator = StreamingGenerator(loaded, options, drafter=one, several_tokens=True)
    generator.begin("1 2 3 4 5 6 7 8 " * 6, sampler=SamplerParams(temperature=0), max_tokens=48)
    started, text = time.perf_counter(), ""
    while not (result := generator.step()).is_end:
        text += result.chunk
    texts.append(text + result.chunk)
    stats = generator.draft_stats
    print(f"{time.perf_counter() - started:.3f} s,", end=" ")
    print(f"{stats.accepted} of {stats.drafted} draft tokens accepted")
print("same text:", texts[0] == texts[1])  # drafts change the speed, not the greedy text
