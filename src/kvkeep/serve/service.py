"""The options of a server, parsed and checked once."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self

from fastapi import FastAPI

from kvkeep.blocks.store import DAY_S, QUOTA, Store
from kvkeep.budget import bytes_of
from kvkeep.cache import KeepCache
from kvkeep.decode.prompt import encode
from kvkeep.decode.recognition import answer_format
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.engine.drafts import without_drafts
from kvkeep.engine.grammar import vocabulary
from kvkeep.errors import SessionUnwritable, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models import loading
from kvkeep.models.loading import Loaded
from kvkeep.models.model_names import checked_format
from kvkeep.policies.endless import ENDLESS, check_keeps, endless_options
from kvkeep.policies.methods import Request
from kvkeep.policies.names import Pin, checked_pin
from kvkeep.serve.engine import WAITING, Engine
from kvkeep.serve.http.answer_events import Limits
from kvkeep.serve.http.app import application
from kvkeep.serve.session import peak_bytes
from kvkeep.serve.session_pool import SessionPool

WARM_UP_TOKENS = 2
"""The number of tokens of the prompt and of the answer that are made before the first request."""
PARSERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType({
    "model": str, "weights": checked_format, "memory": bytes_of, "sessions": str,
    "quota": partial(bytes_of, what="quota"), "age": lambda days: days * DAY_S, "cors": tuple, "pin": checked_pin,
})  # fmt: skip
"""What makes the fields of a :class:`Service` of options; the others are as they are given."""


@dataclass(frozen=True)
class Service:
    """The options of one process of the server, by their names in ``kvkeep serve``."""

    pool: ClassVar[type[SessionPool]] = SessionPool
    """What holds its sessions."""
    model: str
    cache: Mapping[str, Any]
    """Default cache options of a session."""
    keys: tuple[str, ...]
    limits: Limits
    weights: str = "auto"
    device: str | None = None
    pre: str | None = None
    """The pre-tokenizer of a GGUF file, in place of the one that it states."""
    memory: int | None = None
    """Bytes for all conversations; None: not set."""
    waiting: int = WAITING
    """The maximum number of waiting requests."""
    at_end: str | None = None
    """Beyond the model's positions, a session continues by default; None: longer prompts are refused."""
    capacity: int | None = None
    """Maximum number of older entries that a session of ``endless`` stores; None: no limit."""
    sessions: str | None = None
    """The folder of the store; None: conversations are in memory only."""
    quota: int = QUOTA
    """Maximum bytes of the store's blocks."""
    age: float | None = None
    """Seconds after which an unused session or block is removed."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may use the server."""
    drafts: bool = True
    """Whether answers have drafts (:mod:`kvkeep.engine.drafts`)."""
    as_sent: bool = False
    """Whether lines of system prompts that change with each session stay where they are."""
    log_requests: bool = False
    """Whether to log a line for each request."""
    pin: Pin | None = None
    """The first tokens of each prompt that are pinned; None: none."""

    @classmethod
    def parse(cls, given: Mapping[str, Any], cache: Mapping[str, Any], keys: Sequence[str]) -> Self:
        """Parse the options of ``kvkeep serve`` by name; None: the default. Those of other parts of it are left out.
        cache: default cache options of a session. Raises UsageError."""
        given = {name: value for name, value in given.items() if value is not None}
        request = Request.parse(**cache)
        if "at_end" in given:
            check_keeps(request)
        elif "capacity" in given and not request.method.recall.endless:
            raise UsageError(f"A capacity limits sessions of '{ENDLESS}'; give --at-end endless, or --method endless.")
        _check_origins(given.get("cors", ()), bool(keys))
        limits = Limits(given.get("answers") if keys else None, given.get("time"))
        names = {one.name for one in fields(cls)}
        found = {name: PARSERS[name](one) if name in PARSERS else one for name, one in given.items() if name in names}
        return cls(**found | {"cache": cache, "keys": (*keys,), "limits": limits})

    @property
    def place(self) -> str:
        """Where conversations are stored, for people."""
        return str(self.sessions)

    def load(self, progress: Callable[[str], None] | None = None) -> Loaded:
        """Load the model. progress, and what is raised: as in :func:`~kvkeep.models.loading.load`."""
        loaded = loading.load(self.model, weights=self.weights, device=self.device, pre=self.pre, progress=progress)
        if not self.drafts:
            without_drafts(loaded.model)
        return loaded

    def engine(self, loaded: Loaded) -> Engine:
        """Return an engine that is not started. Raises UsageError if the store cannot be used."""
        store = self.store()
        assert self.memory is not None  # the memory is set by now
        cache = endless_options(self.cache, ModelGeometry.of(loaded.model)) if self.at_end else self.cache
        return Engine(loaded, self.memory, self.waiting, store, self.capacity, self.pool, **cache)

    def store(self) -> Store | None:
        """Return the store, if there is one; create its folder. Raises UsageError if nothing can be stored there."""
        if self.sessions is None:
            return None
        store = Store(self.sessions, quota=self.quota, age=self.age)
        try:
            store.create()
            store.check_writable()  # a store that exists may be read-only
        except SessionUnwritable as error:
            reason = str(getattr(error.__cause__, "strerror", error)).lower()
            raise UsageError(
                f"Nothing can be stored in '{self.sessions}': {reason}; name another folder, or keep conversations in "
                "memory only (--private)."
            ) from error
        return store

    def application(
        self, engine: Engine, loaded: Loaded, scrape: Callable[[], Awaitable[bytes]] | None = None
    ) -> FastAPI:
        """Return the application of a running engine, which warms up. scrape: as in
        :func:`~kvkeep.serve.http.app.application`."""
        warm_up(engine)
        _prepare_forms(engine)  # in this thread: it blocks the others, which may not have taken a request yet
        return application(engine, loaded, self.keys, self.limits, self.cors, scrape, self.as_sent, self.pin)


def warm_up(engine: Engine) -> None:
    """Queue a short answer in a cache that is discarded. It does what happens once in a process, such as reading the
    weights into memory and compiling the chat template. It ends when a request arrives, which then does the rest; an
    error shows there as well."""

    def answer() -> None:
        prompt = encode(engine.tokenizer, [{"role": "user", "content": "Hello"}])[-WARM_UP_TOKENS:]
        cache = KeepCache(engine.model, **engine.cache)
        engine.arbiter.check(peak_bytes(cache, len(prompt) + WARM_UP_TOKENS))
        ask, scheduler = Ask(prompt, WARM_UP_TOKENS), Scheduler(engine.model)
        scheduled = scheduler.add(Answer(ask, cache, engine.tokenizer, engine.ends, lambda _: None))
        while not (engine.waiting or engine.stopping) and not scheduled.give(scheduler.step()[0].logits):
            pass

    engine.call(answer)


def _prepare_forms(engine: Engine) -> None:
    """Do what the first answer with tools would wait for: one to two seconds, with a vocabulary of 150,000 tokens."""
    with suppress(UsageError):  # it shows where a form is asked for
        vocabulary(engine.tokenizer, engine.geometry.vocab_size, engine.ends)
        answer_format(engine.tokenizer)


def _check_origins(origins: Sequence[str], keyed: bool) -> None:
    """Raise UsageError for an origin that no browser sends, and for ``*`` on a server without keys."""
    for one in origins:
        if one != "*" and not re.fullmatch(r"https?://[^/\s?#]+", one):
            raise UsageError(
                f"'{one}' is not an origin; give scheme and host without a path (https://chat.example), or *."
            )
    if "*" in origins and not keyed:
        raise UsageError("Without a key, every website could use the server; name the origins, or set a key.")
