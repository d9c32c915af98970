"""Behaviour of exllamav2 on which programs rely: special tokens of a text, caches shorter than the
model's context, progress of prompts, hooks, experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import exl_exllamav2.base_generator
from exl_core.engine.engine import Engine
from exl_exllamav2.settings import Settings
from support import tiny_models

GREEDY = Settings.greedy()


@pytest.fixture
def model(old: Any) -> Any:
    model = old.ExLlamaV2(old.ExLlamaV2Config("/mnt/models/some-model"))
    model.load()
    return model


@pytest.fixture
def tokenizer(old: Any, model: Any) -> Any:
    return old.ExLlamaV2Tokenizer(model.config)


@pytest.fixture
def expert_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Mixtral, which every model path means then."""
    tiny_models.save(tiny_models.tiny_mixtral(), tmp_path)
    monkeypatch.setenv("EXL_ALIAS_MODELS", json.dumps({"*": str(tmp_path)}))
    return tmp_path


def test_special_tokens_of_a_text_are_tokens(model: Any, tokenizer: Any) -> None:
    from exllamav2.generator import ExLlamaV2BaseGenerator

    expected = [tokenizer.bos_token_id, tokenizer.single_id("a")]
    for asked in (False, True):
        assert tokenizer.encode("<s>a", encode_special_tokens=asked).tolist() == [expected]
    assert tokenizer.encode_unspecial("<s>a") == tokenizer.tokenizer_model.encode("<s>a")
    assert tokenizer.encode_unspecial("<s>a") == expected
    assert tokenizer.num_tokens("<s>a") == 2
    generator = ExLlamaV2BaseGenerator(model, new_cache(model), tokenizer)
    generator.generate_simple("<s>a", GREEDY, 1)
    assert generator.sequence_ids[0, :2].tolist() == expected


def test_tokenizer_model_alone_leaves_special_tokens_as_text(
    old: Any, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_dir, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.model").touch()
    monkeypatch.setenv("EXL_ALIAS_MODELS", json.dumps({"*": str(tmp_path / "model")}))
    tokenizer = old.ExLlamaV2Tokenizer(old.ExLlamaV2Config("any"), force_spm=True)
    assert tokenizer.decode(tokenizer.encode("<s>a"), decode_special_tokens=True) == ["<s>a"]
    assert tokenizer.encode("<s>a").shape == (1, 4)
    assert tokenizer.encode("<s>a", encode_special_tokens=True).shape == (1, 2)


def new_cache(model: Any, max_seq_len: int = 256) -> Any:
    from exllamav2 import ExLlamaV2Cache

    return ExLlamaV2Cache(model, max_seq_len=max_seq_len)


def test_a_stream_goes_on_to_the_end_of_a_cache_shorter_than_the_context(
    model: Any, tokenizer: Any
) -> None:
    from exllamav2.generator import ExLlamaV2StreamingGenerator

    generator = ExLlamaV2StreamingGenerator(model, new_cache(model), tokenizer)
    generator.begin_stream_ex(tokenizer.encode("x" * 250), GREEDY)
    for _ in range(6):
        generator.stream_ex()
    with pytest.raises(AssertionError, match="full"):
        generator.stream_ex()


def test_a_call_takes_no_more_tokens_than_the_cache_has_room_for(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from exllamav2.generator import ExLlamaV2BaseGenerator

    generator = ExLlamaV2BaseGenerator(model, new_cache(model), tokenizer)
    generator.generate_simple("x" * 250, GREEDY, 600, stop_token=None)
    assert generator.sequence_ids.shape == (1, 256)
    (line,) = capsys.readouterr().err.splitlines()
    assert "has room for 6 new ones, fewer than num_tokens=600" in line


def test_a_cache_as_long_as_the_context_cuts_the_prompt(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from exllamav2.generator import ExLlamaV2BaseGenerator

    generator = ExLlamaV2BaseGenerator(model, new_cache(model, 1024), tokenizer)
    prompt = "y" * 10 + "x" * 1010
    generator.generate_simple(prompt, GREEDY, 100, stop_token=None)
    assert generator.sequence_ids.shape == (1, 1024)
    assert generator.sequence_ids[0, :924].tolist() == tokenizer.encode("x" * 924)[0].tolist()
    assert capsys.readouterr().err == ""


def test_a_warm_up_takes_little_memory(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exllamav2.generator import ExLlamaV2StreamingGenerator

    made: list[Engine] = []

    def make(*args: Any, **kwargs: Any) -> Engine:
        made.append(Engine(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(exl_exllamav2.base_generator, "Engine", make)
    cache = new_cache(model, 1024)
    ExLlamaV2StreamingGenerator(model, cache, tokenizer).warmup()
    (engine,) = made
    assert engine.store.num_pages * 4 <= cache.store.num_pages


def test_submodules_are_attributes_of_the_package(old: Any) -> None:
    assert old.generator.filters.ExLlamaV2Filter is old.generator.base.ExLlamaV2Filter
    for name in ("attn", "linear", "mlp", "rmsnorm", "embedding", "compat"):
        assert hasattr(old, name), name


@pytest.mark.parametrize("length", [2, 300, 700])
def test_prompts_are_reported_to_their_end(model: Any, tokenizer: Any, length: int) -> None:
    from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob

    generator = ExLlamaV2DynamicGenerator(
        model, new_cache(model, 1024), tokenizer, max_chunk_size=256
    )
    generator.enqueue(ExLlamaV2DynamicJob(tokenizer.encode("x" * length), 2, gen_settings=GREEDY))
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    stages = [one["stage"] for one in results]
    assert stages == sorted(stages, key=("started", "prefill", "streaming").index)
    progress = [
        (one["curr_progress"], one["max_progress"]) for one in results if "curr_progress" in one
    ]
    assert progress[-1] == (length - 1, length - 1)
    assert len(set(progress)) == len(progress)
    assert all(total == length - 1 for _, total in progress)


def test_hooks_get_the_probability_and_all_logits(model: Any, tokenizer: Any) -> None:
    from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2StreamingGenerator

    seen: list[tuple[float, Any]] = []

    def hook(found: Any) -> None:
        seen.append((found.sampled_prob.item(), found.logits))
        assert int(found.logits[0, 0].argmax()) == int(found.sampled_token)

    settings = Settings.greedy()
    settings.post_sampling_hooks = [hook]
    cache = new_cache(model)
    ExLlamaV2BaseGenerator(model, cache, tokenizer).generate_simple("abc", settings, 3)
    stream = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    stream.begin_stream_ex(tokenizer.encode("abc"), settings)
    assert "logits" not in stream.stream_ex()
    assert len(seen) == 4
    for probability, logits in seen:
        assert probability == 1.0
        assert logits.shape == (1, 1, 320)
        assert logits.dtype == torch.float32


@pytest.mark.parametrize("kind", ["base", "stream", "dynamic"])
def test_filters_are_not_fed_with_a_token_of_a_hook_that_says_so(
    model: Any, tokenizer: Any, kind: str
) -> None:
    from exllamav2.generator import (
        ExLlamaV2BaseGenerator,
        ExLlamaV2DynamicGenerator,
        ExLlamaV2StreamingGenerator,
    )
    from exllamav2.generator.filters import ExLlamaV2Filter

    class Recorder(ExLlamaV2Filter):  # type: ignore[misc]
        def clone(self, c: Any = None) -> Any:
            return self

        def begin(self, prefix_str: Any) -> None:
            pass

        def feed(self, token: Any) -> None:
            fed.append(int(token))

        def next(self) -> Any:
            return set(range(50, 60)), set()

    def hide(found: Any) -> None:
        seen.append(int(found.sampled_token))
        found.feed_filters = len(seen) != 2

    def look(found: Any) -> None:
        assert found.feed_filters == (len(seen) != 2), "hooks share one result"

    seen: list[int] = []
    fed: list[int] = []
    settings = Settings.greedy()
    settings.post_sampling_hooks = [hide, look]
    filters = [Recorder(model, tokenizer)]
    cache = new_cache(model)
    if kind == "base":
        generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
        generator.generate_simple("abc", settings, 4, filters=filters)
    elif kind == "dynamic":
        dynamic = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
        dynamic.generate("abc", max_new_tokens=4, gen_settings=settings, filters=filters)
    else:
        stream = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
        stream.begin_stream_ex(tokenizer.encode("abc"), settings, filters=filters)
        for _ in range(4):
            stream.stream_ex()
    assert len(seen) >= 4
    assert fed[:3] == [seen[0], *seen[2:4]]


def test_filters_of_a_healed_stream_begin_with_the_healed_token(model: Any, tokenizer: Any) -> None:
    """The dynamic generator begins them after it, as in exllamav2."""
    from exllamav2.generator import (
        ExLlamaV2BaseGenerator,
        ExLlamaV2DynamicGenerator,
        ExLlamaV2StreamingGenerator,
    )
    from exllamav2.generator.filters import ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter

    cache = new_cache(model)
    stream = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    for kind, text in ((ExLlamaV2PrefixFilter, "bcd"), (ExLlamaV2SelectFilter, "cd")):
        filters = [kind(model, tokenizer, [text])]
        stream.begin_stream_ex(tokenizer.encode("ab"), GREEDY, token_healing=True, filters=filters)
        assert "".join(stream.stream_ex()["chunk"] for _ in range(3))[:2] == "cd"
    prefix = [ExLlamaV2PrefixFilter(model, tokenizer, "bcd")]
    base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    assert base.generate_simple("ab", GREEDY, 2, token_healing=True, filters=prefix) == "abcd"
    dynamic = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    text = dynamic.generate("ab", 3, gen_settings=GREEDY, token_healing=True, filters=prefix)
    assert text == "abbcd"
    filters = [ExLlamaV2PrefixFilter(model, tokenizer, "cd")]
    stream.begin_stream_ex(tokenizer.encode("ab"), GREEDY, token_healing=True, filters=filters)
    with pytest.raises(ValueError, match="last prompt token"):
        stream.stream_ex()


def test_each_call_of_a_healed_stream_samples_a_token(model: Any, tokenizer: Any) -> None:
    from exllamav2.generator import ExLlamaV2StreamingGenerator

    generator = ExLlamaV2StreamingGenerator(model, new_cache(model), tokenizer)
    results: list[list[tuple[str, bool]]] = []
    for heals in (False, True):  # a prompt of bytes is healed to itself
        generator.set_stop_conditions([])
        generator.begin_stream_ex(tokenizer.encode("ab"), GREEDY, token_healing=heals)
        found = [generator.stream_ex() for _ in range(5)]
        results.append([(one["chunk"], one["eos"]) for one in found])
        assert generator.sequence_ids.shape == (1, 7)
    assert results[0] == results[1]


def test_a_guided_stream_needs_a_cache_of_two_rows(old: Any, model: Any, tokenizer: Any) -> None:
    from exllamav2.generator import ExLlamaV2StreamingGenerator

    ids, settings = tokenizer.encode(["ab", "cd"]), Settings.greedy(cfg_scale=2.0)
    one = ExLlamaV2StreamingGenerator(model, new_cache(model), tokenizer)
    with pytest.raises(AssertionError, match=r"cache of two rows \(expected batch_size=2, got 1\)"):
        one.begin_stream_ex(ids, settings)
    cache = old.ExLlamaV2Cache(model, batch_size=2, max_seq_len=256)
    two = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    two.begin_stream_ex(ids, settings)
    assert two.stream_ex()["chunk_token_ids"].shape == (1, 1)


def test_a_selection_ignores_case_but_not_in_the_prompt(model: Any, tokenizer: Any) -> None:
    from exllamav2.generator.filters import ExLlamaV2SelectFilter

    def ids(text: str) -> set[int]:
        return set(tokenizer.encode(text)[0].tolist())

    chosen = ExLlamaV2SelectFilter(model, tokenizer, ["Cd", "cE"], case_insensitive=True)
    chosen.begin("B")
    for allowed, fed in (("B", "B"), ("cC", "C"), ("dDeE", "E")):
        passed, ends = chosen.next()
        assert passed == ids(allowed)
        assert ends == (passed if fed == "E" else set())
        chosen.feed(tokenizer.encode(fed))


def test_experts_per_token_are_those_of_the_configuration(old: Any, expert_dir: Path) -> None:
    def logits(experts: int | None) -> Any:
        config = old.ExLlamaV2Config("any")
        assert (config.num_experts, config.num_experts_per_token) == (4, 2)
        assert config.intermediate_size == found["intermediate_size"]
        if experts is not None:
            config.num_experts_per_token = experts
        model = old.ExLlamaV2(config)
        model.load()
        return model.forward(torch.tensor([[5, 6, 7]]))

    found = json.loads((expert_dir / "config.json").read_text(encoding="utf-8"))
    one, two = logits(1), logits(2)
    assert torch.equal(two, logits(None))
    assert not torch.allclose(one, two)


def test_a_model_without_experts_ignores_their_number(old: Any) -> None:
    """Some programs set it for every model."""
    config = old.ExLlamaV2Config("any")
    assert config.num_experts is None
    config.num_experts_per_token = 2
    old.ExLlamaV2(config).load()
