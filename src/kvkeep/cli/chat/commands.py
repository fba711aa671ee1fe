"""The commands of a chat: a table of names, what they take, what they do, and a function for each."""

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
from kvkeep.cli.chat.switch_cache import NONE, described, switch_cache
from kvkeep.decode.prompt import read_text
from kvkeep.errors import UsageError, unknown
from kvkeep.policies.methods import STOCK, names
from kvkeep.stock import memory_of
from kvkeep.units import size

_NAME = re.compile(r"/[a-z]*")


@dataclass(frozen=True)
class Command:
    """name: without the slash. takes: what may follow it. help: what it does. run: of a chat, and what follows the
    name, stripped. words: what may be typed next, given what was typed so far."""

    name: str
    takes: str
    help: str
    run: Callable[[Chat, str], None]
    words: Callable[[str], Iterable[str]] = lambda begun: ()

    @property
    def usage(self) -> str:
        """How it is typed."""
        return f"/{self.name} {self.takes}".strip()


def is_command(line: str) -> bool:
    """Return whether a line is a command: its first word is a slash and letters. A path such as /etc/hosts is not."""
    return _NAME.fullmatch(line.split(maxsplit=1)[0]) is not None if line else False


def run(chat: Chat, line: str) -> None:
    """Run the command of a line. Raises UsageError for one that there is not."""
    name, *rest = line.split(maxsplit=1)
    command = COMMANDS.get(name.removeprefix("/"))
    if command is None:
        raise unknown("command", name, [f"/{known}" for known in COMMANDS], "/help")
    command.run(chat, rest[0].strip() if rest else "")


def completions(line: str) -> Iterable[tuple[str, str]]:
    """Yield what the last word of a line may be, with what it means."""
    name, blank, rest = line.partition(" ")
    if not blank:
        yield from ((f"/{one.name}", one.help) for one in COMMANDS.values() if f"/{one.name}".startswith(name))
    elif name.removeprefix("/") in COMMANDS and name.startswith("/"):
        yield from ((word, "") for word in COMMANDS[name[1:]].words(rest))


# -- what they do -------------------------------------------------------------------------------------


def _help(chat: Chat, rest: str) -> None:
    chat.screen.table([(command.usage, command.help) for command in COMMANDS.values()])
    chat.screen.note("Ctrl-C stops an answer, Ctrl-D leaves, Alt-Enter begins a new line.")


def _file(chat: Chat, rest: str) -> None:
    if rest == NONE:
        chat.attachments.clear()
        chat.screen.note("No file goes before the next question.")
        return
    path, question = _path_and_rest(rest)
    text = read_text(path)
    tokens = len(chat.talk.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if question:
        answering.ask(chat, question, Attachment(path, text))
        return
    chat.attachments.append(Attachment(path, text))
    chat.screen.note(f"{path}: {tokens} tokens, which go before your next question.")


def _retry(chat: Chat, rest: str) -> None:
    try:
        temperature = float(rest) if rest else None
    except ValueError:
        raise UsageError(f"A temperature is a number from 0 on, not '{rest}'.") from None
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
    again = " The conversation is read again before the next answer." if chat.talk.turns else ""
    chat.screen.note(("There is no system prompt now." if rest == NONE else "The system prompt is set.") + again)


def _method(chat: Chat, rest: str) -> None:
    if not rest:
        chat.screen.note(f"{described(chat.talk.cache)}; 'kvkeep methods' lists all.")
        return
    name, *budget = rest.split(maxsplit=1)
    switch_cache(chat, name, budget[0] if budget else None)
    answering.save(chat)


def _budget(chat: Chat, rest: str) -> None:
    if not rest:
        chat.screen.note(f"{described(chat.talk.cache)}; entries (512), bytes (64MB) or a share (25%) are a budget.")
        return
    switch_cache(chat, None, rest)
    answering.save(chat)


def _window(chat: Chat, rest: str) -> None:
    if not rest:
        chat.screen.note(context_limit.usage(chat))
        chat.screen.table([(f"/window {way.name}", way.help) for way in context_limit.CONTINUATIONS.values()])
        return
    if rest not in context_limit.CONTINUATIONS:
        raise unknown("way to go on", rest, context_limit.CONTINUATIONS)
    question = None if chat.pending is None else answering.with_attachments(chat, chat.pending)
    context_limit.CONTINUATIONS[rest].make_room(chat, question)
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
    if not rest:
        if saver.session is None:
            raise UsageError("Name a file: /save talk.session to go on from another day, or /save talk.md to read.")
        answering.save(chat)
        if saver.unsaved is None:
            chat.screen.note(f"Saved to {saver.session.path}, as after every answer.")
    elif rest.endswith(".md"):
        chat.screen.note(f"Written to {_written(rest, transcript(talk))}.")
    else:
        chat.screen.note(f"Saved to {saver.save_as(talk, rest)}, and again after every answer.")


def _reset(chat: Chat, rest: str) -> None:
    chat.talk.reset()
    chat.attachments.clear()
    chat.pending = None
    if chat.saver.session is not None and chat.saver.session.turns:
        answering.save(chat)
    chat.screen.note("The conversation is forgotten.")


def _exit(chat: Chat, rest: str) -> None:
    raise Leave


# -- parts of lines -------------------------------------------------------------------------------------


def _path_and_rest(rest: str) -> tuple[str, str]:
    """Return the path that a text begins with, in quotes where it has blanks, and what follows it."""
    if not rest:
        raise UsageError("Name a file: /file notes.txt, and what you want to know of it.")
    whole = os.path.expanduser(rest)
    if os.path.isfile(whole):
        return whole, ""
    if rest[0] in "\"'" and (end := rest.find(rest[0], 1)) > 0:
        return os.path.expanduser(rest[1:end]), rest[end + 1 :].strip()
    path, *question = rest.split(maxsplit=1)
    if path == "-":
        raise UsageError("Standard input is where questions come from; name a file.")
    return os.path.expanduser(path), question[0].strip() if question else ""


def _written(path: str, text: str) -> str:
    try:
        with open(os.path.expanduser(path), "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"There is a file '{path}' already; name another.") from None
    except OSError as error:
        raise UsageError(f"The file '{path}' cannot be written: {(error.strerror or str(error)).lower()}.") from error
    return path


def _short(text: str) -> str:
    """Return a line of a question; of a long one the last paragraph, before which its files are."""
    parts = [text] if len(text) <= 60 else text.split("\n\n")
    line = " ".join(parts[-1].split())
    return ("... " if len(parts) > 1 else "") + (line if len(line) <= 60 else f"{line[:57]}...")


# -- what may be typed next -----------------------------------------------------------------------------


def _paths(begun: str) -> Iterable[str]:
    """Yield the paths that begin so, folders with a slash at their end."""
    if " " in begun:
        return
    folder, name = os.path.split(begun)
    try:
        found = sorted(Path(os.path.expanduser(folder) or ".").iterdir())
    except OSError:
        return
    for path in found[:1000]:
        if path.name.startswith(name) and (name or not path.name.startswith(".")):
            own = shlex.quote(os.path.join(folder, path.name)) if " " in path.name else os.path.join(folder, path.name)
            yield f"{own}/" if path.is_dir() else own


def _among(words: Callable[[], Iterable[str]]) -> Callable[[str], Iterable[str]]:
    return lambda begun: [word for word in words() if word.startswith(begun)]


COMMANDS = {
    command.name: command
    for command in (
        Command("help", "", "Show this.", _help),
        Command(
            "file", "FILE [QUESTION] or none", "Put a text before the question, or before the next one.", _file, _paths
        ),
        Command("retry", "[TEMPERATURE]", "Answer the last question again, sampled (0 is greedy).", _retry),
        Command("continue", "", "Go on with an answer that was cut.", _continue),
        Command("undo", "", "Forget the last question and its answer.", _undo),
        Command("system", "[TEXT or none]", "Show or set the system prompt.", _system),
        Command(
            "method",
            "[NAME [BUDGET]]",
            "Show or change the method.",
            _method,
            _among(lambda: [*names(), STOCK]),
        ),
        Command("budget", "[SIZE or none]", "Show or change the budget.", _budget),
        Command(
            "window",
            "[WAY]",
            "Show the model's positions, or go on at their end: drop, summary or endless.",
            _window,
            _among(lambda: context_limit.CONTINUATIONS),
        ),
        Command("memory", "", "Show what the cache holds.", _memory),
        Command("save", "[FILE]", "Save here from now on; to FILE.md, write what was said.", _save, _paths),
        Command("reset", "", "Forget the conversation, but not the system prompt.", _reset),
        Command("exit", "", "Leave.", _exit),
    )
}
"""The commands by name."""
