"""Ranks as processes: the text of one process, and an end within 5 s of any failure."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from exl_core.cache.format import KVFormat
from exl_core.cache.memory import return_freed_memory
from exl_core.cache.page_pool import PageCopy
from exl_core.engine.engine import Engine
from exl_core.engine.events import FailEvent
from exl_core.errors import AdapterError, MissingTensorError, RankError, RequestError
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.model.context import Context
from exl_core.model.runner import store_for
from exl_core.model.transformer import Transformer
from exl_core.parallel import exchange
from exl_core.parallel.followers import END_S, Followers
from exl_core.parallel.leader import LeadingTransformer
from exl_core.parallel.wire import Message
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from exl_core.session.weights import Loading
from support.adapters import random_pairs, stored, write_adapter
from support.driving import ask, run_all, submit
from support.random_jobs import run_jobs
from support.rank_failures import is_alive, listening, nothing_left, processes_of, starting_with
from support.rank_processes import GROWTH_LIMIT_KB, PROMPTS, loaded_ranks, replies, resident_kb
from support.real_models import gemma3_gguf, smollm2_gguf
from support.thread_ranks import logits_of, mean_kl
from support.tiny_latent import tiny_deepseek3
from support.tiny_models import save, tiny_llama

pytestmark = pytest.mark.thorough

END_LIMIT_S = 5.0


@pytest.fixture(autouse=True)
def no_remains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with nothing_left(monkeypatch, tmp_path):
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save(tiny_llama(), tmp_path / "tiny")


@pytest.fixture
def raises_interrupts() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which is absent in a process that a shell runs in the
    background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("count", [2, 3])
def test_greedy_text_of_a_real_model(count: int) -> None:
    """9 query heads and 3 key-value heads: with two ranks the shares differ."""
    whole = load_model(smollm2_gguf(), device="cpu")
    with loaded_ranks(smollm2_gguf(), count) as divided:
        assert replies(divided, 48) == replies(whole, 48)
        assert mean_kl(logits_of(whole.model)[1], logits_of(divided.model)[1]) < 1e-5


def test_greedy_text_with_k_blocks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gemma 3 has one key-value head, of which both ranks have a copy."""
    path = gemma3_gguf(tmp_path_factory.getbasetemp())
    whole = load_model(path, device="cpu", max_seq_len=512)
    with loaded_ranks(path, max_seq_len=512) as divided:
        assert replies(divided, 24) == replies(whole, 24)


def test_greedy_text_with_latent_attention(tmp_path: Path) -> None:
    path = save(tiny_deepseek3(), tmp_path / "model")
    whole = load_model(path, device="cpu", exact=True)
    with loaded_ranks(path, exact=True) as divided:
        assert replies(divided, 24) == replies(whole, 24)
        assert mean_kl(logits_of(whole.model)[1], logits_of(divided.model)[1]) < 1e-7


@pytest.mark.parametrize("count", [2, 4])
def test_each_rank_smooths_its_own_keys(count: int, tmp_path: Path) -> None:
    """There are two key heads: two of four ranks have copies of one, and divide its queries."""
    path = save(tiny_llama(head_dim=32), tmp_path / "model")
    whole = load_model(path, device="cpu", exact=True)
    with loaded_ranks(path, count, exact=True) as divided:
        expected, found = (logits_of(one.model, KVFormat.Q4) for one in (whole, divided))
        assert mean_kl(expected[1], found[1]) < 1e-5


def test_random_jobs_have_the_replies_of_one_process(tiny: Path) -> None:
    """Shared prefixes, drafts, preemption and cancellations, on a cache of few pages. The memory of
    every rank stays the same."""
    memory: list[list[int]] = []
    with loaded_ranks(tiny, exact=True) as divided:
        whole = load_model(tiny, device="cpu", exact=True)
        processes = (os.getpid(), *processes_of(divided))

        def measure(_: int) -> None:
            gc.collect()
            return_freed_memory({divided.model.ops.device})
            memory.append([*map(resident_kb, processes)])

        assert run_jobs(divided, 1000, after_tenth=measure) == run_jobs(whole, 1000)
    for later in memory[2:]:
        growth = [now - then for then, now in zip(memory[1], later, strict=True)]
        assert max(growth) < GROWTH_LIMIT_KB, memory


def test_contexts_copy_rows_and_embed_on_all_ranks(tiny: Path) -> None:
    whole = load_model(tiny, device="cpu", exact=True)
    with loaded_ranks(tiny, exact=True) as divided:
        found = []
        for loaded in (whole, divided):
            context = Context(loaded.model, 600, batch_size=2)
            context.feed([list(range(3, 103)), []])
            context.copy_row(0, [1])
            found.append(context.feed([[7], [8]]))
            vectors = loaded.model.embed(context.feed([[9], [9]])[0].argmax(-1))
            assert vectors.shape == (1, loaded.config.hidden_size)
        for one, other in zip(*found, strict=True):
            assert mean_kl(one, other) < 1e-7


def failing(loaded: LoadedModel, hurt: Callable[[int], None]) -> tuple[RankError, float]:
    """Generates while `hurt` is called with a rank's process, and returns the error and the
    seconds after which it came and that process was gone."""
    (process, *_) = processes_of(loaded)
    engine = Engine(loaded.model, loaded.tokenizer)
    submit(engine, ask([5, 6, 7], max_tokens=None, stop_ids=frozenset()))
    engine.step()
    started: list[float] = []

    def act() -> None:
        started.append(time.monotonic())
        hurt(process)

    threading.Timer(0.3, act).start()
    events: list[object] = []
    with pytest.raises(RankError) as caught:
        while True:
            events += engine.step()
    seconds = time.monotonic() - started[0]
    assert not is_alive(process)
    (last,) = (event for event in engine.step() if isinstance(event, FailEvent))
    assert isinstance(last.error, RankError)
    submit(engine, ask([5], max_tokens=1))
    with pytest.raises(RankError):  # the group stays ended
        engine.step()
    return caught.value, seconds


@pytest.mark.parametrize("count", [2, 3])
def test_a_killed_rank_is_named(tiny: Path, count: int) -> None:
    with loaded_ranks(tiny, count) as divided:
        error, seconds = failing(divided, lambda process: os.kill(process, signal.SIGKILL))
    assert str(error) == f"rank 1 of {count} was killed by SIGKILL"
    assert seconds < END_LIMIT_S


def test_a_rank_that_hangs_is_named(tiny: Path) -> None:
    with loaded_ranks(tiny) as divided:
        error, seconds = failing(divided, lambda process: os.kill(process, signal.SIGSTOP))
    assert str(error) == "rank 1 of 2 has not answered for 3.5 s"
    assert seconds < END_LIMIT_S


def damaged(source: Path, folder: Path) -> Path:
    """The model, with a value that is not a number."""
    save(tiny_llama(), folder)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 100] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("fault", ["damaged", "missing", "other"])
def test_bad_files_on_one_rank(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    bad = tmp_path / "bad"
    if fault == "damaged":
        damaged(tiny, bad)
    elif fault == "other":
        save(tiny_llama(intermediate_size=96), bad)
    made = starting_with(monkeypatch, path=str(bad))
    with pytest.raises(RankError, match="rank 1 of 2") as caught:
        load_model(tiny, device="cpu", tensor_parallel=2)
    expected = {
        "damaged": "failed: .*NaN or infinite",
        "missing": "failed: ",
        "other": "has read other model files than rank 0",
    }
    caught.match(expected[fault])
    assert caught.value.exit_code == (1 if fault == "other" else 3)
    assert "\n" not in str(caught.value)
    assert not any(is_alive(process) for group in made for process in group.process_ids)


def test_the_others_start_before_rank_0_looks_for_its_tensors(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that rank 0 cannot complete ends them at once, as they have nothing to complete."""
    made = starting_with(monkeypatch)
    tensors = load_file(tiny / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tiny / "model.safetensors")
    started = time.monotonic()
    with pytest.raises(MissingTensorError, match=r"model\.norm"):
        load_model(tiny, device="cpu", tensor_parallel=3)
    assert time.monotonic() - started < END_S
    assert len(made[0].process_ids) == 2
    assert not any(map(is_alive, made[0].process_ids))


def test_a_rank_that_is_killed_while_all_meet_is_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for the others in a store that does not know about their ends. A thread of its
    own does, which also ends after the timeout of an exchange."""
    monkeypatch.setattr(exchange, "EXCHANGE_TIMEOUT_S", 4)
    started: list[float] = []
    meet = Followers._joined

    def joined(group: Followers, *rest: Any) -> Any:
        os.kill(group.process_ids[0], signal.SIGKILL)
        started.append(time.monotonic())
        return meet(group, *rest)

    monkeypatch.setattr(Followers, "_joined", joined)
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        load_model(tiny, device="cpu", tensor_parallel=2)
    assert time.monotonic() - started[0] < END_LIMIT_S
    for thread in threading.enumerate():
        if thread.name == "exl-connect":
            thread.join()


def test_followers_end_with_rank_0(tiny: Path) -> None:
    script = (
        "import sys\n"
        "from exl_core.session.load import load_model\n"
        "loaded = load_model(sys.argv[1], device='cpu', tensor_parallel=3)\n"
        "print(*loaded.model.followers.process_ids, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tiny)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as leader:
        assert leader.stdout is not None
        processes = [int(number) for number in leader.stdout.readline().split()]
        assert len(processes) == 2
        assert all(map(is_alive, processes))
        leader.kill()
    until = time.monotonic() + END_LIMIT_S
    while any(map(is_alive, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, processes))


def test_a_rank_that_hangs_while_it_loads_is_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process does no work, so it does not count as a slow load."""
    made = starting_with(monkeypatch)
    started: list[float] = []

    def stop() -> None:
        started.append(time.monotonic())
        os.kill(made[0].process_ids[0], signal.SIGSTOP)

    load = Loading.whole

    def whole(loading: Loading, *rest: Any) -> Any:
        stop()
        return load(loading, *rest)

    monkeypatch.setattr(Loading, "whole", whole)
    with pytest.raises(RankError, match=r"^rank 1 of 2 has not answered for 3\.5 s$"):
        load_model(tiny, device="cpu", tensor_parallel=2)
    assert time.monotonic() - started[0] < END_LIMIT_S
    assert not is_alive(made[0].process_ids[0])


def test_nothing_is_left_of_a_leader_that_is_killed_while_it_loads(tiny: Path) -> None:
    script = (
        "import sys, time\n"
        "from exl_core.session import ranks\n"
        "def stop(*_): print(flush=True); time.sleep(60)\n"
        "ranks.Loading.whole = stop\n"  # of rank 0 alone
        "from exl_core.session.load import load_model\n"
        "load_model(sys.argv[1], device='cpu', tensor_parallel=2)\n"
    )
    folder = tempfile.gettempdir()
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tiny)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": folder},
    ) as leader:
        assert leader.stdout is not None
        leader.stdout.readline()
        children = Path(f"/proc/{leader.pid}/task/{leader.pid}/children").read_text().split()
        assert list(Path(folder).glob("exl-ranks-*"))
        time.sleep(1)  # rank 1 has started to read its settings
        leader.kill()
    until = time.monotonic() + END_LIMIT_S
    while any(is_alive(int(one)) for one in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_alive(int(one)) for one in children)
    assert not list(Path(folder).glob("exl-ranks-*"))


LIBRARY = """
import os, signal, sys
from exl_core.errors import RankError
from exl_core.model.context import Context
from exl_core.session.load import load_model
loaded = load_model(sys.argv[1], device="cpu", threads=2, tensor_parallel=2)
context = Context(loaded.model, 64)
context.feed([[5, 6, 7]])
print(*loaded.model.followers.process_ids, flush=True)
exec(sys.argv[2])
try:
    context.feed([[8]])
    print("goes on", flush=True)
except RankError as error:
    print(error, flush=True)
"""
COMPUTES = """
import time
started = time.monotonic()
sum(range(5 * 10**6))
sum(range(int(5 * 10**6 * 6 / (time.monotonic() - started))))
"""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 0 of 2 has not answered for 3.5 s"),
        # The interpreter's lock is held by a call that sleeps, and by one that computes.
        ("import ctypes; ctypes.PyDLL(None).sleep(6)", "rank 0 of 2 has not answered for 3.5 s"),
        (COMPUTES, "goes on"),
    ],
)
def test_a_program_whose_process_stands_still_is_not_killed(
    tiny: Path, what: str, expected: str
) -> None:
    """The other ranks end and free their memory. The program's next pass raises an error. A program
    that computes without answering is slow, and no rank ends."""
    with subprocess.Popen(
        [sys.executable, "-c", LIBRARY, str(tiny), what],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        process = int(leader.stdout.readline())
        started = time.monotonic()
        while is_alive(process) and leader.poll() is None and time.monotonic() < started + 20:
            time.sleep(0.05)
        seconds = time.monotonic() - started
        leader.send_signal(signal.SIGCONT)
        said, errors = leader.communicate(timeout=30)
    assert said.strip() == expected, errors
    assert leader.returncode == 0
    assert seconds < END_LIMIT_S or expected == "goes on"
    assert not errors


def test_nothing_listens_beyond_the_loopback_interface(tiny: Path) -> None:
    with loaded_ranks(tiny) as divided:
        processes = (os.getpid(), *processes_of(divided))
        own = [address for process in processes for address, _ in listening(process)]
        assert all(address.startswith("0100007F:") for address in own), own


@pytest.mark.usefixtures("raises_interrupts")
def test_interrupts_wait_for_the_end_of_a_pass(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a pass must not leave the other ranks behind in the middle of it."""
    with loaded_ranks(tiny, exact=True) as divided:
        assert isinstance(divided.model, LeadingTransformer)
        inner = divided.model._exchange
        complete, sums, interrupted = inner.sum, 0, 0

        def interrupted_sum(part: Tensor) -> Tensor:
            nonlocal sums
            sums += 1
            if sums == interrupted:
                signal.raise_signal(signal.SIGINT)
            return complete(part)

        monkeypatch.setattr(inner, "sum", interrupted_sum)
        engine = Engine(divided.model, divided.tokenizer)
        submit(engine, ask([5, 6, 7], max_tokens=None, stop_ids=frozenset()))
        engine.step()
        of_pass = sums
        assert of_pass == 1 + 2 * divided.config.num_layers
        for number in range(1, of_pass + 1):
            interrupted = number
            if engine.is_idle:
                submit(engine, ask([5, 6, 7], max_tokens=None, stop_ids=frozenset()))
            sums = 0
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            assert sums == of_pass  # the pass was complete
            run_all(engine)
        sums, interrupted = 0, 0
        whole = load_model(tiny, device="cpu", exact=True)
        assert replies(divided, 8) == replies(whole, 8)


@pytest.mark.usefixtures("raises_interrupts")
def test_interrupts_wait_until_all_ranks_have_a_message(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that missed a message would be refused the next one."""
    with loaded_ranks(tiny, 3, exact=True) as divided:
        assert isinstance(divided.model, LeadingTransformer)
        followers = divided.model.followers
        complete = Message.packed

        def interrupted_packed(message: Message, sequence: int) -> bytes:
            signal.raise_signal(signal.SIGINT)
            return complete(message, sequence)

        store = store_for(divided.model, KVFormat.FP16, 4)
        with monkeypatch.context() as patch:
            patch.setattr(Message, "packed", interrupted_packed)
            with pytest.raises(KeyboardInterrupt):
                divided.model.number_of(store)
            with pytest.raises(KeyboardInterrupt):
                store.copy_pages([PageCopy(0, 1, 8)])
        assert divided.model.number_of(store) == 0
        assert followers.failure is None
        assert len(replies(divided, 8)) == len(PROMPTS)


def logits_with(model: Transformer, *uses: AdapterUse) -> Tensor:
    ids = torch.arange(3, 43)[None]
    return Context(model, 64, kv_format=KVFormat.FP32).forward(ids, adapters=uses)[0]


def test_every_rank_reads_its_part_of_an_adapter(tiny: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", stored(random_pairs(tiny_llama())))
    whole = load_model(tiny, device="cpu", exact=True).model
    with loaded_ranks(tiny, 3, exact=True) as divided:
        before = replies(divided, 8)
        adapter, other = (load_adapter(folder, model) for model in (divided.model, whole))
        for scale in (1.0, 0.4):
            expected = logits_with(whole, AdapterUse(other, scale))
            found = logits_with(divided.model, AdapterUse(adapter, scale))
            assert mean_kl(expected, found) < 1e-7
        assert mean_kl(logits_with(whole), expected) > 1e-3  # the adapter has an effect
        del adapter
        gc.collect()
        assert replies(divided, 8) == before


def test_folders_whose_names_are_no_text(tiny: Path, tmp_path: Path) -> None:
    """The other ranks open the same path as rank 0. The library that reads adapters opens no path
    that is not UTF-8, which is one line before any rank is told; a link to it is opened."""
    odd = tmp_path / os.fsdecode(b"\xe4\xff")
    odd.mkdir()
    plain = write_adapter(tmp_path / "adapter", stored(random_pairs(tiny_llama())))
    adapter = plain.rename(odd / "adapter")
    link = tmp_path / "link"
    link.symlink_to(adapter)
    whole = load_model(tiny, device="cpu", exact=True).model
    with loaded_ranks(tiny, exact=True) as divided:
        with pytest.raises(AdapterError, match="not valid UTF-8") as caught:
            load_adapter(adapter, divided.model)
        assert "\n" not in str(caught.value)
        uses = [AdapterUse(load_adapter(link, one)) for one in (whole, divided.model)]
        expected, found = logits_with(whole, uses[0]), logits_with(divided.model, uses[1])
        assert mean_kl(expected, found) < 1e-7


def test_an_adapter_that_changed_after_rank_0_read_it_ends_the_group(
    tiny: Path, tmp_path: Path
) -> None:
    tensors = stored(random_pairs(tiny_llama()))
    with loaded_ranks(tiny, exact=True) as divided:
        adapter = load_adapter(write_adapter(tmp_path / "adapter", tensors), divided.model)
        write_adapter(tmp_path / "adapter", tensors)
        with pytest.raises(RankError, match=r"rank 1 of 2 failed: .*the adapter has changed"):
            logits_with(divided.model, AdapterUse(adapter))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tensor_parallel": 0}, "not a number of ranks"),
        ({"split": "20,24"}, "--tensor-parallel or --split, got both"),
        ({"cpu_layers": 2}, "--tensor-parallel or --cpu-layers, got both"),
        ({"held_bytes": 0}, "--tensor-parallel or --held-memory, got both"),
        ({"tensor_parallel": 64}, "at most"),
    ],
)
def test_contradictions_are_refused_before_processes_start(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: str
) -> None:
    made = starting_with(monkeypatch)
    options = LoadOptions(**{"device": "cpu", "tensor_parallel": 2, **changes})
    with pytest.raises(RequestError, match=expected):
        load_model(tiny, options)
    assert not made
