"""The lines of a chat: a question each, or a command of a table."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvkeep.budget import size
from kvkeep.cli.chat import answering, context_limit
from kvkeep.cli.chat.state import Chat
from kvkeep.cli.chat.switch_cache import NONE, describe, switch_cache
from kvkeep.decode.prompt import encoding
from kvkeep.decode.texts import read_text
from kvkeep.errors import KvkeepError, UsageError, ran_out_of_memory, unknown
from kvkeep.policies.methods import names
from kvkeep.policies.names import STOCK
from kvkeep.stock import memory_of

_NAME = re.compile(r"/[a-z]*")
_NO_MEMORY = "There is not enough memory for this; give a smaller /budget, or forget with /undo or /reset."


class Leave(Exception):
    """The user leaves the chat."""


@dataclass(frozen=True)
class Command:
    """A command; ``name`` has no slash."""

    name: str
    takes: str
    """Arguments that may follow the name."""
    help: str
    run: Callable[[Chat, str], None]
    """Runs the command with the chat and the stripped text after the name."""
    words: Callable[[str], Iterable[str]] = lambda begun: ()
    """Returns completions of the text after the name."""

    @property
    def usage(self) -> str:
        """The command as typed, with its arguments."""
        return f"/{self.name} {self.takes}".strip()


def converse(chat: Chat) -> None:
    """Process lines until the last. An error is shown, and the chat continues."""
    while _line(chat):
        pass
    if chat.saver.saved and chat.saver.error is None:
        chat.screen.note(f"Saved {chat.saver.place}.")


def _line(chat: Chat) -> bool:
    """Process the next line; return whether another may follow."""
    try:
        line = chat.screen.ask()
        if is_command(line):
            run(chat, line)
        elif line:
            answering.ask(chat, line)
    except (EOFError, Leave):
        return False
    except KeyboardInterrupt:
        chat.screen.note("Ctrl-D or /exit leaves.")
    except Exception as error:
        if not isinstance(error, KvkeepError) and not ran_out_of_memory(error):
            raise
        chat.screen.note(_NO_MEMORY if ran_out_of_memory(error) else str(error))
        chat.failed = True
    return True


def is_command(line: str) -> bool:
    """Return whether a line is a command: its first word is a slash followed by letters, unlike a path such as
    /etc/hosts."""
    return _NAME.fullmatch(line.split(maxsplit=1)[0]) is not None if line else False


def run(chat: Chat, line: str) -> None:
    """Run the command of a line. Raises UsageError for an unknown one."""
    name, *rest = line.split(maxsplit=1)
    command = COMMANDS.get(name.removeprefix("/"))
    if command is None:
        raise unknown("command", name, [f"/{known}" for known in COMMANDS], "/help")
    command.run(chat, rest[0].strip() if rest else "")


def completions(line: str) -> Iterable[tuple[str, str]]:
    """Yield completions of the last word of a line, each with its meaning."""
    name, blank, rest = line.partition(" ")
    if not blank:
        yield from ((f"/{one.name}", one.help) for one in COMMANDS.values() if f"/{one.name}".startswith(name))
    elif name.removeprefix("/") in COMMANDS and name.startswith("/"):
        yield from ((word, "") for word in COMMANDS[name[1:]].words(rest))


def _help(chat: Chat, rest: str) -> None:
    chat.screen.table([(command.usage, command.help) for command in COMMANDS.values()])
    chat.screen.note("Ctrl-C stops an answer, Ctrl-D leaves, Alt-Enter begins a new line.")


def _file(chat: Chat, rest: str) -> None:
    if rest == NONE:
        chat.attachments.clear()
        chat.screen.note("No file is attached.")
        return
    path, question = _path_and_question(rest)
    text = read_text(path)
    if question:
        answering.ask(chat, question, text)
        return
    with encoding(text):
        tokens = len(chat.talk.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    chat.attachments.append(text)
    chat.screen.note(f"{path}: {tokens:,} tokens; your next question will follow them. '/file none' removes them.")


def _undo(chat: Chat, rest: str) -> None:
    *_, question = chat.talk.undo().split("\n\n")  # files come first
    answering.save(chat)
    line = " ".join(question.split())
    chat.screen.note(f"Forgotten: {line if len(line) <= 60 else f'{line[:57]}...'}")


def _system(chat: Chat, rest: str) -> None:
    if rest:
        chat.talk.set_system(None if rest == NONE else rest)
        answering.save(chat)
    again = " The model reads the conversation again before its next answer." if rest and chat.talk.turns else ""
    chat.screen.note(f"System prompt: {chat.talk.system or NONE}.{again}")


def _method(chat: Chat, rest: str) -> None:
    if not rest:
        chat.screen.note(f"{describe(chat.talk.cache)}; 'kvkeep methods' lists all.")
        return
    name, *budget = rest.split(maxsplit=1)
    switch_cache(chat, name, budget[0] if budget else None)
    answering.save(chat)


def _budget(chat: Chat, rest: str) -> None:
    if not rest:
        chat.screen.note(f"{describe(chat.talk.cache)}; a budget is entries (512), bytes (64MB) or a share (25%).")
        return
    switch_cache(chat, None, rest)
    answering.save(chat)


def _temperature(chat: Chat, rest: str) -> None:
    if rest:
        try:
            value = float(rest)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise UsageError(f"A temperature is a number of at least 0, not '{rest}'.")
        chat.temperature = value
    chat.screen.note(f"Temperature: {chat.temperature:g}{'' if chat.temperature else ' (greedy)'}.")


def _context(chat: Chat, rest: str) -> None:
    if not rest:
        chat.screen.note(context_limit.usage(chat))
        return
    context_limit.continue_with(chat, rest, None)
    answering.save(chat)


def _memory(chat: Chat, rest: str) -> None:
    memory = memory_of(chat.talk.cache)
    rows = [("resident", memory.resident_bytes), ("compressed", memory.compressed_bytes)]
    rows += [(f"checkpoints on {place}", count) for place, count in memory.checkpoint_bytes.items()]
    rows += [("bookkeeping", memory.bookkeeping_bytes), ("cache at its peak", memory.peak_cache_bytes)]
    chat.screen.table([(name, size(count)) for name, count in rows if count or name == "resident"])


def _save(chat: Chat, rest: str) -> None:
    saver = chat.saver
    if rest and rest != saver.name:
        earlier = saver.name
        saver.save_as(chat.talk, rest)
        others = "" if earlier is None else f" '{earlier}' does not change."
        chat.screen.note(f"Saved {saver.place}, and again after every answer.{others}")
        return
    if saver.session is None:
        raise UsageError("Name the session: '/save talk'; 'kvkeep chat --session talk' continues it.")
    answering.save(chat)
    if saver.error is None:
        chat.screen.note(f"Saved {saver.place}, as after every answer.")


def _reset(chat: Chat, rest: str) -> None:
    chat.talk.reset()
    chat.attachments.clear()
    if chat.saver.session is not None and chat.saver.session.saves:
        answering.save(chat)
    chat.screen.note("The conversation is forgotten.")


def _exit(chat: Chat, rest: str) -> None:
    raise Leave


def _path_and_question(rest: str) -> tuple[str, str]:
    """Return the path at the beginning of a text, and the rest. A path with blanks is in quotes."""
    if not rest:
        raise UsageError("Name a file, and add a question if you like: /file notes.txt Who wrote this?")
    if os.path.isfile(path := os.path.expanduser(rest)):
        return path, ""
    if rest[0] in "\"'" and (end := rest.find(rest[0], 1)) > 0:
        return os.path.expanduser(rest[1:end]), rest[end + 1 :].strip()
    path, *question = rest.split(maxsplit=1)
    if path == "-":
        raise UsageError("Standard input carries your questions here, so it cannot be the text; name a file.")
    return os.path.expanduser(path), "".join(question).strip()


def _paths(begun: str) -> Iterable[str]:
    """Yield the paths that begin with ``begun``; folders end with a slash."""
    folder, name = os.path.split(begun)
    try:
        found = sorted(Path(os.path.expanduser(folder) or ".").iterdir())
    except OSError:
        return
    for path in found[:1000]:
        if path.name.startswith(name) and (name or not path.name.startswith(".")):
            word = os.path.join(folder, path.name)
            yield (shlex.quote(word) if " " in path.name else word) + ("/" if path.is_dir() else "")


def _among(words: Callable[[], Iterable[str]]) -> Callable[[str], Iterable[str]]:
    return lambda begun: [word for word in words() if word.startswith(begun)]


COMMANDS = {
    command.name: command
    for command in (
        Command("help", "", "Show these commands.", _help),
        Command(
            "file",
            "FILE [QUESTION] or none",
            "Put the text of a file before this question, or before the next one.",
            _file,
            _paths,
        ),
        Command("retry", "", "Answer the last question again by sampling.", lambda chat, rest: answering.retry(chat)),
        Command(
            "continue", "", "Continue an answer that was cut off.", lambda chat, rest: answering.continue_answer(chat)
        ),
        Command("undo", "", "Forget the last question and its answer.", _undo),
        Command("reset", "", "Forget the conversation and keep the system prompt.", _reset),
        Command("system", "[TEXT or none]", "Show or set the system prompt.", _system),
        Command("temperature", "[NUMBER]", "Show or set the sampling temperature; 0 is greedy.", _temperature),
        Command("method", "[NAME [BUDGET]]", "Show or change the method.", _method, _among(lambda: [*names(), STOCK])),
        Command("budget", "[SIZE or none]", "Show or change the budget.", _budget),
        Command(
            "context",
            "[WAY]",
            "Show how full the context is, or make space: drop or endless.",
            _context,
            _among(lambda: context_limit.CONTINUATIONS),
        ),
        Command("memory", "", "Show what the cache holds.", _memory),
        Command("save", "[NAME]", "Save the conversation as NAME, from now on after every answer.", _save),
        Command("exit", "", "Leave.", _exit),
    )
}
"""The commands by name."""
