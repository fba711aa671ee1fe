"""Renders Markdown on a terminal while the model writes it, without flicker: only changed lines are rewritten.

Only the last block of the text (a paragraph, a list, a code block) can still change. Earlier blocks are written once,
and the terminal scrolls them, so an answer can have any length.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock as RichCodeBlock
from rich.markdown import Heading, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.text import Text

from kvkeep.cli.output import printable

INTERVAL_S = 1 / 15
"""Minimum time between two updates."""
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_PADDING = re.compile(r" +(?=(?:\x1b\[0m)?$)")
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
    """Shows one answer on ``console``. ``write`` writes text to the terminal immediately."""

    def __init__(self, console: Console, write: Callable[[str], object]) -> None:
        self._console, self._write = console, write
        self._source = ""  # text that may still change
        self._above: list[str] = []  # the last settled line
        self._shown: list[str] = []  # that line and the last block; the cursor is at its end
        self._width, self._drawn = console.width, 0.0

    def add(self, text: str) -> None:
        """Add a piece of the answer. Show it if INTERVAL_S passed since the last update."""
        self._source += printable(text)
        if time.monotonic() - self._drawn >= INTERVAL_S:
            self._draw()

    def close(self) -> None:
        """Show the complete answer, and end its last line."""
        self._draw()
        if self._shown:
            self._write("\n")

    def _draw(self) -> None:
        if self._console.width != self._width:  # the terminal has moved the lines
            self._width, self._above, self._shown = self._console.width, [], []
            self._write("\n")
        settled, self._source = _blocks(self._source)
        fixed = self._above
        for block in settled:
            fixed = _joined(fixed, self._rendered(block))
        lines = _joined(fixed, self._rendered(self._source))
        self._replace(lines)
        self._above, self._shown = fixed[-1:], lines[max(len(fixed) - 1, 0) :]
        self._drawn = time.monotonic()

    def _rendered(self, source: str) -> list[str]:
        """Return the lines of a block for the terminal. One column stays free, so that no terminal wraps a full
        line."""
        if not source.strip():
            return []
        with self._console.capture() as captured:
            self._console.print(AnswerMarkdown(source), width=max(self._width - 1, 1))
        lines = [_PADDING.sub("", line) for line in captured.get().split("\n")]
        visible = [at for at, line in enumerate(lines) if _STYLE.sub("", line).strip()]
        return lines[visible[0] : visible[-1] + 1] if visible else []

    def _replace(self, lines: list[str]) -> None:
        """Replace the shown lines by ``lines``, from the first difference within the height of the screen."""
        shown = self._shown
        if lines == shown:
            return
        same = next((at for at, (one, two) in enumerate(zip(shown, lines, strict=False)) if one != two), None)
        first = same if same is not None else len(shown) if len(lines) > len(shown) else max(len(lines) - 1, 0)
        first = max(first, len(shown) - self._console.height + 1)
        if first == len(shown):
            move = "\n" if shown else ""
        else:
            up = len(shown) - 1 - first
            move = (f"\x1b[{up}A" if up else "") + "\r"
        self._write(move + "\n".join(f"{line}\x1b[K" for line in lines[first:]) + "\x1b[J")


def _joined(above: list[str], below: list[str]) -> list[str]:
    """Return the lines of both, with an empty line between them."""
    return [*above, *([""] if above and below else []), *below]


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
