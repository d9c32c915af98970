"""Paths that name a FIFO, a device or an endless text: an error in one line, never a wait."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exl_cli import prompts
from exl_cli.chat import session, transcript
from exl_core.convert.measurement import Measurement
from exl_core.errors import ExlError, RequestError
from exl_core.files import open_regular, read_bytes, read_text_file
from exl_core.formats.containers.mapped import MappedFile
from exl_core.formats.containers.safetensors import read_header
from exl_core.lora.config import read_adapter_config
from exl_core.tokenizer.gguf_fields import read_gguf_fields
from exl_eval.report import _read_record
from exl_eval.requests_file import read_workload
from exl_eval.texts import read_text
from exl_eval.window_file import WindowFile

pytestmark = pytest.mark.timeout(60)  # a test that waits for a writer never ends

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "regular": ("x", lambda path: open_regular(path, RequestError)),
    "bytes": ("x", lambda path: read_bytes(path, RequestError, 10)),
    "text": ("x.txt", read_text_file),
    "eval text": ("x.txt", read_text),
    "eval rows": ("x.jsonl", read_text),
    "eval table": ("x.parquet", read_text),
    "workload": ("x.jsonl", read_workload),
    "record": ("x.json", _read_record),
    "windows": ("x.windows", lambda path: WindowFile(path, {})),
    "transcript": ("x.json", transcript.load),
    "measurement": ("x.json", Measurement.read),
    "weights": ("x.safetensors", read_header),
    "mapped": ("x.safetensors", MappedFile),
    "gguf": ("x.gguf", read_gguf_fields),
    "adapter": ("adapter_config.json", lambda path: read_adapter_config(path.parent)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_is_refused_at_once(tmp_path: Path, name: str) -> None:
    file_name, read = READERS[name]
    path = tmp_path / file_name
    os.mkfifo(path)
    with pytest.raises(ExlError, match="a regular file") as caught:
        read(path)
    assert file_name in str(caught.value)


@pytest.mark.parametrize(
    ("path", "kind"), [("/dev/zero", "a device"), ("/dev/null", "a device"), ("/", "a directory")]
)
def test_devices_and_directories_are_named(path: str, kind: str) -> None:
    with pytest.raises(RequestError, match=f"expected a regular file, got {kind}"):
        read_text_file(Path(path))


def test_a_file_beyond_its_limit_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(RequestError, match=r"too large.*got 1099511627776"):
        read_text_file(path)
    with pytest.raises(RequestError, match="too large"):
        read_bytes(Path("/proc/self/maps"), RequestError, 10)  # says that its size is 0


@pytest.mark.parametrize("option", ["-f", "--json-schema", "--grammar"])
def test_options_of_generate_refuse_devices(exl: Any, tiny_llama_dir: Path, option: str) -> None:
    prompt = () if option == "-f" else ("-p", "x")
    done = exl("generate", "-m", tiny_llama_dir, *prompt, option, "/dev/zero")
    assert "/dev/zero: cannot be read (expected a regular file, got a device)" in done.error_line(2)


def test_key_files_are_regular_and_short(exl: Any, tmp_path: Path) -> None:
    fifo, long = tmp_path / "keys", tmp_path / "long"
    os.mkfifo(fifo)
    long.write_bytes(b"x" * 2**21)
    for path, expected in ((fifo, "a regular file"), (long, "too large")):
        assert expected in exl("serve-lite", "--api-key-file", path).error_line(2)


def test_a_model_with_a_fifo_is_refused(exl: Any, tiny_llama_dir: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        folder = tmp_path / name
        shutil.copytree(tiny_llama_dir, folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        assert "a regular file" in exl("generate", "-m", folder, "-p", "x").error_line(3)


def test_endless_stdin_is_refused(exl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "PROMPT_LIMIT_BYTES", 1000)
    assert "longer than any context" in exl("generate", stdin=b"x" * 1001).error_line(2)
    with Path("/dev/zero").open(encoding="utf-8") as zeros:
        monkeypatch.setattr(sys, "stdin", zeros)
        with pytest.raises(RequestError, match="longer than any context"):
            prompts.read_prompt(None, None)


def test_an_endless_line_of_a_chat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PROMPT_LIMIT_BYTES", 1000)
    with Path("/dev/zero").open(encoding="utf-8") as zeros:
        monkeypatch.setattr(sys, "stdin", zeros)
        with pytest.raises(RequestError, match=r"line 1.*longer than any context"):
            list(session._stdin_lines())
