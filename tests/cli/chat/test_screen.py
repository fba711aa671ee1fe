"""What a person sees of a chat on a terminal: answers painted while they come, status lines, completions."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("termios")

from conftest import tokenizer
from families import tiny
from rich.console import Console
from terminals import Terminal

from kvkeep import Conversation
from kvkeep.cli.chat import markdown
from kvkeep.models.folders import data_folder

Run = Callable[..., tuple[int, str, str]]
TEXT = """# Bread and *butter*

A first line that is long enough to be wrapped at forty columns, with `code` and <b>html</b>.
A second line of the paragraph.

1. flour
2. water

3. salt, **bold**
   - nested [link](http://a.b/c)

```python
def f(x):
    return x[0] < 1  # comment

print(f("[red]"))
```

| a | b |
| --- | --- |
| 3 | a longer cell |

> quoted

Last \x1b[2Jline.
"""


class Paper:
    """A terminal of so many rows, as far as painting needs one: what scrolled away cannot be reached."""

    def __init__(self, rows: int) -> None:
        self.lines, self.row, self.column, self.rows = [""], 0, 0, rows

    def flush(self) -> None:
        """As of a file."""

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\n|\r|[^\x1b\n\r]+", text):
            line = self.lines[self.row]
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\r":
                self.column = 0
            elif part.startswith("\x1b") and part.endswith("A"):
                self.row -= int(part[2:-1])
                self.column = min(self.column, len(self.lines[self.row]))
                assert self.row >= max(0, len(self.lines) - self.rows), "above the screen"
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif not part.startswith("\x1b"):
                line = line.ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
                self.column += len(part)
            else:
                assert part.endswith(("m", "h", "l")), part


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 24), (40, 5)])
def test_what_comes_in_pieces_looks_as_what_comes_at_once(
    columns: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markdown, "INTERVAL_S", 0)

    def painted(longest: int) -> list[str]:
        paper, choose, at = Paper(rows), random.Random(longest), 0
        console = Console(file=paper, force_terminal=True, width=columns, height=rows, color_system="standard")  # type: ignore[arg-type]
        one = markdown.MarkdownWriter(console)
        while at < len(TEXT):
            step = choose.randint(1, longest)
            one.add(TEXT[at : at + step])
            at += step
        one.close()
        return [line.rstrip() for line in paper.lines[: paper.row]]  # below the cursor nothing is shown

    whole = painted(10**6)
    assert painted(4) == whole and max(map(len, whole)) < columns
    shown = "\n".join(whole)
    assert "<b>html</b>" in shown and "[2Jline" in shown and "\x1b" not in shown and "(http://a.b/c)" in shown
    assert 'print(f("[red]"))' in shown and " 3 salt, bold" in shown and "\n\n\n" not in shown


@pytest.mark.parametrize("columns", [80, 40])
def test_a_chat_on_a_terminal(run: Run, model_folder: Path, tmp_path: Path, columns: int) -> None:
    common = ("chat", "-m", str(model_folder), "-b", "16", "-n", "12")
    answer = run(*common, stdin="the of and to\n")[1]
    with Terminal(*common, "--session", str(tmp_path / "s"), columns=columns) as terminal:
        terminal.asked()
        terminal.type("the of\x1b\rand to\r")  # Alt-Enter begins a new line
        terminal.asked(2)
        lines = terminal.text.splitlines()
        painted = "".join(line for line in lines if line)
        assert answer.split()[0] in painted and "16 tokens in memory (9.2 KB), 1" in " ".join(lines)
        assert "kv-direct within 16 entries per layer. /help lists the commands" in " ".join(terminal.text.split())
        terminal.type("/unk\r")
        terminal.until("Unknown command")
        terminal.asked(3)
        terminal.type("/und")
        terminal.until("Forget the last")  # the menu says what it does
        terminal.type("o\r")
        terminal.until("Forgotten: the of and to")
        terminal.asked(4)
        terminal.type("/help\r")
        terminal.until("Alt-Enter")
        terminal.asked(5)
        assert max(map(len, terminal.text[terminal.text.index("Show these") :].splitlines())) <= columns + 2
        terminal.type("\x1b[A\x1b[A\x1b[A\r")  # up: /help, /undo, /unk
        terminal.until("Unknown command", 2)
        terminal.asked(6)
        terminal.type("\x04")
        assert terminal.ended() == 0
    talk = Conversation.resume(tiny("llama"), tokenizer(), tmp_path / "s")
    assert not talk.messages, "what was undone is undone on disk"
    history = data_folder() / "chat-history"
    assert history.stat().st_mode & 0o077 == 0 and "+the of\n+and to" in history.read_text()
