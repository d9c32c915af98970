"""Plans of splits: every layer once, within the devices' memory, on the fewest devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.session.placement import GPU_OVERHEAD, DeviceMemory
from exl_core.session.split import (
    ALL_LAYERS,
    LayerSizes,
    Split,
    StagePlan,
    parse_experts_on,
    parse_split,
    plan_split,
)

GB = 10**9
CPU = DeviceMemory("cpu", "", 64 * GB)
AUTO = Split()


def gpus(*gigabytes: float) -> list[DeviceMemory]:
    """GPUs with so much memory for weights and cache."""
    return [
        DeviceMemory(f"cuda:{i}", "", int(size * GB) + GPU_OVERHEAD)
        for i, size in enumerate(gigabytes)
    ]


def even(layers: int, *, weights: int = GB, cache: int = 0, ends: int = 0) -> LayerSizes:
    return LayerSizes((weights,) * layers, (cache,) * layers, ends, ends)


def spans(plan: tuple[StagePlan, ...]) -> list[tuple[str, int, int]]:
    return [(one.device, one.layers.start, one.layers.stop) for one in plan]


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("auto", Split()),
        ("none", Split(is_auto=False)),
        ("20,24", Split(is_auto=False, gigabytes=(20.0, 24.0))),
        ("0, 7.5", Split(is_auto=False, gigabytes=(0.0, 7.5))),
        ("cpu=8,cuda:0=24", Split(is_auto=False, stages=(("cpu", 8), ("cuda:0", 24)))),
    ],
)
def test_splits_are_read(text: str, split: Split) -> None:
    assert parse_split(text) == split


@pytest.mark.parametrize(
    "text",
    [
        "",
        "half",
        "-1,2",
        "0,0",
        "1e3",
        "inf",
        "nan",
        "20,",
        "cpu=8,24",
        "cpu=0",
        "=8",
        "cpu=x",
        "٣",
    ],
)
def test_other_splits_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="no such split"):
        parse_split(text)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("auto", None), ("device", 0), ("cpu", ALL_LAYERS), ("7", 7), ("0", 0)],
)
def test_places_of_experts_are_read(text: str, layers: int | None) -> None:
    assert parse_experts_on(text) == layers


@pytest.mark.parametrize("text", ["", "gpu", "-1", "1.5", "٣", "1000000"])
def test_other_places_of_experts_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="no such place for experts"):
        parse_experts_on(text)


def sparse(layers: int = 10, *, dense: int = 2) -> LayerSizes:
    """Layers of 1 GB, of which 0.8 GB are experts, except in the first `dense` layers."""
    experts = tuple(0 if layer < dense else 800_000_000 for layer in range(layers))
    return replace(even(layers), experts=experts)


def host_layers(plan: tuple[StagePlan, ...]) -> list[tuple[int, ...]]:
    return [one.host_layers for one in plan]


def test_experts_of_as_few_layers_as_possible_leave_a_full_gpu() -> None:
    assert host_layers(plan_split(sparse(), AUTO, gpus(10), CPU)) == [()]
    (stage,) = plan_split(sparse(), AUTO, gpus(8), CPU)
    assert (stage.device, stage.host_layers, stage.host_bytes) == (
        "cuda:0",
        (2, 3, 4),
        24 * GB // 10,
    )
    assert stage.weights_bytes == 76 * GB // 10
    assert "experts of 3 layers on the CPU (2.40 GB)" in str(stage)
    two = plan_split(sparse(), AUTO, gpus(4, 4), CPU)
    assert [one.device for one in two] == ["cuda:0", "cuda:1"]
    assert sum(host_layers(two), ()) == (2, 3, 4)


def test_whole_layers_follow_when_all_experts_have_left() -> None:
    plan = plan_split(sparse(), AUTO, gpus(3), CPU)
    assert spans(plan) == [("cpu", 0, 1), ("cuda:0", 1, 10)]
    assert host_layers(plan) == [(), tuple(range(2, 10))]
    assert plan[0].weights_bytes == GB


def test_experts_stay_where_they_are_wanted() -> None:
    for wanted, layers in ((0, ()), (2, (2, 3)), (8, tuple(range(2, 10)))):
        plan = plan_split(sparse(), AUTO, gpus(20), CPU, experts_on_cpu=wanted)
        assert host_layers(plan) == [layers]
    everything = plan_split(
        sparse(), Split(is_auto=False), gpus(20), CPU, experts_on_cpu=ALL_LAYERS
    )
    assert host_layers(everything) == [tuple(range(2, 10))]
    stages = Split(is_auto=False, stages=(("cpu", 4), ("cuda:0", 6)))
    plan = plan_split(sparse(), stages, gpus(20), CPU, experts_on_cpu=4)
    assert host_layers(plan) == [(), (4, 5)]  # the CPU has its own layers' experts anyway
    assert plan[0].weights_bytes == 4 * GB
    with pytest.raises(OutOfMemoryError):
        plan_split(
            sparse(), AUTO, gpus(8), DeviceMemory("cpu", "", GB), experts_on_cpu=0, cpu_layers=0
        )


def test_experts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RequestError, match=r"experts of so many layers.*0 to 8"):
        plan_split(sparse(), AUTO, gpus(20), CPU, experts_on_cpu=9)
    for wanted in (1, ALL_LAYERS):
        with pytest.raises(RequestError, match="no experts"):
            plan_split(even(4), AUTO, gpus(20), CPU, experts_on_cpu=wanted)
    assert host_layers(plan_split(even(4), AUTO, gpus(20), CPU, experts_on_cpu=0)) == [()]


def test_experts_that_the_host_cannot_hold_are_refused() -> None:
    small = DeviceMemory("cpu", "", 2 * GB)
    with pytest.raises(OutOfMemoryError, match="the experts of 3 layers do not fit") as caught:
        plan_split(sparse(), AUTO, gpus(8), small)
    assert "2.40 GB" in str(caught.value)


@given(st.integers(1, 12), st.floats(0.5, 14), st.integers(0, 12))
def test_moved_experts_are_no_more_than_needed(layers: int, memory: float, dense: int) -> None:
    sizes = sparse(layers, dense=min(dense, layers))
    try:
        plan = plan_split(sizes, AUTO, gpus(memory), CPU)
    except OutOfMemoryError:
        assume(False)
    moved = sum(len(one.host_layers) for one in plan)
    assert plan[-1].weights_bytes <= int(memory * GB)
    assert sum(one.weights_bytes + one.host_bytes for one in plan) == layers * GB
    if moved and len(plan) == 1:
        assert plan[0].weights_bytes + 800_000_000 > int(memory * GB)
    if len(plan) == 2 and plan[0].device == "cpu":
        left = [layer for layer in plan[1].layers if layer in sizes.expert_layers]
        assert list(plan[1].host_layers) == left


def test_a_model_that_fits_one_gpu_is_on_one() -> None:
    assert spans(plan_split(even(10), AUTO, gpus(4, 10), CPU)) == [("cuda:1", 0, 10)]
    assert spans(plan_split(even(10), AUTO, gpus(12, 10), CPU)) == [("cuda:0", 0, 10)]


def test_two_gpus_are_filled_to_the_same_part() -> None:
    assert spans(plan_split(even(12), AUTO, gpus(10, 5), CPU)) == [
        ("cuda:0", 0, 8),
        ("cuda:1", 8, 12),
    ]


def test_the_fewest_gpus_with_the_most_memory_are_used() -> None:
    assert [one.device for one in plan_split(even(12), AUTO, gpus(2, 7, 7), CPU)] == [
        "cuda:1",
        "cuda:2",
    ]


def test_the_cpu_takes_the_first_layers_that_the_gpus_cannot_hold() -> None:
    plan = plan_split(even(10, cache=GB // 2, ends=GB), AUTO, gpus(8), CPU)
    assert spans(plan) == [("cpu", 0, 6), ("cuda:0", 6, 10)]
    assert plan[0].weights_bytes == 7 * GB, "six layers and the embedding"
    assert plan[1].weights_bytes == 5 * GB, "four layers and the head"
    assert plan[1].cache_bytes == 2 * GB


def test_a_tied_head_is_counted_on_both_devices() -> None:
    sizes = LayerSizes((GB,) * 4, (0,) * 4, embedding=2 * GB, head=7, is_tied=True)
    assert sizes.total_bytes == 6 * GB + 7
    cpu, gpu = plan_split(sizes, AUTO, gpus(5), CPU)
    assert cpu.weights_bytes + gpu.weights_bytes == 8 * GB + 7


def test_layers_on_the_cpu_by_number() -> None:
    assert spans(plan_split(even(8), AUTO, gpus(20), CPU, 3)) == [("cpu", 0, 3), ("cuda:0", 3, 8)]
    assert spans(plan_split(even(8), AUTO, gpus(20), CPU, 8)) == [("cpu", 0, 8)]
    none = Split(is_auto=False)
    assert spans(plan_split(even(8), none, gpus(2, 2), CPU, 1)) == [("cpu", 0, 1), ("cuda:0", 1, 8)]
    with pytest.raises(RequestError, match="expected 0 to 8, got 9"):
        plan_split(even(8), AUTO, gpus(20), CPU, 9)


def test_gigabytes_fill_the_gpus_in_order_without_the_cache() -> None:
    sizes, split = even(10, cache=5 * GB), parse_split("4,0,6")
    assert spans(plan_split(sizes, split, gpus(24, 24, 24), CPU)) == [
        ("cuda:0", 0, 4),
        ("cuda:2", 4, 10),
    ]


def test_gigabytes_that_do_not_suffice_name_the_layers_for_the_cpu() -> None:
    with pytest.raises(OutOfMemoryError, match="--cpu-layers 3") as caught:
        plan_split(even(10), parse_split("3,4"), gpus(24, 24), CPU)
    assert "10.00 GB" in str(caught.value) and "7.00 GB" in str(caught.value)
    plan = plan_split(even(10), parse_split("3,4"), gpus(24, 24), CPU, 3)
    assert spans(plan) == [("cpu", 0, 3), ("cuda:0", 3, 6), ("cuda:1", 6, 10)]


def test_more_numbers_than_gpus_are_refused() -> None:
    with pytest.raises(RequestError, match="at most 1 numbers, got 2"):
        plan_split(even(4), parse_split("3,4"), gpus(24), CPU)


def test_given_stages_must_have_all_layers() -> None:
    split = parse_split("cpu=3,cuda:0=5")
    assert spans(plan_split(even(8), split, [], CPU)) == [("cpu", 0, 3), ("cuda:0", 3, 8)]
    with pytest.raises(RequestError, match="expected 9, got 8 in all"):
        plan_split(even(9), split, [], CPU)
    with pytest.raises(RequestError, match="given twice"):
        plan_split(even(8), split, [], CPU, 2)


def test_a_model_that_fits_nowhere_is_refused_with_figures() -> None:
    with pytest.raises(OutOfMemoryError, match=r"70.00 GB.*cuda:0: 0.50 GB"):
        plan_split(even(70), AUTO, gpus(0.5), CPU)
    with pytest.raises(OutOfMemoryError, match="the first 68 layers"):
        plan_split(even(70), AUTO, gpus(2), CPU)


sizes_of_layers = st.lists(st.integers(1, 50), min_size=1, max_size=24)


@given(sizes_of_layers, st.data())
def test_plans_have_every_layer_once_and_stay_within_memory(
    weights: list[int], data: st.DataObject
) -> None:
    count, unit = len(weights), GB // 100
    cache = data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    room = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=4))
    sizes = LayerSizes(
        tuple(one * unit for one in weights), tuple(one * unit for one in cache), unit, 3 * unit
    )
    devices = gpus(*(one / 100 for one in room))
    try:
        plan = plan_split(sizes, AUTO, devices, CPU)
    except OutOfMemoryError:
        assume(False)
    assert [layer for one in plan for layer in one.layers] == list(range(count))
    limits = {one.device: one.free_bytes for one in (*devices, CPU)}
    for one in plan:
        limit = limits[one.device]
        assert limit is not None
        assert one.weights_bytes + one.cache_bytes <= limit
        assert one.weights_bytes + one.cache_bytes == sizes.stage_bytes(one.layers)
    if sum(sizes.weights) + sum(sizes.cache) + 4 * unit <= max(room) * unit:
        assert len(plan) == 1, "it fits one GPU"
