"""The report's Markdown: what differs comes first, what is not there is named with its reason, and links lead."""

from __future__ import annotations

import re
from pathlib import Path

from kvkeep_lab.experiment import packaged
from kvkeep_lab.report import markdown, unmeasured
from kvkeep_lab.report.chapter import Chapter, Outcome, Picture, Verdict
from kvkeep_lab.report.formatting import difference_text, escaped, estimate_text, listed, ways
from kvkeep_lab.report.markdown import anchors
from kvkeep_lab.statistics import Estimate, student
from kvkeep_lab.tasks.base import Metric
from results import EXPERIMENT, PAPER, chapters, filled

FRONT = [
    "Where ours differ from the papers",
    "Where ours agree",
    "What cannot be told yet",
    "Claims that were not measured",
    "What was not run",
]


def headings(text: str, level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.*)$", text, re.MULTILINE)


def part(text: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_numbers_as_they_are_told() -> None:
    found = Estimate(0.5, 0.25, 0.75, 4)
    assert estimate_text(Metric("a", "a"), found) == "50.0 [25.0, 75.0]"
    saving = Metric("a", "a", kind="saving")
    assert estimate_text(saving, student([0.1, -0.2, 0.1], scale=saving.scale)) == "0.0 [-43.0, 43.0]"  # it may be none
    assert estimate_text(Metric("a", "a", "lower", "number"), Estimate(1.23456, 1, 2, 2)) == "1.23 [1, 2]"
    assert estimate_text(Metric("a", "a", "lower", "perplexity"), Estimate(0.0, 0.0, 0.0, 1)) == "1"
    assert difference_text(Metric("a", "a"), found) == "+50.0 [+25.0, +75.0]"
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert ways([("x", "10%"), ("y", "10%"), ("x", "25%"), ("z", None), ("y", "25%"), ("v", "1")]) == (
        "x and y at 10% and 25%; z; v at 1"
    )
    assert escaped("a_b*\n<i>|#`") == r"a\_b\* \<i\>\|\#\`"


def test_a_table_says_what_there_is_to_know(tmp_path: Path) -> None:
    text = markdown(chapters(filled(tmp_path / "r.jsonl", missing="window")))
    body = part(text, "A small thing: smollm2")
    table, frontier = ([line for line in block.splitlines()] for block in body.split("\n\n") if block.startswith("|"))
    for lines in (table, frontier):
        assert len({line.count("|") for line in lines}) == 1
    assert len(table) == 8
    (row,) = (line for line in table if line.startswith("| `h2o` | 25% |"))
    assert "50.0 [" in row and "-50.0 [" in row and "found 75.0" in row and "2.1 MB" in row and "50 ms" in row
    assert "N = 8 a row (2 samples, 4 points, 1 seed)" in body and "prompts of 127 to 256 tokens" in body
    assert "Beside A Paper, Fig. 7. Theirs: a large model, 16 bits. Ours: smollm2, float32, " in body
    assert "* The paper says: It always finds." in body
    assert "* The paper's number: unheard-of: found 50.0." in body


def test_what_differs_comes_first(tmp_path: Path) -> None:
    text = markdown(chapters(filled(tmp_path / "r.jsonl")))
    assert headings(text, 2) == [*FRONT, "A small thing: smollm2"]
    differing_, agreeing, open_, claims, _ = (part(text, heading) for heading in FRONT)
    assert text.index("Does not hold here: 1, holds here: 1, cannot be told: 2 and not measured: 1.") < text.index(
        "\n## "
    )
    assert '* "Windows find most." **Does not hold here.**' in differing_ and "Theirs: a large model" in differing_
    assert "Ours: smollm2, float32, prompts of 127 to 256 tokens, N = 8 a row" in differing_
    assert '* "Quantising finds all." **Holds here.**' in agreeing
    assert '* "Half is found." **Cannot be told from 8 samples.**' in open_
    assert "h2o at 25%: 75.0 (read off)" in open_
    assert '* "Merging finds."\n  * Read as: ' in claims
    assert sum(text.count(claim["says"]) for claim in PAPER["claims"][1:] if isinstance(claim, dict)) == 4


def test_without_claims_there_are_no_verdicts(tmp_path: Path) -> None:
    text = markdown(chapters(filled(tmp_path / "r.jsonl", EXPERIMENT.with_(paper=None))))
    assert headings(text, 2) == [FRONT[-1], "A small thing: smollm2"] and "claims" not in text


def test_what_is_not_there_is_named_with_its_reason(tmp_path: Path) -> None:
    store = filled(tmp_path / "r.jsonl", missing="window")
    missing = part(markdown(chapters(store)), FRONT[-1])
    assert "* `quantized` at 10%: 0 of 4 cells measured: The budget is too small." in missing
    assert "* `window` at 10% and 25%: 3 of 4 cells measured so far." in missing and "Not measured yet" not in missing
    store.records = [row for row in store.records if getattr(row, "method", "") != "h2o"]
    assert "* Not measured yet: `h2o` at 10% and 25%." in markdown(chapters(store))
    full = filled(tmp_path / "s.jsonl", EXPERIMENT.with_(methods=["h2o", "window"]))
    assert part(markdown(chapters(full)), FRONT[-1]).strip() == "Everything was run."


def test_experiments_without_rows_are_named(tmp_path: Path) -> None:
    bare = unmeasured({"xsum"})
    assert len(bare) == len(packaged()) - 1 and all(not chapter.blocks for chapter in bare)
    text = markdown([*chapters(filled(tmp_path / "r.jsonl")), *bare])
    assert "`kvkeep lab run needle-25` has not been run." in part(text, FRONT[-1]) and "lab run xsum" not in text
    assert headings(text, 2) == [*FRONT, "A small thing: smollm2"]


def test_times_of_different_machines_are_not_compared(tmp_path: Path) -> None:
    one = chapters(filled(tmp_path / "r.jsonl"))
    two = chapters(filled(tmp_path / "s.jsonl", machine=lambda cell: {"threads": len(cell.method)}))
    for found, compared in ((one, True), (two, False)):
        text, names = markdown(found), [picture.name for picture in found[0].pictures]
        assert ("times are not to be compared" in text) is not compared
        assert any(name.endswith("frontier-speed") for name in names) is compared
        assert ("less memory or time a token" in text) is compared


def test_links_lead_to_their_headings(tmp_path: Path) -> None:
    other = EXPERIMENT.with_(task={**EXPERIMENT.model_dump(mode="json")["task"], "new": 5})
    filled(tmp_path / "r.jsonl")
    text = markdown(chapters(filled(tmp_path / "r.jsonl", other)))
    made = anchors(re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(made) == len(set(made)) and set(links) <= set(made)
    assert {"a-small-thing-smollm2", "a-small-thing-smollm2-1"} <= set(links)


def test_chapters_of_any_kind(tmp_path: Path) -> None:
    """What another kind of experiment gives: its own words, tables and verdicts."""
    picture = Picture("drawn", "a [drawn] thing", lambda path: None)
    verdict = Verdict("It *is* so.", Outcome.DIFFERS, ("It is 3, N = 2.",), 2)
    chapter = Chapter(
        "A study_of_it", ("### Part", picture), "B, Table 1", "theirs", "ours", (verdict,), ("Too small.",)
    )
    text = markdown([chapter], pictures=".png")
    assert r'* "It \*is\* so." **Does not hold here.**' in text and "  * It is 3, N = 2." in text
    assert "## A study\\_of\\_it" in text and "](#a-study_of_it)" in text
    assert r"![a \[drawn\] thing](drawn.png)" in text and "![" not in markdown([chapter])
