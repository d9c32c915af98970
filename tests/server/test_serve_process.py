"""`exl serve-lite` as a process: signals, refused options, restart after a kill."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from exl_cli.main import main
from support import tiny_models
from support.schemas import SLOW_SCHEMA

COMMAND = (
    *(sys.executable, "-m", "exl_cli", "serve-lite", "--port", "0", "--threads", "1"),
    *("--log-level", "warning"),  # so that stderr has only what a test expects
)
WAIT_S = 60.0
LONG = {
    "prompt": "Once upon a time",
    "max_tokens": 1900,
    "temperature": 0,
    "logit_bias": {"2": -100},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny models."""
    home = tmp_path_factory.mktemp("models")
    for name, layers in (("one", 2), ("two", 1)):
        (home / name).mkdir()
        tiny_models.save(tiny_models.tiny_llama(num_hidden_layers=layers), home / name)
    return home


class Process:
    def __init__(self, *args: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline().decode()
        found = re.search(r" at (http://\S+)", line)
        assert found, line + self.process.stderr.read().decode()
        self.http = httpx2.Client(base_url=found[1], timeout=WAIT_S)
        assert self.http.get("/health").status_code == 200

    def ask(self, **fields: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={**LONG, **fields})

    def end(self) -> tuple[int, bytes]:
        code = self.process.wait(WAIT_S)
        assert self.process.stderr is not None and self.process.stdout is not None
        assert self.process.stdout.read() == b""
        return code, self.process.stderr.read()


@contextmanager
def serving(*args: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    one = Process(*args, env=env)
    try:
        with closing(one.http):
            yield one
    finally:
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdout, one.process.stderr):
            assert pipe is not None
            pipe.close()


def wait_until_running(one: Process) -> None:
    deadline = time.monotonic() + WAIT_S
    while "exl_running_replies 0.0" in one.http.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_first_signal_lets_running_replies_finish(folder: Path, number: signal.Signals) -> None:
    answers: list[httpx2.Response] = []
    with serving("-m", str(folder / "one")) as one:
        asking = threading.Thread(target=lambda: answers.append(one.ask(max_tokens=600)))
        asking.start()
        wait_until_running(one)
        one.process.send_signal(number)
        asking.join(WAIT_S)
        assert answers[0].json()["usage"]["completion_tokens"] == 600
        assert one.end() == (0, b"")


@pytest.mark.thorough
def test_template_preset_and_embedding_model_are_used(folder: Path, tmp_path: Path) -> None:
    template, preset = tmp_path / "template.jinja", tmp_path / "preset.json"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    preset.write_text(json.dumps({"temp": 0.5, "top_k": 3}))
    args = ("-m", str(folder / "one"), "--chat-template", str(template), "--preset", str(preset))
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    with serving(*args, "--embedding-model", str(folder / "two")) as one:
        shown = one.http.post("/apply-template", json=messages).json()["prompt"]
        assert shown.removeprefix("<s>") == "<user>hi"
        show = one.http.post("/api/show", json={"model": "one"}).json()
        assert show["parameters"].split("\n") == ["temperature 0.5", "top_k 3"]
        found = one.http.post("/v1/embeddings", json={"input": "a"}).json()
        assert found["model"] == "two" and len(found["data"][0]["embedding"]) > 8
        ranked = one.http.post("/v1/rerank", json={"query": "a", "documents": ["b", "a"]}).json()
        assert ranked["model"] == "two" and ranked["results"][0]["index"] == 1
    with serving("-m", str(folder / "one"), "--format", "vicuna", "--preset", "neutral") as one:
        shown = one.http.post("/apply-template", json=messages).json()["prompt"]
        assert "USER: hi" in shown and shown.rstrip().endswith("ASSISTANT:")
        assert one.http.post("/api/show", json={"model": "one"}).json()["parameters"] == ""


@pytest.mark.thorough
def test_first_signal_ends_the_server_while_a_schema_is_compiled(
    folder: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(folder / "one", tmp_path / "model")
    config = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SLOW_SCHEMA}}
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": wanted}
    answers: list[httpx2.Response] = []
    with serving("-m", str(model)) as one:

        def ask() -> None:
            answers.append(one.http.post("/v1/chat/completions", json=body))

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(1)
        assert not answers
        started = time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        code, log = one.end()
        assert (code, log.count(b"\n")) == (0, 1)
        assert b"503" in log and b"the server is shutting down" in log
        assert time.monotonic() - started < 4  # the limit on compiling is 5 s, and 1 s has passed
        asking.join(WAIT_S)
    assert answers[0].status_code == 503
    assert "shutting down" in answers[0].text


@pytest.mark.thorough
def test_second_signal_ends_the_server_at_once(folder: Path) -> None:
    with serving("-m", str(folder / "one")) as one:

        def ask() -> None:
            with pytest.raises(httpx2.TransportError):
                one.ask()

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until_running(one)
        one.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert one.process.poll() is None, "it waits for the running reply"
        one.process.send_signal(signal.SIGTERM)
        assert one.end() == (130, b"")
        asking.join(WAIT_S)


@pytest.mark.thorough
def test_restart_after_a_kill_during_a_stream(folder: Path) -> None:
    with serving("-m", str(folder / "one")) as one:
        expected = one.ask(max_tokens=5).json()["choices"]
        with one.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as reply:
            next(reply.iter_lines())
            port = str(one.http.base_url.port)
            one.process.kill()
        one.process.wait()
    with serving("-m", str(folder / "one"), "--port", port) as again:
        assert again.ask(max_tokens=5).json()["choices"] == expected


def ask_until_answered(url: str, body: dict[str, Any], deadline: float) -> tuple[str, int]:
    """Text of the reply and number of attempts. Retries while no server listens, and after an
    interrupted reply."""
    with httpx2.Client(base_url=url, timeout=2 * WAIT_S) as client:
        tries, reply = 1, None
        while reply is None:
            try:
                reply = client.post("/v1/completions", json=body)
            except httpx2.TransportError:
                assert time.monotonic() < deadline, "no answer in time"
                time.sleep(0.3)
                tries += 1
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        text: str = reply.json()["choices"][0]["text"]
        return text, tries
    *events, end = reply.text.strip().split("\n\n")
    assert end == "data: [DONE]", "an interrupted stream raises TransportError instead"
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events]
    return "".join(texts), tries


def text_alone(one: Process, body: dict[str, Any]) -> str:
    text: str = one.ask(**{**body, "stream": False}).json()["choices"][0]["text"]
    return text


def waiting_in(one: Process) -> float:
    found = re.search(r"exl_waiting_replies ([\d.]+)", one.http.get("/metrics").text)
    assert found
    return float(found[1])


def bodies_of(num_clients: int) -> list[dict[str, Any]]:
    return [
        {
            **LONG,
            "prompt": f"{'Once upon a time, ' * (i % 5)}number {i % 10} was",
            "max_tokens": 60 + 7 * (i % 13),
            "stream": i % 2 == 0,
        }
        for i in range(num_clients)
    ]


EXACT = "--exact"
"""With this option a reply does not depend on the other requests of its batch."""


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_restarts_after_kills_under_load_serve_all_clients(folder: Path) -> None:
    """Kills the server twice. Each client repeats its request until it is answered."""
    args = ("-m", str(folder / "one"), EXACT)
    bodies = bodies_of(40)
    deadline = time.monotonic() + 600
    with ThreadPoolExecutor(len(bodies)) as clients:
        with serving(*args) as one:
            expected = [text_alone(one, body) for body in bodies]
            url, port = str(one.http.base_url), str(one.http.base_url.port)
            asked = [clients.submit(ask_until_answered, url, body, deadline) for body in bodies]
            wait_until_running(one)
            one.process.kill()
        with serving(*args, "--port", port) as again:
            wait_until_running(again)
            again.process.kill()
        with serving(*args, "--port", port) as last:
            answers = [one.result() for one in asked]
            assert last.http.get("/health").json()["status"] == "ok"
            metrics = last.http.get("/metrics").text
            assert "exl_running_replies 0.0" in metrics and "exl_cache_pages_in_use 0.0" in metrics
    assert [text for text, _ in answers] == expected
    assert sum(tries > 1 for _, tries in answers) > len(bodies) // 2


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_signal_under_load_lets_running_and_waiting_replies_finish(folder: Path) -> None:
    """Running and queued replies finish. Later connections are refused."""
    bodies = [{**body, "max_tokens": 300} for body in bodies_of(30)]
    with serving("-m", str(folder / "one"), EXACT, "--max-batch", "8") as one:
        expected = [text_alone(one, body) for body in bodies]
        url = str(one.http.base_url)
        with ThreadPoolExecutor(len(bodies)) as clients:
            asked = [clients.submit(ask_until_answered, url, body, 0.0) for body in bodies]
            while waiting_in(one) < 30 - 8:
                assert not all(one.done() for one in asked)
                time.sleep(0.01)
            one.process.send_signal(signal.SIGTERM)
            assert [client.result() for client in asked] == [(text, 1) for text in expected]
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{url}/health", timeout=WAIT_S)
        assert one.end() == (0, b"")


@pytest.mark.thorough
def test_models_of_a_folder_are_served_by_name(folder: Path) -> None:
    with serving("--models-dir", str(folder), "--ngram") as one:
        listed = one.http.get("/v1/models").json()["data"]
        assert [(model["id"], model["loaded"]) for model in listed] == [
            ("one", True),
            ("two", False),
        ]
        first, second = (one.ask(model=name, max_tokens=8).json() for name in ("one", "two"))
        assert "error" not in first and "error" not in second, (first, second)
        assert (first["model"], second["model"]) == ("one", "two")
        assert first["choices"] != second["choices"]
        assert "draft_n" in first["timings"]
        assert one.ask(model="one", max_tokens=8).json()["choices"] == first["choices"]
        assert one.ask(model="../one").status_code == 404


@pytest.mark.thorough
def test_keys_from_the_environment_and_a_file(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    args = ("-m", str(folder / "one"), "--host", "0.0.0.0", "--api-key-file", str(keys))
    with serving(*args, env={"EXL_API_KEY": "third"}) as one:
        assert one.ask(max_tokens=1).status_code == 401
        for key in ("first", "second", "third"):
            headers = {"authorization": f"Bearer {key}"}
            assert one.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--host", "0.0.0.0"), "for this machine only"),
        (("--models-dir", "missing"), "no such folder"),
        (("--api-key", ""), "not one that a client could send"),
        (("--api-key", "two words"), "not one that a client could send"),
        (("--models-dir", ".", "--lora", "x"), "belongs to one model"),
        (("--host", "192.0.2.1", "--api-key", "k"), "cannot listen on this address"),
        (("-m", "missing-model"), "no such model"),
    ],
)
def test_bad_options_are_one_line_errors(
    args: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-lite", "--port", "0", *args]) in (2, 3)
    err = capfd.readouterr().err
    assert said in err and err.count("\n") == 1, err


def test_hidden_name_positional_model_and_json_log(folder: Path) -> None:
    command = [sys.executable, "-m", "exl_cli", "serve", str(folder / "one"), "--port", "0"]
    options = ["--threads", "1", "--log-format", "json", "--strict"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        found = re.search(r" at (http://\S+)", process.stderr.readline().decode())
        assert found
        with httpx2.Client(base_url=found[1], timeout=WAIT_S) as http:
            body = {"prompt": "Q", "max_tokens": 3, "temperature": 0}
            assert http.post("/v1/completions", json=body).status_code == 200
            assert http.post("/v1/completions", json={**body, "colour": 1}).status_code == 400
            assert http.post("/v1/completions", json={**body, "model": "y"}).status_code == 404
        process.send_signal(signal.SIGTERM)
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
        assert process.wait(WAIT_S) == 0
    served, unknown, other = lines
    assert (served["path"], served["status"]) == ("/v1/completions", 200)
    assert 1 <= served["reply_tokens"] <= 3 and served["first_token_s"] >= 0
    assert (unknown["status"], unknown["reason"]) == (400, "unsupported parameter: colour")
    assert other["status"] == 404 and "no model" in other["reason"]
