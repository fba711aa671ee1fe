"""``kvkeep chat``: a conversation within a cache budget, saved and resumed by a session file."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import options
from kvkeep.cli.asked import Asked, asked
from kvkeep.cli.endings import Endings
from kvkeep.cli.generate import as_json, summary
from kvkeep.cli.output import interruptible, note, print_json, reading, size, write
from kvkeep.errors import KvkeepError, UsageError

if TYPE_CHECKING:
    from kvkeep.cli.questions import Ask
    from kvkeep.decode.chat import Conversation
    from kvkeep.decode.session_file import SessionFile

HELP = "/exit leaves (so does Ctrl-D), /reset forgets the conversation, /memory shows what the cache holds."


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
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    weights: options.Weights = "auto",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Talk with a model; Ctrl-C stops an answer, not the program."""
    from kvkeep.cli.questions import questions
    from kvkeep.decode.chat import Conversation
    from kvkeep.decode.prompt import check_text
    from kvkeep.models.loading import load

    limits: dict[str, Any] = {"kv_budget_tokens": kv_budget_tokens, "kv_budget_mb": kv_budget_mb}
    store: dict[str, Any] = {"checkpoint": checkpoint, "where": where, "capacity": capacity, "folder": folder}
    wanted = asked(method, budget, exact=exact, memory=memory, **limits, **store)
    check_text(system or "", "the system prompt")
    with Endings() as endings, questions() as ask, _kept(session, sessions) as kept:
        with endings.waiting():
            loaded = load(model, weights=weights, device=device, progress=note)
        if kept is not None and kept.turns:
            talk = Conversation.resume(loaded.model, loaded.tokenizer, kept)
            if (
                method
                or budget
                or exact
                or system
                or any(value is not None for value in (*limits.values(), *store.values()))
            ):
                _check_same(kept.path, wanted, talk, system)
            note(f"Continuing with {talk.cache.get_seq_length()} tokens in the cache, {len(talk.messages)} messages.")
        else:
            cache = wanted.cache(loaded.model, answer=max_tokens)
            talk = Conversation(loaded.model, loaded.tokenizer, cache, system=system)
        if kept is not None:
            talk.check_savable()
        talk.prompt("?")  # a template that refuses the system prompt refuses every question
        sampling = {"max_new_tokens": max_tokens, "temperature": temperature, "seed": seed}
        _Chat(talk, ask, endings, kept, json, sampling).run()


def _kept(session: str | None, sessions: str | None) -> AbstractContextManager[SessionFile | None]:
    """Return the session open for writing, which is made where there is none; None where no session was named."""
    from kvkeep.decode.session_file import SessionFile
    from kvkeep.decode.session_store import SessionStore

    if session is None:
        if sessions is not None:
            raise UsageError("A folder of sessions takes the name of one of them, too: --session NAME.")
        return nullcontext()
    if sessions is not None:
        return SessionStore(sessions).open(session)
    if not os.access(Path(os.path.realpath(session)).parent, os.W_OK):
        raise UsageError(f"The session cannot be kept in '{session}': its folder is missing or cannot be written to.")
    return SessionFile(session, writing=True)


def _check_same(session: str, wanted: Asked, talk: Conversation, system: str | None) -> None:
    """Raise UsageError where options ask for another cache or system prompt than those of the session."""
    own = replace(talk.cache.request, context=None)
    held = next((message["content"] for message in talk.messages if message["role"] == "system"), None)
    if (wanted.request != own and not wanted.auto) or system not in (None, held):
        raise UsageError(
            f"The session '{session}' continues with method '{own.method.name}', budget {own.budget or 'none'} and its "
            "own options and system prompt; leave those out, or name another session."
        )


@dataclass
class _Chat:
    """One run of the command: questions from ``ask``, answers by ``talk``, saved to ``session`` after each."""

    talk: Conversation
    ask: Ask
    endings: Endings
    session: SessionFile | None
    json: bool
    sampling: dict[str, Any]
    turns: list[dict[str, Any]] = field(default_factory=list)
    unsaved: KvkeepError | None = None
    saved: bool = False
    unwritable: OSError | None = None  # why standard output is gone

    def run(self) -> None:
        """Answer until there are no more questions, then report."""
        if sys.stdin.isatty():
            note(HELP)
        try:
            self._talk()
        finally:
            if self.saved and self.session is not None:
                note(f"Saved to {self.session.path}.")
        if self.json:
            print_json({"turns": self.turns})
        self.endings.leave()
        if self.unsaved is not None:
            raise self.unsaved

    def _talk(self) -> None:
        while not self.endings.asked:
            try:
                with self.endings.waiting():
                    line = self.ask()
                if line == "/exit":
                    return
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._answer(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                note("Ctrl-D or /exit leaves.")
            except UsageError as error:
                note(str(error))
            if self.unwritable is not None and not self.endings.asked:
                raise self.unwritable

    def _command(self, line: str) -> None:
        if line == "/reset":
            self.talk.reset()
            note("The conversation is forgotten.")
            if self.session is not None and self.session.turns:
                self._save()
        elif line == "/memory":
            from kvkeep.stock import memory_of

            for name, value in memory_of(self.talk.cache).as_dict().items():
                note(f"{name}: {value}")
        else:
            note(HELP)

    def _answer(self, line: str) -> None:
        with interruptible() as interrupted:
            try:
                prompt = self.talk.prompt(line)
                with reading(len(prompt)) as advance:
                    result = self.talk.answer(
                        line,
                        prompt,
                        on_text=None if self.json else self._say,
                        on_progress=advance,
                        interrupted=lambda: interrupted() or self.endings.asked or self.unwritable is not None,
                        **self.sampling,
                    )
            except KeyboardInterrupt:
                note("Stopped while reading; the question is forgotten.")
                return
            except UsageError as error:
                note(f"{error} (/reset forgets the conversation.)")
                return
            self.turns.append({"question": line, **as_json(result)})
            self._save()
        if not self.json:
            self._say("\n")
        note(f"{fill(self.talk.cache)} · {summary(result)}")

    def _say(self, text: str) -> None:
        """Write a piece of an answer; a closed terminal or pipe ends the answer."""
        try:
            write(text)
        except OSError as error:
            self.unwritable = error

    def _save(self) -> None:
        """Save the conversation; an error is raised at the end of the run."""
        if self.session is None:
            return
        try:
            self.talk.save(self.session)
        except KvkeepError as error:
            self.unsaved = error
            note(str(error))
        else:
            self.unsaved, self.saved = None, True


def fill(cache: Any) -> str:
    """Return a line with the share of the budget in use."""
    length = cache.get_seq_length()
    if getattr(cache, "entries", None) is None:
        return f"{length} entries, no budget"
    resident = min(length, cache.entries)
    share = 100 * resident / cache.entries if cache.entries else 100
    return (
        f"{resident}/{cache.entries} entries resident ({share:.0f}%), {length - resident} evicted, "
        f"{size(cache.memory().resident_bytes)}"
    )
