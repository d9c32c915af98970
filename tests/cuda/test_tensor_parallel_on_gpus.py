"""Models divided among two or four GPUs, by matrices or by layers, against one GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.engine.events import FinishEvent
from exl_core.errors import RankError, RequestError
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.model.context import Context
from exl_core.model.cuda_graphs import PASSES_BEFORE_CAPTURE
from exl_core.model.runner import Runner, store_for
from exl_core.model.segment import LogitRows, Segment
from exl_core.model.transformer import Transformer
from exl_core.ops.backends.cuda.peers import LargeSums
from exl_core.parallel.followers import Followers
from exl_core.parallel.leader import LeadingTransformer
from exl_core.parallel.peers import PeerExchange
from exl_core.session.load import LoadedModel, load_model
from support.adapters import random_pairs, stored, write_adapter
from support.driving import ask, run_all, submit
from support.quantized_models import SIZES, quantized_llama
from support.thread_ranks import logits_of, mean_kl
from support.tiny_models import (
    VOCAB_SIZE,
    save,
    tiny_gemma3,
    tiny_llama,
    tiny_mixtral,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

QUANTIZED = ("exl2", "gptq", "awq", "exl3")
MODELS = (*QUANTIZED, "gguf", "float", "gemma3", "mixtral")
PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5] * 30, [11, 12], [200, 3, 4, 250] * 8)
COUNTS = [count for count in (2, 4) if count <= max(2, torch.cuda.device_count())]
END_LIMIT_S = 5.0


def model_files(name: str, folder: Path) -> Path:
    if name in QUANTIZED:
        return quantized_llama(name, folder)
    if name == "gguf":
        gguf = pytest.importorskip("gguf", reason="needs the gguf package")
        from support.gguf_models import write_gguf

        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = tiny_llama(**sizes, **heads, num_hidden_layers=2)
        folder.mkdir(parents=True, exist_ok=True)
        return write_gguf(model, folder / "model.gguf", gguf.GGMLQuantizationType.Q4_0)
    if name == "gemma3":
        return save(tiny_gemma3(**SIZES, query_pre_attn_scalar=32), folder)
    if name == "mixtral":
        return save(tiny_mixtral(head_dim=32), folder)
    return save(tiny_llama(head_dim=32), folder)


class Pair(NamedTuple):
    """One model on one GPU and on several, and its path."""

    path: Path
    whole: LoadedModel
    divided: LoadedModel


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Started once for all tests of a model, as the start of the ranks takes about 10 s."""
    name, count = request.param
    path = model_files(name, tmp_path_factory.mktemp(name) / "model")
    whole = load_model(path, device="cuda", split="none")
    divided = load_model(path, device="cuda", tensor_parallel=count)
    try:
        yield Pair(path, whole, divided)
    finally:
        divided.unload()
        whole.unload()


def of_models(*names: str, counts: Sequence[int] = COUNTS) -> pytest.MarkDecorator:
    """The test runs with each of the models, divided among each number of GPUs."""
    pairs = [
        pytest.param((name, count), id=f"{name}-{count}") for name in names for count in counts
    ]
    return pytest.mark.parametrize("pair", pairs, indirect=True)


def replies(loaded: LoadedModel, max_tokens: int = 40) -> list[tuple[int, ...]]:
    """Greedy replies of a batch; passes run eagerly, are captured, and are replayed."""
    engine = Engine(loaded.model, loaded.tokenizer, EngineOptions(max_batch=3, cache_tokens=4096))
    for number, ids in enumerate(PROMPTS):
        submit(engine, ask(list(ids), max_tokens=max_tokens, request_id=str(number)))
    ends = [event for event in run_all(engine) if isinstance(event, FinishEvent)]
    return [end.token_ids for end in sorted(ends, key=lambda end: end.request_id)]


def logits_of_a_batch(model: Transformer, count: int = 16, steps: int = 4) -> torch.Tensor:
    """Logits of decode steps of many sequences, which several stages divide."""
    runner = Runner(model, store_for(model, KVFormat.FP16, count))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB_SIZE, (count, 20 + steps), generator=generator).tolist()
    for page, one in enumerate(ids):
        runner.run([Segment(tuple(one[:20]), 0, (page,), LogitRows.LAST)])
    found = []
    for at in range(20, 20 + steps):
        segments = [
            Segment((one[at],), at, (page,), LogitRows.LAST) for page, one in enumerate(ids)
        ]
        found.append(runner.run(segments).cpu())
    return torch.cat(found)


@of_models(*MODELS)
def test_several_gpus_write_the_text_of_one(pair: Pair) -> None:
    expected, logits = replies(pair.whole), logits_of(pair.whole.model)
    found = logits_of(pair.divided.model)
    assert mean_kl(logits[0].cpu(), found[0].cpu()) <= 1e-4
    assert mean_kl(logits[1].cpu(), found[1].cpu()) <= 1e-5
    assert replies(pair.divided) == expected
    assert replies(pair.divided) == expected  # the second time with the same graphs' shapes


@of_models("exl2", "exl3", "gemma3", "mixtral", counts=[2])
def test_sums_through_shared_memory_have_the_bits_of_nccl(pair: Pair) -> None:
    """With two ranks both add the second rank's part to the first one's."""
    link = pair.divided.link
    assert link is not None
    assert link.is_shared, str(link)
    other = load_model(pair.path, device="cuda", tensor_parallel=2, exchange="nccl")
    try:
        assert str(other.link) == (
            "the GPUs exchange through NCCL, because --exchange nccl asks for it"
        )
        expected, found = logits_of(other.model), logits_of(pair.divided.model)
        assert all(map(torch.equal, expected, found))
        assert replies(other, 16) == replies(pair.divided, 16)
    finally:
        other.unload()


@of_models("exl2")
def test_captured_passes_have_the_logits_of_eager_ones(pair: Pair) -> None:
    model = pair.divided.model
    runner = Runner(model, store_for(model, KVFormat.FP16, 8))
    torch.manual_seed(2)
    for sequence in range(PASSES_BEFORE_CAPTURE + 1):
        ids = tuple(torch.randint(0, VOCAB_SIZE, (40,)).tolist())
        pages = (2 * sequence,)
        runner.run([Segment(ids[:30], 0, pages, LogitRows.ALL)])
        steps = [
            runner.run([Segment(ids[at : at + 1], at, pages, LogitRows.LAST)]).clone()
            for at in range(30, 40)
        ]
        eager = Context(model, 64).forward(torch.tensor([ids]))[0][30:]
        assert mean_kl(eager.cpu(), torch.cat(steps).cpu()) <= 1e-5
    assert runner.has_graphs


@of_models("exl2", "gptq", "exl3", "gguf")
def test_long_prompts_have_the_logits_of_one_gpu(pair: Pair) -> None:
    """Their weights, but those of EXL3, are dequantized during the sums, in graphs too."""
    compare_long_prompts(pair.whole, pair.divided)


@pytest.mark.parametrize("count", COUNTS)
def test_sums_of_long_prompts_go_through_shared_memory(tmp_path: Path, count: int) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 16}
    path = save(tiny_llama(**sizes, num_key_value_heads=4, head_dim=32), tmp_path / "model")
    whole = load_model(path, device="cuda:0", split="none")
    divided = load_model(path, device="cuda", tensor_parallel=count)
    try:
        assert divided.link is not None
        assert divided.link.is_shared, str(divided.link)
        assert isinstance(divided.model, LeadingTransformer)
        exchange = divided.model._exchange
        assert isinstance(exchange, PeerExchange)
        large = exchange.peers._large
        assert large is not None
        assert large.takes(torch.empty(600, 512))
        compare_long_prompts(whole, divided)
    finally:
        divided.unload()
        whole.unload()


def compare_long_prompts(whole: LoadedModel, divided: LoadedModel) -> None:
    """Logits of one GPU and of several, with passes that run eagerly, are captured and replayed."""
    runners = [
        Runner(loaded.model, store_for(loaded.model, KVFormat.FP16, 4))
        for loaded in (whole, divided)
    ]
    torch.manual_seed(4)
    for _ in range(PASSES_BEFORE_CAPTURE + 2):
        ids = tuple(torch.randint(3, VOCAB_SIZE, (900,)).tolist())
        for past, count in ((0, 600), (600, 300)):
            chunk = Segment(ids[past : past + count], past, (0, 1, 2, 3), LogitRows.LAST)
            expected, found = (runner.run([chunk]).cpu() for runner in runners)
            assert mean_kl(expected, found) <= 1e-4


@of_models("float")
def test_every_rank_applies_its_part_of_an_adapter(pair: Pair, tmp_path: Path) -> None:
    pairs = write_adapter(tmp_path / "adapter", stored(random_pairs(tiny_llama(head_dim=32))))
    ids = torch.arange(3, 43)[None]

    def logits(loaded: LoadedModel) -> torch.Tensor:
        use = AdapterUse(load_adapter(pairs, loaded.model))
        return Context(loaded.model, 64).forward(ids, adapters=[use])[0].cpu()

    assert mean_kl(logits(pair.whole), logits(pair.divided)) <= 1e-5


@of_models("float")
def test_keys_in_four_bits_are_smoothed_by_each_rank(pair: Pair) -> None:
    models = (pair.whole.model, pair.divided.model)
    expected, found = (logits_of(model, KVFormat.Q4)[1].cpu() for model in models)
    assert mean_kl(expected, found) <= 1e-4


@pytest.mark.parametrize(
    ("name", "number"),
    [("gptq", signal.SIGKILL), ("awq", signal.SIGSTOP)],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_ends_a_running_pass(name: str, number: signal.Signals, tmp_path: Path) -> None:
    """The GPU of rank 0 waits for the lost one's sums."""
    loaded = load_model(model_files(name, tmp_path / "model"), device="cuda", tensor_parallel=2)
    assert isinstance(loaded.model, LeadingTransformer)
    assert isinstance(loaded.model.followers, Followers)
    (process,) = loaded.model.followers.process_ids
    replies(loaded, 8)
    os.kill(process, number)
    started = time.monotonic()
    cause = "was killed by SIGKILL" if number == signal.SIGKILL else "has not answered for 3.5 s"
    with pytest.raises(RankError, match=f"rank 1 of 2 {cause}"):
        for _ in range(10_000):
            logits_of(loaded.model)[1].cpu()
    assert time.monotonic() - started < END_LIMIT_S
    loaded.unload()
    assert not Path(f"/proc/{process}/exe").exists()


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_rows_have_the_same_bits_in_short_and_long_passes(tmp_path: Path) -> None:
    """Sums of short passes go through shared memory, those of long ones through NCCL."""
    path = quantized_llama("exl2", tmp_path / "model")
    loaded = load_model(path, device="cuda", tensor_parallel=4, batch_invariant=True)
    try:
        ids = torch.randint(3, 259, (100,), generator=torch.Generator().manual_seed(9))
        whole = Context(loaded.model, 128).forward(ids[None])[0]
        context, chunks = Context(loaded.model, 128), (ids[:40], ids[40:41], ids[41:])
        parts = torch.cat([context.feed([chunk.tolist()])[0] for chunk in chunks])
        assert torch.equal(whole.cpu(), parts.cpu())
    finally:
        loaded.unload()


def test_the_batch_invariant_mode_does_not_round_large_sums(tmp_path: Path) -> None:
    """A long pass has as many values as large sums, a short one has not."""
    sizes = {"hidden_size": 512, "num_attention_heads": 16}
    path = save(tiny_llama(**sizes, num_key_value_heads=4, head_dim=32), tmp_path / "model")
    loaded = load_model(path, device="cuda", tensor_parallel=2, batch_invariant=True)
    try:
        ids = torch.randint(3, VOCAB_SIZE, (600,), generator=torch.Generator().manual_seed(9))
        assert len(ids) * sizes["hidden_size"] >= LargeSums.MIN_VALUES
        whole = Context(loaded.model, 768).forward(ids[None])[0]
        context = Context(loaded.model, 768)
        parts = torch.cat(
            [context.feed([ids[at : at + 50].tolist()])[0] for at in range(0, 600, 50)]
        )
        assert torch.equal(whole.cpu(), parts.cpu())
    finally:
        loaded.unload()


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    path = save(tiny_llama(head_dim=32), tmp_path / "model")
    count = torch.cuda.device_count()
    with pytest.raises(RequestError, match=f"at most {count} ranks"):
        load_model(path, device="cuda", tensor_parallel=count + 1)


@of_models("exl2", "gguf", "gemma3", counts=[2])
def test_layers_on_two_gpus_compute_the_bits_of_one(pair: Pair) -> None:
    """The graphs of both GPUs are captured; each holds the work of its own GPU."""
    last = pair.whole.config.num_layers - 1
    split = load_model(pair.path, split=f"cuda:0=1,cuda:1={last}")
    assert [stage.device for stage in split.plan] == ["cuda:0", "cuda:1"]
    expected = logits_of(pair.whole.model)
    for whole, found in zip(expected, logits_of(split.model), strict=True):
        assert torch.equal(whole.cpu(), found.cpu())
    assert replies(split) == replies(pair.whole)
    many = [logits_of_a_batch(model) for model in (pair.whole.model, split.model)]
    assert mean_kl(*many) <= 1e-4
    split.unload()
