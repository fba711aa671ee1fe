"""The loop of a chat: a line, and what comes of it, until the last one."""

from __future__ import annotations

from kvkeep.cli import out_of_memory
from kvkeep.cli.chat import answering, commands
from kvkeep.cli.chat.state import Chat, Leave
from kvkeep.errors import KvkeepError


def run(chat: Chat) -> None:
    """Take lines until there are no more. An error is a sentence, and the chat goes on. Raises SystemExit after a
    hang-up, and OSError where standard output is gone."""
    saver, left = chat.saver, False
    try:
        while not chat.signals.received and _line(chat):
            if chat.screen.unwritable is not None and not chat.signals.received:
                raise chat.screen.unwritable
        left = not chat.signals.received
    finally:
        if not left and saver.session is None and chat.screen.interactive:
            _save_on_hangup(chat)
        if saver.saved and saver.session is not None:
            chat.screen.note(f"Saved to {saver.session.path}.")


def _line(chat: Chat) -> bool:
    """Do what the next line says; return whether another may follow."""
    line: str | None = None
    try:
        with chat.signals.exit_at_once():
            line = chat.screen.ask()
        if commands.is_command(line):
            commands.run(chat, line)
        elif line:
            answering.ask(chat, line)
    except (EOFError, Leave):
        return False
    except KeyboardInterrupt:
        chat.screen.note("Ctrl-D or /exit leaves.")
    except KvkeepError as error:
        _failed(chat, line, str(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        _failed(
            chat, line, "There is not enough memory for this; /budget takes a smaller one, /undo and /reset free some."
        )
    return True


def _failed(chat: Chat, line: str | None, error: str) -> None:
    chat.screen.note(error)
    chat.fail(line, error)


def _save_on_hangup(chat: Chat) -> None:
    """Save a conversation without a session, which ends without having been left."""
    if chat.talk.turns:
        try:
            chat.screen.note(f"Saved to {chat.saver.save_on_hangup(chat.talk)}.")
        except (KvkeepError, OSError) as error:
            chat.screen.note(str(error))
