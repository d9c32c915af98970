"""`/v1/completions` through OpenAI's client, with the default model."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from exl_core.engine.score import score_tokens
from exl_core.session.load import LoadedModel
from support.scripted import BOS_ID, ByteTokenizer, HashRule, reply_with
from support.server import Running, running, runtime_of, scripted_runtime

FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.openai()


def complete(client: Any, prompt: Any = FRANCE, **settings: Any) -> Any:
    fields = {"model": None, "temperature": 0, "max_tokens": 8, **settings}
    return client.completions.create(prompt=prompt, **fields)


def test_text_continues(client: Any) -> None:
    reply = complete(client)
    (choice,) = reply.choices
    assert choice.text.startswith(" Paris")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert reply.object == "text_completion"
    assert reply.usage.prompt_tokens == 5
    assert reply.usage.completion_tokens == 8
    assert reply.usage.total_tokens == 13
    assert reply.timings["predicted_n"] == 8


def test_all_forms_of_a_prompt_give_the_same_reply(client: Any, smollm2: LoadedModel) -> None:
    ids = smollm2.tokenizer.encode(FRANCE)
    said = complete(client).choices[0].text
    for prompt in ([FRANCE], ids, [ids]):
        assert complete(client, prompt).choices[0].text == said
    both = complete(client, [FRANCE, "One, two, three,"], n=2, max_tokens=4)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == said[: len(both.choices[0].text)]
    assert both.choices[2].text.startswith(" four")
    assert both.usage.prompt_tokens == 5 + len(smollm2.tokenizer.encode("One, two, three,"))
    assert both.usage.completion_tokens == 16


def test_stream_joins_to_the_whole_reply(client: Any) -> None:
    whole = complete(client, echo=True, logprobs=2, max_tokens=12)
    chunks = list(
        complete(
            client,
            echo=True,
            logprobs=2,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == "length"
    assert all(part.choices[0].finish_reason is None for part in parts[:-1])
    for name in ("tokens", "text_offset"):
        streamed = [one for part in parts for one in getattr(part.choices[0].logprobs, name)]
        assert streamed == getattr(whole.choices[0].logprobs, name)
    without = list(complete(client, stream=True))
    assert all(part.choices and part.usage is None for part in without)
    assert without[-1].timings["prompt_n"] >= 1


def test_stream_of_several_replies_has_their_indices(client: Any) -> None:
    prompts = [FRANCE, "One, two, three,"]
    whole = [choice.text for choice in complete(client, prompts).choices]
    texts = ["", ""]
    for chunk in complete(client, prompts, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole


def test_readme_example(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path(__file__).resolve().parents[2] / "README.md"
    examples = re.findall(r"```python\n(.+?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [one for one in examples if "openai" in one]
    local: dict[str, Any] = {}
    exec(example.replace("http://127.0.0.1:8080", server.url), local)
    local["client"].close()
    assert "three" in capsys.readouterr().out


@pytest.mark.thorough
def test_stop_seed_and_logit_bias(client: Any, smollm2: LoadedModel) -> None:
    stopped = complete(client, "One, two, three,", stop=[" six"], max_tokens=20).choices[0]
    assert (stopped.text, stopped.finish_reason) == (" four, five,", "stop")
    one, same, other = (
        complete(client, temperature=1, seed=seed, max_tokens=20).choices[0].text
        for seed in (7, 7, 8)
    )
    assert one == same != other
    first, second = complete(client, temperature=1, seed=7, n=2, max_tokens=20).choices
    assert first.text == one != second.text
    (dog,) = smollm2.tokenizer.encode(" dog")
    biased = complete(client, logit_bias={str(dog): 100}, max_tokens=2).choices[0]
    assert biased.text == " dog dog"
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1}
    assert complete(client, temperature=1, extra_body=extra).choices[0].text.startswith(" Paris")


def test_logprobs_do_not_depend_on_sampling_settings(client: Any, smollm2: LoadedModel) -> None:
    """The log probabilities equal those of `score_tokens`, whatever the sampling settings."""
    reply = complete(client, echo=True, logprobs=3, max_tokens=3, temperature=0.7, top_p=0.5)
    choice = reply.choices[0]
    logprobs = choice.logprobs
    ids = smollm2.tokenizer.encode(FRANCE)
    reply_ids = smollm2.tokenizer.encode(choice.text)
    assert choice.text.startswith(FRANCE)
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    exact = score_tokens(smollm2.model, reply_ids).tolist()
    assert logprobs.token_logprobs[1:] == pytest.approx(exact, abs=0.02)
    assert len(ids) == 5
    for token, value, top in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert top[token] == value
        assert len(top) in (3, 4) and max(top.values()) >= value
    starts = [*logprobs.text_offset, len(choice.text)]
    pieces = [choice.text[a:b] for a, b in pairwise(starts)]
    assert pieces == logprobs.tokens
    # With temperature 0 the sampled token is the most probable one.
    greedy = complete(client, logprobs=0, max_tokens=5).choices[0].logprobs
    assert [list(top.values()) for top in greedy.top_logprobs] == [
        [value] for value in greedy.token_logprobs
    ]


def test_scoring_without_a_reply(client: Any) -> None:
    reply = complete(client, echo=True, logprobs=0, max_tokens=0)
    assert reply.choices[0].text == FRANCE
    assert len(reply.choices[0].logprobs.tokens) == 5
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 0
    assert reply.timings["predicted_n"] == 0
    assert complete(client, echo=True, max_tokens=0).choices[0].text == FRANCE


@pytest.mark.thorough
def test_scores_do_not_depend_on_the_cache_or_on_chunks(smollm2: LoadedModel) -> None:
    """A long prompt is computed in several passes. It is computed again although it is cached."""
    ids = [(7 * i) % 4000 + 100 for i in range(400)]
    runtime = runtime_of(smollm2, ctx_size=1024, max_batch=2, cache_tokens=2048)
    runtime.engine.scheduler.score_chunk = 128
    exact = score_tokens(smollm2.model, ids).tolist()
    with running(runtime) as one:
        client = one.openai()
        complete(client, ids, max_tokens=1)
        for _ in range(2):
            reply = complete(client, ids, echo=True, logprobs=0, max_tokens=1)
            assert reply.usage.prompt_tokens_details.cached_tokens == 0
            found = reply.choices[0].logprobs.token_logprobs[1:-1]
            assert found == pytest.approx(exact, abs=0.05)


class BosTokenizer(ByteTokenizer):
    """Tokenizer that adds BOS to texts by default."""

    @property
    def adds_bos(self) -> bool:
        return True


def test_bos_is_added_to_text_and_never_to_token_ids() -> None:
    runtime = scripted_runtime(HashRule(3), tokenizer=BosTokenizer())
    with running(runtime) as one:
        client = one.openai()

        def tokens(prompt: Any, **extra: Any) -> list[str]:
            settings = {"echo": True, "logprobs": 0, "max_tokens": 1, "extra_body": extra}
            choice = complete(client, prompt, **settings).choices[0]
            assert len(choice.logprobs.text_offset) == len(choice.logprobs.tokens)
            found: list[str] = choice.logprobs.tokens[:-1]
            return found

        assert tokens("ab") == ["<bos>", "a", "b"]
        assert tokens("<bos>ab") == ["<bos>", "a", "b"]
        assert tokens("ab", add_special_tokens=False) == ["a", "b"]
        assert tokens([97, 98]) == tokens([97.0, 98.0]) == ["a", "b"]
        assert tokens([BOS_ID, 97]) == ["<bos>", "a"]
        plain = complete(client, "ab", echo=True, max_tokens=1, logprobs=0).choices[0]
        assert plain.text.startswith("ab")
        assert plain.logprobs.text_offset[:3] == [0, 0, 1]


def test_empty_reply_has_a_logprobs_entry_for_eos() -> None:
    """Clients that score a prompt expect one entry after it, even for EOS."""
    with running(scripted_runtime(reply_with(""))) as one:
        reply = complete(one.openai(), "ab", echo=True, logprobs=1, max_tokens=1)
        choice = reply.choices[0]
        assert (choice.text, choice.finish_reason) == ("ab", "stop")
        assert choice.logprobs.tokens == ["a", "b", "<eos>"]
        assert choice.logprobs.top_logprobs[-1] == {"<eos>": choice.logprobs.token_logprobs[-1]}
