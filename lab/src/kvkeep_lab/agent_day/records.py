"""The file of a server's day: a line about the run, one for each request and each start of the server, and those of the
last prompt, which is sent again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kvkeep.errors import StoreError, reason_of


@dataclass(frozen=True)
class Answered:
    """A request and its answer."""

    number: int
    conversation: str
    kind: str
    message: dict[str, Any]
    """The answer as it was received."""
    finish: str | None = None
    prompt: int = 0
    """Tokens of the prompt, by the server's count."""
    cached: int = 0
    """Tokens that the server did not read again, by its count."""
    reusable: int = 0
    """Tokens with which the prompt begins and that the server has read before (:mod:`.prefixes`)."""
    written: int = 0
    """Tokens of the answer."""
    first_s: float | None = None
    """Seconds to the first text, or part of a call."""
    seconds: float = 0.0
    error: str = ""
    """The reason if there is no answer."""
    peak_bytes: int = 0
    """Largest memory of the server's process so far, mapped files included."""
    anonymous_bytes: int = 0
    """Its memory without a file, after the answer."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else the server's last events say."""

    @property
    def read(self) -> int:
        """Tokens that the server has read for it."""
        return self.prompt - self.cached

    @property
    def again(self) -> int:
        """Tokens that were read although the server had read them before."""
        return max(0, self.reusable - self.cached)


@dataclass(frozen=True)
class Started:
    """A start of the server, before the request ``number``. killed: whether the day kills it there; otherwise the run
    began, or was interrupted."""

    number: int
    killed: bool
    seconds: float


@dataclass(frozen=True)
class Repeated:
    """The last prompt of the main agent, sent again: only its last token has to be read."""

    restarted: bool
    """The server has just been started again."""
    prompt: int
    """Tokens of the prompt."""
    cached: int
    """Tokens that the server did not read."""
    first_s: float
    """Seconds to the first token."""


@dataclass(frozen=True)
class ReadAgain:
    """Requests of one kind, and their tokens."""

    after: str
    """What their conversation had before them."""
    requests: int
    reusable: int
    again: int


@dataclass(frozen=True)
class PlayedDay:
    """A server's day, or what was played of it."""

    server: str
    about: dict[str, Any]
    requests: int
    planned: int
    interrupted: list[int]
    """Requests before which the server was started again because the run was interrupted."""
    failures: int
    calls: int
    """Answers that had to call, and do."""
    planned_calls: int
    written: int
    """Tokens of all answers."""
    prompt: int
    """Tokens of all prompts."""
    read: int
    """Tokens that the server read."""
    reusable: int
    """Tokens that it had read before."""
    again: int
    """Tokens among those that it read again."""
    first_s: float | None
    """Seconds to the first token: the median."""
    first_p95_s: float | None
    first_after_kill_s: float | None
    repeated_s: float | None
    """Seconds to the first token of a prompt that was just answered."""
    repeated_restarted_s: float | None
    """The same, as the first request after a start of the server."""
    start_s: float | None
    """Seconds of the start after the kill."""
    seconds: float
    """Seconds of all requests and of the start after the kill."""
    peak_bytes: int
    anonymous_bytes: int
    kinds: list[ReadAgain]

    @property
    def reused(self) -> float | None:
        """Share of the reusable tokens that were not read again."""
        return 1 - self.again / self.reusable if self.reusable else None


class DayRecords:
    """A file of records. Lines are appended, so that a run can be stopped at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.answers: list[Answered] = []
        self.starts: list[Started] = []
        self.repeats: list[Repeated] = []
        kinds: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "about": lambda line: self.about.update(line),
            "answer": lambda line: self.answers.append(Answered(**line)),
            "start": lambda line: self.starts.append(Started(**line)),
            "repeat": lambda line: self.repeats.append(Repeated(**line)),
        }
        text = path.read_text("utf-8") if path.exists() else ""
        complete, _, cut_off = text.rpartition("\n")  # by a kill
        if cut_off:
            path.write_text(f"{complete}\n" if complete else "", "utf-8")
        for line in complete.splitlines():
            ((kind, values),) = json.loads(line).items()
            kinds[kind](values)

    def begin(self, about: Mapping[str, Any]) -> None:
        """Write the line about the run into an empty file. Raises StoreError if it cannot be written."""
        self.about, self.answers, self.starts, self.repeats = dict(about), [], [], []
        self._append("about", self.about, "w")

    def answered(self, one: Answered) -> None:
        """Add a request. Raises StoreError."""
        self.answers.append(one)
        self._append("answer", asdict(one))

    def started(self, one: Started) -> None:
        """Add a start. Raises StoreError."""
        self.starts.append(one)
        self._append("start", asdict(one))

    def repeated(self, one: Repeated) -> None:
        """Add a prompt that was sent again. Raises StoreError."""
        self.repeats.append(one)
        self._append("repeat", asdict(one))

    def repeated_s(self, restarted: bool) -> float | None:
        """Return the seconds to the first token of the prompt that was sent again; None: none was."""
        return next((one.first_s for one in self.repeats if one.restarted is restarted), None)

    def _append(self, kind: str, values: Mapping[str, Any], mode: str = "a") -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps({kind: values}) + "\n")
        except OSError as error:
            raise StoreError(f"'{self.path}' cannot be written: {reason_of(error)}.") from error

    def summary(self, server: str, planned: int) -> PlayedDay:
        """Return what was measured. planned: the number of requests of the day."""
        good = [one for one in self.answers if not one.error]
        killed = next((one for one in self.starts if one.killed), None)
        first = [one.first_s for one in good if one.first_s is not None]
        after = None if killed is None else next((one for one in good if one.number == killed.number), None)
        return PlayedDay(
            server,
            self.about,
            len(self.answers),
            planned,
            [one.number for one in self.starts if one.number and not one.killed],
            len(self.answers) - len(good),
            sum(bool(one.message.get("tool_calls")) for one in good if one.kind == "call"),
            sum(one.kind == "call" for one in self.answers),
            sum(one.written for one in good),
            sum(one.prompt for one in good),
            sum(one.read for one in good),
            sum(one.reusable for one in good),
            sum(one.again for one in good),
            median(first) if first else None,
            quantiles(first, n=20)[-1] if len(first) > 1 else None,
            None if after is None else after.first_s,
            self.repeated_s(False),
            self.repeated_s(True),
            None if killed is None else killed.seconds,
            sum(one.seconds for one in self.answers) + (killed.seconds if killed else 0.0),
            max((one.peak_bytes for one in self.answers), default=0),
            max((one.anonymous_bytes for one in self.answers), default=0),
            self._kinds(None if killed is None else killed.number),
        )

    def _kinds(self, killed: int | None) -> list[ReadAgain]:
        before, found = dict[str, str](), dict[str, list[Answered]]()
        for one in self.answers:
            if one.number == killed:
                before = dict.fromkeys(before, "the kill")
            found.setdefault(before.get(one.conversation, "nothing"), []).append(one)
            before[one.conversation] = f"a {one.kind}"
        return [
            ReadAgain(after, len(some), sum(one.reusable for one in some), sum(one.again for one in some))
            for after, some in found.items()
        ]
