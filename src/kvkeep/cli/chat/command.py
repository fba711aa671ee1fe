"""``kvkeep chat``: a conversation within a cache budget, saved and resumed by a session file."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import options
from kvkeep.cli.asked import Asked, asked
from kvkeep.cli.chat.signals import EndSignals
from kvkeep.cli.checked import check_cache, check_model
from kvkeep.cli.output import note, print_json
from kvkeep.cli.starting import starting
from kvkeep.errors import UsageError

if TYPE_CHECKING:
    from kvkeep.cli.chat.screen import Screen
    from kvkeep.decode.chat import Conversation


class AtEnd(StrEnum):
    """What to do when the model's context is full: ask, or one of ``kvkeep.cli.chat.context_limit.CONTINUATIONS``."""

    ask = "ask"
    drop = "drop"
    summary = "summary"
    endless = "endless"


def chat(
    model: options.Model = "smollm2",
    method: options.Method = None,
    budget: options.Budget = None,
    kv_budget_tokens: options.BudgetTokens = None,
    kv_budget_mb: options.BudgetMB = None,
    exact: options.Exact = False,
    memory: options.Memory = None,
    checkpoint: options.Checkpoint = None,
    where: options.Where = None,
    capacity: options.Capacity = None,
    folder: options.Folder = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    session: Annotated[
        str | None,
        typer.Option(help="A file to continue from, saved after every answer; with --sessions, a name there."),
    ] = None,
    sessions: options.Sessions = None,
    at_end: Annotated[
        AtEnd,
        typer.Option(
            "--at-end",
            help="What to do when the model's context is full: ask, drop the oldest turns, replace them by a summary, "
            "or continue indefinitely (endless: streaming-llm).",
        ),
    ] = AtEnd.ask,
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as plain text, not as Markdown.")] = False,
    history: Annotated[bool, typer.Option(help="Keep questions for the arrow keys of later chats.")] = True,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    weights: options.Weights = "auto",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Talk with a model; Ctrl-C stops an answer, not the program, and /help lists the commands."""
    from kvkeep.decode.prompt import check_text

    limits: dict[str, Any] = {"kv_budget_tokens": kv_budget_tokens, "kv_budget_mb": kv_budget_mb}
    store: dict[str, Any] = {"checkpoint": checkpoint, "where": where, "capacity": capacity, "folder": folder}
    check_cache(method, budget, exact=exact, memory=memory, **limits, **store)
    check_model(model, weights, device)
    check_text(system or "", "the system prompt")
    with EndSignals() as signals, ExitStack() as stack:
        with signals.exit_at_once(), starting(model):
            from kvkeep.cli.chat import loop
            from kvkeep.cli.chat.saving import Saver, last_hangup
            from kvkeep.cli.chat.state import Chat
            from kvkeep.decode.chat import Conversation
            from kvkeep.models.loading import load
            from kvkeep.models.quiet import without_warnings

            wanted = asked(method, budget, exact=exact, memory=memory, **limits, **store)
            screen = _screen(json, plain, history)
            saver = stack.enter_context(Saver(session, sessions))
            loaded = load(model, weights=weights, device=device, progress=note)
        kept = saver.session
        if kept is not None and kept.turns:
            talk = Conversation.resume(loaded.model, loaded.tokenizer, kept)
            given = method or budget or exact or system
            if given or any(value is not None for value in (*limits.values(), *store.values())):
                _check_same(kept.path, wanted, talk, system)
            note(f"Continuing with {talk.cache.get_seq_length()} tokens in the cache, {len(talk.messages)} messages.")
        else:
            cache = wanted.cache(loaded.model, answer=max_tokens)
            talk = Conversation(loaded.model, loaded.tokenizer, cache, system=system)
        if kept is not None:
            talk.check_savable()
        talk.prompt("?")  # a template that refuses the system prompt refuses every question
        if screen.interactive:
            note("Ask something; /help lists the commands, Ctrl-D leaves.")
            if kept is None and (lost := last_hangup()):
                note(f"A conversation was cut off by a hang-up; 'kvkeep chat --session {lost}' continues it.")
        chat = Chat(talk, screen, saver, signals, max_tokens, temperature, seed, at_end.value)
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


def _check_same(session: str, wanted: Asked, talk: Conversation, system: str | None) -> None:
    """Raise UsageError if options ask for another cache or system prompt than the session has."""
    present = replace(talk.cache.request, context=None)
    prompt = next((message["content"] for message in talk.messages if message["role"] == "system"), None)
    if (wanted.request != present and not wanted.auto) or system not in (None, prompt):
        raise UsageError(
            f"The session '{session}' continues with method '{present.method.name}', budget "
            f"{present.budget or 'none'}, and its other options and system prompt; leave these options out, or name "
            "another session."
        )
