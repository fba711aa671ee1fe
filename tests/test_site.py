"""The site of the documentation: built strictly, with all that the program declares, and from one host alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import kvkeep
from kvkeep.cli import COMMANDS
from kvkeep.cli.lazy import application, loaded
from kvkeep.policies.methods import parts

ROOT = Path(__file__).parents[1]
FETCHED = frozenset(
    "audio embed iframe img image input link object script source track use video".split()  # noqa: SIM905
)
"""Elements whose addresses a browser fetches by itself; it does so of no ``a``."""


class Sources(HTMLParser):
    """The addresses that a page has a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in FETCHED:
            self.found += [
                value for name, value in attrs if value and name in ("src", "href", "srcset", "data", "poster")
            ]
        self.found += [value for name, value in attrs if value and name == "style" and "url(" in value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; a warning of mkdocs (a link or an anchor that leads nowhere, a page without a place) is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        from mkdocs.commands.build import build
        from mkdocs.config import load_config

        folder = tmp_path_factory.mktemp("site")
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.mark.slow
def test_a_browser_asks_no_other_host(site: Path) -> None:
    fetched: list[tuple[str, str]] = []
    for page in site.rglob("*.html"):
        sources = Sources()
        sources.feed(page.read_text(encoding="utf-8"))
        fetched += [(page.name, source) for source in sources.found]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        fetched += [(sheet.name, source) for source in re.findall(r"(?:url\(|@import\s)\s*[\"']?([^\"')]*)", text)]
    assert len(fetched) > 100
    assert not [one for one in fetched if re.search(r"(^|[\"'(\s,])(https?:)?//", one[1])]


def declared() -> Iterator[tuple[str, set[str]]]:
    """Every command with the long options that it has, as the program has them."""
    for name, (where, _) in application(COMMANDS).table.items():
        command = loaded(name, where)
        within = {f"{name} {own}": one for own, one in getattr(command, "commands", {}).items()}
        for path, one in ({name: command} | within).items():
            yield path, {option for own in one.params for option in own.opts if option.startswith("--")}


def section(page: str, command: str) -> str:
    """The part of a page from the heading of a command to the next heading."""
    begin = page.index(f'id="kvkeep-{command.replace(" ", "-")}"')
    following = re.compile(r"<h[1-6] id=").search(page, begin + 1)
    return page[begin : following.start() if following else None]


@pytest.mark.slow
def test_the_reference_has_every_option_and_every_exported_name(site: Path) -> None:
    commands, names = ((site / page).read_text(encoding="utf-8") for page in ("commands.html", "api.html"))
    wanted = dict(declared())
    assert "haystack/*.txt" in commands  # help is plain text
    assert len(wanted) > 20 and sum(map(len, wanted.values())) > 200
    assert not [(name, one) for name, own in wanted.items() for one in own if one not in section(commands, name)]
    assert not [name for name in kvkeep.__all__ if f'id="kvkeep.{name}"' not in names]
    assert ":class:" not in names and ":func:" not in names
    methods = (site / "methods.html").read_text(encoding="utf-8")
    rows = set(re.findall(r"<tr>\s*<td><code>([^<]*)</code>", methods))
    assert rows >= {name for registry in parts().values() for name in registry} | {"stock", "sketch:swap=1.1"}
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert all(page in index for page in ("commands.html#kvkeep-generate", "api.html#kvkeep.KeepCache"))
