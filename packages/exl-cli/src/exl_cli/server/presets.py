"""Sampler settings of requests that do not choose: from the model, from a file, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl_cli.server.errors import ApiError
from exl_cli.server.settings import COMPLETION, read_settings
from exl_core.errors import RequestError
from exl_core.files import CONFIG_LIMIT_BYTES, read_optional_json_object, read_text_file

MODEL, NEUTRAL = "model", "neutral"
_OF_MODELS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def check_preset(preset: str) -> None:
    """Raises RequestError for a preset that does not exist or has wrong settings."""
    if preset not in (MODEL, NEUTRAL):
        _of_file(Path(preset))


def defaults_of(preset: str, model: Path) -> Mapping[str, Any]:
    """Arguments of SamplerParams for the model at this path.

    `preset` is `model`, `neutral`, or the path of a JSON file of request fields.

    A model's recommendation is in its generation_config.json. Keys of that file that name no
    sampler setting are not used, nor is the file if it says `"do_sample": false`.
    """
    if preset == NEUTRAL:
        return {}
    if preset != MODEL:
        return _of_file(Path(preset))
    path = model / "generation_config.json"
    given = read_optional_json_object(path, RequestError) if model.is_dir() else {}
    if given.get("do_sample") is False:
        return {}
    return _read({name: given[name] for name in _OF_MODELS if name in given}, path)


def _of_file(path: Path) -> Mapping[str, Any]:
    try:
        given = json.loads(read_text_file(path, CONFIG_LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        raise RequestError("a preset is not JSON", where=path, got=str(error)) from error
    if not isinstance(given, dict):
        raise RequestError("a preset is not a JSON object", where=path)
    return _read(given, path)


def _read(given: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    try:
        settings, others = read_settings(COMPLETION, given)
    except ApiError as error:
        raise RequestError("a preset has a wrong value", where=path, got=error.message) from error
    if others:
        raise RequestError(
            "a preset has a field that is no setting of the sampler",
            where=path,
            got=next(iter(others)),
        )
    return settings.sampler
