"""DynamicGenerator: jobs, stages, cancellation, failures and shared pages."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any, cast

import pytest

from exl_core.constrain.regex import Regex
from exl_core.engine.engine import EngineOptions
from exl_core.engine.events import FinishReason
from exl_core.engine.request import Report
from exl_core.errors import RequestError
from exl_core.generate.dynamic import DynamicGenerator, Job, Result, Stage
from exl_core.sampling.params import SamplerParams
from exl_core.sampling.sampler import LogitsError
from support.generators import GREEDY, Counter, loaded_around
from support.scripted import EOS_ID, HashRule, Rule, always, certain, reply_with


def dynamic(rule: Rule, **options: Any) -> DynamicGenerator:
    return DynamicGenerator(loaded_around(rule), EngineOptions(**{"cache_tokens": 1024, **options}))


def run_all(generator: DynamicGenerator) -> list[Result]:
    results: list[Result] = []
    for _ in range(2000):
        if not generator.num_remaining_jobs:
            return results
        results += generator.iterate()
    raise AssertionError("the jobs do not come to an end")


def hello(generator: DynamicGenerator, prompt: str = "Q:", **settings: Any) -> Any:
    return generator.request(prompt, stop=EOS_ID, sampler=GREEDY, max_tokens=20, **settings)


def test_generate_accepts_strings_pairs_and_lists() -> None:
    generator = dynamic(reply_with("hello"))
    assert generator.generate("Q:", max_tokens=9, stop=EOS_ID) == "Q:hello"
    assert generator.generate(["A", "B"], max_tokens=5) == ["Ahello", "Bhello"]
    assert generator.generate(["A"], max_tokens=2, completion_only=True) == ["he"]
    assert generator.generate([], max_tokens=2) == []
    guided = SamplerParams(temperature=0, cfg_scale=1.5)
    assert generator.generate(("Q:", "N:"), max_tokens=5, sampler=guided) == "Q:hello"
    assert generator.generate([("Q:", "N:"), ("A", "B")], max_tokens=5, sampler=guided) == [
        "Q:hello",
        "Ahello",
    ]


def test_eos_ends_a_reply_unless_other_stop_conditions_are_given() -> None:
    generator = dynamic(reply_with("hi"))
    assert generator.generate("Q:", max_tokens=6) == "Q:hi"
    assert generator.generate("Q:", max_tokens=6, stop=()) == "Q:hihi"
    assert generator.generate("Q:", max_tokens=6, stop=generator.eos_ids) == "Q:hi"
    assert generator.generate("Q:", max_tokens=6, stop="i") == "Q:h"
    (job,) = generator.last_jobs
    assert job.finish is not None
    assert (job.finish.reason, job.finish.stopped_by) == (FinishReason.STOP, "i")


def test_settings_per_prompt_override_the_shared_ones() -> None:
    generator = dynamic(HashRule(3, spread=0.5))
    texts = generator.generate(
        ["Q:", "Q:", "Q:"],
        max_tokens=8,
        each=[{"sampler": GREEDY}, {"constraints": Regex("[ab]{4,}"), "max_tokens": 4}, {}],
        seed=1,
        completion_only=True,
    )
    assert texts is not None
    assert generator.generate("Q:", max_tokens=8, sampler=GREEDY, completion_only=True) == texts[0]
    assert len(texts[1]) == 4
    assert set(texts[1]) <= {"a", "b"}
    assert generator.generate("Q:", max_tokens=8, seed=3, completion_only=True) == texts[2]
    with pytest.raises(RequestError, match="another number of prompts"):
        generator.generate(["A", "B"], max_tokens=2, each=[{}])
    with pytest.raises(RequestError, match="Did you mean 'max_tokens'"):
        generator.generate(["A"], each=[cast(Any, {"max_token": 1})])


def test_abort_drops_only_the_jobs_of_its_call_and_returns_none() -> None:
    generator = dynamic(reply_with("hello"))
    abort = threading.Event()
    other = generator.enqueue(hello(generator, "other"))
    texts = generator.generate(
        ["A", "B"], max_tokens=50, abort=abort, hooks=Counter(3, abort.set), sampler=GREEDY
    )
    assert texts is None
    assert all(job.is_dropped and job.is_finished for job in generator.last_jobs)
    assert list(generator.jobs.values()) == [other]
    assert generator.generate("Q:", max_tokens=5, abort=abort) is None, "the event stays set"
    run_all(generator)
    assert other.text == "hello"
    assert not generator.engine.pool.held_pages


def test_jobs_have_identifiers_serial_numbers_and_outcomes() -> None:
    generator = dynamic(reply_with("hello"))
    token = object()
    first = generator.enqueue(hello(generator), identifier=token)
    pair = generator.enqueue([hello(generator, "A"), hello(generator, "B")], identifier="pair")
    assert [job.serial for job in (first, *pair)] == [0, 1, 2]
    assert generator.num_remaining_jobs == 3
    tally: Tally[Job] = Tally()  # jobs are hashable by identity
    for result in run_all(generator):
        tally[result.job] += result.is_end
    assert tally == Tally({first: 1, pair[0]: 1, pair[1]: 1})
    assert first.identifier is token
    assert [job.identifier for job in pair] == ["pair", "pair"]
    for job in (first, *pair):
        assert job.text == "hello"
        assert job.is_finished
        assert job.finish is not None
        assert job.finish.completion_tokens == 6


def test_stages_come_in_order_and_results_are_aligned() -> None:
    generator = dynamic(reply_with("hé llo"), prefill_chunk=8)
    request = hello(generator, "x" * 20 + "Q:", report=Report(probabilities=True, top_tokens=2))
    job = generator.enqueue(request)
    results = run_all(generator)
    assert [result.stage for result in results[:3]] == [Stage.STARTED, Stage.PREFILL, Stage.PREFILL]
    assert [(r.done, r.total) for r in results[1:3]] == [(8, 22), (16, 22)]
    streaming = results[3:]
    assert {result.stage for result in streaming} == {Stage.STREAMING}
    for result in streaming:
        assert bytes(result.token_ids).decode() == result.text
        assert tuple(token.token_id for token in result.tokens) == result.token_ids
        for token in result.tokens:
            assert token.probability is not None
            assert token.top[0] == (token.token_id, token.probability)
    assert "".join(result.text for result in streaming) == job.text == "hé llo"
    assert [result.is_end for result in streaming] == [False] * 6 + [True]
    assert streaming[-1].finish is job.finish
    assert job.finish is not None
    assert [token.token_id for token in job.finish.tokens] == [EOS_ID]


@pytest.mark.parametrize(
    "bad",
    [
        lambda generator: hello(generator, "x" * 2000),
        lambda generator: hello(generator, constraints=Regex("[")),
        lambda generator: hello(generator, request_id="live"),
        lambda _: "a text",
    ],
    ids=["long", "regex", "id", "type"],
)
def test_a_list_is_queued_completely_or_not_at_all(bad: Any) -> None:
    generator = dynamic(reply_with("hello"))
    live = generator.enqueue(hello(generator, request_id="live"))
    good = hello(generator, "A")
    with pytest.raises(RequestError):
        generator.enqueue([good, bad(generator)])
    assert list(generator.jobs.values()) == [live]
    assert {result.job for result in run_all(generator)} == {live}
    assert generator.enqueue(good).serial > live.serial
    run_all(generator)


def test_cancelled_jobs_give_no_more_results() -> None:
    generator = dynamic(reply_with("hello"))
    first, second = generator.enqueue([hello(generator, "A"), hello(generator, "B")])
    generator.iterate()
    assert generator.cancel(first)
    assert not generator.cancel(first)
    assert {result.job for result in run_all(generator)} == {second}
    assert (first.is_dropped, first.is_finished, first.finish) == (True, True, None)
    assert not generator.cancel(second)
    assert not second.is_dropped
    assert not generator.engine.pool.held_pages


def test_an_old_job_cannot_cancel_a_new_one_with_its_id() -> None:
    generator = dynamic(reply_with("hello"))
    old = generator.enqueue(hello(generator, request_id="mine"))
    run_all(generator)
    new = generator.enqueue(hello(generator, request_id="mine"))
    assert not generator.cancel(old)
    run_all(generator)
    assert new.text == "hello"


def test_clear_queue_drops_running_and_waiting_jobs() -> None:
    generator = dynamic(reply_with("hello"), max_batch=2)
    generator.enqueue([hello(generator, str(i)) for i in range(5)])
    generator.iterate()
    generator.clear_queue()
    assert generator.num_remaining_jobs == 0
    assert generator.iterate() == []
    assert generator.engine.is_idle
    assert not generator.engine.pool.held_pages


def test_a_failed_job_does_not_affect_others() -> None:
    def rule(history: Sequence[int]) -> Any:
        return reply_with("hello")(history) * (float("nan") if ord("!") in history else 1.0)

    generator = dynamic(rule)
    bad, good = generator.enqueue([hello(generator, "!"), hello(generator, "A")])
    ends = [result for result in run_all(generator) if result.is_end]
    assert ends[0].job is bad
    assert isinstance(ends[0].error, LogitsError)
    assert bad.error is ends[0].error
    assert good.text == "hello"
    with pytest.raises(LogitsError):
        generator.generate(["A", "!"], max_tokens=3)
    assert generator.last_jobs[0].text == "hel"
    assert generator.engine.is_idle


def test_a_failed_pass_ends_its_jobs_and_later_jobs_run() -> None:
    generator = dynamic(reply_with("hello"), max_batch=2)
    jobs = generator.enqueue([hello(generator, str(i)) for i in range(3)])
    generator.iterate()
    failure = RuntimeError("broken")
    cast(Any, generator.loaded.model).failure = failure
    with pytest.raises(RuntimeError, match="broken"):
        generator.iterate()
    ends = {result.job: result for result in run_all(generator) if result.is_end}
    assert [ends[job].error for job in jobs] == [failure, failure, None]
    assert jobs[2].text == "hello"
    cast(Any, generator.loaded.model).failure = failure
    with pytest.raises(RuntimeError, match="broken"):
        generator.generate(["A", "B"], max_tokens=3)
    assert generator.engine.is_idle
    assert generator.generate("Q:", max_tokens=5) == "Q:hello"


def test_running_jobs_with_a_common_prefix_share_its_pages() -> None:
    generator = dynamic(always(certain(ord("a"))), cache_tokens=2048)
    prefix = "x" * 600
    first = generator.enqueue(generator.request(prefix + "1", max_tokens=8, sampler=GREEDY))
    while not first.text:
        generator.iterate()
    assert generator.page_list() == "111....."
    second = generator.enqueue(generator.request(prefix + "2", max_tokens=8, sampler=GREEDY))
    while not second.text:
        generator.iterate()
    assert generator.page_list() == "2211...."
    run_all(generator)
    assert second.finish is not None
    assert second.finish.cached_pages == 2
    assert second.finish.cached_tokens == 600
    assert generator.page_list().count("0") >= 2


@pytest.mark.parametrize("prompt", [None, 5, [5], ("a",), ("a", "b", "c"), [("a", 1)], b"Q:"])
def test_prompts_must_be_texts_or_pairs(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt 0 is neither"):
        dynamic(reply_with("x")).generate(prompt, max_tokens=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 5}, "Did you mean 'max_tokens'"),
        ({"stop": [None]}, "stop condition"),
        ({"stop": ""}, "at least one character"),
    ],
)
def test_wrong_settings_are_refused_with_a_suggestion(settings: dict[str, Any], words: str) -> None:
    generator = dynamic(reply_with("hello"))
    with pytest.raises(RequestError, match=words):
        generator.generate(["A", "B"], **settings)
    assert generator.num_remaining_jobs == 0
    assert generator.generate("Q:", max_tokens=5) == "Q:hello"
