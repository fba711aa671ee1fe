"""``kvkeep analyse`` as a person and a program meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]
FIELDS = {
    "spectra": {"tokens", "rows", "correlation"},
    "alignment": {"tokens", "queries", "loss", "rows", "spread"},
    "reactivation": {"tokens", "prompt", "threshold", "ratios", "distances", "active", "rows"},
    "bounds": {"tokens", "queries", "share", "rows"},
    "rank": {"layers", "prompt_tokens", "new_tokens", "truncations"},
}
OPTIONS = {
    "alignment": ("--queries", "5"),
    "rank": ("--ranks", "2,8", "-n", "4"),
    "bounds": ("--pages", "2,4,8", "--queries", "20"),
}


@pytest.fixture
def common(model_folder: Path, tmp_path: Path, words: str) -> tuple[str, ...]:
    (tmp_path / "text.txt").write_text(words)
    return ("-m", str(model_folder), "-f", str(tmp_path / "text.txt"), "--limit", "60")


@pytest.mark.parametrize("analysis", FIELDS)
def test_data_table_and_figure(run: Run, common: tuple[str, ...], tmp_path: Path, analysis: str) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    options = (*common, *OPTIONS.get(analysis, ()))
    code, out, err = run("analyse", analysis, *options, "-o", str(picture), "--json")
    assert code == 0, err
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(found) == FIELDS[analysis] | {"machine", "figure"}
    assert found["figure"] == str(picture) and picture.stat().st_size > 10_000
    assert found.get("tokens", found.get("prompt_tokens")) == 60
    code, out, err = run("analyse", analysis, *options)
    assert code == 0 and "mean" in out.lower() and len(out.splitlines()) > 6, err


def test_rank_without_a_text(run: Run, common: tuple[str, ...]) -> None:
    code, out, err = run("analyse", "rank", *common[:2], "--json")
    assert code == 0 and json.loads(out)["truncations"] == [], err
    code, out, err = run("analyse", "rank", *common[:2], "-p", "the of and", "--ranks", "8", "-n", "3", "--json")
    assert code == 0 and len(json.loads(out)["truncations"]) == 5, err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("spectra", "-f", "none.txt"), "cannot be read"),
        (("spectra", "-o", "picture.doc"), "end in .png"),
        (("reactivation", "--ratios", "0.1,many"), "not understood"),
        (("reactivation", "--ratios", "2"), "between 0 and 1"),
        (("reactivation", "--threshold", "0"), "between 0 and 1"),
        (("rank", "--ranks", "9"), "from 1 to the width of a head"),
        (("rank", "-p", "both"), "--prompt or --file"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Run, common: tuple[str, ...], arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = run("analyse", arguments[0], *common, *arguments[1:])
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and sentence in err


def test_a_short_text_and_ranks_of_nothing(run: Run, common: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("the of and")
    code, out, err = run("analyse", "spectra", *common[:2], "-f", str(tmp_path / "short.txt"))
    assert code == 2 and out == "" and "3 tokens" in err
    code, out, err = run("analyse", "rank", *common[:2], "--ranks", "4")
    assert code == 2 and out == "" and "a text to continue" in err


def test_an_interrupt_is_one_sentence(run: Run, common: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvkeep_lab.analyses.spectra.spectra", interrupted)
    code, out, err = run("analyse", "spectra", *common)
    assert code == 1 and out == "" and "Interrupted" in err


def test_help(run: Run) -> None:
    code, out, _ = run("analyse", "--help")
    assert code == 0 and all(name in out for name in FIELDS)
