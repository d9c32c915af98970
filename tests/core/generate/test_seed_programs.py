"""The example programs of the library's requirements, with exl's names, on a real model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.constrain.json_schema import JsonSchema
from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import FinishReason
from exl_core.generate.base import BaseGenerator
from exl_core.generate.dynamic import DynamicGenerator, Stage
from exl_core.generate.streaming import StreamingGenerator
from exl_core.lora.adapter import load_adapter
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from exl_core.speculate.compatible import check_same_vocabulary
from exl_core.speculate.draft_model import ModelDrafter
from exl_core.speculate.ngram import NgramDrafter
from support.adapters import stored, write_adapter
from support.generators import Counter

pytestmark = pytest.mark.thorough

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


def test_prompts_completed_in_one_call(smollm2: LoadedModel) -> None:
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
    # A new generator has an empty cache. Cached prompts would be computed in passes of other sizes,
    # whose rounding may differ.
    anew = BaseGenerator(smollm2, OPTIONS)
    again = anew.generate_simple(prompts, sampler=settings, num_tokens=12, seed=42)
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


def test_jobs_report_their_stages(smollm2: LoadedModel) -> None:
    generator = DynamicGenerator(smollm2, EngineOptions(cache_tokens=4096, prefill_chunk=64))
    prompt = " word" * 150
    jobs = [
        generator.enqueue(
            generator.request(extra + prompt, max_tokens=4, sampler=GREEDY), identifier=extra
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
    text, steps = "", 0
    ids: list[int] = []
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


def test_a_draft_model_gives_the_same_text_in_fewer_passes(smollm2: LoadedModel) -> None:
    """The model drafts for itself, so every draft token is accepted."""
    prompt = "The quick brown fox"
    check_same_vocabulary(smollm2.tokenizer, smollm2.tokenizer)
    plain = StreamingGenerator(smollm2, OPTIONS)
    plain.begin(prompt, sampler=GREEDY, max_tokens=16, stop=())
    drafter = ModelDrafter(
        smollm2.model,
        num_pages=plain.engine.pool.num_pages,
        max_tokens=5,
        vocab_size=smollm2.config.vocab_size,
    )
    drafted = StreamingGenerator(smollm2, OPTIONS, drafter=drafter, several_tokens=True)
    drafted.begin(prompt, sampler=GREEDY, max_tokens=16, stop=())
    texts = []
    for generator in (plain, drafted):
        chunks = []
        while True:
            result = generator.step()
            chunks.append(result.chunk)
            if result.is_end:
                break
        texts.append("".join(chunks))
    assert texts[0] == texts[1]
    stats = drafted.draft_stats
    assert stats.drafted > 0
    assert (stats.accepted, stats.rejected, stats.emitted) == (stats.drafted, 0, 16)


def test_generation_with_an_adapter_and_abort(smollm2: LoadedModel, tmp_path: Path) -> None:
    shapes = {"q_proj": (576, 576), "v_proj": (576, 192)}
    pairs = {
        f"model.layers.{layer}.self_attn.{name}": (
            torch.full((4, inputs), 0.01),
            torch.full((outputs, 4), 0.5),
        )
        for layer in range(30)
        for name, (inputs, outputs) in shapes.items()
    }
    adapter = load_adapter(write_adapter(tmp_path / "adapter", stored(pairs)), smollm2.model)
    generator = BaseGenerator(smollm2, OPTIONS)
    abort = threading.Event()

    def tell(**settings: Any) -> str:
        return generator.generate_simple(
            "Tell me a story:",
            sampler=GREEDY,
            num_tokens=8,
            stop_token=None,
            completion_only=True,
            **settings,
        )

    assert tell() != tell(adapters=adapter)
    output = tell(adapters=adapter, abort=abort, hooks=Counter(3, abort.set))
    assert output
    (ids,) = generator.sequence_ids
    assert len(ids) == len(smollm2.tokenizer.encode("Tell me a story:")) + 3


def test_replies_under_a_json_schema_are_valid(smollm2: LoadedModel) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    generator = DynamicGenerator(smollm2, OPTIONS)
    texts = generator.generate(
        ["A person: ", "Another person: "],
        max_tokens=60,
        sampler=SamplerParams(temperature=0.8),
        seed=11,
        constraints=JsonSchema(schema, compact=True),
        completion_only=True,
    )
    assert texts is not None
    for text, job in zip(texts, generator.last_jobs, strict=True):
        jsonschema.validate(json.loads(text), schema)
        assert job.finish is not None
        assert job.finish.reason is FinishReason.CONSTRAINT
