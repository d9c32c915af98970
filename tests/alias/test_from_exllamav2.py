"""docs/from-exllamav2.md: every row of its table of calls is run, the old call beside the new one.

A row has a test here under the text of its first cell. A row without a test, or a test without a
row, is a failure. Where both sides give text or numbers, they are compared.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core import (
    AsyncGenerator,
    BaseGenerator,
    Context,
    DynamicGenerator,
    EngineOptions,
    FinishReason,
    JsonSchema,
    KVFormat,
    LoadOptions,
    ModelDrafter,
    NgramDrafter,
    OneOf,
    Regex,
    SamplerParams,
    StartsWith,
    StreamingGenerator,
    load_adapter,
    load_model,
)
from exl_core.constrain.foreign import Foreign
from exl_core.ops.open import get_table
from exl_core.sampling.sampler import Sampler
from exl_core.tokenizer.pieces import Pieces
from exl_exllamav2 import environment
from support import tiny_models

PAGE = Path(__file__).parents[2] / "docs" / "from-exllamav2.md"
GREEDY = SamplerParams(temperature=0.0)
PROMPT = "Hello there"


class Sides:
    """The tiny model on both sides: `exllamav2` objects, and exl's own."""

    def __init__(self, old: Any, folder: Path) -> None:
        self.old = old
        self.folder = folder
        self.config = old.ExLlamaV2Config(str(folder))
        self.model = old.ExLlamaV2(self.config)
        self.cache = old.ExLlamaV2Cache(self.model, max_seq_len=1024, lazy=True)
        self.model.load_autosplit(self.cache)
        self.tokenizer = old.ExLlamaV2Tokenizer(self.config)
        self.ids = self.tokenizer.encode(PROMPT)
        self.loaded = load_model(folder)
        self.options = EngineOptions(cache_tokens=1024)

    def settings(self, **fields: Any) -> Any:
        from exllamav2.generator import ExLlamaV2Sampler

        return ExLlamaV2Sampler.Settings.greedy(**fields)


@pytest.fixture
def sides(old: Any, tiny_dir: Path) -> Sides:
    return Sides(old, tiny_dir)


ROWS: dict[str, Callable[[Sides], None]] = {}


def row(first_cell: str) -> Callable[[Callable[[Sides], None]], Callable[[Sides], None]]:
    def add(check: Callable[[Sides], None]) -> Callable[[Sides], None]:
        ROWS[first_cell] = check
        return check

    return add


@row("`ExLlamaV2Config(dir)`, `ExLlamaV2(config)`, `load_autosplit(cache)`")
def _load(s: Sides) -> None:
    assert s.model.loaded
    assert s.loaded.config.hidden_size == s.config.hidden_size


@row("`config.max_seq_len`, `scale_pos_emb`, `scale_alpha_value`, `yarn_rope_factor`")
def _rope(s: Sides) -> None:
    for old, new in (
        ({"max_seq_len": 512}, {"max_seq_len": 512}),
        ({"scale_pos_emb": 2.0}, {"rope_factor": 2.0}),
        ({"scale_alpha_value": 2.0}, {"rope_alpha": 2.0}),
        ({"alt_rope_method": "yarn", "yarn_rope_factor": 2.0}, {"yarn_factor": 2.0}),
    ):
        config = s.old.ExLlamaV2Config(str(s.folder))
        for name, value in old.items():
            setattr(config, name, value)
        model = s.old.ExLlamaV2(config)
        model.load()
        loaded = load_model(s.folder, LoadOptions(**new))
        ours = Context(loaded.model, 64).forward(s.ids)[0]
        theirs = model.forward(s.ids)[0, :, : ours.shape[-1]]
        assert torch.equal(theirs, ours.half())


@row("`ExLlamaV2Cache(model, max_seq_len=n)`, `_Q4`, `_Q6`, `_Q8`, `_8bit`")
def _caches(s: Sides) -> None:
    folder = s.folder.with_name("heads-of-32")
    tiny_models.save(tiny_models.tiny_llama(head_dim=32), folder)
    environment.store_options(models={str(folder): str(folder)})  # not the model of all others
    model = s.old.ExLlamaV2(s.old.ExLlamaV2Config(str(folder)))
    model.load()
    loaded = load_model(folder)
    for name, kv_format in (
        ("", KVFormat.FP16),
        ("_Q4", KVFormat.Q4),
        ("_Q6", KVFormat.Q6),
        ("_Q8", KVFormat.Q8),
        ("_8bit", KVFormat.FP8),
    ):
        cache = getattr(s.old, f"ExLlamaV2Cache{name}")(model, max_seq_len=512)
        options = EngineOptions(cache_tokens=512, kv_format=kv_format)
        engine = BaseGenerator(loaded, options).engine
        assert engine.pool.num_pages == cache.store.num_pages
        assert cache.kv_format is kv_format


@row("`ExLlamaV2Tokenizer(config)`")
def _tokenizer(s: Sides) -> None:
    assert s.loaded.tokenizer.vocab_size == s.tokenizer.get_vocab_size()


@row("`tokenizer.encode(text)` with `tokenizer.json`, or with `encode_special_tokens=True`")
def _encode(s: Sides) -> None:
    text = "a</s>b"
    expected = s.loaded.tokenizer.encode(text, allow_special=True)
    for asked in (False, True):
        old = s.tokenizer.encode(text, encode_special_tokens=asked)
        assert old[0].tolist() == expected


@row("`tokenizer.single_id(text)`, `get_id_to_piece_list()`")
def _pieces(s: Sides) -> None:
    pieces = Pieces(s.loaded.tokenizer)
    assert s.tokenizer.single_id("a") == pieces.single_id("a")
    assert s.tokenizer.get_id_to_piece_list() == list(pieces.texts)


@row("`ExLlamaV2Sampler.Settings(...)`")
def _settings(s: Sides) -> None:
    assert SamplerParams() == SamplerParams(temperature=1.0, top_k=0, top_p=1.0)
    with pytest.raises(AttributeError):
        SamplerParams().temperature = 1.0  # type: ignore[misc]


@row("`token_repetition_penalty`, `token_repetition_range`")
def _penalty(s: Sides) -> None:
    from exllamav2.generator import ExLlamaV2BaseGenerator

    settings = s.settings(token_repetition_penalty=1.5, token_repetition_range=8)
    old = ExLlamaV2BaseGenerator(s.model, s.cache, s.tokenizer)
    params = SamplerParams(temperature=0.0, repetition_penalty=1.5, penalty_range=8)
    new = BaseGenerator(s.loaded, s.options).generate_simple(PROMPT, num_tokens=20, sampler=params)
    assert old.generate_simple(PROMPT, settings, 20) == new


@row("`settings.disallow_tokens`, `allow_tokens`, `token_bias`")
def _bias(s: Sides) -> None:
    from exl_exllamav2.settings import sampler_params

    settings = s.settings()
    settings.disallow_tokens(s.tokenizer, [7])
    settings.token_bias[8] = 1.5
    params = sampler_params(settings, s.tokenizer, None)
    same = SamplerParams(
        temperature=params.temperature, top_k=1, banned_tokens=frozenset({7}), token_bias={8: 1.5}
    )
    assert params == same
    only = s.settings()
    only.allow_tokens(s.tokenizer, [9])
    assert sampler_params(only, s.tokenizer, None).allowed_tokens == frozenset({9})


@row("`ExLlamaV2BaseGenerator.generate_simple(prompt, settings, n)`")
def _simple(s: Sides) -> None:
    from exllamav2.generator import ExLlamaV2BaseGenerator

    old = ExLlamaV2BaseGenerator(s.model, s.cache, s.tokenizer)
    new = BaseGenerator(s.loaded, s.options)
    text = new.generate_simple(PROMPT, sampler=GREEDY, num_tokens=20)
    assert old.generate_simple(PROMPT, s.settings(), 20) == text


@row("`begin_stream_ex(ids, settings)`, `stream_ex()`")
def _stream(s: Sides) -> None:
    old = _old_stream(s)
    old.begin_stream_ex(s.ids, s.settings())
    new = StreamingGenerator(s.loaded, s.options)
    new.begin(s.ids[0].tolist(), sampler=GREEDY)
    for _ in range(12):
        found, result = old.stream_ex(), new.step()
        assert found["chunk_token_ids"][0].tolist() == list(result.token_ids)


@row("`set_stop_conditions([...])`")
def _stops(s: Sides) -> None:
    old = _old_stream(s)
    old.begin_stream_ex(s.ids, s.settings())
    text = "".join(old.stream_ex()["chunk"] for _ in range(12))
    assert len(text) > 4
    new = StreamingGenerator(s.loaded, s.options)
    new.stop = ["never in the text"]
    new.begin(s.ids[0].tolist(), sampler=GREEDY)
    new.step()
    new.change(stop=[text[3:5]])
    reasons = [result.reason for result in new]
    old.set_stop_conditions([text[3:5]])
    old.begin_stream_ex(s.ids, s.settings())
    while not old.stream_ex()["eos"]:
        pass
    assert reasons[-1] is FinishReason.STOP


@row("`ExLlamaV2DynamicJob(...)`, `enqueue(job)`, `iterate()`")
def _jobs(s: Sides) -> None:
    assert _old_reply(s) == _new_reply(s)[0].text


@row('`result["text"]`, `result["eos"]`, `result["eos_reason"]`')
def _results(s: Sides) -> None:
    last = _new_reply(s)[1]
    assert last.is_end
    assert isinstance(last.text, str)
    assert last.finish.reason is FinishReason.LENGTH


@row("`ExLlamaV2DynamicGeneratorAsync`")
def _asynchronous(s: Sides) -> None:
    async def ask() -> str:
        generator = DynamicGenerator(s.loaded, s.options)
        async with AsyncGenerator(generator) as jobs:
            request = generator.request(PROMPT, max_tokens=12, sampler=GREEDY, stop=[])
            return "".join([result.text async for result in jobs.submit(request)])

    assert asyncio.run(ask()) == _old_reply(s)


@row("`speculative_ngram = True`; a draft model")
def _drafts(s: Sides) -> None:
    pages = BaseGenerator(s.loaded, s.options).engine.pool.num_pages
    model = ModelDrafter(s.loaded.model, vocab_size=s.loaded.config.vocab_size, num_pages=pages)
    for drafter in (NgramDrafter(), model):
        assert _new_reply(s, drafter=drafter)[0].text == _old_reply(s)


@row("`ExLlamaV2Lora.from_directory(model, dir)`, `set_loras`")
def _lora(s: Sides) -> None:
    folder = _write_adapter(s)
    lora = s.old.ExLlamaV2Lora.from_directory(s.model, str(folder))
    adapter = load_adapter(folder, s.loaded.model)
    with_adapter = _new_reply(s, adapters=adapter)[0].text
    assert _old_reply(s, loras=lora) == with_adapter
    assert with_adapter != _new_reply(s)[0].text


@row("`ExLlamaV2Filter` objects")
def _filters(s: Sides) -> None:
    from exllamav2.generator.filters import ExLlamaV2SelectFilter

    select = ExLlamaV2SelectFilter(s.model, s.tokenizer, ["yes", "no"])
    generator = DynamicGenerator(s.loaded, s.options)

    def reply(constraint: Any) -> Any:
        return generator.generate(
            PROMPT, max_tokens=12, sampler=GREEDY, constraints=constraint, completion_only=True
        )

    assert reply(Foreign(select)) == reply(OneOf(["yes", "no"]))
    assert reply(StartsWith(["no"])).startswith("no")
    assert re.fullmatch("[ab]{3}", reply(Regex("[ab]{3}")))
    assert reply(JsonSchema({"enum": [1]}, compact=True)) == "1"


@row("`model.forward(ids, cache)`, `cache.current_seq_len`")
def _forward(s: Sides) -> None:
    logits = s.model.forward(s.ids, s.cache)
    context = Context(s.loaded.model, 1024)
    ours = context.forward(s.ids)[0]
    assert torch.equal(logits[0, :, : ours.shape[-1]], ours.half())
    assert context.length == s.cache.current_seq_len
    context.length = s.cache.current_seq_len = 3
    assert context.length == s.cache.current_seq_len == 3


@row("`ExLlamaV2Sampler.sample(logits, ..., random=u)`")
def _sample(s: Sides) -> None:
    from exllamav2.generator import ExLlamaV2Sampler

    settings = ExLlamaV2Sampler.Settings(temperature=1.3, top_k=20, top_p=0.0)
    settings.token_repetition_penalty = 1.0
    logits = s.model.forward(s.ids)[:, -1:].float()  # on the device of the model
    params = SamplerParams(temperature=1.3, top_k=20)
    sampler = Sampler(params, get_table("cpu", threads=1))
    row_of_logits = logits[0, 0, : s.loaded.tokenizer.vocab_size].cpu().contiguous()
    for u in (0.0, 0.3, 0.99):
        new = sampler.sample(row_of_logits, s.ids[0].tolist(), num_top=20, uniform=u)
        shares = dict(new.top)
        token, _, _, probability, _ = ExLlamaV2Sampler.sample(
            logits, settings, s.ids, u, s.tokenizer
        )
        assert float(probability) == pytest.approx(shares[int(token)])
        # The first token whose share reaches beyond u, in the order of each side.
        assert _first_beyond(u, shares) == int(token)
        assert _first_beyond(u, dict(sorted(new.top))) == new.token_id


def _first_beyond(u: float, shares: dict[int, float]) -> int:
    sums = itertools.accumulate(shares.values())
    return next(token for token, total in zip(shares, sums, strict=True) if total > u)


def _old_stream(s: Sides) -> Any:
    from exllamav2.generator import ExLlamaV2StreamingGenerator

    generator = ExLlamaV2StreamingGenerator(s.model, s.cache, s.tokenizer)
    generator.set_stop_conditions([])
    return generator


def _old_reply(s: Sides, loras: Any = None) -> str:
    from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob

    generator = ExLlamaV2DynamicGenerator(s.model, s.cache, s.tokenizer)
    generator.set_loras(loras)
    job = ExLlamaV2DynamicJob(s.ids, 12, gen_settings=s.settings())
    generator.enqueue(job)
    while generator.num_remaining_jobs():
        generator.iterate()
    return str(job.full_completion)


def _new_reply(s: Sides, drafter: Any = None, **fields: Any) -> tuple[Any, Any]:
    """The job and its last result."""
    generator = DynamicGenerator(s.loaded, s.options, drafter=drafter)
    request = generator.request(s.ids[0].tolist(), max_tokens=12, sampler=GREEDY, stop=[], **fields)
    job, last = generator.enqueue(request), None
    while generator.num_remaining_jobs:
        for result in generator.iterate():
            last = result
    return job, last


def _write_adapter(s: Sides) -> Path:
    import json

    from safetensors.torch import save_file

    folder = s.folder.with_name("adapter")
    folder.mkdir(exist_ok=True)
    hidden = s.config.hidden_size
    rows = s.config.num_attention_heads * s.config.head_dim
    generator = torch.Generator().manual_seed(1)
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {
            f"{stem}.lora_A.weight": torch.randn(8, hidden, generator=generator),
            f"{stem}.lora_B.weight": torch.randn(rows, 8, generator=generator),
        },
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_every_row_has_a_test() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## Old calls and new calls")[1]
    cells = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert cells[1:] == list(ROWS)


@pytest.mark.parametrize("first_cell", ROWS)
def test_a_row(first_cell: str, sides: Sides) -> None:
    ROWS[first_cell](sides)
