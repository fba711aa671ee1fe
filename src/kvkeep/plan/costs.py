"""Predicts the seconds of a step and of a prompt from counts of the work and a machine's rates. Pure functions.

The cost model contains no method's name. It sums four times of a pass: matrices (2 operations per row and element),
attention (to the entries that the method's parts declare), elementwise operations on each row, and a fixed time per
layer. It adds the time to read evicted entries from their place, or to rebuild them.
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

# How often elementwise operations read or write an element, counted in transformers' modules.
NORM, ROTATION, ACTIVATION, SUM = 7, 10, 5, 3
SAMPLES = 16
"""Chunks of a prompt whose time is computed; each represents an equal share of all chunks."""


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of one session."""

    step: float
    """Seconds of one decoded token."""
    prefill: float
    """Seconds of the prompt."""
    drafts: int = 0
    """Tokens drafted in a round, by methods that draft."""
    fixed: float = 0.0
    """Seconds of the step that are independent of the length of the text: weights, logits, fixed times."""
    moved: float = 0.0
    """Bytes read from another place for one token."""


def cost(
    shape: Shape, candidate: Candidate, size: Sizes, machine: Machine, acceptance: float, sessions: int = 1
) -> Cost:
    """Return the cost of ``candidate`` with a cache of ``size``.

    acceptance: share of drafted tokens that are accepted. sessions: number of equal sessions that share every pass of a
    step; the step then yields a token for each. The prompt is that of one session.
    """
    work = Work(shape, candidate, size, machine, sessions)
    prefill = work.prefill()
    if not candidate.method.recall.drafts:
        return Cost(work.step(), prefill, 0, work.fixed(1), work.moved)
    drafts, step = verified(work.draft(), work.exact_passes(), acceptance)
    tokens = tokens_of_round(drafts, acceptance)
    return Cost(step, prefill, drafts, (drafts * work.fixed(1) + work.fixed(drafts + 1)) / tokens, work.moved / tokens)


def tokens_of_round(drafts: int, acceptance: float) -> float:
    """Return the tokens of a round: the accepted drafts, and one token of the exact pass."""
    return drafts + 1 if acceptance == 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def verified(draft: float, exact: list[float], acceptance: float) -> tuple[int, float]:
    """Return the best number of drafts in a round, and the resulting seconds of a token.

    draft: seconds of one draft step. exact: seconds of an exact pass of 1, 2, ... rows. A round of k drafts and one
    exact pass of k + 1 rows yields (1 - a^(k + 1)) / (1 - a) tokens for an acceptance a.
    """

    def seconds(drafts: int) -> float:
        return (drafts * draft + exact[drafts]) / tokens_of_round(drafts, acceptance)

    best = min(range(1, len(exact)), key=seconds)
    return best, seconds(best)


class Work:
    """The work of one cache. A step is one pass for all ``sessions``, each with an equal cache."""

    def __init__(self, shape: Shape, candidate: Candidate, size: Sizes, machine: Machine, sessions: int = 1) -> None:
        self.shape, self.candidate, self.size, self.machine, self.sessions = shape, candidate, size, machine, sessions
        self.geometry = geometry = shape.geometry
        self.fate, self.recall = candidate.method.store_fate, candidate.method.recall
        self.layers, self.owners = len(geometry.layers), geometry.full_layers
        self.kinds = self._kinds(geometry.layers)
        self.full_kinds = self._kinds([one for one in geometry.layers if geometry.layers[one.source].kind == "full"])
        self.stride = min(candidate.stride, self.layers)
        self.anchors = geometry.residual_anchors(self.stride) if self.stride else ()
        residuals = sum(1 for anchor in self.anchors if anchor) * geometry.residual_bytes_per_token
        self.token_bytes = residuals if self.stride else geometry.full_bytes_per_token  # bytes in a checkpoint

    def _kinds(self, layers: Sequence[LayerGeometry]) -> Counter[tuple[int, int, int | None]]:
        """Count layers by KV heads, elements of a key and a value, and window."""
        sources = [(self.geometry.layers[layer.source], layer.window) for layer in layers]
        return Counter((layer.kv_heads, layer.key_dim + layer.value_dim, window) for layer, window in sources)

    # -- passes ---------------------------------------------------------------------------------------

    def step(self) -> float:
        """Return the seconds of a step: one token for each session."""
        resident = self.fixed(1) if self.recall.reads_all else self.draft()
        return resident + self.sessions * self.recalled(1, self.size.evicted)

    def draft(self) -> float:
        """Return the seconds of a draft step, which reads only the resident entries."""
        return self.fixed(1) + self.sessions * self.attended(1, min(self.size.exact, self.size.tokens))

    def fixed(self, rows: int) -> float:
        """Return the seconds of a pass of ``rows`` rows per session, without attention to earlier tokens."""
        return self.body(self.sessions * rows) + self.head(self.sessions * rows)

    def exact_passes(self) -> list[float]:
        """Return the seconds of exact passes over all entries, with 1, 2, ... rows per session."""
        assert self.size.budget is not None
        longest = min(self.recall.tail(self.size.budget), self.size.chunk)
        every = self.size.tokens
        return [self.fixed(rows) + self.sessions * self.recalled(rows, every) for rows in range(1, longest + 1)]

    @property
    def moved(self) -> float:
        """Bytes read from another place in one step, or one round."""
        if self.candidate.where in (None, "device") or not self.candidate.method.checkpoints:
            return 0.0
        return float(self.token_bytes * self.size.evicted)

    def prefill(self) -> float:
        """Return the seconds of the prompt: one pass if the cache keeps all entries, else one pass per chunk."""
        tokens = self.size.tokens
        if self.candidate.keeps_all:
            return self.body(tokens) + self.head(1) + self.arriving(tokens)
        chunk = min(self.size.chunk, tokens)
        count = tokens / chunk
        samples = min(SAMPLES, -(-tokens // chunk))
        starts = [int((number + 0.5) * count / samples) * chunk for number in range(samples)]
        mean = sum(self.chunk(start, chunk) for start in starts) / samples
        return self.fate.readings * count * mean + self.head(1)

    def chunk(self, start: int, rows: int) -> float:
        """Return the seconds of a chunk of ``rows`` tokens that begins at token ``start`` of the prompt."""
        resident = min(start, self.size.exact)
        seconds = self.body(rows) + self.arriving(rows) + self.attended(rows, resident)
        if self.size.evicted:
            recall = self.everything if self.recall.backed else self.recalled
            seconds += recall(rows, start - resident)
        if self.candidate.method.checkpoints and (self.recall.backed or start + rows > self.size.exact):
            seconds += self.written(rows)
        if not self.candidate.method.selector.in_order:
            seconds += self.ranked(resident, rows)
        return seconds

    # -- parts of a pass --------------------------------------------------------------------------------

    def body(self, rows: int) -> float:
        """Return the seconds of a pass without attention and logits. The pass reads each expert that a row chose, and
        multiplies it by those rows."""
        layer, hidden, touched = self.owners[0], self.geometry.hidden_size, self.shape.touched(rows)
        layer_s = self.machine.layer_s if self.candidate.keeps_all else self.machine.bounded_s
        matrices = self.machine.multiply(rows * self.shape.active / touched, hidden, touched)
        seconds = self.layers * matrices + self.layers * layer_s
        if rows == 1:  # elementwise operations of one row are part of the fixed time
            return seconds
        rotated = self.geometry.attention_heads * layer.key_dim + layer.kv_heads * layer.key_dim
        elements = (2 * NORM + 2 * SUM) * hidden + ROTATION * rotated + ACTIVATION * self.shape.inner
        return seconds + self.layers * self.simple(rows * elements)

    def head(self, rows: int) -> float:
        """Return the seconds of the logits of ``rows`` rows."""
        return self.machine.multiply(rows, self.geometry.hidden_size, self.shape.head)

    def simple(self, elements: float) -> float:
        """Return the seconds to read or write ``elements`` elements once."""
        return elements * self.geometry.dtype_bytes / self.machine.elementwise

    def arriving(self, tokens: int) -> float:
        """Return the seconds of causal attention among ``tokens`` new tokens, in full layers."""
        heads, rate = self.geometry.attention_heads, at(self.machine.causal, tokens)
        return sum(count * tokens * tokens * heads * width / rate for (_, width, _), count in self.full_kinds.items())

    def attended(self, rows: int, entries: float, full_only: bool = False) -> float:
        """Return the seconds of attention to ``entries`` in all layers. A sliding layer has at most its window."""
        heads, seconds = self.geometry.attention_heads, 0.0
        for (kv_heads, width, window), count in (self.full_kinds if full_only else self.kinds).items():
            pairs = rows * (entries if window is None else min(entries, window))
            seconds += count * 2 * pairs * heads * width / at(self.machine.attention, rows * heads / kv_heads)
        return seconds

    def recalled(self, rows: int, evicted: float) -> float:
        """Return the seconds to recall and attend those of ``evicted`` entries that a step reads."""
        if evicted <= 0:
            return 0.0
        stored = int(min(evicted, self.size.stored))
        if self.recall.backed or self.fate.checkpoints:
            return self.everything(rows, evicted)
        return self.attended(rows, stored, full_only=True)

    def everything(self, rows: int, evicted: float) -> float:
        """Return the seconds to recall and attend all ``evicted`` entries, page by page."""
        if evicted <= 0:
            return 0.0
        source = self.rebuilt(evicted) if self.stride else self.read(evicted)
        pages = len(self.owners) * (evicted / PAGE + 2)  # a partial page at each end
        return source + self.attended(rows, evicted, full_only=True) + pages * self.machine.page_s

    def read(self, tokens: float) -> float:
        """Return the seconds to move ``tokens`` tokens of a checkpoint to the device."""
        machine, where, nbytes = self.machine, self.candidate.where, tokens * self.token_bytes
        cold = self.size.disk > machine.host_bytes // 2
        disk = nbytes / (machine.disk_cold if cold else machine.disk) if where == "disk" else 0.0
        if machine.shared:  # attention reads mapped pages in place
            return disk if cold else 0.0
        return disk + (0.0 if where == "device" else nbytes / (machine.link or machine.copy))

    def rebuilt(self, tokens: float) -> float:
        """Return the seconds to rebuild the keys and values of ``tokens`` tokens from residuals, in all full layers."""
        geometry, layer, page = self.geometry, self.owners[0], min(PAGE, int(tokens) or 1)
        elements = NORM * geometry.hidden_size + ROTATION * (layer.kv_heads + 1) * layer.key_dim
        one = self.machine.multiply(page, geometry.hidden_size, geometry.hidden_size * layer.entry_elements)
        pages, every = -(-tokens // page), self.stride == 1
        seconds = self.read(tokens)
        seconds += pages * (len(self.owners) if every else len(self.anchors)) * (one + self.simple(page * elements))
        if every:
            return seconds
        through = self.body(page) + self.arriving(page) + self.attended(page, tokens / 2)
        return seconds + pages * through * (self.layers - len(self.anchors)) / self.layers

    def written(self, rows: int) -> float:
        """Return the seconds to write a chunk's checkpoints to their place."""
        machine, where, nbytes = self.machine, self.candidate.where, float(rows * self.token_bytes)
        seconds = nbytes / machine.copy
        if where == "disk":
            seconds += nbytes / machine.disk_write
        if machine.link is not None and where != "device":
            seconds += nbytes / machine.link
        return seconds

    def ranked(self, resident: int, rows: int) -> float:
        """Return the seconds to score a chunk's entries with the resident ones, and to move the kept entries."""
        window = self.candidate.method.selector.observation_window
        queries = rows if window is None else min(window, rows)
        scores = self.attended(queries, resident + rows, full_only=True) if queries else 0.0
        return scores + self.simple(6 * rows * sum(layer.entry_elements for layer in self.owners))
