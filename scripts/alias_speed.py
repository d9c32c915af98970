"""Compare a program for exllamav2 with exl's own generator. Usage: alias_speed.py MODEL [options]

Both run the same jobs on the same weights, in one process: the old dynamic generator through the
alias, and `DynamicGenerator`. Runs are in the order ABBA, after one run of each to warm up. Every
line is a JSON object: "settings", tokens per second of both ("alias", "own": medians), and "ratio".
"cpu_ratio" compares the processor time of both in the same way, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from exl_core import DynamicGenerator, EngineOptions
from exl_core.cache.format import PAGE_SIZE, pages_for
from exl_exllamav2 import environment
from exl_exllamav2.cache import ExLlamaV2Cache
from exl_exllamav2.config import ExLlamaV2Config
from exl_exllamav2.dynamic import ExLlamaV2DynamicGenerator
from exl_exllamav2.job import ExLlamaV2DynamicJob
from exl_exllamav2.model import ExLlamaV2
from exl_exllamav2.settings import Settings, sampler_params
from exl_exllamav2.tokenizer import ExLlamaV2Tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(". Usage")[0])
    parser.add_argument("model", type=Path, help="a model's directory or .gguf file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each job")
    parser.add_argument("--rounds", type=int, default=2, help="times ABBA")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the kernels have their own threads
    environment.store_options(device=args.device)
    bench = Bench(args.model, args.jobs, args.prompt, args.tokens)
    for name, settings in (("greedy", Settings.greedy()), ("default", Settings())):
        bench.alias(settings)
        bench.own(settings)
        alias: list[Run] = []
        own: list[Run] = []
        for _ in range(args.rounds):
            alias.append(bench.alias(settings))
            own += [bench.own(settings), bench.own(settings)]
            alias.append(bench.alias(settings))
        found = {
            "settings": name,
            "device": str(bench.model.weights.ops.device),
            "jobs": args.jobs,
            "prompt": args.prompt,
            "tokens": args.tokens,
            "alias": round(median(run.speed for run in alias), 2),
            "own": round(median(run.speed for run in own), 2),
            "ratio": round(_ratio([run.speed for run in alias], [run.speed for run in own]), 4),
            "cpu_ratio": round(_ratio([run.cpu_s for run in own], [run.cpu_s for run in alias]), 4),
            "runs_alias": [round(run.speed, 2) for run in alias],
            "runs_own": [round(run.speed, 2) for run in own],
        }
        print(json.dumps(found), flush=True)
    return 0


class Run(NamedTuple):
    """Tokens per second, and seconds of processor time, of one run."""

    speed: float
    cpu_s: float


def _ratio(a: list[float], b: list[float]) -> float:
    return median(a) / median(b)


class Bench:
    """One loaded model with a generator of each kind, and the prompts of the jobs."""

    def __init__(self, path: Path, num_jobs: int, prompt_len: int, num_tokens: int) -> None:
        config = ExLlamaV2Config(path)
        self.model = ExLlamaV2(config)
        pages = num_jobs * pages_for(prompt_len + num_tokens + 1)
        cache = ExLlamaV2Cache(self.model, max_seq_len=pages * PAGE_SIZE, lazy=True)
        self.model.load_autosplit(cache)
        self.tokenizer = ExLlamaV2Tokenizer(config)
        self.num_tokens = num_tokens
        self.old = ExLlamaV2DynamicGenerator(
            self.model, cache, self.tokenizer, max_batch_size=num_jobs
        )
        options = EngineOptions(max_batch=num_jobs, cache_tokens=pages * PAGE_SIZE)
        self.new = DynamicGenerator(self.model.loaded_model, options)
        draw = random.Random(1)
        size = min(config.vocab_size, self.tokenizer.actual_vocab_size)
        self.prompts = [[draw.randrange(size) for _ in range(prompt_len)] for _ in range(num_jobs)]

    def alias(self, settings: Settings) -> Run:
        """One run of the old generator."""
        self.old.reset_page_table()
        jobs = [
            ExLlamaV2DynamicJob(torch.tensor([ids]), self.num_tokens, gen_settings=settings, seed=i)
            for i, ids in enumerate(self.prompts)
        ]
        started, num_chars = _now(), 0
        self.old.enqueue(jobs)
        while self.old.num_remaining_jobs():
            for result in self.old.iterate():
                num_chars += len(result.get("text", ""))
        return self._run(started, sum(job.new_tokens for job in jobs))

    def own(self, settings: Settings) -> Run:
        """One run of exl's generator."""
        self.new.engine.forget_cache()
        requests = [
            self.new.request(
                ids,
                max_tokens=self.num_tokens,
                sampler=sampler_params(settings, self.tokenizer, i),
                stop=[],
            )
            for i, ids in enumerate(self.prompts)
        ]
        started, num_chars, num_tokens = _now(), 0, 0
        self.new.enqueue(requests)
        while self.new.num_remaining_jobs:
            for result in self.new.iterate():
                num_chars += len(result.text)
                if result.finish is not None:
                    num_tokens += result.finish.completion_tokens
        return self._run(started, num_tokens)

    def _run(self, started: tuple[float, float], num_tokens: int) -> Run:
        wall_s, cpu_s = (after - before for before, after in zip(started, _now(), strict=True))
        expected = self.num_tokens * len(self.prompts)
        assert num_tokens == expected, f"{num_tokens} tokens instead of {expected}"
        return Run(num_tokens / wall_s, cpu_s)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


if __name__ == "__main__":
    raise SystemExit(main())
