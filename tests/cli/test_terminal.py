"""What a person sees and types on a terminal."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("termios")

from conftest import tokenizer
from families import tiny
from terminals import Terminal

from kvkeep import Conversation

Run = Callable[..., tuple[int, str, str]]
NOTE = ["the man was here", "and the", "of it", "was it for", "by from her"]


@pytest.mark.parametrize(("method", "columns"), [("stock", 80), ("full", 40)])
def test_an_answer_without_a_budget_is_one_line(run: Run, model_folder: Path, method: str, columns: int) -> None:
    """A bar of what is read stays on a terminal until the first token, and breaks every line of text while it does."""
    common = ("generate", "-m", str(model_folder), "-x", method, "-p", "the man was here", "-n", "24")
    answer = json.loads(run(*common, "--json")[1])["text"]
    with Terminal(*common, columns=columns) as terminal:
        assert terminal.ended() == 0
        assert f"{answer}\n" in terminal.text
        assert terminal.seen.count("\x1b[?25l") == terminal.seen.count("\x1b[?25h")  # the cursor is back


def test_what_is_pasted_is_one_question_and_a_long_line_is_whole(model_folder: Path, tmp_path: Path) -> None:
    long = "the man was " * 400  # 4,800 characters
    arguments = (
        "chat",
        "-m",
        str(model_folder),
        "-n",
        "3",
        "-x",
        "streaming-llm",
        "-b",
        "64",
        "--session",
        str(tmp_path / "s"),
    )
    with Terminal(*arguments) as terminal:
        terminal.asked()
        terminal.type("\x1b[200~" + "\r".join(NOTE) + "\r\x1b[201~\r")
        terminal.asked(2)
        terminal.type(long + "\r")
        terminal.asked(3)
        terminal.type("thx\x7fe of gone\x17\x1b[A\x1b[B\x03")
        terminal.until("leaves.")
        terminal.type("was\xff it\r".replace("\xff", "\udcff"))
        terminal.until("UTF-8")
        terminal.asked(5)
        terminal.type("\x1b[200~by\x1b[201~\x1b[200~ her\x1b[201~\r")
        terminal.asked(6)
        terminal.type("\x04")
        assert terminal.ended() == 0
    talk = Conversation.resume(tiny("llama"), tokenizer(), tmp_path / "s")
    asked = [message["content"] for message in talk.messages if message["role"] == "user"]
    assert asked == ["\n".join(NOTE), long.strip(), "by her"], "a line that is not UTF-8 is an error"


def test_a_terminal_is_left_as_it_was(model_folder: Path) -> None:
    import termios

    def compared(run: Callable[[], None]) -> None:
        before = termios.tcgetattr(0)
        try:
            run()
        finally:
            print("the same" if termios.tcgetattr(0) == before else "another")

    with Terminal("chat", "-m", str(model_folder), "-n", "3", within=compared) as terminal:
        terminal.asked()
        terminal.type("the man\r")
        terminal.until("exact: all")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.ended() == 128 + signal.SIGTERM
        assert "the same" in terminal.text
        assert terminal.seen.rfind("\x1b[?2004l") > terminal.seen.rfind("\x1b[?2004h") > 0


def test_a_closed_window_loses_nothing_that_was_said(model_folder: Path, tmp_path: Path) -> None:
    arguments = ("chat", "-m", str(model_folder), "-n", "300", "--session", str(tmp_path / "session"))
    with Terminal(*arguments) as terminal:
        terminal.asked()
        terminal.type("the man was here\r")
        terminal.until("exact: all")
        terminal.asked(2)
        terminal.type("and the\r")
        terminal.until("Reading", terminal.seen.count("Reading") + 1)
        terminal.close()
        assert terminal.process.wait(60) != 0
    talk = Conversation.resume(tiny("llama"), tokenizer(), tmp_path / "session")
    assert talk.messages[0]["content"] == "the man was here"


def test_loading_and_reading_say_how_long_they_take(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    """A bar without a number moves, and has the time; in a pipe there is a line after a second, unless --json is
    given."""
    prompt = "the man was here " * 20
    arguments = ("generate", "-m", str(model_folder), "-p", prompt, "-n", "2")
    with Terminal(*arguments) as terminal:
        assert terminal.ended() == 0
        loading, reading = terminal.text.find(f"Loading {model_folder}"[:30]), terminal.text.find("Reading ")
        assert 0 <= loading < reading
        assert re.search(r"Reading \d+ tokens [^\n]*0:00", terminal.text) and "-:--" not in terminal.text
    quick = run(*arguments)
    monkeypatch.setattr("kvkeep.cli.output.SILENCE_S", 0.0)
    slow = run(*arguments)
    assert slow[1] == quick[1] and re.fullmatch(r"Reading \d+ tokens \.\.\.", slow[2].splitlines()[0])
    assert run(*arguments, "--json")[2] == ""
