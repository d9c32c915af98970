"""Reads the prompt from -p, a file or stdin, and checks that it is UTF-8. Reads a batch from stdin.

Never waits for input from a terminal: a command without a prompt is an error.
"""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from exl_core.errors import RequestError
from exl_core.files import PROMPT_LIMIT_BYTES, decode_text, inherited_pipe, read_text_file

STDIN = "-"
_NOTICE_AFTER_S = 2.0
_PIECE_BYTES = 1 << 20


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The whole prompt. Raises RequestError if there is none."""
    if prompt is not None and file is not None:
        raise RequestError(
            "two prompts are given",
            got="-p and -f",
            next_step="Keep one; text piped to stdin is appended to -p.",
        )
    if file is not None and file != STDIN:
        text = _read_file(Path(file))
    elif prompt is None or STDIN in (prompt, file):
        text = _read_stdin(is_required=True)
    else:
        piped = _read_stdin(is_required=False)
        text = f"{prompt}\n{piped}" if piped else prompt
    if not text:
        raise RequestError(
            "the prompt is empty",
            expected="text",
            next_step="Use -p TEXT or -f FILE, or pipe a text to stdin. A word without an option "
            "is the model.",
        )
    check_encodable(text, "the prompt")
    return text


def check_chat_options(
    is_chat: bool, given: Sequence[str], *, parse_special: bool, truncate_left: bool
) -> None:
    """Refuse options that would have no effect. `given`: names of options of a conversation."""
    if given and not is_chat:
        raise RequestError(f"{given[0]} is for conversations", next_step="Add --chat.")
    if parse_special and is_chat:
        raise RequestError(
            "--parse-special is for prompts without a template",
            next_step="Drop --chat or it; --allow-special is for messages.",
        )
    if truncate_left and is_chat:
        raise RequestError(
            "--truncate-left would cut the beginning of the chat template",
            expected="--chat or --truncate-left",
            got="both",
        )


def as_messages(
    prompt: str | Sequence[Mapping[str, object]], system: str | None
) -> list[Mapping[str, object]]:
    """A user message, or the messages of a conversation, after the system prompt. Messages that
    have a system prompt keep theirs."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    has_own = any(message.get("role") == "system" for message in prompt)
    if system is None or has_own:
        return [*prompt]
    return [{"role": "system", "content": system}, *prompt]


def _read_file(path: Path) -> str:
    descriptor = inherited_pipe(path)
    if descriptor is not None:
        with open(descriptor, "rb", closefd=False) as pipe:
            return _read_stream(pipe, str(path), is_required=True)
    return read_text_file(path, PROMPT_LIMIT_BYTES).removesuffix("\n")


def _read_stdin(*, is_required: bool) -> str:
    stdin = sys.stdin
    if stdin is None or stdin.isatty():
        if is_required:
            raise RequestError(
                "no prompt",
                expected="-p TEXT, -f FILE or text piped to stdin",
                got="a terminal" if stdin is not None else "a closed stdin",
                next_step="For a conversation use 'exl chat'.",
            )
        return ""
    return _read_stream(stdin.buffer, "stdin", is_required=is_required)


def _read_stream(stream: BinaryIO, where: str, *, is_required: bool) -> str:
    """Text up to the end of stdin or of a pipe, which is bounded by what a context can hold."""
    data = _read_up_to(stream, where, PROMPT_LIMIT_BYTES, is_required=is_required)
    if len(data) > PROMPT_LIMIT_BYTES:
        raise RequestError(
            f"the text on {where} is longer than any context",
            expected=f"at most {PROMPT_LIMIT_BYTES} bytes",
        )
    return decode_text(data, where).removesuffix("\n")


def read_stdin_lines(limit_bytes: int) -> bytes:
    """All of stdin, as the lines of a batch."""
    stdin = sys.stdin
    if stdin is None or stdin.isatty():
        raise RequestError(
            "no prompts",
            where="stdin",
            expected="JSON Lines piped to stdin",
            got="a terminal" if stdin is not None else "a closed stdin",
        )
    data = _read_up_to(stdin.buffer, "stdin", limit_bytes, is_required=True)
    if len(data) > limit_bytes:
        raise RequestError(
            "the batch is too large", where="stdin", expected=f"at most {limit_bytes} bytes"
        )
    return data


def _read_up_to(stream: BinaryIO, where: str, limit_bytes: int, *, is_required: bool) -> bytes:
    """The bytes up to the end of the stream, or some more than `limit_bytes` of them."""
    _tell_that_it_waits(stream.fileno(), where, is_required=is_required)
    data = bytearray()
    try:
        # In pieces: `read(n)` allocates n bytes, whatever it reads.
        while len(data) <= limit_bytes and (piece := stream.read(_PIECE_BYTES)):
            data += piece
    except OSError as error:
        raise RequestError(f"{where} cannot be read", got=error.strerror) from error
    return bytes(data)


def _tell_that_it_waits(descriptor: int, where: str, *, is_required: bool) -> None:
    """After 2 s without input, print that exl waits for it. A pipe whose writer neither writes
    nor closes it would look like a hang."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    ready, _, _ = select.select([descriptor], [], [], _NOTICE_AFTER_S)
    if not ready and sys.stderr is not None:
        hint = "" if is_required else "; if there is no input, add '< /dev/null'"
        print(f"exl: waiting for text on {where}{hint}", file=sys.stderr, flush=True)


def check_texts(texts: Iterable[str], option: str) -> None:
    """Refuse values of `option` that no reply can contain: empty ones, and those not UTF-8."""
    for text in texts:
        check_encodable(text, option)
        if not text:
            raise RequestError(f"{option} is empty", expected="a text of at least one character")


def check_encodable(text: str, what: str) -> None:
    """Refuse text that is not UTF-8. Python decodes such bytes of the command line to lone
    surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} is not valid text",
            expected="UTF-8",
            got=f"a stray byte at character {error.start}",
        ) from error
