"""Which caches fit in a memory: every method at one budget, and the choice of ``--budget auto``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.budget import MIN_CHUNK, size
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import BudgetError, KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.plan.sizes import Sizes, grant, sizes
from kvkeep.plugins import first_line
from kvkeep.policies.methods import Request, names, resolve
from kvkeep.policies.registry import Method
from kvkeep.stores.checkpoints.spec import CheckpointSpec

FIRST = ("full", "kv-direct")
"""The methods that a plan names first, and the only ones that :func:`choose` takes."""
_PROMISES = tuple(Exactness)


# -- every method -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One cache that has read the whole context."""

    method: Method
    spec: CheckpointSpec | None
    """Its checkpoint; None without one."""
    sizes: Sizes
    """The bytes that ``cache.memory()`` then shows."""
    peak: int
    """Bytes of the device's memory at the peak: the cache, a chunk of the prompt, recall, bookkeeping, logits."""
    fitting: int
    """How many such caches fit in the memory at the same time."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain types."""
        return {
            "method": self.method.name,
            "checkpoint": None if self.spec is None else str(self.spec),
            "where": None if self.spec is None else self.spec.where,
            "class": str(self.method.exactness),
            "budget": self.sizes.budget,
            "resident_bytes": self.sizes.resident,
            "compressed_bytes": self.sizes.compressed,
            "checkpoint_bytes": {place: getattr(self.sizes, place) for place in ("device", "host", "disk")},
            "peak_bytes": self.peak,
            "fitting": self.fitting,
        }


def listed() -> list[str]:
    """Return the methods with a name that can be planned, without ``endless``: a plan is for texts within the model's
    positions, where it is ``kv-direct``."""
    known = ((name, resolve(name)) for name in names())
    return [name for name, method in known if _predictable(method) and not method.recall.endless]


def _predictable(method: Method) -> bool:
    """Return whether the geometry determines the bytes of a method. It does not if the text is read twice."""
    return method.reading is None and method.fate.predictable


def plan(
    geometry: ModelGeometry,
    context: int,
    memory: int,
    budget: str | int,
    methods: Iterable[str],
    *,
    device: str = "cpu",
    checkpoint: str | None = None,
    where: str | None = None,
) -> tuple[list[Row], dict[str, str]]:
    """Return the caches of ``context`` tokens with ``budget``, those that fit in ``memory`` bytes first, and the reason
    for each method that is left out.

    device: the kind of device. checkpoint, where: kind and place of all checkpoints, as for a
    :class:`~kvkeep.cache.KeepCache`. Raises UsageError for a context that the model does not have.
    """
    if not 1 <= context <= (geometry.max_positions or context):
        raise UsageError(
            f"A context of {context:,} tokens is not possible: the model has {geometry.max_positions:,} positions; "
            "give at least 1 token and at most these."
            if geometry.max_positions
            else f"A context has at least 1 token, not {context}."
        )

    def row(method: Method) -> Row:
        if not _predictable(method):
            raise UsageError("Its bytes do not follow from the shape of the model.")
        entries, spec, shared = None, None, device == "cpu"
        if method.selector.keeps_all:
            entries = context if method.budgeted else None
        else:
            stored: dict[str, Any] = {"checkpoint": checkpoint, "where": where} if method.checkpoints else {}
            request = Request.parse(method.name, budget, context=context, **stored)
            entries, _ = request.entries(geometry)
            spec = request.spec(geometry, device) if method.checkpoints else None
        peak = grant(geometry, method, entries, context, spec, shared=shared)
        return Row(method, spec, sizes(geometry, method, context, entries, spec, shared=shared), peak, memory // peak)

    rows, left_out = list[Row](), dict[str, str]()
    for name in methods:
        try:
            rows.append(row(resolve(name)))
        except Exception as error:  # a budget that is too small for a method, or a plugin that fails
            left_out[name] = first_line(error)
    rows.sort(key=_order)
    return rows, left_out


def _order(row: Row) -> tuple[bool, int, int]:
    """Return the place of a row: first what fits; ``full`` and ``kv-direct`` before others, then by exactness."""
    name = row.method.name
    return not row.fitting, FIRST.index(name) if name in FIRST else len(FIRST), _PROMISES.index(row.method.exactness)


# -- a budget of "auto" -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The cache that ``--budget auto`` takes."""

    options: dict[str, Any]
    """Method, and perhaps budget and checkpoint: options of a :class:`~kvkeep.cache.KeepCache`."""
    reason: str
    """The choice and its reason, in a sentence."""


def choose(geometry: ModelGeometry, tokens: int, memory: int, *, shared: bool) -> Choice:
    """Return ``full``, if ``tokens`` tokens with all their entries fit in ``memory`` bytes of the device. Otherwise
    return ``kv-direct`` with the largest budget that fits; it keeps older entries as they are. Both are exact.

    shared: entries in the host's memory count, too; older entries are then on disk. Raises BudgetError if neither fits,
    with the smallest memory that would do, or if no budget can limit the model's layers.
    """
    full, direct = map(resolve, FIRST)
    needed = grant(geometry, full, None, tokens, shared=shared)
    if needed <= memory:
        return Choice({"method": "full"}, f"'full' is used: {tokens:,} tokens take at most {size(needed)}.")
    try:
        Request.parse(direct.name, MIN_CHUNK).entries(geometry)
    except KvkeepError as error:
        raise BudgetError(f"'full' takes {size(needed, up=True)}, more than {size(memory)}, and: {error}") from error
    spec = CheckpointSpec("kv", "disk" if shared else "host")

    def peak(entries: int) -> int:
        return grant(geometry, direct, entries, tokens, spec, shared=shared)

    budgets: Sequence[int] = range(MIN_CHUNK, tokens)
    count = bisect_right(budgets, memory, key=peak)
    if not count:
        raise BudgetError(
            f"No exact cache of {tokens:,} tokens fits into {size(memory)}: 'full' takes {size(needed, up=True)}, and "
            f"'kv-direct' at least {size(peak(MIN_CHUNK), up=True)}."
        )
    entries = budgets[count - 1]
    reason = (
        f"'kv-direct' is used with {entries:,} entries a layer, the most that fit into {size(memory)} (older entries: "
        f"{spec.where}); 'full' would take up to {size(needed)} for {tokens:,} tokens."
    )
    options = {"method": direct.name, "budget": entries, "checkpoint": spec.kind, "where": spec.where}
    return Choice(options, reason)
