"""What the model writes, on the screen while it is written."""

from __future__ import annotations

from collections.abc import Callable

from kvkeep.cli.chat.state import Chat
from kvkeep.cli.output import interruptible
from kvkeep.decode.generate import Generation

STOPPED = "Stopped while reading; nothing was changed."


def stream_answer(chat: Chat, tokens: int, generate: Callable[..., Generation]) -> Generation | None:
    """Show what ``generate`` writes after a prompt of so many tokens; Ctrl-C, a hang-up or a closed output end it.
    Return None where that came while the prompt was read: nothing is remembered then."""
    screen = chat.screen
    with interruptible() as interrupted:
        try:
            with screen.reading(tokens) as advance, screen.answer() as say:
                return generate(
                    on_text=None if screen.silent else say,
                    on_progress=advance,
                    interrupted=lambda: interrupted() or chat.signals.received or screen.unwritable is not None,
                    **chat.sampling,
                )
        except KeyboardInterrupt:
            screen.note(STOPPED)
            return None
