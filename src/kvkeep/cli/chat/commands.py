"""The commands of a chat: a table, and a function for each."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvkeep.cli.chat import answering, context_limit
from kvkeep.cli.chat.saving import transcript
from kvkeep.cli.chat.state import Attachment, Chat, Leave
from kvkeep.cli.chat.switch_cache import NONE, describe, switch_cache
from kvkeep.decode.encoding import encoding
from kvkeep.decode.prompt import read_text
from kvkeep.errors import UsageError, reason_of, unknown
from kvkeep.policies.methods import STOCK, names
from kvkeep.private_files import open_file
from kvkeep.stock import memory_of
from kvkeep.units import size

_NAME = re.compile(r"/[a-z]*")


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


# -- commands -------------------------------------------------------------------------------------


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
    with encoding(text):
        tokens = len(chat.talk.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if question:
        answering.ask(chat, question, Attachment(path, text))
        return
    chat.attachments.append(Attachment(path, text))
    chat.screen.note(f"{path}: {tokens} tokens; your next question will follow them.")


def _retry(chat: Chat, rest: str) -> None:
    try:
        temperature = float(rest) if rest else None
    except ValueError:
        raise UsageError(f"A temperature is a number of at least 0, not '{rest}'.") from None
    answering.retry(chat, temperature)


def _continue(chat: Chat, rest: str) -> None:
    answering.continue_answer(chat)


def _undo(chat: Chat, rest: str) -> None:
    question = chat.talk.undo()
    answering.save(chat)
    chat.screen.note(f"Forgotten: {_short(question)}")
    if chat.attachments:
        chat.screen.note(answering.describe_attachments(chat))


def _system(chat: Chat, rest: str) -> None:
    if not rest:
        chat.screen.note(chat.talk.system or "There is no system prompt.")
        return
    chat.talk.set_system(None if rest == NONE else rest)
    answering.save(chat)
    again = " The model reads the conversation again before its next answer." if chat.talk.turns else ""
    chat.screen.note(("There is no system prompt now." if rest == NONE else "The system prompt is set.") + again)


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


def _context(chat: Chat, rest: str) -> None:
    if not rest:
        chat.screen.note(context_limit.usage(chat))
        context_limit.show_continuations(chat)
        return
    if rest not in context_limit.CONTINUATIONS:
        raise unknown("way to continue", rest, context_limit.CONTINUATIONS)
    question = None if chat.pending is None else answering.with_attachments(chat, chat.pending)
    context_limit.CONTINUATIONS[rest].free(chat, question)
    answering.save(chat)
    if chat.pending is not None:
        chat.screen.note(f"Your last question: {_short(chat.pending)}")
        answering.ask(chat, chat.pending)


def _memory(chat: Chat, rest: str) -> None:
    memory = memory_of(chat.talk.cache)
    rows = [("resident", memory.resident_bytes), ("compressed", memory.compressed_bytes)]
    rows += [(f"checkpoints on {place}", count) for place, count in memory.checkpoint_bytes.items()]
    rows += [("bookkeeping", memory.bookkeeping_bytes), ("cache at its peak", memory.peak_cache_bytes)]
    rows += [("workspace at its peak", memory.peak_workspace_bytes)]
    chat.screen.table([(name, size(count)) for name, count in rows if count or name == "resident"])


def _save(chat: Chat, rest: str) -> None:
    saver, talk = chat.saver, chat.talk
    if rest in ("", saver.name):
        if saver.session is None:
            raise UsageError(
                "Name the session: '/save talk' to continue later; or a file: '/save talk.md' for a copy to read."
            )
        answering.save(chat)
        if saver.error is None:
            chat.screen.note(f"Saved {saver.place}, as after every answer.")
    elif rest.endswith(".md"):
        chat.screen.note(f"Written to {_write_new(rest, transcript(talk))}.")
    else:
        earlier = saver.name
        saver.save_as(talk, rest)
        others = "" if earlier is None else f" '{earlier}' stays as it was."
        chat.screen.note(f"Saved {saver.place}, and again after every answer.{others}")


def _reset(chat: Chat, rest: str) -> None:
    chat.talk.reset()
    chat.attachments.clear()
    chat.pending = None
    if chat.saver.session is not None and chat.saver.session.saves:
        answering.save(chat)
    chat.screen.note("The conversation is forgotten.")


def _exit(chat: Chat, rest: str) -> None:
    raise Leave


# -- arguments ------------------------------------------------------------------------------------------


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


def _write_new(path: str, text: str) -> str:
    try:
        handle = open_file(os.path.expanduser(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"There is a file '{path}' already; give another name.") from None
    except OSError as error:
        raise UsageError(f"The file '{path}' cannot be written: {reason_of(error)}.") from error
    return path


def _short(text: str) -> str:
    """Return a question in one line. A long question is reduced to its end, which follows the files."""
    parts = [text] if len(text) <= 60 else text.split("\n\n")
    line = " ".join(parts[-1].split())
    return ("... " if len(parts) > 1 else "") + (line if len(line) <= 60 else f"{line[:57]}...")


# -- completion -----------------------------------------------------------------------------


def _paths(begun: str) -> Iterable[str]:
    """Yield the paths that begin with ``begun``; folders end with a slash."""
    if " " in begun:
        return
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
        Command("retry", "[TEMPERATURE]", "Answer the last question again by sampling; 0 is greedy.", _retry),
        Command("continue", "", "Continue an answer that was cut off.", _continue),
        Command("undo", "", "Forget the last question and its answer.", _undo),
        Command("system", "[TEXT or none]", "Show or set the system prompt.", _system),
        Command("method", "[NAME [BUDGET]]", "Show or change the method.", _method, _among(lambda: [*names(), STOCK])),
        Command("budget", "[SIZE or none]", "Show or change the budget.", _budget),
        Command(
            "context",
            "[WAY]",
            "Show how full the context is, or make space: drop, summary or endless.",
            _context,
            _among(lambda: context_limit.CONTINUATIONS),
        ),
        Command("memory", "", "Show what the cache holds.", _memory),
        Command(
            "save",
            "[NAME]",
            "Save the conversation as NAME after every answer, or once to the file NAME.md as Markdown.",
            _save,
            _paths,
        ),
        Command("reset", "", "Forget the conversation and keep the system prompt.", _reset),
        Command("exit", "", "Leave.", _exit),
    )
}
"""The commands by name."""
