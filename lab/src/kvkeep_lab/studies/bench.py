"""``bench``: speed and memory of every cache, compared with transformers' cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from kvkeep.budget import Budget, bytes_of
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.plan.fitting import listed
from kvkeep.policies.methods import resolve
from kvkeep.policies.names import STOCK
from kvkeep_lab.limits import memory_rate, step_limit_ms, weight_bytes
from kvkeep_lab.partial import Interruption
from kvkeep_lab.peers.engines import LlamaCpp, engine_of
from kvkeep_lab.process_memory import InProcess, measure_each, process_table
from kvkeep_lab.serving import Served, measure_servers, served_table
from kvkeep_lab.studies.base import BUDGET, BudgetText, Count, Flag, OwnMethod, ServerName, Trial, first_tokens
from kvkeep_lab.studies.engines import EngineStudy
from kvkeep_lab.tables import Table, fixed, megabytes, number, refusals
from kvkeep_lab.timing import NAIVE, SAME_ENTRIES, Timed, TimingCase, run

COMBINED = (
    "quantized:8",
    "quantized:4",
    "quantized:2",
    "h2o+checkpoint",
    "h2o+quantize:4",
    "h2o+merge",
    "kvreviver",
    "h2o+sketch-variants:swap=1.1,estimate=shrunk,by=mean",
)
"""Methods that a complete run times in addition to the named lossy methods."""


@dataclass(frozen=True)
class Benched:
    """All cases, by context."""

    rows: list[Timed]
    bytes_per_s: float | None = None
    """Bandwidth of the machine's memory."""
    weight_bytes: int | None = None
    """Bytes of the weights that a step reads (:mod:`~kvkeep_lab.limits`)."""
    notes: list[str] = field(default_factory=list)
    """Notes on engines by others."""
    processes: list[InProcess] = field(default_factory=list)
    """Cases in separate processes, which replace ``rows``."""
    servers: list[Served] = field(default_factory=list)
    """Servers under load, which replace ``rows``."""

    def limit_ms(self, row: Timed) -> float | None:
        """Return the minimum milliseconds of a step; None if unknown."""
        return step_limit_ms(self.weight_bytes, row.entry_bytes, self.bytes_per_s)

    def llama_ratio(self, row: Timed) -> float | None:
        """Return the time of a step relative to llama.cpp's at the same context; None if either was not measured.
        llama.cpp's time is the faster of those with and without flash attention, with an unquantised cache."""
        rivals = [
            rival.step_ms
            for rival in self.rows
            if rival.label in LlamaCpp.unquantised and rival.context == row.context and rival.step_ms
        ]
        return row.step_ms / min(rivals) if row.step_ms and rivals else None


class Bench(EngineStudy):
    """Time of prefill and decoding of every cache in one run, and their memory."""

    name = "bench"
    about = "time prefill and decoding of every cache in one run, and measure their memory"
    protocol = (
        "Each cache in turn reads random token ids and then decodes single tokens. Figures are medians over all "
        "rounds, which are interleaved. Ratios compare with transformers' own cache (stock) at the same context, "
        "and with a stock cache that holds only as many entries as the budget (held). At least: the time to read "
        "the weights, keys and values of a step, at the rate of reading 512 MB of memory in the same run."
    )
    found = Benched
    text = "optional"
    reads = "With --process: text file whose beginning is the prompt, in place of random ids."
    weights = "auto"

    peers: list[ServerName] | None = Field(
        None,
        description="other engines to time in the same rounds: llama.cpp, ik_llama.cpp, vllm, "
        "vllm:compiled. With --serve: their "
        "servers, transformers, transformers:batching",
    )
    contexts: list[Count] = Field([512, 2048, 4096], min_length=1, description="prompt lengths in tokens")
    budget: Annotated[BudgetText, Flag("--budget", "-b")] = Field("12.5%", description=BUDGET)
    rounds: int = Field(3, ge=1, description="number of rounds; each round measures everything once")
    steps: int = Field(16, ge=2, description="tokens generated in each round")
    methods: Annotated[list[OwnMethod] | None, Flag("--method", "-x")] = Field(
        None, description="methods to measure in place of the default ones, in addition to stock"
    )
    only: list[str] | None = Field(
        None,
        description="measure only the cases with these names, and stock. If no case has a name, it selects the cases "
        "that contain it. If no peer is named, all --peers are measured",
    )
    stock: bool = Field(True, description="measure transformers' own cache too, which the ratios need")
    slow: bool = Field(
        True, description="measure the slow methods too, which recompute everything: naive, strides, tokens"
    )
    clock: Literal["wall", "processor"] = Field(
        "wall", description="clock to measure with: wall, or processor on a machine that other programs use too"
    )

    process: bool = Field(
        False,
        description="measure instead the memory of a process with each cache, and the time of steps without the page "
        "cache",
    )

    serve: bool = Field(False, description="measure servers under load instead: kvkeep's, and those named by --peers")
    sessions: list[Count] = Field(
        [1, 4, 8, 16], min_length=1, description="with --serve: numbers of concurrent sessions"
    )
    memory: str = Field("2GB", description="with --serve: memory for all sessions of kvkeep's server")

    def check(self, files: Sequence[Path]) -> None:
        if files and (self.serve or not self.process):
            raise UsageError("Only --process reads a text; add --process, or leave --file out.")
        if self.serve:
            if self.process or self.clock != "wall":
                raise UsageError(
                    "--serve measures with the wall clock, and without --process; leave --clock and --process out."
                )
            bytes_of(self.memory)
            if find_spec("openai") is None:
                raise UsageError(
                    "--serve sends its requests with the package 'openai', which is missing: pip install "
                    "'./lab[serve]' in a clone of kvkeep."
                )
            return
        for name in self.peers or ():
            engine_of(name)
        if self.process and (self.peers or self.clock != "wall"):
            raise UsageError("--process measures kvkeep's caches with the wall clock; leave --peers and --clock out.")
        if self.peers and self.clock != "wall":
            raise UsageError(
                "Peers run in separate processes, whose processor time cannot be measured; leave out --clock or "
                "--peers."
            )

    def measure(self, trial: Trial) -> Benched:
        if self.serve:
            try:
                return Benched([], servers=self._served(trial))
            except Interruption as stop:
                raise Interruption(Benched([], servers=stop.found)) from None
        listed = (
            process_cases(self.contexts, self.budget, self.methods)
            if self.process
            else cases(trial.model, self.contexts, self.budget, self.steps, self.methods, slow=self.slow)
        )
        listed = self._wanted(listed)
        if self.process:
            try:
                text = self._text(trial) if trial.sources else None
                return Benched([], processes=measure_each(trial.loaded, listed, self.steps, trial.progress, text))
            except Interruption as stop:
                raise Interruption(Benched([], processes=stop.found)) from None
        options: dict[str, Any] = {"rounds": self.rounds, "steps": self.steps, "clock": self.clock}
        with self.engines(trial, max(self.contexts) + self.steps) as (engines, notes):
            rivals = [case for length in self.contexts for engine in engines for case in engine.cases(length)]
            listed += self._wanted(rivals) or rivals
            beside = memory_rate(trial.model.device), weight_bytes(trial.model), notes
            try:
                return Benched(run(trial.model, listed, progress=trial.progress, **options), *beside)
            except Interruption as stop:
                raise Interruption(Benched(stop.found, *beside)) from None

    def _text(self, trial: Trial) -> list[int]:
        """Return the ids of the text's beginning. Raises UsageError if it is too short."""
        longest = max(self.contexts)
        ids: list[int] = first_tokens(trial.loaded, trial.sources, longest)[0].tolist()
        if len(ids) < longest:
            raise UsageError(
                f"The text has {len(ids):,} tokens; give one of at least {longest:,}, or smaller --contexts."
            )
        return ids

    def _wanted(self, listed: list[TimingCase]) -> list[TimingCase]:
        """Return the cases that ``only`` and ``stock`` select."""
        if self.only is not None:
            labels = chosen(self.only, listed)
            listed = [one for one in listed if one.method == STOCK or one.label in labels]
        return listed if self.stock else [one for one in listed if one.method != STOCK]

    def _served(self, trial: Trial) -> list[Served]:
        of = {"contexts": self.contexts, "sessions": self.sessions, "steps": self.steps, "only": self.only}
        options = {"methods": self.methods, "budget": self.budget, "memory": self.memory, "progress": trial.progress}
        return measure_servers(trial.loaded, self.peers or (), self.interpreters, **of, **options)  # type: ignore[arg-type]

    def conditions(self) -> dict[str, Any]:
        return {"clock": self.clock}

    def tables(self, found: Benched) -> list[Table]:
        if found.servers:
            return [served_table(found.servers, self.memory, self.steps)]
        if found.processes:
            return [process_table(found.processes, f"Budget {self.budget}, a process each")]
        columns = self._columns(found)
        notes = [
            "×: time relative to stock at the same context. × held: time relative to a stock cache that holds "
            "only as many entries as the budget."
        ]
        if any(found.llama_ratio(row) for row in found.rows):
            notes.append(
                "× llama.cpp: time relative to a step of llama.cpp, with or without flash attention, whichever "
                "is faster."
            )
        if found.bytes_per_s:
            notes.append(
                f"At least: the time to read the weights ({megabytes(found.weight_bytes)}), keys and values of a "
                f"step at {found.bytes_per_s / 1e9:.1f} GB/s, the rate of reading memory in this run."
            )
        notes += [*found.notes, *refusals((row.label, f"{row.context:,}", row.error) for row in found.rows)]
        table = Table(f"Budget {self.budget}, {self.clock} clock", [*columns], notes=notes, named=2)
        table.rows += [[cell(row) for cell in columns.values()] for row in found.rows if not row.error]
        return [table]

    def _columns(self, found: Benched) -> dict[str, Callable[[Timed], str]]:
        """Return the columns that have contents: a function of a row, by heading."""

        def size(name: str) -> Callable[[Timed], str]:
            return lambda row: megabytes(row.memory.get(name) or None)

        columns: dict[str, Callable[[Timed], str]] = {
            "context": lambda row: f"{row.context:,}",
            "cache": lambda row: f"`{row.label}`",
            "prefill s": lambda row: fixed(row.prefill_s),
            "tokens/s": lambda row: number(row.context / row.prefill_s if row.prefill_s else None),
            "×": lambda row: fixed(row.prefill_ratio),
            "step ms": lambda row: fixed(row.step_ms, 1),
            "× step": lambda row: fixed(row.step_ratio),
            "× held": lambda row: fixed(row.held_ratio),
        }
        if any(found.llama_ratio(row) for row in found.rows):
            columns["× llama.cpp"] = lambda row: fixed(found.llama_ratio(row))
        columns |= {
            "at least ms": lambda row: fixed(found.limit_ms(row), 1),
            "slowest ms": lambda row: fixed(row.slowest_ms, 1),
        }
        if any(row.merging_ms for row in found.rows):
            columns["mean ms"] = lambda row: fixed(row.mean_ms, 1)
            columns["of it merging"] = lambda row: fixed(row.merging_ms, 1)
        columns |= {
            "resident": size("resident_bytes"),
            "kept smaller or elsewhere": lambda row: megabytes(
                sum(row.memory["checkpoint_bytes"].values()) + row.memory["compressed_bytes"] or None
            ),
            "workspace peak": size("peak_workspace_bytes"),
        }
        if any("device_peak_bytes" in row.memory for row in found.rows):
            columns["GPU peak"] = size("device_peak_bytes")
        return columns

    def as_json(self, found: Benched) -> dict[str, Any]:
        rows = [
            asdict(row) | {"limit_ms": found.limit_ms(row), "llama_ratio": found.llama_ratio(row)} for row in found.rows
        ]
        return asdict(found) | {"rows": rows}


def cases(
    model: Any,
    contexts: Sequence[int],
    budget: str,
    steps: int,
    methods: Sequence[str] | None = None,
    *,
    slow: bool = True,
) -> list[TimingCase]:
    """Return the cases of a run: the stock cache, the named methods, and a stock cache with the budget's entries.

    Without names, the run is complete. It then has no cache, the exact caches, kv-direct with each kind and place, and
    every method that drops or shrinks entries. It also has kv-direct with a budget of the complete context, which
    recalls no entries and shows the overhead.
    """
    geometry = ModelGeometry.of(model)
    listed = []
    for length in contexts:
        listed.append(TimingCase(STOCK, length, STOCK))
        if methods is None:
            listed += _whole_run(length, budget, steps)
        else:
            listed += [_case(name, length, budget, steps) for name in methods if name != STOCK]
        with suppress(BudgetError):  # the cases of methods with a budget report it
            if entries := Budget.parse(budget).entries(geometry, context=length):
                listed.append(TimingCase(SAME_ENTRIES, length, STOCK, reads=entries))
        if slow and methods is None:
            rebuilt = (_direct(length, budget, *place) for place in (("residual:4", "host"), ("tokens", "device")))
            listed += [TimingCase(NAIVE, length, NAIVE), *rebuilt]
    return listed


def _whole_run(length: int, budget: str, steps: int) -> list[TimingCase]:
    named = [name for name in listed() if resolve(name).exactness is Exactness.LOSSY and name != "quantized"]
    lossy = [*named, *COMBINED]
    places = ((kind, where) for kind in ("kv", "residual") for where in ("device", "host", "disk"))
    return [
        *(_case(name, length, budget, steps) for name in ("full", "static", "paged")),
        TimingCase("kv-direct, no recall", length, "kv-direct", {"budget": length + steps + 1}),
        *(_direct(length, budget, *place) for place in places),
        *(_case(name, length, budget, steps) for name in lossy),
    ]


def _case(name: str, length: int, budget: str, steps: int = 0) -> TimingCase:
    """Return the case of a method by its name. A method with a budget has ``budget``, or the complete context if it
    drops no entries."""
    method = resolve(name)
    if "budget" not in method.options:
        return TimingCase(name, length, name)
    if method.selector.keeps_all:
        return TimingCase(name, length, name, {"budget": length + steps + 1})
    return TimingCase(name, length, name, {"budget": budget, "context": length})


def _direct(length: int, budget: str, kind: str, where: str) -> TimingCase:
    options = {"budget": budget, "checkpoint": kind, "where": where, "context": length}
    return TimingCase(f"kv-direct {kind}@{where}", length, "kv-direct", options)


def chosen(names: Sequence[str], listed: Sequence[TimingCase]) -> set[str]:
    """Return the labels that ``names`` select: equal labels, or for a name without one, all labels that contain it."""
    labels = {case.label for case in listed}
    return {label for name in names for label in labels if label == name or (name not in labels and name in label)}


PROCESSES = ("full", "kv-direct", "snapkv+verified")
"""Methods measured in separate processes: one holds every entry in memory. The two others store every entry on disk and
recall entries for every token, or once for a run of drafts."""


def process_cases(contexts: Sequence[int], budget: str, methods: Sequence[str] | None = None) -> list[TimingCase]:
    """Return the cases for separate processes: the stock cache, and ``methods``, with their checkpoints on disk."""
    listed = []
    for length in contexts:
        listed.append(TimingCase(STOCK, length, STOCK))
        for name in methods or PROCESSES:
            if name == STOCK:
                continue
            case = _case(name, length, budget)
            if resolve(name).checkpoints:
                on_disk = {"checkpoint": "kv", "where": "disk"}
                case = replace(case, label=f"{name} kv@disk", options={**case.options, **on_disk})
            listed.append(case)
    return listed
