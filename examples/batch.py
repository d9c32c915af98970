"""Runs many requests at once in the dynamic generator. Usage: batch.py [MODEL]"""

from __future__ import annotations

import sys

from exl_core import DynamicGenerator, EngineOptions, SamplerParams, load_model

loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
# All jobs share the cache. A job that does not fit waits until another one has ended.
generator = DynamicGenerator(loaded, EngineOptions(cache_tokens=2048, max_batch=4))
shared = "Count on with numbers. "  # computed once: prompts with one beginning share its pages
for number in range(6):
    request = generator.request(
        f"{shared}{number} {number + 1} {number + 2}",
        sampler=SamplerParams(temperature=0),
        max_tokens=4 + number,
    )
    generator.enqueue(request, identifier=number)

while generator.num_remaining_jobs:
    for result in generator.iterate():  # one step: new text of every running job
        if result.error is not None:
            print(f"job {result.job.identifier} failed: {result.error}")
        elif result.finish is not None:
            finish = result.finish
            print(f"job {result.job.identifier}: {finish.completion_tokens} tokens:", end=" ")
            print(repr(result.job.text), f"({finish.decode_tok_s:.0f} tokens/s)")
