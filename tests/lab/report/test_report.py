"""A report: its Markdown, where contradicted claims come first, its page, which loads nothing, and its files."""

from __future__ import annotations

import random
import re
from base64 import b64decode
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from elements import Elements
from kvkeep_lab.experiment import packaged
from kvkeep_lab.report import groups, markdown, unmeasured, write
from kvkeep_lab.report.chapter import Chapter, Picture, Verdict, VerdictOutcome
from kvkeep_lab.report.formatting import difference_text, escaped, estimate_text, listed, ways
from kvkeep_lab.report.html import page
from kvkeep_lab.report.labels import Label, place
from kvkeep_lab.report.markdown import anchors
from kvkeep_lab.statistics import Estimate, student
from kvkeep_lab.tasks.base import Metric
from results import EXPERIMENT, PAPER, chapters, filled

from kvkeep.errors import StoreError

SECTIONS = [
    "Where ours differ from the papers",
    "Where ours agree",
    "What is undecided",
    "Measured, without a verdict",
    "Claims that were not measured",
    "What was not run",
]


ANOTHER = Chapter("Another", ("Words.",), experiment="another")
"""Beside another experiment a report begins with what is said of both."""


def headings(text: str, level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.*)$", text, re.MULTILINE)


def part(text: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_numbers_and_lists_are_formatted() -> None:
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


def test_the_table_shows_scores_memory_and_times(tmp_path: Path) -> None:
    text = markdown(chapters(filled(tmp_path / "r.jsonl", missing="window")))
    body = part(text, "A small thing: smollm2")
    table, frontier = ([line for line in block.splitlines()] for block in body.split("\n\n") if block.startswith("|"))
    for lines in (table, frontier):
        assert len({line.count("|") for line in lines}) == 1
    assert len(table) == 8
    (row,) = (line for line in table if line.startswith("| `h2o` | 25% |"))
    assert "50.0 [" in row and "-50.0 [" in row and "found 75.0" in row and "2.10 MB" in row and "50 ms" in row
    assert "prompts of 127 to 256 tokens, N = 6 to 8 a row." in body
    assert "Beside A Paper, Fig. 7. Theirs: a large model, 16 bits. Ours: smollm2, float32 (dequantised" in body
    assert "* The paper says: It always finds." in body
    assert "* The paper's number: unheard-of: found 50.0." in body


def test_claims_that_differ_come_first(tmp_path: Path) -> None:
    text = markdown([*chapters(filled(tmp_path / "r.jsonl")), ANOTHER])
    assert headings(text, 2) == [*SECTIONS, "A small thing: smollm2", "Another"]
    differing_, agreeing, open_, bare, claims, _ = (part(text, heading) for heading in SECTIONS)
    counts = "Differs: 1, holds: 1, undecided: 1, no verdict: 1 and not measured: 1."
    assert text.index(counts) < text.index("\n## ")
    assert '* "Windows find most." **Differs.**' in differing_ and "Theirs: a large model" in differing_
    assert "Q4\\_1.gguf), prompts of 127 to 256 tokens, N = 8 a row" in differing_
    assert '* "Quantising finds all." **Holds.**' in agreeing
    assert '* "Half is found." **Undecided with 8 samples.**' in open_
    assert '* "Llamas find all." **No verdict, another model\x27s.**' in bare
    assert "Ours: `h2o` at 10% and 25%: 50.0 [" in bare
    assert '* "Merging finds."\n  * Read as: ' in claims
    assert sum(text.count(claim["says"]) for claim in PAPER["claims"][1:] if isinstance(claim, dict)) == 5


def test_without_claims_there_are_no_verdicts(tmp_path: Path) -> None:
    own_chapter = chapters(filled(tmp_path / "r.jsonl", EXPERIMENT.with_(paper=None)))
    title, last = own_chapter[0].title, SECTIONS[-1]
    for beside, expected in (([ANOTHER], [last, title, "Another"]), ([], [title, last])):
        text = markdown([*own_chapter, *beside])
        assert headings(text, 2) == expected and "claim" not in text


def test_a_report_of_one_experiment_begins_with_its_chapter(tmp_path: Path) -> None:
    """Claims, table and figure come first, then the text of every report; another model has another chapter."""
    (own_chapter,) = chapters(filled(tmp_path / "r.jsonl"))
    text = markdown([own_chapter], pictures=".png")
    assert headings(text, 2) == ["A small thing: smollm2", "How claims are judged", "What was not run"]
    places = ["Beside A Paper", "### What the paper claims", "**Differs.**", "**Holds.**"]
    places += ["**Undecided", "**No verdict", "**Not measured.**", "### What was measured", "| method |"]
    places += ["-quality.png)", "-map.png)", "### The frontier", "### How it was measured", "## How claims are judged"]
    assert [text.index(place) for place in places] == sorted(text.index(place) for place in places)
    assert "Student's interval" in part(text, "How claims are judged") and all(
        f"## {one}" not in text for one in SECTIONS[:5]
    )
    both = markdown([own_chapter, replace(own_chapter, title="A small thing: gemma")])
    assert headings(both, 2)[:2] == ["A small thing: smollm2", "A small thing: gemma"]


def test_missing_cells_are_listed_with_their_reason(tmp_path: Path) -> None:
    store = filled(tmp_path / "r.jsonl", missing="window")
    missing = part(markdown(chapters(store)), SECTIONS[-1])
    assert "* `quantized` at 10%: 0 of 4 cells measured: The budget is too small." in missing
    assert "* `window` at 10% and 25%: 3 of 4 cells measured so far." in missing and "Not measured yet" not in missing
    store.records = [row for row in store.records if getattr(row, "method", "") != "h2o"]
    assert "* Not measured yet: `h2o` at 10% and 25%." in markdown(chapters(store))
    full = filled(tmp_path / "s.jsonl", EXPERIMENT.with_(methods=["h2o", "window"]))
    assert part(markdown(chapters(full)), SECTIONS[-1]).strip() == "Everything was run."


def test_experiments_that_were_not_run_are_listed(tmp_path: Path) -> None:
    bare = unmeasured({"xsum"})
    assert len(bare) == len(packaged()) - 1 and all(not chapter.blocks for chapter in bare)
    text = markdown([*chapters(filled(tmp_path / "r.jsonl")), ANOTHER, *bare])
    assert "`kvkeep lab run needle-25` has not been run." in part(text, SECTIONS[-1]) and "lab run xsum" not in text
    assert headings(text, 2) == [*SECTIONS, "A small thing: smollm2", "Another"]


def test_times_of_different_machines_are_not_compared(tmp_path: Path) -> None:
    one = chapters(filled(tmp_path / "r.jsonl"))
    two = chapters(filled(tmp_path / "s.jsonl", machine=lambda cell: {"threads": len(cell.method)}))
    for found, compared in ((one, True), (two, False)):
        text, names = markdown(found), [picture.name for picture in found[0].pictures]
        assert ("their times cannot be compared" in text) is not compared
        assert any(name.endswith("frontier-speed") for name in names) is compared
        assert ("less memory or time a token" in text) is compared


def test_links_of_the_markdown_lead_to_headings(tmp_path: Path) -> None:
    other = EXPERIMENT.with_(task={**EXPERIMENT.model_dump(mode="json")["task"], "new": 5})
    filled(tmp_path / "r.jsonl")
    text = markdown([*chapters(filled(tmp_path / "r.jsonl", other)), ANOTHER])
    made = anchors(re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(made) == len(set(made)) and set(links) <= set(made)
    assert {"a-small-thing-smollm2", "a-small-thing-smollm2-1"} <= set(links)


def test_chapters_of_other_kinds_show_their_text_and_verdicts(tmp_path: Path) -> None:
    picture = Picture("drawn", "a [drawn] thing", lambda path: None)
    verdict = Verdict("It *is* so.", VerdictOutcome.DIFFERS, ("It is 3, N = 2.",), 2)
    chapter = Chapter(
        "A study_of_it", ("### Part", picture), "B, Table 1", "theirs", "ours", (verdict,), ("Too small.",)
    )
    text = markdown([chapter, ANOTHER], pictures=".png")
    assert r'* "It \*is\* so." **Differs.**' in text and "  * It is 3, N = 2." in text
    assert "## A study\\_of\\_it" in text and "](#a-study_of_it)" in text
    assert r"![a \[drawn\] thing](drawn.png)" in text and "![" not in markdown([chapter])


def test_the_page_has_every_table_and_no_broken_link(tmp_path: Path) -> None:
    text = markdown([*chapters(filled(tmp_path / "r.jsonl")), *unmeasured(())])
    made = page(text, {})
    found = Elements(made)
    assert not found.wrong
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    expected = [
        [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in (block[0], *block[2:])]
        for block in blocks
    ]
    assert found.tables() == expected and len(expected) == 2
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert {*titles} <= {element.text for element in found.all if element.tag == "h2"}
    links = [address.removeprefix("#") for address in found.values("src", "href") if address.startswith("#")]
    places = found.values("id")
    assert set(links) <= set(places) and len(places) == len(set(places))
    assert set(links) >= set(anchors(titles))  # the contents


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    made = page(markdown(chapters(filled(tmp_path / "r.jsonl"))), {})
    found = Elements(made)
    assert all(address.startswith(("#", "data:")) for address in found.values("src", "href"))
    assert "script" not in {element.tag for element in found.all} and "default-src 'none'" in made
    assert not re.search(r"url\(|@import|https?://", made)


def test_the_page_escapes_markup_in_sentences() -> None:
    found = Elements(page("# A <b>&amp; @@BODY@@\n\n<script>alert(1)</script>\n\n* `<i>` a | b\n", {}))
    assert not {"script", "i"} & {element.tag for element in found.all}
    assert "<script>alert(1)</script>" in found.all[0].text and "@@BODY@@" in found.all[0].text


def test_pictures_are_embedded_by_their_file_type(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("a.svg", "b.png")}
    for name, file in files.items():
        file.write_bytes(name.encode())
    made = page(
        '![one "drawn"](a.png)\n\n![two](b.png)\n\n![three](c.png)\n',
        {"a.png": files["a.svg"], "b.png": files["b.png"]},
    )
    found = re.findall(r'<img alt="([^"]*)" src="data:([^;]*);base64,([^"]*)">', made)
    assert [(title, kind, b64decode(data).decode()) for title, kind, data in found] == [
        ("one &quot;drawn&quot;", "image/svg+xml", "a.svg"), ("two", "image/png", "b.png"),
    ]  # fmt: skip
    assert "three" in Elements(made).all[0].text
    with pytest.raises(StoreError, match="cannot be read: no such file"):
        page("![two](b.png)", {"b.png": tmp_path / "none.png"})


@pytest.mark.parametrize(
    ("changes", "maps"),
    [
        ({}, ["map"]),
        ({"task": {"name": "match", "length": [60], "samples": 2}, "paper": None}, []),
        ({"task": {"name": "needle", "length": [*range(64, 69)], "depth": [0], "samples": 2}}, ["map"]),
    ],
)  # fmt: skip
def test_a_report_writes_a_page_its_source_and_pictures(
    tmp_path: Path, changes: dict[str, Any], maps: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    drawn = ["quality", *maps, "frontier-memory", "frontier-speed"]
    (group,) = groups([filled(tmp_path / "r.jsonl", EXPERIMENT.with_(**changes))])
    page, source, *pictures = write([group.chapter()], tmp_path / "out" / "report")
    assert (page.name, source.name) == ("report.html", "report.md")
    assert [path.name for path in pictures] == [
        f"{group.name}-{kind}{end}" for kind in drawn for end in (".png", ".svg")
    ]
    text, html = source.read_text(), page.read_text()
    for path in pictures:
        data = path.read_bytes()
        assert len(data) > 10_000 and (data.startswith(b"\x89PNG") or b"<svg" in data)
        assert (f"]({path.name})" in text) == (path.suffix == ".png")
    assert html.count("data:image/svg+xml;base64,") == len(drawn)


def test_an_unusable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"The folder '.*file' cannot be made: file exists\."):
        write([], tmp_path / "file")
    monkeypatch.setattr("os.access", lambda *given, **options: False)  # root may write anywhere
    with pytest.raises(StoreError, match=r"The report cannot be written: the folder '.*out' is write-protected\."):
        write([], tmp_path / "out")


def test_axes_of_names_have_a_table_and_a_map(tmp_path: Path) -> None:
    """The task is RULER, whose families are an axis."""
    pytest.importorskip("matplotlib")
    families = {"name": "ruler", "length": [512, 300], "family": ["vt", "niah_single_1"], "samples": 2}
    experiment = EXPERIMENT.with_(task=families, paper=None)
    (group,) = groups([filled(tmp_path / "r.jsonl", experiment)])
    assert group.places("length") == [300, 512] and group.places("family") == ["vt", "niah_single_1"]
    assert experiment.cells("data")[0].label == "full (length 512, family vt)"
    files = write([group.chapter()], tmp_path / "out" / "report")
    text = next(path for path in files if path.suffix == ".md").read_text()
    table = text.split("| string match (%) | budget | `vt` | `niah_single_1` |\n")[1].split("\n\n")[0]
    assert "| `full` | - | 100.0 | 100.0 |" in table and "| `h2o` | 25% | 50.0 | 50.0 |" in table
    assert "`quantized` | 10%" not in table
    assert any("map" in path.name and path.stat().st_size > 10_000 for path in files)


@pytest.mark.parametrize("seed", range(4))
def test_labels_of_a_figure_overlap_nothing(seed: int) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(figsize=(10, 5.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    draw = random.Random(seed)
    points = [(10 ** draw.random(), draw.random()) for _ in range(15)]
    axes.set_xscale("log")
    axes.plot(*zip(*points, strict=True), "o")
    axes.axhline(0.5)
    place(axes, [Label(f"method-{n}", point) for n, point in enumerate(points)], points, [((1, 0.5), (10, 0.5))])
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = [Text.get_window_extent(text, renderer) for text in axes.texts]
    dots = axes.transData.transform(points)
    level = axes.transData.transform((1, 0.5))[1]
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert not any(box.contains(*dot) for box in boxes for dot in dots)
    assert not any(box.y0 < level < box.y1 for box in boxes)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
