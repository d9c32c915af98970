"""`scripts/ray_serve.py`: replicas of a model behind Ray Serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from support.commands import Command

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ray_serve.py"
START_S = 150.0
BODY = {"prompt": "abc", "max_tokens": 12, "temperature": 0}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_two_replicas_answer_like_one_process(
    exl: Command, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed", exc_type=ImportError)
    text = exl(
        "generate", tiny_llama_dir, "-p", "abc", "-n", 12, "--temp", 0, "--device", "cpu"
    ).out
    port, log = free_port(), tmp_path / "log"
    start = [sys.executable, str(SCRIPT), str(tiny_llama_dir), "--device", "cpu"]
    with log.open("wb") as written:
        server = subprocess.Popen(
            [*start, "--port", str(port)], stdout=written, stderr=written, env=os.environ
        )
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        until = time.monotonic() + START_S
        while True:
            assert server.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < until, log.read_text(encoding="utf-8")
            try:
                if httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            time.sleep(0.5)
        for _ in range(4):
            answer = httpx2.post(url, json=BODY, timeout=60).json()
            assert answer["choices"][0]["text"] == text.removesuffix("\n")
        streamed = httpx2.post(url, json={**BODY, "stream": True}, timeout=60).text
        assert streamed.rstrip().endswith("data: [DONE]")
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(40)
        finally:
            server.kill()
            server.wait()
