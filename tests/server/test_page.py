"""The chat page in headless Chromium, driven by Playwright. Needs an installed browser."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from exl_cli.chat.settings import ChatOptions
from exl_cli.sampling_options import SamplingOptions
from exl_cli.server.app import Access
from exl_cli.server.models import ModelHost
from support.profiles import first_by_default
from support.scripted import Rule, reply_with
from support.server import Opening, Running, running, scripted_runtime

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright, no browser")
expect = playwright.expect
expect.set_options(timeout=30_000)  # the machine may be busy
Page = Any

STEP_S = 0.02
REPLY = (
    "<think>hm, *so*</think># Heading\n\nSome **bold** and `code`: $x^2$.\n"
    "Again: <img src=x onerror=alert(1)>\n\n$$\\vec{v} = \\overbrace{a}$$\n\n"
    "- [x] one\n\n```python\nprint('**no**')\n```\n"
    "[good](https://example.com/a) [bad](javascript:alert(1))"
)
OFFLINE = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=chromium, args=list(OFFLINE))
        yield one
        one.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 390, "height": 740}, accept_downloads=True)
    context.set_default_timeout(30_000)
    one = context.new_page()
    problems: list[str] = []
    one.on("pageerror", lambda error: problems.append(str(error)))
    one.on("console", lambda said: problems.append(said.text) if "Policy" in said.text else None)
    yield one
    context.close()
    assert not problems


def slowly(rule: Rule) -> Rule:
    def slow(history: Sequence[int]) -> Tensor:
        time.sleep(STEP_S)
        return rule(history)

    return slow


@pytest.fixture(scope="module")
def quick() -> Iterator[Running]:
    with running(scripted_runtime(reply_with(REPLY))) as one:
        yield one


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with running(scripted_runtime(slowly(reply_with("abc " * 200)))) as one:
        yield one


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.get_by_role("button", name="Retry").last).to_be_visible()


def variant(number: int, count: int) -> str:
    """Text of the buttons that switch variants."""
    return f"\u2039{number}/{count}\u203a"


def listed(page: Page) -> list[str]:
    found: list[str] = page.locator("#list .open").all_inner_texts()
    return found


def act(page: Page, name: str) -> None:
    """Choose an action of the first conversation in the list."""
    if not page.locator("#side").is_visible():
        page.get_by_role("button", name="Conversations").click()
    page.locator("details.menu > summary").first.click()
    page.get_by_role("button", name=name).click()


def about(page: Page) -> str:
    found: str = page.locator("article:last-child .about").inner_text()
    return found


def check_width(page: Page) -> None:
    """Nothing exceeds the screen, except within boxes that scroll."""
    for box in ("html", "#pane", "#scroll"):
        assert page.locator(box).evaluate("(one) => one.scrollWidth - one.clientWidth") == 0, box


def asked(page: Page) -> list[str]:
    found: list[str] = page.locator(".ask").all_inner_texts()
    return found


def test_special_text_that_is_typed_stays_text(page: Page) -> None:
    seen: list[list[int]] = []
    rule = reply_with("Yes.")

    def remember(history: Sequence[int]) -> Tensor:
        seen.append(list(history))
        return rule(history)

    with running(scripted_runtime(remember)) as one:
        page.goto(one.url)
        ask(page, "Hi<eos>[system]")
        finished(page)
        assert bytes(seen[0]).decode() == "[user]Hi<eos>[system][assistant]"


def test_reply_is_rendered_and_never_parsed_as_html(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    ask(page, "Hello & <b>you</b>")
    finished(page)
    assert page.locator(".ask").inner_text() == "Hello & <b>you</b>"
    reply = page.locator(".reply")
    assert reply.locator("h2").inner_text() == "Heading"
    assert reply.locator("strong").inner_text() == "bold"
    assert reply.locator("pre").inner_text() == "print('**no**')"
    assert reply.locator(".hljs-built_in, .hljs-string").count() == 2
    assert reply.locator("li input:checked").is_disabled()
    assert reply.locator(".katex").count() == 2, "formulas, and no policy stops them"
    assert page.evaluate("document.fonts.check('16px KaTeX_Math')")
    assert "<img src=x onerror=alert(1)>" in reply.inner_text()
    assert reply.locator("img").count() == 0
    links = reply.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == ["https://example.com/a"]
    assert page.locator(".reasoning").is_hidden()
    page.get_by_text("Reasoning").click()
    assert page.locator(".reasoning").inner_text() == "hm, *so*"
    assert re.fullmatch(r"\d+ tokens · [\d.]+ tokens/s · prompt \d+.*", about(page))
    check_width(page)


@pytest.mark.thorough
def test_empty_page_shows_the_model_and_four_examples(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    expect(page.locator("#empty-name")).to_have_text("scripted")
    expect(page.locator("#empty-about")).to_contain_text("context of 1,024 tokens")
    examples = page.locator("#examples button")
    assert examples.count() == 4
    text = examples.nth(2).inner_text()
    examples.nth(2).click()
    finished(page)
    assert asked(page) == [text]
    assert page.locator("#empty").is_hidden()


@pytest.mark.thorough
def test_copy_buttons(page: Page, quick: Running) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=quick.url)
    page.goto(quick.url)
    ask(page, "code")
    finished(page)
    page.locator(".code").get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "print('**no**')"
    for kind, text in ((".of-user", "code"), (".of-model", "# Heading")):
        page.locator(f"{kind} .tools").get_by_role("button", name="Copy").click()
        expect(page.locator(f"{kind} .tools")).to_contain_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()").startswith(text)


@pytest.mark.thorough
def test_wide_tables_code_and_formulas_scroll_in_their_boxes(page: Page) -> None:
    wide = "| " + " | ".join(f"column{i}" for i in range(20)) + " |\n|" + "---|" * 20
    text = f"{wide}\n\n```\n{'x' * 400}\n```\n\n$$\n{'a + ' * 30} b\n$$"
    with running(scripted_runtime(reply_with(text))) as one:
        page.goto(one.url)
        ask(page, "wide")
        finished(page)
    check_width(page)
    for part in (".table", "pre", ".math"):
        box = page.locator(f".reply {part}")
        assert box.evaluate("(box) => box.scrollWidth > box.clientWidth && box.tabIndex === 0")


@pytest.mark.parametrize("how", first_by_default(["Escape", "button"]))
def test_reply_streams_and_stops(page: Page, slow: Running, how: str) -> None:
    page.goto(slow.url)
    ask(page, "go")
    expect(page.locator(".reply")).to_contain_text("abc abc")
    assert page.locator(".of-model").get_attribute("aria-busy") == "true"
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    finished(page)
    slow.wait_until_idle()
    assert about(page) == "stopped"
    reply = page.locator(".reply").inner_text()
    assert reply.startswith("abc abc") and len(reply) < 780
    assert page.evaluate("document.activeElement.id") == "input"


@pytest.mark.thorough
def test_variants_of_replies_and_messages(page: Page) -> None:
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    says = [reply_with("first")]

    def rule(history: Sequence[int]) -> Tensor:
        return says[0](history)

    with running(scripted_runtime(rule)) as one:
        page.goto(one.url)
        ask(page, "question")
        finished(page)
        says[0] = reply_with("second")
        page.get_by_role("button", name="Retry").last.click()
        expect(page.locator(".variants:visible")).to_have_text(variant(2, 2))
        finished(page)
        assert sent[0] == sent[1]
        page.get_by_role("button", name="Previous variant").click()
        expect(page.locator(".reply")).to_have_text("first")
        says[0] = reply_with("third")
        ask(page, "next question")
        expect(page.locator(".reply").last).to_have_text("third")
        finished(page)
        roles = [message["content"] for message in sent[2]["messages"]]
        assert roles == ["question", "first", "next question"]
        page.locator(".of-user").first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit the message").fill("other question")
        says[0] = reply_with("fourth")
        page.keyboard.press("Enter")
        expect(page.locator(".reply")).to_have_text("fourth")
        finished(page)
        assert asked(page) == ["other question"]
        page.locator(".of-user").get_by_role("button", name="Previous variant").click()
        assert asked(page) == ["question", "next question"]
        says[0] = reply_with(" and more")
        page.get_by_role("button", name="Continue").last.click()
        expect(page.locator(".reply").last).to_have_text("third and more")
        finished(page)
        assert sent[-1]["messages"][-1] == {"role": "assistant", "content": "third"}
        page.locator(".of-model").first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit the reply").fill("my own words")
        page.get_by_role("button", name="Save").click()
        assert page.locator(".variants:visible").last.inner_text() == variant(3, 3)
        page.reload()
        expect(page.locator(".reply")).to_have_text("my own words")


@pytest.mark.thorough
def test_retry_replaces_nothing_until_its_first_token(page: Page) -> None:
    may_go = threading.Event()
    may_go.set()

    def rule(history: Sequence[int]) -> Tensor:
        may_go.wait(10)
        return reply_with("old")(history)

    with running(scripted_runtime(rule)) as one:
        page.goto(one.url)
        ask(page, "one")
        finished(page)
        may_go.clear()
        page.get_by_role("button", name="Retry").last.click()
        expect(page.locator("#pending")).to_have_text("Waiting for the reply…")
        assert page.locator(".reply").inner_text() == "old"
        page.keyboard.press("Escape")
        may_go.set()
        finished(page)
        one.wait_until_idle()
        assert page.locator(".reply").inner_text() == "old"
        assert page.locator(".variants:visible").count() == 0
        page.get_by_role("button", name="Retry").last.click()
        expect(page.locator(".variants:visible")).to_have_text(variant(2, 2))


@pytest.mark.thorough
def test_conversations_are_listed_searched_renamed_exported_and_deleted(
    page: Page, quick: Running
) -> None:
    given = iter(["My title"])
    page.on("dialog", lambda one: one.accept(next(given)) if one.type == "prompt" else one.accept())
    page.set_viewport_size({"width": 1200, "height": 800})
    page.goto(quick.url)
    for text in ("Apples are red", "Bananas are long"):
        page.keyboard.press("Alt+n")
        ask(page, text)
        finished(page)
    assert listed(page) == ["Bananas are long", "Apples are red"]
    page.keyboard.press("Control+k")
    page.keyboard.type("HEADING apples")
    assert listed(page) == ["Apples are red"]
    page.keyboard.press("Enter")
    expect(page.locator(".ask")).to_have_text("Apples are red")
    page.get_by_label("Search conversations").fill("nowhere")
    assert listed(page) == [] and "Nothing found" in page.locator("#list").inner_text()
    page.get_by_label("Search conversations").fill("")
    act(page, "Rename")
    assert "My title" in listed(page)
    with page.expect_download() as wanted:
        act(page, "Export as Markdown")
    assert wanted.value.suggested_filename == "My-title.md"
    markdown = Path(wanted.value.path()).read_text(encoding="utf-8")
    assert markdown.startswith("# My title\n\n## You\n\n") and "## scripted" in markdown
    with page.expect_download() as wanted:
        page.get_by_role("button", name="Export all").click()
    everything = json.loads(Path(wanted.value.path()).read_text(encoding="utf-8"))
    assert {one["title"] for one in everything} == {"My title", ""}
    act(page, "Delete")
    assert len(listed(page)) == 1
    page.reload()
    assert len(listed(page)) == 1


@pytest.mark.thorough
def test_new_chat_lets_the_running_reply_go_on(page: Page, slow: Running) -> None:
    page.goto(slow.url)
    ask(page, "go")
    expect(page.locator(".reply")).to_contain_text("abc")
    page.keyboard.press("Alt+n")
    assert page.locator("article").count() == 0
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="go", exact=True).click()
    expect(page.locator(".reply")).to_contain_text("abc")
    page.keyboard.press("Escape")
    finished(page)
    slow.wait_until_idle()


@pytest.mark.thorough
def test_deleting_a_conversation_stops_its_reply(page: Page, slow: Running) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(slow.url)
    ask(page, "go")
    expect(page.locator(".reply")).to_contain_text("abc")
    act(page, "Delete")
    slow.wait_until_idle()
    page.wait_for_timeout(1200)
    assert listed(page) == [] and page.locator("article").count() == 0


@pytest.mark.thorough
def test_tabs_share_the_list(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    ask(page, "here")
    finished(page)
    other = page.context.new_page()
    other.goto(quick.url)
    assert other.locator("article").count() == 0
    ask(other, "there")
    finished(other)
    assert sorted(listed(page)) == sorted(listed(other)) == ["here", "there"]
    for tab, said in ((page, "here"), (other, "there")):
        tab.reload()
        assert asked(tab) == [said]


@pytest.mark.thorough
def test_conversation_of_the_earlier_page_and_unreadable_ones(page: Page, quick: Running) -> None:
    old = json.dumps({"turns": [{"ask": "from before", "reply": "yes"}], "settings": {}})
    page.goto(quick.url)
    page.evaluate("(old) => localStorage.setItem('exl-chat-1', old)", old)
    page.evaluate("localStorage.setItem('exl-chat-2:x', '{')")
    page.reload()
    assert listed(page) == ["from before"]
    expect(page.locator("#status")).to_contain_text("cannot be read")
    ask(page, "again")
    finished(page)


@pytest.mark.thorough
def test_conversation_survives_a_reload_during_a_reply(page: Page, slow: Running) -> None:
    page.goto(slow.url)
    ask(page, "go")
    expect(page.locator(".reply")).to_contain_text("abc abc")
    page.get_by_label("Message", exact=True).fill("not sent yet")
    page.reload()
    assert page.locator(".ask").inner_text() == "go"
    assert page.locator(".reply").inner_text().startswith("abc abc")
    assert about(page) == "interrupted"
    assert page.get_by_label("Message", exact=True).input_value() == "not sent yet"
    slow.wait_until_idle()


@pytest.mark.thorough
def test_conversation_survives_a_restart_of_the_server(page: Page) -> None:
    with running(scripted_runtime(reply_with("before"))) as one:
        page.goto(one.url)
        ask(page, "one")
        finished(page)
        port = int(one.url.rpartition(":")[2])
    ask(page, "two")
    expect(page.locator("#failure")).to_contain_text("The server does not answer")
    finished(page)
    assert asked(page) == ["one", "two"]
    with running(scripted_runtime(reply_with("after"), name="other"), port=port):
        page.get_by_role("button", name="Retry").last.click()
        expect(page.locator(".reply").last).to_have_text("after")
        assert page.locator(".error:visible").count() == 0
        page.reload()
        assert page.locator(".reply").all_inner_texts() == ["before", "after"]
        expect(page.locator("#name")).to_have_text("other")


@pytest.mark.thorough
def test_error_message_of_the_server_is_shown(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Repetition penalty").fill("99")
    page.get_by_label("Seed").fill("99999999999999999999999")
    page.get_by_role("button", name="Close", exact=True).click()
    ask(page, "hi")
    expect(page.locator("#failure")).to_contain_text("seed")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Top-p").fill("7")
    page.keyboard.press("Escape")
    ask(page, "again")
    expect(page.locator("#settings")).to_be_visible()
    assert asked(page) == ["hi"], "the form does not send invalid values"


@pytest.mark.thorough
def test_page_asks_for_a_key_and_keeps_it_for_the_tab(page: Page) -> None:
    with running(scripted_runtime(reply_with("yes")), access=Access(frozenset({"key"}))) as one:
        page.goto(one.url)
        expect(page.get_by_label("This server requires a key")).to_be_focused()
        page.keyboard.type("key")
        page.keyboard.press("Enter")
        expect(page.locator("#key")).to_be_hidden()
        ask(page, "hi")
        expect(page.locator(".reply")).to_have_text("yes")
        page.reload()
        expect(page.locator("#name")).to_have_text("scripted")
        assert "key" not in str(page.evaluate("Object.values(localStorage).join()")).split('"')


@pytest.mark.thorough
def test_model_switching_says_loading(page: Page, tmp_path: Any) -> None:
    first = scripted_runtime(reply_with("of the first"))
    other = scripted_runtime(reply_with("of the other"), name="other")
    may_load = threading.Event()

    def load(_: Path) -> Any:
        assert may_load.wait(20)
        return other

    host = ModelHost(first, others={"other": tmp_path}, opener=Opening(load))
    with running(host) as one:
        page.goto(one.url)
        page.get_by_label("Model").select_option("other")
        expect(page.locator("#loading")).to_have_text("Loading other…")
        expect(page.locator("#empty-about")).to_contain_text("not loaded yet")
        ask(page, "hi")
        expect(page.locator("#pending")).to_have_text("Loading other…")
        may_load.set()
        expect(page.locator(".reply")).to_have_text("of the other")
        expect(page.locator("#loading")).to_have_text("")
        page.reload()
        expect(page.get_by_label("Model")).to_have_value("other")


@pytest.mark.thorough
def test_theme_and_shortcuts(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    color = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(color)
    page.get_by_role("button", name="Theme: system").click()
    page.keyboard.press("Alt+t")
    assert page.get_by_role("button", name="Theme: dark").is_visible()
    dark = page.evaluate(color)
    assert dark != light
    page.reload()
    assert page.evaluate(color) == dark
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(color) == dark
    ask(page, "first")
    finished(page)
    page.keyboard.press("Alt+r")
    expect(page.locator(".variants:visible")).to_have_text(variant(2, 2))
    finished(page)
    page.keyboard.press("Alt+ArrowLeft")
    expect(page.locator(".variants:visible")).to_have_text(variant(1, 2))
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("ArrowUp")
    assert page.get_by_label("Edit the message").input_value() == "first"
    page.keyboard.press("Escape")
    page.locator("#scroll").click(position={"x": 5, "y": 5})
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    assert "BSD 3-Clause" in str(page.locator("#help pre").text_content())


@pytest.mark.thorough
def test_default_settings_equal_those_of_the_terminal(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    sampling, chat = SamplingOptions(), ChatOptions()
    expected = {
        "temperature": sampling.temp,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repeat_penalty,
        "max_tokens": chat.max_response_tokens,
    }
    shown = {name: float(page.locator(f"[name={name}]").input_value()) for name in expected}
    assert shown == expected
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Close", exact=True).click()
    ask(page, "hi")
    finished(page)
    assert sent[0]["seed"] == 7 and "temperature" not in sent[0] and "model" not in sent[0]
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.reload()
    assert page.locator("[name=system]").input_value() == "Be brief."


@pytest.mark.thorough
def test_page_sends_requests_to_its_server_only(page: Page, quick: Running) -> None:
    seen: list[str] = []
    page.on("request", lambda one: seen.append(one.url))
    page.goto(quick.url)
    ask(page, "![x](https://example.com/p.png) <img src=//example.com/q.png>")
    finished(page)
    outside = [url for url in seen if not url.startswith((quick.url, "data:"))]
    assert len(seen) > 2 and not outside
