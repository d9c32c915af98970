"""Parts of the old interface: settings, tokenizer, job results, refusals and error types."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest
import torch

import exl_exllamav2.config
import exl_exllamav2.model
from exl_core.cache.format import KVFormat
from exl_core.errors import ExlError
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadOptions, load_model
from exl_exllamav2.settings import Settings, SettingsReader, sampler_params


@pytest.fixture
def parts(old: Any) -> tuple[Any, Any, Any]:
    """A loaded model with cache and tokenizer."""
    model = old.ExLlamaV2(old.ExLlamaV2Config("/mnt/models/some-model"))
    cache = old.ExLlamaV2Cache(model, max_seq_len=1024, lazy=True)
    model.load_autosplit(cache)
    return model, cache, old.ExLlamaV2Tokenizer(model.config)


@pytest.fixture
def tokenizer(old: Any) -> Any:
    return old.ExLlamaV2Tokenizer(old.ExLlamaV2Config("/mnt/models/some-model"))


def test_default_settings_are_not_neutral(tokenizer: Any) -> None:
    assert sampler_params(Settings(), tokenizer, 1) == SamplerParams(
        temperature=0.8, top_k=50, top_p=0.8, repetition_penalty=1.025, seed=1
    )
    assert sampler_params(Settings.greedy(), tokenizer, None).is_greedy


def test_values_that_mean_off(tokenizer: Any) -> None:
    off = Settings(top_p=1.0, tfs=1.0, typical=1.0, min_temp=1.0, max_temp=1.0, top_k=-1, min_p=1)
    params = sampler_params(off, tokenizer, None)
    assert (params.top_p, params.tfs, params.typical, params.top_k, params.min_p) == (1, 1, 1, 0, 0)
    assert not params.has_dynamic_temperature


def test_a_bias_becomes_bans_or_the_tokens_that_it_leaves(tokenizer: Any) -> None:
    settings = Settings()
    settings.disallow_tokens(tokenizer, [5, 6])
    assert settings.token_bias is not None
    assert settings.token_bias.shape == (320,)
    settings.token_bias[7] = 2.5
    params = sampler_params(settings, tokenizer, None)
    assert params.banned_tokens == {5, 6}
    assert dict(params.token_bias) == {7: 2.5}
    only = Settings()
    only.allow_tokens(tokenizer, ["a", 9])
    allowed = sampler_params(only, tokenizer, None).allowed_tokens
    assert allowed == frozenset((tokenizer.single_id("a"), 9))


def test_changes_of_settings_are_seen_once(tokenizer: Any) -> None:
    settings = Settings()
    reader = SettingsReader(settings, tokenizer, None)
    assert reader.changed() is None
    settings.token_repetition_range = 64
    found = reader.changed()
    assert found is not None
    assert found.penalty_range == 64
    assert reader.changed() is None
    settings.disallow_tokens(tokenizer, [3])
    assert reader.changed() is not None
    assert settings.token_bias is not None
    settings.token_bias[4] = -torch.inf  # in place
    found = reader.changed()
    assert found is not None
    assert found.banned_tokens == {3, 4}


def test_settings_are_copied_and_take_any_attribute() -> None:
    settings = Settings(temperature=0.5)
    settings.stop_sequences = ["x"]  # type: ignore[attr-defined]
    assert copy.deepcopy(settings).temperature == 0.5
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings.greedy().top_k == 1  # a static method, called on an object


def test_a_value_out_of_range_names_the_old_setting(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="token_repetition_penalty") as found:
        sampler_params(Settings(token_repetition_penalty=-1), tokenizer, None)
    assert isinstance(found.value, ExlError)


def test_encode_pads_on_the_left(tokenizer: Any) -> None:
    ids, offsets = tokenizer.encode(["abc", "a"], add_bos=True, return_offsets=True)
    assert ids.dtype == torch.long
    assert offsets.tolist() == [0, -2]
    assert (tokenizer.padding_mask(ids)[1] == -torch.inf).tolist() == [True, True, False, False]
    assert tokenizer.decode(ids) == ["abc", "a"]
    assert tokenizer.decode(ids[0]) == "abc"
    assert tokenizer.tokenizer_model.id_to_piece(tokenizer.single_id(" ")) == "Ġ"
    with pytest.raises(AssertionError):
        tokenizer.decode("abc")


@pytest.mark.parametrize(
    "text",
    [
        "exllamav2.ExLlamaV2VisionTower(None)",
        "__import__('exllamav2.ext').ext.exllamav2_ext",
        "model.modules[1].forward(None)",
        "model.forward_chunk(None)",
        "exllamav2.ExLlamaV2(model.config).load(lazy=True)",
    ],
)
def test_refusals_name_a_substitute(text: str, old: Any, parts: tuple[Any, Any, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"is not available: .+[.] .+") as found:
        eval(text, {"exllamav2": old, "model": parts[0]})
    assert isinstance(found.value, ExlError)


def test_old_exception_types(old: Any, parts: tuple[Any, Any, Any], tmp_path: Any) -> None:
    model, cache, _ = parts
    with pytest.raises(ValueError, match="LoRA"):
        old.ExLlamaV2Lora.from_directory(model, tmp_path)
    with pytest.raises(AssertionError, match="the cache is full"):
        model.forward(torch.zeros(1, 1025, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="cut back"):
        cache.current_seq_len = 1


def test_one_warning_where_a_split_was_requested(
    old: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXL_ALIAS_DEVICE", "cpu")  # with several GPUs the model is divided
    for _ in range(2):
        model = old.ExLlamaV2(old.ExLlamaV2Config("/mnt/models/some-model"))
        with pytest.raises(AssertionError, match="load_tp"):
            old.ExLlamaV2Cache_TP(model)
        model.load_tp(progress=True, expect_cache_tokens=512)
        assert old.ExLlamaV2Cache_TP(model, base=old.ExLlamaV2Cache_8bit).footprint()[0] > 0
    err = capsys.readouterr().err
    assert err.count("load_tp") == len(err.splitlines()) == 1


def test_unload_may_be_called_again(parts: tuple[Any, Any, Any]) -> None:
    model, _, _ = parts
    model.unload()
    model.unload()
    assert not model.loaded


def test_generators_and_forward_survive_another_load(parts: tuple[Any, Any, Any]) -> None:
    from exllamav2 import ExLlamaV2, ExLlamaV2Cache
    from exllamav2.generator import (
        ExLlamaV2BaseGenerator,
        ExLlamaV2DynamicGenerator,
        ExLlamaV2StreamingGenerator,
    )

    model, cache, tokenizer = parts
    draft = ExLlamaV2(model.config)
    draft.load()
    drafts = draft, ExLlamaV2Cache(draft, max_seq_len=1024)
    ids, greedy = tokenizer.encode("A word, and another"), Settings.greedy()
    base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    stream = ExLlamaV2StreamingGenerator(model, cache, tokenizer, *drafts)
    dynamic = ExLlamaV2DynamicGenerator(
        model, cache, tokenizer, draft_model=drafts[0], draft_cache=drafts[1]
    )

    def streamed() -> list[Any]:
        stream.begin_stream_ex(ids, greedy)
        return [stream.stream_ex()["chunk"] for _ in range(4)]

    def passed() -> list[float]:
        cache.current_seq_len = 0
        model.forward(ids[:, :3], cache)
        load_again()
        found: list[float] = model.forward(ids[:, 3:], cache)[0, -1, :300].tolist()
        return found

    def load_again() -> None:
        for one in (model, draft):
            one.unload()
            one.load()

    calls: list[Any] = [
        lambda: base.generate_simple("A word", greedy, 4),
        lambda: dynamic.generate("A word", 4, gen_settings=greedy),
        streamed,
        passed,
    ]
    before = [call() for call in calls]
    for call, expected in zip(calls, before, strict=True):
        load_again()
        assert call() == expected
    assert streamed() == before[2]
    load_again()
    with pytest.raises(
        RuntimeError, match=r"loaded again during this stream\. Call begin_stream_ex"
    ):
        stream.stream_ex()


def test_jobs_on_freed_weights_fail_before_new_ones_run(parts: tuple[Any, Any, Any]) -> None:
    from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob

    model, cache, tokenizer = parts
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    expected = generator.generate("A word", 4, gen_settings=Settings.greedy())
    generator.enqueue(ExLlamaV2DynamicJob(tokenizer.encode("A word"), max_new_tokens=50))
    generator.iterate()
    model.unload()
    model.load()
    with pytest.raises(ValueError, match="unloaded"):
        while generator.num_remaining_jobs():
            generator.iterate()
    generator.clear_queue()
    assert generator.generate("A word", 4, gen_settings=Settings.greedy()) == expected


@pytest.mark.parametrize("max_seq_len", [512, 1024])  # the shorter cache limits num_tokens
def test_arguments_of_other_types_are_value_errors(
    parts: tuple[Any, Any, Any], max_seq_len: int
) -> None:
    """exllamav2 failed with a TypeError, AttributeError or ValueError in all these calls."""
    from exllamav2 import ExLlamaV2Cache
    from exllamav2 import generator as old

    model, _, tokenizer = parts
    cache, greedy = ExLlamaV2Cache(model, max_seq_len=max_seq_len), Settings.greedy()
    base, stream, dynamic = (
        make(model, cache, tokenizer)
        for make in (
            old.ExLlamaV2BaseGenerator,
            old.ExLlamaV2StreamingGenerator,
            old.ExLlamaV2DynamicGenerator,
        )
    )
    for number in (None, "4", 1.5):
        with pytest.raises(ValueError, match="num_tokens is no whole number"):
            base.generate_simple("a", greedy, number)
        for name in ("max_new_tokens", "min_new_tokens"):
            with pytest.raises(ValueError, match=f"{name} is no whole number"):
                dynamic.generate("a", **{"max_new_tokens": 4, name: number})
    for ids in ([1, 2], "ab", None, torch.ones(1, 1, 2)):
        with pytest.raises(
            ValueError, match=r"input_ids is no tensor of rows .*a tensor \[rows, n\]"
        ):
            stream.begin_stream_ex(ids, greedy)
    for ids in ([1, 2], "ab", torch.tensor([5, 6])):
        with pytest.raises(ValueError, match="input_ids is no tensor of rows"):
            model.forward(ids, cache)
    assert dynamic.num_remaining_jobs() == 0
    assert base.generate_simple("a", greedy, torch.tensor(2)) == base.generate_simple(
        "a", greedy, 2
    )


def test_changed_settings_reach_a_running_job(parts: tuple[Any, Any, Any]) -> None:
    from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob

    model, cache, tokenizer = parts
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    settings = Settings.greedy()
    settings.allow_tokens(tokenizer, ["a"])
    job = ExLlamaV2DynamicJob(tokenizer.encode("x"), 8, gen_settings=settings, identifier=("a", 1))
    generator.enqueue(job)
    steps = 0
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            assert result["identifier"] == ("a", 1)
            steps += result["stage"] == "streaming"
        if steps == 3:
            settings.token_bias = None
            settings.allow_tokens(tokenizer, ["b"])
    assert job.full_completion == "aaabbbbb"
    assert steps == 8
    sequence = job.sequences[0]
    assert sequence.input_ids.torch().tolist() == tokenizer.encode("x").tolist()


def test_a_call_that_raises_leaves_no_results(parts: tuple[Any, Any, Any]) -> None:
    from exllamav2.generator import ExLlamaV2DynamicGenerator

    def hook(_: Any) -> None:
        raise KeyError("hook")

    generator = ExLlamaV2DynamicGenerator(*parts)
    bad, good = Settings.greedy(post_sampling_hooks=[hook]), Settings.greedy()
    with pytest.raises(ValueError, match="a hook failed"):
        generator.generate(["a", "b"], 1, gen_settings=[bad, good])
    assert generator.num_remaining_jobs() == 0
    assert generator.iterate() == []


def test_a_job_is_enqueued_only_once(parts: tuple[Any, Any, Any]) -> None:
    from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob

    generator, other = (ExLlamaV2DynamicGenerator(*parts) for _ in range(2))
    tokenizer = parts[2]
    job = ExLlamaV2DynamicJob(tokenizer.encode("x"), 3, gen_settings=Settings.greedy())
    generator.enqueue(job)
    generator.cancel(job)  # before its first step
    for is_started in (False, True):
        if not is_started:
            generator.enqueue(job)
        for one in (generator, other):
            with pytest.raises(AssertionError, match=r"only once \(got a job that waits or runs\)"):
                one.enqueue(job)
        generator.iterate()
        assert job.is_started
    while generator.num_remaining_jobs():
        generator.iterate()
    text = job.full_completion
    with pytest.raises(AssertionError, match=r"has run\). Make a new ExLlamaV2DynamicJob"):
        generator.enqueue(job)
    assert generator.num_remaining_jobs() == 0
    assert generator.generate("x", 3, gen_settings=Settings.greedy()) == "x" + text


def test_an_asynchronous_job_is_enqueued_only_once(parts: tuple[Any, Any, Any]) -> None:
    from exllamav2.generator import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync

    async def run() -> None:
        generator = ExLlamaV2DynamicGeneratorAsync(*parts)
        job = ExLlamaV2DynamicJobAsync(generator, parts[2].encode("x"), 3)
        with pytest.raises(AssertionError, match="waits or runs"):
            generator.enqueue(job)
        results = [result async for result in job]
        assert results[-1]["new_tokens"] == 3
        with pytest.raises(AssertionError, match="has run"):
            generator.enqueue(job)
        await generator.close()

    asyncio.run(run())


@pytest.mark.parametrize("shape", [(2, 5), (1, 1, 5), (0, 5)])
def test_a_batch_of_ids_is_no_prompt_of_a_job(old: Any, shape: tuple[int, ...]) -> None:
    from exllamav2.generator import ExLlamaV2DynamicJob

    ids = torch.ones(shape, dtype=torch.long)
    for prompt in (ids, [ids, ids]):
        with pytest.raises(AssertionError, match="is not one row"):
            ExLlamaV2DynamicJob(prompt, 3)
    with pytest.raises(ValueError, match="input_ids is no tensor"):
        ExLlamaV2DynamicJob([1, 2], 3)
    one = torch.ones((1, 5), dtype=torch.long)
    assert len(ExLlamaV2DynamicJob([one, one[0, :3]], 3).sequences) == 2


def test_an_empty_list_of_filters_is_none(parts: tuple[Any, Any, Any]) -> None:
    from exllamav2.generator import ExLlamaV2DynamicGenerator

    generator = ExLlamaV2DynamicGenerator(*parts)
    settings = Settings.greedy()
    texts = generator.generate(["a", "b"], 3, gen_settings=settings, filters=[], embeddings=[])
    assert texts == generator.generate(["a", "b"], 3, gen_settings=settings)


def test_a_full_context_is_no_end_of_the_stream(parts: tuple[Any, Any, Any]) -> None:
    from exllamav2.generator import ExLlamaV2StreamingGenerator

    model, cache, tokenizer = parts
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.set_stop_conditions([])
    generator.begin_stream_ex(tokenizer.encode("x" * 1020), Settings.greedy())
    results = [generator.stream_ex() for _ in range(4)]
    assert generator.full()
    assert not any(result["eos"] for result in results)
    with pytest.raises(AssertionError, match="the context is full"):
        generator.stream_ex()


def test_sizes_of_gpus_mean_nothing_on_the_cpu(
    old: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXL_ALIAS_DEVICE", "cpu")
    model = old.ExLlamaV2(old.ExLlamaV2Config("/mnt/models/some-model"))
    model.load([1e-6, 20])
    assert model.loaded
    assert capsys.readouterr().err.count("gpu_split: is not used") == 1


@pytest.mark.parametrize(
    ("gpus", "sizes", "expected"),
    [
        (1, [2**-10, 20], {"split": "0.001049"}),
        (1, [0, 20], {}),
        (2, [0, 20, 24], {"split": "0.000000,21.474836"}),
    ],
)
def test_sizes_of_gpus_that_do_not_exist_are_left_out(
    old: Any, gpus: int, sizes: list[float], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = old.ExLlamaV2(old.ExLlamaV2Config("/mnt/models/some-model"))
    monkeypatch.setattr(type(model.config), "is_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert model._split_fields(sizes) == expected


def test_parallel_loading_divides_the_model_among_processes(
    old: Any,
    parts: tuple[Any, Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv("EXL_ALIAS_DEVICE", "cpu")
    model = old.ExLlamaV2(old.ExLlamaV2Config("/mnt/models/some-model"))
    model.load_tp([12, 12], expect_cache_tokens=512)
    assert model.tp_context.num_devices == 2
    ids = torch.tensor([[5, 80, 90, 100, 33]])
    cache = old.ExLlamaV2Cache_TP(model, max_seq_len=512)
    difference = model.forward(ids, cache).cpu() - parts[0].forward(ids, parts[1]).cpu()
    assert difference[..., :320].abs().max() < 0.01
    processes = model.weights
    model.unload()
    with pytest.raises(ExlError, match="unloaded"):
        processes.check_loaded()
    assert not capsys.readouterr().err


def test_splits_become_those_of_exl(old: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options that the load methods give to exl on a machine with GPUs."""
    asked: list[LoadOptions] = []

    def load(files: Any, options: LoadOptions, report: Any) -> Any:
        asked.append(options)
        return load_model(files, LoadOptions(device="cpu"), report)  # in one process

    monkeypatch.setattr(exl_exllamav2.model, "load_model", load)
    monkeypatch.setattr(exl_exllamav2.config.ExLlamaV2Config, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = old.ExLlamaV2Config("/mnt/models/some-model")
    old.ExLlamaV2(config).load()
    old.ExLlamaV2(config).load([0, 20, 24.5, 30])  # there is no fourth GPU
    old.ExLlamaV2(config).load_tp([1, 1])
    old.ExLlamaV2(config).load_tp([1, 1, 1, 1])
    old.ExLlamaV2(config).load_tp()
    model = old.ExLlamaV2(config)
    cache = old.ExLlamaV2Cache_8bit(model, max_seq_len=2048, lazy=True)
    model.load_autosplit(cache, reserve_vram=[1 << 20, 0])
    assert [one.split for one in asked[:2]] == ["auto", "0.000000,21.474836,26.306675"]
    assert [one.tensor_parallel for one in asked] == [1, 1, 2, 3, 3, 1]
    last = asked[-1]
    assert (last.split, last.cache_tokens, last.kv_format) == ("auto", 2048, KVFormat.FP8)
    assert last.reserve == "0.001049,0.000000,0.000000"
    assert model._reserve_fields(None) == model._reserve_fields([]) == {}
    assert model._reserve_fields(1 << 30) == {"reserve": "1.073742"}


def test_a_batch_shares_the_memory_of_a_smaller_cache(
    parts: tuple[Any, Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from exllamav2.generator import ExLlamaV2BaseGenerator

    model, cache, tokenizer = parts
    generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    prompts = ["one", "two and", "three"]
    each = [generator.generate_simple(prompt, Settings.greedy(), 8) for prompt in prompts]
    assert generator.generate_simple(prompts, Settings.greedy(), 8) == each
    err = capsys.readouterr().err
    assert err.count("generate_simple") == len(err.splitlines()) == 1


def test_the_cut_of_mirostat_is_written_to_the_settings(parts: tuple[Any, Any, Any]) -> None:
    from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler

    model, cache, tokenizer = parts
    settings = Settings(temperature=1.0, top_k=0, top_p=0, mirostat=True, mirostat_tau=3.0)
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    generator.enqueue(ExLlamaV2DynamicJob(tokenizer.encode("x"), 6, gen_settings=settings, seed=1))
    cuts: list[Any] = []
    while generator.num_remaining_jobs():
        generator.iterate()
        cuts.append(settings.mirostat_mu)
    written = [cut[0] for cut in cuts if cut is not None]
    assert len(set(written)) >= 4
    assert all(cut < 60 for cut in written)
    settings.mirostat_mu = None
    logits = model.forward(tokenizer.encode("x"))[:, -1:].float()
    ids = tokenizer.encode("x")
    ExLlamaV2Sampler.sample(logits, settings, ids, 0.5, tokenizer)
    first = settings.mirostat_mu
    ExLlamaV2Sampler.sample(logits, settings, ids, 0.5, tokenizer)
    assert first is not None
    assert settings.mirostat_mu != first


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [5, 7, 3, 9]),
        ({"top_k": 3}, [5, 7, 3, 3]),
        ({"top_k": 0, "top_p": 0.9}, [5, 5, 7, 7]),
        ({"skew": 1.0}, [5, 3, 3, 9]),
        ({"top_k": 0}, [3, 5, 7, 9]),
        ({"top_k": 0, "num_top": 2}, [5, 7, 3, 9]),
        ({"temperature": 0.0}, [5, 5, 5, 5]),
    ],
)
def test_the_number_of_sample_runs_through_sorted_tokens(
    changed: dict[str, Any], expected: list[int], tokenizer: Any
) -> None:
    """Tokens 5, 7, 3, 9 have the probabilities 0.5, 0.3, 0.15, 0.05."""
    from exllamav2.generator import ExLlamaV2Sampler

    logits = torch.full((1, 1, 320), -torch.inf)
    logits[0, 0, [5, 7, 3, 9]] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    settings = Settings(temperature=1.0, top_k=50, top_p=0.0, token_repetition_penalty=1.0)
    num_top = changed.get("num_top", 0)
    for name, value in changed.items():
        setattr(settings, name, value)
    ids = torch.tensor([[65]])
    sampled = [
        ExLlamaV2Sampler.sample(
            logits.clone(), settings, ids, number, tokenizer, return_top_tokens=num_top
        )
        for number in (0.0, 0.6, 0.85, 0.96)
    ]
    assert [int(token) for token, *_ in sampled] == expected
    if num_top:
        assert [one[1].tolist() for one in sampled] == [[[[5, 7]]]] * 4


def test_a_model_loaded_in_inference_mode_is_used_outside_of_it(old: Any) -> None:
    """Servers load in torch.inference_mode, and generate on other threads."""
    from exllamav2.generator import ExLlamaV2DynamicGenerator

    with torch.inference_mode():
        model = old.ExLlamaV2(old.ExLlamaV2Config("/mnt/models/some-model"))
        cache = old.ExLlamaV2Cache(model, max_seq_len=1024, lazy=True)
        model.load_autosplit(cache)
        tokenizer = old.ExLlamaV2Tokenizer(model.config)
        model.forward(torch.zeros(1, 300, dtype=torch.long), cache=cache, preprocess_only=True)
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    texts = [generator.generate("a" * n, 4, gen_settings=Settings.greedy()) for n in (300, 5, 300)]
    assert texts[0] == texts[2]
    generator.defrag_cache()
    assert generator.generate("a" * 300, 4, gen_settings=Settings.greedy()) == texts[0]
