"""The programs of `examples/` run: on a tiny model by default, on SmolLM2 in the thorough tests."""

from __future__ import annotations

import io
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support import tiny_models
from support.adapters import random_pairs, stored, write_adapter

Run = Callable[..., str]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.tiny_llama(max_position_embeddings=512)
    folder = tiny_models.save(model, tmp_path_factory.mktemp("tiny"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`run(name, *args)` runs an example in this process and returns its stdout."""

    def in_process(name: str, *args: object, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capfd.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return in_process


def run_process(name: str, *args: object, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_are_short_and_documented() -> None:
    programs = sorted(EXAMPLES.glob("*.py"))
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    guide = (EXAMPLES.parent / "docs/python.md").read_text(encoding="utf-8")
    tested = Path(__file__).read_text(encoding="utf-8")
    assert len(programs) == 10
    for program in programs:
        text = program.read_text(encoding="utf-8")
        assert text.startswith('"""'), program
        assert "Usage: " + program.name in text
        assert len(text.splitlines()) <= 50, program
        assert f'"{program.name}"' in tested, program
        assert program.name in guide
    assert "(examples)" in readme


def test_generate(run: Run, tiny: Path) -> None:
    lines = run("generate.py", tiny).splitlines()
    assert any(line.startswith("The best thing about the sea is") for line in lines)
    assert any(line.startswith("The best thing about stars is") for line in lines)


def test_custom_sampling(run: Run, tiny: Path) -> None:
    assert run("custom_sampling.py", tiny).endswith("0 repeated pairs\n")


def test_hidden_states(run: Run, tiny: Path) -> None:
    lines = run("hidden_states.py", tiny).splitlines()
    assert len(lines) == 2
    assert all(-1.0 <= float(line.split()[0]) <= 1.001 for line in lines)


def test_stream(run: Run, tiny: Path) -> None:
    out = run("stream.py", tiny)
    assert re.search(r"\n(length after 12|stop after \d+) tokens\n", out), out
    assert re.search(r"least probable token: 0\.\d\d\n$", out)


def test_chat(run: Run, tiny: Path) -> None:
    assert len(run("chat.py", tiny, stdin="Hello\nAnd again\n")) > 2
    base = tiny_models.save(tiny_models.tiny_llama(), tiny.parent / "base")
    with pytest.raises(SystemExit, match="no chat template"):
        run("chat.py", base)


def test_batch(run: Run, tiny: Path) -> None:
    out = run("batch.py", tiny)
    found = {int(n): int(count) for n, count in re.findall(r"^job (\d): (\d+) tokens:", out, re.M)}
    assert found == {number: 4 + number for number in range(6)}


def test_constrained_json(run: Run, tiny: Path) -> None:
    out = run("constrained_json.py", tiny)
    assert re.search(r"^continent: (Africa|America|Asia|Europe|Oceania)$", out, re.M)
    assert re.search(r"^\d{3}-\d{4}$", out, re.M)


@pytest.mark.parametrize("has_draft_model", [False, True], ids=["n-grams", "model"])
def test_speculative(has_draft_model: bool, run: Run, tiny: Path) -> None:
    out = run("speculative.py", tiny, *[tiny] * has_draft_model)
    assert out.endswith("same text: True\n")
    assert len(re.findall(r"s, \d+ of \d+ draft tokens accepted$", out, re.M)) == 2


def test_lora(run: Run, tiny: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", stored(random_pairs(tiny_models.tiny_llama())))
    texts = dict(re.findall(r"^(\w+): (.*)$", run("lora.py", adapter, tiny), re.M))
    assert set(texts) == {"without", "with", "half"}
    assert texts["without"] != texts["with"]
    with pytest.raises(SystemExit, match="Usage"):
        run("lora.py")


def test_async_server(tiny: Path) -> None:
    """Three clients at once. One sends bytes that are no text, and gets an error line."""
    command = [sys.executable, str(EXAMPLES / "async_server.py"), str(tiny), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().removeprefix("port "))
        clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(3)]
        for client, text in zip(clients, (b"One\n", b"\xff\xfe\n", b"Two\n"), strict=True):
            client.sendall(text)
        replies = []
        for client in clients:
            with client, client.makefile("rb") as file:
                replies.append(file.readline())
        process.terminate()
    assert replies[1].startswith(b"error: ")
    assert all(reply.endswith(b"\n") for reply in replies)


@pytest.mark.thorough
def test_examples_on_a_real_model(tmp_path: Path) -> None:
    """Each in a process of its own, with the default model."""
    assert run_process("generate.py").startswith("Rome")
    assert "five, six" in run_process("stream.py")
    assert "Paris" in run_process("chat.py", stdin="What is the capital of France?\n")
    assert "job 2: 6 tokens: ' 5 6 7'" in run_process("batch.py")
    assert "continent: Europe" in run_process("constrained_json.py")
    accepted = re.findall(r"(\d+) of", run_process("speculative.py"))[1]
    assert int(accepted) > 20
    pair = torch.full((4, 576), 0.01), torch.full((576, 4), 0.5)
    adapter = write_adapter(tmp_path / "a", stored({"model.layers.0.self_attn.q_proj": pair}))
    assert run_process("lora.py", adapter).count(": ") == 3
