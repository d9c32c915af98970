"""Runs a prompt with and without a LoRA adapter, in one batch. Usage: lora.py ADAPTER [MODEL]

ADAPTER is a directory in PEFT format that was made for MODEL.
"""

from __future__ import annotations

import sys

from exl_core import AdapterUse, DynamicGenerator, SamplerParams, load_adapter, load_model

if len(sys.argv) < 2:
    sys.exit("Usage: lora.py ADAPTER [MODEL]")
loaded = load_model(sys.argv[2] if len(sys.argv) > 2 else None)
adapter = load_adapter(sys.argv[1], loaded.model)
generator = DynamicGenerator(loaded)
prompt = "Tell me a story:"
# Every request of a batch may have other adapters, several of them, and a scale for each.
texts = generator.generate(  # None only if an `abort` flag was set
    [prompt, prompt, prompt],
    max_tokens=16,
    sampler=SamplerParams(temperature=0),
    each=[{}, {"adapters": adapter}, {"adapters": (AdapterUse(adapter, 0.5),)}],
)
for name, text in zip(("without", "with", "half"), texts or (), strict=True):
    print(f"{name}: {text.removeprefix(prompt)!r}")
