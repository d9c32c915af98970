"""Measure cost and gain of drafts, constraints and the prompt cache on one model.

    python scripts/measure_engine.py [MODEL] [--rounds N] [--threads N]

The two rates of a comparison come from alternating requests. The ratio is the median over the
rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median

import torch

from exl_core.constrain.json_schema import JsonSchema
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.engine.request import Request
from exl_core.generate.driver import generate
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_core.speculate.ngram import NgramDrafter

TOKENS = 192
Figures = dict[str, float]
GREEDY = SamplerParams(temperature=0)
REPETITIVE = (
    "Repeat this list three times.\n"
    "apples, pears, plums, cherries, grapes, figs, dates, lemons, limes, melons\n"
) + "apples, pears, plums, cherries, grapes, figs, dates, lemons, limes, melons\n" * 2
UNPREDICTABLE = "Here is a list of unusual words, none of them twice:\n"
LISTS = {
    "json_strings": {"type": "array", "items": {"type": "string"}, "minItems": 1000},
    "json_short_strings": {
        "type": "array",
        "items": {"type": "string", "maxLength": 30},
        "minItems": 1000,
    },
}


def engine_of(loaded: LoadedModel, *, drafts: bool = False) -> Engine:
    drafter = NgramDrafter(max_tokens=8) if drafts else None
    return Engine(loaded.model, loaded.tokenizer, EngineOptions(cache_tokens=8192), drafter=drafter)


def measure(
    plain: Callable[[int], FinishEvent], other: Callable[[int], FinishEvent], rounds: int
) -> Figures:
    """Runs both alternately. Returns the median ratio of decode rates, other / plain, and the
    rates."""
    ratios, rates = [], []
    for number in range(rounds + 1):
        first, second = plain(number), other(number)
        if number:  # the first round warms up
            ratios.append(second.decode_tok_s / first.decode_tok_s)
            rates.append((first.decode_tok_s, second.decode_tok_s))
    return {
        "ratio": round(median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "plain_tok_s": round(median(rate for rate, _ in rates), 1),
        "other_tok_s": round(median(rate for _, rate in rates), 1),
    }


def drafting(loaded: LoadedModel, text: str, sampler: SamplerParams, rounds: int) -> Figures:
    engines = engine_of(loaded), engine_of(loaded, drafts=True)
    ids = tuple(loaded.tokenizer.encode(text))

    def run(engine: Engine) -> Callable[[int], FinishEvent]:
        def once(number: int) -> FinishEvent:
            seeded = SamplerParams(
                temperature=sampler.temperature, top_k=sampler.top_k, seed=number
            )
            return generate(engine, Request(ids, max_tokens=TOKENS, sampler=seeded))

        return once

    return measure(run(engines[0]), run(engines[1]), rounds)


def constraint(loaded: LoadedModel, schema: dict[str, object], rounds: int) -> Figures:
    engine = engine_of(loaded)
    ids = tuple(loaded.tokenizer.encode("A list of English words, in JSON: "))

    def plain(_: int) -> FinishEvent:
        return generate(engine, Request(ids, max_tokens=TOKENS, sampler=GREEDY))

    def constrained(_: int) -> FinishEvent:
        request = Request(ids, max_tokens=TOKENS, sampler=GREEDY, constraints=(JsonSchema(schema),))
        return generate(engine, request)

    return measure(plain, constrained, rounds)


def prompt_cache(loaded: LoadedModel, rounds: int) -> dict[str, float]:
    """Time to the first token of a prompt of 1000 tokens, computed and then from the cache."""
    cold, warm = [], []
    for number in range(rounds + 1):
        engine = engine_of(loaded)
        ids = tuple((100 + number + 7 * i) % 20000 for i in range(1000))
        times = [
            generate(engine, Request(ids, max_tokens=1, sampler=GREEDY)).prefill_s for _ in range(2)
        ]
        cold.append(times[0])
        warm.append(times[1])
    return {
        "cold_s": round(median(cold[1:]), 4),
        "warm_s": round(median(warm[1:]), 4),
        "share": round(median(warm[1:]) / median(cold[1:]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(arguments.model, LoadOptions(threads=arguments.threads))
    rounds = arguments.rounds
    hot = SamplerParams(temperature=1.0)
    result = {
        "model": loaded.name,
        "threads": loaded.model.ops.threads,
        "ngram_repetitive": drafting(loaded, REPETITIVE, GREEDY, rounds),
        "ngram_unpredictable": drafting(loaded, UNPREDICTABLE, hot, rounds),
        **{name: constraint(loaded, schema, rounds) for name, schema in LISTS.items()},
        "prompt_cache": prompt_cache(loaded, rounds),
    }
    for name, figures in result.items():
        print(f"{name}: {figures}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
