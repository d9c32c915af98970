"""Divides a model's layers among devices: the plan, made from sizes before anything is read.

Works from plain numbers. The first device of a plan has the embedding, the last one the final norm
and the head. Layers stay in order, so that states cross from one device to the next once per pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from exl_core.errors import OutOfMemoryError, RequestError

if TYPE_CHECKING:
    from exl_core.arch.spec import ModelConfig
    from exl_core.cache.need import CacheNeed
    from exl_core.session.placement import DeviceMemory

GB = 1e9
_SEARCH_STEPS = 40  # halvings of the interval in which the balanced fill is searched


@dataclass(frozen=True, slots=True)
class Split:
    """The user's choice of a division of the layers. `parse_split` reads it from text.

    gigabytes  weights per GPU in GB, in the order of the GPUs; 0 leaves one out
    stages     devices and their numbers of layers
    is_auto    choose the devices by their free memory; otherwise, without the other two, all
               layers are on one device
    """

    is_auto: bool = True
    gigabytes: tuple[float, ...] = ()
    stages: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes of a model in memory: weights, cache and recurrent states of each layer, and what is
    outside them."""

    weights: tuple[int, ...]
    cache: tuple[int, ...]
    embedding: int
    head: int
    """The final norm, and the head unless it is tied to the embedding."""
    is_tied: bool = False
    experts: tuple[int, ...] = ()
    """The part of `weights` that is experts; () if no layer has any."""
    host_layers: frozenset[int] = frozenset()
    """Layers whose experts are on the CPU, wherever the layers are."""
    states: tuple[int, ...] = ()
    """Recurrent states of all sequences and snapshots; () if no layer has any."""

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return tuple(layer for layer, size in enumerate(self.experts) if size)

    def with_experts_on_cpu(self, count: int) -> LayerSizes:
        """The same model with the experts of the first `count` layers that have some on the CPU."""
        return replace(self, host_layers=frozenset(self.expert_layers[:count]))

    def host_bytes(self, layers: Iterable[int]) -> int:
        """Bytes of experts that layers on a GPU leave to the CPU."""
        return sum(self.experts[layer] for layer in layers if layer in self.host_layers)

    @property
    def total_bytes(self) -> int:
        """Bytes on a single device."""
        return self.stage_bytes(range(len(self.weights)))

    def stage_bytes(
        self, layers: range, *, has_cache: bool = True, has_experts: bool = False
    ) -> int:
        """Bytes of a stage with these layers, on a GPU, or on the CPU, which `has_experts` of all
        layers."""
        part = slice(layers.start, layers.stop)
        is_first, is_last = layers.start == 0, layers.stop == len(self.weights)
        has_embedding = is_first or (is_last and self.is_tied)
        ends = (self.embedding if has_embedding else 0) + (self.head if is_last else 0)
        weights = sum(self.weights[part]) - (0 if has_experts else self.host_bytes(layers))
        cached = sum(self.cache[part]) + sum(self.states[part]) if has_cache else 0
        return weights + ends + cached


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers on one device, and the bytes of their weights, of their keys and values and of their
    recurrent states there.

    The experts of `host_layers`, which have `host_bytes`, are on the CPU.
    """

    device: str
    layers: range
    weights_bytes: int
    cache_bytes: int
    host_layers: tuple[int, ...] = ()
    host_bytes: int = 0
    state_bytes: int = 0

    def __str__(self) -> str:
        first, last = self.layers.start, self.layers.stop - 1
        span = f"layer {first}" if first == last else f"layers {first} to {last}"
        sizes = f"{self.weights_bytes / GB:.2f} GB weights, {self.cache_bytes / GB:.2f} GB cache"
        states = f", {self.state_bytes / GB:.2f} GB states" if self.state_bytes else ""
        own = f"{self.device}: {span} ({sizes}{states})"
        if not self.host_layers:
            return own
        count = len(self.host_layers)
        layers = f"{count} layers" if count > 1 else "1 layer"
        return f"{own}, experts of {layers} on the CPU ({self.host_bytes / GB:.2f} GB)"


def layer_sizes(
    bytes_by_part: Mapping[int | str, int],
    config: ModelConfig,
    need: CacheNeed,
    expert_bytes: Sequence[int] = (),
) -> LayerSizes:
    """Sizes of a model with the cache of `need`, from `Checkpoint.bytes_by_part` and
    `Checkpoint.expert_bytes`. States are those of layers on GPUs, which have a slot more."""
    ends = {part: size for part, size in bytes_by_part.items() if isinstance(part, str)}
    embedding = ends.pop("embed") + ends.pop("positions", 0)  # on one device
    return LayerSizes(
        weights=tuple(bytes_by_part[layer] for layer in range(config.num_layers)),
        cache=tuple(need.kv_bytes([shape]) for shape in config.kv_shapes),
        embedding=embedding,
        head=sum(ends.values()),
        is_tied=config.has_tied_embeddings,
        experts=tuple(expert_bytes),
        states=need.state_bytes(config, has_spare=True),
    )


ALL_LAYERS = 10**6


def parse_experts_on(text: str) -> int | None:
    """Number of layers whose experts are on the CPU: `cpu` (all), `device` (none) or a number; None
    for `auto`. Raises RequestError for anything else."""
    named = {"auto": None, "device": 0, "cpu": ALL_LAYERS}
    if text in named:
        return named[text]
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise RequestError(
            "no such place for experts",
            expected="auto, device, cpu, or the number of layers whose experts are on the CPU",
            got=text or "nothing",
        )
    return int(text)


def parse_split(text: str) -> Split:
    """`auto`, `none`, GB per GPU (`20,24`), or layers per device (`cpu=8,cuda:0=24`).

    Raises RequestError for anything else.
    """
    if text in ("auto", "none"):
        return Split(is_auto=text == "auto")
    parts = [part.strip() for part in text.split(",")]
    stages = [_stage_of(part) for part in parts]
    named = tuple(one for one in stages if one is not None)
    if named and len(named) == len(parts):
        return Split(is_auto=False, stages=named)
    sizes = tuple(_gigabytes(part) for part in parts)
    if named or not any(sizes) or min(sizes) < 0 or inf in sizes:
        raise RequestError(
            "no such split",
            expected="auto, none, GB of weights for each GPU as in 20,24, or layers for each "
            "device as in cpu=8,cuda:0=24",
            got=text or "nothing",
        )
    return Split(is_auto=False, gigabytes=sizes)


def parse_reserve(text: str) -> tuple[float, ...]:
    """GB that stay free: one number for every GPU, or one for each, as in `1.5,0.5`. RequestError
    for anything else."""
    sizes = tuple(_gigabytes(part.strip()) for part in text.split(","))
    if min(sizes) < 0 or inf in sizes:
        raise RequestError(
            "not a reserve",
            expected="GB that stay free on each GPU as in 1.5, or one number for each GPU as in "
            "1.5,0.5",
            got=text or "nothing",
        )
    return sizes


def _stage_of(part: str) -> tuple[str, int] | None:
    device, equals, count = part.rpartition("=")
    is_count = count.isascii() and count.isdecimal() and len(count) < 6 and int(count) > 0
    return (device, int(count)) if equals and device and is_count else None


def _gigabytes(part: str) -> float:
    """-1 for anything but a plain number."""
    is_number = part.isascii() and part.replace(".", "", 1).isdecimal()
    return float(part) if is_number else -1.0


def plan_split(
    sizes: LayerSizes,
    split: Split,
    devices: Sequence[DeviceMemory],
    cpu: DeviceMemory,
    cpu_layers: int | None = None,
    *,
    experts_on_cpu: int | None = None,
) -> tuple[StagePlan, ...]:
    """The stages in order.

    `devices`: the devices that may be used, best first; `cpu` takes the first layers if these
    cannot hold the model, or the first `cpu_layers`. Automatic plans use the fewest devices, and
    fill each to the same part of its free memory.

    `experts_on_cpu`: the first layers with experts whose experts `cpu` takes (`ALL_LAYERS`: all of
    them). None: of an automatic plan as few as let the devices hold the rest, of others none.
    Whole layers go to the CPU only when the experts of all layers are there.

    Raises RequestError for a split that does not suit the model or the machine, and
    OutOfMemoryError, with figures, if the model does not fit.
    """
    _check_experts(sizes, experts_on_cpu)
    if experts_on_cpu is not None:
        sizes = sizes.with_experts_on_cpu(experts_on_cpu)
    elif split.is_auto and cpu_layers is None and sizes.expert_layers:
        sizes = sizes.with_experts_on_cpu(_fewest_experts(sizes, devices))
    plan = _plan_layers(sizes, split, devices, cpu, cpu_layers)
    if any(stage.host_layers for stage in plan) or (
        split.is_auto and plan[0].device == cpu.device and len(plan) > 1
    ):
        _check_cpu(plan, cpu)
    return plan


def _check_experts(sizes: LayerSizes, experts_on_cpu: int | None) -> None:
    """Raises RequestError for experts of more layers than have some."""
    most = len(sizes.expert_layers)
    if experts_on_cpu in (None, 0) or (most and experts_on_cpu == ALL_LAYERS):
        return
    if not most:
        raise RequestError("the model has no experts", expected="no --experts-on")
    assert experts_on_cpu is not None
    if experts_on_cpu > most:
        raise RequestError(
            "experts of so many layers on the CPU", expected=f"0 to {most}", got=experts_on_cpu
        )


def _fewest_experts(sizes: LayerSizes, devices: Sequence[DeviceMemory]) -> int:
    """The fewest layers whose experts must leave the devices so that these hold all else; all of
    them if that is not enough."""
    counts = range(len(sizes.expert_layers))

    def fits(moved: int) -> bool:
        return _balanced(sizes.with_experts_on_cpu(moved), 0, devices) is not None

    return bisect_left(counts, x=True, key=fits)


def _plan_layers(
    sizes: LayerSizes,
    split: Split,
    devices: Sequence[DeviceMemory],
    cpu: DeviceMemory,
    cpu_layers: int | None,
) -> tuple[StagePlan, ...]:
    """The stages of a model whose experts have their places."""
    count = len(sizes.weights)
    if cpu_layers is not None and not 0 <= cpu_layers <= count:
        raise RequestError("so many layers on the CPU", expected=f"0 to {count}", got=cpu_layers)
    if split.stages:
        if cpu_layers is not None:
            raise RequestError("layers of the CPU given twice", got="--cpu-layers and --split")
        return _given_stages(sizes, split.stages)
    on_cpu = cpu_layers or 0
    if on_cpu == count:
        return _plans(sizes, [(cpu, range(count))])
    if split.gigabytes:
        return _by_gigabytes(sizes, split.gigabytes, devices, cpu, on_cpu)
    if not split.is_auto:
        return _plans(sizes, _with_cpu(cpu, on_cpu, [(devices[0], range(on_cpu, count))]))
    fewest = range(on_cpu, count if cpu_layers is None else on_cpu + 1)
    for moved in fewest:
        found = _balanced(sizes, moved, devices)
        if found is not None:
            return _plans(sizes, _with_cpu(cpu, moved, found))
    raise OutOfMemoryError(
        "the model does not fit into the memory of these devices",
        expected=f"{sizes.total_bytes / GB:.2f} GB for weights and cache",
        got=", ".join(f"{one.device}: {_free(one) / GB:.2f} GB" for one in devices),
        next_step="Take a smaller model, a smaller --ctx-size or a cheaper --cache-type.",
    )


def _with_cpu(
    cpu: DeviceMemory, moved: int, others: list[tuple[DeviceMemory, range]]
) -> list[tuple[DeviceMemory, range]]:
    return [(cpu, range(moved)), *others] if moved else others


def _plans(
    sizes: LayerSizes, stages: Sequence[tuple[DeviceMemory, range]]
) -> tuple[StagePlan, ...]:
    return tuple(_stage_plan(sizes, memory.device, layers) for memory, layers in stages)


def _stage_plan(sizes: LayerSizes, device: str, layers: range) -> StagePlan:
    part = slice(layers.start, layers.stop)
    cache, states = sum(sizes.cache[part]), sum(sizes.states[part])
    if device == "cpu":
        weights = sizes.stage_bytes(layers, has_cache=False, has_experts=True)
        return StagePlan(device, layers, weights, cache, state_bytes=states)
    weights = sizes.stage_bytes(layers, has_cache=False)
    host_layers = tuple(layer for layer in layers if layer in sizes.host_layers)
    host_bytes = sizes.host_bytes(layers)
    return StagePlan(device, layers, weights, cache, host_layers, host_bytes, states)


def _free(memory: DeviceMemory) -> float:
    """Bytes for weights and cache; infinite if unknown."""
    free = memory.free_bytes
    return inf if free is None else max(0, free - memory.overhead_bytes)


def _given_stages(sizes: LayerSizes, stages: Sequence[tuple[str, int]]) -> tuple[StagePlan, ...]:
    count, given = len(sizes.weights), sum(number for _, number in stages)
    if given != count:
        raise RequestError("not the layers of this model", expected=count, got=f"{given} in all")
    found, first = [], 0
    for device, number in stages:
        found.append(_stage_plan(sizes, device, range(first, first + number)))
        first += number
    return tuple(found)


def _by_gigabytes(
    sizes: LayerSizes,
    gigabytes: Sequence[float],
    devices: Sequence[DeviceMemory],
    cpu: DeviceMemory,
    on_cpu: int,
) -> tuple[StagePlan, ...]:
    """Fills the GPUs in order. `gigabytes` limits the weights on each of them."""
    if len(gigabytes) > len(devices):
        raise RequestError(
            "a split over more GPUs than there are",
            expected=f"at most {len(devices)} numbers",
            got=len(gigabytes),
        )
    used = [(one, size * GB) for one, size in zip(devices, gigabytes, strict=False) if size > 0]
    weights_only = replace(sizes, cache=(0,) * len(sizes.cache), states=())
    found = _filled(weights_only, on_cpu, used)
    if found is None:
        count = len(sizes.weights)
        fitting = (n for n in range(on_cpu + 1, count) if _filled(weights_only, n, used))
        enough = next(fitting, None)
        raise OutOfMemoryError(
            "the layers do not fit into this split",
            expected=f"{weights_only.total_bytes / GB:.2f} GB of weights",
            got=f"{sum(gigabytes):.2f} GB",
            next_step="Give the GPUs more."
            if enough is None
            else f"Give the GPUs more, or take --cpu-layers {enough}.",
        )
    return _plans(sizes, _with_cpu(cpu, on_cpu, found))


def _balanced(
    sizes: LayerSizes, first: int, devices: Sequence[DeviceMemory]
) -> list[tuple[DeviceMemory, range]] | None:
    """Layers from `first` on, on the fewest devices that hold them, each filled to the same part
    of its free memory; None if all of them together are too small."""
    free = [(one, _free(one)) for one in devices]
    for number in range(1, len(free) + 1):
        # The devices with the most memory, in their own order.
        largest = sorted(range(len(free)), key=lambda i: -free[i][1])[:number]
        chosen = (
            [free[i] for i in sorted(largest)]
            if number > 1
            else [_first_fitting(sizes, first, free)]
        )
        best = _filled(sizes, first, chosen)
        if best is None:
            continue
        low, high = 0.0, 1.0
        for _ in range(_SEARCH_STEPS if number > 1 else 0):
            part = (low + high) / 2
            found = _filled(sizes, first, [(one, part * size) for one, size in chosen])
            if found is None:
                low = part
            else:
                high, best = part, found
        return best
    return None


def _first_fitting(
    sizes: LayerSizes, first: int, free: Sequence[tuple[DeviceMemory, float]]
) -> tuple[DeviceMemory, float]:
    """The first device that holds all layers from `first` on, or else the first one."""
    return next((one for one in free if _filled(sizes, first, [one]) is not None), free[0])


def _filled(
    sizes: LayerSizes, first: int, devices: Sequence[tuple[DeviceMemory, float]]
) -> list[tuple[DeviceMemory, range]] | None:
    """Layers from `first` on, as many on each device as its bytes hold, in order; None if some are
    left over."""
    count, found = len(sizes.weights), []
    for memory, capacity in devices:
        last = first
        while last < count and sizes.stage_bytes(range(first, last + 1)) <= capacity:
            last += 1
        if last > first:
            found.append((memory, range(first, last)))
        first = last
    return found if first == count else None


def _check_cpu(plan: Sequence[StagePlan], cpu: DeviceMemory) -> None:
    """Raises OutOfMemoryError if what a plan puts on the CPU does not fit there."""
    layers = [stage for stage in plan if stage.device == cpu.device]
    needed = sum(stage.weights_bytes + stage.cache_bytes + stage.state_bytes for stage in layers)
    needed += sum(stage.host_bytes for stage in plan)
    if needed <= _free(cpu):
        return
    moved = sum(len(stage.layers) for stage in layers)
    experts = sum(len(stage.host_layers) for stage in plan)
    parts = [f"the first {moved} layers"] if moved else []
    parts += [f"the experts of {experts} layers"] if experts else []
    raise OutOfMemoryError(
        f"{' and '.join(parts)} do not fit into this machine's memory",
        expected=f"{needed / GB:.2f} GB for weights and cache",
        got=f"{_free(cpu) / GB:.2f} GB free",
        next_step="Take a smaller model, a smaller --ctx-size or a cheaper --cache-type.",
    )
