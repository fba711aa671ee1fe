"""``agent-day``: the requests of a coding agent's day, played against kvkeep's server and others."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import AfterValidator, Field

from kvkeep.errors import UsageError, unknown
from kvkeep.geometry import ModelGeometry
from kvkeep_lab.agent_day.day import MIN_REQUESTS, Day, make_day
from kvkeep_lab.agent_day.playing import DayPlayer
from kvkeep_lab.agent_day.prefixes import Prefixes
from kvkeep_lab.agent_day.records import DayRecords, PlayedDay
from kvkeep_lab.partial import keeping
from kvkeep_lab.peers.engines import Vllm
from kvkeep_lab.peers.servers import IkLlamaServer, KvkeepForAgents, LlamaServer, Server, VllmForAgents
from kvkeep_lab.provenance import machine, version
from kvkeep_lab.studies.base import Study, Trial, unique
from kvkeep_lab.tables import Table, fixed, megabytes, percent

SLOTS = 4
"""Conversations that other servers keep ready: a main one, two subagents and a title."""
OTHERS: dict[str, type[Server]] = {one.name: one for one in (LlamaServer, IkLlamaServer, VllmForAgents)}
SERVERS = (KvkeepForAgents.name, *OTHERS)


def _known(name: str) -> str:
    if name not in SERVERS:
        raise unknown("server", name, SERVERS)
    return name


@dataclass(frozen=True)
class AgentDays:
    """The days of all servers."""

    days: list[PlayedDay]


class AgentDay(Study):
    """What a coding agent's day costs: tokens read again, seconds to first tokens, seconds in all, memory."""

    name = "agent-day"
    about = "play a coding agent's day against servers: tokens read again, seconds to first tokens, memory"
    protocol = (
        "A client sends the requests of two sessions of a synthetic agent, one after another: a long start of "
        "instructions and tools, calls of tools and their results, answers whose reasoning is not sent back, "
        "subagents, titles, and a first line that differs in each session. The server is killed in the middle and "
        "started again. Reusable: tokens with which a prompt begins and that the server has read before, by the "
        "model's own template, without the line that differs."
    )
    found = AgentDays
    weights: ClassVar[str] = "auto"

    servers: Annotated[list[Annotated[str, AfterValidator(_known)]], unique] = Field(
        [KvkeepForAgents.name],
        min_length=1,
        description=f"servers to measure, one after another: {', '.join(SERVERS)}. ${LlamaServer.program} and "
        f"${IkLlamaServer.program} are the paths of two, ${Vllm.python} that of an interpreter with the last",
    )
    start: int = Field(20_000, ge=200, description="tokens of the main agent's instructions and tools")
    requests: int = Field(100, ge=MIN_REQUESTS, description="number of requests")
    seed: int = Field(2, ge=0, description="number that determines all texts")
    records: str = Field(
        "kvkeep-agent-day",
        description="folder for a file of records of each server, and kvkeep's store. A run continues after the "
        "requests that it has",
    )
    fresh: bool = Field(False, description="delete the records of these servers, and kvkeep's store, first")

    def check(self, files: Sequence[Path]) -> None:
        if find_spec("openai") is None:
            raise UsageError(
                "agent-day sends its requests with the package 'openai', which is missing: pip install "
                "'./lab[serve]' in a clone of kvkeep."
            )

    def measure(self, trial: Trial) -> AgentDays:
        day = make_day(Prefixes(trial.tokenizer).count, self.start, self.requests, self.seed)
        positions = ModelGeometry.from_config(trial.model.config, torch.bfloat16.itemsize).max_positions
        if positions is not None and day.tokens > positions:
            raise UsageError(
                f"A conversation of this day has up to {day.tokens:,} tokens, and the model's context {positions:,}; "
                "give a smaller --start or fewer --requests."
            )
        found = AgentDays([])
        with keeping(found, found.days):
            for place, name in enumerate(self.servers):
                trial.progress(name, place, len(self.servers))
                found.days.append(self._played(trial, name, day))
        return found

    def _played(self, trial: Trial, name: str, day: Day) -> PlayedDay:
        """Play the day against one server; return what was measured, which includes earlier runs."""
        folder = Path(self.records).expanduser().absolute()
        store = folder / "store"
        keeps = name == KvkeepForAgents.name
        server = (
            KvkeepForAgents(trial.loaded, day.tokens, SLOTS, store)
            if keeps
            else OTHERS[name](trial.loaded, day.tokens, SLOTS)
        )
        path = folder / f"{name}.jsonl"
        if self.fresh:
            path.unlink(missing_ok=True)
        records = DayRecords(path)
        about = {**self._sizes, "server": name, "model": trial.loaded.name}
        if not records.answers:
            with server.command(0) as (line, _):
                command = [word.replace(str(Path.home()), "~") for word in line]
            if keeps:
                shutil.rmtree(store, ignore_errors=True)
            records.begin({**about, "command": command, "version": version(), **machine(trial.loaded)})
        elif any(records.about.get(field) != value for field, value in about.items()):
            raise UsageError(f"'{path}' has the records of another day; give another --records, or add --fresh.")
        elif not keeps and len(records.answers) not in (day.killed, self.requests):
            raise UsageError(
                f"The run in '{path}' was interrupted, and {name} keeps nothing that would let it continue: add "
                "--fresh to repeat it."
            )
        DayPlayer(day, Prefixes(trial.tokenizer), records, trial.say).play(server, keeps)
        return records.summary(name, self.requests)

    @property
    def _sizes(self) -> dict[str, Any]:
        return {"start": self.start, "requests": self.requests, "seed": self.seed}

    def details(self, found: AgentDays) -> list[Table]:
        table = Table(
            "Tokens read again, by what the conversation had before",
            ["server", "after", "requests", "reusable", "read again"],
            named=2,
        )
        for day in found.days:
            for kind in day.kinds:
                counts = (f"{count:,}" for count in (kind.requests, kind.reusable, kind.again))
                table.rows.append([f"`{day.server}`", kind.after, *counts])
        return [table]

    def tables(self, found: AgentDays) -> list[Table]:
        table = Table(
            f"A day of {self.requests} requests, a start of {self.start:,} tokens",
            [
                *("server", "requests", "failed", "calls", "written", "read", "reusable", "read again", "reused"),
                *("first token s", "p95", "after the kill", "repeated s", "after a start", "start s", "in all s"),
                *("peak RSS", "anonymous"),
            ],
            notes=[
                "Calls: answers with a call, of those that had to have one. Written, read: tokens. Read again: tokens "
                "among the reusable ones that were read again. First token: median of all requests. Repeated: time to "
                "the first token when the main agent's last prompt is sent again, so that only its last token is read; "
                "at once, and as the first request after a start. Start: until the server was ready after the kill. In "
                "all: all requests, and that start. Peak RSS includes the model's and the store's files.",
                *(
                    f"`{day.server}` was interrupted and started again before request {number + 1}."
                    for day in found.days
                    for number in day.interrupted
                ),
            ],
        )
        for day in found.days:
            times = (day.first_s, day.first_p95_s, day.first_after_kill_s, day.repeated_s, day.repeated_restarted_s)
            table.rows.append(
                [
                    f"`{day.server}`",
                    f"{day.requests} of {day.planned}",
                    f"{day.failures}",
                    f"{day.calls} of {day.planned_calls}",
                    *(f"{count:,}" for count in (day.written, day.read, day.reusable, day.again)),
                    percent(day.reused, 2),
                    *map(fixed, (*times, day.start_s)),
                    fixed(day.seconds, 0),
                    megabytes(day.peak_bytes),
                    megabytes(day.anonymous_bytes),
                ]
            )
        return [table]
