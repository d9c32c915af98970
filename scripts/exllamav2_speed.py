"""Time exllamav2 on an EXL2 or GPTQ directory. Usage: exllamav2_speed.py DIR [--batch 1,8] ...

Times the same work as `exl bench`. Decode: `--decode` steps after `--depth` cached tokens. Each
step is fed the likeliest tokens of the previous one, which are read back, and sequences begin with
different tokens. Prefill: from an empty cache, with logits of the last token only. One repetition
runs unmeasured first. The last line is JSON.

Needs a GPU and exllamav2 0.3.2, which compiles its extension at the first import. Without
flash-attn its prefill computes wrong attention unless EXLLAMA_NO_SDPA=1 is set. The comparison
leaves that variable unset, because exllamav2 is faster without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config
from exllamav2.version import __version__

Rates = dict[str, float]
FACTS: dict[str, dict[int, int]] = {"different_tokens": {}}
"""Number of different tokens after the last step by batch size; 0 if logits were not numbers."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("model", metavar="DIR")
    parser.add_argument("--batch", default="1,2,4,8,16,32")
    parser.add_argument("--prefill", default="512,2048,4096")
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    batches, prompts = (
        [int(n) for n in text.split(",") if n] for text in (args.batch, args.prefill)
    )
    config = ExLlamaV2Config(args.model)
    config.max_batch_size = max([1, *batches])
    config.max_seq_len = max([*prompts, args.depth + args.decode])
    started = time.perf_counter()
    model = ExLlamaV2(config)
    model.load()
    torch.cuda.synchronize()
    load_s = time.perf_counter() - started
    with torch.inference_mode():
        steps = args.depth, args.decode, args.repeat
        decode = {f"{size}": decode_rate(model, size, *steps) for size in batches}
        prefill = {f"{count}": prefill_rate(model, count, args.repeat) for count in prompts}
    result: dict[str, Any] = {"version": __version__, "load_s": load_s, "facts": FACTS}
    print(json.dumps({**result, "decode_tok_s": decode, "prefill_tok_s": prefill}))
    return 0


def decode_rate(model: ExLlamaV2, batch: int, depth: int, decode: int, repeat: int) -> float:
    """Tokens per second over all sequences."""
    cache = ExLlamaV2Cache(model, batch_size=batch, max_seq_len=depth + decode)
    first = 100 + torch.arange(batch).unsqueeze(1)
    for _ in range(depth):
        model.forward(first, cache)

    def once() -> None:
        cache.current_seq_len = depth
        newest = first
        for _ in range(decode):
            logits = model.forward(newest, cache)
            newest = logits[:, -1:].argmax(-1).cpu()
        count = len(set(newest.flatten().tolist())) if logits.isfinite().all() else 0
        FACTS["different_tokens"][batch] = count

    return batch * decode / seconds(once, repeat)


def prefill_rate(model: ExLlamaV2, count: int, repeat: int) -> float:
    cache = ExLlamaV2Cache(model, max_seq_len=count)
    prompt = torch.tensor([[100 + i % 1000 for i in range(count)]])

    def once() -> None:
        cache.current_seq_len = 0
        model.forward(prompt, cache, last_id_only=True)[:, -1].argmax(-1).cpu()

    return count / seconds(once, repeat)


def seconds(once: Callable[[], None], repeat: int) -> float:
    found = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        once()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return median(found[1:])


if __name__ == "__main__":
    sys.exit(main())
