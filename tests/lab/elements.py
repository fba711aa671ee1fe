"""Parses HTML into a list of elements."""

from __future__ import annotations

from dataclasses import dataclass
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input"}


@dataclass
class Element:
    """An element with the text within it, that of inner elements included; ``attributes`` without a value have ""."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


class Elements(HTMLParser):
    """All elements of a page in their order; ``wrong``: how many are not closed, or not in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.all: list[Element] = []
        self._open: list[Element] = []
        self.wrong = 0
        self.feed(page)
        self.close()
        self.wrong += len(self._open)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append(Element(tag, {name: value or "" for name, value in attrs}))
        self._open += [] if tag in VOID else self.all[-1:]

    def handle_endtag(self, tag: str) -> None:
        self.wrong += not self._open or self._open.pop().tag != tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def values(self, *names: str) -> list[str]:
        """The values of attributes, wherever they stand."""
        return [element.attributes[name] for element in self.all for name in names if name in element.attributes]

    def tables(self) -> list[list[list[str]]]:
        """The text of every table's cells, by row."""
        found: list[list[list[str]]] = []
        for element in self.all:
            if element.tag == "table":
                found.append([])
            elif element.tag == "tr":
                found[-1].append([])
            elif element.tag in ("td", "th"):
                found[-1][-1].append(element.text)
        return found
