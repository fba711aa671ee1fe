"""The loop of a chat: reads lines, and answers each line or runs its command."""

from __future__ import annotations

from kvkeep.cli.chat import answering, commands
from kvkeep.cli.chat.state import Chat
from kvkeep.errors import KvkeepError, ran_out_of_memory

_NO_MEMORY = "There is not enough memory for this; give a smaller /budget, or forget with /undo or /reset."


def run(chat: Chat) -> None:
    """Process lines until the last. An error is shown, and the chat continues."""
    while _line(chat):
        pass
    if chat.saver.saved and chat.saver.error is None:
        chat.screen.note(f"Saved {chat.saver.place}.")


def _line(chat: Chat) -> bool:
    """Process the next line; return whether another may follow."""
    try:
        line = chat.screen.ask()
        if commands.is_command(line):
            commands.run(chat, line)
        elif line:
            answering.ask(chat, line)
    except (EOFError, commands.Leave):
        return False
    except KeyboardInterrupt:
        chat.screen.note("Ctrl-D or /exit leaves.")
    except Exception as error:
        if not isinstance(error, KvkeepError) and not ran_out_of_memory(error):
            raise
        chat.screen.note(_NO_MEMORY if ran_out_of_memory(error) else str(error))
        chat.failed = True
    return True
