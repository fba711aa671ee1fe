"""Seconds of a step and of a prompt, from counts of the work and a machine's rates. Pure functions.

The planner knows no method. A pass is matrices (2 operations a row and element), attention (by the entries that parts
say they read), simple operations on each row, and a fixed time for each layer. Evicted entries come from their place,
or are rebuilt, on top of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.geometry import LayerGeometry
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.machine import Machine, at
from kvkeep.plan.shape import Shape
from kvkeep.plan.sizes import Sizes
from kvkeep.policies.request import PAGE

# How often a simple operation reads or writes an element, counted in transformers' modules.
NORM, ROTATION, ACTIVATION, SUM = 7, 10, 5, 3
SAMPLES = 16
"""Chunks of a prompt that are worked out; they stand for as many others each."""


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of one session."""

    step: float
    """Seconds of a token."""
    prefill: float
    """Seconds of the prompt."""
    drafts: int = 0
    """Tokens drafted in a round, for methods that draft."""
    own: float = 0.0
    """Seconds of the step that do not depend on the session's past: weights, logits, fixed times."""
    moved: float = 0.0
    """Bytes that come from another place for a token."""


def cost(
    shape: Shape, candidate: Candidate, held: Sizes, machine: Machine, acceptance: float, sessions: int = 1
) -> Cost:
    """Return what ``candidate`` takes with ``held`` in the cache. acceptance: the share of drafted tokens that stay.
    sessions: how many like it share every pass of a step, which then yields a token of each; the prompt is of one."""
    work = _Work(shape, candidate, held, machine, sessions)
    prefill = work.prefill()
    if not candidate.method.recall.drafts:
        return Cost(work.step(), prefill, 0, work.own(1), work.moved)
    drafts, step = verified(work.draft(), work.exact, acceptance)
    tokens = yielded(drafts, acceptance)
    return Cost(step, prefill, drafts, (drafts * work.own(1) + work.own(drafts + 1)) / tokens, work.moved / tokens)


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


class _Work:
    """The work of one cache; a step is one pass for as many of its kind as there are ``sessions``."""

    def __init__(self, shape: Shape, candidate: Candidate, held: Sizes, machine: Machine, sessions: int = 1) -> None:
        self.shape, self.candidate, self.held, self.machine, self.sessions = shape, candidate, held, machine, sessions
        self.geometry = geometry = shape.geometry
        self.layers, self.owners = len(geometry.layers), geometry.full_layers
        self.full = [layer for layer in geometry.layers if geometry.layers[layer.source].kind == "full"]
        self.kinds, self.full_kinds = self._kinds(geometry.layers), self._kinds(self.full)
        self.fate, self.recall = candidate.method.store_fate, candidate.method.recall
        anchors = geometry.residual_anchors(min(candidate.stride, self.layers)) if candidate.stride else []
        self.anchors = [anchor for anchor in anchors if anchor]
        self.entry = len(self.anchors) * geometry.residual_bytes_per_token or geometry.full_bytes_per_token
        """Bytes of one token in a checkpoint."""
        if candidate.stride and not self.anchors:
            self.entry = 0

    def _kinds(self, layers: Sequence[LayerGeometry]) -> Counter[tuple[int, int, int | None]]:
        """Count layers by KV heads, elements of a key and a value, and window."""
        sources = [(self.geometry.layers[layer.source], layer.window) for layer in layers]
        return Counter((layer.kv_heads, layer.key_dim + layer.value_dim, window) for layer, window in sources)

    # -- passes ---------------------------------------------------------------------------------------

    def step(self) -> float:
        """Seconds of one token of each session."""
        resident = self.own(1) if self.recall.reads_all else self.draft()
        return resident + self.sessions * self.recalled(1, self.held.away)

    def draft(self) -> float:
        """Seconds of one step over the resident entries alone."""
        return self.own(1) + self.sessions * self.attended(1, min(self.held.exact, self.held.tokens))

    def own(self, rows: int) -> float:
        """Seconds of a pass of ``rows`` rows of each session without their pasts."""
        return self.fixed(self.sessions * rows) + self.head(self.sessions * rows)

    @property
    def exact(self) -> list[float]:
        """Seconds of an exact pass of 1, 2, ... rows of each session over all entries."""
        assert self.held.budget is not None
        longest = min(self.recall.tail(self.held.budget), self.held.chunk)
        tokens = self.held.tokens
        return [self.own(rows) + self.sessions * self.recalled(rows, tokens) for rows in range(1, longest + 1)]

    @property
    def moved(self) -> float:
        """Bytes that come from another place for one step, or one round."""
        if self.candidate.where in (None, "device") or not self.candidate.method.checkpoints:
            return 0.0
        away = self.held.away
        return float(self.entry * (min(away, self.recall.entries(away)) if self.recall.reads_single else away))

    def prefill(self) -> float:
        """Seconds of the prompt: one pass where everything stays, else one for each chunk."""
        tokens = self.held.tokens
        if self.candidate.keeps_all:
            return self.fixed(tokens) + self.head(1) + self.arriving(tokens)
        chunk = min(self.held.chunk, tokens)
        count = tokens / chunk
        samples = min(SAMPLES, -(-tokens // chunk))
        pasts = [int((number + 0.5) * count / samples) * chunk for number in range(samples)]
        mean = sum(self.chunk(past, chunk) for past in pasts) / samples
        return self.fate.readings * count * mean + self.head(1)

    def chunk(self, past: int, rows: int) -> float:
        """Seconds of ``rows`` tokens of a prompt after ``past``."""
        resident = min(past, self.held.exact)
        seconds = self.fixed(rows) + self.arriving(rows) + self.attended(rows, resident)
        if self.held.away:
            recall = self.everything if self.recall.backed else self.recalled
            seconds += recall(rows, past - resident)
        if self.candidate.method.checkpoints and (self.recall.backed or past + rows > self.held.exact):
            seconds += self.written(rows)
        if not self.candidate.method.selector.in_order:
            seconds += self.ranked(resident, rows)
        return seconds

    # -- parts of a pass --------------------------------------------------------------------------------

    def fixed(self, rows: int) -> float:
        """Seconds of a pass beside attention and logits."""
        bounded = not self.candidate.keeps_all
        seconds = self.matrices(rows) + self.layers * (self.machine.bounded_s if bounded else self.machine.layer_s)
        if rows == 1:  # simple operations of one row are part of the fixed time
            return seconds
        hidden, layer = self.geometry.hidden_size, self.owners[0]
        rotated = self.geometry.attention_heads * layer.key_dim + layer.kv_heads * layer.key_dim
        elements = (2 * NORM + 2 * SUM) * hidden + ROTATION * rotated + ACTIVATION * self.shape.inner
        return seconds + self.layers * self.simple(rows * elements)

    def matrices(self, rows: float) -> float:
        """Seconds of all layers' matrices; a mixture's experts have the rows that chose them."""
        touched = self.shape.touched(rows)
        mean = rows * self.shape.active / touched
        return self.layers * self.machine.multiply(mean, self.geometry.hidden_size, touched)

    def head(self, rows: int) -> float:
        """Seconds of the logits of ``rows`` rows."""
        return self.machine.multiply(rows, self.geometry.hidden_size, self.shape.head)

    def simple(self, elements: float) -> float:
        """Seconds to read or write so many elements once."""
        return elements * self.geometry.dtype_bytes / self.machine.elementwise

    def arriving(self, tokens: int) -> float:
        """Seconds of attention of ``tokens`` new tokens among each other, in full layers."""
        heads, rate = self.geometry.attention_heads, at(self.machine.causal, tokens)
        return sum(count * tokens * tokens * heads * width / rate for (_, width, _), count in self.full_kinds.items())

    def attended(self, rows: int, entries: float, full_only: bool = False) -> float:
        """Seconds of attention to ``entries`` in all layers; windows see no more than they hold."""
        heads, seconds = self.geometry.attention_heads, 0.0
        for (kv_heads, width, window), count in (self.full_kinds if full_only else self.kinds).items():
            pairs = rows * (entries if window is None else min(entries, window))
            seconds += count * 2 * pairs * heads * width / at(self.machine.attention, rows * heads / kv_heads)
        return seconds

    def recalled(self, rows: int, away: float) -> float:
        """Seconds to bring back and attend what a step reads of ``away`` evicted entries."""
        if away <= 0:
            return 0.0
        if not self.recall.reads_single:
            if self.recall.backed or self.fate.checkpoints:
                return self.everything(rows, away)
            return self.attended(rows, self.fate.read(int(min(away, self.held.stored))), full_only=True)
        count = min(away, self.recall.entries(int(away)))
        source = self.rebuilt(min(away, count * self.owners[0].kv_heads)) if self.candidate.stride else self.read(count)
        stored = self.fate.read(int(min(away, self.held.stored)))
        return source + self.attended(rows, count + stored, full_only=True)

    def everything(self, rows: int, away: float) -> float:
        """Seconds to bring back and attend all of ``away`` entries, page by page."""
        if away <= 0:
            return 0.0
        source = self.rebuilt(away) if self.candidate.stride else self.read(away)
        pages = len(self.owners) * (away / PAGE + 2)  # at each end a part of one
        return source + self.attended(rows, away, full_only=True) + pages * self.machine.page_s

    def read(self, tokens: float) -> float:
        """Seconds to bring ``tokens`` tokens of a checkpoint to where they are attended."""
        machine, where, nbytes = self.machine, self.candidate.where, tokens * self.entry
        cold = self.held.disk > machine.host_bytes // 2
        disk = nbytes / (machine.disk_cold if cold else machine.disk) if where == "disk" else 0.0
        if machine.shared:  # mapped pages are attended where they lie
            return disk if cold else 0.0
        return disk + (0.0 if where == "device" else nbytes / (machine.link or machine.copy))

    def rebuilt(self, away: float) -> float:
        """Seconds to make the keys and values of ``away`` tokens from residuals, in all full layers."""
        geometry, layer, page = self.geometry, self.owners[0], min(PAGE, int(away) or 1)
        stride = min(self.candidate.stride, self.layers)
        anchors = len(geometry.residual_anchors(stride))
        elements = NORM * geometry.hidden_size + ROTATION * (layer.kv_heads + 1) * layer.key_dim
        one = self.machine.multiply(page, geometry.hidden_size, geometry.hidden_size * layer.entry_elements)
        pages = -(-away // page)
        seconds = self.read(away)
        seconds += pages * (len(self.owners) if stride == 1 else anchors) * (one + self.simple(page * elements))
        if stride == 1:
            return seconds
        through = self.fixed(page) + self.arriving(page) + self.attended(page, away / 2)
        return seconds + pages * through * (self.layers - anchors) / self.layers

    def written(self, rows: int) -> float:
        """Seconds to put a chunk's checkpoints where they belong."""
        machine, where, nbytes = self.machine, self.candidate.where, float(rows * self.entry)
        seconds = nbytes / machine.copy
        if where == "disk":
            seconds += nbytes / machine.disk_write
        if machine.link is not None and where != "device":
            seconds += nbytes / machine.link
        return seconds

    def ranked(self, resident: int, rows: int) -> float:
        """Seconds to score a chunk's entries beside the resident ones, and to move those that stay."""
        window = self.candidate.method.selector.observation_window
        queries = rows if window is None else min(window, rows)
        scores = self.attended(queries, resident + rows, full_only=True) if queries else 0.0
        return scores + self.simple(6 * rows * sum(layer.entry_elements for layer in self.owners))
