"""The budget of a cache: "512", "64MB", "25%" as entries per full layer of one model, and sizes as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from kvkeep.errors import BudgetError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from kvkeep.geometry import ModelGeometry

DEFAULT_CHUNK = 512
"""Tokens per prefill chunk when the budget has room for them."""

LONGEST_CHUNK = 1024
"""The largest chunk of a cache that recalls everything, within :data:`SPARE`: each chunk reads all weights once. On a
GPU that copies evicted entries, :mod:`~kvkeep.stores.checkpoints.prices` gives a larger one."""

MIN_CHUNK = 16
"""The smallest default chunk: below it prefill runs almost token by token."""

SPARE = 8
"""For methods whose output does not depend on it, a chunk may have up to 1/SPARE of the entries of all layers."""

_BYTES = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 10**3), ("ib", 2**10))
}
_TOKENS = {"", "tok", "token", "tokens"}
_SPELLING = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*|%)", re.IGNORECASE)
_EXAMPLES = (
    "512 or 512tok (entries per layer), 64MB, 1.5GiB (bytes of cache), 25% (of the context), 0 (recall everything)"
)


@dataclass(frozen=True)
class Budget:
    """The cache budget of a model, as its user wrote it."""

    text: str
    """The user's spelling, stripped; ``str`` returns it."""
    unit: Literal["tokens", "bytes", "percent"]
    """Entries per full layer; bytes of the cache (all layers, all rows of the batch); percent of the context, per full
    layer."""
    amount: Fraction
    """The number in that unit. MB is 10**6 bytes, MiB is 2**20."""

    @classmethod
    def parse(cls, value: int | str | Budget) -> Budget:
        """Read a budget.

        Case and blanks do not matter. Raises :class:`BudgetError` for any other form.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise _unreadable(value, "it is not a whole number or a text")
        text = str(value).strip()
        match = _SPELLING.fullmatch(text)
        if match is None:
            negative = "it is negative" if text.startswith("-") else "it is not a number with a unit"
            raise _unreadable(value, negative if text else "it is empty")
        amount, suffix = Fraction(match[1]), match[2].lower()
        if suffix == "%":
            if amount > 100:
                raise _unreadable(value, "a context has no more than 100%")
            return cls(text, "percent", amount)
        if suffix in _TOKENS:
            if "." in match[1]:
                raise _unreadable(value, "entries are whole")
            return cls(text, "tokens", amount)
        if suffix in _BYTES:
            return cls(text, "bytes", amount * _BYTES[suffix])
        raise _unreadable(value, f"'{match[2]}' is not a unit")

    def __str__(self) -> str:
        return self.text

    def entries(
        self,
        geometry: ModelGeometry,
        *,
        context: int | None = None,
        batch: int = 1,
        chunk: int | None = None,
        zero: bool = False,
        waiting: int = 0,
    ) -> int:
        """Return the entries of each full layer, per sequence. Sliding layers keep their window with any budget; only a
        budget in bytes counts them.

        context: tokens of the longest sequence, by default the length that the model was trained for; percentages are
        of it, and windows never hold more. batch: sequences that share a budget in bytes. chunk: prefill chunk; None:
        :meth:`chunk_for` chooses. zero: whether the method works with 0 entries, which an error then suggests. waiting:
        the maximum number of tokens that wait for a decision, each with a copy of the recurrent states. Raises
        BudgetError where less than one chunk fits, naming the smallest budget, and
        UnsupportedModelError where the model has a layer whose cache cannot be bounded.
        """
        _positive("context", context)
        _positive("batch", batch)
        _positive("chunk", chunk)
        _governable(self, geometry)
        if self.unit == "percent":
            context = geometry.max_positions if context is None else context
            if context is None:
                raise BudgetError(
                    f"Budget '{self}' is a share of the context, and {geometry.model_type} names none: "
                    "give the context in tokens, or the budget as entries (512) or bytes (64MB)."
                )
        if self.amount == 0:
            return 0
        fixed = 0
        if self.unit == "bytes":
            fixed = batch * (geometry.fixed_bytes(context) + waiting * geometry.recurrent_bytes())
        entries = self._fitting(geometry, context, batch, fixed)
        if entries < (chunk or MIN_CHUNK):
            hint = " (or 0, which recalls everything)" if zero else ""
            raise self._too_small(entries, geometry, context, batch, chunk or MIN_CHUNK, hint, fixed)
        return entries

    def chunk_for(self, entries: int, chunk: int | None = None, layers: int = 0, longest: int = LONGEST_CHUNK) -> int:
        """Return the prefill chunk, in tokens, for the ``entries`` that :meth:`entries` returned.

        ``chunk`` if given, else :data:`DEFAULT_CHUNK` limited by the budget, or more where ``layers`` allow it. With
        a budget of 0 nothing is kept between chunks, and any size works.

        layers: full layers of a cache that recalls everything, whose output no chunk changes; 0 for any other. The
        chunk of one layer is pending at a time, so it may exceed one layer's budget (see :data:`SPARE`). longest: the
        largest chunk of such a cache. Raises BudgetError where ``entries`` is not zero and less than one chunk of a
        cache that does not recall everything.
        """
        _positive("chunk", chunk)
        if entries == 0 or (layers and chunk):
            return chunk or DEFAULT_CHUNK
        least = chunk or MIN_CHUNK
        if entries < least:
            raise BudgetError(f"Budget '{self}' holds {_entries(entries)}, less than one chunk of {least}.")
        return chunk or max(min(DEFAULT_CHUNK, entries), min(longest, entries * layers // SPARE))

    def _fitting(self, geometry: ModelGeometry, context: int | None, batch: int, fixed: int) -> int:
        """Return the entries that fit; negative when windows and recurrent states alone take more."""
        if self.unit == "tokens":
            return int(self.amount)
        if self.unit == "percent":
            assert context is not None
            return int(context * self.amount / 100)
        return (int(self.amount) - fixed) // (batch * geometry.full_bytes_per_token)

    def _too_small(
        self, entries: int, geometry: ModelGeometry, context: int | None, batch: int, least: int, hint: str, fixed: int
    ) -> BudgetError:
        if entries < 0:
            holders = "sliding-window" if geometry.sliding_layers else "recurrent"
            problem = f"is less than the {fixed}B that the {holders} layers hold by themselves"
        else:
            problem = f"holds {_entries(entries)}, less than one chunk of {least}"
        if self.unit == "tokens":
            remedy = f"the smallest is {least}{re.sub(r'[0-9]', '', self.text).strip()}"
        elif self.unit == "bytes":
            smallest = fixed + batch * least * geometry.full_bytes_per_token
            remedy = f"the smallest for this model is {smallest}B"
        else:
            remedy = _smallest_share(context or 0, least)
        return BudgetError(f"Budget '{self}' {problem}; {remedy}{hint}.")


def bytes_of(size: int | str, what: str = "memory") -> int:
    """Return the bytes of ``"64MB"`` or ``"1.5GiB"``, or of a number of them. what: the name of it in errors. Raises
    UsageError for anything else, and for less than one byte."""
    try:
        budget = Budget.parse(size)
    except BudgetError:
        budget = None
    if budget is None or not (budget.unit == "bytes" or isinstance(size, int)) or budget.amount < 1:
        raise UsageError(f"The {what} '{size}' is not a number of bytes; give bytes (64MB, 1.5GiB).")
    return int(budget.amount)


def _smallest_share(context: int, least: int) -> str:
    """Return the percentage of ``context`` that holds ``least`` entries, rounded up to 0.01."""
    if context < least:
        return f"a context of {context} tokens is too short for a share of it; the smallest is {least} entries"
    hundredths = -(-least * 10_000 // context)
    percent = f"{hundredths // 100}.{hundredths % 100:02d}".rstrip("0").rstrip(".")
    return f"the smallest for a context of {context} is {percent}%"


def _governable(budget: Budget, geometry: ModelGeometry) -> None:
    """Refuse models whose cache the budget would bound in no part, or only in part."""
    if geometry.unbounded_layers:
        kinds = ", ".join(sorted({layer.kind for layer in geometry.unbounded_layers}))
        raise UnsupportedModelError(
            f"'{geometry.model_type}' has layers of kind {kinds}, whose cache kvkeep cannot bound; "
            "leave the budget out."
        )
    if not geometry.full_layers:
        raise BudgetError(
            f"Budget '{budget}' has no effect: every layer of {geometry.model_type} is limited to "
            f"a window ({geometry.sliding_bytes()}B per sequence); leave the budget out."
        )


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise BudgetError(f"The {name} of a budget must be 1 or more, not {value}.")


def _unreadable(value: object, why: str) -> BudgetError:
    return BudgetError(f"Budget {value!r} cannot be read: {why}; give {_EXAMPLES}.")


def _entries(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def size(count: int, *, up: bool = False) -> str:
    """Return bytes with a unit (MB is 10**6). up: never less than ``count``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= scale:
            return f"{-(-10 * count // scale) / 10 if up else count / scale:.1f} {unit}"
    return f"{count} B"
