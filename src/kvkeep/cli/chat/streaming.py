"""Shows an answer while the model writes it."""

from __future__ import annotations

from collections.abc import Callable

from kvkeep.cli.chat.state import Chat
from kvkeep.cli.output import interruptible
from kvkeep.decode.generate import Generation

STOPPED = "Stopped while reading; nothing was changed."


def stream_answer(chat: Chat, tokens: int, generate: Callable[..., Generation]) -> Generation | None:
    """Show the text of ``generate`` after a prompt of ``tokens``. Ctrl-C, a hang-up or a closed output end it. If that
    happens while the model reads the prompt, return None and change nothing."""
    screen = chat.screen
    with interruptible() as interrupted:
        try:
            with screen.reading(tokens) as advance, screen.answer() as say:
                return generate(
                    on_text=None if screen.silent else say,
                    on_progress=advance,
                    interrupted=lambda: interrupted() or chat.signals.received or screen.write_error is not None,
                    **chat.sampling,
                )
        except KeyboardInterrupt:
            screen.note(STOPPED)
            return None
