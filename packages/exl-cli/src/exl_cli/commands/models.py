"""`exl pull`, `exl list` and `exl rm`: models in the hub's cache on this machine."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from exl_cli import options, output
from exl_core.errors import ModelNotFoundError, RequestError, printable
from exl_core.session.names import did_you_mean, near_names, parse_hub_name
from exl_core.session.pulled import PulledModel, cache_folder, pulled_models, remove_model
from exl_core.session.resolve import DEFAULT_ALIAS, DEFAULT_PACKAGE

PULL_EXAMPLES = (
    ("exl pull owner/name", "safetensors, or Q4_K_M of a GGUF repository"),
    ("exl pull owner/name-GGUF:Q8_0", "another quantization"),
    ("exl pull owner/name-exl2:4.0bpw", "a branch of an EXL2 repository"),
    ("exl pull https://huggingface.co/owner/name", "a link from the browser"),
)
LIST_EXAMPLES = (
    ("exl list", "models on this machine"),
    ("exl list --json", "machine-readable output"),
)
RM_EXAMPLES = (
    ("exl rm owner/name-GGUF:Q8_0", "delete one model"),
    ("exl rm name-GGUF:Q8", "a prefix that only one model has"),
)
SCHEMA_VERSION = 1

HubNameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="owner/name, owner/name:QUANTIZATION, owner/name:BRANCH, owner/name@REVISION, or a "
        "link of the hub.",
        show_default=False,
    ),
]
PulledNames = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...",
        help="Names that 'exl list' shows, or unique prefixes of them.",
        show_default=False,
        autocompletion=options.complete_pulled,
    ),
]


def pull(name: HubNameArgument, quiet: options.Quiet = False) -> None:
    """Download a model from the hub, or bring it up to date. Prints its path.

    A download that was interrupted continues where it ended. Contents are compared with the hub's
    hashes. The files are in the hub's own cache (HF_HOME), where other programs find them. A name
    without a tag means safetensors, the only GGUF file of a repository, or Q4_K_M. Gated models
    need 'hf auth login'.
    """
    from exl_cli.render import bytes_progress
    from exl_core.session.hub import download

    parsed = parse_hub_name(name)
    if parsed is None:
        raise RequestError(
            "is no name of a model on the hub",
            where=name,
            expected="owner/name, owner/name:Q4_K_M or a link of the hub",
        )
    with bytes_progress(f"pulling {parsed}", is_quiet=quiet) as progress:
        path = download(parsed, progress)
    output.write_text(f"{path}\n")


def list_models(json: options.Json = False) -> None:
    """List the models on this machine that have a name: those in the hub's cache.

    Models that other programs downloaded are listed too. Incomplete ones are continued by
    'exl pull'.
    """
    models = pulled_models()
    if json:
        output.write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "folder": str(cache_folder()),
                "models": [_as_dict(model) for model in models],
            }
        )
        return
    from exl_cli.render import columns_table, format_bytes, from_file, print_answer

    if not models:
        output.write_text(f"No models in {cache_folder()}. 'exl pull owner/name' fetches one.\n")
        return
    table = columns_table("name", "format", "size", "pulled", "")
    for model in models:
        table.add_row(
            from_file(model.name),
            model.format,
            format_bytes(model.size_bytes),
            time.strftime("%Y-%m-%d", time.localtime(model.modified_s)),
            "" if model.is_complete else "incomplete",
        )
    print_answer(table)


def _as_dict(model: PulledModel) -> dict[str, object]:
    return {
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "bytes": model.size_bytes,
        "is_complete": model.is_complete,
    }


def rm(names: PulledNames, quiet: options.Quiet = False) -> None:
    """Delete models from the hub's cache. Files that other models use stay."""
    from exl_cli.render import format_bytes, print_note

    for model in [_one_pulled(name) for name in names]:  # all names are checked before any goes
        freed = remove_model(model)
        if not quiet and sys.stderr is not None:
            print_note(f"removed {printable(model.name)}, {format_bytes(freed)}")


def _one_pulled(name: str) -> PulledModel:
    """The model that `name` alone means. Incomplete ones count too."""
    if name == DEFAULT_ALIAS:
        raise RequestError(
            "the default model is an installed package",
            where=name,
            next_step=f"Remove it with 'python -m pip uninstall {DEFAULT_PACKAGE}'.",
        )
    models = {model.name: model for model in pulled_models()}
    parsed = parse_hub_name(name)
    wanted = str(parsed) if parsed is not None else name
    found = [one for one in models if one.lower() == wanted.lower()]
    if not found:
        from exl_core.session.names import unique_prefix

        found = unique_prefix(wanted, models)
    if len(found) == 1:
        return models[found[0]]
    if found:
        raise ModelNotFoundError(
            "several models have names that begin so",
            where=name,
            got=", ".join(sorted(found)),
            next_step="Write one of them out.",
        )
    raise ModelNotFoundError(
        "no such model in the hub's cache",
        where=name,
        next_step=did_you_mean(near_names(name, models)) or "'exl list' shows them.",
    )
