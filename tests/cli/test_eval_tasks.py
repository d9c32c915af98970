"""`exl eval tasks`, with and without lm-evaluation-harness installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from exl_cli.eval_options import Loading
from exl_cli.replicas import opened
from support.commands import Command
from support.driving import ask


@pytest.fixture
def own_task(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    docs = [{"text": f"text number {i}"} for i in range(4)]
    data = folder / "docs.jsonl"
    data.write_text("\n".join(json.dumps(doc) for doc in docs), encoding="utf-8")
    (folder / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\n"
        "doc_to_choice: [' yes', ' no']\ndoc_to_target: 0\nmetric_list:\n  - metric: acc\n",
        encoding="utf-8",
    )
    return folder


def test_missing_harness_names_the_package_to_install(
    exl: Command, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "exl_eval.harness", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    line = exl("eval", "tasks", tiny_llama_dir, "--tasks", "piqa").error_line(1)
    assert "pip install 'lm-eval>=0.4.13'" in line


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--tasks", ","), "no task is named"),
        (("--tasks", "x", "--include", "/no/such/dir"), "/no/such/dir"),
        ((), "--tasks"),
    ],
)
def test_usage(args: tuple[str, ...], expected: str, exl: Command, tiny_llama_dir: Path) -> None:
    assert expected in exl("eval", "tasks", tiny_llama_dir, *args).error_line(2)


@pytest.mark.thorough
def test_custom_task(
    exl_process: Command,
    tiny_llama_dir: Path,
    own_task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is optional: pip install lm-eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))  # keeps the cache out of the home
    args = ("eval", "tasks", tiny_llama_dir, "--tasks", "mine", "--include", own_task, "--limit", 3)
    done = exl_process(*args, "--json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    (task,) = result["tasks"]
    assert (task["name"], task["documents"], task["fewshot"]) == ("mine", 3, 0)
    assert task["metrics"]["acc,none"] in (0.0, 1 / 3, 2 / 3, 1.0)
    assert result["lm_eval_version"]
    by_two = exl_process(*args, "--json", "--replicas", 2)
    assert (by_two.code, by_two.err) == (0, "")
    assert json.loads(by_two.out) == result


@pytest.mark.thorough
def test_replies_of_replicas(tiny_llama_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is optional: pip install lm-eval")
    from exl_cli.commands.eval.replicated_tasks import ReplicatedWork, TaskJob
    from exl_eval.harness import LocalWork, TaskOptions

    loading = Loading("cpu", 1, True, False, True)
    job = TaskJob(loading, str(tiny_llama_dir), TaskOptions((), max_batch=2))
    requests = [ask((5 + number, 6, 7), max_tokens=8) for number in range(7)]
    alone = LocalWork(loading.load(job.spec), job.options)
    with opened(job, 2, None, units=9, is_quiet=True) as replicas:
        found = dict(ReplicatedWork(replicas, 2).replies(requests))
    assert found == dict(alone.replies(requests))
