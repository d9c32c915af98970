"""The programs that the library was asked for with, in its own names, on the real model."""

from __future__ import annotations

import threading

import pytest

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import FinishReason
from exl_core.generate.base import BaseGenerator
from exl_core.generate.dynamic import DynamicGenerator, Stage
from exl_core.generate.streaming import StreamingGenerator
from exl_core.load import LoadedModel
from exl_core.sampling.params import SamplerParams
from exl_core.speculate.ngram import NgramDrafter

GREEDY = SamplerParams(temperature=0)
OPTIONS = EngineOptions(cache_tokens=4096)


def test_a_simple_completion(smollm2: LoadedModel) -> None:
    generator = BaseGenerator(smollm2, OPTIONS)
    generator.warmup()
    output = generator.generate_simple(
        "Explain gravity in simple terms:",
        sampler=SamplerParams(temperature=0.7, top_p=0.9),
        num_tokens=40,
        seed=1,
        token_healing=True,
        completion_only=True,
    )
    assert 20 < len(output) < 400
    assert not output.startswith("Explain")
    assert not generator.full()
    assert generator.engine.is_idle


def test_prompts_completed_side_by_side(smollm2: LoadedModel) -> None:
    prompts = [
        "Write a haiku about mountains:",
        "Write a haiku about the ocean:",
        "Write a haiku about the stars:",
    ]
    generator = BaseGenerator(smollm2, OPTIONS)
    settings = SamplerParams(temperature=0.8)
    outputs = generator.generate_simple(prompts, sampler=settings, num_tokens=12, seed=42)
    assert len(set(outputs)) == 3
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.startswith(prompt)
    again = generator.generate_simple(prompts, sampler=settings, num_tokens=12, seed=42)
    assert again == outputs


def test_aborting_from_another_thread_keeps_the_text_so_far(smollm2: LoadedModel) -> None:
    abort = threading.Event()
    seen: list[int] = []

    def after_five(token: object) -> None:
        seen.append(1)
        if len(seen) == 5:
            abort.set()

    generator = BaseGenerator(smollm2, OPTIONS)
    output = generator.generate_simple(
        "Tell me a story:",
        sampler=GREEDY,
        num_tokens=500,
        stop_token=None,
        abort=abort,
        completion_only=True,
        hooks=(after_five,),
    )
    assert len(seen) == 5
    assert 0 < len(output) < 60
    assert generator.engine.is_idle


def test_text_generation_with_one_or_several_prompts(smollm2: LoadedModel) -> None:
    generator = DynamicGenerator(smollm2, EngineOptions(cache_tokens=8192, kv_format=KVFormat.Q8))
    generator.warmup()
    text = generator.generate("Once upon a time,", max_tokens=12, sampler=GREEDY, add_bos=True)
    assert text is not None
    assert text.startswith("Once upon a time,")
    assert len(text) > len("Once upon a time,") + 20
    texts = generator.generate(
        ["Once upon a time,", "The capital of France is"],
        max_tokens=12,
        each=[{"sampler": GREEDY}, {"sampler": SamplerParams(temperature=0.9)}],
        seed=3,
        stop=["\n", *generator.eos_ids],
        add_bos=True,
    )
    assert texts is not None
    assert texts[0] == text.split("\n")[0]
    assert all(job.finish is not None for job in generator.last_jobs)


def test_jobs_come_go_and_tell_their_stages(smollm2: LoadedModel) -> None:
    generator = DynamicGenerator(smollm2, EngineOptions(cache_tokens=4096, prefill_chunk=64))
    prompt = "word " * 150
    jobs = [
        generator.enqueue(
            generator.request(prompt + extra, max_tokens=4, sampler=GREEDY), identifier=extra
        )
        for extra in ("one", "two")
    ]
    stages: dict[object, list[Stage]] = {"one": [], "two": []}
    while generator.num_remaining_jobs:
        for result in generator.iterate():
            stages[result.job.identifier].append(result.stage)
            if result.stage is Stage.PREFILL:
                assert 0 < result.done < result.total
    for job in jobs:
        assert job.finish is not None
        assert job.finish.completion_tokens == 4
        assert job.finish.decode_s > 0.0
        named = stages[job.identifier]
        assert named[0] is Stage.STARTED
        assert Stage.PREFILL in named
        assert named[-1] is Stage.STREAMING
    assert [job.serial for job in jobs] == [0, 1]


def test_a_chat_loop_streams_until_eos(smollm2: LoadedModel) -> None:
    assert smollm2.template is not None
    generator = StreamingGenerator(smollm2, OPTIONS)
    prompt = smollm2.template.render(
        [{"role": "user", "content": "Say hello."}], add_generation_prompt=True
    )
    generator.begin(prompt, sampler=GREEDY, parse_special=True, max_tokens=60)
    text, ids, steps = "", [], 0
    while True:
        result = generator.step()
        text += result.chunk
        ids += result.token_ids
        steps += 1
        if result.is_end:
            break
    assert result.reason is FinishReason.STOP
    assert result.finish is not None
    assert text == result.finish.text == smollm2.tokenizer.decode(ids)
    assert steps >= len(ids)
    assert generator.sequence_ids[-1] in generator.eos_ids


@pytest.mark.parametrize("several", [False, True])
def test_a_speculative_stream_gives_the_same_text(smollm2: LoadedModel, several: bool) -> None:
    prompt = "1 2 3 4 5 6 7 8 9 10 1 2 3 4 5 6 7 8 9 10 1 2 3 4"

    def read(generator: StreamingGenerator) -> tuple[str, int]:
        generator.begin(prompt, sampler=GREEDY, max_tokens=24, stop=())
        text, steps = "", 0
        while True:
            result = generator.step()
            text, steps = text + result.chunk, steps + 1
            if result.is_end:
                return text, steps

    plain, plain_steps = read(StreamingGenerator(smollm2, OPTIONS))
    drafted = StreamingGenerator(
        smollm2, OPTIONS, drafter=NgramDrafter(max_tokens=4), several_tokens=several
    )
    text, steps = read(drafted)
    assert text == plain
    stats = drafted.draft_stats
    assert stats.emitted == 24
    assert stats.accepted > 4
    assert steps < plain_steps if several else steps >= 24
