"""Clients that need older packages than this environment has, each in an environment of its own.

LiteLLM and LlamaIndex need openai 2, LiteLLM huggingface-hub 1 too. Their test installs them, in
the versions below, from the package index that pip is set up for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.scripted import reply_with
from support.server import Running, running, scripted_runtime

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

INSTALL_S = 840
CLIENT_S = 120
PACKAGES = {
    "litellm": ("litellm==1.106.2",),
    "llama_index": ("llama-index-llms-openai-like==0.8.1", "llama-index-core==0.14.25"),
}
SCRIPTS = {
    "litellm": """
import litellm
settings = {"model": "openai/x", "api_base": URL + "/v1", "api_key": "none"}
messages = [{"role": "user", "content": "hi"}]
reply = litellm.completion(messages=messages, **settings)
assert reply.choices[0].message.content == "Hello there.", reply
pieces = litellm.completion(messages=messages, stream=True, **settings)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Hello there."
text = litellm.text_completion(model="text-completion-openai/x", prompt="hi",
                               api_base=URL + "/v1", api_key="none", max_tokens=5)
assert text.choices[0].text == "Hello", text
history = [*messages, reply.choices[0].message.model_dump(), {"role": "user", "content": "again"}]
# The shape of aider's requests (bodies/aider.json): parts with cache_control, a stream.
history[0]["content"] = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
pieces = litellm.completion(messages=history, stream=True, temperature=0, **settings)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Hello there."
""",
    "llama_index": """
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
settings = {"model": "x", "api_base": URL + "/v1", "api_key": "none", "max_retries": 0}
model = OpenAILike(is_chat_model=True, **settings)
asked = [ChatMessage(role="user", content="hi")]
reply = model.chat(asked)
assert reply.message.content == "Hello there.", reply
assert "".join(piece.delta for piece in model.stream_chat(asked)) == "Hello there."
assert str(model.complete("hi")) == "Hello there."
again = [*asked, reply.message, ChatMessage(role="user", content="again")]
assert model.chat(again).message.content == "Hello there."
text = OpenAILike(is_chat_model=False, **settings)
assert str(text.complete("hi", max_tokens=5)) == "Hello"
""",
}


@pytest.fixture(scope="module")
def talker() -> Iterator[Running]:
    with running(scripted_runtime(reply_with("Hello there."), ctx_size=4096)) as one:
        yield one


@pytest.mark.parametrize("name", SCRIPTS)
def test_client_in_its_own_environment(talker: Running, tmp_path: Path, name: str) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    run(INSTALL_S, python, "-m", "pip", "install", "-q", *PACKAGES[name])
    run(CLIENT_S, python, "-c", f"URL = {talker.url!r}\n{SCRIPTS[name]}")


def run(limit_s: float, *command: str | Path) -> None:
    # LiteLLM would fetch a list of prices, LlamaIndex data of a tokenizer.
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False, env=env
    )
    assert done.returncode == 0, f"{sys.version}\n{(done.stdout + done.stderr)[-4000:]}"
