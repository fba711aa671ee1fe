"""Bytes: what a cache will hold, by the rules its stores allocate by. Pure functions of the geometry."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.budget import Budget
from kvkeep.errors import BudgetError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.rows import BLOCK, page_rows
from kvkeep.plan.candidates import Candidate
from kvkeep.policies.fates.lowrank import LowRank
from kvkeep.policies.fates.quantised import Quantised
from kvkeep.policies.methods import PRESETS
from kvkeep.policies.recalls.verified import Verified
from kvkeep.policies.request import Exactness
from kvkeep.policies.selectors import SELECTORS
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.stores.coded import group_bytes, width
from kvkeep.stores.groups import GROUP
from kvkeep.stores.paged import BLOCK_SIZE
from kvkeep.stores.selected import BLOCK as COLUMNS

PAGE = 512
"""Rows rebuilt at a time, unless a cache is told otherwise."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of one cache after ``tokens`` tokens. resident, compressed, device, host, disk: entries attention reads
    directly, those in a smaller form, and checkpoints by place, as ``cache.memory()`` measures them. hand: the largest
    chunk of one layer beside them. workspace: the most that recall holds for a moment. budget: entries of each full
    layer, None where there is none. exact: of those, how many are kept as they are. away: entries that have left.
    kept: tokens whose entries attention still reads in some form."""

    tokens: int
    budget: int | None
    chunk: int
    exact: int
    away: int
    kept: int
    resident: int
    compressed: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    hand: int = 0
    workspace: int = 0

    @property
    def checkpoints(self) -> int:
        """Bytes of checkpoints in all places."""
        return self.device + self.host + self.disk

    def memory(self, shared: bool) -> int:
        """Return the bytes of the device's memory at the worst moment; ``shared``: it is the host's, too."""
        held = self.resident + self.compressed + self.device + self.hand + self.workspace
        return held + (self.host if shared else 0)


def sizes(
    geometry: ModelGeometry,
    candidate: Candidate,
    tokens: int,
    budget: int | None,
    new: int = 0,
    *,
    shared: bool = True,
    steps: int = 0,
) -> Sizes:
    """Return what ``candidate`` holds after ``tokens`` tokens read at once and ``steps`` more one by one, with room for
    ``new`` where room is taken ahead. ``budget``: entries of each full layer, for those that have one. ``shared``:
    whether the device's memory is the host's.

    Raises BudgetError where the method cannot work in so few entries.
    """
    family, prompt, tokens = candidate.family, tokens, tokens + steps
    sliding, full = geometry.sliding_bytes(tokens), geometry.full_bytes_per_token
    largest = max(_entry(layer, geometry) for layer in geometry.full_layers)
    if family.keeps:
        limit = None
        if family.method == "static":
            rows = limit = prompt + new
        elif family.method == "paged":
            rows = _pool(tokens)
        else:
            rows = _up(tokens, BLOCK)
        hand = prompt * largest if family.layer == "paged" else 0
        return Sizes(tokens, limit, tokens, tokens, 0, tokens, sliding + rows * full, hand=hand)
    assert budget is not None
    exact = candidate.exactness == Exactness.EXACT
    chunk = Budget.parse(budget).chunk_for(budget, layers=len(geometry.full_layers) if exact else 0)
    hand = min(chunk, prompt) * largest
    arriving = [*_chunks(prompt, chunk), *[1] * steps]
    if family.layer == "kv-direct":
        leaving = _over(arriving, budget)
        rows = min(budget, _up(min(tokens, budget), BLOCK))
        held = Sizes(tokens, budget, chunk, budget, sum(leaving), tokens, sliding + rows * full, hand=hand)
        return _checkpointed(held, geometry, candidate, arriving, leaving, shared)
    return _selected(geometry, candidate, prompt, arriving, budget, chunk, sliding, hand, shared)


def _selected(
    geometry: ModelGeometry,
    candidate: Candidate,
    prompt: int,
    arriving: list[int],
    budget: int,
    chunk: int,
    sliding: int,
    hand: int,
    shared: bool,
) -> Sizes:
    """The same for layers whose entries a selector chooses."""
    family, tokens = candidate.family, sum(arriving)
    fate = _fate(candidate)
    exact = budget if fate is None else fate.resident(geometry, budget)
    name = family.method.partition("+")[0].partition(":")[0]
    selector = PRESETS[name].selector if name in PRESETS else SELECTORS[name]()
    sinks = selector.sinks_in_cache(fate is None and family.fate == "")
    if sinks is not None:
        exact -= (sinks + 1) // 2
    tail = Verified().round(budget).tail if family.fate == "verified" else 0
    exact -= tail
    budgets = selector.budgets(None, geometry, exact)
    resident, moving = sliding, 0
    for layer in geometry.full_layers:
        own = budgets[layer.index][0]
        columns = min(own, _up(tokens, COLUMNS))
        resident += (columns + tail) * _entry(layer, geometry)
        notes = layer.kv_heads * (4 if family.watches == 0 else 8)  # slots and marks move along
        before = _before(own, prompt, chunk)
        moving = max(moving, before * notes + (before + tail if before else 0) * _entry(layer, geometry))
        if sinks is not None and tokens > exact and isinstance(selector, StreamingLLM):
            resident += sinks * layer.kv_heads * layer.key_dim * geometry.dtype_bytes
    away = _left(arriving, exact)
    kept = min(tokens, exact)
    held = Sizes(tokens, budget, chunk, exact, away, kept, resident, hand=hand, workspace=moving)
    if family.fate == "verified":
        return _checkpointed(held, geometry, candidate, arriving, arriving, shared)
    if fate is None:
        return held
    compressed = 0
    for layer in geometry.full_layers:
        size = _group(fate, layer, geometry)
        room = (budget - exact - GROUP) * (layer.key_dim + layer.value_dim) * geometry.dtype_bytes // size
        if room < 1:
            raise BudgetError(f"A budget of {budget} entries has no room for '{family.method}'; give it {4 * GROUP}.")
        if away:
            compressed += layer.kv_heads * _groups(away // GROUP, room) * size + GROUP * _entry(layer, geometry)
            groups = min(away // GROUP, room)
            kept = min(tokens, exact + groups * GROUP)
            if isinstance(fate, Quantised):
                work = 4 * GROUP * groups * layer.kv_heads * max(layer.key_dim, width(layer.value_dim))
            else:
                work = GROUP * groups * _entry(layer, geometry)
            moving = max(moving, work)
    return Sizes(tokens, budget, chunk, exact, away, kept, resident, compressed, hand=hand, workspace=moving)


def _checkpointed(
    held: Sizes, geometry: ModelGeometry, candidate: Candidate, arriving: list[int], leaving: list[int], shared: bool
) -> Sizes:
    """Add checkpoints of the entries ``leaving``, by pass, or of all tokens ``arriving`` where they are residuals."""
    away = sum(leaving)
    stride, where = candidate.stride, candidate.where or "host"
    largest = max(_entry(layer, geometry) for layer in geometry.full_layers)
    places = {"device": held.device, "host": held.host, "disk": held.disk}
    if not stride:
        pages = _pages(leaving)
        places[where] += sum(pages) * geometry.full_bytes_per_token
        moved = away and (where != "device" and not shared)
        work = min(PAGE, max(pages), away) * largest if moved else 0
    else:
        stride = min(stride, len(geometry.layers))
        anchors = geometry.residual_anchors(stride)
        pages = _pages(arriving)
        vectors = sum(1 for anchor in anchors if anchor)
        places[where] += vectors * sum(pages) * geometry.residual_bytes_per_token
        if 0 in anchors:
            places["device"] += 4 * _up(held.tokens, BLOCK)
        if stride == 1:
            work = min(away, PAGE, PAGE if 0 in anchors else max(pages)) * largest
        else:
            work = away * (geometry.residual_bytes_per_token + largest)
    return Sizes(
        held.tokens,
        held.budget,
        held.chunk,
        held.exact,
        away,
        held.tokens,
        held.resident,
        hand=held.hand,
        workspace=max(held.workspace, work),
        **places,
    )


def _fate(candidate: Candidate) -> Quantised | LowRank | None:
    family = candidate.family
    if family.fate == "quantize":
        return Quantised(family.bits, **PRESETS["quantized"].defaults)
    if family.fate == "lowrank":
        return LowRank(family.rank, **PRESETS["lowrank"].defaults)
    return None


def _group(fate: Quantised | LowRank, layer: LayerGeometry, geometry: ModelGeometry) -> int:
    """Return the bytes of one group of one lane."""
    if isinstance(fate, Quantised):
        return group_bytes(layer.key_dim, layer.value_dim, fate.bits)
    # A head's weight has as many singular vectors as it has rows, or as the model is wide.
    ranks = [min(fate.rank, dim, geometry.hidden_size) for dim in (layer.key_dim, layer.value_dim)]
    return GROUP * sum(ranks) * geometry.dtype_bytes


def _entry(layer: LayerGeometry, geometry: ModelGeometry) -> int:
    return layer.entry_elements * geometry.dtype_bytes


def _up(count: int, block: int) -> int:
    return -(-count // block) * block


def _pool(tokens: int) -> int:
    """Return the entries of a pool of blocks grown by halves."""
    blocks = 0
    while blocks * BLOCK_SIZE < tokens:
        blocks += max(8, blocks // 2)
    return blocks * BLOCK_SIZE


def _pages(counts: list[int]) -> list[int]:
    """Return the rows of each page, as :class:`~kvkeep.memory.rows.Pages` allocates them for rows that come by so
    many."""
    pages: list[int] = []
    allocated = needed = 0
    for count in counts:
        needed += count
        while allocated < needed:
            pages.append(page_rows(needed - allocated, allocated))
            allocated += pages[-1]
    return pages


def _over(counts: list[int], room: int) -> list[int]:
    """Return how many rows each of ``counts`` drives out of room for the last ``room``."""
    before = 0
    gone = []
    for count in counts:
        gone.append(max(0, before + count - room) - max(0, before - room))
        before += count
    return gone


def _groups(written: int, room: int) -> int:
    """Return the groups there is memory for once ``written`` were, as :class:`~kvkeep.stores.groups.Groups` grows."""
    size = 0
    while size < min(written, room):
        size = min(room, max(8, size + size // 2))
    return size


def _chunks(tokens: int, chunk: int) -> list[int]:
    """Return how a prompt is cut: what does not divide comes first."""
    first = tokens % chunk
    return ([first] if first else []) + [chunk] * (tokens // chunk)


def _left(counts: list[int], columns: int) -> int:
    """Return how many places a selector's fate was handed: a chunk that does not fit leaves as many as came, empty ones
    included."""
    used = left = 0
    for count in counts:
        if used + count <= columns:
            used += count
        else:
            left, used = left + count, columns
    return left


def _before(columns: int, tokens: int, chunk: int) -> int:
    """Return the columns of a bank before it grew for the last time; they are there until it has been copied."""
    held = before = seen = 0
    for count in _chunks(tokens, chunk)[: 2 + columns // chunk]:
        seen += count
        if (needed := min(columns, _up(seen, COLUMNS))) > held:
            before, held = held, needed
    return before
