"""Documents that a real model writes under twenty JSON schemas are valid."""

from __future__ import annotations

import json
from typing import cast

import jsonschema
import pytest

from exl_core.constrain.json_schema import JsonSchema
from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import FinishReason
from exl_core.generate.dynamic import DynamicGenerator
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from support.schemas import SCHEMAS

pytestmark = pytest.mark.thorough

MOST_TOKENS = 400


@pytest.fixture(scope="module")
def generator(smollm2: LoadedModel) -> DynamicGenerator:
    return DynamicGenerator(smollm2, EngineOptions(cache_tokens=32768, max_batch=16))


def sampler_of(seed: int) -> SamplerParams:
    """Sampler with penalties. Without them, a model this small repeats itself forever where the
    schema allows it."""
    return SamplerParams(
        temperature=0.8, top_p=0.95, dry_multiplier=1.0, frequency_penalty=0.2, seed=seed
    )


def write(generator: DynamicGenerator, each: int, first_seed: int) -> dict[str, list[str]]:
    """Finished documents by name of the schema. Some schemas do not limit the length of a document,
    so a document that is unfinished after MOST_TOKENS is restarted with another seed. Few need it.
    """
    template = generator.loaded.template
    assert template is not None

    def begin(name: str, seed: int) -> None:
        question = f"Write a very short example of '{name}' as JSON. Use simple values."
        prompt = template.render(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        request = generator.request(
            prompt,
            parse_special=True,
            stop=generator.eos_ids,
            max_tokens=MOST_TOKENS,
            sampler=sampler_of(seed),
            constraints=(JsonSchema(SCHEMAS[name], compact=True),),
            prefer_eos=True,
        )
        generator.enqueue(request, identifier=(name, seed))

    written: dict[str, list[str]] = {name: [] for name in SCHEMAS}
    again = 0
    for name in SCHEMAS:
        for number in range(each):
            begin(name, first_seed + number)
    while generator.num_remaining_jobs:
        for result in generator.iterate():
            assert result.error is None
            if result.finish is None:
                continue
            name, seed = cast(tuple[str, int], result.job.identifier)
            if result.finish.reason is FinishReason.LENGTH:
                again += 1
                assert again <= 1 + each, "too many documents did not end"
                begin(name, seed + 1000)
            else:
                written[name].append(result.job.text)
    return written


def check(written: dict[str, list[str]], each: int) -> None:
    for name, documents in written.items():
        assert len(documents) == each
        for text in documents:
            jsonschema.validate(json.loads(text), SCHEMAS[name], jsonschema.Draft202012Validator)


def test_a_document_for_each_schema_validates(generator: DynamicGenerator) -> None:
    check(write(generator, 1, first_seed=100), 1)


@pytest.mark.soak
def test_200_documents_for_20_schemas_validate(generator: DynamicGenerator) -> None:
    check(write(generator, 10, first_seed=100), 10)
