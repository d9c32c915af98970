"""BaseGenerator: `generate_simple` with its options, and errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from exl_core.cache.format import KVFormat
from exl_core.engine.engine import EngineOptions
from exl_core.errors import RequestError
from exl_core.generate.base import EMBED_MARKER, BaseGenerator
from exl_core.lora.adapter import load_adapter
from exl_core.model.adapters import AdapterUse
from exl_core.sampling.params import SamplerParams
from exl_core.session.load import LoadedModel, load_model
from support import tiny_models
from support.adapters import random_pairs, stored, write_adapter
from support.generators import GREEDY, SMALL, Counter, loaded_around
from support.scripted import BOS_ID, EOS_ID, HashRule, Rule, reply_with


def base(rule: Rule, *, max_seq_len: int = 1024) -> BaseGenerator:
    return BaseGenerator(loaded_around(rule, max_seq_len=max_seq_len), SMALL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_models.save(tiny_models.tiny_llama(), tmp_path_factory.mktemp("tiny"))
    return load_model(str(folder))


def test_the_text_begins_with_the_prompt_unless_completion_only() -> None:
    generator = base(reply_with("hello"))
    assert generator.generate_simple("Q:", num_tokens=20, sampler=GREEDY) == "Q:hello"
    text = generator.generate_simple("Q:", num_tokens=20, sampler=GREEDY, completion_only=True)
    assert text == "hello"
    assert generator.sequence_ids == ((*b"Q:hello", EOS_ID),)
    assert not generator.full()


def test_a_list_of_prompts_gives_a_list() -> None:
    generator = base(reply_with("hello"))
    assert generator.generate_simple(["A", "BB"], num_tokens=20) == ["Ahello", "BBhello"]
    assert generator.generate_simple([], num_tokens=20) == []


def test_seeds_count_up_and_repeat() -> None:
    generator = base(HashRule(1, spread=0.5))
    texts = generator.generate_simple(["Q:"] * 3, num_tokens=8, seed=5, stop_token=None)
    ids = generator.sequence_ids
    assert len(set(ids)) == 3
    assert generator.generate_simple("Q:", num_tokens=8, seed=6, stop_token=None) == texts[1]
    assert generator.sequence_ids == (ids[1],)


def test_a_long_prompt_is_truncated_at_its_beginning() -> None:
    generator = base(reply_with("hello"), max_seq_len=16)
    assert generator.generate_simple("0123456789ABCDEF", num_tokens=6) == "6789ABCDEFhello"
    text = generator.generate_simple("0123456789", num_tokens=6, completion_only=True)
    assert text == "hello"
    assert generator.full()
    assert generator.generate_simple("0123456789ABCDEF", num_tokens=0) == "123456789ABCDEF"


def test_truncation_keeps_bos() -> None:
    generator = base(reply_with("hello"), max_seq_len=16)
    text = generator.generate_simple("0123456789ABCDEF", num_tokens=6, add_bos=True)
    assert text == "789ABCDEFhello"
    assert generator.sequence_ids == ((BOS_ID, *b"789ABCDEFhello", EOS_ID),)
    generator.generate_simple("0123456789", num_tokens=14, add_bos=True)
    assert generator.sequence_ids[0][:2] == (BOS_ID, ord("9"))
    with pytest.raises(RequestError, match=r"leaves no room for a prompt .*less than 15"):
        generator.generate_simple("0123456789", num_tokens=15, add_bos=True)
    generator.generate_simple("", num_tokens=15, add_bos=True)
    assert len(generator.sequence_ids[0]) <= 16


def test_a_cache_shorter_than_the_context_truncates_too() -> None:
    """The last token of a reply needs no place in the cache of 256 tokens."""
    loaded = loaded_around(reply_with("x", then=ord("x")), max_seq_len=1024)
    generator = BaseGenerator(loaded, EngineOptions(cache_tokens=256))
    prompt = "ab" * 300
    text = generator.generate_simple(prompt, num_tokens=57, sampler=GREEDY)
    assert text == prompt[-200:] + "x" * 57
    assert generator.full()
    generator.generate_simple(prompt, num_tokens=57, sampler=GREEDY, add_bos=True)
    assert generator.sequence_ids[0][:200] == (BOS_ID, *prompt[-199:].encode())
    generator.generate_simple("ab", num_tokens=57, sampler=GREEDY)
    assert not generator.full()
    with pytest.raises(RequestError, match="num_tokens"):
        generator.generate_simple("ab", num_tokens=257)


@pytest.mark.parametrize("num_tokens", [16, -1, True, "six", 2.5])
def test_num_tokens_must_leave_room(num_tokens: Any) -> None:
    with pytest.raises(RequestError, match="num_tokens"):
        base(reply_with("x"), max_seq_len=16).generate_simple("Q", num_tokens=num_tokens)


def test_stop_token_defaults_to_eos_and_is_validated() -> None:
    def run(**how: Any) -> str:
        return base(reply_with("hello")).generate_simple(
            "Q:", num_tokens=9, sampler=GREEDY, completion_only=True, **how
        )

    assert run() == "hello"
    assert run(stop_token=None, show_special=True) == "hello<eos>hel"
    for wrong in (-1, "EOS", True, [5]):
        with pytest.raises(RequestError, match="stop_token"):
            run(stop_token=wrong)


def test_abort_is_cleared_at_the_start_and_keeps_the_text_so_far() -> None:
    abort = threading.Event()
    abort.set()
    generator = base(reply_with("hello"))
    assert generator.generate_simple("Q:", num_tokens=9, abort=abort) == "Q:hello"
    text = generator.generate_simple(
        "Q:", num_tokens=9, abort=abort, hooks=Counter(3, abort.set), sampler=GREEDY
    )
    assert text == "Q:hel"
    assert generator.engine.is_idle
    assert not generator.engine.pool.held_pages


def test_an_abort_that_is_no_flag_is_refused() -> None:
    generator = base(reply_with("hello"))
    with pytest.raises(RequestError, match=r"abort is no flag .*expected a threading\.Event"):
        generator.generate_simple("Q:", num_tokens=9, abort=cast(Any, True))


def test_abort_during_the_prompt_gives_empty_text() -> None:
    loaded = loaded_around(reply_with("hello"))
    abort = threading.Event()
    generator = BaseGenerator(loaded, EngineOptions(cache_tokens=1024, prefill_chunk=8))
    scripted = cast(Any, loaded.model)
    forward = scripted.forward

    def forward_then_abort(*args: Any) -> Any:
        abort.set()
        return forward(*args)

    scripted.forward = forward_then_abort
    assert generator.generate_simple(["Q:", "x" * 40], num_tokens=9, abort=abort) == ["Q:h", ""]
    assert len(scripted.rows_of_pass) == 1
    scripted.forward = forward
    assert generator.generate_simple("Q:", num_tokens=9) == "Q:hello"


def test_healing_returns_only_text_beyond_the_removed_token() -> None:
    generator = base(reply_with("hello"))
    text = generator.generate_simple(
        "Q:", num_tokens=9, token_healing=True, sampler=GREEDY, completion_only=True
    )
    assert text == "hello"
    assert generator.sequence_ids == ((*b"Q:hello", EOS_ID),)


@pytest.mark.thorough
def test_a_healed_token_replaces_the_last_prompt_token(smollm2: LoadedModel) -> None:
    generator = BaseGenerator(smollm2, SMALL)
    prompt = "The capital of France is Par"
    text = generator.generate_simple(prompt, num_tokens=4, token_healing=True, sampler=GREEDY)
    assert text.startswith(prompt + "is")
    (ids,) = generator.sequence_ids
    assert smollm2.tokenizer.decode(ids) == text
    assert len(ids) == len(smollm2.tokenizer.encode(prompt)) + 4
    only = generator.generate_simple(
        prompt, num_tokens=4, token_healing=True, sampler=GREEDY, completion_only=True
    )
    assert prompt + only == text


def rows_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return cast(torch.Tensor, model.model.embed_tokens.weight[torch.tensor(ids)].detach())


def test_embedding_vectors_of_tokens_give_the_reply_of_the_tokens(tiny: LoadedModel) -> None:
    generator = BaseGenerator(tiny, SMALL)
    model = tiny_models.tiny_llama()
    inner = tiny.tokenizer.encode("middle")
    prompts = [f"first \t{EMBED_MARKER} last", f"{EMBED_MARKER}!"]
    vectors = torch.stack([rows_of(model, inner), rows_of(model, inner)])
    texts = generator.generate_simple(
        prompts,
        num_tokens=12,
        sampler=GREEDY,
        input_embeddings=vectors,
        completion_only=True,
        stop_token=None,
    )
    plain = generator.generate_simple(
        ["firstmiddlelast", "middle!"],
        num_tokens=12,
        sampler=GREEDY,
        completion_only=True,
        stop_token=None,
    )
    assert texts == plain
    whole = generator.generate_simple(
        prompts[0], num_tokens=12, sampler=GREEDY, input_embeddings=vectors[:1], stop_token=None
    )
    assert whole == "firstlast" + plain[0], "vectors add no text"


@pytest.mark.parametrize(
    ("prompt", "shape", "words"),
    [
        ("none", (1, 2, 72), "0 times"),
        (EMBED_MARKER * 2, (1, 2, 72), "2 times"),
        (EMBED_MARKER, (2, 72), "another shape"),
        ([EMBED_MARKER], (2, 2, 72), "another shape"),
        (EMBED_MARKER, (1, 2, 71), "72"),
    ],
)
def test_embeddings_must_match_markers_and_hidden_size(
    tiny: LoadedModel, prompt: Any, shape: Any, words: str
) -> None:
    generator = BaseGenerator(tiny, SMALL)
    with pytest.raises(RequestError, match=words):
        generator.generate_simple(prompt, num_tokens=2, input_embeddings=torch.zeros(shape))
    assert generator.engine.is_idle


def test_an_adapter_applies_only_to_its_call(tiny: LoadedModel, tmp_path: Path) -> None:
    pairs = random_pairs(tiny_models.tiny_llama())
    adapter = load_adapter(write_adapter(tmp_path / "one", stored(pairs)), tiny.model)
    generator = BaseGenerator(tiny, SMALL)

    def run(**how: Any) -> str:
        return generator.generate_simple(
            "Tell me:", num_tokens=12, sampler=GREEDY, stop_token=None, **how
        )

    plain, adapted = run(), run(adapters=adapter)
    assert plain != adapted
    assert run(adapters=(AdapterUse(adapter),)) == adapted
    assert run(adapters=[AdapterUse(adapter, 0.0)]) == plain
    assert run() == plain, "pages cached with the adapter must not be reused without it"


def test_warmup_leaves_no_request_and_no_pages(tiny: LoadedModel) -> None:
    generator = BaseGenerator(tiny, EngineOptions(cache_tokens=512, kv_format=KVFormat.FP8))
    generator.warmup()
    assert generator.engine.is_idle
    assert len(generator.engine.pool.free_pages) == 2
    assert generator.sequence_ids == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop_tokens": 1}, "Did you mean 'stop_token'"),
        ({"compleetion_only": True}, "Did you mean 'completion_only'"),
        ({"max_tokens": 5}, "num_tokens"),
        ({"seed": "1"}, "seed has the wrong type"),
        ({"seed": -1}, "seed is out of range"),
    ],
)
def test_wrong_settings_are_refused_with_a_suggestion(settings: dict[str, Any], words: str) -> None:
    generator = base(reply_with("hello"))
    with pytest.raises(RequestError, match=words):
        generator.generate_simple("Q:", **{"num_tokens": 5, **settings})
    assert generator.generate_simple("Q:", num_tokens=5) == "Q:hello"


@pytest.mark.parametrize("prompt", [None, 5, b"Q:", [1, 2], ["Q:", None], ("a", "b"), "", [""]])
def test_prompts_must_be_texts(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        base(reply_with("hello")).generate_simple(prompt, num_tokens=5)


def test_one_request_id_for_several_prompts_is_refused() -> None:
    generator = base(reply_with("hello"))
    with pytest.raises(RequestError, match="this id"):
        generator.generate_simple(["A", "B"], num_tokens=5, request_id="same")
    assert generator.engine.is_idle


def test_the_generator_is_usable_after_a_failed_pass() -> None:
    generator = base(reply_with("hello"))
    cast(Any, generator.loaded.model).failure = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        generator.generate_simple(["A", "B"], num_tokens=9)
    assert generator.engine.is_idle
    assert generator.generate_simple("Q:", num_tokens=9) == "Q:hello"


def test_a_busy_engine_is_refused() -> None:
    generator = base(reply_with("hello"))
    generator.engine.submit(generator.request("other", request_id="other"))
    with pytest.raises(RequestError, match="busy"):
        generator.generate_simple("Q:", num_tokens=9)
    assert generator.engine.live_requests == {"other"}


def test_guidance_without_a_negative_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="guidance"):
        base(reply_with("x")).generate_simple(
            "Q:", num_tokens=5, sampler=SamplerParams(cfg_scale=2.0)
        )
