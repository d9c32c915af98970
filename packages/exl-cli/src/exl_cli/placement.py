"""Output of `exl inspect model --fit`: for each device, whether the model and which context fit,
and the devices that a run would divide its layers among.
"""

from __future__ import annotations

from typing import NamedTuple

from exl_cli import output
from exl_cli.render import columns_table, format_bytes, print_answer
from exl_core.cache.format import KVFormat
from exl_core.errors import OutOfMemoryError
from exl_core.session.describe import ModelDescription
from exl_core.session.placement import DeviceMemory, Fit, device_memory, fit_all
from exl_core.session.runtime import settle_ctx_size
from exl_core.session.split import (
    StagePlan,
    layer_sizes,
    parse_experts_on,
    parse_split,
    plan_split,
)

SCHEMA_VERSION = 1


class PlanChoice(NamedTuple):
    """Options that divide a model among devices."""

    split: str = "auto"
    cpu_layers: int | None = None
    experts_on: str = "auto"


DEFAULT_CHOICE = PlanChoice()


def run(
    model: ModelDescription, ctx: int | None, choice: PlanChoice = DEFAULT_CHOICE, *, is_json: bool
) -> None:
    """Print the memory needed at `ctx` tokens (None: the default context size of the commands),
    and the plan of a split."""
    at = settle_ctx_size(ctx, model.config.max_seq_len)
    devices = device_memory()
    fits = fit_all(model.weights_bytes_in_memory, model.config, at, devices)
    try:
        plan, refusal = _plan(model, at, choice, devices), ""
    except OutOfMemoryError as error:
        if choice != DEFAULT_CHOICE:
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
        _show(model, fits, [f"Layers: {'; '.join(map(str, plan))}." if plan else refusal])


def _plan(
    model: ModelDescription,
    ctx: int,
    choice: PlanChoice,
    devices: list[DeviceMemory],
) -> tuple[StagePlan, ...]:
    cpu, *gpus = devices
    sizes = layer_sizes(model.bytes_by_part, model.config, KVFormat.FP16, ctx, model.expert_bytes)
    split, experts = parse_split(choice.split), parse_experts_on(choice.experts_on)
    return plan_split(sizes, split, gpus or [cpu], cpu, choice.cpu_layers, experts_on_cpu=experts)


def _stage_dict(stage: StagePlan) -> dict[str, object]:
    return {
        "device": stage.device,
        "first_layer": stage.layers.start,
        "last_layer": stage.layers.stop - 1,
        "weights_bytes": stage.weights_bytes,
        "cache_bytes": stage.cache_bytes,
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
    print_answer(f"{model.name}: weights of {weights}; contexts in tokens.", table, *advice, *notes)
