"""The report's page: all that the Markdown says, and nothing from elsewhere."""

from __future__ import annotations

import re
from base64 import b64decode
from pathlib import Path

import pytest
from elements import Elements
from kvkeep_lab.report import markdown, unmeasured
from kvkeep_lab.report.html import page
from kvkeep_lab.report.markdown import anchors
from results import chapters, filled

from kvkeep.errors import StoreError


def test_every_table_is_there_whole_and_every_link_leads_somewhere(tmp_path: Path) -> None:
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


def test_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    made = page(markdown(chapters(filled(tmp_path / "r.jsonl"))), {})
    found = Elements(made)
    assert all(address.startswith(("#", "data:")) for address in found.values("src", "href"))
    assert "script" not in {element.tag for element in found.all} and "default-src 'none'" in made
    assert not re.search(r"url\(|@import|https?://", made)


def test_what_a_sentence_says_stays_a_sentence() -> None:
    found = Elements(page("# A <b>&amp; @@BODY@@\n\n<script>alert(1)</script>\n\n* `<i>` a | b\n", {}))
    assert not {"script", "i"} & {element.tag for element in found.all}
    assert "<script>alert(1)</script>" in found.all[0].text and "@@BODY@@" in found.all[0].text


def test_pictures_are_inside_by_what_they_are(tmp_path: Path) -> None:
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
