"""A method is a selector (which entries are evicted) × a fate (how they are stored) × a recall (how attention reads
them). The registry holds these parts, and presets of them, by name.

:func:`register` adds to it. An installed package adds a selector, a fate, a recall or a preset by an entry point of the
group :data:`~kvkeep.plugins.PARTS`; the entry point's name is the part's name
(:func:`kvkeep.policies.methods.load_plugins`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import get_annotations, isabstract
from typing import Any, ClassVar, NamedTuple

from kvkeep.budget import LONGEST_CHUNK, Budget
from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import Site
from kvkeep.contracts.recall import Reader, Recall
from kvkeep.contracts.selector import Selector
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.fates.checkpoint import Checkpointed, Recorded
from kvkeep.policies.fates.drop import Drop, Kept
from kvkeep.policies.fates.kvslimmer import KVSlimmer
from kvkeep.policies.fates.merge import Merge
from kvkeep.policies.fates.quantize import Quantize
from kvkeep.policies.fates.sketch import Sketch
from kvkeep.policies.fates.tiers import InTiers
from kvkeep.policies.names import FORMER, ONESHOT, STOCK
from kvkeep.policies.recalls.passages import MatchingPassages
from kvkeep.policies.recalls.verified import Verified
from kvkeep.policies.selectors.adakv import AdaKV
from kvkeep.policies.selectors.expected_attention import ExpectedAttention
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.policies.selectors.keydiff import KeyDiff
from kvkeep.policies.selectors.knorm import KNorm
from kvkeep.policies.selectors.kvzip import KVzip
from kvkeep.policies.selectors.lru import LRU
from kvkeep.policies.selectors.nobody import Nobody
from kvkeep.policies.selectors.pyramidkv import PyramidKV
from kvkeep.policies.selectors.random import Random
from kvkeep.policies.selectors.snapkv import SnapKV
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.policies.selectors.tova import Tova
from kvkeep.policies.selectors.window import OldestFirst, Window
from kvkeep.policies.specs import parameters
from kvkeep.stores.layer import ReadEvicted
from kvkeep.stores.readers.backed import ReadCheckpoint

SELECTORS: dict[str, type[Selector]] = {
    "window": Window,
    "streaming-llm": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
    "tova": Tova,
    "expected-attention": ExpectedAttention,
    "kvzip": KVzip,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "random": Random,
    "lru": LRU,
}

FATES: dict[str, type[Fate]] = {
    "drop": Drop,
    "checkpoint": Checkpointed,
    "quantize": Quantize,
    "tiers": InTiers,
    "sketch": Sketch,
    "merge": Merge,
    "kvslimmer": KVSlimmer,
}

RECALLS: dict[str, type[Recall]] = {
    "verified": Verified,
    "passages": MatchingPassages,
}

PEERS = ("stock-", "peer-", "prompt-")
"""Prefixes of the names of the lab's peers."""


@dataclass(frozen=True)
class Everything(Recall):
    """Every step attends to the checkpoint, which holds all entries in the order of the text: the recall of a selector
    with a checkpoint."""

    label: ClassVar[str] = ""

    def reader(self, site: Site, shared: Any) -> Reader:
        return ReadCheckpoint(site)


@dataclass(frozen=True)
class Evicted(Recall):
    """Every step attends to all entries of the store of evicted entries."""

    label: ClassVar[str] = ""
    backed: ClassVar[bool] = False

    def reader(self, site: Site, shared: Any) -> Reader:
        return ReadEvicted()


class Division(NamedTuple):
    """How the entries of a layer's budget are divided."""

    tail: int
    """Entries for drafts."""
    within: int
    """All other entries but the pinned ones."""
    resident: int
    """The exact entries, pinned ones included."""
    sinks: int | None
    """First entries with an additional unrotated key; None: positions are those of the text."""


@dataclass(frozen=True)
class Method:
    """A selector, a fate and a recall."""

    name: str
    """The user's spelling."""
    selector: Selector
    fate: Fate
    recall: Recall
    summary: str
    """What the method does, in a sentence."""
    source: str
    """The paper."""
    oneshot: bool = False
    """A prompt is read in one pass and compressed afterwards. The budget holds from then on."""
    pin: int = 0
    """The number of first tokens whose entries are never evicted (:meth:`pinned`)."""

    def pinned(self, count: int) -> Method:
        """Return the method with the entries of the first ``count`` tokens of each row pinned: they are never evicted,
        and no other entry is merged into them. The rest of the budget is for all other entries. An exact method that
        does not draft has the same answers with any entries resident, and is returned as it is."""
        chooses = self.recall.drafts or self.exactness is not Exactness.EXACT
        return replace(self, pin=count if chooses else 0)

    @property
    def reserved(self) -> int:
        """The number of pinned entries in each lane; 0 for a ring, which evicts the oldest ones."""
        return 0 if self.selector.in_order else self.pin

    @property
    def exactness(self) -> Exactness:
        """What the method promises about its output."""
        return self.recall.exactness or self.fate.exactness

    @property
    def leaves(self) -> str:
        """Which entries are evicted, in a few words."""
        return self.fate.leaves or self.selector.leaves

    @property
    def becomes(self) -> str:
        """How evicted entries are stored, in a few words."""
        if not self.recall.backed:
            return self.fate.label
        stored = self.store_fate.stores.keeps or self.fate.stores.makes_room
        return f"{self.fate.label} and checkpointed" if stored else "checkpointed"

    @property
    def returns(self) -> str:
        """How evicted entries come back, in a few words."""
        return self.recall.label or self.fate.returns

    @property
    def store_fate(self) -> Fate:
        """The fate of evicted entries; they are dropped if a checkpoint holds all of them."""
        return Drop() if self.recall.backed and self.fate.checkpoints else self.fate

    @property
    def checkpoints(self) -> bool:
        """Whether entries are kept in a checkpoint."""
        return self.recall.backed or self.fate.checkpoints

    @property
    def reading(self) -> Method | None:
        """The method that reads a text first, for a selector that chooses after a second reading; else None."""
        if self.selector.reconstruction is None:
            return None
        return replace(self, selector=OldestFirst(), fate=Recorded("kv"), recall=Evicted(), pin=0)

    @property
    def reads_all(self) -> bool:
        """Whether every step attends to all entries of a checkpoint, so that the budget may be 0."""
        return self.recall.backed and not self.recall.label

    @property
    def kind(self) -> str | None:
        """The kind of checkpoint in the method's name; None where the cache's options choose it."""
        return self.fate.kind or None

    @property
    def budgeted(self) -> bool:
        """Whether the method needs a budget."""
        return self.selector.budgeted

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a cache with this method."""
        if self.selector.keeps_all:
            return ("budget",) if self.budgeted else ()
        chunk = () if self.oneshot else ("chunk",)
        if not self.checkpoints:
            return ("budget", *chunk, "where", "folder", "page") if self.reading else ("budget", *chunk)
        capacity = () if self.recall.drafts else ("capacity",)
        return ("budget", "checkpoint", "where", *capacity, "folder", *chunk, "page")

    @property
    def any_length(self) -> bool:
        """Whether a text may be longer than the model's positions."""
        return self.recall.endless or self.sinks is not None

    @property
    def sinks(self) -> int | None:
        """The number of first entries that stay, where positions are places in the cache. None where positions are
        those of the text, whose length the model's positions then limit."""
        fate = self.store_fate
        sinks = self.selector.sinks_in_cache(not (fate.stores.keeps or self.recall.backed or self.recall.label))
        return None if sinks is None else max(sinks, self.pin)

    def division(self, geometry: ModelGeometry, entries: int) -> Division:
        """Return how a budget of ``entries`` is divided. Raises BudgetError for too few."""
        tail, fate, sinks = self.recall.tail(entries), self.store_fate, self.sinks
        copies = 0 if sinks is None else (sinks + 1) // 2
        within = self._beside_pins(entries, tail + copies) + copies
        if self.recall.backed and within < 1 and not self.reads_all:
            raise BudgetError(
                f"A budget of {entries} entries leaves method '{self.name}' nothing to attend to; give a larger budget."
            )
        with self._naming_pins():
            (self.fate if self.reads_all else fate).fits(self.name, geometry, within)
        resident = fate.resident(within) - copies
        return Division(tail, within, self.reserved + (resident if sinks is None else max(resident, 1)), sinks)

    def _beside_pins(self, entries: int, others: int = 0) -> int:
        """Return the entries of a budget beside the pinned ones and ``others``. Raises BudgetError if pins leave no
        room."""
        left = entries - others - self.reserved
        if self.reserved and left < 1:
            raise BudgetError(
                f"{self.reserved} pinned tokens leave no room for others in a budget of {entries} entries; give a "
                "larger budget, or pin fewer tokens."
            )
        return left

    @contextmanager
    def _naming_pins(self) -> Iterator[None]:
        """Say in a BudgetError that its budget is the one beside the pinned tokens."""
        try:
            yield
        except BudgetError as error:
            if not self.reserved:
                raise
            raise BudgetError(f"Beside {self.reserved} pinned tokens: {error}") from error

    def budgets(self, model: Any, geometry: ModelGeometry, resident: int) -> list[Sequence[int]]:
        """Return the number of entries of each layer's KV heads, as :meth:`Selector.budgets` does, ``resident`` on
        average. The selector divides those that are not pinned."""
        found, pinned = self.selector.budgets(model, geometry, resident - self.reserved), self.reserved
        return [[pinned + count for count in layer] for layer in found] if pinned else found

    def chunk(
        self,
        geometry: ModelGeometry,
        budget: Budget,
        entries: int,
        chunk: int | None = None,
        longest: int = LONGEST_CHUNK,
    ) -> int:
        """Return the tokens of a prompt that are read at a time with a budget of ``entries``. chunk: the user's choice.
        longest: the most of an exact method, by default. Raises BudgetError where they do not fit."""
        if self.oneshot:
            return sys.maxsize
        layers = len(geometry.full_layers) if self.exactness is Exactness.EXACT else 0
        longest, rest = budget.chunk_for(entries, chunk, layers, longest), self._beside_pins(entries)
        with self._naming_pins():
            return self.fate.chunk(self.name, rest, longest, chunk is not None)

    def refusal(self) -> str | None:
        """Return why the parts cannot be combined, in a sentence; None where they can."""
        if self.oneshot and self.selector.keeps_all:
            return "This method evicts nothing, so there is nothing to compress after the prompt; leave 'oneshot' out."
        if self.oneshot and self.reading is not None:
            return "This method always reads the whole text before it compresses; leave 'oneshot' out."
        if self.recall.label and self.selector.keeps_all:
            return "This method evicts nothing, so there is nothing to recall; leave the recall out."
        if self.recall.label and not self.recall.endless and self.selector.in_order:
            return "'kv-direct' recalls everything at every step already; use 'window+RECALL'."
        if self.selector.divides and self.fate.stores.makes_room:
            return "This fate evicts nothing, so the selector has no entries to divide; use 'snapkv'."
        for part in (self.fate, self.recall):
            if (reason := part.refuses(self)) is not None:
                return reason
        return None


@dataclass(frozen=True)
class Preset:
    """A method with a name: a selector, a fate, and perhaps a recall. Its parameters are the fate's."""

    selector: Selector
    fate: type[Fate]
    summary: str
    """What the method does, in a sentence."""
    source: str
    """The paper."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Parameters that differ from the fate's defaults."""
    recall: Recall = field(default_factory=Evicted)
    closed: bool = False
    """The preset takes no parameters."""


PRESETS: dict[str, Preset] = {
    "full": Preset(
        Nobody(),
        Kept,
        "All entries, in buffers that grow by blocks; a step copies one entry.",
        "kv-caching-tutorial, section 7",
        closed=True,
    ),
    "kv-direct": Preset(
        OldestFirst(),
        Checkpointed,
        "The newest entries within the budget; all others in a checkpoint, where attention reads them exactly.",
        "arXiv:2603.19664, Algorithm 1",
        closed=True,
    ),
    "endless": Preset(
        OldestFirst(),
        Checkpointed,
        "Exact up to the maximum context length; past it, the newest entries, and the older passages that match the "
        "question.",
        MatchingPassages.source,
        {"kind": "kv"},
        recall=MatchingPassages(),
    ),
    "quantized": Preset(
        Window(),
        Quantize,
        "The newest entries exactly, older ones at 8, 4 or 2 bits: keys per channel, values per token.",
        "arXiv:2402.02750",
        {"exact": 128},
    ),
    "revive": Preset(
        H2O(halflife=256),
        InTiers,
        "Newest and heavy entries exactly, all others at 16, 8, 4 or 2 bits by their current attention.",
        "kvkeep; codes after arXiv:2402.02750",
    ),
    "kvreviver": Preset(
        H2O(),
        Sketch,
        "Recent entries and heavy hitters exactly, all others in a count sketch; they may come back, as estimates.",
        "KVReviver, Algorithms 1 to 4",
        {"swap": 1.1},
    ),
    "kvslimmer": Preset(
        H2O(),
        KVSlimmer,
        "Merges the least attended neighbours into one entry, whose key follows from attention, values and output.",
        KVSlimmer.source,
    ),
}
"""Methods with a name. Every selector is a method, too: it drops the entries that it evicts."""

LISTED = ("snapkv+verified",)
"""Combinations that lists of methods name beside the presets."""


def register(name: str, part: type[Selector] | type[Fate] | type[Recall] | Preset) -> None:
    """Register ``part`` as ``name``: a selector, a fate or a recall (a frozen dataclass of its parameters), or a
    :class:`Preset`. Methods (``NAME``, ``NAME+FATE+RECALL``), tables, plans and experiments can then use it. A preset
    may have the name of its fate.

    Raises UsageError for a name that is taken or that a method's name cannot contain, and for an incomplete part.
    """
    taken = isinstance(name, str) and (name in (STOCK, ONESHOT, *FORMER) or name.startswith(PEERS))
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or taken:
        raise UsageError(
            f"{name!r} cannot be the name of a part: use letters, digits, '-', '_' and '.', and no reserved name."
        )
    home = _home(name, part)
    others = [known[name] for known in _HOMES if name in known and known[name] is not part]
    if not all(_share_name(part, other) for other in others):
        raise UsageError(f"'{name}' is the name of another part already; choose another.")
    home[name] = part


def _share_name(one: Any, other: Any) -> bool:
    """Return whether one is a preset and the other its fate: both may then have the same name."""
    return any(isinstance(preset, Preset) and preset.fate is fate for preset, fate in ((one, other), (other, one)))


def unregister(name: str, *parts: Any) -> None:
    """Remove the ``parts`` that are registered as ``name``."""
    for home in _HOMES:
        if any(home.get(name) is part for part in parts):
            del home[name]


_HOMES: tuple[dict[str, Any], ...] = (SELECTORS, FATES, RECALLS, PRESETS)


def _home(name: str, part: Any) -> dict[str, Any]:
    """Return the table that a part belongs to. Raises UsageError for an object of another kind, and for an incomplete
    part."""
    if isinstance(part, Preset):
        return PRESETS
    kinds: tuple[tuple[type, dict[str, Any]], ...] = ((Selector, SELECTORS), (Fate, FATES), (Recall, RECALLS))
    found = [(kind, known) for kind, known in kinds if isinstance(part, type) and issubclass(part, kind)]
    if not found:
        raise UsageError(f"'{name}' is no selector, fate, recall or preset, so it cannot be registered.")
    kind, home = found[0]
    if isabstract(part):
        lacks = ", ".join(sorted(part.__abstractmethods__))
        raise UsageError(f"'{name}' cannot be registered: '{part.__name__}' does not implement {lacks}.")
    if missing := " and ".join(field for field in get_annotations(kind) if not hasattr(part, field)):
        raise UsageError(f"'{name}' cannot be registered: '{part.__name__}' does not say its {missing}.")
    if wrong := [one for one in part.files if one not in parameters(part)]:
        raise UsageError(f"'{name}' cannot be registered: its 'files' are names of parameters, and not '{wrong[0]}'.")
    if kind is Selector and not _ranks(part):
        raise UsageError(
            f"'{name}' cannot be registered: '{part.__name__}' does not implement rank, and has no scores to rank by "
            "(observation_window or scores_arrivals)."
        )
    return home


def _ranks(selector: type[Selector]) -> bool:
    """Return whether a selector implements an order, or has scores for the default order."""
    overrides = any(getattr(selector, name) is not getattr(Selector, name) for name in ("rank", "observation_window"))
    return overrides or selector.scores_arrivals or selector.keeps_all
