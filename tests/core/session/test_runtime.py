"""Opening a runtime: headers are read once, requests fit the context, devices have one spelling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from exl_core.cache.format import KVFormat, kv_bytes_per_token
from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.errors import ContextLengthError, OutOfMemoryError, RequestError
from exl_core.generate.driver import generate, running
from exl_core.model.transformer import Transformer
from exl_core.ops.backends.cuda.device import default_device
from exl_core.parallel.leader import LeadingTransformer
from exl_core.sampling.params import SamplerParams
from exl_core.session import open as opening
from exl_core.session import runtime as planning
from exl_core.session.load import LoadedModel, LoadOptions, load_model, resolve_device
from exl_core.session.open import open_model
from exl_core.session.placement import Need, check_together
from exl_core.session.planning import need_of
from exl_core.session.runtime import (
    DraftOptions,
    Runtime,
    RuntimeOptions,
    context_warning,
    open_runtime,
)
from exl_core.speculate.stats import DraftStats
from exl_core.tokenizer.base import Tokenizer
from support import tiny_models
from support.adapters import PREFIX, write_adapter
from support.driving import ask, run_one
from support.rank_failures import starting_with
from support.tiny_hybrids import tiny_lfm2

GREEDY = SamplerParams(temperature=0)
ON_CPU = LoadOptions(device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.tiny_llama(), tmp_path_factory.mktemp("runtime") / "llama")


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Runtime:
    return open_runtime(folder, RuntimeOptions(load=ON_CPU, ctx_size=64))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ctx_size", value) for value in (-1, 0, 1.5, "64")),
        *(("cache_tokens", value) for value in (-1, 0, 1.5)),
        *(("adapters", value) for value in ("folder", ("folder",), (("folder", 1.0, 2),))),
        ("max_batch", 0),
        ("kv_format", "q8"),
        ("kv_format", None),
        ("load", None),
        ("draft", "model"),
        ("has_guidance", "no"),
        ("folder of an adapter", ((5, 1.0),)),
        ("scale of an adapter", (("folder", "1"),)),
    ],
)
def test_options_of_another_type_or_below_their_limit_are_named(name: str, value: object) -> None:
    field = "adapters" if name.endswith("adapter") else name
    with pytest.raises(RequestError, match=name):
        RuntimeOptions(**cast(Any, {field: value}))


def test_drafts_and_runtimes_take_options_of_their_own_only(folder: Path) -> None:
    for wrong in ({"model": 5}, {"max_tokens": 0}, {"mtp": "yes"}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            DraftOptions(**cast(Any, wrong))
    with pytest.raises(RequestError, match=r"options .*expected RuntimeOptions or None"):
        open_runtime(folder, cast(Any, ON_CPU))


def test_the_folder_of_an_adapter_may_be_a_text(folder: Path, tmp_path: Path) -> None:
    head = f"{PREFIX}model.layers.0.self_attn.q_proj"
    hidden, outputs = load_model(folder, ON_CPU).config.hidden_size, 120
    pairs = {
        f"{head}.lora_A.weight": torch.ones(4, hidden),
        f"{head}.lora_B.weight": torch.ones(outputs, 4),
    }
    path = str(write_adapter(tmp_path / "adapter", pairs))
    options = RuntimeOptions(load=ON_CPU, ctx_size=64, adapters=cast(Any, [(path, 0.5)]))
    [use] = open_runtime(folder, options).adapters
    assert use.scale == 0.5


def test_headers_and_tokenizer_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    for name in ("open_checkpoint", "load_tokenizer"):
        real = getattr(opening, name)

        def counted(path: Path, *rest: Any, name: str = name, real: Any = real) -> Any:
            read.append(name)
            return real(path, *rest)

        monkeypatch.setattr(opening, name, counted)
    options = RuntimeOptions(load=ON_CPU, ctx_size=64, draft=DraftOptions(str(folder)))
    open_runtime(folder, options)
    assert sorted(read) == ["load_tokenizer"] * 2 + ["open_checkpoint"] * 2, "once per model"


def test_load_model_takes_opened_files_a_path_or_a_name(folder: Path) -> None:
    loads = [load_model(one, ON_CPU) for one in (open_model(folder), folder, str(folder))]
    assert {one.path for one in loads} == {folder}
    assert {one.config for one in loads} == {loads[0].config}


def test_the_end_of_a_prompt_keeps_its_bos(runtime: Runtime) -> None:
    class AddingBos:
        bos_id = 1

        def encode(self, text: str, **_: object) -> list[int]:
            return [self.bos_id, *text.encode()]

    loaded = replace(runtime.loaded, tokenizer=cast(Tokenizer, AddingBos()))
    adding = replace(runtime, loaded=loaded)
    ids, dropped = adding.encode_end("a" * 50 + "b" * 50, parse_special=False, reply=10)
    assert (ids, dropped) == ([1, *b"aaa", *b"b" * 50], 47)
    assert adding.encode_end("ab", parse_special=False, reply=10) == ([1, *b"ab"], 0)
    assert adding.encode_end("ab", parse_special=False, reply=63) == ([*b"b"], 2)


def test_a_draft_model_is_planned_together_with_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RuntimeOptions(load=ON_CPU, ctx_size=256, draft=DraftOptions(str(folder)))
    needs: list[Need] = []

    def keeping(found: Sequence[Need], *rest: Any) -> None:
        needs.extend(found)
        check_together(found, *rest)

    monkeypatch.setattr(planning, "check_together", keeping)
    both = open_runtime(folder, options)
    model, draft = needs
    assert model == draft, "the same model twice"
    assert model.weights_bytes == pytest.approx(both.loaded.weights_bytes, rel=0.1)
    assert (
        model.cache_bytes == kv_bytes_per_token(both.loaded.config.kv_shapes, KVFormat.FP16) * 256
    )
    together = sum(need.weights_bytes + need.cache_bytes for need in needs)

    def never(*_: object) -> Any:
        pytest.fail("weights were read")

    monkeypatch.setattr(planning, "free_memory_bytes", lambda _: together - 1)
    with pytest.raises(OutOfMemoryError, match="and its draft model do not fit"):
        open_runtime(folder, options, never)
    monkeypatch.setattr(planning, "free_memory_bytes", lambda _: together)
    open_runtime(folder, options)


@pytest.mark.parametrize("draft", [None, DraftOptions(), DraftOptions("llama")])
def test_plans_know_the_states_of_the_engine(
    folder: Path, draft: DraftOptions | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all sequences of a batch of a hybrid, twice with drafts."""
    hybrid = tiny_models.save(tiny_lfm2(), tmp_path / "lfm2")
    if draft is not None and draft.model is not None:
        draft = DraftOptions(str(folder))
    loads: list[LoadOptions] = []
    needs: list[Need] = []

    def load(model: Any, options: LoadOptions) -> LoadedModel:
        loads.append(options)
        return load_model(model, options)

    monkeypatch.setattr(planning, "check_together", lambda found, *_: needs.extend(found))
    options = RuntimeOptions(
        load=ON_CPU, ctx_size=300, cache_tokens=900, max_batch=3, draft=draft, has_guidance=True
    )
    runtime = open_runtime(hybrid, options, load)
    store, config = runtime.engine.store, runtime.loaded.config
    assert store.states is not None
    need = need_of(loads[0], config)
    assert need.slots(config) == store.states.num_slots
    assert need.num_pages == store.num_pages
    for one in needs[:1]:  # of the model, beside that of its draft model
        assert one.cache_bytes == store.size_bytes + store.states.size_bytes


def with_large_logits(noise: float) -> Any:
    """A model whose next token is almost certain. `noise` is relative to the weights' size."""
    model, generator = tiny_models.tiny_llama(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape, generator=generator) * weights.std() * noise)
        model.lm_head.weight.mul_(10)
    return model


@pytest.mark.thorough
def test_a_draft_model_is_on_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target accepts some of the drafts. Its text is that of one process without drafts."""
    monkeypatch.setattr(planning, "EngineOptions", partial(EngineOptions, adapt_drafts=False))
    target = tiny_models.save(with_large_logits(0), tmp_path / "target")
    folder = tiny_models.save(with_large_logits(0.1), tmp_path / "draft")
    made = starting_with(monkeypatch)
    models: list[LoadedModel] = []

    def load(files: Any, options: LoadOptions) -> LoadedModel:
        models.append(load_model(files, options))
        return models[-1]

    def reply(num_ranks: int, draft: Path | None = None) -> tuple[tuple[int, ...], DraftStats]:
        how = LoadOptions(device="cpu", threads=2, exact=True, tensor_parallel=num_ranks)
        choice = None if draft is None else DraftOptions(str(draft), max_tokens=3)
        runtime = open_runtime(target, RuntimeOptions(how, ctx_size=512, draft=choice), load)
        try:
            _, end = run_one(runtime.engine, ask("Once upon a time", max_tokens=96))
        finally:
            runtime.loaded.unload()
        return end.token_ids, end.drafting or DraftStats()

    expected, _ = reply(1)
    assert len(expected) == 96
    assert reply(2)[0] == expected
    for num_ranks in (1, 2):
        found, stats = reply(num_ranks, folder)
        assert found == expected
        assert stats.accepted > 10
        assert stats.rejected > 10
    whole, divided = Transformer, LeadingTransformer
    parts = [type(one.model) for one in models]
    assert parts == [whole, divided, whole, whole, divided, whole]
    assert len(made) == 2, "no rank is started for the draft model"


def test_a_longer_context_warns_and_reaches_the_model(folder: Path) -> None:
    own = open_model(folder).config.max_seq_len
    longer = open_runtime(folder, RuntimeOptions(load=ON_CPU, ctx_size=2 * own))
    assert longer.loaded.config.max_seq_len == longer.ctx_size == 2 * own
    assert f"{2 * own} tokens is longer than the model's {own}" in "".join(longer.warnings)
    for load in (
        replace(ON_CPU, rope_alpha=2.6),
        replace(ON_CPU, yarn_factor=2.0),
        replace(ON_CPU, rope_factor=2.0),
    ):
        assert open_runtime(folder, RuntimeOptions(load=load, ctx_size=2 * own)).warnings == ()


@pytest.mark.parametrize(
    ("option", "stretched"),
    [
        ("--rope-yarn", lambda factor: LoadOptions(yarn_factor=factor)),
        ("--rope-scale", lambda factor: LoadOptions(rope_factor=factor)),
    ],
)
def test_the_warning_has_the_stretched_context(
    folder: Path, option: str, stretched: Callable[[float], LoadOptions]
) -> None:
    config = open_model(folder).config
    own = config.max_seq_len
    for ctx, factor, reach in ((own, 0.5, own // 2), (4 * own, 2.0, 2 * own)):
        options = stretched(factor)
        warning = context_warning(ctx, config, options)
        assert warning is not None
        assert warning.startswith(
            f"a context of {ctx} tokens is longer than {reach}, the model's {own} times the "
            f"factor {factor:g} of {option};"
        )
        assert context_warning(reach, config, options) is None


@pytest.mark.parametrize(
    ("name", "is_exact", "expected"),
    [
        ("auto", False, default_device()),
        ("auto", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda:1", False, "cuda:1"),
        ("reference", False, "reference"),
        ("reference", True, "reference"),
    ],
)
def test_devices_have_the_words_of_the_command_line(
    name: str, is_exact: bool, expected: str
) -> None:
    assert resolve_device(name, is_exact=is_exact) == expected


@pytest.mark.parametrize(("name", "is_exact"), [("gpu", False), ("", False), ("cuda", True)])
def test_other_devices_are_refused(name: str, is_exact: bool) -> None:
    with pytest.raises(RequestError):
        resolve_device(name, is_exact=is_exact)


def test_the_default_device_is_that_of_the_machine(folder: Path) -> None:
    assert LoadOptions().device == "auto"
    assert load_model(folder).model.ops.device.type == default_device()


def test_a_request_never_outgrows_the_context(runtime: Runtime) -> None:
    prompt = list(range(5, 45))
    assert runtime.request(prompt).max_tokens == 24
    assert runtime.request(prompt, max_tokens=7).max_tokens == 7
    assert runtime.request(prompt, max_tokens=100).max_tokens == 24
    with pytest.raises(ContextLengthError) as caught:
        runtime.request(range(64))
    assert (caught.value.num_tokens, caught.value.max_tokens) == (64, 63)


def test_a_request_stops_at_the_models_tokens_and_at_its_own(runtime: Runtime) -> None:
    ends = frozenset(runtime.loaded.tokenizer.eos_ids)
    assert ends
    request = runtime.request([5, 6], stop=[9, "end"])
    assert request.stop_ids == ends | {9}
    assert request.stop_strings == ("end",)
    assert runtime.request([5, 6], stop=9, stops_at_eos=False).stop_ids == {9}
    with pytest.raises(RequestError, match="no such setting"):
        runtime.request([5, 6], temperature=1.0)  # type: ignore[call-arg]


def test_a_run_drives_several_requests_to_the_replies_of_one(runtime: Runtime) -> None:
    requests = [runtime.request([5 + i, 6, 7], max_tokens=6, sampler=GREEDY) for i in range(3)]
    with running(runtime.engine, requests) as run:
        ends = {e.request_id: e for e in run.events() if isinstance(e, FinishEvent)}
    assert run.has_ended
    for i, request in enumerate(requests):
        alone = generate(
            runtime.engine, runtime.request([5 + i, 6, 7], max_tokens=6, sampler=GREEDY)
        )
        assert ends[request.request_id].token_ids == alone.token_ids


def test_an_exception_in_a_run_leaves_the_engine_unused(runtime: Runtime) -> None:
    with (
        pytest.raises(KeyError),
        running(runtime.engine, [runtime.request([5, 6], max_tokens=30)]) as run,
    ):
        run.step()
        raise KeyError
    assert runtime.engine.is_idle
    assert not runtime.engine.pool.held_pages


def test_a_stopped_run_ends_with_the_text_so_far(runtime: Runtime) -> None:
    request = runtime.request([5, 6, 7], max_tokens=30, sampler=GREEDY, allow_drafts=False)
    seen: list[int] = []

    def is_stopped() -> bool:
        seen.append(1)
        return len(seen) > 4

    with running(runtime.engine, [request]) as run:
        (end,) = [e for e in run.events(is_stopped) if isinstance(e, FinishEvent)]
    assert end.reason.value == "cancelled"
    assert 0 < len(end.token_ids) < 30
