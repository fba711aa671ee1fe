"""The loop of a chat: reads lines, and answers each line or runs its command."""

from __future__ import annotations

from kvkeep.cli.chat import answering, commands
from kvkeep.cli.chat.state import Chat, Leave
from kvkeep.errors import KvkeepError, ran_out_of_memory

_NO_MEMORY = "There is not enough memory for this; give a smaller /budget, or forget with /undo or /reset."


def run(chat: Chat) -> None:
    """Process lines until the last. An error is shown, and the chat continues. Raises SystemExit after a hang-up, and
    OSError if standard output is not writable."""
    saver, left = chat.saver, False
    try:
        while not chat.signals.received and _line(chat):
            if chat.screen.write_error is not None and not chat.signals.received:
                raise chat.screen.write_error
        left = not chat.signals.received
    finally:
        if not left and saver.session is None and chat.screen.interactive and chat.talk.turns:
            try:
                name = saver.save_on_hangup(chat.talk)
                chat.screen.note(f"Saved as '{name}'; 'kvkeep chat --session {name}' continues it.")
            except (KvkeepError, OSError) as error:
                chat.screen.note(str(error))
        if saver.saved and saver.error is None and saver.session is not None:
            chat.screen.note(f"Saved {saver.place}.")


def _line(chat: Chat) -> bool:
    """Process the next line; return whether another may follow."""
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
    except Exception as error:
        if not isinstance(error, KvkeepError) and not ran_out_of_memory(error):
            raise
        sentence = _NO_MEMORY if ran_out_of_memory(error) else str(error)
        chat.screen.note(sentence)
        chat.fail(line, sentence)
    return True
