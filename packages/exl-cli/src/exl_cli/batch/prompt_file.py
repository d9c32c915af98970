"""The two files of a batch: prompts in, records of replies out, both as JSON Lines.

A line of the prompts is an object with `prompt` (a text) or `messages` (a conversation), and
optionally `id` and `max_tokens`. A record of the output has the line's `index` and `id`, and either
the reply or `error`. Records are in the order of the prompts. `key` is a digest of the line and of
the options that decide the reply; a later run continues after the last record whose key it would
write itself. Prompts from stdin are read to the end first, so that a run that gets the same ones
continues too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from exl_cli.batch.job import Messages, PromptJob
from exl_cli.prompts import STDIN, check_encodable, read_stdin_lines
from exl_cli.server.fields import as_whole
from exl_core.errors import RequestError, check_known
from exl_core.files import is_present, open_regular, parse_json_object, read_bytes

FILE_LIMIT_BYTES = 4 * 2**30
_KEYS = ("prompt", "messages", "id", "max_tokens")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One prompt. `index` counts the prompts from 0. `limit`: most tokens of the reply; None: the
    job's."""

    index: int
    prompt: str | Messages
    key: str
    id: str | int | None = None
    limit: int | None = None

    @property
    def place(self) -> dict[str, object]:
        """The first fields of its record."""
        return {"index": self.index, "key": self.key}


def read_batch(path: Path, job: PromptJob) -> list[BatchLine]:
    """All prompts of the file, or of stdin for the path `-`. Empty lines are skipped."""
    settings = repr((job.spec, job.limit, job.is_chat, job.parse_special, job.truncates, job.stop))
    settings += repr((job.constraints, job.conversation, job.replying, job.sampling))
    base = hashlib.sha256(settings.encode("utf-8", "surrogateescape"))
    found: list[BatchLine] = []
    is_stdin = str(path) == STDIN
    place = "stdin" if is_stdin else str(path)
    data = (
        read_stdin_lines(FILE_LIMIT_BYTES)
        if is_stdin
        else read_bytes(path, RequestError, FILE_LIMIT_BYTES)
    )
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            digest = base.copy()
            digest.update(line.strip())
            where = f"{place}, line {number}"
            found.append(_parse(line, len(found), digest.hexdigest()[:16], where))
    if not found:
        raise RequestError("the batch has no prompts", where=place)
    return found


def _parse(line: bytes, index: int, key: str, where: str) -> BatchLine:
    fields = parse_json_object(line, RequestError, where)
    check_known(fields, _KEYS, "field", where)
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("a line has one prompt", where=where, expected="prompt or messages")
    own_id, limit = fields.get("id"), as_whole(fields.get("max_tokens"))
    if own_id is not None and (isinstance(own_id, bool) or not isinstance(own_id, str | int)):
        raise RequestError("id is no name", where=where, expected="a text or a number")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise RequestError(
            "max_tokens is no count", where=where, expected="1 or more", got=repr(limit)[:80]
        )
    prompt = _text(fields, where) if "prompt" in fields else _messages(fields, where)
    return BatchLine(index, prompt, key, own_id, limit)


def _text(fields: Mapping[str, object], where: str) -> str:
    prompt = fields["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise RequestError("prompt is no text", where=where, got=repr(prompt)[:80])
    check_encodable(prompt, f"{where}: the prompt")
    return prompt


def _messages(fields: Mapping[str, object], where: str) -> Messages:
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages is no conversation", where=where, got=repr(messages)[:80])
    for message in messages:
        parts = message if isinstance(message, dict) else {}
        texts = parts.get("role"), parts.get("content")
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(
                "a message is not a role and a text",
                where=where,
                expected='{"role": "user", "content": "Hello"}',
                got=repr(message)[:80],
            )
        for text in texts:
            check_encodable(str(text), f"{where}: a message")
    return messages


class Earlier(NamedTuple):
    """Records that an output has already: their number, those with `error`, and all their bytes."""

    done: int = 0
    failed: int = 0
    size_bytes: int = 0


class RecordFile:
    """Output of a batch, one JSON object per line. `write` takes the records that are not there
    yet in any order, and passes each to `write_text` after all before it."""

    def __init__(self, write_text: Callable[[str], None], earlier: Earlier) -> None:
        self.earlier = earlier
        self.done = earlier.done
        self._write_text = write_text
        self._waiting: dict[int, Mapping[str, object]] = {}

    def write(self, index: int, record: Mapping[str, object]) -> None:
        self._waiting[index] = record
        while self.done in self._waiting:
            ready = self._waiting.pop(self.done)
            self._write_text(json.dumps(ready, ensure_ascii=False, allow_nan=False) + "\n")
            self.done += 1


def read_earlier(path: Path, lines: Sequence[BatchLine]) -> Earlier:
    """Records of an earlier run of the same job.

    A line that was cut off at the end is not counted. RequestError if the file has other contents.
    """
    if not is_present(path, RequestError):
        return Earlier()
    done = failed = size = 0
    with open_regular(path, RequestError) as file:
        for number, line in enumerate(file, start=1):
            is_whole = line.endswith(b"\n")
            record = _record(line)
            is_own = number <= len(lines) and (
                record.get("key") == lines[number - 1].key
                if is_whole
                else _begins_record(line, lines[number - 1])
            )
            if not is_own:
                raise RequestError(
                    "the file holds other records than this batch would write",
                    where=f"{path}, line {number}",
                    expected="an unfinished output of the same prompts and options",
                    next_step="Choose another --output, or delete the file.",
                )
            if is_whole:
                done, failed, size = number, failed + ("error" in record), size + len(line)
    return Earlier(done, failed, size)


def _begins_record(text: bytes, line: BatchLine) -> bool:
    """Whether `text` may be the cut-off record of this line."""
    start = json.dumps(line.place).removesuffix("}").encode()
    return text[: len(start)] == start[: len(text)]


def _record(line: bytes) -> dict[str, object]:
    """The object in a line; {} if it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
