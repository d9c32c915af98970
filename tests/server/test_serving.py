"""Queue, cancellation, health, metrics, swapping of models, and many concurrent clients."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from openai import InternalServerError, RateLimitError

from exl_cli.server.limits import Limits
from exl_cli.server.models import ModelHost, models_in
from exl_core.cache.format import KVFormat
from exl_core.engine.engine import Engine, EngineOptions
from exl_core.errors import ExlError, ModelNotFoundError
from exl_core.session.load import LoadOptions, load_model
from exl_core.session.runtime import Runtime
from support.real_models import smollm2_gguf
from support.scripted import HashRule, always, certain, reply_with
from support.server import LIMIT_S, Opening, error_of, running, scripted_runtime

ENDLESS = always(certain(ord("a")))


def slowly(rule: Any, seconds: float = 0.005) -> Any:
    def slow(history: Any) -> Any:
        time.sleep(seconds)
        return rule(history)

    return slow


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_background(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("is_stream", [True, False])
def test_disconnect_cancels_the_replies(is_stream: bool) -> None:
    with running(scripted_runtime(slowly(ENDLESS))) as one:
        body = {"prompt": "Q", "max_tokens": 900, "stream": is_stream, "n": 3}
        with httpx2.Client(base_url=one.url, timeout=0.5) as client:
            if is_stream:
                with client.stream("POST", "/v1/completions", json=body) as reply:
                    next(reply.iter_lines())
            else:
                with pytest.raises(httpx2.ReadTimeout):
                    client.post("/v1/completions", json=body)
        one.wait_until_idle()
        resident = one.host.resident
        assert resident is not None
        pool = resident.runtime.engine.pool
        wait_until(lambda: pool.num_available == pool.num_pages)
        assert one.http.get("/health").json()["status"] == "ok"


def test_full_queue_sends_retry_after() -> None:
    runtime = scripted_runtime(slowly(ENDLESS), max_batch=1)
    with running(runtime, limits=Limits(max_queue=1)) as one:
        client = one.openai()
        body: Any = {"model": "scripted", "prompt": "Q", "max_tokens": 900}
        with ThreadPoolExecutor(2) as pool:
            streams = [client.completions.create(**body, stream=True) for _ in range(2)]
            next(iter(streams[0]))
            with pytest.raises(RateLimitError) as caught:
                client.completions.create(**body)
            assert caught.value.code == "queue_full"
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
            error_of(one.post("/v1/completions", {"prompt": ["a"] * 3}), 400)
            for stream in streams:
                stream.close()
            pool.shutdown()
        one.wait_until_idle()
        wait_until(lambda: one.post("/v1/completions", {"prompt": "Q"}).status_code == 200)


def test_health_distinguishes_stalled_from_idle() -> None:
    gate = threading.Event()

    def stuck(history: Any) -> Any:
        gate.wait(LIMIT_S)
        return certain(ord("a"))

    with running(scripted_runtime(stuck), limits=Limits(stall_s=0.3)) as one:
        time.sleep(0.5)
        assert one.http.get("/health").status_code == 200, "idle is not stalled"
        asking = in_background(lambda: one.post("/v1/completions", {"prompt": "Q"}))
        wait_until(lambda: one.http.get("/health").status_code == 503)
        assert error_of(one.http.get("/health"), 503)["code"] == "stalled"
        gate.set()
        asking.join(LIMIT_S)
        wait_until(lambda: one.http.get("/health").status_code == 200)


def test_failed_pass_is_an_error_and_the_next_request_is_served() -> None:
    runtime = scripted_runtime(reply_with("fine"))
    model: Any = runtime.loaded.model
    with running(runtime) as one:
        client = one.openai()
        for is_stream in (False, True):
            model.failure = ExlError("the device is gone")
            with pytest.raises(Exception, match="the device is gone") as caught:
                list(client.completions.create(model="scripted", prompt="Q", stream=is_stream))
            if not is_stream:
                assert isinstance(caught.value, InternalServerError)
        assert one.post("/v1/completions", {"prompt": "Q"}).json()["choices"][0]["text"] == "fine"


def test_a_failed_pass_is_an_event_of_the_responses_api() -> None:
    runtime = scripted_runtime(reply_with("fine"))
    model: Any = runtime.loaded.model
    with running(runtime) as one:
        model.failure = ExlError("the device is gone")
        body = {"model": "scripted", "input": "Q", "stream": True}
        with one.http.stream("POST", "/v1/responses", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
    event = json.loads(lines[-1].removeprefix("data: "))
    assert lines[-2] == "event: error"
    assert event["type"] == "error"
    assert "the device is gone" in event["message"]
    assert event["sequence_number"] == 2, "after the two of the beginning"


def test_metrics_count_requests_and_tokens(monkeypatch: Any) -> None:
    with running(scripted_runtime(reply_with("fine"))) as one:
        one.post("/v1/completions", {"prompt": "Q:"})
        one.http.get("/v1/nothing")
        text = one.http.get("/metrics").text
        assert 'exl_http_answers_total{path="/v1/completions",status="200"} 1.0' in text
        assert 'exl_http_answers_total{path="other",status="404"} 1.0' in text
        assert "exl_prompt_tokens_total 2.0" in text
        assert "exl_reply_tokens_total 5.0" in text
        assert 'exl_replies_total{end="stop"} 1.0' in text
        assert "exl_running_replies 0.0" in text


def test_reply_time_limit() -> None:
    with running(scripted_runtime(slowly(ENDLESS)), limits=Limits(reply_s=0.3)) as one:
        client = cast(Any, one.openai().completions)  # replies have fields beyond OpenAI's types
        whole = client.create(model="scripted", prompt="Q", max_tokens=900)
        assert whole.choices[0].finish_reason == "length"
        assert 1 <= whole.usage.completion_tokens < 100
        assert whole.choices[0].text == "a" * whole.usage.completion_tokens
        assert whole.timings["is_out_of_time"]
        *_, last = client.create(model="scripted", prompt="Q", max_tokens=900, stream=True)
        assert last.choices[0].finish_reason == "length" and last.timings["is_out_of_time"]
        short = client.create(model="scripted", prompt="Q", max_tokens=3)
        assert "is_out_of_time" not in short.timings
        assert 'exl_replies_total{end="time"} 2.0' in one.http.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_stats(path: str) -> None:
    asked = (
        {"prompt": "Q"} if "chat" not in path else {"messages": [{"role": "user", "content": ""}]}
    )
    body = {**asked, "max_tokens": 400, "stream": True, "n": 2}
    body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    prompt = 1 if "chat" not in path else len("[user][assistant]")
    with running(scripted_runtime(slowly(ENDLESS))) as one:
        usage: dict[str, int] = {}
        texts = 0
        with one.http.stream("POST", path, json=body) as reply:
            for line in reply.iter_lines():
                if not line:
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert event["usage"]["completion_tokens"] >= usage.get("completion_tokens", 0)
                usage = event["usage"]
                (choice,) = event["choices"]
                texts += len(choice.get("text") or choice.get("delta", {}).get("content") or "")
                if texts == 10:
                    break
        assert usage["prompt_tokens"] == prompt
        assert 10 <= usage["completion_tokens"] <= 14, "it may be a step ahead"
        assert usage["total_tokens"] == prompt + usage["completion_tokens"]
        one.wait_until_idle()
        metrics = one.http.get("/metrics").text
        assert 'exl_replies_total{end="cancelled"} 2.0' in metrics
        found = re.search(r"exl_reply_tokens_total (\d+)", metrics)
        assert found and 10 <= int(found[1]) < 800
        short = {**body, "max_tokens": 4}
        *_, last = [
            json.loads(line[6:])
            for line in one.post(path, short).text.splitlines()
            if line.startswith("data: {")
        ]
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8


def test_several_replies_compute_their_prompt_once() -> None:
    prompt = "".join(f"{i} and " for i in range(110))  # two passes
    runtime = scripted_runtime(HashRule(7), max_batch=16, cache_tokens=16384)
    model: Any = runtime.loaded.model
    with running(runtime) as one:
        body = {"prompt": prompt, "max_tokens": 4, "n": 8, "seed": 1, "stop": None}
        answer = one.post("/v1/completions", body).json()
        alone = [
            one.post("/v1/completions", {**body, "n": 1, "seed": 1 + i}).json()["choices"][0][
                "text"
            ]
            for i in range(8)
        ]
    length = answer["usage"]["prompt_tokens"]
    assert length > 512 and answer["usage"]["completion_tokens"] <= 32
    assert answer["timings"]["prompt_n"] <= length + 7 * 64
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert max(model.rows_of_pass) <= 512


class Folder:
    """Opener of scripted models that reply with their own names. `loaded`: names in load order."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.most_at_once = 0
        self.living: list[str] = []

    def open(self, path: Path) -> Runtime:
        if path.name == "broken":
            raise ModelNotFoundError("no such model", where=path)
        self.loaded.append(path.name)
        return scripted_runtime(slowly(reply_with(f"I am {path.name}."), 0.001), name=path.name)


@pytest.mark.thorough
def test_requests_for_several_models_swap_them() -> None:
    folder = Folder()
    others = {name: Path(name) for name in ("a", "b", "broken")}
    host = ModelHost(folder.open(Path("a")), others=others, opener=Opening(folder.open))
    with running(host) as one:
        listed = [model.id for model in one.openai().models.list()]
        assert listed == ["a", "b", "broken"]

        def ask(name: str) -> str:
            reply = one.post("/v1/completions", {"model": name, "prompt": "Q", "max_tokens": 50})
            text: str = reply.json()["choices"][0]["text"]
            return text

        names = ["a", "b", "a", "b", "b", "a"] * 3
        with ThreadPoolExecutor(len(names)) as pool:
            assert list(pool.map(ask, names)) == [f"I am {name}." for name in names]
        assert len(folder.loaded) < 10, "requests that wait for one model are served together"
        before = ask("a")
        error = error_of(one.post("/v1/completions", {"model": "broken", "prompt": "Q"}), 500)
        assert "no such model" in error["message"]
        assert ask("a") == before
        current = {
            model["id"]: model["loaded"] for model in one.http.get("/v1/models").json()["data"]
        }
        assert current == {"a": True, "b": False, "broken": False}


def test_requests_without_a_model_join_the_swap() -> None:
    """A look at the properties of a server does not load another model again."""
    folder, gate = Folder(), threading.Event()

    def open_late(path: Path) -> Runtime:
        gate.wait(LIMIT_S)
        return folder.open(path)

    host = ModelHost(
        scripted_runtime(reply_with("x"), name="a"),
        others={"b": Path("b")},
        opener=Opening(open_late),
    )
    with running(host) as one:
        body = {"model": "b", "prompt": "Q", "max_tokens": 9}
        asking = in_background(lambda: one.post("/v1/completions", body))
        wait_until(lambda: host.is_loading)
        assert one.http.get("/health").json() == {"status": "loading"}
        looking = in_background(lambda: one.http.get("/props"))
        time.sleep(0.1)
        gate.set()
        asking.join(LIMIT_S)
        looking.join(LIMIT_S)
        assert host.resident is not None and host.resident.name == "b"
    assert folder.loaded == ["b"]


def test_disconnect_while_waiting_for_a_model_blocks_no_other_request() -> None:
    folder = Folder()
    host = ModelHost(
        scripted_runtime(slowly(ENDLESS), name="a"),
        others={"b": Path("b")},
        opener=Opening(folder.open),
    )
    with running(host) as one:
        body = {"model": "a", "prompt": "Q", "max_tokens": 200}
        asking = in_background(lambda: one.post("/v1/completions", body))
        wait_until(lambda: not one.is_idle())
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(
                f"{one.url}/v1/completions", json={"model": "b", "prompt": "Q"}, timeout=0.2
            )
        reply = one.post("/v1/completions", {**body, "max_tokens": 3})
        assert reply.status_code == 200 and folder.loaded == []
        asking.join(LIMIT_S)


def test_models_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no models"):
        models_in(tmp_path)
    (tmp_path / "one.gguf").write_bytes(b"")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    assert models_in(tmp_path) == {"one": tmp_path / "one.gguf", "two": tmp_path / "two"}
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text("{}")
    with pytest.raises(ExlError, match="one name"):
        models_in(tmp_path)


async def _storm(url: str, expected: list[str], bodies: list[dict[str, Any]], seed: int) -> int:
    """Run one client per body. Half of them disconnect at a random moment. Returns the number of
    clients that received their reply."""
    random_moment = random.Random(seed)
    limits = httpx2.Limits(max_connections=None)
    healthy = []
    async with httpx2.AsyncClient(base_url=url, timeout=240, limits=limits) as client:

        async def ask(number: int) -> bool:
            leaves = number % 2 == 1
            body = bodies[number]
            text = ""
            await asyncio.sleep(random_moment.random() * 0.5)
            try:
                async with asyncio.timeout(random_moment.random() * 3 if leaves else None):
                    if not body["stream"]:
                        reply = await client.post("/v1/completions", json=body)
                        text = reply.json()["choices"][0]["text"]
                    else:
                        async with client.stream("POST", "/v1/completions", json=body) as lines:
                            text = await _joined(lines)
            except TimeoutError:
                return False
            assert text == expected[number]
            return True

        async def watch() -> None:
            while True:
                healthy.append((await client.get("/health")).status_code)
                await asyncio.sleep(0.2)

        watching = asyncio.create_task(watch())
        stayed = await asyncio.gather(*map(ask, range(len(bodies))))
        watching.cancel()
    assert healthy and set(healthy) == {200}
    return sum(stayed)


async def _joined(reply: httpx2.Response) -> str:
    text = ""
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            text += json.loads(line[6:])["choices"][0]["text"]
    return text


def storm(runtime: Runtime, num_clients: int) -> None:
    """Checks that concurrent clients get the replies that the same requests get alone."""
    with running(runtime, limits=Limits(max_queue=num_clients)) as one:
        bodies = [
            {
                "prompt": f"{'Once upon a time, ' * (i % 7)}number {i % 10} was",
                "max_tokens": 4 + i % 13,
                "temperature": 0 if i % 3 else 1,
                "top_k": 20,  # in the tail, a rounding error could change the token
                "seed": i % 10,
                "stream": i % 4 != 0,
            }
            for i in range(num_clients)
        ]
        alone: dict[str, str] = {}
        for body in bodies:
            if (key := repr(sorted(body.items()))) not in alone:
                reply = one.post("/v1/completions", {**body, "stream": False})
                alone[key] = reply.json()["choices"][0]["text"]
        expected = [alone[repr(sorted(body.items()))] for body in bodies]
        stayed = asyncio.run(_storm(one.url, expected, bodies, seed=num_clients))
        assert stayed >= num_clients // 2
        one.wait_until_idle()
        resident = one.host.resident
        assert resident is not None
        pool = resident.runtime.engine.pool
        wait_until(lambda: pool.num_available == pool.num_pages)
        assert one.http.get("/health").status_code == 200


@pytest.mark.thorough
def test_concurrent_clients_of_which_half_disconnect() -> None:
    """The next token of the scripted model depends on all previous ones, so that a wrong cache page
    changes the reply."""
    rule = slowly(HashRule(5), 0.002)
    storm(scripted_runtime(rule, ctx_size=512, max_batch=16, cache_tokens=4096), 60)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_200_clients_of_a_real_model_of_which_half_disconnect() -> None:
    """Runs with `exact`, where a reply does not depend on the other requests of its batch."""
    loaded = load_model(str(smollm2_gguf()), LoadOptions(exact=True))
    options = EngineOptions(cache_tokens=4096, max_batch=16, kv_format=KVFormat.FP32)
    storm(Runtime(loaded, Engine(loaded.model, loaded.tokenizer, options), 512), 200)
