"""Workload files: one request per line as a JSON object, with its arrival time.

  arrival_s      seconds after the start; default 0
  prompt         text that is given to the model without a template, or
  prompt_tokens  number of random tokens, different on every line
  max_tokens     exact length of the reply in tokens; stop tokens do not end it
  temperature    default 0 (greedy)

A line with any other field is an error that names the line number. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from exl_core.errors import RequestError, check_known
from exl_core.files import parse_json_object, read_bytes

FILE_LIMIT_BYTES = 256 * 2**20
_KEYS = ("arrival_s", "prompt", "prompt_tokens", "max_tokens", "temperature")


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One line of a workload. `prompt` is a text or a number of random tokens; `line` counts from
    1."""

    line: int
    arrival_s: float
    prompt: str | int
    max_tokens: int
    temperature: float = 0.0


def read_workload(path: Path | None) -> list[TimedRequest]:
    """Reads requests, in the order of arrival. None selects the small example of the package."""
    if path is None:
        data = files("exl_eval").joinpath("data/workload.jsonl").read_bytes()
        return parse_workload(data, "the example workload")
    if path.is_dir() or path.suffix == ".gguf":
        raise RequestError(
            "is a model, not a workload",
            where=path,
            expected="a file of JSON lines",
            next_step="-m MODEL names the model.",
        )
    return parse_workload(read_bytes(path, RequestError, FILE_LIMIT_BYTES), str(path))


def parse_workload(data: bytes, where: str) -> list[TimedRequest]:
    """Parses the lines of a workload. Empty lines are skipped but count as lines."""
    requests = [
        _parse_line(line, number, f"{where}, line {number}")
        for number, line in enumerate(data.splitlines(), start=1)
        if line.strip()
    ]
    if not requests:
        raise RequestError("the workload holds no requests", where=where)
    return sorted(requests, key=lambda request: request.arrival_s)


def _parse_line(line: bytes, number: int, where: str) -> TimedRequest:
    fields = parse_json_object(line, RequestError, where)
    check_known(fields, _KEYS, "field", where)
    if ("prompt" in fields) == ("prompt_tokens" in fields):
        raise RequestError(
            "a request has one prompt", where=where, expected="prompt or prompt_tokens"
        )
    prompt: object = fields.get("prompt")
    if "prompt" not in fields:
        prompt = _count(fields, "prompt_tokens", where)
    elif not isinstance(prompt, str) or not prompt:
        raise RequestError("prompt is no text", where=where, got=repr(prompt)[:80])
    assert isinstance(prompt, str | int)
    return TimedRequest(
        line=number,
        arrival_s=_number(fields, "arrival_s", where),
        prompt=prompt,
        max_tokens=_count(fields, "max_tokens", where),
        temperature=_number(fields, "temperature", where),
    )


def _count(fields: dict[str, object], key: str, where: str) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(
            f"{key} is no count", where=where, expected="1 or more", got=repr(value)[:80]
        )
    return value


def _number(fields: dict[str, object], key: str, where: str) -> float:
    value = fields.get(key, 0.0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value < math.inf:  # type: ignore[operator]
        raise RequestError(
            f"{key} is out of range", where=where, expected="0 or more", got=repr(value)[:80]
        )
    return float(value)  # type: ignore[arg-type]
