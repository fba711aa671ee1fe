"""``passages``: past the maximum context length, the passages of the old text that match the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.recall import Reader, Recall
from kvkeep.errors import BudgetError, UnsupportedModelError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.pages import MAX_PAGE_ROWS
from kvkeep.memory.rows import BLOCK
from kvkeep.models.binding import bind
from kvkeep.stores.readers.passage_choice import WRITTEN, PassageChoice
from kvkeep.stores.readers.recalled_passages import RecalledPassages, copied_bytes

SIZES = (16, 32, 64, 128, 256)
"""The sizes of a passage: a passage lies in one page of a checkpoint."""


@dataclass(frozen=True)
class MatchingPassages(Recall):
    """Up to ``exact`` tokens a step attends to all entries. Beyond them, it attends to the newest entries and to
    ``count`` passages of older ones: the first passage, and those that match the question."""

    count: int = 16
    """Passages of a step."""
    size: int = 128
    """Tokens of a passage."""
    exact: int = 0
    """The number of tokens up to which all entries are attended; 0: the model's positions."""

    label: ClassVar[str] = "the passages that match the question"
    source: ClassVar[str] = "passages as in InfLLM, arXiv:2402.04617; chosen by BM25"
    exactness: ClassVar[Exactness | None] = Exactness.REVERSIBLE
    backed: ClassVar[bool] = False
    endless: ClassVar[bool] = True
    records: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.size not in SIZES or self.count < 1 or self.exact < 0:
            raise UsageError(
                f"Recall 'passages' takes a count of at least 1, a size of {', '.join(map(str, SIZES))}, and exact=0 "
                "or a number of tokens."
            )

    def refuses(self, method: Any) -> str | None:
        """Return that other methods do not keep older entries in the order of the text; None for ``endless``."""
        if method.pin > (limit := self.size * (self.count - 1)):
            return f"It recalls {self.count} passages of {self.size} tokens, so it can pin at most {limit:,} tokens."
        if method.selector.in_order and method.fate.kind == "kv" and not method.oneshot:
            return None
        return "Recall 'passages' needs a checkpoint of kind 'kv' in the order of the text; use 'endless'."

    def exact_tokens(self, geometry: ModelGeometry) -> int | None:
        return self.exact or geometry.max_positions

    def fitting(self, limit: int, entries: int, chunk: int) -> int:
        """Return how many passages fit into ``limit`` positions beside ``entries`` entries, a chunk, what is written
        until the next choice, and a passage that is not whole yet."""
        return max(0, (limit - entries - chunk - (WRITTEN - 1)) // self.size - 1)

    def check(self, model: Any, geometry: ModelGeometry, entries: int, chunk: int) -> None:
        full = [layer.index for layer in geometry.full_layers]
        bind(model).require("turn", full, "passages at other positions", "use kv-direct")
        limit = geometry.max_positions
        if limit is not None and self.exact > limit:
            raise UsageError(
                f"'endless' is exact up to the model's {limit:,} positions at most, not up to {self.exact:,} tokens; "
                "give fewer exact tokens, or 0."
            )
        if limit is not None and self.count > (fewer := self.fitting(limit, entries, chunk)):
            hint = f", or fewer passages (endless+passages:{fewer})" if fewer else ""
            raise BudgetError(
                f"Beside {entries} entries and a chunk of {chunk} tokens, the model's {limit} positions have space for "
                f"{fewer} of {self.count} passages of {self.size}; give a smaller budget{hint}."
            )
        if not geometry.steady(None):
            raise UnsupportedModelError(
                "The rotary frequencies of this model change with the length of a text, so 'endless' cannot place "
                "passages at other positions; use kv-direct."
            )

    def check_capacity(self, geometry: ModelGeometry, capacity: int | None, newest: int) -> None:
        exact = self.exact_tokens(geometry)
        if capacity is None:
            return
        if exact is None:
            raise UsageError(
                "This model has no maximum number of positions; with a capacity, give endless+passages:exact=N."
            )
        least = max(exact, newest) + MAX_PAGE_ROWS + BLOCK
        if capacity < least:
            fewer = capacity - MAX_PAGE_ROWS - BLOCK
            needs = f"attends to all of the first {exact:,} tokens"
            hint = f", or fewer exact tokens (endless+passages:exact={fewer})" if fewer >= max(newest, 1) else ""
            if newest > exact:
                needs, hint = f"evicts up to {newest:,} entries at once (a budget and a chunk)", ", or a smaller budget"
            raise UsageError(
                f"A capacity of {capacity:,} entries is too small for 'endless', which {needs}; give at least "
                f"{least:,}{hint}."
            )

    def shared(self, ledger: Ledger, pinned: int) -> PassageChoice:
        return PassageChoice(ledger, self.count, self.size, max(1, -(-pinned // self.size)))

    def reader(self, site: Site, shared: PassageChoice) -> Reader:
        return RecalledPassages(site, bind(site.model), shared, self.exact_tokens(site.geometry))

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int, away: int) -> PredictedBytes:
        """Return the bytes of the copies of the passages; none while all entries are attended."""
        exact = self.exact_tokens(geometry)
        if exact is None or tokens <= exact:
            return PredictedBytes()
        copies = copied_bytes(layer, geometry, min(away // self.size, self.count) * self.size)
        return PredictedBytes(bookkeeping=copies, workspace=3 * copies)  # rotated in float32
