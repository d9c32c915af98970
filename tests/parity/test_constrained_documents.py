"""The real model writes documents for twenty schemas of growing difficulty; all validate."""

from __future__ import annotations

import json

import jsonschema
import pytest

from exl_core.constrain.json_schema import JsonSchema
from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import FinishReason
from exl_core.generate.dynamic import DynamicGenerator
from exl_core.load import load_model
from exl_core.sampling.params import SamplerParams
from support.real_models import smollm2_gguf
from support.schemas import SCHEMAS

MOST_TOKENS = 1000


@pytest.fixture(scope="module")
def generator() -> DynamicGenerator:
    return DynamicGenerator(
        load_model(str(smollm2_gguf())), EngineOptions(cache_tokens=32768, max_batch=16)
    )


def write(generator: DynamicGenerator, each: int, first_seed: int) -> dict[str, list[str]]:
    """Documents by name of the schema; all that were begun were finished."""
    template = generator.loaded.template
    assert template is not None
    written: dict[str, list[str]] = {name: [] for name in SCHEMAS}
    for name, schema in SCHEMAS.items():
        question = f"Write one short example, as JSON, for this schema: {json.dumps(schema)}"
        prompt = template.render(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        for number in range(each):
            request = generator.request(
                prompt,
                parse_special=True,
                stop=generator.eos_ids,
                max_tokens=MOST_TOKENS,
                sampler=SamplerParams(temperature=0.8, top_p=0.95, seed=first_seed + number),
                constraints=(JsonSchema(schema, compact=True),),
                prefer_eos=True,
            )
            generator.enqueue(request, identifier=name)
    while generator.num_remaining_jobs:
        for result in generator.iterate():
            assert result.error is None
            if result.finish is not None:
                assert result.finish.reason is not FinishReason.LENGTH, result.job.text
                written[str(result.job.identifier)].append(result.job.text)
    return written


def check(written: dict[str, list[str]], each: int) -> None:
    for name, documents in written.items():
        assert len(documents) == each
        for text in documents:
            jsonschema.validate(json.loads(text), SCHEMAS[name], jsonschema.Draft202012Validator)


def test_a_document_for_each_schema_validates(generator: DynamicGenerator) -> None:
    check(write(generator, 1, first_seed=0), 1)


@pytest.mark.slow
def test_200_documents_for_20_schemas_validate(generator: DynamicGenerator) -> None:
    check(write(generator, 10, first_seed=100), 10)
