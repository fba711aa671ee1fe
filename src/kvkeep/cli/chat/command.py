"""``kvkeep chat``: a conversation within a cache budget, saved and resumed as a session."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from enum import StrEnum
from typing import Annotated

import typer

from kvkeep.cli import options
from kvkeep.cli.cache_options import CacheOptions
from kvkeep.cli.options import ModelOptions, SamplingOptions
from kvkeep.cli.output import loading, note
from kvkeep.cli.startup import startup


class AtEnd(StrEnum):
    """What to do when the model's context is full."""

    ask = "ask"
    drop = "drop"
    endless = "endless"


SAMPLING = SamplingOptions(max_tokens=256)


@options.command
def chat(
    *,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            "-s",
            help="Session to resume, saved after every answer: a name, or the path of a folder for it.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    model: ModelOptions,
    cache: CacheOptions,
    sampling: SamplingOptions = SAMPLING,
    sessions: options.Sessions = None,
    at_end: Annotated[
        AtEnd | None,
        typer.Option(
            "--at-end",
            help="When the model's context is full: ask, drop the oldest turns, or continue with the method endless.",
            metavar="WAY",
            show_default="endless with an exact method, else ask",
        ),
    ] = None,
) -> None:
    """Talk with a model; Ctrl-C stops an answer, not the program, and /help lists the commands."""
    from kvkeep.decode.texts import check_text

    cache.check()
    model.check()
    check_text(system or "", "the system prompt")
    _exit_on_signals()
    with ExitStack() as stack:
        with loading(model.model), startup():
            from kvkeep.blocks.sessions import check_savable
            from kvkeep.cli.chat import commands, context_limit
            from kvkeep.cli.chat.screen import Screen
            from kvkeep.cli.chat.state import Chat, Saver
            from kvkeep.cli.chat.switch_cache import describe
            from kvkeep.decode.chat import Conversation
            from kvkeep.models.silence import without_warnings
            from kvkeep.policies.endless import check_keeps

            requested = cache.parse()
            if at_end is AtEnd.endless and session is None and not requested.auto:
                check_keeps(requested.request)
            saver = stack.enter_context(Saver(session, sessions))
        with startup(model.model):  # which may download it: a wrong option or session is refused before
            loaded = model.load(cache.drafts)
        screen = Screen(commands.completions)  # after loading, which redirects standard output
        kept = saver.session
        if kept is not None and kept.saves:
            talk = Conversation.resume(loaded.model, loaded.tokenizer, kept)
            note(f"Continuing with {talk.cache.get_seq_length()} tokens in the cache, {len(talk.messages)} messages.")
            if cache != CacheOptions(drafts=cache.drafts) or cache.selects or system:
                note(
                    "The session keeps its method, budget and system prompt: /method, /budget and /system change them."
                )
        else:
            kv_cache = requested.build(loaded.model, answer=sampling.max_tokens)
            talk = Conversation(loaded.model, loaded.tokenizer, kv_cache, system=system, pin=requested.pin)
            if talk.pin is not None:  # pins that leave no room are refused
                talk.past.align(prompt := talk.prompt("?"), talk.pinned(prompt))
        if kept is not None:
            check_savable(talk.cache)
        talk.prompt("?")  # a template that refuses the system prompt refuses every question
        if screen.interactive:
            note(f"{loaded.name}, {describe(talk.cache)}. /help lists the commands, Ctrl-D leaves.")
        full = context_limit.chosen(None if at_end is None else at_end.value, talk)
        chosen = sampling.max_tokens, sampling.temperature, sampling.seed, sampling.settings(loaded.model)
        made = Chat(talk, screen, saver, *chosen, full)
        with without_warnings():
            commands.converse(made)
        if saver.error is not None:
            raise saver.error
        if made.failed and not screen.interactive:
            raise typer.Exit(1)


def _exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP leave the program in good order: what was answered before is saved."""
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
