"""The trip of a chat request, in docs/architecture.md, names the files that a request goes through."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import saved, tokenizer
from families import tiny
from running import BODY, post, serving, streamed

from kvkeep.models.loading import Loaded, load
from kvkeep.serve.engine import Engine

ROOT = Path(__file__).parents[2]
CORE = f"{ROOT / 'src' / 'kvkeep'}/"

CACHE = ("cache.py", "geometry.py", "policies/", "plan/sizes.py", "report.py", "decode/cached_text.py")
"""A cache is composed, as in the first trip, and says what it holds."""
DATA = ("contracts/", "memory/", "step/plan.py", "passes/record.py", "engine/token_spelling.py")
"""Types of data, rows of tensors, and tables."""
LIBRARY = ("native/", "step/choice.py", "step/native/__init__.py", "step/native/calls.py", "step/native/entries.py")
"""The library is called, whatever it does."""
CHECKS = ("models/unchanged.py", "passes/pass_owner.py", "passes/repeated_steps.py", "step/checks.py")
"""Modules, a thread and a step are checked."""
MODEL = (
    "models/adapter.py", "models/forward.py", "models/norms.py", "models/packed.py", "models/rotary.py",
    "step/scores.py", "step/sinks.py", "engine/sampling.py",
)  # fmt: skip
"""The model computes, its sinks and caps are looked up, and a token is chosen."""
BESIDE = (
    "errors.py", "decode/texts.py", "serve/http/connection.py", "serve/http/errors.py", "serve/http/metrics.py",
    "serve/beginnings.py", "serve/session_storage.py", "blocks/value.py", "serve/http/keys.py", "engine/stops.py",
)  # fmt: skip
"""Limits of time, errors, keys, stop strings, figures, what a text is worth, and a store, which this server has not."""

END = ("serve/http/reuse.py", "blocks/records.py", "decode/replay.py")
"""The answer is remembered, after its last token was sent."""


@pytest.fixture
def files() -> Iterator[set[str]]:
    """The files whose functions are called in threads that begin within the test."""
    found = set[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename)

    threading.setprofile(note)
    yield found
    threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("kernels")
def test_a_chat_request_goes_through_the_files_of_its_trip(files: set[str], tmp_path: Path) -> None:
    model = load(saved(tiny("llama"), tmp_path), weights="bfloat16", device="cpu").model
    with serving(engine=Engine(Loaded(model, tokenizer(), "tiny", "tiny"), 10**8)) as (address, _):
        post(address, BODY)  # what happens once
        files.clear()
        with streamed(address, BODY) as reply:
            assert "[DONE]" in reply.read().decode()
        found = {name.removeprefix(CORE) for name in files if name.startswith(CORE)}
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    trip = re.search(r"^### A chat request over HTTP.*?(?=^##)", page, re.MULTILINE | re.DOTALL)
    assert trip is not None
    listed = set(re.findall(r"^\d+\. `([\w/]+\.py)`", trip[0], re.MULTILINE))
    assert {
        name for name in found if not name.startswith((*CACHE, *DATA, *LIBRARY, *CHECKS, *MODEL, *BESIDE, *END))
    } == listed
