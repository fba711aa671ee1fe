"""The report's page: all that the Markdown says, and nothing from elsewhere."""

from __future__ import annotations

import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kvkeep_lab.report import markdown, unmeasured
from kvkeep_lab.report.html import page
from kvkeep_lab.report.markdown import anchors
from results import chapters, filled

from kvkeep.errors import StoreError

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Tables' cells, addresses, anchors and text; elements that are not closed in their order are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong = 0
        self.tables: list[list[list[str]]] = []
        self.addresses: list[str] = []
        self.anchors: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.addresses += [value or ""] if name in ("src", "href") else []
            self.anchors += [value or ""] if name == "id" else []
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.wrong += not self.open or self.open.pop() != tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.wrong and not reader.open
    return reader


def test_every_table_is_there_whole_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    text = markdown([*chapters(filled(tmp_path / "r.jsonl")), *unmeasured(())])
    made = page(text, {})
    found = read(made)
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    expected = [
        [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in (block[0], *block[2:])]
        for block in blocks
    ]
    assert found.tables == expected and len(expected) == 2
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert all(title in found.text for title in titles)
    links = [address.removeprefix("#") for address in found.addresses if address.startswith("#")]
    assert set(links) <= set(found.anchors) and len(found.anchors) == len(set(found.anchors))
    assert set(links) >= set(anchors(titles))  # the contents


def test_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    made = page(markdown(chapters(filled(tmp_path / "r.jsonl"))), {})
    found = read(made)
    assert all(address.startswith(("#", "data:")) for address in found.addresses)
    assert "script" not in found.tags and "default-src 'none'" in made
    assert not re.search(r"url\(|@import|https?://", made)


def test_what_a_sentence_says_stays_a_sentence() -> None:
    found = read(page("# A <b>&amp; @@BODY@@\n\n<script>alert(1)</script>\n\n* `<i>` a | b\n", {}))
    assert "script" not in found.tags and "i" not in found.tags
    assert "<script>alert(1)</script>" in found.text and "@@BODY@@" in found.text


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
    assert "three" in read(made).text
    with pytest.raises(StoreError, match="cannot be read: no such file"):
        page("![two](b.png)", {"b.png": tmp_path / "none.png"})
