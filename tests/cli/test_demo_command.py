"""``kvkeep demo`` on a tiny model: what it compares, and how it looks."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.cli import output
from kvkeep.cli.demo import LICENCE, LOSSY, NEXT, PASSWORD, PLANTED, QUESTION, plant

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, words: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # which the command sets for its process otherwise
    (tmp_path / "text.txt").write_text(words)
    return ("demo", "-m", str(model_folder), "--doc", str(tmp_path / "text.txt"))


def test_own_text_is_the_licence_with_one_paragraph_more() -> None:
    text = LICENCE.read_text("utf-8")
    assert text == (Path(__file__).parents[2] / "LICENSE").read_text("utf-8") and PASSWORD not in text
    before, after = plant(text).split(f"{PLANTED}\n\n")
    assert before + after == text and before.endswith("\n\n") and 0.15 < len(before) / len(text) < 0.2


def test_the_picture_shows_what_is_printed() -> None:
    """Its fixed words, that is: times and bytes are those of one run."""
    picture = (Path(__file__).parents[2] / "docs" / "pictures" / "demo.svg").read_text("utf-8")
    shown = " ".join(html.unescape(re.sub("<[^>]+>", " ", picture)).split())
    place = plant(LICENCE.read_text("utf-8"))
    wanted = [command for _, command in NEXT] + [f"planted {place.index(PLANTED) / len(place):.0%} into it", QUESTION]
    assert [words for words in wanted if words not in shown] == []


def test_marks_are_measured(run: Run, command: tuple[str, ...]) -> None:
    """Without an expected word a right answer has the tokens of the full cache: the exact method's does."""
    lines = run(*command)[1].splitlines()
    answers = {
        line.split()[1]: (line[0], lines[number + 1]) for number, line in enumerate(lines) if re.match("[✓✗] ", line)
    }
    answers = {method: answers[method] for method in ("full", "kv-direct", *LOSSY)}
    right, full = answers["full"]
    assert answers["kv-direct"] == (right, full)
    assert all((sign == right) == (text == full) for sign, text in answers.values())
    assert any(sign != right for sign, _ in answers.values()), "an eighth of the cache should cost something"


def test_a_budget_is_refused_before_anything_is_printed(run: Run, command: tuple[str, ...]) -> None:
    for budget, reason in (
        ("1", "the smallest is 16"),
        ("0", "leaves 'window' nothing"),
        ("auto", "'kvkeep plan' shows their bytes"),
    ):
        code, out, err = run(*command, "--budget", budget)
        assert code == 2 and not out and reason in err
    code, out, err = run(*command, "--question", "the " * 400)
    assert code == 2 and not out and "the model has 512 positions; use fewer tokens of the text (--tokens)" in err


def test_lines_fit(run: Run, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact answer can be wrong. No text commands the terminal."""
    monkeypatch.setattr(output.out, "width", 60)
    monkeypatch.setattr("kvkeep.engine.answer.Answer.text", property(lambda answer: "the \u202e\x1b[2Jof"))
    asked = ("--expect", "nobody says this", "--question", "was \u2066it?")
    code, out, err = run(*command, *asked)
    assert code == 0 and "Traceback" not in err and "try a larger model: --model qwen2.5-coder-1.5b" in err
    lines = out.splitlines()
    assert max(map(len, lines)) <= 60
    assert not re.search("[\u202e\u2066\x1b]", out) and "[2Jof" in out and "was it?" in out
    marked = [line for line in lines if re.match("[✗x] ", line)]
    assert [line.split()[1] for line in marked] == ["full", "kv-direct", *LOSSY]
    heading = next(line for line in lines if "on disk" in line)
    assert {len(line.rstrip()) for line in marked} == {len(heading)}
    assert "32 of the 32 tokens" in " ".join(out.split())


def test_make_hands_on_what_a_shell_would_take_for_its_own(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    shown = tmp_path / "kvkeep"
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o755)
    given = ['QUESTION=Who says "hi" for $$5 `id`?', "DOC=a book.txt", "BUDGET=12.5%"]
    made = ["make", "-s", "-C", str(Path(__file__).parents[2]), f"BIN={tmp_path}", f"USED={shown}", "demo", *given]
    plain = {"PATH": os.environ["PATH"]}
    done = subprocess.run(made, env=plain, capture_output=True, text=True, check=False)
    said = ["demo", "--doc", "a book.txt", "--question", 'Who says "hi" for $5 `id`?', "--budget", "12.5%"]
    assert done.stdout.splitlines() == said, done.stderr
