"""Models of a folder: descriptions of those that are not loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exl_cli.engine_options import EngineChoices
from exl_cli.option_groups import RunningOptions
from exl_cli.server.models import ModelFacts, ModelHost, Prompting
from exl_cli.server.presets import defaults_of
from exl_cli.serving import FileOpener
from support import tiny_models
from support.scripted import reply_with
from support.server import Opening, Running, running, scripted_runtime

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
