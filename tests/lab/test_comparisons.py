"""Comparisons over several passages: drawing passages, summaries, and output files."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import WORDS, tokenizer
from kvkeep_lab.comparisons import Comparisons, Passage
from kvkeep_lab.latex import booktabs
from kvkeep_lab.partial import INTERRUPTED
from kvkeep_lab.provenance import commit
from kvkeep_lab.reference import Comparison, ReferenceAnswer, ReferenceRow
from kvkeep_lab.statistics import estimate
from kvkeep_lab.studies.compare import Compare
from kvkeep_lab.tables import Table
from kvkeep_lab.tasks.texts import named_files, pieces

from kvkeep.errors import StoreError, UsageError

Run = Callable[..., tuple[int, str, str]]


def test_pieces_of_a_text_do_not_overlap_and_depend_on_the_seed_only() -> None:
    text = " ".join(f"{WORDS[number]} {WORDS[7 * number % 60]} was it for on as with." for number in range(60))
    made = tokenizer()
    found = pieces(made, text, 20, 8)
    assert len(set(found)) == 8 and pieces(made, text, 20, 3) == found[:3]
    places = sorted((text.index(piece), text.index(piece) + len(piece)) for piece in found)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(places))
    assert all(len(made(piece).input_ids) == 20 for piece in found)
    assert all(start == 0 or text[start - 2] == "." for start, _ in places)  # from the beginning of a sentence
    with pytest.raises(UsageError, match=r"without overlap, only [1-9]\d*;"):
        pieces(made, text, 100, 9)


def test_files_are_given_as_lists_patterns_or_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "c,d.txt", "e.md"):
        Path(name).write_text("the of")
    named = {"a.txt,b.txt": "a.txt b.txt", "c,d.txt": "c,d.txt", "*.md": "e.md", ".": "a.txt b.txt c,d.txt", "-": "-"}
    for given, expected in named.items():
        assert [str(path) for path in named_files([given])] == expected.split(), given
    assert named_files(["a.txt", "a.txt", "none.txt"]) == [Path("a.txt"), Path("none.txt")]
    (tmp_path / "empty").mkdir()
    for wrong, says in (("empty", "no .txt files"), ("x*.txt", "No file matches")):
        with pytest.raises(UsageError, match=says):
            named_files([wrong])


def row(method: str, kl: float, match: float = 0.5, budget: str | None = "25%", error: str = "") -> ReferenceRow:
    if error:
        return ReferenceRow(method, budget, error=error)
    numbers: dict[str, Any] = {"kl": [kl, 3 * kl], "kl_mean": 2 * kl, "kl_max": 3 * kl, "kl_free_mean": kl, "top1": 1.0}
    memory = {"resident_bytes": 10, "compressed_bytes": 2, "checkpoint_bytes": {}}
    return ReferenceRow(method, budget, "lossy", 16, match, perplexity=math.exp(kl), memory=memory, **numbers)


def test_means_and_intervals_are_over_measured_passages_only() -> None:
    rows = [
        [row("a", 0.1, 0.25), row("b", 0.5)],
        [row("a", 0.3, 0.75), row("b", 0, error="too small")],
        [row("a", 0.2, 0.5), row("b", 0, error=INTERRUPTED)],
    ]
    passages = [
        Passage("t", seed, Comparison(40, 2, row("stock", 0.4, 1.0, None), measured_rows, 24))
        for seed, measured_rows in enumerate(rows)
    ]
    found = Comparisons(passages, 5)
    one, other = found.lines
    assert (one.label, len(one.rows), one.entries, one.share) == ("a at 25%", 3, (16, 16), 0.5)
    assert one.estimate("match") == estimate([0.25, 0.75, 0.5])
    perplexity = one.estimate("perplexity")
    assert perplexity is not None and perplexity.mean == pytest.approx(math.exp(0.2))
    assert perplexity.low == pytest.approx(math.exp(estimate([0.1, 0.3, 0.2]).low))
    assert one.positions("kl") == pytest.approx([0.2, 0.6]) and one.largest("kl_max") == pytest.approx(0.9)
    assert len(other.rows) == 1 and found.refusals == ["`b at 25%` on 1 of 3 passages: too small"]
    assert found.measured == "3 of 5 passages of 40 tokens, 2 written after each" and found.texts == "t (3)"
    assert [line["n"] for line in (found.reference.as_dict(), other.as_dict())] == [3, 1]
    where = {"model": "m", "weights": "float32"}
    without = [replace(one, found=replace(one.found, rows=one.found.rows[1:])) for one in passages[1:]]
    caption = Compare().latex(Comparisons(without, 3, ["e.txt: empty"]), where)
    assert "2 of 3 passages of 40 tokens" in caption and "2 of 3 passages were begun. Left out: e.txt: empty" in caption
    for reason in ("too small", INTERRUPTED):
        assert rf"Not measured: b at 25\% on 1 of 2 passages: {reason}" in caption


def test_a_latex_table_escapes_names() -> None:
    table = Table("", ["method", "match (%)", "KL"], named=1)
    table.rows += [["`a_b+c:4`", "**34 [28, 40]**", "5.1e-12"], ["`50%`", "-", "1 & 2"]]
    text = booktabs(table, r"50% of a_b, {x} \ ~ ^ $1 #2", "tab:x", ["25%", "50%"])
    assert r"\caption{50\% of a\_b, \{x\} \textbackslash{} \textasciitilde{} \textasciicircum{} \$1 \#2}" in text
    assert r"\texttt{a\_b+c:4} & \textbf{34 {\scriptsize [28, 40]}} & 5.1$\cdot10^{-12}$ \\" in text
    assert "\\addlinespace\n    \\texttt{50\\%} & - & 1 \\& 2 \\\\\n    \\bottomrule" in text
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}") and r"\begin{tabular}{lrr}" in text


def test_compare_measures_each_passage_of_several_texts(
    run: Run, model_folder: Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, order in (("a_b.txt", 1), ("c.txt", -1)):
        parts = words.split()[::order]
        Path(name).write_text(". ".join(" ".join(parts[place : place + 10]) for place in range(0, 200, 10)))
    Path("b.txt").write_text(" \n")
    Path("short.txt").write_text("the of and")
    common = ("compare", "-m", str(model_folder), "-f", "*.txt", "-x", "full,h2o", "-b", "25%", "-n", "4")
    drawn = (*common, "--limit", "64", "--seeds", "2")
    code, out, err = run(*drawn, "--json", "--csv", "c.csv", "--latex", "c.tex")
    assert code == 0, err
    rows = [line.removeprefix("passage 2 of 4: ") for line in err.splitlines() if "2 of 4" in line]
    assert [row.split(": match ")[0] for row in rows] == ["stock", "full", "h2o at 25%"]
    found = json.loads(out)
    places = [("a_b.txt", 0), ("a_b.txt", 1), ("c.txt", 0), ("c.txt", 1)]
    assert [(one["text"], one["seed"]) for one in found["passages"]] == places and found["asked"] == 4
    empty, short = found["left_out"]
    assert "'b.txt': it is empty" in empty and "short.txt: 2 passages of 64 tokens do not fit" in short
    Path("short.txt").unlink()
    assert [(line["method"], line["n"]) for line in found["summary"]] == [("stock", 4), ("full", 4), ("h2o", 4)]
    lines = list(csv.DictReader(Path("c.csv").read_text().splitlines()))
    assert len(lines) == 12 and {line["commit"] for line in lines} == {commit() or ""}
    kls = [float(line["kl_mean"]) for line in lines if line["method"] == "h2o"]
    h2o = found["summary"][2]
    assert h2o["kl_mean"]["mean"] == pytest.approx(sum(kls) / 4) and h2o["kl_mean"]["low"] < h2o["kl_mean"]["high"]
    assert kls == [one["rows"][1]["kl_mean"] for one in found["passages"]]
    text = Path("c.tex").read_text()
    assert r"& held (\% of bf16) \\" in text and "an entry in float32 counts twice" in text
    assert r"a\_b.txt (2), c.txt (2)" in text and "(n = 4)" in text and text.count(r" \\") == 3
    code, out, _ = run(*common, "--limit", "80")
    assert code == 0 and "Left out: There is no text in the file 'b.txt'" in out
    assert "2 passages of 80 tokens, 4 written after each" in out and "Passages are of a_b.txt, c.txt." in out
    honest, calls = ReferenceAnswer.measure, []

    def fourth(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return honest(*given)

    monkeypatch.setattr(ReferenceAnswer, "measure", fourth)
    monkeypatch.setattr("kvkeep_lab.cli.study.write_page", Mock(side_effect=StoreError("The disk is full.")))
    code, out, err = run(*drawn, "--csv", "lost.csv")
    assert code == 1 and "Interrupted: 2 of 4 passages were begun." in out
    assert err.rstrip().endswith("The results above were measured before that. The disk is full.")
    assert "Written" not in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-p", "the of", "--seeds", "2"), "give it a text (--file)"),
        (("-f", "a.txt", "--seeds", "2"), "how long they are (--limit)"),
        (("-f", "a.txt", "--seeds", "9", "--limit", "60"), "a.txt: 9 passages of 60 tokens"),
        (("-f", "a.txt", "--csv", "nowhere/c.csv"), "no folder"),
        (("-f", "empty"), "None of the 2 texts can be compared. The first: There is no text in the file 'empty/a.txt'"),
        (("-f", "a.txt,long.txt"), "long.txt: The prompt has"),
    ],
)
def test_an_impossible_comparison_is_refused_before_it_starts(
    run: Run, model_folder: Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(words)
    Path("long.txt").write_text(words * 4)
    Path("empty").mkdir()
    for name in ("a.txt", "b.txt"):
        Path("empty", name).touch()
    if "empty" in options:
        monkeypatch.setattr("kvkeep_lab.cli.study.load", lambda *given, **more: pytest.fail("a model was loaded"))
    monkeypatch.setattr(ReferenceAnswer, "of", lambda *given: pytest.fail("measured"))
    code, out, err = run("compare", "-m", str(model_folder), "-x", "full", *options)
    assert code == 2 and not out and says in " ".join(err.split())


def test_the_commit_is_that_of_the_running_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("git") is None or not (Path(__file__).parents[2] / ".git").exists():
        pytest.skip("no clone")
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", commit() or "")
    monkeypatch.setattr("kvkeep.__file__", str(tmp_path / "kvkeep" / "__init__.py"))
    found = commit.__wrapped__()  # the cache has the clone's
    assert found is None or re.fullmatch(r"[0-9a-f]{7}", found)  # as pip wrote it down
