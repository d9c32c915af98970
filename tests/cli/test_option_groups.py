"""Option groups: commands that share a group have the same options."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from exl_cli import option_groups
from exl_cli.commands.chat import chat
from exl_cli.commands.generate import generate
from exl_cli.engine_options import EngineChoices
from exl_cli.main import app
from exl_cli.model_options import ModelOptions
from exl_cli.option_groups import PromptOptions, RunningOptions
from exl_cli.reply_options import ReplyOptions
from exl_cli.sampling_options import SamplingOptions
from exl_core.sampling.params import SamplerParams
from support.scripted import ByteTokenizer

NOT_OPTIONS = {  # sets of token ids, which need a vocabulary, and classifier-free guidance
    "token_bias",
    "allowed_tokens",
    "banned_tokens",
    "xtc_protected",
    "dry_breakers",
    "dry_max_ngram",
    "cfg_scale",
}


def test_generate_and_chat_have_the_same_options_with_the_same_defaults() -> None:
    groups = (SamplingOptions, RunningOptions, PromptOptions, ReplyOptions)
    shared = {field.name for group in groups for field in fields(group)}
    taken = []
    for verb in (generate, chat):
        parameters = inspect.signature(verb).parameters
        assert shared <= set(parameters)
        taken.append(
            {name: (parameters[name].annotation, parameters[name].default) for name in shared}
        )
    assert taken[0] == taken[1]


def test_every_command_that_loads_a_model_takes_the_changes_to_it() -> None:
    loading = ["generate", "chat", "run", "serve-lite", "bench"]
    measuring = ["perplexity", "divergence", "compare-layers", "humaneval", "report", "tasks"]
    commands: Any = get_command(app)
    verbs = [commands.commands[name] for name in loading]
    measurements = commands.commands["eval"].commands
    verbs += [measurements[name] for name in (*measuring, "throughput", "acceptance")]
    for verb in verbs:
        names = {parameter.name for parameter in verb.params}
        assert names >= {field.name for field in fields(ModelOptions)}, verb.name


def test_every_setting_of_the_sampler_has_an_option() -> None:
    changed = SamplingOptions(
        **{  # type: ignore[arg-type]  # a different value for each setting
            "temp": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repeat_penalty": 2.0, "seed": 3,
            "top_a": 0.5, "typical": 0.5, "tfs": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.5,
            "top_n_sigma": 1.5,
            "mirostat": 5.0, "mirostat_eta": 0.5, "mirostat_version": 1, "smoothing_curve": 2.0,
            "skew": 1.0, "dynatemp": "0.5,2,3",
            "smoothing": 1.0, "temp_last": True, "frequency_penalty": 1.0, "presence_penalty": 1.0,
            "repeat_range": 5, "repeat_decay": 5, "dry_multiplier": 1.0, "dry_base": 2.0,
            "dry_allowed_length": 5, "dry_range": 50, "dry_breakers": "?",
        }
    )  # fmt: skip
    default, params = SamplingOptions(seed=1), changed.params()
    assert all(getattr(changed, one.name) != getattr(default, one.name) for one in fields(changed))
    same = {
        field.name
        for field in fields(SamplerParams)
        if getattr(params, field.name) == getattr(default.params(), field.name)
    }
    assert same == NOT_OPTIONS


def test_help_has_panels_of_options() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for verb in ("generate", "chat"):
        panels = {option.rich_help_panel for option in commands[verb].params[1:]}
        assert {"Sampling", "Sampling: repetition", "Running", "Drafts"} <= panels


@pytest.mark.parametrize(
    ("option", "texts"),
    [(None, {"\n", ":", '"', "*"}), (r"\tx", {"\t", "x"}), ("", set()), ("none", set())],
)
def test_dry_breakers_option(option: str | None, texts: set[str]) -> None:
    tokenizer = ByteTokenizer()
    chosen: dict[str, Any] = {} if option is None else {"dry_breakers": option}
    breakers = SamplingOptions(dry_multiplier=1.0, **chosen).params(tokenizer).dry_breakers
    special = set(tokenizer.special_tokens.values())
    assert (special <= breakers) == bool(texts)
    assert {tokenizer.token_text(i) for i in breakers - special} == texts
    assert SamplingOptions(**chosen).params(tokenizer).dry_breakers == frozenset()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, True), ({"device": "cpu"}, False), ({"exact": True}, False), ({"device": "cuda"}, True)],
)
def test_ranks_that_start_ahead_start_gpus_only_for_a_load_on_gpus(
    given: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception):
        pass

    def start(num_ranks: int, *, may_use_gpu: bool) -> None:
        raise StartedError(num_ranks, may_use_gpu)

    monkeypatch.setattr(option_groups, "resolve_model", Path)
    monkeypatch.setattr(option_groups, "start_ahead", start)
    options = RunningOptions(tensor_parallel="2", **given)
    with pytest.raises(StartedError) as caught:
        options.open("model", EngineChoices(), is_quiet=True)
    assert caught.value.args == (2, expected)
