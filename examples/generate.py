"""Completes two prompts. Usage: generate.py [MODEL]

MODEL is a directory, a .gguf file, a hub id or an alias; the default is SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import sys

from exl_core import BaseGenerator, SamplerParams, load_model

loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
generator = BaseGenerator(loaded)

# Greedy: temperature 0 always takes the most probable token.
text = generator.generate_simple(
    "The capital of France is Paris. The capital of Italy is",
    num_tokens=6,
    sampler=SamplerParams(temperature=0),
    completion_only=True,
)
print(text.strip())

# Sampled: the same seed repeats the same text.
varied = SamplerParams(temperature=0.8, top_p=0.95, min_p=0.05)
for text in generator.generate_simple(
    ["The best thing about the sea is", "The best thing about stars is"],
    num_tokens=24,
    sampler=varied,
    seed=7,
):
    print(text)
