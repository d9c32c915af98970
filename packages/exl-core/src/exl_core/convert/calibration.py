"""Calibration rows of a conversion: tokens of a given text, or of text that the model generates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from exl_core.arch.spec import ModelConfig
from exl_core.cache.format import PAGE_SIZE, KVFormat, kv_bytes_per_token
from exl_core.engine.engine import EngineOptions
from exl_core.engine.request import Request
from exl_core.errors import RequestError
from exl_core.generate.dynamic import DynamicGenerator
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel
from exl_core.tokenizer.base import Tokenizer

OnProgress = Callable[[int, int], None]
"""Called with the number of tokens generated so far and their total."""

AT_ONCE = 16  # most rows that are generated in one batch
_PLACEHOLDER = "\u0001"  # user message that marks its place in the rendered template


class CalibrationRows(NamedTuple):
    """`token_ids` int64 [rows, length]; `sha256` of their little-endian bytes, in hexadecimal."""

    token_ids: Tensor
    sha256: str
    description: str


def rows_of_texts(
    texts: Iterable[str], tokenizer: Tokenizer, *, rows: int, length: int, name: str
) -> CalibrationRows:
    """First tokens of the texts, which are encoded one by one and concatenated.

    Every row begins as a text does, with BOS if the tokenizer adds one. Models that were trained
    with BOS are far from their source without it. Raises RequestError with the expected and the
    found number of tokens if the texts are too short.
    """
    start, ids = tokenizer.encode("", add_bos=None), list[int]()
    found: list[list[int]] = []
    for text in texts:
        ids += tokenizer.encode(text, add_bos=None)
        while len(found) < rows:
            added = [] if ids[: len(start)] == start else start
            taken = length - len(added)
            if len(ids) < taken:
                break
            found.append(added + ids[:taken])
            del ids[:taken]
        if len(found) == rows:
            break
    if len(found) < rows:
        raise RequestError(
            "the calibration text is too short",
            where=name,
            expected=f"{rows * length} tokens: {rows} rows of {length}",
            got=len(found) * length + len(ids),
            next_step="Give a longer text, or leave --calibration out: the model then writes it.",
        )
    return _with_digest(torch.tensor(found, dtype=torch.int64), name)


def rows_at_once(config: ModelConfig, length: int, memory_bytes: int) -> tuple[int, int]:
    """Number of rows (at least one) that a model can generate in one batch if their keys, values
    and states may take `memory_bytes`, and the bytes that they take."""
    row = kv_bytes_per_token(config.kv_shapes, KVFormat.FP16) * (length + PAGE_SIZE)
    row += config.state_bytes
    count = max(1, min(AT_ONCE, memory_bytes // row))
    return count, count * row


def rows_of_model(
    loaded: LoadedModel,
    *,
    rows: int,
    length: int,
    seed: int,
    at_once: int,
    on_progress: OnProgress | None = None,
) -> CalibrationRows:
    """Rows that the model generates at temperature 1.

    Half of the rows are generated after BOS, which is left out if the tokenizer does not add it to
    texts: their first tokens, which all others attend to, are any tokens then. If the model has a
    chat template, the other half begin with the part of the template before a user's message.
    Generation continues after a token that would end a reply, because the requests have no stop
    tokens. Rows are equal for equal model, sizes (`at_once` included) and seed.
    """
    starts = _starts(loaded)
    adds_bos = bool(loaded.tokenizer.encode("", add_bos=None))
    left_out = 0 if adds_bos or length >= loaded.config.max_seq_len else 1
    options = EngineOptions(cache_tokens=at_once * (length + PAGE_SIZE), max_batch=at_once)
    generator = DynamicGenerator(loaded, options)
    jobs, total = [], 0
    for row in range(rows):
        start = starts[row % len(starts)]
        sampler = SamplerParams(temperature=1.0, seed=seed + row)
        count = length - len(start) + (left_out if start is starts[0] else 0)
        jobs.append(generator.enqueue(Request(start, max_tokens=count, sampler=sampler)))
        total += count
    written: dict[int, tuple[int, ...]] = {}
    done = 0
    while generator.num_remaining_jobs:
        for result in generator.iterate():
            if result.error is not None:
                raise result.error
            done += len(result.token_ids)
            if result.finish is not None:
                # All tokens: those without a text may come with no other result.
                prompt_ids = tuple(result.job.request.prompt_ids)
                written[result.job.serial] = prompt_ids + result.finish.token_ids
        if on_progress is not None:
            on_progress(done, total)
    ids = torch.tensor([written[job.serial][-length:] for job in jobs], dtype=torch.int64)
    return _with_digest(ids, f"written by the model, seed {seed}")


def _starts(loaded: LoadedModel) -> list[tuple[int, ...]]:
    """Token prefixes of the rows, used in rotation."""
    tokenizer = loaded.tokenizer
    first = tokenizer.bos_id
    if first is None:
        first = next(iter(tokenizer.eos_ids), 0)
    starts: list[tuple[int, ...]] = [(first,)]
    if loaded.template is not None:
        text = loaded.template.render([{"role": "user", "content": _PLACEHOLDER}])
        before = text.partition(_PLACEHOLDER)[0]
        ids = tokenizer.encode(before, add_bos=False, allow_special=True)
        if ids:
            starts.append(tuple(ids))
    return starts


def _with_digest(token_ids: Tensor, description: str) -> CalibrationRows:
    digest = hashlib.sha256(token_ids.numpy().astype("<i8").tobytes()).hexdigest()
    return CalibrationRows(token_ids, digest, description)
