"""Open WebUI itself against the server, if its program is installed: lists, chats, other paths."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support.scripted import reply_with
from support.server import NO_TLS, Running, running, scripted_runtime

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

START_S = 200
HI = [{"role": "user", "content": "hi"}]
ASK = {"model": "scripted", "messages": HI, "stream": False}


@pytest.fixture(scope="module")
def webui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    program = shutil.which("open-webui")
    if program is None:
        pytest.skip("open-webui is optional: it is a large program with an environment of its own")
    runtime = scripted_runtime(reply_with("Hello there."), ctx_size=4096)
    with (
        running(runtime) as one,
        OpenWebUI(program, one, tmp_path_factory.mktemp("webui")) as client,
    ):
        yield client


class OpenWebUI:
    """Open WebUI as a process, with the server as OpenAI and as Ollama connection."""

    def __init__(self, program: str, one: Running, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        settings = {
            "DATA_DIR": str(folder),
            "WEBUI_AUTH": "False",
            "WEBUI_SECRET_KEY": "0" * 64,
            "OPENAI_API_BASE_URL": f"{one.url}/v1",
            "OPENAI_API_KEY": "none",
            "OLLAMA_BASE_URL": one.url,
            "RAG_EMBEDDING_ENGINE": "openai",  # no model is fetched
            "OFFLINE_MODE": "true",
            "PYTHONPATH": "",
        }
        command = [program, "serve", "--host", "127.0.0.1", "--port", str(self._port)]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **settings}, stdout=self._log, stderr=self._log
        )

    def __enter__(self) -> httpx2.Client:
        url = f"http://127.0.0.1:{self._port}"
        self._client = httpx2.Client(base_url=url, timeout=60, verify=NO_TLS)
        end = time.monotonic() + START_S
        while not self._is_up():
            assert self._process.poll() is None and time.monotonic() < end, Path(
                self._log.name
            ).read_text()
            time.sleep(0.5)
        signed = self._client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
        self._client.headers["authorization"] = f"Bearer {signed.json()['token']}"
        return self._client

    def _is_up(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx2.TransportError:
            return False

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def content_of(answer: httpx2.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_the_model_is_listed_and_loaded(webui: httpx2.Client) -> None:
    (model,) = webui.get("/api/models").json()["data"]
    assert (model["id"], model["loaded"]) == ("scripted", True)
    assert webui.get("/openai/models").json()["data"][0]["id"] == "scripted"


@pytest.mark.parametrize("path", ["/api/chat/completions", "/openai/chat/completions"])
def test_chats_are_answered(webui: httpx2.Client, path: str) -> None:
    assert content_of(webui.post(path, json=ASK)) == "Hello there."
    params = {"temperature": 0.5, "mirostat": 1, "num_ctx": 512, "stop": ["x"]}
    if path.startswith("/api"):
        assert content_of(webui.post(path, json={**ASK, "params": params})) == "Hello there."
    streamed = webui.post(path, json={**ASK, "stream": True}).text
    assert '"finish_reason": "stop"' in streamed.replace('":"', '": "')
    assert streamed.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/ollama/api/chat", ASK, "Hello there."),
        ("/ollama/api/generate", {"model": "scripted", "prompt": "a", "stream": False}, "Hello"),
        ("/ollama/api/show", {"model": "scripted"}, "completion"),
        ("/ollama/v1/messages", {**ASK, "max_tokens": 20}, "Hello there."),
        ("/openai/responses", {"model": "scripted", "input": "hi"}, "Hello there."),
    ],
)
def test_other_paths_are_answered(webui: httpx2.Client, path: str, body: Any, said: str) -> None:
    answer = webui.post(path, json=body)
    assert answer.status_code == 200 and said in answer.text, answer.text
