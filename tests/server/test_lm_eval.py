"""lm-eval's `local-completions` against the server: the same scores as in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exl_core.session.load import LoadedModel, LoadOptions, load_model
from support import tiny_models
from support.server import running, runtime_of

pytest.importorskip("lm_eval", reason="lm-eval is optional: pip install lm-eval")
pytest.importorskip("tenacity", reason="lm-eval[api] is optional")

from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from exl_eval.harness import HarnessModel

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore"),  # from the harness and its libraries
]

PAIRS = [
    ("The cat", " sat on the mat"),
    ("The cat", " ran off"),
    ("trailing space ", "x"),
    ("A", "B"),
    ("", "abc"),
    ("", "<s>abc"),
    ("ab", "c</s>"),
    ("ab", "</s>"),
    ("<s>ab", "cd"),
    ("0123456789" * 7, "the end"),
]
CONTEXT = 96


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    theirs = tiny_models.tiny_llama(max_position_embeddings=CONTEXT)
    folder = tiny_models.save(theirs, tmp_path_factory.mktemp("tiny"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}', encoding="utf-8")
    return load_model(str(folder), LoadOptions(exact=True, threads=1))


@pytest.fixture(scope="module")
def url(loaded: LoadedModel) -> Iterator[str]:
    with running(runtime_of(loaded, ctx_size=CONTEXT)) as one:
        yield f"{one.url}/v1/completions"


def theirs(url: str, **settings: Any) -> LocalCompletionsAPI:
    fields = {"tokenizer_backend": "remote", "max_length": CONTEXT, "max_retries": 1, **settings}
    return LocalCompletionsAPI(base_url=url, model=None, **fields)


def asked(kind: Any, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_equal_those_of_the_harness_in_process(
    loaded: LoadedModel, url: str, batch_size: int
) -> None:
    requests = [asked("loglikelihood", *pair) for pair in PAIRS]
    ours = HarnessModel.of(loaded).loglikelihood(requests, disable_tqdm=True)
    found = theirs(url, batch_size=batch_size).loglikelihood(requests, disable_tqdm=True)
    for pair, (score, is_greedy), (expected, was_greedy) in zip(PAIRS, found, ours, strict=True):
        assert score == pytest.approx(expected, abs=2e-3), pair
        assert is_greedy == was_greedy, pair


def test_greedy_reply_is_scored_as_greedy(loaded: LoadedModel, url: str) -> None:
    """The harness compares two floats for equality to decide `is_greedy`."""
    ours = HarnessModel.of(loaded)
    free = {"until": [], "max_gen_toks": 6}
    prompts = ["one", "another one", "zz"]
    said = ours.generate_until(
        [asked("generate_until", one, dict(free)) for one in prompts], disable_tqdm=True
    )
    there = theirs(url, max_gen_toks=6, eos_string="</s>")
    assert said == there.generate_until(
        [asked("generate_until", one, dict(free)) for one in prompts], disable_tqdm=True
    )
    plain = [(one, text) for one, text in zip(prompts, said, strict=True) if text.isprintable()]
    assert plain, "a reply that survives being text"
    for pair in plain:
        ((_, is_greedy),) = there.loglikelihood([asked("loglikelihood", *pair)], disable_tqdm=True)
        ((_, was_greedy),) = ours.loglikelihood([asked("loglikelihood", *pair)], disable_tqdm=True)
        assert is_greedy == was_greedy


def test_rolling_scores_equal_those_in_process(loaded: LoadedModel, url: str) -> None:
    request = [asked("loglikelihood_rolling", "The quick brown fox jumps over the dog.")]
    (ours,) = HarnessModel.of(loaded).loglikelihood_rolling(request, disable_tqdm=True)
    (found,) = theirs(url).loglikelihood_rolling(request, disable_tqdm=True)
    assert found == pytest.approx(ours, abs=5e-3)


def test_task_results_equal_those_in_process(
    loaded: LoadedModel, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "docs.jsonl"
    docs = [
        {"question": f"{i} and {i} is", "choices": [str(2 * i), "a bird", "</s>"], "answer": i % 3}
        for i in range(8)
    ]
    data.write_text("\n".join(json.dumps(doc) for doc in docs), encoding="utf-8")
    (tmp_path / "choose.yaml").write_text(
        "task: local_choose\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {data}\ntest_split: test\ndoc_to_text: '{{{{question}}}}'\n"
        "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n",
        encoding="utf-8",
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    samples = []
    for model in (
        HarnessModel.of(loaded),
        theirs(url, num_concurrent=4, batch_size=2),
    ):
        found = simple_evaluate(model, tasks=["local_choose"], task_manager=manager)
        assert found is not None
        samples.append(
            [
                (one["doc_id"], [score for ((score, _),) in one["resps"]], one["acc"])
                for one in sorted(found["samples"]["local_choose"], key=lambda one: one["doc_id"])
            ]
        )
    ours, there = samples
    assert len(ours) == 8
    for (_, expected, right), (_, scores, was_right) in zip(ours, there, strict=True):
        assert scores == pytest.approx(expected, abs=2e-3)
        assert right == was_right
