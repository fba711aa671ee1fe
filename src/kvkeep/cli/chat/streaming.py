"""Shows an answer while the model writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvkeep.cli.chat.state import Chat
from kvkeep.cli.output import interruptible
from kvkeep.decode.cached_text import common_prefix
from kvkeep.decode.generate import Generation

STOPPED = "Stopped while reading; nothing was changed."


def stream_answer(chat: Chat, prompt: Sequence[int], generate: Callable[..., Generation]) -> Generation | None:
    """Show the text of ``generate`` after ``prompt``, and the progress of reading what the cache does not have. Ctrl-C,
    a hang-up or a closed output end it. If that happens while the model reads, return None and change nothing."""
    screen, known = chat.screen, common_prefix(chat.talk.ids, prompt[:-1])
    with interruptible() as interrupted:
        try:
            with screen.reading(len(prompt) - known) as advance, screen.answer() as say:
                return generate(
                    on_text=None if screen.silent else say,
                    on_progress=lambda done: advance(max(0, done - known)),
                    interrupted=lambda: interrupted() or chat.signals.received or screen.write_error is not None,
                    **chat.sampling,
                )
        except KeyboardInterrupt:
            screen.note(STOPPED)
            return None
