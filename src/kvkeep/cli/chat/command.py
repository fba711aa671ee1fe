"""``kvkeep chat``: a conversation within a cache budget, saved and resumed as a session."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kvkeep.cli import options
from kvkeep.cli.cache_options import CacheOptions, RequestedCache
from kvkeep.cli.chat.signals import EndSignals
from kvkeep.cli.options import ModelOptions, SamplingOptions
from kvkeep.cli.output import loading, note, print_json
from kvkeep.cli.startup import startup
from kvkeep.errors import KvkeepError, UsageError

if TYPE_CHECKING:
    from kvkeep.cli.chat.screen import Screen
    from kvkeep.decode.chat import Conversation
    from kvkeep.policies.request import Request


class AtEnd(StrEnum):
    """What to do when the model's context is full: ask, or one of ``kvkeep.cli.chat.context_limit.CONTINUATIONS``."""

    ask = "ask"
    drop = "drop"
    summary = "summary"
    endless = "endless"


SAMPLING = SamplingOptions(max_tokens=256)


@options.command
def chat(
    *,
    model: ModelOptions,
    cache: CacheOptions,
    sampling: SamplingOptions = SAMPLING,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    session: Annotated[
        str | None,
        typer.Option(help="Session to resume, saved after every answer: a name, or the path of a folder for it."),
    ] = None,
    sessions: options.Sessions = None,
    at_end: Annotated[
        AtEnd | None,
        typer.Option(
            "--at-end",
            help="When the model's context is full: ask, drop the oldest turns, replace them with a summary, or "
            "continue with the method endless.",
            show_default="endless with an exact method, else ask",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print answers as plain text instead of rendered Markdown.")
    ] = False,
    history: Annotated[bool, typer.Option(help="Save the lines you type; the arrow keys recall them.")] = True,
    json: options.Json = False,
) -> None:
    """Talk with a model; Ctrl-C stops an answer, not the program, and /help lists the commands."""
    from kvkeep.decode.prompt import check_text

    cache.check()
    model.check()
    check_text(system or "", "the system prompt")
    with EndSignals() as signals, ExitStack() as stack:
        with signals.exit_at_once():
            with loading(model.model), startup():
                from kvkeep.cli.chat import context_limit, loop
                from kvkeep.cli.chat.saving import Saver, last_hangup
                from kvkeep.cli.chat.state import Chat
                from kvkeep.decode.chat import Conversation
                from kvkeep.models.silence import without_warnings
                from kvkeep.policies.endless import check_keeps

                requested = cache.parse()
                if at_end is AtEnd.endless and session is None and not requested.auto:
                    check_keeps(requested.request)
                saver = stack.enter_context(Saver(session, sessions))
            with startup(model.model):  # which may download it: a wrong option or session is refused before
                loaded = model.load()
        screen = _screen(json, plain, history)  # after loading, which redirects standard output
        kept = saver.session
        if session is not None and kept is not None and kept.saves:
            talk = Conversation.resume(loaded.model, loaded.tokenizer, kept)
            if cache != CacheOptions() or system:
                check_same(session, requested, talk, system)
            note(f"Continuing with {talk.cache.get_seq_length()} tokens in the cache, {len(talk.messages)} messages.")
        else:
            kv_cache = requested.build(loaded.model, answer=sampling.max_tokens)
            talk = Conversation(loaded.model, loaded.tokenizer, kv_cache, system=system)
        if kept is not None:
            talk.check_savable()
        talk.prompt("?")  # a template that refuses the system prompt refuses every question
        if screen.interactive:
            note("Ask something; /help lists the commands, Ctrl-D leaves.")
            if kept is None and (lost := last_hangup()):
                note(f"A conversation was cut off by a hang-up; 'kvkeep chat --session {lost}' continues it.")
        full = context_limit.chosen(None if at_end is None else at_end.value, talk)
        chat = Chat(talk, screen, saver, signals, sampling.max_tokens, sampling.temperature, sampling.seed, full)
        with without_warnings():
            loop.run(chat)
        if json:
            print_json({"turns": chat.turns})
        signals.exit_if_received()
        if saver.error is not None:
            raise saver.error
        if chat.failed and not screen.interactive:
            raise typer.Exit(1)


def _screen(json: bool, plain: bool, history: bool) -> Screen:
    """Return the screen: a terminal, or lines of standard input."""
    from kvkeep.cli.chat.input import is_interactive, lines
    from kvkeep.cli.chat.screen import Screen

    if not is_interactive():
        return Screen(lines(), silent=json, plain=plain)
    from kvkeep.cli.chat.prompt import prompt

    return Screen(prompt(history), interactive=True, silent=json, plain=plain)


def check_same(session: str, requested: RequestedCache, talk: Conversation, system: str | None) -> None:
    """Raise UsageError if options ask for another cache or system prompt than the session has."""
    present = replace(talk.cache.request, context=None)
    prompt = next((message["content"] for message in talk.messages if message["role"] == "system"), None)
    given = requested.request
    if (not requested.auto and present not in (given, _continued(given, talk))) or system not in (None, prompt):
        raise UsageError(
            f"The session '{session}' continues with method '{present.method.name}', budget "
            f"{present.budget or 'none'}, and its other options and system prompt; leave these options out, or name "
            "another session."
        )


def _continued(request: Request | None, talk: Conversation) -> Request | None:
    """Return the request by which a conversation that began with ``request`` continues when its context is full; None
    if it cannot continue so."""
    from kvkeep.geometry import ModelGeometry
    from kvkeep.policies.endless import endless

    try:
        return None if request is None else replace(endless(request, ModelGeometry.of(talk.model)), context=None)
    except KvkeepError:
        return None
