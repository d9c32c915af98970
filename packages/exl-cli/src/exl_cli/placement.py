"""Output of `exl inspect model --fit`: for each device, whether the model and which context fit."""

from __future__ import annotations

from exl_cli import output
from exl_cli.render import columns_table, format_bytes, print_answer
from exl_core.session.describe import ModelDescription
from exl_core.session.placement import Fit, fit_all
from exl_core.session.runtime import settle_ctx_size

SCHEMA_VERSION = 1


def run(model: ModelDescription, ctx: int | None, *, is_json: bool) -> None:
    """Print the memory needed at `ctx` tokens. None: the default context size of the commands."""
    at = settle_ctx_size(ctx, model.config.max_seq_len)
    fits = fit_all(model.weights_bytes_in_memory, model.config, at)
    if is_json:
        described = [as_dict(fit) for fit in fits]
        output.write_json({"schema_version": SCHEMA_VERSION, "name": model.name, "fit": described})
    else:
        _show(model, fits)


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


def _show(model: ModelDescription, fits: list[Fit]) -> None:
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
    print_answer(f"{model.name}: weights of {weights}; contexts in tokens.", table, *advice)
