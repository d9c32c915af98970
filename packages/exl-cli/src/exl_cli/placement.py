"""Output of `exl inspect model --fit`: for each device, whether the model and which context fit,
and the devices that a run would divide its layers among.

`--split 20,24` may name more GPUs than this machine has: the plan needs their sizes only.
"""

from __future__ import annotations

from typing import NamedTuple

from exl_cli import output
from exl_cli.render import columns_table, format_bytes, print_answer
from exl_core.cache.need import CacheNeed
from exl_core.errors import OutOfMemoryError, RequestError
from exl_core.session.describe import ModelDescription
from exl_core.session.placement import DeviceMemory, Fit, device_memory, fit_all
from exl_core.session.reserve import Reserve
from exl_core.session.runtime import settle_ctx_size
from exl_core.session.split import (
    Split,
    StagePlan,
    layer_sizes,
    parse_experts_on,
    parse_split,
    plan_split,
)

SCHEMA_VERSION = 1


class PlanChoice(NamedTuple):
    """Options that divide a model among devices, as text."""

    split: str = "auto"
    cpu_layers: int | None = None
    experts_on: str = "auto"
    reserve: str = "0"


def run(
    model: ModelDescription,
    ctx: int | None,
    choice: PlanChoice,
    *,
    max_batch: int,
    is_json: bool,
) -> None:
    """Print the memory needed at `ctx` tokens (None: the default context size of the commands) that
    `max_batch` sequences share, and the plan of a split."""
    need = CacheNeed(settle_ctx_size(ctx, model.config.max_seq_len), max_batch=max_batch)
    found = device_memory()
    reserve = Reserve.of(choice.reserve, found[-1].device, num_gpus=len(found) - 1)
    devices = [reserve.kept_from(one) for one in found]
    fits = fit_all(model.weights_bytes_in_memory, model.config, need, devices)
    try:
        plan, refusal = _plan(model, need, choice, devices), ""
    except OutOfMemoryError as error:
        if choice != PlanChoice():
            raise
        plan, refusal = (), f"No split: {error}"
    if is_json:
        value = {
            "schema_version": SCHEMA_VERSION,
            "name": model.name,
            "fit": [as_dict(fit) for fit in fits],
            "split": [_stage_dict(stage) for stage in plan],
        }
        output.write_json(value)
    else:
        notes = [f"Layers: {'; '.join(map(str, plan))}." if plan else refusal]
        absent = [one.device for one in _absent_gpus(parse_split(choice.split), devices[1:])]
        notes += [f"Not in this machine: {', '.join(absent)}."] if absent else []
        _show(model, fits, notes)


def _plan(
    model: ModelDescription,
    need: CacheNeed,
    choice: PlanChoice,
    devices: list[DeviceMemory],
) -> tuple[StagePlan, ...]:
    cpu, *gpus = devices
    sizes = layer_sizes(model.bytes_by_part, model.config, need, model.expert_bytes)
    split, experts = parse_split(choice.split), parse_experts_on(choice.experts_on)
    gpus += _absent_gpus(split, gpus)
    on_cpu = choice.cpu_layers
    if on_cpu and not gpus:
        raise RequestError("no GPU to split the model over", got=f"--cpu-layers {on_cpu}")
    return plan_split(sizes, split, gpus or [cpu], cpu, on_cpu, experts_on_cpu=experts)


def _absent_gpus(split: Split, gpus: list[DeviceMemory]) -> list[DeviceMemory]:
    """The GPUs that `split` gives sizes for and that this machine does not have."""
    numbers = range(len(gpus), len(split.gigabytes))
    return [DeviceMemory(f"cuda:{number}", "not in this machine", None) for number in numbers]


def _stage_dict(stage: StagePlan) -> dict[str, object]:
    return {
        "device": stage.device,
        "first_layer": stage.layers.start,
        "last_layer": stage.layers.stop - 1,
        "weights_bytes": stage.weights_bytes,
        "cache_bytes": stage.cache_bytes,
        "state_bytes": stage.state_bytes,
        "layers_with_experts_on_cpu": list(stage.host_layers),
        "bytes_of_experts_on_cpu": stage.host_bytes,
    }


def as_dict(fit: Fit) -> dict[str, object]:
    return {
        "device": fit.memory.device,
        "device_name": fit.memory.name,
        "free_bytes": fit.memory.free_bytes,
        "ctx": fit.ctx,
        "needed_bytes": fit.needed_bytes,
        "state_bytes": fit.state_bytes,
        "fits": fit.fits,
        "max_ctx": {kind.value: most for kind, most in fit.contexts.items()},
        "advice": fit.advice,
    }


def _show(model: ModelDescription, fits: list[Fit], notes: list[str]) -> None:
    kinds = list(fits[0].contexts)
    table = columns_table(
        "device", "free", f"needed at {fits[0].ctx}", "fits", *(f"{k.value} up to" for k in kinds)
    )
    answers = {True: "yes", False: "no", None: "unknown"}
    for fit in fits:
        free = fit.memory.free_bytes
        table.add_row(
            f"{fit.memory.device}, {fit.memory.name}",
            "unknown" if free is None else format_bytes(free),
            format_bytes(fit.needed_bytes),
            answers[fit.fits],
            *("unknown" if most is None else str(most) for most in fit.contexts.values()),
        )
    advice = [f"{fit.memory.device}: {fit.advice} would fit." for fit in fits if fit.advice]
    weights = format_bytes(model.weights_bytes_in_memory)
    states = format_bytes(fits[-1].state_bytes)
    held = f" and recurrent states of {states}" if fits[-1].state_bytes else ""
    head = f"{model.name}: weights of {weights}{held}; contexts in tokens."
    print_answer(head, table, *advice, *notes)
