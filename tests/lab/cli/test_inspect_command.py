"""The command ``kvkeep inspect``: its output for people and programs, its page, and its errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import kvkeep, started

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def text(tmp_path: Path, words: str) -> str:
    (tmp_path / "text.txt").write_text(words)
    return str(tmp_path / "text.txt")


@pytest.mark.parametrize(("method", "fate"), [("h2o", "dropped"), ("h2o+checkpoint", "checkpointed")])
def test_json_output_sums_up_the_inspection(
    run: Run, model_folder: Path, text: str, tmp_path: Path, method: str, fate: str
) -> None:
    page = tmp_path / "page.html"
    code, out, err = run(
        "inspect", "-m", str(model_folder), "-x", method, "-b", "32", "--chunk", "32", "-f", text, "-p", "the of",
        "-n", "5", "-o", str(page), "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert found["output"] == str(page) and found["method"] == method
    assert found["tokens"] == found["prompt_tokens"] + 4
    assert found["steps"] == -(-found["prompt_tokens"] // 32) + 4
    assert set(found["fates"]) == {"resident", fate}
    assert found["fates"]["resident"] == 32 * found["lanes"]
    assert sum(found["fates"].values()) == found["lanes"] * found["tokens"]
    content = page.read_text(encoding="utf-8")
    assert content.startswith("<!doctype html>") and content.endswith("</html>\n")


def test_text_output_is_the_answer_and_one_line(run: Run, model_folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("an older page")
    code, out, err = run("inspect", "-m", str(model_folder), "-p", "the of and", "-n", "3", "-o", str(page))
    assert code == 0 and out.strip()
    assert "full (exact)" in err and "100.0 % resident" in err.replace("\n", " ")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-p", "a", "-x", "stock"), "nothing to show"),
        (("-p", "a", "-o", "/nowhere/cache.html"), "no folder '/nowhere'"),
        (("-p", "a", "-o", "/"), "is a folder"),
        (("-p", "a", "-o", "/dev/null"), "not a regular file"),
        (("-f", "/nowhere/text"), "no such file"),
        ((), "nothing to answer"),
        (("-p", "a", "-x", "h20", "-b", "32"), "did you mean h2o"),
        (("-p", "the " * 600), "512 positions"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("inspect", "-m", str(model_folder), *arguments)
    assert code == 2 and out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("kvkeep: ")
    assert re.search(sentence, lines[0]), lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", [False, True])
def test_a_write_protected_page_is_not_overwritten(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    refused = tmp_path if inside else page
    page = tmp_path / "another.html" if inside else page
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != refused)  # root may write anywhere
    code, out, err = run("inspect", "-m", str(model_folder), "-p", "the", "-n", "2", "-o", str(page))
    assert code == 2 and out == "" and "write-protected" in err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_an_interrupted_answer_leaves_a_complete_page(tmp_path: Path, model_folder: Path, words: str) -> None:
    """A separate process gets a real SIGINT while it writes."""
    (tmp_path / "t").write_text(words)
    page = tmp_path / "out" / "page.html"
    page.parent.mkdir()
    given = ["-m", str(model_folder), "-f", str(tmp_path / "t"), "-b", "16", "-x", "h2o", "-n", "300", "-o", str(page)]
    with started(kvkeep("inspect", *given), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)  # the answer has begun
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        errors = process.stderr.read()
    assert process.returncode == 1
    assert "Interrupted; the page shows the" in errors and "Traceback" not in errors
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
