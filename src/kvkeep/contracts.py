"""The contracts: what a cache layer is made of, and what its parts promise each other.

A layer answers three questions when its budget is full, and each answer is a part:

* who leaves? A :class:`Selector` ranks the resident entries.
* what becomes of it? A :class:`Fate` makes the layer's :class:`EvictedStore`.
* how does it come back? A :class:`Recall` makes the layer's :class:`Reader`, which answers its attention.

Selectors, fates and recalls are frozen dataclasses of parameters, registered by name (:func:`kvkeep.register`). What
they make holds the state of one layer of one cache. Parts ask each other for capabilities (flags), never for a class.

Tensors are by *lane*: one KV head of one row of the batch, lane = row * kv_heads + head. A *slot* is a place in the
sequence, padding included, from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention.attend import Segment
from kvkeep.attention.described import Described
from kvkeep.attention.step import Step
from kvkeep.errors import BudgetError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.extent import Extent
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.memory.rows import Rows


class Exactness(StrEnum):
    """What a method promises about its output."""

    EXACT = "exact"  # token for token the unbounded cache's
    REVERSIBLE = "reversible"  # what left can come back, approximately
    LOSSY = "lossy"  # what left is gone


class EntryState(IntEnum):
    """Where one slot's key and value are, in one layer and KV head.

    The numbers are written into the pages of ``kvkeep inspect``; new ones go at the end.
    """

    DROPPED = 0  # gone: attention will never see it again
    RESIDENT = 1  # attention reads it as it is
    CHECKPOINTED = 2  # not resident, and exact keys and values can be rebuilt
    QUANTISED = 3  # kept in fewer bits
    MERGED = 4  # averaged into another entry
    SKETCHED = 5  # only its part in a summary of many entries is left


# -- what parts hand each other -----------------------------------------------------------------------


class Piece(NamedTuple):
    """Some past entries, as attention reads them.

    keys, values: (lanes, 1, n, dim), or both coded or lazy (:mod:`kvkeep.attention.attend`). slots: (lanes, n) int, -1
    for none; None: the slots from ``first`` on, in every lane. holes: whether some slots are -1. extra: (lanes, n)
    float32, for how many tokens besides its own an entry stands. lanes: which lanes the piece is about, (its lanes,)
    int64; None: all. shared: one copy for all rows of the batch, (kv_heads, 1, n, dim). formed: keys and values were
    made for the moment.
    """

    keys: Any
    values: Any
    slots: Tensor | None = None
    first: int = 0
    holes: bool = False
    extra: Tensor | None = None
    lanes: Tensor | None = None
    shared: bool = False
    formed: bool = False


class Evicted(NamedTuple):
    """Entries that leave: keys, values (lanes, n, dim), slots (lanes, n), -1 for none.

    scores: (lanes, n) float32 where the store asks for them. extra: (lanes, n) float32, for how many tokens besides its
    own each stands, and newest: the last slot among those; where the store merges. holes: whether any slot may be -1.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    scores: Tensor | None = None
    extra: Tensor | None = None
    newest: Tensor | None = None
    holes: bool = True


class Asking(NamedTuple):
    """The queries of a step as they would be on average if they were asked from the positions ahead.

    queries: (lanes, heads, n, key_dim) float32. slots: (lanes, n) int, those they were asked from, -1 for padding.
    scaling: of their products with keys.
    """

    queries: Tensor
    slots: Tensor
    scaling: float


@dataclass(frozen=True)
class Candidates:
    """The entries a selector ranks. Tensors are (lanes, entries); the newest come last, the others in any order.

    slots: int64, -1 where a column is empty (its rank is not asked for). scores: what the selector made of each,
    float32; None until there is something. first: (lanes, 1), the first real slot of each lane's row, 0 where there
    is no padding. length: slots of the sequence, the new ones included. new: how many of the entries are new. budget:
    how many will stay. heads: lanes of one row. layer: which. keys, values: (lanes, entries, dim) as cached, only for
    selectors that read them. asking: the queries of a step whose entries are new, for selectors that look ahead.
    """

    slots: Tensor
    scores: Tensor | None
    first: Tensor | int
    length: int
    new: int
    budget: int
    heads: int
    layer: int
    keys: Tensor | None = None
    values: Tensor | None = None
    asking: Asking | None = None


# -- who leaves ---------------------------------------------------------------------------------------

STAYS = float("inf")
"""The rank of an entry that does not leave."""


class Pieces(NamedTuple):
    """How a text is read once more: ``piece`` tokens at a time, whose attention is compared among these and the first
    ``sinks`` entries."""

    piece: int
    sinks: int


@dataclass(frozen=True)
class Selector(ABC):
    """Who leaves. A frozen dataclass whose fields are its parameters, :meth:`rank`, and where it needs them
    :meth:`arrive` and :meth:`observe`. It holds no entries and no state: scores, one number for each entry, are kept
    beside the entries and travel with them.

    leaves: who leaves, in a few words; source: the paper. keeps_all: none does. in_order: the oldest does, in all
    heads alike, so that entries lie in a ring. by_age: age alone decides who does. scores_arrivals: new entries get a
    first score from :meth:`arrive`; otherwise it is 0. needs_kv: :meth:`rank` and :meth:`observe` need the keys and
    values themselves. may_tie: several entries may well rank the same; the oldest of them leaves first. reduce: how the
    attention of several queries and heads becomes one number: "sum" over queries of the mean over heads, or "max" over
    both.
    """

    leaves: ClassVar[str]
    source: ClassVar[str]
    keeps_all: ClassVar[bool] = False
    in_order: ClassVar[bool] = False
    by_age: ClassVar[bool] = False
    scores_arrivals: ClassVar[bool] = False
    needs_kv: ClassVar[bool] = False
    may_tie: ClassVar[bool] = False
    reduce: ClassVar[str] = "sum"

    @property
    def budgeted(self) -> bool:
        """Whether it needs a budget."""
        return True

    @property
    def layout(self) -> str:
        """How entries lie in memory where all stay: "dynamic", "static" or "paged"."""
        return ""

    @property
    def observation_window(self) -> int | None:
        """How many of a step's last queries :meth:`observe` learns the attention of: 0 none, None all."""
        return 0

    @property
    def ahead(self) -> int:
        """Over how many positions ahead the queries are averaged that :meth:`observe` is shown; 0: it is shown none.
        Needs rotary embeddings."""
        return 0

    @property
    def reconstruction(self) -> Pieces | None:
        """How a text is read once more before any of it leaves, so that :meth:`shares` can tell who has how many
        entries; None: it is not. Until then nothing is chosen: the text is read as ``kv-direct`` reads it."""
        return None

    def shares(self, received: Sequence[Tensor], rows: int, entries: int) -> list[list[int]]:
        """Return the entries of each full layer's lanes, ``entries`` on average over the lanes of one of ``rows``.
        received: of each layer (lanes, slots) float32, the most attention that each entry received of the
        reconstruction, which is its score; -inf for padding."""
        return [[entries]] * len(received)

    @property
    def accumulates(self) -> bool:
        """Whether scores are the attention of all queries so far, added up."""
        return False

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return the entries of each layer's KV heads (one number: of all its heads), ``entries`` on average. Where
        they are measured on the model and there is none yet (``model`` None), layers and heads are taken to be
        alike."""
        return [(entries,)] * len(geometry.layers)

    def sinks_in_cache(self, drops: bool) -> int | None:
        """Return how many first entries are fixed where positions are within the cache, None where they are those of
        the text. ``drops``: what leaves never comes back."""
        return None

    def arrive(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Return the first scores of new entries and of those that come back; keys (lanes, entries, dim) as cached."""
        return torch.zeros(entries.slots.shape, device=keys.device)

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return the scores after a step: ``weights`` (lanes, entries) is the attention received from its last
        ``queries`` queries, by :attr:`reduce`. By default that attention itself."""
        return weights

    def rank(self, entries: Candidates) -> Tensor:
        """Return the order of leaving, the lowest first: by default the scores. Empty columns and padding are taken
        care of."""
        assert entries.scores is not None
        return entries.scores


class Part(ABC):
    """What a layer consists of: it holds state of one layer of one cache."""

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots, scores, counts, and what else is kept beside entries."""
        return 0

    def state(self) -> dict[str, Tensor]:
        """Return what must be saved."""
        return {}

    def check(self, extent: Extent) -> None:
        """Raise Misfit where what came from a file cannot be what a layer of ``extent`` holds. All of the cache has
        been restored by then."""


class Resident(Part):
    """The entries of one layer that attention reads as they are."""

    def arrive(self, keys: Tensor, values: Tensor) -> None:
        """Make room for new entries (lanes, n, dim), which :meth:`admit` will bring."""

    @abstractmethod
    def pieces(self, ordered: bool = True) -> Iterator[Piece]:
        """Yield what is held; without ``ordered`` entries may come in any order: the caller masks none of them."""

    @abstractmethod
    def admit(self, keys: Tensor, values: Tensor, first: int) -> Evicted | None:
        """Keep new entries, whose slots begin at ``first``, within the budget. Return what was evicted, None for
        nothing, or where the store took it already."""

    def in_one_piece(self, tail: int = 0) -> tuple[Tensor, Tensor] | None:
        """Return keys and values (lanes, n, dim) of all that is held, with the first ``tail`` entries of the tail,
        where they lie behind each other and a later query sees all of them; else None."""
        return None

    def described(self, tail: int = 0) -> Described | None:
        """Return the same as the kernel reads it, in the order of the text where there is one; None where a later query
        does not see all of it."""
        held = self.in_one_piece(tail)
        return None if held is None else Described([held])

    @property
    def observes(self) -> bool:
        """Whether entries are scored by the attention they receive."""
        return False

    def learn_all(self, weights: Tensor) -> None:
        """Score the entries, all of them settled and in one piece, by one query's ``weights`` (lanes, n)."""

    def weighs_at_once(self, held: Sequence[Segment]) -> bool:
        """Return whether a single query's weights are needed, and can be computed with its attention: ``held`` is one
        segment, of all lanes."""
        return False

    def observe(
        self, step: Step, lse: Tensor, held: Sequence[Segment], new: tuple[Tensor, Tensor] | None, first: int
    ) -> None:
        """Score every entry by the attention it received. ``lse``: as attention over everything returned it. ``held``:
        the segments of :meth:`pieces`. ``new``: the step's own entries (lanes, n, dim) from slot ``first`` on, None
        once they are settled."""

    @abstractmethod
    def held(self, alone: bool = False) -> Tensor:
        """Return which slots are resident, (lanes, slots) bool, or (1, slots) where lanes are alike; ``alone``: and
        stand for no other."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on; entries that were evicted before do not come back by it."""

    @abstractmethod
    def select(self, lanes: Tensor) -> None:
        """Make the lanes those of an index (repeats and reorders allowed)."""

    @abstractmethod
    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave, as entries of ``length`` slots."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated for entries."""


class WorkingSet(Resident):
    """Resident entries that a selector chose, as stores may ask of them."""

    selector: Selector
    banks: Any
    length: int  # slots so far

    @property
    @abstractmethod
    def columns(self) -> int:
        """The most entries that a lane has room for."""

    @abstractmethod
    def observed(self, slots: Tensor, scores: Tensor, weights: Tensor, queries: int) -> Tensor:
        """Return what the selector makes of the attention that entries elsewhere received; (lanes, n) throughout. One
        that looks at keys and values is not shown those of entries elsewhere, and leaves their scores."""

    @abstractmethod
    def ranks(self, slots: Tensor, scores: Tensor) -> Tensor:
        """Return the ranks of entries elsewhere, (lanes, n) float32; -inf where a slot is -1."""

    @abstractmethod
    def lowest(self, count: int) -> Tensor:
        """Return the ranks of those entries of every lane that would be evicted first, (lanes, ``count``) float32,
        ascending: -inf for an empty column, inf where a lane has no more."""

    @abstractmethod
    def swap_in(self, slots: Tensor, keys: Tensor, values: Tensor, scores: Tensor | None = None) -> None:
        """Make entries resident: ``slots`` (lanes, n), none of which is, -1 for none; keys and values (lanes, n, dim);
        scores (lanes, n), by default those of new entries. In each lane they take empty columns, then those of the
        entries that rank lowest, which leave; there can be no more of them than the lane has columns."""


# -- what becomes of it -------------------------------------------------------------------------------


class EvictedStore(Part):
    """What became of the entries of one layer that left. All it needs to know of the layer is what it is handed.

    keeps: it takes what leaves; without, nothing is even gathered. listens: it learns the attention that its pieces
    received, and entries come with their scores. merges: what leaves is put into resident entries, which then stand for
    several tokens. makes_room: nobody leaves; :meth:`make_room` merges entries until new ones fit. watches: entries are
    scored by the attention of the last step where the selector scores them by none.
    """

    keeps: ClassVar[bool] = True
    listens: ClassVar[bool] = False
    watches: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    makes_room: ClassVar[bool] = False
    taken: int | None = None  # entries so far, where they come in the order of the text

    @property
    def compressed_bytes(self) -> int:
        """Bytes allocated for entries."""
        return 0

    def take(self, left: Evicted, resident: WorkingSet) -> None:
        """Take entries that leave; ``resident`` is what stays."""

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        """Yield what comes back for ``query`` (lanes, heads, queries, dim), of ``length`` slots so far."""
        return iter(())

    def described(self, query: Tensor) -> Sequence[Described] | None:
        """Return the pieces that :meth:`pieces` would yield as the kernel reads them, each of which every later query
        sees all of; None where one is anything else."""
        return None if self.keeps else ()

    def observe(self, weights: Sequence[Tensor], queries: int, resident: WorkingSet) -> None:
        """Learn what each piece that :meth:`pieces` just yielded received of a step: (lanes, n) float32 for each, of
        ``queries`` queries, as the selector learns of those that are resident; where it asks for nothing, of all.
        Called for each reader of the layer, only where it :attr:`listens`."""

    def swap(self, resident: WorkingSet, length: int) -> None:
        """Bring entries back, if there is reason to; called when a step has settled, only where it :attr:`listens`."""

    def forget(self, slots: Tensor) -> None:
        """Forget entries that are resident again from elsewhere: ``slots`` (lanes, n), -1 for none."""

    def begin(self, resident: WorkingSet) -> None:
        """Prepare for a step that attends before its entries are settled."""

    def attended(self, step: Step, output: Tensor, resident: WorkingSet) -> None:
        """Learn a step's ``output`` (lanes, heads, queries, value_dim); entries attended first are not settled yet."""

    def make_room(self, bank: Any, new: Any, resident: WorkingSet) -> None:
        """Keep new entries of a bank, merging until there is room; only where it :attr:`makes_room`."""

    def look(self, layer: Any, step: Step) -> Tensor:
        """Return attention of a pass that keeps nothing, (lanes, heads, queries, value_dim), and note what entries
        received; only where chunks are read more than once (:mod:`kvkeep.stores.lookahead`)."""
        raise NotImplementedError

    def settled(self, observed: bool, resident: WorkingSet) -> None:
        """Called when new entries have been kept; ``observed``: with the attention that they received."""

    def merged(self) -> tuple[int, int]:
        """Return how many pairs of entries were merged, and for how many of them a weight had to be clamped."""
        return 0, 0

    def states(self, lanes: int, length: int) -> Tensor:
        """Return what became of the entry of each slot, had it left: (lanes, ``length``) int8 codes of
        :class:`EntryState`, on the CPU."""
        return torch.full((lanes, length), EntryState.DROPPED, dtype=torch.int8)

    def truncate(self, length: int, resident: WorkingSet) -> None:
        """Forget the slots from ``length`` on; ``resident`` did already, and the ledger still knows them."""

    def select(self, lanes: Tensor) -> None:
        """Make the lanes those of an index."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` gave."""


class Checkpoint(ABC):
    """What entries are rebuilt from, for all layers of one cache: a residual may serve several layers.

    spec: what was asked for. where: the place it is in. capacity: entries it may hold, None: no end. by_token: it is
    kept for every token, and not for entries that left. copies: a recall is a copy at most, and computes nothing.
    picks: single entries come back without all those before them. replays: layers are run again, by the model's own
    masks.
    """

    spec: Any
    where: str
    capacity: int | None
    by_token: bool
    copies: bool
    picks: bool
    replays: bool

    @property
    def reads_ids(self) -> bool:
        """Whether the ledger's ids are part of what entries are rebuilt from."""
        return False

    def begin_forward(self, from_ids: bool, known: int) -> None:
        """Prepare for new tokens, after the ``known`` slots before them; ``from_ids``: they came as ids."""

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Take the residual entering a layer, (batch, new, hidden)."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take entries (lanes, n, dim) of a layer, in order."""

    @abstractmethod
    def pieces(self, layer: int, stop: int, lazy: bool = False) -> Iterator[Piece]:
        """Yield exact keys and values of the first ``stop`` entries, in order. ``lazy``: pieces may also be ones that
        know their attention without keys and values."""

    def described(self, layer: int, stop: int) -> Described | None:
        """Return the first ``stop`` entries as the kernel reads them where they lie; None where it cannot."""
        return None

    @abstractmethod
    def pick(self, layer: int, lane: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return exact keys and values (n, dim) of single entries: ``lane`` (n,) and ``slot`` (n,), none lost."""

    @abstractmethod
    def first(self, layer: int) -> int:
        """Return the first entry that is still there; those before are lost."""

    @abstractmethod
    def length(self, layer: int) -> int:
        """Return how many entries came, those that are lost included."""

    def truncate(self, layer: int, length: int) -> None:
        """Forget what belongs to a layer's entries from ``length`` on."""

    def truncate_residuals(self, length: int) -> None:
        """Forget what is kept for each token from slot ``length`` on."""

    @abstractmethod
    def select(self, index: Tensor, lanes: Any) -> None:
        """Make the batch the rows of ``index``; ``lanes``: a function from KV heads to the index of lanes."""

    @abstractmethod
    def stores(self) -> Iterator[tuple[str, Rows]]:
        """Yield every store of rows with a name, for counting, saving and moving."""

    def expect(self, names: set[str]) -> None:
        """Make room for the stores called ``names``, about to be filled from a file."""


@dataclass(frozen=True)
class Site:
    """Where a part is put to work: one full layer of one cache.

    entries: the layer's budget. budgets: what of it is resident, of each KV head; one number: of each of them.
    in_order: entries leave in the order of the text, in all heads alike. first: it is the first full layer of the
    cache, which accounts for and moves what all of them share. readers: modules that read its entries.
    """

    layer: LayerGeometry
    geometry: ModelGeometry
    model: Any
    entries: int
    budgets: Sequence[int]
    in_order: bool
    page: int
    readers: int
    first: bool
    ledger: Ledger
    meter: Meter
    device: torch.device
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class Held:
    """Bytes that a part of one layer will hold, for all its KV heads of one row; ``workspace``: for a moment;
    ``shrunk``: by how much less it is than it was before. entries: of one KV head that attention can still read
    there."""

    compressed: int = 0
    bookkeeping: int = 0
    workspace: int = 0
    entries: int = 0
    shrunk: int = 0


class Reading(NamedTuple):
    """What attention to entries that a store holds is counted as, beside attending to them.

    entries: of those that there are, at most; None: all. bits: of codes that are multiplied or written out. rank:
    numbers of which each key and each value is made. segment: entries that one bound is for. estimated: they are looked
    up in a sketch.
    """

    entries: int | None = None
    bits: int = 0
    rank: int = 0
    segment: int = 0
    estimated: bool = False


@dataclass(frozen=True)
class Fate(ABC):
    """What becomes of entries that leave. A frozen dataclass whose fields are its parameters.

    label: in a word; source: the paper; returns: how what left comes back by itself; exactness: its promise;
    checkpoints: what leaves is kept in a checkpoint, whose options the cache then takes; records: ids and positions of
    all tokens are needed. work: whose overhead a step has (:data:`kvkeep.plan.machine.LAYERS`), the selector's where it
    is none of those. leaves: who leaves, where that is the fate's to say. readings: how often a chunk of a prompt is
    read, passes back through the model included; gradients: there are such. keeps, merges, makes_room: as of the store
    it makes.
    """

    label: ClassVar[str]
    source: ClassVar[str] = ""
    leaves: ClassVar[str] = ""
    returns: ClassVar[str] = "never"
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    checkpoints: ClassVar[bool] = False
    records: ClassVar[bool] = False
    work: ClassVar[str] = ""
    readings: ClassVar[int] = 1
    gradients: ClassVar[bool] = False
    keeps: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    makes_room: ClassVar[bool] = False

    @property
    def kind(self) -> str | None:
        """The kind of checkpoint that the method's name says, None where the cache's options do."""
        return None

    @property
    def reading(self) -> Reading:
        """What reading its store takes, for the planner."""
        return Reading()

    @property
    def swaps(self) -> bool:
        """Whether entries may be resident again as what they are estimated to be."""
        return False

    def refuses(self, selector: Selector) -> str | None:
        """Return why it cannot be the fate of what ``selector`` lets go, in a sentence, or None."""
        return None

    def resident(self, entries: int) -> int:
        """Return how many of a budget's ``entries`` are for resident ones."""
        return entries

    def chunk(self, entries: int, chunk: int) -> int:
        """Return how many tokens of a prompt to take at a time by default, ``chunk`` or fewer."""
        return chunk

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        """Raise where it cannot be done within ``entries`` (BudgetError) or with heads of such widths
        (UnsupportedModelError)."""
        if not entries and self.exactness is not Exactness.EXACT:
            raise BudgetError(f"A budget of 0 leaves '{name}' nothing to attend to; only with checkpoints it would.")

    def check(self, model: Any, geometry: ModelGeometry) -> None:
        """Raise UnsupportedModelError where it cannot be done on this model."""

    def check_chunk(self, name: str, entries: int, chunk: int) -> None:
        """Raise BudgetError where a ``chunk`` of a prompt is too long for ``entries``."""

    def shared(self, geometry: ModelGeometry, ledger: Ledger) -> Any:
        """Return what the stores of all layers share, None for nothing."""
        return None

    @abstractmethod
    def store(self, site: Site, shared: Any) -> EvictedStore:
        """Return the store of one layer."""

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> Held:
        """Return the bytes that the store of a layer will hold, within a budget of ``entries``, once so many entries
        of every lane ``left`` by and by. The rule it allocates by."""
        return Held()


# -- how it comes back --------------------------------------------------------------------------------


class Reader(Part):
    """How the attention of one layer reads what is not resident, and what it keeps for that.

    certificate: what it can have left out, None where that is nothing.
    """

    certificate: Any = None
    waiting: int = 0  # slots that came in and wait for a decision

    @abstractmethod
    def attend(self, layer: Any, step: Step) -> Tensor:
        """Return attention over the past and what is new, (lanes, heads, queries, value_dim); settle the new entries
        when the layer's last module has read them."""

    def arrive(self, layer: Any, keys: Tensor, values: Tensor) -> None:
        """New entries (lanes, n, dim) are in hand."""
        layer.resident.arrive(keys, values)

    def settling(self, layer: Any, keys: Tensor, values: Tensor) -> None:
        """New entries are about to be kept."""

    def commit(self, layer: Any, count: int, agreed: bool) -> None:
        """Keep the first ``count`` of the entries that wait for the round's decision; ``agreed``: all drafts were
        right."""

    def choose(self, layer: Any) -> None:
        """Choose the resident entries anew, before the round drafts again."""

    def recall(self, layer: Any, slots: Tensor, limit: int) -> int:
        """Make those of ``slots`` (n,) resident that can come back, the first ``limit`` of every lane; return how many
        that were in all."""
        return 0

    def past(self, layer: Any) -> Iterator[Piece]:
        """Yield the entries of all slots, each once; those that were evicted as they come back."""
        yield from layer.resident.pieces()
        yield from layer.evicted.pieces(torch.empty(0, device=layer.device), layer.resident, layer.length)

    def states(self, layer: Any, evicted: Tensor) -> Tensor:
        """Return what became of evicted entries, (lanes, slots) codes, given what the store says of them."""
        return evicted

    def truncate(self, layer: Any, length: int) -> None:
        """Forget the slots from ``length`` on."""

    def select(self, layer: Any, lanes: Tensor) -> None:
        """Make the lanes those of an index."""

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave, as of ``length`` slots."""


@dataclass(frozen=True)
class Recall(ABC):
    """How entries come back. A frozen dataclass whose fields are its parameters.

    label: in a few words, empty where methods do not name it; source: the paper; exactness: the promise, None: the
    fate's. backed: it needs every entry in a checkpoint. reads_single: it brings back single entries, so none may be
    merged into others. place: where its checkpoints are by default, None: as for every method. loses: it goes on where
    a checkpoint of limited capacity has lost entries. drafts: it decodes in rounds of draft and verify.
    """

    label: ClassVar[str]
    source: ClassVar[str] = ""
    exactness: ClassVar[Exactness | None] = None
    backed: ClassVar[bool] = True
    reads_single: ClassVar[bool] = False
    place: ClassVar[str | None] = None
    loses: ClassVar[bool] = False
    drafts: ClassVar[bool] = False

    def tail(self, entries: int) -> int:
        """Return how many of a budget's ``entries`` are for tokens that wait for a decision, 0 where none does."""
        return 0

    def entries(self, away: int) -> int:
        """Return how many of ``away`` entries of a KV head come back for a step, at most."""
        return away

    def swapped(self, away: int) -> int:
        """Return how many of ``away`` entries of a KV head may be resident after a step, in place of as many others."""
        return 0

    @property
    def redecoded(self) -> int:
        """How many tokens of a row that left in a pass are decoded again after it, at most, from the ledger's ids."""
        return 0

    @abstractmethod
    def reader(self, site: Site, round: Any) -> Reader:
        """Return the reader of one layer; ``round``: of draft and verify, None where there is none."""

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int, away: int) -> Held:
        """Return what the reader of a layer will hold for ``tokens`` tokens of a row, ``away`` of them not resident."""
        return Held()
