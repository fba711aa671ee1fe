"""``kvkeep chat``: a conversation that stays within its budget, and can be continued another day."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli import options
from kvkeep.cli.asked import asked
from kvkeep.cli.generate import as_json, summary
from kvkeep.cli.output import err, interruptible, note, print_json, reading, size, write
from kvkeep.errors import UsageError

HELP = "/exit leaves (so does Ctrl-D), /reset forgets the conversation, /memory tells what the cache holds."


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
    session: Annotated[str | None, typer.Option(help="A file to continue from, and to save to on leaving.")] = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Talk with a model; Ctrl-C stops an answer, not the program."""
    from kvkeep.decode.chat import Conversation
    from kvkeep.models.loading import load

    cache_options = {"checkpoint": checkpoint, "where": where, "capacity": capacity, "folder": folder}
    wanted = asked(
        method,
        budget,
        kv_budget_tokens=kv_budget_tokens,
        kv_budget_mb=kv_budget_mb,
        exact=exact,
        memory=memory,
        **cache_options,
    )
    resume = session is not None and Path(session).exists()
    if resume and (method or budget or exact or system or any(value is not None for value in cache_options.values())):
        raise UsageError(
            f"The session '{session}' has its own method, budget and system prompt; leave those options out."
        )
    if session is not None and not os.access(Path(session).parent, os.W_OK):
        raise UsageError(f"The session cannot be kept in '{session}': its folder is missing or cannot be written to.")
    loaded = load(model, dtype=dtype, device=device, progress=note)
    if resume and session is not None:
        talk = Conversation.resume(loaded.model, loaded.tokenizer, session)
        note(f"Continuing with {talk.cache.get_seq_length()} tokens in the cache, {len(talk.messages)} messages.")
    else:
        talk = Conversation(
            loaded.model,
            loaded.tokenizer,
            wanted.cache(loaded.model, answer=max_tokens),
            system=system,
        )
    turns: list[dict[str, Any]] = []
    try:
        _talk(talk, turns, json, max_new_tokens=max_tokens, temperature=temperature, seed=seed)
    finally:
        if session is not None and talk.messages:
            talk.save(session)
            note(f"Saved to {session}.")
    if json:
        print_json({"turns": turns})


def _talk(talk: Any, turns: list[dict[str, Any]], quiet: bool, **sampling: Any) -> None:
    if sys.stdin.isatty():
        note(HELP)
    while True:
        try:
            line = _ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            note("\nCtrl-D or /exit leaves.")
            continue
        if line == "/exit":
            return
        if line.startswith("/"):
            _command(talk, line)
        elif line:
            _answer(talk, line, turns, quiet, **sampling)


def _ask() -> str:
    if sys.stdin.isatty():
        return err.input("[bold]> [/bold]").strip()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()


def _command(talk: Any, line: str) -> None:
    if line == "/reset":
        talk.reset()
        note("The conversation is forgotten.")
    elif line == "/memory":
        for name, value in talk.cache.memory().as_dict().items():
            note(f"{name}: {value}")
    else:
        note(HELP)


def _answer(talk: Any, line: str, turns: list[dict[str, Any]], quiet: bool, **sampling: Any) -> None:
    with interruptible() as interrupted:
        prompt = talk.prompt(line)
        try:
            with reading(len(prompt)) as advance:
                result = talk.answer(
                    line,
                    prompt,
                    on_text=None if quiet else write,
                    on_progress=advance,
                    interrupted=interrupted,
                    **sampling,
                )
        except KeyboardInterrupt:
            note("Stopped while reading; the question is forgotten.")
            return
        except UsageError as error:
            note(f"{error} (/reset forgets the conversation.)")
            return
    turns.append({"question": line, **as_json(result)})
    if not quiet:
        write("\n")
    note(f"{fill(talk.cache)} · {summary(result)}")


def fill(cache: Any) -> str:
    """Return a line on how full the cache is."""
    length = cache.get_seq_length()
    if cache.entries is None:
        return f"{length} entries, no budget"
    resident = min(length, cache.entries)
    share = 100 * resident / cache.entries if cache.entries else 100
    return (
        f"{resident}/{cache.entries} entries resident ({share:.0f}%), {length - resident} evicted, "
        f"{size(cache.memory().resident_bytes)}"
    )
