"""Time exllamav3 on an EXL3 directory. Usage: exllamav3_speed.py DIR [--batch 1,8] ...

Times the same work as `exl bench`. Decode: `--decode` steps after `--depth` cached tokens. Each
step is fed the likeliest tokens of the previous one, which are read back, and sequences begin with
different tokens. Prefill: from an empty cache, in one pass and without logits, as exllamav3's own
benchmark does. One repetition runs unmeasured first. The last line is JSON.

`--ranks` loads the model tensor parallel. Needs GPUs and exllamav3 1.6.5, which compiles its
extension at the first import unless `exllamav3_ext` is on the path.
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
from exllamav3 import Cache, Config, Model
from exllamav3.version import __version__
from torch import Tensor

PAGE = 256  # tokens; capacities are multiples of it
FIRST = 100  # first token of the first sequence


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("model", metavar="DIR")
    parser.add_argument("--batch", default="1,2,4,8,16,32", help="sizes, or nothing")
    parser.add_argument("--prefill", default="512,2048,4096", help="lengths, or nothing")
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", choices=("native", "nccl"), default="native", help="of ranks")
    args = parser.parse_args()
    batches, prompts = (
        [int(n) for n in text.split(",") if n] for text in (args.batch, args.prefill)
    )
    span = paged(args.depth + args.decode)
    tokens = max([span * size for size in batches] + [paged(count) for count in prompts])
    model = Model.from_config(Config.from_directory(args.model))
    cache = Cache(model, max_num_tokens=tokens, max_batch_size=max([1, *batches]))
    started = time.perf_counter()
    if args.ranks > 1:
        model.load(tensor_p=True, tp_backend=args.backend, progressbar=False)
    else:
        model.load("cuda:0", progressbar=False)
    torch.cuda.synchronize()
    load_s = time.perf_counter() - started
    measuring = Measuring(model, cache, args.repeat)
    with torch.inference_mode():
        prefill = {f"{count}": measuring.prefill(count) for count in prompts}
        steps = args.depth, args.decode, span
        decode = {f"{size}": measuring.decode(size, *steps) for size in batches}
    result = {"version": __version__, "load_s": load_s, "facts": measuring.facts}
    print(json.dumps({**result, "decode_tok_s": decode, "prefill_tok_s": prefill}), flush=True)
    if args.ranks > 1:
        model.unload()
    return 0


def paged(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


class Measuring:
    """Rates of a loaded model. `facts` has, for each batch size, the number of different tokens
    after the last step; 0 if logits were not numbers."""

    def __init__(self, model: Any, cache: Any, repeat: int) -> None:
        self._model, self._cache, self._repeat = model, cache, repeat
        self._is_recurrent = bool(model.get_recurrent_layers())
        self.facts: dict[str, dict[int, int]] = {"different_tokens": {}}

    def decode(self, batch: int, depth: int, decode: int, span: int) -> float:
        """Tokens per second over all sequences."""
        prompt = (FIRST + torch.arange(depth)).repeat(batch, 1)
        self._with_states(batch, 0, lambda states: self._prefill(prompt, span, states))
        first = FIRST + depth + torch.arange(batch).unsqueeze(1)

        def steps(states: dict[str, Any]) -> None:
            newest = first
            for past in range(depth, depth + decode):
                params = {**self._params(batch, past, span), **states}
                logits: Tensor = self._model.forward(newest, params)[:, -1:]
                newest = logits.argmax(-1).cpu()
            count = len(set(newest.flatten().tolist())) if logits.isfinite().all() else 0
            self.facts["different_tokens"][batch] = count

        return batch * decode / self._seconds(lambda: self._with_states(batch, depth, steps))

    def prefill(self, count: int) -> float:
        prompt = torch.tensor([[FIRST + i for i in range(count)]])

        def once() -> None:
            self._with_states(1, 0, lambda states: self._prefill(prompt, paged(count), states))

        return count / self._seconds(once)

    def _prefill(self, prompt: Tensor, span: int, states: dict[str, Any]) -> None:
        self._model.prefill(prompt, {**self._params(len(prompt), 0, span), **states})

    def _params(self, batch: int, past_len: int, span: int) -> dict[str, Any]:
        return {
            "attn_mode": "flash_attn",
            "cache": self._cache,
            "past_len": past_len,
            "batch_shape": (batch, span),
        }

    def _with_states(
        self, batch: int, position: int, work: Callable[[dict[str, Any]], None]
    ) -> None:
        """Calls `work` with recurrent states at this position, if the model has such states. Their
        contents are arbitrary."""
        if not self._is_recurrent:
            work({})
            return
        states = [self._cache.get_test_state(position) for _ in range(batch)]
        work({"recurrent_states": states})
        for state in states:
            state.free()

    def _seconds(self, once: Callable[[], None]) -> float:
        found = []
        for _ in range(self._repeat + 1):
            torch.cuda.synchronize()
            started = time.perf_counter()
            once()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - started)
        return median(found[1:])


if __name__ == "__main__":  # the ranks import this file
    sys.exit(main())
