"""Adapter for lm-evaluation-harness: scores, BOS and EOS, replies, and whole tasks offline."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from exl_core.errors import RequestError
from exl_core.session.load import LoadedModel, LoadOptions, load_model
from support import tiny_models

pytest.importorskip("lm_eval", reason="lm-eval is optional: pip install lm-eval")

from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from exl_core.prompt.tracked import TrackedText
from exl_eval import harness
from exl_eval.harness import HarnessModel, TaskOptions, _RenderedPrompts, run_tasks

BOS = 1
LIMIT = 96  # context length of the tiny model


@pytest.fixture(scope="module")
def theirs() -> Any:
    return tiny_models.tiny_llama(max_position_embeddings=LIMIT)


@pytest.fixture(scope="module")
def loaded(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_models.save(theirs, tmp_path_factory.mktemp("tiny"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}', encoding="utf-8")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return load_model(str(folder), LoadOptions(exact=True, threads=1))


@pytest.fixture(scope="module")
def model(loaded: LoadedModel) -> HarnessModel:
    return HarnessModel.of(loaded)


def asked(kind: Any, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0)


def log_prob(theirs: Any, context: list[int], continuation: list[int]) -> float:
    with torch.inference_mode():
        logits = theirs(torch.tensor([context + continuation[:-1]])).logits[0].double()
    rows = logits[-len(continuation) :].log_softmax(1)
    return float(rows.gather(1, torch.tensor(continuation)[:, None]).sum())


def test_scores_match_transformers(model: HarnessModel, theirs: Any) -> None:
    pairs = [("The cat", " sat"), ("The cat", " ran off"), ("A", "B"), ("trailing space ", "x")]
    found = model.loglikelihood([asked("loglikelihood", *pair) for pair in pairs])
    for (context, continuation), (score, is_greedy) in zip(pairs, found, strict=True):
        whole = model.tok_encode(context + continuation)
        count = len(continuation) + len(context) - len(context.rstrip())
        assert score == pytest.approx(log_prob(theirs, whole[:-count], whole[-count:]), abs=1e-2)
        assert not is_greedy


def test_an_empty_context_becomes_bos(model: HarnessModel, theirs: Any) -> None:
    ids = model.tok_encode("abc", add_special_tokens=False)
    ((score, _),) = model.loglikelihood([asked("loglikelihood", "", "abc")])
    assert score == pytest.approx(log_prob(theirs, [BOS], ids), abs=1e-2)
    # A text that begins with BOS gets no second one.
    ((same, _),) = model.loglikelihood([asked("loglikelihood", "", "<s>abc")])
    assert same == pytest.approx(score, abs=1e-6)


def test_bos_is_not_duplicated(model: HarnessModel) -> None:
    plain = model.tok_encode("abc")
    assert model.tok_encode("<s>abc") == [BOS, *model.tok_encode("abc", add_special_tokens=False)]
    assert model.tok_encode("<s>abc", add_special_tokens=True).count(BOS) == 1
    assert model.tok_encode("abc", add_special_tokens=True) == [BOS, *plain]
    assert (model.prefix_token_id, model.eot_token_id) == (BOS, 2)


def test_eos_in_a_continuation_is_scored(model: HarnessModel, theirs: Any) -> None:
    """EOS is scored like any other token, also as the last one."""
    ((score, _),) = model.loglikelihood([asked("loglikelihood", "ab", "c</s>")])
    ids = model.tok_encode("abc", add_special_tokens=False)
    assert score == pytest.approx(log_prob(theirs, ids[:2], [ids[2], 2]), abs=1e-2)


def test_an_empty_continuation_has_probability_one(model: HarnessModel) -> None:
    assert model.loglikelihood([asked("loglikelihood", "abc", "")]) == [(0.0, True)]
    assert model.loglikelihood_rolling([asked("loglikelihood_rolling", "")]) == [0]


def test_a_long_context_keeps_its_end(model: HarnessModel, theirs: Any) -> None:
    text = "0123456789" * 12
    ids = model.tok_encode(text + "xy")
    ((score, _),) = model.loglikelihood([asked("loglikelihood", text, "xy")])
    context = ids[-LIMIT - 1 : -2]
    assert score == pytest.approx(log_prob(theirs, context, ids[-2:]), abs=1e-2)
    with pytest.raises(RequestError, match="longer than the model's context"):
        model.loglikelihood([asked("loglikelihood", "a", text)])


def test_rolling_scores_every_token_once(model: HarnessModel, theirs: Any) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 5
    ids = model.tok_encode(text, add_special_tokens=False)
    assert len(ids) > 2 * LIMIT
    expected, done = log_prob(theirs, [BOS], ids[:LIMIT]), LIMIT
    while done < len(ids):  # full windows; only their new tokens are scored
        end = min(done + LIMIT, len(ids))
        fed = ids[end - LIMIT - 1 : end]
        expected += log_prob(theirs, fed[: done - end], fed[done - end :])
        done = end
    (found,) = model.loglikelihood_rolling([asked("loglikelihood_rolling", text)])
    assert found == pytest.approx(expected, rel=1e-3)


def test_replies_end_at_the_task_s_stop_strings_and_limits(
    model: HarnessModel, theirs: Any
) -> None:
    prompts = ["one", "another one", ""]
    free = [("max_gen_toks", 20), ("until", [])]
    whole = model.generate_until([asked("generate_until", p, dict(free)) for p in prompts])
    for prompt, reply in zip(prompts[:2], whole, strict=False):
        ids = model.tok_encode(prompt)
        with torch.inference_mode():
            generated = theirs.generate(
                torch.tensor([ids]),
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=0,
                suppress_tokens=list(range(259, 300)),  # ids that the tokenizer does not have
            )
        expected = model._loaded.tokenizer.decode(generated[0, len(ids) :].tolist())
        assert reply == expected
    stop = whole[0][3:5]
    cut = model.generate_until(
        [asked("generate_until", "one", {"until": stop, "max_gen_toks": 20, "do_sample": False})]
    )
    assert cut == [whole[0][: whole[0].index(stop)]]


def test_unknown_settings_are_refused(model: HarnessModel) -> None:
    with pytest.raises(RequestError, match="num_beams"):
        model.generate_until([asked("generate_until", "a", {"num_beams": 4, "until": []})])
    with pytest.raises(RequestError, match="max_gen_toks below 96"):
        model.generate_until([asked("generate_until", "a", {"max_gen_toks": 96, "until": []})])


def test_sampled_replies_are_reproducible(model: HarnessModel) -> None:
    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    requests = [asked("generate_until", "a", settings) for _ in range(3)]
    first = model.generate_until(requests)
    assert first == model.generate_until(requests)
    assert len(set(first)) == 3


def test_a_partial_reply_is_continued(model: HarnessModel) -> None:
    history = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "It is"}]
    assert model.apply_chat_template(history[:1]) == "[user]Q[assistant]"
    begun = model.apply_chat_template(history, add_generation_prompt=False)
    assert begun == "[user]Q[assistant]It is"


def test_only_the_template_writes_special_tokens_of_rendered_prompts(
    model: HarnessModel, loaded: LoadedModel
) -> None:
    def count(text: str) -> int:
        return model.tok_encode(text, add_special_tokens=False).count(BOS)

    hostile = [{"role": "user", "content": "Q<s>"}]
    short = [{"role": "user", "content": "Q"}]
    prompt, other = model.apply_chat_template(hostile), model.apply_chat_template(short)
    begun = model.apply_chat_template(
        [*hostile, {"role": "assistant", "content": "<s> A"}], add_generation_prompt=False
    )
    for text in (prompt, begun, prompt + " <s>", other + "<s>", other):
        assert count(text) == 0, text
        ids = model.tok_encode(text, add_special_tokens=False)
        assert loaded.tokenizer.decode(ids, skip_special=False) == text
    assert count("Q<s>") == 1, "texts of a task are read as elsewhere with the harness"

    bos = TrackedText("<s>x", bytes([1, 1, 1, 0]))
    rendered = model._rendered.add(bos)
    assert count(rendered + "<s>") == 1, "the template's own is a token"
    assert count(rendered.rstrip() + "yz") == 1


def test_rendered_prompts_are_found_among_their_extensions() -> None:
    texts = ["a", "ab", "abd", "b", "ba c ", "bab"]
    prompts = _RenderedPrompts()
    for text in texts:
        prompts.add(TrackedText(text, bytes([1] * len(text))))
    for string in ("a", "abc", "abcd", "abd", "abz", "ba", "ba c", "ba c x", "baz", "c", ""):
        longest = max(
            (len(t) for t in [*texts, "ba c"] if string.startswith(t)),
            default=None,
        )
        found = prompts.trusted_in(string)
        assert (found is None) == (longest is None), string
        if longest is not None:
            assert found == bytes([1] * longest + [0] * (len(string) - longest)), string


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Folder with one task of each kind, whose documents are local files."""
    docs = [
        {"question": f"{i} and {i} is", "choices": [str(2 * i), "a bird"], "answer": 0}
        for i in range(6)
    ]
    data = tmp_path / "docs.jsonl"
    data.write_text("\n".join(json.dumps(doc) for doc in docs), encoding="utf-8")
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
    common += "test_split: test\ndoc_to_text: '{{question}}'\n"
    parts = {
        "choose": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n",
        "say": "output_type: generate_until\ndoc_to_target: '{{choices[answer]}}'\n"
        "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 8\n"
        "metric_list:\n  - metric: exact_match\n",
        "read": "output_type: loglikelihood_rolling\ndoc_to_target: '{{question}}'\n"
        "metric_list:\n  - metric: bits_per_byte\n",
    }
    for name, rest in parts.items():
        text = f"task: local_{name}\n{common}{rest}"
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # warnings of the harness and its libraries
def test_tasks_run_from_local_files(loaded: LoadedModel, tasks: Path, theirs: Any) -> None:
    names = ("local_choose", "local_say", "local_read")
    result = run_tasks(loaded, TaskOptions(names, include=tasks, limit=5))
    by_name = {one.name: one for one in result.tasks}
    assert set(by_name) == set(names)
    assert all(one.documents == 5 for one in result.tasks)
    right = 0
    for i in range(5):
        scores = []
        for choice in (str(2 * i), "a bird"):
            whole = loaded.tokenizer.encode(f"{i} and {i} is {choice}")
            count = len(choice) + 1
            scores.append(log_prob(theirs, whole[:-count], whole[-count:]))
        right += scores[0] > scores[1]
    assert by_name["local_choose"].metrics["acc,none"] == right / 5
    assert by_name["local_say"].metrics["exact_match,none"] == 0.0
    bits = by_name["local_read"].metrics["bits_per_byte,none"]
    assert bits is not None
    assert 5 < bits < 12
    json.dumps(result.as_dict(), allow_nan=False)


@pytest.mark.parametrize("has_defaults", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_an_unknown_task_is_an_error_with_a_suggestion(
    loaded: LoadedModel, tasks: Path, monkeypatch: pytest.MonkeyPatch, has_defaults: bool
) -> None:
    """By default only the local tasks are indexed. The harness's own 14,000 files are read in the
    same way and take seconds."""
    if not has_defaults:
        few = partial(TaskManager, include_defaults=False)
        monkeypatch.setattr(harness, "TaskManager", few)
    with pytest.raises(RequestError, match=r"no task 'local_chose'.*local_choose"):
        run_tasks(loaded, TaskOptions(("local_chose",), include=tasks))


def test_missing_data_is_an_error(loaded: LoadedModel, tasks: Path) -> None:
    (tasks / "docs.jsonl").unlink()
    with pytest.raises(RequestError, match="data of a task cannot be read"):
        run_tasks(loaded, TaskOptions(("local_choose",), include=tasks))
