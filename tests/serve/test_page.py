"""The page as a person meets it, in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import browser as browsers
import httpx
import pytest
from answering import small
from browser import Browser
from conftest import tokenizer
from running import KEYS, held, serving, within

from kvkeep.engine import answer as scheduling
from kvkeep.serve.engine import Engine
from kvkeep.serve.http import answering, completions
from kvkeep.serve.http.completions import ChatRequest
from kvkeep.serve.http.kept_answers import KeptAnswer
from kvkeep.serve.http.protocol import server_sent

SCRIPT = "<img src=x onerror='window.hacked = 1'> <script>window.hacked = 1</script> **<b>bold</b>**"
READY = "document.querySelector('#method').options.length > 20"
"""The page knows the server's models and methods. Before, it sends nothing."""
IDLE = "!document.querySelector('#send').hidden"
ENDED = f"{IDLE} && [...document.querySelectorAll('.after')].at(-1)?.textContent.includes('tokens')"
"""The last answer is drawn to its end. The buttons change a frame earlier."""


def test_it_loads_nothing_from_elsewhere_and_says_so() -> None:
    folder = resources.files("kvkeep.serve").joinpath("page")
    text = {one.name: one.read_text(encoding="utf-8") for one in folder.iterdir()}
    for name, content in text.items():
        assert set(re.findall(r"https?://[\w.]+", content)) <= {"http://www.w3.org"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", content), name
    assert not re.search(r"\bon\w+=|\bstyle=|<style|<script(?! type=\"module\" src=\"/page/)", text["index.html"])
    with serving() as (address, _):
        found = httpx.get(address + "/")  # without a key
        assert "default-src 'none'" in found.headers["content-security-policy"]
        assert "unsafe" not in found.headers["content-security-policy"]
        for name in re.findall(r'"(/page/[\w.]+)"', found.text):
            assert httpx.get(address + name).status_code == 200
        tag = {"If-None-Match": found.headers["etag"]}
        assert httpx.get(address + "/", headers=tag).status_code == 304
        assert httpx.get(address + "/page/..%2f..%2fapp.py").status_code in (401, 404)
        assert httpx.get(address + "/page/page.py").status_code == 404


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Browser]:
    if browsers.found() is None:
        pytest.skip("no browser here (chromium or chrome): the page is not tried")
    made = Browser(tmp_path)
    yield made
    made.close()


def texts(tab: Browser, who: str) -> list[str]:
    found: list[str] = tab.run(f"[...document.querySelectorAll('.message.{who} .body')].map((e) => e.textContent)")
    return found


def send(tab: Browser, text: str) -> None:
    tab.click("#prompt")
    tab.type(text)
    tab.press("Enter", 13)


def choose(tab: Browser, method: str, budget: str) -> None:
    change = "dispatchEvent(new Event('change'))"
    tab.run(f"(() => {{ const e = document.querySelector('#method'); e.value = '{method}'; e.{change} }})()")
    typed = "dispatchEvent(new Event('input'))"
    tab.run(f"(() => {{ const e = document.querySelector('#budget'); e.value = '{budget}'; e.{typed} }})()")


@pytest.mark.slow
def test_a_person_talks_stops_looks_and_comes_back(tab: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "DEFAULT_MAX_TOKENS", 60)  # for texts as long as a model without sense writes them
    with serving() as (address, engine):
        _comes_in(tab, address)
        _talks(tab, engine)
        _looks(tab, engine)
        monkeypatch.setattr(answering, "DEFAULT_MAX_TOKENS", 300)
        _stops(tab, engine)
        _comes_back(tab, address)
        _reloads(tab, engine, monkeypatch)
        _on_a_phone(tab)
        _is_safe(tab, address)
        assert not tab.errors, tab.errors


def test_what_is_chosen_stays_and_what_is_said_can_be_changed(
    tab: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _recorded(monkeypatch)
    with serving(keys=[], engine=Engine(small(), 10**8, method="h2o", budget=16)) as (address, _):
        tab.open(address)
        tab.until(READY)
        _keeps_the_budget(tab)
        _sends_settings_and_files(tab, asked)
        _copies_edits_and_regenerates(tab, asked)
        _exports(tab, tmp_path)
        _keeps_lines_and_hides_special_tokens(tab)
        _changes_length(tab, asked)
        assert not tab.errors, tab.errors


def test_reading_shows_progress_and_escape_stops(tab: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "CHUNK", 4)  # a prompt of many steps
    with serving(keys=[]) as (address, engine):
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda wait=False: (time.sleep(0.03), step(wait))[1])
        engine.call(lambda: None).result(10)
        tab.open(address)
        tab.until(READY)
        send(tab, "the river and the stone " * 50)
        tab.until("/^Reading [\\d,]+ of [\\d,]+ tokens$/.test(document.querySelector('.reading')?.textContent)")
        share = "(() => { const e = document.querySelector('.reading progress'); return e && e.value / e.max })()"
        assert 0 < tab.until(share) < 1
        written = "document.querySelector('.message.assistant .body').textContent.length > 9"
        tab.until(f"!document.querySelector('.reading') && {written}", 60)
        tab.press("Escape", 27)
        tab.until(IDLE)
        assert within(5, lambda: not engine.running)
        tab.until("[...document.querySelectorAll('.after')].at(-1).textContent.includes('stopped')")


def test_two_tabs_share_a_conversation(tab: Browser) -> None:
    with serving(keys=[]) as (address, engine):
        tab.open(address)
        tab.until(READY)
        first = tab.session
        assert first is not None
        second = tab.another(address)
        tab.run("document.querySelector('#max_tokens').value = 40")
        send(tab, "the river")
        tab.until("document.querySelector('.message.assistant .body')?.textContent.length > 20")
        with held(engine):
            tab.switch(second)
            tab.until("document.querySelector('#talks .busy')")
            tab.click("#talks .open")
            tab.until("document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
        tab.until(ENDED)
        there = texts(tab, "assistant")
        send(tab, "and the stone")
        tab.until(f"document.querySelectorAll('.message.assistant').length === 2 && {ENDED}")
        both = texts(tab, "assistant")
        tab.switch(first)
        tab.until(f"document.querySelectorAll('.message.assistant').length === 2 && {ENDED}")
        assert texts(tab, "assistant") == both and both[:1] == there and all(both)
        assert texts(tab, "user") == ["the river", "and the stone"]
        with held(engine):
            send(tab, "and then")
            tab.switch(second)
            tab.until("!document.querySelector('#stop').hidden")
            tab.click("#stop")
        for session in (first, second):  # each of them shows that it was stopped
            tab.switch(session)
            tab.until(f"{IDLE} && document.querySelectorAll('.message.user').length === 3")
        assert within(5, lambda: not engine.running) and not tab.errors


def test_a_tab_that_has_not_seen_a_message_does_not_remove_it(tab: Browser) -> None:
    """A browser's tabs see each other's changes a little later: one stores what it knew before."""
    with serving(keys=[]) as (address, engine):
        tab.open(address)
        tab.until(READY)
        first, before = tab.session, "[]"
        assert first is not None
        second = tab.another(address)
        for text in ("the river", "and the stone"):
            tab.switch(second)
            tab.until(READY)
            tab.run("document.querySelector('#max_tokens').value = 20")
            with held(engine):
                send(tab, text)
                tab.until("localStorage.getItem('kvkeep.talks')?.includes('running')")
                tab.switch(first)
                tab.run(f"localStorage.setItem('kvkeep.talks', {json.dumps(before)})")
                tab.until(f"localStorage.getItem('kvkeep.talks').includes({json.dumps(text)})")
                tab.switch(second)
                assert texts(tab, "user")[-1] == text
            tab.until(ENDED)
            before = tab.run("localStorage.getItem('kvkeep.talks')")
        assert texts(tab, "user") == ["the river", "and the stone"] and not tab.errors


def test_a_conversation_without_space_stays_in_its_tab(tab: Browser) -> None:
    more = "for (;;) localStorage.x = (localStorage.x ?? '') + 'x'.repeat(size);"
    fill = f"for (const size of [1e6, 1e4, 100, 1]) try {{ {more} }} catch {{}}"
    with serving(keys=[]) as (address, engine):
        tab.open(address)
        tab.until(READY)
        tab.run("document.querySelector('#max_tokens').value = 20")
        tab.run(f"(() => {{ {fill} }})()")
        with held(engine):
            send(tab, "the river")
            tab.until("document.querySelector('.message.user')")
            tab.run("(() => { const now = Date.now; Date.now = () => now() + 60000; })()")
        tab.until(f"{ENDED} && document.querySelector('#notice').textContent.includes('no space left')")
        written = texts(tab, "assistant")
        assert written[0] and texts(tab, "user") == ["the river"]
        tab.run("localStorage.removeItem('x')")
        send(tab, "and the stone")
        tab.until(f"document.querySelectorAll('.message.assistant').length === 2 && {ENDED}")
        assert texts(tab, "assistant")[0] == written[0]
        assert tab.run("JSON.parse(localStorage.getItem('kvkeep.talks'))[0].messages.length") == 4 and not tab.errors


def test_what_a_server_has_lost_can_be_continued(tab: Browser) -> None:
    with serving(keys=[]) as (address, engine):
        tab.open(address)
        tab.until(READY)
        tab.run("document.querySelector('#max_tokens').value = 400")
        send(tab, "the river")
        tab.until("document.querySelector('.message.assistant .body')?.textContent.length > 20")
        with held(engine):
            before = texts(tab, "assistant")[0]
            name = tab.run("JSON.parse(localStorage.getItem('kvkeep.talks'))[0].messages[1].running")
            assert re.fullmatch("[0-9a-f]{24}", name)
            tab.open(address + "/health")
            talks = tab.run("localStorage.getItem('kvkeep.talks')").replace(name, "0" * 24)
            tab.run(f"localStorage.setItem('kvkeep.talks', {json.dumps(talks)})")
        tab.open(address)
        tab.until("document.querySelector('#notice')?.textContent.includes('broke off')")
        assert texts(tab, "assistant")[0].startswith(before[:-1])
        tab.click(".more")
        more = f"document.querySelector('.message.assistant .body').textContent.length > {len(before) + 20}"
        tab.until(f"!document.querySelector('#stop').hidden && {more}")
        tab.click("#stop")
        tab.until(f"{IDLE} && document.querySelector('.after .more')")
        assert texts(tab, "assistant")[0].startswith(before[:-1]) and not tab.errors


def test_a_broken_connection_is_made_again(tab: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    follow, begun = KeptAnswer.follow, list[KeptAnswer]()

    async def breaking(self: KeptAnswer) -> AsyncIterator[str]:
        begun.append(self)
        async for text in follow(self):
            yield text
            if len(begun) == 1 and '"content":" ' in text:
                raise ConnectionResetError

    monkeypatch.setattr(KeptAnswer, "follow", breaking)
    with serving(keys=[]) as (address, _):
        tab.open(address)
        tab.until(READY)
        tab.run("document.querySelector('#max_tokens').value = 20")
        send(tab, "the river")
        tab.until(f"{IDLE} && document.querySelector('.reuse')")
        assert len(begun) == 2 and begun[0] is begun[1]
        assert tab.run("document.querySelector('#notice').hidden") and not tab.errors


SAID: list[dict[str, Any] | str] = [
    ": reading 1,000 of 4,000 tokens\n\n",
    {"reasoning_content": "First I **think**."},
    {"content": "So:\n\n```python\nif x:  # yes\n    f(1)\n```\n\n```\nif x\n```\n"},
    {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "read_file", "arguments": '{"path": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"notes.txt"}'}}]},
]


@pytest.mark.slow
def test_reasoning_calls_and_code_are_shown_and_what_was_reused(tab: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reuse = threading.Event(), {"kvkeep": {"reuse": "message 14 differs"}}

    async def stream(self: completions.CompletionReply, events: Any) -> Any:
        for one in SAID:
            yield one if isinstance(one, str) else self._chunk({"delta": one})
            while not gate.is_set():
                await asyncio.sleep(0.01)
        async for _ in events:
            pass
        usage = {"prompt_tokens": 28310, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 27904}}
        last: dict[str, Any] = {"choices": [], "usage": usage}
        yield server_sent(last | reuse)
        yield "data: [DONE]\n\n"

    monkeypatch.setattr(completions.CompletionReply, "stream", stream)
    with serving(keys=[]) as (address, _):
        tab.open(address)
        tab.until(READY)
        send(tab, "the river")
        tab.until("document.querySelector('.reading')?.textContent.startsWith('Reading 1,000 of 4,000 tokens')")
        gate.set()
        tab.until(f"{IDLE} && document.querySelector('.reuse')?.textContent === 'message 14 differs'")
        folded = "[...document.querySelectorAll('.message.assistant details')]"
        assert tab.run(f"{folded}.map((e) => [e.open, e.querySelector('summary').textContent])") == [
            [False, "Reasoning"], [False, "Call of read_file"],
        ]  # fmt: skip
        assert tab.run(f"{folded}.map((e) => e.lastElementChild.textContent)") == [
            "First I think.", '{\n  "path": "notes.txt"\n}',
        ]  # fmt: skip
        tab.run("navigator.clipboard.writeText = async (text) => { window.copied = text }")
        kinds = tab.run("[...document.querySelectorAll('.code span[class]')].map((e) => [e.className, e.textContent])")
        assert kinds == [["keyword", "if"], ["comment", "# yes"], ["call", "f"], ["number", "1"]]
        tab.click(".code .copy")
        assert tab.until("window.copied") == "if x:  # yes\n    f(1)"
        _act(tab, "Copy")
        assert tab.until("window.copied.startsWith('So:') && window.copied").endswith("```")
        reuse.clear()  # then the server says nothing of what it reused
        _act(tab, "Regenerate")
        tab.until(
            f"{IDLE} && document.querySelector('.reuse')?.textContent === 'reused 27,904 of 28,310 tokens, read 406'"
        )
        assert not tab.errors


def test_settings_of_an_answer_and_what_goes_wrong_are_in_the_words_of_the_page(
    tab: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = _recorded(monkeypatch)
    with serving(keys=[]) as (address, _):
        tab.open(address)
        tab.until(READY)
        assert tab.run("document.querySelector('#method optgroup').label") == "Often chosen"
        options = tab.run("[...document.querySelector('#method').options].map((e) => [e.value, e.textContent])")
        assert all(text.startswith(name) and ": " in text and len(text) < 110 for name, text in options), options
        shown = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        assert [tab.run(f"document.querySelector('#{one}').placeholder") for one in shown] == [
            "0.8", "40", "0.95", "0.05", "1", "0", "0",
        ]  # fmt: skip
        send(tab, "the " * 700)
        tab.until("document.querySelector('#notice').textContent.includes('longer than the model can read at once')")
        assert "kvkeep." not in tab.run("document.querySelector('#notice').textContent")
        tab.run("document.querySelector('#budget').value = '77'")
        tab.click("#new")
        assert tab.run("document.querySelector('#prompt').value") == ""
        assert tab.run("document.querySelector('#budget').value") == ""
        for name, value in (("temperature", "5"), ("top_k", "7"), ("seed", "11")):
            tab.run(f"document.querySelector('#{name}').value = '{value}'")
        send(tab, "the river")
        tab.until("document.querySelector('#notice').textContent === 'Temperature has to be at most 2.0.'")
        tab.run("document.querySelector('#temperature').value = '1.5'")
        tab.run("document.querySelector('#max_tokens').value = '3'")
        tab.press("Enter", 13)
        tab.until(f"{IDLE} && document.querySelector('.holds')")
        body = sent[-1]
        assert (body.temperature, body.top_k, body.seed, body.max_tokens, body.min_p) == (1.5, 7, 11, 3, None)
        assert not tab.errors


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[ChatRequest]:
    """The requests that the page sends from now on."""
    found, real = list[ChatRequest](), answering.Answering.respond

    async def respond(self: answering.Answering, request: Any, body: Any) -> Any:
        found.append(body)
        return await real(self, request, body)

    monkeypatch.setattr(answering.Answering, "respond", respond)
    return found


def _keeps_the_budget(tab: Browser) -> None:
    about = set()
    for method, budget in (("full", ""), ("h2o", "16"), ("kv-direct", "16")):
        tab.run(f"document.querySelector('#method').value = '{method}'")
        tab.run("document.querySelector('#method').dispatchEvent(new Event('change'))")
        assert tab.run("document.querySelector('#budget').value") == budget, method
        about.add(tab.run("document.querySelector('#about-method').textContent"))
    assert len(about) == 3 and all(one.endswith(".") for one in about)
    choose(tab, "h2o", "24")


def _sends_settings_and_files(tab: Browser, asked: list[ChatRequest]) -> None:
    tab.run("document.querySelector('#system').value = 'Be brief.'")
    tab.run("document.querySelector('#max_tokens').value = 3")
    for name, text in (("notes.txt", "the stone"), ("picture.png", "\\0")):
        tab.run(
            f"(() => {{ const all = new DataTransfer(), field = document.querySelector('#chosen'); all.items.add(new "
            f"File(['{text}'], '{name}')); field.files = all.files; field.dispatchEvent(new Event('change')) }})()"
        )
        tab.until(f"document.querySelector('#{'notice' if '0' in text else 'files'}').textContent.includes('{name}')")
    assert tab.run("document.querySelectorAll('#files .file').length") == 1
    send(tab, "the river")
    tab.until(f"{IDLE} && document.querySelector('.holds')")
    (body,) = asked
    assert [(one.role, one.content) for one in body.messages] == [
        ("system", "Be brief."),
        ("user", "File notes.txt:\n\nthe stone\n\nthe river"),
    ]
    assert body.max_tokens == 3
    assert texts(tab, "system") == ["Be brief."] and texts(tab, "user") == ["notes.txtthe river"]
    assert tab.run("document.querySelector('#files').children.length") == 0


def _act(tab: Browser, name: str) -> None:
    """Click the last button of a message that is called so."""
    tab.run(f"[...document.querySelectorAll('.act')].filter((e) => e.textContent === '{name}').at(-1).click()")


def _copies_edits_and_regenerates(tab: Browser, asked: list[ChatRequest]) -> None:
    tab.run("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    _act(tab, "Copy")
    tab.until("window.copied !== undefined")
    assert [tab.run("window.copied").strip()] == [one.strip() for one in texts(tab, "assistant")]
    _act(tab, "Regenerate")
    tab.until(f"{IDLE} && document.querySelector('.holds')")
    assert len(asked) == 2 and asked[1].messages == asked[0].messages
    _act(tab, "Edit")
    tab.until("document.activeElement.closest('.editor')")
    tab.press("Escape", 27)
    assert tab.run("document.querySelector('.editor')") is None
    _act(tab, "Edit")
    tab.type(" or the sea")
    tab.press("Enter", 13)
    tab.until(f"{IDLE} && document.querySelector('.holds')")
    assert texts(tab, "user") == ["notes.txtthe river or the sea"] and len(texts(tab, "assistant")) == 1
    assert str(asked[-1].messages[-1].content).endswith("the river or the sea")
    assert tab.run("JSON.parse(localStorage.getItem('kvkeep.talks'))[0].messages.length") == 2


def test_an_edit_in_the_middle_begins_another_conversation(tab: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _recorded(monkeypatch)
    with serving(keys=[]) as (address, _):
        tab.open(address)
        tab.until(READY)
        tab.run("document.querySelector('#max_tokens').value = 20")
        for count, text in enumerate(("the river", "and the stone"), 1):
            send(tab, text)
            tab.until(f"{IDLE} && document.querySelectorAll('.message.assistant .holds').length === {count}")
        first = texts(tab, "assistant")
        tab.run("[...document.querySelectorAll('.act')].find((e) => e.textContent === 'Edit').click()")
        tab.type(" or the sea")
        tab.press("Enter", 13)
        tab.until(f"{IDLE} && document.querySelectorAll('.message.assistant .holds').length === 1")
        assert texts(tab, "user") == ["the river or the sea"]
        titles = (
            "[...JSON.parse(localStorage.getItem('kvkeep.talks'))].map((talk) => [talk.title, talk.messages.length])"
        )
        assert tab.run(titles) == [["the river or the sea", 2], ["the river", 4]]
        assert asked[-1].kvkeep.session != asked[0].kvkeep.session
        tab.run("document.querySelectorAll('#talks .open')[1].click()")
        tab.until("document.querySelectorAll('.message').length === 4")
        assert texts(tab, "assistant") == first and not tab.errors


def _exports(tab: Browser, folder: Path) -> None:
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder / "saved"))
    tab.click("#export")
    assert within(10, lambda: bool([*(folder / "saved").glob("*.md")]))
    (saved,) = (folder / "saved").glob("*.md")
    text = saved.read_text()
    assert "## System prompt\n\nBe brief." in text and "## You\n\nFile notes.txt:" in text and "## Answer\n\n" in text


def _keeps_lines_and_hides_special_tokens(tab: Browser) -> None:
    tab.run(
        "(() => { const talks = JSON.parse(localStorage.getItem('kvkeep.talks')); talks[0].messages.at(-1).content = "
        "'one\\ntwo\\n- three\\n  four'; localStorage.setItem('kvkeep.talks', JSON.stringify(talks)) })()"
    )
    tab.call("Page.reload")
    tab.until("document.querySelector('.message.assistant li')")
    lines = "document.querySelector('.message.assistant .body {}').innerText"
    assert tab.run(lines.format("p")) == "one\ntwo" and tab.run(lines.format("li")) == "three\nfour"
    tab.click("#memory-open")
    tab.until("document.querySelectorAll('#words .t').length > 0")
    shown = tab.run("document.querySelector('#words').textContent")
    assert "the" in shown and not any(one in shown for one in tokenizer().all_special_tokens)
    assert tab.run(
        "[...document.querySelectorAll('#words .t')].some((e) => e.textContent === '')"
    )  # one that is hidden
    assert tab.run("document.querySelector('.shading').textContent") == "in no layer  in every layer"
    tab.press("Escape", 27)


def _changes_length(tab: Browser, asked: list[ChatRequest]) -> None:
    tab.click("#settings-open")
    assert tab.run("document.querySelector('#method').disabled && !document.querySelector('#max_tokens').disabled")
    tab.run("document.querySelector('#max_tokens').value = 5")
    tab.run("document.querySelector('#max_tokens').dispatchEvent(new Event('change'))")
    send(tab, "and then")
    tab.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 2")
    assert asked[-1].max_tokens == 5 and asked[-1].kvkeep.budget == "24"


def _comes_in(tab: Browser, address: str) -> None:
    tab.open(address)
    tab.until("document.querySelector('#key-dialog').open")
    for key, then in (("wrong", "!document.querySelector('#key-wrong').hidden"), (KEYS[0], "true")):
        tab.click("#key")
        tab.type(key)
        tab.press("Enter", 13, text="\r")
        tab.until(then)
    tab.until(f"!document.querySelector('#key-dialog').open && {READY}")
    _everything_has_a_name(tab)


def _everything_has_a_name(tab: Browser) -> None:
    """For users of a screen reader."""
    roles = ("button", "textbox", "combobox", "spinbutton", "meter", "image", "navigation", "complementary", "article")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    shown = [one for one in nodes if one.get("role", {}).get("value") in roles and not one["ignored"]]
    assert len(shown) > 6 and all(one["name"]["value"] for one in shown), shown


def _talks(tab: Browser, engine: Engine) -> None:
    choose(tab, "h2o", "lots")
    send(tab, "hello")
    tab.until("document.querySelector('#notice').textContent.includes('lots')")
    assert tab.run("document.querySelector('#method').offsetWidth") > 0  # to choose again
    assert tab.run("document.querySelector('#prompt').value") == "hello"
    assert tab.run("JSON.parse(localStorage.getItem('kvkeep.talks')).length") == 0
    tab.run("document.querySelector('#prompt').value = ''")
    choose(tab, "h2o", "16")
    tab.click("#prompt")
    tab.type("the river")
    tab.press("Enter", 13, modifiers=8, text="\r")  # with Shift: a new line
    tab.type(SCRIPT)
    tab.press("Enter", 13)
    tab.until(f"{IDLE} && document.querySelector('.holds')")
    assert texts(tab, "user") == [f"the river\n{SCRIPT}"]
    (answer,) = texts(tab, "assistant")
    assert len(answer.split()) > 20
    ((owner, name),) = engine.sessions.memory
    kept = tab.run("JSON.parse(localStorage.getItem('kvkeep.talks'))[0]")
    assert kept["id"] == name and kept["messages"][1]["content"].strip() and owner != "local"
    send(tab, "and the stone")
    second = "document.querySelectorAll('.message.assistant .after')[1]"
    tab.until(f"{IDLE} && /in memory.*forgotten/.test({second}?.textContent)")


def _looks(tab: Browser, engine: Engine) -> None:
    tab.click("#memory-open")
    (session,) = engine.sessions.memory.values()
    tokens = len(session.past.ids)
    tab.until(f"document.querySelectorAll('#words .t').length === {tokens}")
    assert "budget is 16 entries" in tab.run("document.querySelector('#facts').textContent")
    colours = tab.run(
        "(() => { const c = document.querySelector('#strip'), d = c.getContext('2d').getImageData(0, 0, c.width, "
        "c.height).data; return new Set(Array.from({length: d.length / 4}, (_, i) => d.slice(4 * i, 4 * i + 4)"
        ".join())).size })()"
    )
    assert colours >= 2  # some of it is there, and some is not
    departed = tab.run("document.querySelectorAll('#words .t.dropped.s0').length")
    assert 0 < departed < tokens
    assert "session" in tab.run("document.querySelector('#server').textContent")
    _everything_has_a_name(tab)
    tab.press("Escape", 27)
    tab.until("document.querySelector('#memory').hidden && document.activeElement.id === 'memory-open'")


def _stops(tab: Browser, engine: Engine) -> None:
    tab.click("#new")
    assert texts(tab, "user") == []
    send(tab, "it was the time of his life")
    tab.until("document.querySelector('.message.assistant .body')?.textContent.length > 20")
    with held(engine):  # in the middle of an answer
        before = tab.until(f"!({IDLE}) && document.querySelector('.message.assistant .body').textContent")
        tab.click("#stop")
        tab.until(IDLE)
    assert within(5, lambda: not engine.running)
    (answer,) = texts(tab, "assistant")
    assert answer.startswith(before[:20])
    tab.until("document.querySelector('.message.assistant .after').textContent.includes('stopped')")
    send(tab, "and then")  # it goes on
    drawn = "[...document.querySelectorAll('.after')].at(-1).textContent.includes('tokens')"  # with its last frame
    tab.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 2 && {drawn}")


def _comes_back(tab: Browser, address: str) -> None:
    there = tab.run("location.href")
    before = (texts(tab, "user"), texts(tab, "assistant"))
    tab.open(address + "/health")
    tab.open(there)
    tab.until("document.querySelectorAll('.message.assistant').length === 2")
    assert (texts(tab, "user"), texts(tab, "assistant")) == before
    assert tab.run("document.querySelectorAll('#talks li').length") == 2
    tab.click("#talks li:nth-child(2) .open")
    tab.until("document.querySelector('.message.user .body').textContent.startsWith('the river')")
    assert tab.run("document.querySelector('#kind').textContent") == "h2o, budget 16"


def _reloads(tab: Browser, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mid-answer: it goes on, with what is not sent yet, and it can be continued."""
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda wait=False: (time.sleep(0.01), step(wait))[1])
    tab.click("#new")
    send(tab, "a river of stone")
    tab.until("document.querySelector('.message.assistant .body')?.textContent.length > 20")
    with held(engine):
        before = tab.until(f"!({IDLE}) && document.querySelector('.message.assistant .body').textContent")
        tab.click("#prompt")
        tab.type("and what then")
        tab.run("history.replaceState(null, '', location.pathname)")  # as by the address without a conversation
        tab.call("Page.reload")
        shown = "document.querySelector('.message.assistant .body')?.textContent.length"
        tab.until(f"document.querySelector('#send')?.hidden && {shown} >= {len(before)}")
        assert tab.run("document.querySelector('#prompt').value") == "and what then"
    tab.until(f"{IDLE} && document.querySelector('.message.assistant .after').textContent.includes('tokens')")
    assert within(5, lambda: not engine.running)
    (after,) = texts(tab, "assistant")
    assert after.startswith(before[:-1]) and len(after) > len(before)
    assert tab.run("document.querySelector('#notice').hidden")
    before = after
    if tab.run("document.querySelector('.more') !== null"):  # it was cut off, and did not end by itself
        tab.click(".more")
        tab.until(f"{IDLE} && document.querySelector('.message.assistant .body').textContent.length > {len(before)}")
        assert texts(tab, "assistant")[0].startswith(before[:-1]) and not tab.errors
    tab.run("document.querySelector('#prompt').value = ''")
    tab.click("#talks li:first-child .remove")


def _on_a_phone(tab: Browser) -> None:
    tab.size(390, 844, mobile=True)
    tab.until("innerWidth === 390")
    assert tab.run("document.documentElement.scrollWidth") == 390
    tab.click("#side-open")
    tab.until("document.activeElement.id === 'side-close'")
    tab.press("Escape", 27)
    tab.until("getComputedStyle(document.querySelector('#side')).visibility === 'hidden'")
    tab.size(1280, 860)


def _is_safe(tab: Browser, address: str) -> None:
    """What a model may write, and what a browser keeps, is text."""
    wrong = (
        f"{SCRIPT}\n\n```\n{SCRIPT}\n```\n- [a](javascript:window.hacked=1) [b](https://b.example/x?y)\n- `{SCRIPT}`\n"
    )
    wrong += f"\n| {SCRIPT} | b |\n|---|---|\n| c | d |\n\n> # {SCRIPT}"
    message: dict[str, Any] = {"role": "assistant", "content": wrong}
    tab.run(
        "(() => { const talks = JSON.parse(localStorage.getItem('kvkeep.talks')); talks[0].messages.push("
        f"{json.dumps(message)}); talks[0].title = {json.dumps(SCRIPT)}; "
        "localStorage.setItem('kvkeep.talks', JSON.stringify(talks)); return talks[0].id })()"
    )
    tab.open(address + "/health")
    tab.open(f"{address}/#{tab.run('JSON.parse(localStorage.getItem(`kvkeep.talks`))[0].id')}")
    tab.until("document.querySelectorAll('.message.assistant').length === 3")
    assert tab.run("document.querySelector('#title').textContent") == SCRIPT
    last = "document.querySelector('.message:last-child .body')"
    assert tab.run(f"{last}.querySelectorAll('img, script, b').length") == 0
    assert tab.run(f"[...{last}.querySelectorAll('a')].map((e) => e.href)") == ["https://b.example/x?y"]
    tags = tab.run(f"[...{last}.querySelectorAll('*')].map((e) => e.tagName.toLowerCase())")
    assert {"p", "pre", "code", "strong", "ul", "li", "table", "th", "td", "blockquote"} <= set(tags)
    assert tab.run(f"{last}.querySelector('pre').textContent") == SCRIPT
    assert tab.run("window.hacked") is None
