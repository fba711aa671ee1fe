"""What the site of the documentation has beside docs/: a hook of mkdocs, and an extension of griffe (mkdocs.yml).

Pages and files of the repository's root; the options of all commands, as the program declares them; tables of methods,
where a page names them (``<!-- methods: fates -->``); the names that kvkeep exports, with their docstrings.
Nothing of it is kept in a file.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe
import typer
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

import kvkeep
from kvkeep.cli import COMMANDS
from kvkeep.cli.lazy import application, loaded

sys.path.insert(0, str(Path(__file__).parent))
from method_tables import printed

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
NOTEBOOKS = tuple(f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb")))
FILES = ("CITATION.cff", "LICENSE", "deploy/Dockerfile", "deploy/kuberay.yaml", "deploy/kvkeep.service", *NOTEBOOKS)
EXPORTED = {
    "Models and caches": ("load", "KeepCache", "Budget", "Memory", "ModelGeometry"),
    "Answers": ("generate", "Conversation", "Session", "save_session", "load_session"),
    "Choosing": ("methods", "Method", "Exactness"),
    "Parts of a method": ("register", "Preset", "Selector", "Fate", "EvictedStore", "EntryState", "Recall", "Reader"),
    "Errors": (
        "KvkeepError", "UsageError", "BudgetError", "ModelError", "UnsupportedModelError", "SessionError", "StoreError",
        "OutOfMemory",
    ),
}  # fmt: skip
"""The sections of the page of the Python interface, in the order in which one needs them."""
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")
TABLE = re.compile(r"^<!-- methods: (.*) -->$", re.MULTILINE)
HELP = re.compile(r"^(\* `[^`\n]*`: )(.*)$", re.MULTILINE)
"""A line of Typer's Markdown: the option, and its help, which is plain text."""
NAMED = re.compile(r"(?:^|(?<=[.;]\s))\s*`{0,2}([a-z]\w*(?:, [a-z]\w*)*)`{0,2}:\s")
"""Where the words about a parameter or an attribute begin: at the start of a sentence."""
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


def on_files(files: Files, config: Any) -> Files:
    """Add what does not lie in docs/."""
    for path, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    for path in FILES:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "api.md", content=interface()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead where their files are in the site; put in tables, and the options behind the page of commands."""
    place = page.file.src_uri
    path = next((path for path, moved in PAGES.items() if moved == place), f"docs/{place}")
    text = TABLE.sub(lambda found: printed(found[1]), markdown)
    if place == "commands.md":
        text += options()

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[1]))
        moved = PAGES.get(target) or (target if target in FILES else target.removeprefix("docs/"))
        if moved == target and target not in FILES:
            return found[0]  # code, or a link that the strict build refuses
        return f"]({posixpath.relpath(moved, posixpath.dirname(place) or '.')}{found[2] or ''})"

    return LINK.sub(link, text)


def options() -> str:
    """Return the arguments and options of all commands, the lab's included, as Markdown by Typer."""
    made = ["\n\n## Options\n"]
    for name, (where, _) in application(COMMANDS).table.items():
        command = loaded(name, where)
        context = typer.Context(command, info_name=name)
        made.append(get_docs_for_click(obj=command, ctx=context, indent=2, name=name, call_prefix="kvkeep"))
    return HELP.sub(lambda found: found[1] + re.sub(r"([*_<])", r"\\\1", found[2]), "\n".join(made))


def interface() -> str:
    """Return the page of all exported names, for mkdocstrings to fill."""
    named = [name for names in EXPORTED.values() for name in names]
    if sorted(named) != kvkeep.__all__:
        raise PluginError(f"tools/site_pages.py: {set(named) ^ set(kvkeep.__all__)} is in one of EXPORTED and __all__.")
    sections = (
        f"## {title}\n\n" + "\n\n".join(f"::: kvkeep.{name}" for name in names) for title, names in EXPORTED.items()
    )
    return "# Python\n\nAll that `import kvkeep` exports.\n\n" + "\n\n".join(sections)


def listed(paragraph: str) -> str:
    """Return a paragraph of a docstring that says what parameters or attributes are (``name: ...``), as a list."""
    text = dedent(paragraph.removeprefix("Args:\n"))
    parts = NAMED.split(text)  # what stands before, then names and words in turn
    if len(parts) < 5:
        return paragraph
    lines = [
        f"- **`{names}`**: {' '.join(words.split()).rstrip(';')}"
        for names, words in zip(parts[1::2], parts[2::2], strict=True)
    ]
    last, raises, rest = lines[-1].partition(" Raises ")
    return "\n\n".join(filter(None, (parts[0].strip(), "\n".join([*lines[:-1], last]), f"{raises}{rest}".strip())))


class Docstrings(griffe.Extension):
    """Turns docstrings into Markdown: lists of what parameters are, and code for roles (``:class:`Budget```)."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            made = "\n\n".join(map(listed, obj.docstring.value.split("\n\n")))
            obj.docstring.value = ROLE.sub(r"`\1`", made)
