"""Memory that stays free on each GPU: its text, and the plans that leave it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exl_core.cache.need import CacheNeed
from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.formats.checkpoint import Checkpoint
from exl_core.ops.open import get_table
from exl_core.session import planning
from exl_core.session.load import LoadOptions, checkpoint_of, load_model
from exl_core.session.open import ModelFiles, open_model
from exl_core.session.placement import CPU_OVERHEAD, GPU_OVERHEAD, DeviceMemory
from exl_core.session.planning import need_of, plan_of, sizes_of
from exl_core.session.reserve import Reserve
from exl_core.session.split import LayerSizes, StagePlan, parse_reserve, parse_split
from support.tiny_hybrids import tiny_lfm2
from support.tiny_models import save

GB = 10**9
CTX = 1 << 20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("0", (0.0,)), ("1.5", (1.5,)), ("1.5,0.5", (1.5, 0.5)), ("0, 2, 0", (0.0, 2.0, 0.0))],
)
def test_reserves_are_read(text: str, sizes: tuple[float, ...]) -> None:
    assert parse_reserve(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "-1", "1GB", "1,", "nan", "inf", "1e3", "9" * 400, "٣", "auto"]
)
def test_other_reserves_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not a reserve"):
        parse_reserve(text)
    with pytest.raises(RequestError, match="not a reserve"):
        load_model("no-model", reserve=text, device="cpu")


@pytest.mark.parametrize(
    ("text", "device", "expected"),
    [
        ("1,2", "cuda", "expected 1 number, or 3 for 3 GPUs, got --reserve 1,2, 2 numbers"),
        ("1,2,3,4", "cuda:1", "expected 1 number, or 3 for 3 GPUs"),
        ("1,2,3", "cpu", "expected 1 number, got --reserve 1,2,3, 3 numbers"),
        ("1,2", "reference", "expected 1 number, got --reserve 1,2"),
    ],
)
def test_reserves_of_other_devices_are_refused(
    text: str, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(RequestError, match=expected):
        Reserve.of(text, device)


def test_a_reserve_is_that_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    each, every = Reserve.of("1,0,2.5", "cuda"), Reserve.of("1.5", "cuda:2")
    names = ("cuda:0", "cuda:1", "cuda:2", "cpu")
    assert [each.bytes_on(name) for name in names] == [GB, 0, 5 * GB // 2, 0]
    assert [every.bytes_on(name) for name in names] == [3 * GB // 2] * 3 + [0]
    assert Reserve.of("2", "cpu").bytes_on("cpu") == 2 * GB
    assert not Reserve.of("0,0,0", "cuda").is_given
    assert each.kept_from(DeviceMemory("cuda:2", "", 3 * GB)).free_bytes == GB // 2
    assert each.kept_from(DeviceMemory("cuda:2", "", 2 * GB)).free_bytes == 0
    assert each.kept_from(DeviceMemory("cuda:2", "", None)).free_bytes is None


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    """A model whose first two layers are recurrent, and the next one is attention."""
    return open_model(save(tiny_lfm2(), tmp_path / "lfm2"))


Memories = dict[str, int]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memories:
    """Free bytes of this machine's devices. There are two GPUs."""
    free: Memories = {"cpu": 10**12, "cuda:0": 0, "cuda:1": 0}
    monkeypatch.setattr(
        planning,
        "device_memory",
        lambda: [DeviceMemory(name, "", size) for name, size in free.items()],
    )
    monkeypatch.setattr(planning, "free_memory_bytes", lambda device: free[str(device)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return free


def planned(
    files: ModelFiles, device: str = "cuda", **changes: Any
) -> tuple[LayerSizes, tuple[StagePlan, ...]]:
    """Sizes of the model, and its plan on a machine whose GPU is `cuda:0`."""
    options = LoadOptions(device=device, cache_tokens=CTX, **changes)
    checkpoint: Checkpoint = checkpoint_of(files, files.config, LoadOptions(device="cpu"))
    where = torch.device("cuda:0" if device == "cuda" else "cpu")
    ops: Any = SimpleNamespace(device=where)
    sizes = partial(sizes_of, options, files.config, checkpoint, None)
    reserve = Reserve.of(options.reserve, device)
    split = parse_split(options.split)
    plan = plan_of(options, split, files.config, sizes, ops, device=device, reserve=reserve)
    return sizes(), plan


def test_a_plan_leaves_memory_for_the_states(files: ModelFiles, memory: Memories) -> None:
    """With memory for weights, keys and values alone, a second GPU takes layers."""
    memory["cuda:0"] = memory["cuda:1"] = 10**12
    sizes, plan = planned(files, max_batch=5, has_drafts=True)
    assert plan == ()
    need = CacheNeed(CTX, max_batch=5, has_drafts=True)
    slots = need.slots(files.config) + 1
    assert slots > 11, "two states of each sequence, and snapshots"
    states = [0 if one is None else one.size_bytes * slots for one in files.config.state_shapes]
    assert sizes.states == tuple(states)
    memory["cuda:0"] = sizes.total_bytes + GPU_OVERHEAD
    assert planned(files, max_batch=5, has_drafts=True)[1] == ()
    memory["cuda:0"] -= 1
    memory["cuda:1"] = memory["cuda:0"]
    stages = planned(files, max_batch=5, has_drafts=True)[1]
    assert [stage.device for stage in stages] == ["cuda:0", "cuda:1"]
    for stage in stages:
        own = slice(stage.layers.start, stage.layers.stop)
        assert stage.state_bytes == sum(states[own])
        assert stage.cache_bytes == sum(sizes.cache[own])
    assert "GB states)" in str(stages[0])
    fewer = planned(files, max_batch=1)[1]
    assert fewer == (), "the same model with fewer sequences"


def test_an_automatic_plan_leaves_the_reserve(files: ModelFiles, memory: Memories) -> None:
    memory["cuda:0"] = memory["cuda:1"] = 10**12
    room = planned(files)[0].total_bytes + GPU_OVERHEAD
    memory["cuda:0"] = memory["cuda:1"] = room + GB
    assert planned(files, reserve="1")[1] == ()
    (stage,) = planned(files, reserve="1.001,0")[1]
    assert stage.device == "cuda:1"
    memory["cuda:1"] = GPU_OVERHEAD + room // 4
    first, second = planned(files, reserve="1.001,0")[1]
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    memory["cuda:1"] = 0
    (on_cpu, rest) = planned(files, reserve="1.001")[1]
    assert (on_cpu.device, rest.device) == ("cpu", "cuda:0")


@pytest.mark.parametrize("changes", [{"split": "none"}, {"split": "cuda:0=5"}, {"held_bytes": GB}])
def test_a_model_on_one_gpu_that_leaves_no_reserve_is_refused(
    files: ModelFiles, memory: Memories, changes: dict[str, Any]
) -> None:
    memory["cuda:0"] = 10**12
    memory["cuda:0"] = planned(files)[0].total_bytes + GPU_OVERHEAD + GB
    planned(files, reserve="1", **changes)
    memory["cuda:0"] -= 1
    planned(files, **changes)
    with pytest.raises(OutOfMemoryError, match=r"reserve free on cuda:0 .*and 1.00 GB that stay"):
        planned(files, reserve="1", **changes)


def test_stages_that_leave_no_reserve_are_refused(files: ModelFiles, memory: Memories) -> None:
    """The CPU's stage has none."""
    memory["cuda:0"] = memory["cuda:1"] = 10**12
    split = {"split": "cpu=1,cuda:0=2,cuda:1=2"}
    stage = planned(files, **split)[1][2]
    used = stage.weights_bytes + stage.cache_bytes + stage.state_bytes + GPU_OVERHEAD
    memory["cuda:1"], memory["cpu"] = used + GB, 0
    assert planned(files, reserve="0,1", **split)[1][2] == stage
    memory["cuda:1"] -= 1
    with pytest.raises(OutOfMemoryError, match="reserve free on cuda:1"):
        planned(files, reserve="0,1", **split)


def test_a_reserve_of_the_machine(files: ModelFiles, memory: Memories) -> None:
    memory["cpu"] = planned(files, "cpu")[0].total_bytes + CPU_OVERHEAD + GB
    assert planned(files, "cpu", reserve="1")[1] == ()
    with pytest.raises(OutOfMemoryError, match="reserve free on cpu"):
        planned(files, "cpu", reserve="1.01")


def test_loading_takes_the_reserve(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    free = planned_bytes(files) + CPU_OVERHEAD + GB
    monkeypatch.setattr(planning, "free_memory_bytes", lambda _: free)
    load_model(files, device="cpu", threads=1, reserve="0.99").unload()
    with pytest.raises(OutOfMemoryError, match="does not leave the reserve free on cpu"):
        load_model(files, device="cpu", threads=1, reserve="1.01")


def planned_bytes(files: ModelFiles) -> int:
    """Bytes of the model and of its default cache."""
    options = LoadOptions(device="cpu")
    checkpoint = checkpoint_of(files, files.config, options)
    assert need_of(options, files.config).max_batch == 1
    assert get_table("cpu", threads=1).device.type == "cpu"
    return sizes_of(options, files.config, checkpoint, None).total_bytes
