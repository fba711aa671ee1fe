"""What a person sees of a chat on a terminal: answers painted while they come, status lines, completions."""

from __future__ import annotations

import io
import json
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("termios")

from conftest import tokenizer
from families import tiny
from rich.console import Console
from terminals import Terminal

from kvkeep import Conversation
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import user_store
from kvkeep.cli.chat import markdown
from kvkeep.cli.chat.saving import HANGUP_PREFIX
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

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;]*[a-zA-Z]|\n|\r|[^\x1b\n\r]+", text):
            line = self.lines[self.row]
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\r":
                self.column = 0
            elif part.startswith("\x1b") and part.endswith("A"):
                self.row -= int(part[2:-1])
                assert self.row >= max(0, len(self.lines) - self.rows), "above the screen"
            elif part == "\x1b[K":
                self.lines[self.row] = line[: self.column]
            elif part == "\x1b[J":
                self.lines[self.row :] = [line[: self.column]]
            elif not part.startswith("\x1b"):
                line = line.ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
                self.column += len(part)
            else:
                assert part.endswith("m"), part


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 24), (40, 5)])
def test_what_comes_in_pieces_looks_as_what_comes_at_once(
    columns: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markdown, "INTERVAL_S", 0)
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, height=rows, color_system="standard")

    def painted(longest: int) -> tuple[list[str], int]:
        paper, choose, at, written = Paper(rows), random.Random(longest), 0, 0

        def write(text: str) -> None:
            nonlocal written
            written += len(text)
            paper.write(text)

        one = markdown.MarkdownWriter(console, write)
        while at < len(TEXT):
            step = choose.randint(1, longest)
            one.add(TEXT[at : at + step])
            at += step
        one.close()
        return paper.lines, written

    whole, once = painted(10**6)
    pieces, written = painted(4)
    assert pieces == whole and max(map(len, whole)) < columns
    assert written < 20 * once, "only what changed is written"
    shown = "\n".join(whole)
    assert "<b>html</b>" in shown and "[2Jline" in shown and "\x1b" not in shown and "(http://a.b/c)" in shown
    assert 'print(f("[red]"))' in shown and " 3 salt, bold" in shown and "\n\n\n" not in shown


@pytest.mark.parametrize("columns", [80, 40])
def test_a_chat_on_a_terminal(run: Run, model_folder: Path, tmp_path: Path, columns: int) -> None:
    common = ("chat", "-m", str(model_folder), "-b", "16", "-n", "12")
    answer = json.loads(run(*common, "--json", stdin="the of and to\n")[1])["turns"][0]["text"]
    with Terminal(*common, "--session", str(tmp_path / "s"), columns=columns) as terminal:
        terminal.asked()
        terminal.type("the of\x1b\rand to\r")  # Alt-Enter begins a new line
        terminal.asked(2)
        lines = terminal.text.splitlines()
        painted = "".join(line for line in lines if line)
        assert answer.split()[0] in painted and "16 tokens in memory (9.2 KB), 1" in " ".join(lines)
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


def test_a_hang_up_saves_what_has_no_session(model_folder: Path) -> None:
    with Terminal("chat", "-m", str(model_folder), "-n", "4", "--no-history") as terminal:
        terminal.asked()
        terminal.type("the man was\r")
        terminal.asked(2)
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.ended() == 128 + signal.SIGHUP
    store = user_store()
    (saved,) = store.sessions()
    assert store.folder == data_folder() / "store" and saved.name.startswith(HANGUP_PREFIX)
    assert store.folder.stat().st_mode & 0o077 == 0 and not (data_folder() / "chat-history").exists()
    with StoredSession(store, saved.name) as session:
        assert Conversation.resume(tiny("llama"), tokenizer(), session).messages[0]["content"] == "the man was"
    with Terminal("chat", "-m", str(model_folder)) as terminal:
        terminal.until("continues it.")
        assert saved.name in terminal.text.replace("\n", "")
