"""Answers the lines of stdin, one turn per line. Usage: chat.py [MODEL]"""

from __future__ import annotations

import sys

from exl_core import SamplerParams, StreamingGenerator, load_model
from exl_core.tokenizer.special_text import Trust

loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else None)
template = loaded.template
if template is None:
    sys.exit("This model has no chat template.")
generator = StreamingGenerator(loaded)
messages: list[dict[str, str]] = []
for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    prompt = template.render(messages, add_generation_prompt=True)
    # Only the template may write special tokens: `Trust` keeps those of the user's text as text.
    token_ids = loaded.tokenizer.encode(
        prompt, allow_special=True, trust=Trust(prompt.trusted, template.source)
    )
    generator.begin(token_ids, sampler=SamplerParams(temperature=0), max_tokens=40)
    reply = ""
    while not (result := generator.step()).is_end:
        print(result.chunk, end="", flush=True)
        reply += result.chunk
    print(result.chunk)
    messages.append({"role": "assistant", "content": reply + result.chunk})
    assert result.finish is not None
    cached = result.finish.cached_tokens  # the next turn reuses the cache of this one
    print(f"({len(token_ids)} prompt tokens, {cached} from the cache)", file=sys.stderr)
