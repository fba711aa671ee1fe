"""Seconds: what a step and a prompt take, from counts of the work and a machine's rates. Pure functions.

A pass of r rows is the sum of its matrices (2 r operations an element, at the rate of r rows), of attention (by the
entries it reads), of simple operations on r rows (norms, rotation, activation), and of an overhead for each layer. What
left is read from its place or rebuilt on top of that. A prompt is a pass in one piece, or one pass for each chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvkeep.geometry import LayerGeometry
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.machine import LAYERS, Machine, at
from kvkeep.plan.shape import Shape
from kvkeep.plan.sizes import Sizes
from kvkeep.policies.request import PAGE
from kvkeep.stores.bounds import PAGE as BOUNDED

# How often a simple operation reads or writes an element of what it is about, counted in transformers' modules.
NORM, ROTATION, ACTIVATION, SUM = 7, 10, 5, 3
Alike = Counter[tuple[int, int, int | None]]
"""How many layers have so many KV heads, elements of a key and a value, and so much that they see (None: all)."""

SAMPLES = 24
"""Chunks of a prompt that are worked out; those between lie on straight lines."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a step (of a token, where several come of one round) and of reading the prompt. drafts: tokens drafted
    in a round, where methods do that. own: seconds of the step that a session without a past would take, too: weights,
    logits, and all else that is not attention. moved: bytes that one session brings from another place for a token."""

    step: float
    prefill: float
    drafts: int = 0
    own: float = 0.0
    moved: float = 0.0


def cost(
    shape: Shape, candidate: Candidate, held: Sizes, machine: Machine, acceptance: float, sessions: int = 1
) -> Cost:
    """Return what ``candidate`` takes with ``held`` in the cache. acceptance: the share of drafted tokens that stay.
    sessions: how many alike share every pass of a step, which then yields a token of each; the prompt is of one."""
    work = _Work(shape, candidate, held, machine, sessions)
    prefill = work.prefill()
    if not candidate.method.recall.drafts:
        return Cost(work.step(), prefill, 0, work.own(1), work.moved)
    drafts, step = verified(work.draft(), work.exact, acceptance)
    own = drafts * work.own(1) + work.own(drafts + 1, machine.overhead["kv-direct"])
    tokens = yielded(drafts, acceptance)
    return Cost(step, prefill, drafts, own / tokens, work.moved / tokens)


def rebuilding(shape: Shape, candidate: Candidate, held: Sizes, machine: Machine) -> float:
    """Return the seconds to make keys and values of all tokens in ``held`` from the residuals of ``candidate``, which
    come from its place."""
    return _Work(shape, candidate, held, machine).rebuilt(held.tokens)


def yielded(drafts: int, acceptance: float) -> float:
    """Return the tokens of a round: the drafts up to the first that is refused, and one of the exact pass itself."""
    return drafts + 1 if acceptance == 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def verified(draft: float, exact: list[float], acceptance: float) -> tuple[int, float]:
    """Return how many drafts a round should have, and the seconds of a token then.

    draft: seconds of one draft step. exact: those of an exact pass of 1, 2, ... rows. A round of k drafts and one exact
    pass of k + 1 rows yields (1 - a^(k + 1)) / (1 - a) tokens for an acceptance a.
    """

    def seconds(drafts: int) -> float:
        return (drafts * draft + exact[drafts]) / yielded(drafts, acceptance)

    best = min(range(1, len(exact)), key=seconds)
    return best, seconds(best)


def overhead_of(candidate: Candidate) -> str:
    """Return the name of what a layer-step of ``candidate`` takes beside its parts, as machines name it."""
    method = candidate.method
    if candidate.keeps_all:
        return "paged" if method.selector.layout == "paged" else "full"
    if method.selector.in_order:
        return "kv-direct"
    if method.recall.reads_single:
        return "selective"
    if (work := method.store_fate.work) in LAYERS:
        return work
    return "watched" if method.selector.observation_window != 0 else "selected"


class _Work:
    """The parts of a pass, for one cache; a step is one for as many of its kind as there are ``sessions``."""

    def __init__(self, shape: Shape, candidate: Candidate, held: Sizes, machine: Machine, sessions: int = 1) -> None:
        self.shape, self.candidate, self.held, self.machine, self.sessions = shape, candidate, held, machine, sessions
        self.geometry = geometry = shape.geometry
        self.bytes = geometry.dtype_bytes
        self.layers = len(geometry.layers)
        self.full = [layer for layer in geometry.layers if geometry.layers[layer.source].kind == "full"]
        self.owners = geometry.full_layers
        self.alike, self.alike_full = (self._alike(layers) for layers in (geometry.layers, self.full))
        self.method = candidate.method
        self.fate, self.recall = self.method.store_fate, self.method.recall
        self.overhead = machine.overhead[overhead_of(candidate)]

    def _alike(self, layers: Sequence[LayerGeometry]) -> Alike:
        own = [(self.geometry.layers[layer.source], layer.window) for layer in layers]
        return Counter((layer.kv_heads, layer.key_dim + layer.value_dim, window) for layer, window in own)

    # -- whole passes -------------------------------------------------------------------------------

    def step(self) -> float:
        """Seconds of one token of each session after the prompt."""
        resident = self.own(1) if self.recall.reads_all else self.draft()
        return resident + self.sessions * self.recalled(1, self.held.away)

    def draft(self) -> float:
        """Seconds of one step over the resident entries and nothing else."""
        return self.own(1) + self.sessions * self.attended(1, min(self.held.exact, self.held.tokens))

    def own(self, rows: int, overhead: float | None = None) -> float:
        """Seconds of a pass of ``rows`` rows of each session that reads nothing of their pasts."""
        every = self.sessions * rows
        overhead = self.overhead if overhead is None else overhead
        return self.matrices(every) + rows * self.head(self.sessions) + self.around(every, overhead)

    @property
    def exact(self) -> list[float]:
        """Seconds of an exact pass of 1, 2, ... rows of each session over all entries, as they come from their place:
        the last token and the drafts that there is room for."""
        assert self.held.budget is not None
        most = min(self.recall.tail(self.held.budget), self.held.chunk)
        overhead = self.machine.overhead["kv-direct"]
        return [
            self.own(rows, overhead) + self.sessions * self.recalled(rows, self.held.tokens)
            for rows in range(1, most + 1)
        ]

    @property
    def moved(self) -> float:
        """Bytes that come from another place for one step of a session, or for one round."""
        away, stride = self.held.away, self.candidate.stride
        if self.candidate.where in (None, "device") or not self.method.checkpoints:
            return 0.0
        anchors = [anchor for anchor in self.geometry.residual_anchors(max(1, min(stride, self.layers))) if anchor]
        entry = len(anchors) * self.geometry.residual_bytes_per_token if stride else self.geometry.full_bytes_per_token
        return float(entry * (min(away, self.recall.entries(away)) if self.recall.reads_single else away))

    def prefill(self) -> float:
        """Seconds of the prompt."""
        held, tokens = self.held, self.held.tokens
        if self.candidate.keeps_all:
            kernels = sum(self.operations(layer, tokens, tokens, half=True) for layer in self.full)
            attention = kernels / at(self.machine.causal, tokens)
            return self.matrices(tokens) + self.head() + self.around(tokens, self.overhead) + attention
        chunk = min(held.chunk, tokens)
        count = -(-tokens // chunk)
        numbers = sorted({round(index * (count - 1) / max(1, SAMPLES - 1)) for index in range(SAMPLES)})
        times = [self.chunk(number * chunk, chunk) for number in numbers]
        total = times[-1]
        for (low, high), (first, last) in zip(pairwise(numbers), pairwise(times), strict=True):
            total += (high - low) * (first + last) / 2 + (first - last) / 2  # a trapezium without its right end
        return self.fate.readings * total * tokens / (count * chunk) + self.head()

    def chunk(self, past: int, rows: int) -> float:
        """Seconds of ``rows`` tokens of a prompt after ``past``."""
        held = self.held
        resident = min(past, held.exact)
        own = sum(self.operations(layer, rows, rows, half=True) for layer in self.full) / at(self.machine.causal, rows)
        base = self.matrices(rows) + self.around(rows, self.overhead) + own + self.attended(rows, resident)
        base += self.layers * self.machine.overhead["chunk"]
        if self.recall.backed:  # a chunk recalls everything
            base += self.whole(rows, past - resident) + self.written(rows)
            return base + self.chosen(resident, rows)
        base += self.recalled(rows, past - resident if held.away else 0)
        if self.method.selector.in_order:
            return base + (self.written(rows) if past + rows > held.exact else 0.0)
        return base + self.chosen(resident, rows)

    # -- the parts ----------------------------------------------------------------------------------

    def matrices(self, rows: float) -> float:
        """Seconds of all layers' matrices; a mixture's experts have the rows that chose them."""
        touched = self.shape.touched(rows)
        mean = rows * self.shape.active / touched
        return self.layers * self.machine.multiply(mean, self.geometry.hidden_size, touched)

    def head(self, rows: int = 1) -> float:
        """Seconds of the logits of ``rows`` rows."""
        return self.machine.multiply(rows, self.geometry.hidden_size, self.shape.head)

    def around(self, rows: int, overhead: float) -> float:
        """Seconds of what is neither matrices nor attention, in all layers."""
        hidden, layer = self.geometry.hidden_size, self.owners[0]
        query = self.geometry.attention_heads * layer.key_dim
        widths = {
            hidden: 2 * NORM + 2 * SUM,
            query + layer.kv_heads * layer.key_dim: ROTATION,
            self.shape.inner: ACTIVATION,
        }
        moved = sum(passes * self.simple(rows * width) for width, passes in widths.items())
        return self.layers * (overhead + (moved if rows > 1 else 0.0))

    def simple(self, elements: float) -> float:
        """Seconds to read or write so many elements once."""
        size = elements * self.bytes
        return self.machine.simple * size / at(self.machine.elementwise, size)

    def operations(self, layer: LayerGeometry, rows: float, entries: float, half: bool = False) -> float:
        """Operations of attention in one layer."""
        source = self.geometry.layers[layer.source]
        pairs = rows * entries / (2 if half else 1)
        return 2 * pairs * self.geometry.attention_heads * (source.key_dim + source.value_dim)

    def attended(self, rows: int, entries: float) -> float:
        """Seconds of attention to ``entries`` settled entries in all layers; windows see no more than they hold."""
        return self.seen(self.alike, rows, entries)

    def seen(self, alike: Alike, rows: int, entries: float) -> float:
        """The same in layers that are counted by what makes them take as long as each other."""
        heads, seconds = self.geometry.attention_heads, 0.0
        for (kv_heads, width, window), count in alike.items():
            pairs = rows * (entries if window is None else min(entries, window))
            seconds += count * 2 * pairs * heads * width / at(self.machine.attention, rows * heads / kv_heads)
        return seconds

    def recalled(self, rows: int, away: float) -> float:
        """Seconds until what is read of ``away`` entries that left has been brought back and attended, in all full
        layers."""
        if away <= 0:
            return 0.0
        seconds = 0.0
        if self.recall.reads_single:
            seconds += self.chosen_pages(rows, away)
        elif self.recall.backed or self.fate.checkpoints:
            return self.whole(rows, away)
        return seconds + self.stored(rows, min(away, self.held.stored))

    def whole(self, rows: int, away: float) -> float:
        """The same where all entries come back as they were."""
        if away <= 0:
            return 0.0
        attention = self.seen(self.alike_full, rows, away)
        if not self.candidate.stride:
            moved = not (self.machine.shared or self.candidate.where == "device")
            pieces = away / (PAGE if moved else 2 * PAGE) + 2
            size = away * self.geometry.full_bytes_per_token
            return attention + len(self.owners) * pieces * self.machine.overhead["piece"] + self.read(size)
        return attention + self.rebuilt(away)

    def chosen_pages(self, rows: int, away: float) -> float:
        """The same where bounds of all pages say which are recalled: for a step, whose overhead has the rest of it."""
        recalled = min(away, self.recall.entries(int(away)))
        bounds = sum(self.operations(layer, rows, away / BOUNDED) for layer in self.full)
        seconds = bounds / at(self.machine.attention, rows) + self.attended(rows, recalled)
        if self.candidate.stride:
            return seconds + self.rebuilt(min(away, recalled * self.owners[0].kv_heads))
        return seconds + self.read(recalled * self.geometry.full_bytes_per_token)

    def read(self, size: float) -> float:
        """Seconds to bring ``size`` bytes to where they are attended, beside attending to them."""
        machine, where = self.machine, self.candidate.where
        cold = self.held.disk > machine.host_bytes // 2
        disk = machine.disk_cold if cold else machine.disk
        if machine.shared:  # mapped pages are attended where they lie
            return size / disk if where == "disk" and cold else 0.0
        seconds = 0.0 if where == "device" else size / (machine.link or machine.copy)
        return seconds + (size / disk if where == "disk" else 0.0)

    def rebuilt(self, away: float) -> float:
        """Seconds to make the keys and values of ``away`` tokens from residuals, in all full layers."""
        geometry = self.geometry
        stride = min(self.candidate.stride, self.layers)
        anchors = geometry.residual_anchors(stride)
        page = min(PAGE, int(away) or 1)
        pages = -(-away // page)
        projections = len(self.owners) if stride == 1 else len(anchors)
        layer = self.owners[0]
        keys = (layer.kv_heads + 1) * layer.key_dim
        one = self.machine.multiply(page, geometry.hidden_size, geometry.hidden_size * layer.entry_elements)
        one += NORM * self.simple(page * geometry.hidden_size) + ROTATION * self.simple(page * keys)
        seconds = projections * pages * (one + self.machine.overhead["rebuilt"])
        size = len([anchor for anchor in anchors if anchor]) * away * geometry.residual_bytes_per_token
        seconds += self.read(size)
        if stride == 1:
            return seconds
        passed = self.layers - len(anchors)  # layers that all residuals are taken through
        whole = self.matrices(page) + self.around(page, self.machine.overhead["full"])
        own = sum(self.operations(layer, page, page, half=True) for layer in self.full) / at(self.machine.causal, page)
        past = self.attended(page, away / 2)
        return seconds + pages * (whole + own + past) * passed / self.layers

    @property
    def elements(self) -> int:
        """Elements of one token's entries in all full layers."""
        return sum(layer.entry_elements for layer in self.owners)

    def stored(self, rows: int, entries: float) -> float:
        """Seconds to attend to ``entries`` of what the fate holds, in the form that it has them in."""
        if not entries:
            return 0.0
        reading, seconds = self.fate.reading, 0.0
        if reading.segment:
            bounds = sum(self.operations(layer, rows, entries / reading.segment) for layer in self.full)
            seconds += bounds / at(self.machine.attention, rows)
        entries = min(entries, reading.entries or entries)
        if reading.bits:
            coded = self.machine.coded
            folded, dense, encoded = coded[min(coded, key=lambda bits: abs(bits - reading.bits))]
            if rows <= 8:
                return seconds + folded * entries * self.elements
            seconds += (dense * entries + encoded * rows) * self.elements
        if reading.rank:
            layer = self.owners[0]
            seconds += self.machine.multiply(256, 1, entries * reading.rank * self.elements / 256)
            seconds += ROTATION * len(self.owners) * self.simple(entries * layer.kv_heads * layer.key_dim)
        if reading.estimated:
            seconds += self.machine.overhead["estimate"] * entries * self.elements
        return seconds + self.attended(rows, entries)

    def written(self, rows: int) -> float:
        """Seconds to put a chunk's checkpoints where they belong."""
        where, stride = self.candidate.where, self.candidate.stride
        if not stride:
            size = float(rows * self.geometry.full_bytes_per_token)
        else:
            anchors = [one for one in self.geometry.residual_anchors(min(stride, self.layers)) if one]
            size = float(rows * len(anchors) * self.geometry.residual_bytes_per_token)
        machine = self.machine
        seconds = size / machine.copy
        if where == "disk":
            seconds += size / machine.disk_write
        if machine.link is not None and where != "device":
            seconds += size / machine.link
        return seconds

    def chosen(self, resident: int, rows: int) -> float:
        """Seconds to let a chunk's entries compete with those held."""
        window = self.method.selector.observation_window
        queries = rows if window is None else min(window, rows)
        heads = self.geometry.attention_heads
        scores = len(self.full) * heads * queries * (resident + rows) * self.machine.score
        moved = 6 * sum(self.simple(rows * layer.entry_elements) for layer in self.owners)
        return scores + moved
