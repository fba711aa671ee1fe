"""A recording has the states that the cache reported, and the page shows them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import tokenizer
from elements import Elements
from families import tiny
from hypothesis import given
from hypothesis import strategies as st
from kvkeep_lab.inspection import STATES, Inspection, RecordedStep, Recorder, Trace, arrived, encoded, inspect
from kvkeep_lab.page import check_output, render, write_page

from kvkeep.cache import KeepCache
from kvkeep.contracts.entries import EntryState
from kvkeep.decode.generate import Generation, Timing
from kvkeep.engine.pieces import token_texts
from kvkeep.errors import StoreError
from kvkeep.memory.meter import Memory
from kvkeep.stock import new_cache

PROMPT = torch.randint(5, 97, (100,), generator=torch.Generator().manual_seed(0)).tolist()


class Watched(Recorder):
    """A recorder that also keeps every state whole."""

    def __init__(self, cache: KeepCache) -> None:
        super().__init__(cache)
        self.seen: list[torch.Tensor] = []

    def record(self) -> None:
        before = len(self.steps)
        super().record()
        if len(self.steps) > before:
            self.seen.append(torch.cat([layer[0] for layer in self.cache.entry_states()]))


def decoded(changes: bytes) -> list[tuple[int, int, int]]:
    """Read what was encoded, as the page does: (first entry, length, code), entries counted lane after lane."""
    numbers, shift, start, found = [0], 0, 0, []
    for byte in changes:
        numbers[-1] |= (byte & 127) << shift
        shift = 0 if byte < 128 else shift + 7
        numbers += [] if shift else [0]
    for gap, run in zip(numbers[:-1:2], numbers[1:-1:2], strict=True):
        found.append((start + gap, (run >> 3) + 1, run & 7))
        start += gap + (run >> 3) + 1
    return found


def changed(before: torch.Tensor, changes: bytes) -> torch.Tensor:
    state = before.clone()
    for start, length, code in decoded(changes):
        state.view(-1)[start : start + length] = code
    return state


def replayed(trace: Trace) -> list[torch.Tensor]:
    """The states after each step, (lanes, tokens so far)."""
    states = [torch.zeros(trace.lanes, 0, dtype=torch.int8)]
    for step in trace.steps:
        states.append(changed(arrived(states[-1], step.tokens), step.changes))
    return states[1:]


@given(st.integers(1, 5), st.integers(1, 300), st.integers(0, 2**31), st.floats(0, 1))
def test_encoded_changes_decode_to_the_same_states(lanes: int, tokens: int, seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    before, other = torch.randint(0, 6, (2, lanes, tokens), generator=generator, dtype=torch.int8)
    now = torch.where(torch.rand(lanes, tokens, generator=generator) < share, other, before)
    changes = encoded(before, now)
    assert all(start // tokens == (start + length - 1) // tokens for start, length, _ in decoded(changes))
    assert torch.equal(changed(before, changes), now)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("method", ["full", "kv-direct", "streaming-llm", "h2o", "h2o+checkpoint"])
def test_the_recording_equals_the_states_of_the_cache(
    family: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[Watched] = []
    monkeypatch.setattr(
        "kvkeep_lab.inspection.Recorder", lambda cache: recorders.append(Watched(cache)) or recorders[0]
    )
    model = tiny(family)
    options: dict[str, Any] = {} if method == "full" else {"budget": 32, "chunk": 16}
    cache = new_cache(model, method, **options)
    found = inspect(model, tokenizer(), PROMPT, cache, "tiny", budget="32", max_new_tokens=6)
    states = replayed(found.trace)
    assert len(states) == len(recorders[0].seen)
    assert all(torch.equal(state, seen) for state, seen in zip(states, recorders[0].seen, strict=True))
    chunks = 1 if method == "full" else 7
    ends = [100] if method == "full" else [4, *range(20, 101, 16)]
    assert [step.tokens for step in found.trace.steps] == ends + list(range(101, 106)) and len(ends) == chunks
    counted = {name: int((states[-1] == code).sum()) for code, name in enumerate(STATES)}
    assert len(found.texts) == 106 and found.trace.counts == {name: count for name, count in counted.items() if count}
    full = [layer.index for layer in cache.geometry.layers if layer.kind == "full"]
    for state in states if method != "full" else []:
        lanes = dict(enumerate(state.split(found.trace.heads)))
        assert all(int((lanes[layer] == EntryState.RESIDENT).sum(1).max()) <= 32 for layer in full)


def test_an_interrupted_answer_is_kept_and_an_interrupted_prompt_raises() -> None:
    model = tiny("llama")
    written: list[str] = []
    cache = KeepCache(model, "kv-direct", 32)
    options: dict[str, Any] = {"on_text": written.append, "interrupted": lambda: len(written) > 3}
    found = inspect(model, tokenizer(), PROMPT, cache, max_new_tokens=50, **options)
    assert found.generation.stopped == "interrupted" and 100 < found.trace.tokens < 110
    with pytest.raises(KeyboardInterrupt):
        inspect(model, tokenizer(), PROMPT, KeepCache(model, "kv-direct", 32), interrupted=lambda: True)


def test_texts_of_tokens_join_to_the_text() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(alphabet, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bytewise = PreTrainedTokenizerFast(tokenizer_object=inner)
    text = "a naïve 🦜\n\ttext , with € and 日本"
    texts = token_texts(bytewise, bytewise(text).input_ids)
    assert "".join(texts) == text and len(texts) == len(text.encode())
    assert texts[texts.index("🦜") - 3 :][:4] == ["", "", "", "🦜"]
    words = tokenizer()
    assert "".join(token_texts(words, words("the of and it").input_ids)) == "the of and it"
    broken = bytewise(text).input_ids[:-1]  # the last character lacks a byte
    assert "".join(token_texts(bytewise, broken)) == bytewise.decode(broken)


def a_trace(lanes: list[int], steps: list[int], budget: int, codes: int = 6) -> Trace:
    """A recording of tokens that leave by chance, each for a fate by chance."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(sum(lanes), steps[-1], generator=generator)
    fates = torch.randint(0, codes, scores.shape, generator=generator).to(torch.int8)
    fates[fates == EntryState.RESIDENT] = EntryState.DROPPED
    state, out = torch.zeros(sum(lanes), 0, dtype=torch.int8), []
    for tokens in steps:
        before = arrived(state, tokens)
        kept = scores[:, :tokens].masked_fill(before != EntryState.RESIDENT, -1).topk(min(budget, tokens)).indices
        state = fates[:, :tokens].scatter(1, kept, EntryState.RESIDENT)
        state = torch.where(before == EntryState.RESIDENT, state, before)
        out.append(RecordedStep(tokens, encoded(before, state)))
    return Trace(lanes, out, {})


def an_inspection(trace: Trace, texts: list[str], prompt: int) -> Inspection:
    timing = Timing(prompt, 0.0, 0.0, 0.0, 0.0)
    generation = Generation("", [], prompt, "length", "h2o", "lossy", Memory(1000), timing, [])
    return Inspection("tiny", "8", 8, texts, trace, generation)


def test_pages_stay_small() -> None:
    trace = a_trace([3] * 30, [*range(256, 4097, 256), *range(4097, 4161)], 512, codes=1)
    page = render(an_inspection(trace, ["word"] * 4161, 4096))
    assert len(page) < 1_000_000


HOSTILE = [
    "</script><script>document.body.dataset.error='run'</script>", "<!--<script>", "@@DATA@@", "&lt;b&gt;", "\ud83e",
    "\u2028", "]]>", '"\\', "\n", " \t", "\r\n", "", "\x00", "日本", " x",
]  # fmt: skip


def test_texts_are_escaped_on_the_page() -> None:
    trace = a_trace([2, 1], [10, 15], 8)
    given = an_inspection(trace, [*HOSTILE, "end"], 10)
    page = render(replace(given, model="<img src=x>", generation=replace(given.generation, method="</title>&")))
    page.encode("utf-8")

    found = Elements(page)
    tags = [element.tag for element in found.all]
    assert tags.count("script") == 2 and "img" not in tags and "b" not in tags
    assert set(found.values("src", "href")) <= {"data:,"}
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1])["texts"] == [*HOSTILE, "end"]
    assert "http://" not in page and "https://" not in page and "@import" not in page and "url(" not in page


def test_a_page_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = check_output(tmp_path / "cache.html")
    write_page(target, "old")
    (tmp_path / "link.html").symlink_to(target)
    write_page(check_output(tmp_path / "link.html"), "new")
    assert target.read_text() == "new" and (tmp_path / "link.html").is_symlink()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="no space left"):
        write_page(target, "newer")
    assert target.read_text() == "new" and len(list(tmp_path.iterdir())) == 2


BROWSER = os.environ.get("KVKEEP_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)


def browsed(page: Path, fragment: str) -> Elements:
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", f"{page.as_uri()}{fragment}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Elements(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: install chromium, or set KVKEEP_BROWSER to one's path")
def test_a_browser_shows_the_recorded_states(tmp_path: Path) -> None:
    steps = [12, 24, 30, 31, 32, 33]
    texts = ["<b>", "two\nlines", " ", "</script><script>document.body.dataset.error='run'</script>"]
    texts += [f" word{number}" for number in range(30)]
    trace = a_trace([2, 3, 1], steps, 8)
    write_page(tmp_path / "cache.html", render(an_inspection(trace, texts, 30)))
    states = replayed(trace)
    # (fragment, step, the lanes shown)
    views: list[tuple[str, int, list[int]]] = [
        ("", 6, [0, 1, 2, 3, 4, 5]),
        ("#step=1", 1, [0, 1, 2, 3, 4, 5]),
        ("#step=2&layer=0&head=1&token=5", 2, [1]),
        ("#step=4&layer=1", 4, [2, 3, 4]),
        ("#step=5&layer=2&head=0", 5, [5]),
        ("#step=3&head=1", 3, [1, 3]),
        ("#step=99&layer=x&head=7&token=-1", 6, [0, 1, 2, 3, 4, 5]),
    ]
    for fragment, step, lanes in views:
        shown, state = browsed(tmp_path / "cache.html", fragment), states[step - 1][lanes]
        body = next(element.attributes for element in shown.all if element.tag == "body")
        assert "data-error" not in body
        assert (body["data-step"], body["data-lanes"]) == (str(step), str(len(lanes))), fragment
        tokens = {int(one.attributes["data-slot"]): one for one in shown.all if "data-slot" in one.attributes}
        assert [token.text for _, token in sorted(tokens.items())] == texts
        for slot, token in tokens.items():
            classes = set(token.attributes["class"].split())
            if slot >= steps[step - 1]:
                assert "future" in classes
                continue
            resident = int((state[:, slot] == EntryState.RESIDENT).sum())
            if resident == len(lanes):
                assert "f1" in classes and "a" not in classes
            else:
                others = torch.bincount(state[:, slot].long(), minlength=6)
                others[EntryState.RESIDENT] = 0
                fate = next(int(name[1]) for name in classes if re.fullmatch(r"f\d", name))
                assert others[fate] == others.max() and ("a" in classes) == (resident > 0)
        counted = {code.name.lower(): int((state == code).sum()) for code in EntryState}
        fates = [one.attributes for one in shown.all if "data-fate" in one.attributes]
        shown_fates = {one["data-fate"]: int(one["data-count"]) for one in fates}
        assert all(shown_fates.get(name, 0) == count for name, count in counted.items())
        assert set(shown_fates) <= set(counted)
        before = arrived(states[step - 2][lanes], steps[step - 1]) if step > 1 else torch.ones_like(state)
        left = ((before == EntryState.RESIDENT) & (state != EntryState.RESIDENT)).any(0)
        assert int(body["data-left"]) == int(left.sum())
        assert ("chosen" in tokens[5].attributes["class"].split()) == ("token=5" in fragment)
