"""The chat page in headless Chromium, driven by Playwright. Needs an installed browser."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor

from exl_cli.chat.settings import ChatOptions
from exl_cli.sampling_options import SamplingOptions
from exl_cli.server.app import Access
from exl_cli.server.models import ModelHost
from support.profiles import first_by_default
from support.scripted import Rule, reply_with
from support.server import Running, running, scripted_runtime

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright, no browser")
expect = playwright.expect
Page = Any

STEP_S = 0.02
REPLY = (
    "<think>hm, *so*</think># Heading\n\nSome **bold**, *italic* and `code`.\n"
    "Again: <img src=x onerror=alert(1)>\n\n"
    "- one\n  - inner\n- two\n\n3. three\n\n```python\nprint('**no**')\n```\n"
    "[good](https://example.com/a) [bad](javascript:alert(1))"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 360, "height": 740})
    context.set_default_timeout(10_000)
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
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def finished(page: Page) -> None:
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


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


def test_reply_is_rendered_as_markdown_and_never_as_html(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    ask(page, "Hello & <b>you</b>")
    finished(page)
    assert page.locator(".ask").inner_text() == "Hello & <b>you</b>"
    reply = page.locator(".reply")
    assert reply.locator("h2").inner_text() == "Heading"
    assert reply.locator("strong").inner_text() == "bold"
    assert reply.locator("em").inner_text() == "italic"
    assert reply.locator("p code").inner_text() == "code"
    assert reply.locator("pre").inner_text() == "print('**no**')"
    assert reply.locator("ul > li").count() == 3 and reply.locator("li li").inner_text() == "inner"
    assert reply.locator("ol").get_attribute("start") == "3"
    assert "<img src=x onerror=alert(1)>" in reply.inner_text()
    assert reply.locator("img").count() == 0
    links = reply.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == ["https://example.com/a"]
    assert page.locator(".reasoning").is_hidden()
    page.get_by_text("Reasoning").click()
    assert page.locator(".reasoning").inner_text() == "hm, *so*"
    assert re.fullmatch(r"\d+ tokens · [\d.]+ tokens/s · prompt \d+.*", about(page))
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def about(page: Page) -> str:
    found: str = page.locator("article:last-child .about").inner_text()
    return found


@pytest.mark.thorough
def test_copy_buttons(page: Page, quick: Running) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=quick.url)
    page.goto(quick.url)
    ask(page, "code")
    finished(page)
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "print('**no**')"
    page.get_by_role("button", name="Copy reply").click()
    expect(page.get_by_role("button", name="Copied")).to_have_count(2)
    assert page.evaluate("navigator.clipboard.readText()").startswith("# Heading")


TABLE = """Before
| Name | *Share* | `a\\|b` |
|:-----|:-------:|--------:|
| one | 1 | <b>x</b> | too many |
two | 2
> a ~~quoted~~ *line*
> - item

a | b
not a delimiter"""


@pytest.mark.thorough
def test_tables_and_quotations(page: Page) -> None:
    with running(scripted_runtime(reply_with(TABLE))) as one:
        page.goto(one.url)
        ask(page, "table")
        finished(page)
    rows = page.locator(".reply table tr")
    cells = [row.locator("th, td").all_inner_texts() for row in rows.all()]
    assert cells == [["Name", "Share", "a|b"], ["one", "1", "<b>x</b>"], ["two", "2", ""]]
    assert rows.nth(0).locator("th em").inner_text() == "Share"
    sides = (
        rows.nth(1)
        .locator("td")
        .evaluate_all("(cells) => cells.map((cell) => getComputedStyle(cell).textAlign)")
    )
    assert sides == ["left", "center", "right"]
    quotation = page.locator(".reply blockquote")
    assert quotation.locator("del").inner_text() == "quoted"
    assert quotation.locator("li").inner_text() == "item"
    assert page.locator(".reply > p").all_inner_texts() == ["Before", "a | b\nnot a delimiter"]


@pytest.mark.thorough
def test_wide_tables_and_code_scroll_in_their_boxes(page: Page) -> None:
    wide = "| " + " | ".join(f"column{i}" for i in range(20)) + " |\n|" + "---|" * 20
    with running(scripted_runtime(reply_with(f"{wide}\n\n```\n{'x' * 400}\n```"))) as one:
        page.goto(one.url)
        ask(page, "wide")
        finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for part in (".table", "pre"):
        box = page.locator(f".reply {part}")
        assert box.evaluate("(box) => box.scrollWidth > box.clientWidth && box.tabIndex === 0")


@pytest.mark.thorough
def test_each_tab_has_its_own_conversation(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    ask(page, "first")
    finished(page)
    other = page.context.new_page()
    other.goto(quick.url)
    assert other.locator(".ask").all_inner_texts() == ["first"]
    ask(page, "here")
    ask(other, "there")
    finished(page)
    finished(other)
    for tab, said in ((page, "here"), (other, "there")):
        tab.reload()
        assert tab.locator(".ask").all_inner_texts() == ["first", said]


@pytest.mark.thorough
def test_unreadable_stored_conversation_is_reported(page: Page, quick: Running) -> None:
    page.add_init_script("localStorage.setItem('exl-chat-1', '{')")
    page.goto(quick.url)
    expect(page.locator("#hint")).to_contain_text("cannot be read")
    ask(page, "again")
    finished(page)


@pytest.mark.thorough
def test_characters_that_only_resemble_emphasis_are_text(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    text = "*1. one\n*2. two* 3 * 4 ** 5 ** a_b_c 2*3"
    shown = page.evaluate(
        """(text) => {
            const box = document.createElement("div");
            showMarkdown(box, text);
            const marked = [...box.querySelectorAll("em, strong")];
            return [box.textContent, marked.map((one) => one.textContent)];
        }""",
        text,
    )
    assert shown == ["*1. one\n2. two 3 * 4 ** 5 ** a_b_c 2*3", ["2. two"]]


@pytest.mark.parametrize("how", first_by_default(["Escape", "button"]))
def test_reply_streams_and_stops(page: Page, slow: Running, how: str) -> None:
    page.goto(slow.url)
    ask(page, "go")
    expect(page.locator(".reply")).to_contain_text("abc abc")
    assert page.locator(".reply").locator("xpath=..").get_attribute("aria-busy") == "true"
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
def test_retry_edit_undo_and_new(page: Page, quick: Running) -> None:
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(quick.url)
    page.get_by_text("Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("")
    page.get_by_label("Seed").fill("7")
    ask(page, "first")
    finished(page)
    page.get_by_role("button", name="Retry").click()
    finished(page)
    assert sent[0] == sent[1]
    assert sent[0]["seed"] == 7 and "temperature" not in sent[0] and "model" not in sent[0]
    roles = [message["role"] for message in sent[0]["messages"]]
    assert roles == ["system", "user"]
    ask(page, "second")
    finished(page)
    roles = [message["role"] for message in sent[2]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert "<think>" not in sent[2]["messages"][2]["content"]
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message").input_value() == "second"
    assert page.locator("article").count() == 1
    page.get_by_role("button", name="Undo").click()
    assert page.locator("article").count() == 0
    ask(page, "third")
    finished(page)
    assert [message["content"] for message in sent[3]["messages"]] == ["Be brief.", "third"]
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    page.reload()
    assert page.locator("article").count() == 0
    assert page.get_by_label("System prompt").input_value() == "Be brief."


@pytest.mark.thorough
def test_new_chat_stops_the_running_reply(page: Page, slow: Running) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(slow.url)
    ask(page, "go")
    expect(page.locator(".reply")).to_contain_text("abc")
    page.get_by_role("button", name="New chat").click()
    slow.wait_until_idle()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.locator("article").count() == 0
    ask(page, "again")
    expect(page.locator(".reply")).to_contain_text("abc")
    page.keyboard.press("Escape")
    finished(page)
    slow.wait_until_idle()


@pytest.mark.thorough
def test_conversation_survives_a_reload_during_a_reply(page: Page, slow: Running) -> None:
    page.goto(slow.url)
    ask(page, "go")
    expect(page.locator(".reply")).to_contain_text("abc abc")
    page.get_by_label("Message").fill("not sent yet")
    page.reload()
    assert page.locator(".ask").inner_text() == "go"
    assert page.locator(".reply").inner_text().startswith("abc abc")
    assert about(page) == "interrupted"
    assert page.get_by_label("Message").input_value() == "not sent yet"
    slow.wait_until_idle()


@pytest.mark.thorough
def test_conversation_survives_a_restart_of_the_server(page: Page) -> None:
    with running(scripted_runtime(reply_with("before"))) as one:
        page.goto(one.url)
        ask(page, "one")
        finished(page)
        port = int(one.url.rpartition(":")[2])
    ask(page, "two")
    expect(page.locator(".error:visible")).to_contain_text("The server does not answer")
    finished(page)
    assert page.locator(".ask").all_inner_texts() == ["one", "two"]
    with running(scripted_runtime(reply_with("after"), name="other"), port=port):
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".reply").last).to_have_text("after")
        assert page.locator(".error:visible").count() == 0
        page.reload()
        assert page.locator(".reply").all_inner_texts() == ["before", "after"]
        expect(page.locator("#name")).to_have_text("other")


@pytest.mark.thorough
def test_error_message_of_the_server_is_shown(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    page.get_by_text("Settings").click()
    page.get_by_label("Top-p").fill("0")
    ask(page, "hi")
    expect(page.locator(".error")).to_contain_text("top_p")
    page.get_by_label("Top-p").fill("7")
    page.get_by_role("button", name="Edit").click()
    page.keyboard.press("Enter")
    assert page.locator("article").count() == 0, "the form does not send invalid values"


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
def test_model_can_be_selected(page: Page, tmp_path: Any) -> None:
    first = scripted_runtime(reply_with("of the first"))
    other = scripted_runtime(reply_with("of the other"), name="other")
    host = ModelHost(first, others={"other": tmp_path}, opener=lambda _: other)
    with running(host) as one:
        page.goto(one.url)
        page.get_by_label("Model").select_option("other")
        ask(page, "hi")
        expect(page.locator(".reply")).to_have_text("of the other")
        page.reload()
        expect(page.get_by_label("Model")).to_have_value("other")


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


HARMFUL = (
    *("- ", "*a", "**", "`", "[", "_a ", "# ", "  - a\n    ", "```", "1. ", "http://", " \t"),
    *("|", "| -", "|\n", "-|", "> ", ">\n", "~~a", "|a|\n|-|\n"),
)


@pytest.mark.thorough
def test_hostile_markdown_renders_in_time(page: Page, quick: Running) -> None:
    page.goto(quick.url)
    took_ms = page.evaluate(
        """(texts) => texts.map((text) => {
            const start = performance.now();
            showMarkdown(document.createElement("div"), text);
            return performance.now() - start;
        })""",
        [piece * 20_000 for piece in HARMFUL],
    )
    slow = {piece: ms for piece, ms in zip(HARMFUL, took_ms, strict=True) if ms > 3000}
    assert not slow
