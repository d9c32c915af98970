"""Names, sites and paths under which the server answers; sampler defaults and prompt formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exl_cli.server.app import Access
from exl_cli.server.limits import check_origins, hosts_of
from exl_cli.server.models import ModelHost, Prompting, models_in
from exl_cli.server.presets import check_preset, defaults_of
from exl_core.errors import RequestError
from exl_core.prompt.formats import find_format
from support.scripted import reply_with
from support.server import Opening, error_of, running, scripted_runtime

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
SITE = "http://localhost:3000"
HI = [{"role": "user", "content": "hi"}]


def test_paths_work_without_their_version() -> None:
    with running(scripted_runtime(reply_with("hello"))) as one:
        text = one.post("/completions", {"prompt": "Q"}).json()["choices"][0]["text"]
        chat = one.post("/chat/completions", {"messages": HI}).json()["choices"][0]["message"]
        assert text == chat["content"] == "hello"
        for path in ("/models", "/models/scripted", "/model"):
            assert one.http.get(path).json() == one.http.get(f"/v1{path}").json()


def test_sites_that_are_allowed_can_use_the_server() -> None:
    access = Access(frozenset({"sesame"}), origins=(SITE,))
    preflight = {
        "origin": SITE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    with running(scripted_runtime(reply_with("x")), access=access) as one:
        allowed = one.http.options(CHAT, headers=preflight)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == SITE
        assert allowed.headers["access-control-allow-headers"] == "authorization, content-type"
        answer = one.http.get("/v1/models", headers={"origin": SITE, "x-api-key": "sesame"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == SITE
        refused = one.http.get("/v1/models", headers={"origin": SITE})
        assert refused.headers["access-control-allow-origin"] == SITE, "so that a page can read it"
        error_of(refused, 401)
        for other in ("http://localhost:3001", "null", "http://localhost:3000.evil.example"):
            answer = one.http.options(CHAT, headers={**preflight, "origin": other})
            assert answer.status_code in (401, 405), "no preflight of other sites is answered"
            assert "access-control-allow-origin" not in answer.headers


def test_origins_are_checked() -> None:
    check_origins(["*", SITE, "https://chat.example"], has_key=True)
    with pytest.raises(RequestError, match="all sites"):
        check_origins(["*"], has_key=False)
    for wrong in ("localhost:3000", "http://a/b", "", "ftp://a"):
        with pytest.raises(RequestError, match="not the origin"):
            check_origins([wrong], has_key=True)


def test_further_host_names_can_be_allowed() -> None:
    access = Access(hosts=hosts_of("127.0.0.1", (), ("Box.Local",)))
    with running(scripted_runtime(reply_with("x")), access=access) as one:
        assert one.http.get("/v1/models", headers={"host": "box.local:80"}).status_code == 200
        error_of(one.http.get("/v1/models", headers={"host": "evil.example"}), 403)


def folder_of_models(home: Path) -> Path:
    for name in ("llama-8b", "owner/qwen-4b", "owner/qwen-14b"):
        (home / name).mkdir(parents=True)
        (home / name / "config.json").write_text("{}")
    (home / "owner" / "tiny.gguf").write_text("")
    (home / "notes").mkdir()
    return home


def test_models_of_a_folder_are_named_by_prefix_and_alias(tmp_path: Path) -> None:
    others = models_in(folder_of_models(tmp_path))
    assert list(others) == ["llama-8b", "owner/qwen-14b", "owner/qwen-4b", "owner/tiny"]
    opened: list[str] = []

    def opener(path: Path) -> Any:
        opened.append(path.name)
        return scripted_runtime(reply_with("x"), name=path.name)

    host = ModelHost(
        scripted_runtime(reply_with("x")),
        name="llama-8b",
        others=others,
        opener=Opening(opener),
        aliases={"gpt-4": "owner/qwen-14b"},
    )
    with running(host) as one:
        for asked, served in (
            ("llama", "llama-8b"),
            ("owner/qwen-4", "owner/qwen-4b"),
            ("gpt-4", "owner/qwen-14b"),
        ):
            answer = one.post(TEXT, {"prompt": "Q", "model": asked})
            assert answer.json()["model"] == served
        for asked in ("owner/qwen", "gpt-5", ""):
            error = error_of(one.post(TEXT, {"prompt": "Q", "model": asked}), 404)
            assert error["code"] == "model_not_found"
    assert opened == ["qwen-4b", "qwen-14b"]


def test_sampler_defaults_come_from_the_model_or_a_file(tmp_path: Path) -> None:
    assert defaults_of("model", tmp_path) == {}
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(config))
    assert defaults_of("model", tmp_path) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert defaults_of("neutral", tmp_path) == {}
    path.write_text(json.dumps({**config, "do_sample": False}))
    assert defaults_of("model", tmp_path) == {}
    preset = tmp_path / "preset.json"
    preset.write_text('{"min_p": 0.1, "rep_pen": 1.1}')
    assert defaults_of(str(preset), tmp_path) == {"min_p": 0.1, "repetition_penalty": 1.1}
    for wrong in ('{"min_p": 2}', '{"min_q": 1}', "[]", "{"):
        preset.write_text(wrong)
        with pytest.raises(RequestError, match="preset"):
            check_preset(str(preset))


def test_requests_override_the_defaults() -> None:
    host = ModelHost(
        scripted_runtime(reply_with("hello")),
        prompting=Prompting(lambda _: {"top_k": 1, "temperature": 0.5}),
    )
    with running(host) as one:
        resident = one.host.resident
        assert resident is not None
        assert resident.defaults["top_k"] == 1
        assert one.post(TEXT, {"prompt": "Q", "top_k": 0}).status_code == 200


def test_a_prompt_format_replaces_the_template() -> None:
    seen: list[str] = []
    rule = reply_with("ok")

    def echo(history: Any) -> Any:
        seen.append(bytes(one for one in history if one < 256).decode())
        return rule(history)

    runtime = scripted_runtime(echo, template=None)
    host = ModelHost(runtime, prompting=Prompting(prompt_format=find_format("alpaca")))
    with running(host) as one:
        assert one.post(CHAT, {"messages": HI, "max_tokens": 2}).status_code == 200
        assert "### Instruction:\nhi" in seen[0] and "### Response:" in seen[0]
        tool = {"type": "function", "function": {"name": "f"}}
        error_of(one.post(CHAT, {"messages": HI, "tools": [tool]}), 400)


def test_the_stop_text_of_a_prompt_format_is_the_end_of_a_turn() -> None:
    runtime = scripted_runtime(reply_with("Yes.\n### Instruction:\nno"), template=None)
    host = ModelHost(runtime, prompting=Prompting(prompt_format=find_format("alpaca")))
    with running(host) as one:
        body = {"messages": HI, "max_tokens": 50}
        answer = one.post("/v1/messages", body).json()
        assert answer["content"][0]["text"] == "Yes.\n"
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
        asked = one.post("/v1/messages", {**body, "stop_sequences": ["s."]}).json()
        assert (asked["stop_reason"], asked["stop_sequence"]) == ("stop_sequence", "s.")
        assert '"stop_reason":"end_turn"' in one.post("/v1/messages", {**body, "stream": True}).text
