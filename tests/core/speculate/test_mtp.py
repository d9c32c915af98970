"""Drafts by a model's own layer for multi-token prediction, against its formula in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import Event, FinishEvent
from exl_core.engine.request import Request
from exl_core.errors import RequestError, UnsupportedModelError
from exl_core.sampling.params import SamplerParams
from exl_core.session.describe import describe_model
from exl_core.session.load import LoadedModel, LoadOptions, checkpoint_of, load_model, mtp_of
from exl_core.session.open import open_model
from exl_core.session.planning import sizes_of
from exl_core.session.runtime import DraftOptions, RuntimeOptions, open_runtime
from exl_core.speculate.drafter import Draft, Drafter, DraftJob
from exl_core.speculate.mtp import MtpDrafter
from support.paged import PagedRun
from support.tiny_models import save, tiny_glm4_moe, tiny_llama
from support.tiny_mtp import GGUF_FAMILIES, MTP_FAMILIES, MtpCheckpoint, write_mtp_gguf

GREEDY = SamplerParams(temperature=0.0)
VOCAB = 259  # ids of the tiny tokenizer


def load(folder: Path, split: str = "auto") -> LoadedModel:
    return load_model(str(folder), LoadOptions(device="cpu", exact=True, mtp=True, split=split))


@pytest.fixture(scope="module", params=MTP_FAMILIES)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MtpCheckpoint, LoadedModel]:
    checkpoint = MtpCheckpoint(request.param)
    return checkpoint, load(checkpoint.save(tmp_path_factory.mktemp("mtp")))


class Recording(MtpDrafter):
    """Keeps the drafts with the tokens that they follow."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        found = super().propose(jobs)
        made = zip(jobs, found, strict=True)
        self.drafts += [(tuple(job.token_ids), draft.token_ids) for job, draft in made]
        return found

    drafts: list[tuple[tuple[int, ...], tuple[int, ...]]]


def drafter_of(loaded: LoadedModel, max_tokens: int = 3) -> Recording:
    assert loaded.mtp is not None
    drafter = Recording(
        loaded.mtp, vocab_size=VOCAB, max_tokens=max_tokens, min_probability=0.0, prefill_chunk=200
    )
    drafter.drafts = []
    return drafter


def engine_of(
    loaded: LoadedModel, drafter: Drafter | None = None, tokens: int = 4096, max_batch: int = 4
) -> Engine:
    options = EngineOptions(
        tokens,
        max_batch=max_batch,
        prefill_chunk=300,
        kv_format=KVFormat.FP32,
        adapt_drafts=False,
    )
    return Engine(loaded.model, loaded.tokenizer, options, drafter=drafter)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    draws = Random(seed)
    return tuple(draws.randint(3, VOCAB - 1) for _ in range(length))


def greedy(ids: tuple[int, ...], length: int = 12) -> Request:
    return Request(ids, max_tokens=length, sampler=GREEDY)


def run(engine: Engine, *requests: Request) -> list[FinishEvent]:
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    while not engine.is_idle:
        events += engine.step()
    ends = {event.request_id: event for event in events if isinstance(event, FinishEvent)}
    return [ends[request.request_id] for request in requests]


def check_drafts(checkpoint: MtpCheckpoint, drafter: Recording) -> None:
    assert drafter.drafts
    for token_ids, draft in reversed(drafter.drafts):  # the reference knows prefixes then
        expected = checkpoint.draft(token_ids, len(draft), VOCAB)
        assert list(draft) == expected, f"after {len(token_ids)} tokens"


def test_drafts_are_those_of_the_formula(tiny: tuple[MtpCheckpoint, LoadedModel]) -> None:
    """Several sequences in one batch, with prompts of several pages and chunks."""
    checkpoint, loaded = tiny
    drafter = drafter_of(loaded)
    requests = [greedy(prompt(seed, length), 8) for seed, length in ((1, 40), (2, 2), (3, 530))]
    with_drafts = run(engine_of(loaded, drafter), *requests)
    check_drafts(checkpoint, drafter)
    assert max(len(token_ids) for token_ids, _ in drafter.drafts) > 530
    assert max(len(draft) for _, draft in drafter.drafts) == 3
    plain = run(engine_of(loaded), *requests)
    assert [end.token_ids for end in with_drafts] == [end.token_ids for end in plain]


def test_logits_of_the_layer(tiny: tuple[MtpCheckpoint, LoadedModel]) -> None:
    """Those of the first token of a draft."""
    checkpoint, loaded = tiny
    assert loaded.mtp is not None
    drafter, ids = drafter_of(loaded, max_tokens=1), prompt(4, 60)
    engine = engine_of(loaded, drafter)
    found: list[torch.Tensor] = []

    def kept(segments: object) -> torch.Tensor:
        found.append(original(segments))  # type: ignore[arg-type]
        return found[-1]

    rows = drafter._attached
    original = rows._logits
    rows._logits = kept  # type: ignore[method-assign]
    run(engine, greedy(ids, 3))
    token_ids, _ = drafter.drafts[0]
    expected = checkpoint.logits(token_ids)[-1]
    assert (found[0][0].double() - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["glm4-moe", "qwen3.5", "deepseek3"])
def test_a_model_in_stages_has_the_same_drafts(family: str, tmp_path: Path) -> None:
    """The layer is with the last stage. Prompts and batches are cut into microbatches."""
    checkpoint = MtpCheckpoint(family)
    folder = checkpoint.save(tmp_path)
    split = f"cpu=1,cpu={checkpoint.num_layers - 1}"
    loaded = load(folder, split)
    plain_plan = load_model(folder, device="cpu", exact=True, split=split).plan
    assert [stage.layers for stage in loaded.plan] == [stage.layers for stage in plain_plan]
    assert loaded.plan[0].weights_bytes == plain_plan[0].weights_bytes
    assert loaded.mtp is not None
    more = loaded.plan[1].weights_bytes - plain_plan[1].weights_bytes
    assert more > 0.9 * loaded.mtp.weights_bytes > 0  # norms become float32
    drafter = drafter_of(loaded)
    requests = [greedy(prompt(seed, 20 + 7 * seed), 8) for seed in range(16)]
    requests.append(greedy(prompt(3, 530), 8))
    staged = run(engine_of(loaded, drafter, tokens=16384, max_batch=20), *requests)
    check_drafts(checkpoint, drafter)
    plain = run(engine_of(load(folder), tokens=16384, max_batch=20), *requests)
    assert [end.token_ids for end in staged] == [end.token_ids for end in plain]


@pytest.mark.parametrize("family", ["glm4-moe", "qwen3.5", "deepseek3"])
def test_right_drafts_save_passes(family: str, tmp_path: Path) -> None:
    checkpoint = MtpCheckpoint(family)
    checkpoint.be_right()
    loaded = load(checkpoint.save(tmp_path))
    request = greedy(prompt(5, 30), 24)
    (plain,) = run(engine_of(loaded), request)
    for max_tokens, passes in ((1, 12), (2, 8), (5, 4)):
        (end,) = run(engine_of(loaded, drafter_of(loaded, max_tokens)), request)
        assert end.token_ids == plain.token_ids
        assert end.drafting is not None
        assert (end.drafting.rounds, end.drafting.rejected) == (passes + 1, 0)


def test_an_own_head_is_read(tmp_path: Path) -> None:
    checkpoint = MtpCheckpoint("glm4-moe")
    shape = checkpoint.model.lm_head.weight.shape
    draw = torch.Generator().manual_seed(6)
    checkpoint.head = torch.randn(shape, generator=draw, dtype=torch.float64) * 0.1
    loaded = load(checkpoint.save(tmp_path))
    assert loaded.mtp is not None
    assert loaded.mtp.weights.embed is None, "a copy of the model's"
    assert loaded.mtp.weights.head is not None
    drafter = drafter_of(loaded)
    run(engine_of(loaded, drafter), greedy(prompt(7, 30), 6))
    check_drafts(checkpoint, drafter)


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_files(family: str, tmp_path: Path) -> None:
    checkpoint = MtpCheckpoint(family)
    loaded = load(write_mtp_gguf(family, checkpoint, tmp_path / "tiny.gguf"))
    assert loaded.config.num_layers == checkpoint.num_layers
    drafter = drafter_of(loaded)
    run(engine_of(loaded, drafter), greedy(prompt(7, 40), 8))
    check_drafts(checkpoint, drafter)
    description = describe_model(str(loaded.path))
    assert description.mtp_bytes > 0
    assert description.unused_tensors == ()


@pytest.mark.parametrize("family", ["glm4-moe", "qwen3.5"])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_do_not_depend_on_what_else_happens(
    family: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Requests with common prefixes come and go at random in a cache that is too small."""
    checkpoint = MtpCheckpoint(family)
    loaded = load(checkpoint.save(tmp_path_factory.mktemp("mtp")))
    draws, drafter = Random(seed), drafter_of(loaded, max_tokens=2)
    engine = engine_of(loaded, drafter, tokens=1280)
    stems = [prompt(10 * seed + i, 300) for i in range(4)]
    cancelled: set[str] = set()
    # These four need a second page at the same time.
    requests = [greedy(stem[:250], 40) for stem in stems]
    for request in requests:
        engine.submit(request)
    ends: dict[str, FinishEvent] = {}
    while len(requests) < 18 or not engine.is_idle:
        if len(requests) < 18 and draws.random() < 0.8:
            stem = draws.choice(stems)[: draws.choice((20, 240, 250, 300))]
            tail = prompt(draws.randrange(10_000), draws.randint(1, 5))
            requests.append(greedy(stem + tail, draws.randint(10, 60)))
            engine.submit(requests[-1])
        if engine.live_requests and draws.random() < 0.04:
            request_id = draws.choice(sorted(engine.live_requests))
            cancelled.add(request_id)
            engine.cancel(request_id)
        for event in engine.step():
            if isinstance(event, FinishEvent):
                ends[event.request_id] = event
    assert engine.scheduler.num_requeued > 0, "too much room for preemption"
    check_drafts(checkpoint, drafter)
    for request in requests:
        (plain,) = run(engine_of(loaded), request)
        reply = ends[request.request_id].token_ids
        assert plain.token_ids[: len(reply)] == reply
        assert request.request_id in cancelled or reply == plain.token_ids


def test_drafts_keep_the_distribution(tmp_path: Path) -> None:
    """Chi-square test of the first three tokens, of which two may be drafts."""
    checkpoint = MtpCheckpoint("glm4-moe")
    checkpoint.be_right()  # so that a share of the drafts is accepted
    checkpoint.own["norm"] *= 0.7
    loaded = load(checkpoint.save(tmp_path))
    ids, top_k, count = prompt(8, 12), 3, 1500
    drafter = drafter_of(loaded, max_tokens=2)
    requests = [
        Request(ids, max_tokens=3, sampler=SamplerParams(top_k=top_k, seed=seed))
        for seed in range(count)
    ]
    ends = run(engine_of(loaded, drafter, max_batch=16, tokens=8192), *requests)
    accepted = sum(end.drafting.accepted for end in ends if end.drafting is not None)
    drafted = sum(end.drafting.drafted for end in ends if end.drafting is not None)
    assert 0.2 * drafted < accepted < drafted
    seen = Counter(end.token_ids for end in ends)
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown: dict[tuple[int, ...], float] = {}
        for before, probability in joint.items():
            whole = PagedRun(loaded.model, 1, 20).feed({0: [*ids, *before]})[0][-1, :VOCAB]
            best = whole.double().topk(top_k)
            shares = (best.values.softmax(0) * probability).tolist()
            for token_id, share in zip(best.indices.tolist(), shares, strict=True):
                grown[*before, token_id] = share
        joint = grown
    assert set(seen) <= set(joint)
    pairs = [(seen[text], share * count) for text, share in joint.items() if share * count >= 8]
    rest = count - sum(number for number, _ in pairs), count - sum(mean for _, mean in pairs)
    pairs += [rest] if rest[1] > 1 else []
    value = sum((number - mean) ** 2 / mean for number, mean in pairs)
    freedom = len(pairs) - 1
    assert (value - freedom) / (2 * freedom) ** 0.5 < 4.0


def test_an_open_runtime_drafts(tmp_path: Path) -> None:
    checkpoint = MtpCheckpoint("qwen3.5")
    checkpoint.be_right()
    checkpoint.model.lm_head.weight.data *= 30.0  # so that the layer is sure of its tokens
    folder = checkpoint.save(tmp_path)
    load_options = LoadOptions(device="cpu", exact=True)
    ids = prompt(9, 30)
    replies = []
    for draft in (None, DraftOptions(mtp=True), DraftOptions(max_tokens=2, mtp=True)):
        runtime = open_runtime(folder, RuntimeOptions(load_options, 512, draft=draft))
        request = runtime.request(ids, max_tokens=20, sampler=GREEDY, stops_at_eos=False)
        replies.append(run(runtime.engine, request)[0])
        runtime.loaded.unload()
    assert len({end.token_ids for end in replies}) == 1
    for end in replies[1:]:
        assert end.drafting is not None
        assert end.drafting.rejected == 0 < end.drafting.accepted


def test_a_plan_counts_the_cache_of_the_layer(tiny: tuple[MtpCheckpoint, LoadedModel]) -> None:
    """And the states that the layer reads, on the device of the last layers."""
    _, loaded = tiny
    drafter = drafter_of(loaded)
    store, config = engine_of(loaded, drafter).store, loaded.config
    options = LoadOptions(
        device="cpu", exact=True, mtp=True, cache_tokens=4096, kv_format=KVFormat.FP32
    )
    files = open_model(loaded.path)
    checkpoint = checkpoint_of(files, config, options)
    mtp = mtp_of(files, config, options, checkpoint)
    with_layer, without = (sizes_of(options, config, checkpoint, one) for one in (mtp, None))
    assert sum(with_layer.cache) == store.size_bytes + drafter._attached.store.size_bytes
    assert with_layer.cache[:-1] == without.cache[:-1]
    assert with_layer.head == without.head + mtp.packed_bytes


def test_refusals_by_name(tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path / "llama")
    with pytest.raises(UnsupportedModelError, match="the model has no layer for multi-token"):
        load_model(str(folder), LoadOptions(device="cpu", mtp=True))
    checkpoint = MtpCheckpoint("glm4-moe")
    whole = checkpoint.save(tmp_path / "glm")
    with pytest.raises(RequestError, match="one process"):
        load_model(str(whole), LoadOptions(device="cpu", mtp=True, tensor_parallel=2))
    bare = save(tiny_glm4_moe(), tmp_path / "bare")
    with pytest.raises(UnsupportedModelError, match="the files have no layer for multi-token"):
        load_model(str(bare), LoadOptions(device="cpu", mtp=True))
    with pytest.raises(RequestError, match="two kinds of drafts"):
        DraftOptions("model", mtp=True)
    loaded = load(whole)
    assert loaded.mtp is not None
    drafter = MtpDrafter(loaded.mtp, vocab_size=VOCAB)
    with pytest.raises(RequestError, match="belongs to no engine"):
        drafter.propose([])
    store = engine_of(loaded).store
    with pytest.raises(RequestError, match="does not keep the states"):
        Engine(loaded.model, loaded.tokenizer, drafter=drafter, store=store)
    loaded.unload()
    with pytest.raises(RequestError, match="unloaded"):
        _ = loaded.mtp.weights
