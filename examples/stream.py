"""Streams one reply token by token, with the probability of each. Usage: stream.py [MODEL]"""

from __future__ import annotations

import math
import sys

from exl_core import Report, SamplerParams, StreamingGenerator, load_model

loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
generator = StreamingGenerator(loaded)
generator.begin(
    "One, two, three, four,",
    sampler=SamplerParams(temperature=0),
    max_tokens=12,
    stop=["\n", *generator.eos_ids],  # token ids and texts
    report=Report(log_probs=0),  # of the token itself; N adds those of the N likeliest
)
sure = []
for result in generator:  # one token each; its text may be held back as the start of a stop text
    print(result.chunk, end="", flush=True)
    sure += [token.log_prob for token in result.tokens if token.log_prob is not None]
assert result.finish is not None
print(f"\n{result.finish.reason.value} after {len(sure)} tokens")
if sure:
    print(f"least probable token: {math.exp(min(sure)):.2f}")
