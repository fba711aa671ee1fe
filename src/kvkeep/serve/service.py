"""The options of a server, read and checked once, for one process or several."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from kvkeep.budget import bytes_of
from kvkeep.decode.session_store import DAY_S, SessionStore
from kvkeep.errors import UsageError
from kvkeep.models.loading import Loaded
from kvkeep.models.named import known
from kvkeep.policies.request import Request
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.app import application
from kvkeep.serve.http.asked import Limits
from kvkeep.serve.http.door import check_origins
from kvkeep.serve.http.keys import Keys


@dataclass(frozen=True)
class Service:
    """What one process of the server serves. memory: bytes for all conversations; None where nothing was said.
    waiting: requests that may wait. cache: options of the cache of sessions that name none. folder, quota, age: of the
    sessions, bytes and seconds. origins: of pages of other hosts that may speak to it. logs: a line for each request.
    """

    model: str
    weights: str
    device: str | None
    memory: int | None
    waiting: int
    cache: Mapping[str, Any]
    folder: str
    quota: int | None
    age: float | None
    keys: Keys
    limits: Limits
    origins: tuple[str, ...]
    logs: bool

    @classmethod
    def parse(cls, given: Mapping[str, Any], cache: Mapping[str, Any], keys: Sequence[str]) -> Service:
        """Read the options of ``kvkeep serve`` by name, numbers as such or as text, None where one is not given. cache:
        of sessions that name none. Raises UsageError."""
        Request.parse(**cache)
        cors, logs, quota, age = (given[name] for name in ("cors", "log_requests", "quota", "age"))
        origins = (cors,) if isinstance(cors, str) else tuple(cors)
        check_origins(origins, bool(keys))
        if str(logs).lower() not in ("true", "false"):
            raise UsageError(f"The option 'log_requests' is true or false, not '{logs}'.")
        return cls(
            model=str(given["model"]),
            weights=known(given["weights"]),
            device=given["device"],
            memory=None if given["memory"] is None else bytes_of(given["memory"]),
            waiting=number("waiting", given["waiting"], 0, int),
            cache=cache,
            folder=str(given["sessions"]),
            quota=None if quota is None else bytes_of(quota, "quota"),
            age=None if age is None else number("age", age, 0) * DAY_S,
            keys=Keys(keys),
            limits=Limits(
                number("answers", given["answers"], 1, int) if keys else None,
                None if given["time"] is None else number("time", given["time"], 0.1),
            ),
            origins=origins,
            logs=str(logs).lower() == "true",
        )

    def engine(self, loaded: Loaded, *, shared: bool) -> Engine:
        """Return an engine of a model, which has not begun. shared: several processes have the folder of sessions,
        which is then needed: raises UsageError without it."""
        store = self.store(shared=shared)
        if shared:
            store.check_folder()
        assert self.memory is not None  # it is settled by now
        return Engine(loaded, self.memory, self.waiting, store, **self.cache)

    def store(self, *, shared: bool) -> SessionStore:
        """Return the sessions."""
        return SessionStore(self.folder, quota=self.quota, age=self.age, shared=shared)

    def application(
        self, engine: Engine, loaded: Loaded, scrape: Callable[[], Awaitable[bytes]] | None = None
    ) -> FastAPI:
        """Return the application of a running engine; scrape: as :func:`~kvkeep.serve.http.app.application` has it."""
        return application(engine, loaded, self.keys, self.limits, self.origins, scrape)


def number(name: str, value: Any, least: float, kind: Callable[[str], Any] = float) -> Any:
    """Return the value of the option ``name`` as a number. Raises UsageError unless it is one of ``least`` or more."""
    try:
        number = kind(str(value))
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"The option '{name}' is {what} of {least:g} or more, not '{value}'.")
    return number
