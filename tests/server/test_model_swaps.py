"""Models of a folder that are described, refused before a swap, or fail during it."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exl_cli.engine_options import EngineChoices
from exl_cli.option_groups import RunningOptions
from exl_cli.server.models import ModelFacts, ModelHost, Prompting
from exl_cli.server.presets import defaults_of
from exl_cli.serving import FileOpener
from exl_core.errors import ModelNotFoundError
from exl_core.session import preflight
from exl_core.session.runtime import Runtime
from support import tiny_models
from support.scripted import reply_with
from support.server import LIMIT_S, Opening, Running, error_of, running, scripted_runtime

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models with weights, and models that are broken in one way each."""
    home = tmp_path_factory.mktemp("models")
    for name, layers in (("one", 2), ("two", 1)):
        (home / name).mkdir()
        tiny_models.save(tiny_models.tiny_llama(num_hidden_layers=layers), home / name)
    (home / "two" / "generation_config.json").write_text('{"temperature": 0.5}')
    for name in ("cut", "other_shape", "no_tokenizer", "wrong_defaults"):
        shutil.copytree(home / "two", home / name)
    weights = home / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    config = home / "other_shape" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 320}))
    for file in (home / "no_tokenizer").glob("*token*"):
        file.unlink()
    (home / "wrong_defaults" / "generation_config.json").write_text('{"temperature": "hot"}')
    return {path.name: path for path in sorted(home.iterdir())}


@pytest.fixture(scope="module")
def one(models: dict[str, Path]) -> Iterator[Running]:
    options = RunningOptions(device="cpu", threads=1, ctx_size=128)
    opener = FileOpener(options, EngineChoices(), max_batch=2, cache_tokens=512)
    host = ModelHost(
        opener.load(str(models["one"])),
        others=models,
        opener=opener,
        prompting=Prompting(lambda path: defaults_of("model", path)),
    )
    with running(host) as server:
        yield server


def ask(one: Running, model: str | None = None) -> Any:
    body = {"prompt": "Q", "max_tokens": 1, "temperature": 0}
    return one.post(COMPLETIONS, body if model is None else {**body, "model": model})


def test_show_describes_a_model_from_its_files(one: Running) -> None:
    assert ask(one, "one").is_success
    before = one.host.resident
    shown = one.post("/api/show", {"model": "two"}).json()
    assert shown["parameters"] == "temperature 0.5"
    assert shown["model_info"] == {"general.architecture": "llama", "llama.context_length": 128}
    assert shown["details"]["format"] == "safetensors"
    assert one.host.resident is before, "no model is swapped"
    assert one.post("/api/show", {"model": "cut"}).status_code == 500
    assert one.post("/api/show", {"model": "three"}).status_code == 404
    assert one.host.resident is before
    assert ask(one, "two").is_success
    loaded = one.post("/api/show", {"model": "two"}).json()
    assert loaded == shown, "a model has the same description before and after its load"


def test_a_name_may_have_the_tag_that_ollamas_clients_add(one: Running) -> None:
    assert ask(one, "one:latest").json()["model"] == "one"
    assert one.post("/api/show", {"model": "two:latest"}).json()["parameters"] == "temperature 0.5"
    assert ask(one, "one:1b").status_code == 404


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cut", "model.safetensors"),
        ("other_shape", "wrong shape"),
        ("no_tokenizer", "tokenizer"),
        ("wrong_defaults", "temperature"),
    ],
)
def test_a_broken_model_does_not_unload_the_one_before(one: Running, name: str, said: str) -> None:
    assert ask(one, "one").is_success
    before = one.host.resident
    answer = ask(one, name)
    assert answer.status_code in (400, 500) and said in answer.json()["error"]["message"]
    assert one.host.resident is before
    assert one.http.get("/health").json() == {"status": "ok", "model": "one"}
    assert ask(one).json()["model"] == "one"


def test_a_model_that_cannot_fit_does_not_unload_the_one_before(
    one: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(one, "one").is_success
    before = one.host.resident
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda _: -(10**12))
    error = error_of(ask(one, "two"), 503)
    assert error["code"] == "out_of_memory" and "do not fit" in error["message"]
    assert one.host.resident is before
    # The memory of the model that is unloaded counts as free.
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda _: 0)
    assert before is not None and before.runtime.loaded.weights_bytes > 0
    assert ask(one, "two").is_success


@dataclass
class Failing:
    """Opener of models whose load fails after the check: `bad` always, others while `fails`.

    `gate` holds every load back until it is set.
    """

    fails: set[str] = field(default_factory=lambda: {"bad"})
    loaded: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def load(self, path: Path) -> Runtime:
        assert self.gate.wait(LIMIT_S)
        self.loaded.append(path.name)
        if path.name in self.fails:
            raise ModelNotFoundError("the weights are gone", where=path)
        return scripted_runtime(reply_with("x"), name=path.name)

    def host(self) -> ModelHost:
        first = scripted_runtime(reply_with("x"), name="a")
        others = {name: Path(name) for name in ("a", "b", "bad")}
        host = ModelHost(first, others=others, opener=Opening(self.load))
        self.gate.set()
        return host


def health(one: Running) -> Any:
    return one.http.get("/health").json()


def wait_for(one: Running, status: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while health(one)["status"] != status:
        assert time.monotonic() < deadline, health(one)
        time.sleep(0.005)


def test_a_failed_load_is_followed_by_a_load_of_the_former_model() -> None:
    opener = Failing()
    with running(opener.host()) as one:
        assert ask(one, "b").is_success
        opener.gate.clear()
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(ask(one, "bad")))
        asking.start()
        wait_for(one, "loading")
        opener.gate.set()
        asking.join(LIMIT_S)
        assert "the weights are gone" in error_of(answers[0], 500)["message"]
        wait_for(one, "ok")
        assert health(one) == {"status": "ok", "model": "b"}
        assert ask(one).json()["model"] == "b", "requests without a name stay with their model"
    assert opener.loaded == ["b", "bad", "b"]


def test_health_says_unloaded_if_the_former_model_fails_too() -> None:
    opener = Failing()
    with running(opener.host()) as one:
        opener.fails.add("a")
        error_of(ask(one, "bad"), 500)
        wait_for(one, "unloaded")
        assert opener.loaded == ["bad", "a"], "it is tried once"
        opener.fails.remove("a")
        assert ask(one).json()["model"] == "a", "the next request loads again"
        assert health(one) == {"status": "ok", "model": "a"}


def test_a_request_that_waits_for_another_model_comes_before_the_former_one() -> None:
    opener = Failing()
    with running(opener.host()) as one:
        opener.gate.clear()
        threads = []
        for number, name in enumerate(("bad", "b")):
            threads.append(threading.Thread(target=ask, args=(one, name)))
            threads[-1].start()
            deadline = time.monotonic() + LIMIT_S
            while len(one.host._waiting) <= number:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        opener.gate.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert health(one) == {"status": "ok", "model": "b"}
    assert opener.loaded == ["bad", "b"]


def test_facts_of_other_models_use_the_servers_prompt_format() -> None:
    from exl_core.prompt.formats import find_format

    chosen = find_format("alpaca")
    facts = ModelFacts(Path("b.gguf"), "llama", 77, "the model's own template")
    opening = Opening(lambda _: scripted_runtime(reply_with("x")), facts=lambda _: facts)
    host = ModelHost(
        scripted_runtime(reply_with("x"), name="a"),
        others={"b": Path("b.gguf")},
        opener=opening,
        prompting=Prompting(prompt_format=chosen),
    )
    with running(host) as one:
        shown = one.post("/api/show", {"name": "b"}).json()
        assert shown["template"] == chosen.source
        assert shown["details"]["format"] == "gguf"
        assert shown["model_info"]["llama.context_length"] == 77
