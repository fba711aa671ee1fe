"""Renders Markdown on a terminal while the model writes it.

Only the last block of the text (a paragraph, a list, a code block) can still change. Earlier blocks are printed once,
and the terminal scrolls them, so an answer can have any length.
"""

from __future__ import annotations

import re
import time
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock as RichCodeBlock
from rich.markdown import Heading, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.text import Text

from kvkeep.cli.output import printable

INTERVAL_S = 1 / 15
"""Minimum time between two updates."""
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class CodeBlock(RichCodeBlock):
    """Code in the terminal's default colours, without padding, which a user would copy with the code."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True)


class LeftHeading(Heading):
    """A heading as a bold line at the left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text: Text = self.text
        text.stylize("bold underline" if self.tag == "h1" else "bold")
        yield text


class AnswerMarkdown(Markdown):
    """Markdown of a model. Line ends, HTML and the URLs of links are shown unchanged."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = Markdown.elements | {
        "fence": CodeBlock, "code_block": CodeBlock, "heading_open": LeftHeading,
    }  # fmt: skip

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed: list[Any] = _PARSER.parse(text)
        for block in self.parsed:
            for token in block.children or ():
                if token.type == "softbreak":
                    token.type = "hardbreak"


class MarkdownWriter:
    """Shows one answer on ``console``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._source, self._drawn = "", 0.0
        self._printed = False  # whether blocks stand above

    def add(self, text: str) -> None:
        """Add a piece of the answer. Show it if INTERVAL_S passed since the last update."""
        self._source += printable(text)
        if self._source.strip() and time.monotonic() - self._drawn >= INTERVAL_S:
            self._live.start()
            settled, self._source = _blocks(self._source)
            for block in settled:
                self._print(block)
            shown = self._rendered(self._source)[2 - self._console.height :]
            self._live.update(self._below(shown), refresh=True)
            self._drawn = time.monotonic()

    def close(self) -> None:
        """Show the complete answer, and end its last line."""
        self._live.update(Text(), refresh=False)
        self._live.stop()
        self._print(self._source)

    def _print(self, source: str) -> None:
        """Print a block above the one that can change."""
        if lines := self._rendered(source):
            self._console.print(self._below(lines))
            self._printed = True

    def _below(self, lines: list[Text]) -> Text:
        """Return lines after an empty one, if there are blocks above."""
        return Text("\n").join([*([Text()] if self._printed else []), *lines])

    def _rendered(self, source: str) -> list[Text]:
        """Return the lines of a block. One column stays free, so that no terminal wraps a full line; no line is padded
        with blanks, which a user would copy."""
        options = self._console.options.update(width=max(self._console.width - 1, 1))
        lines = self._console.render_lines(AnswerMarkdown(source), options, pad=False)
        found = [Text.assemble(*((one.text, one.style or "") for one in line)) for line in lines]
        for line in found:
            line.rstrip()
        visible = [at for at, line in enumerate(found) if line.plain.strip()]
        return found[visible[0] : visible[-1] + 1] if visible else []


def _blocks(source: str) -> tuple[list[str], str]:
    """Return the blocks of ``source`` that further text cannot change, and the rest. The rest is the last block and an
    incomplete line, which may belong to it or begin another block."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", source)
    complete = "".join(lines if source.endswith("\n") else lines[:-1])
    tokens = [token for token in _PARSER.parse(complete) if token.level == 0 and token.map and token.nesting >= 0]
    starts = [token.map[0] for token in tokens if token.map]
    if len(starts) < 2:
        return [], source
    parts = ["".join(lines[low:high]) for low, high in zip(starts, [*starts[1:], None], strict=True)]
    return parts[:-1], parts[-1]
