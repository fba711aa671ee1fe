"""``kvkeep chat``: a conversation within a cache budget, saved and resumed by a session file."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import options
from kvkeep.cli.asked import Asked, asked
from kvkeep.cli.checked import check_cache, check_model
from kvkeep.cli.output import note, print_json
from kvkeep.cli.starting import starting
from kvkeep.errors import UsageError

if TYPE_CHECKING:
    from kvkeep.cli.chat.screen import Screen
    from kvkeep.decode.chat import Conversation


class AtEnd(StrEnum):
    """What to do when the model's context is full; all but the first are ``kvkeep.cli.chat.window.ENDS``."""

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
        typer.Option(help="A file to continue from and to save to after every answer; with --sessions, a name there."),
    ] = None,
    sessions: options.Sessions = None,
    at_end: Annotated[
        AtEnd,
        typer.Option(
            "--at-end",
            help="What to do when the model's context is full: ask, drop the oldest turns, replace them by a summary, "
            "or go on without an end (streaming-llm).",
        ),
    ] = AtEnd.ask,
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as they are, not as Markdown.")] = False,
    history: Annotated[bool, typer.Option(help="Keep what is typed for the arrow keys of another day.")] = True,
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
    with starting():
        from kvkeep.cli.chat import loop
        from kvkeep.cli.chat.endings import Endings
        from kvkeep.cli.chat.keeper import Keeper, rescued
        from kvkeep.cli.chat.state import Chat
        from kvkeep.decode.chat import Conversation
        from kvkeep.models.loading import load
        from kvkeep.models.silence import without_warnings

        wanted = asked(method, budget, exact=exact, memory=memory, **limits, **store)
    screen = _screen(json, plain, history)
    with Endings() as endings, Keeper(session, sessions) as keeper:
        with endings.waiting(), starting():
            loaded = load(model, weights=weights, device=device, progress=note)
        kept = keeper.session
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
        if screen.typed:
            note("Ask something; /help lists the commands, Ctrl-D leaves.")
            if kept is None and (lost := rescued()):
                note(f"A conversation was cut off by a hang-up; 'kvkeep chat --session {lost}' goes on with it.")
        chat = Chat(talk, screen, keeper, endings, max_tokens, temperature, seed, at_end.value)
        with without_warnings():
            loop.run(chat)
        if json:
            print_json({"turns": chat.turns})
        endings.leave()
        if keeper.unsaved is not None:
            raise keeper.unsaved
        if chat.failed and not screen.typed:
            raise typer.Exit(1)


def _screen(json: bool, plain: bool, history: bool) -> Screen:
    """Return the screen: a terminal that is typed on, or lines of standard input."""
    from kvkeep.cli.chat.commands import completions
    from kvkeep.cli.chat.questions import is_typed, lines, typed
    from kvkeep.cli.chat.screen import Screen

    if is_typed():
        return Screen(typed(completions, history), typed=True, quiet=json, plain=plain)
    return Screen(lines(), quiet=json, plain=plain)


def _check_same(session: str, wanted: Asked, talk: Conversation, system: str | None) -> None:
    """Raise UsageError where options ask for another cache or system prompt than those of the session."""
    own = replace(talk.cache.request, context=None)
    held = next((message["content"] for message in talk.messages if message["role"] == "system"), None)
    if (wanted.request != own and not wanted.auto) or system not in (None, held):
        raise UsageError(
            f"The session '{session}' continues with method '{own.method.name}', budget {own.budget or 'none'} and its "
            "own options and system prompt; leave those out, or name another session."
        )
