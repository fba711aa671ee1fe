"""Bytes that a cache will hold. Pure functions of the geometry: each part is asked by the rule it allocates by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.budget import Budget
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.rows import BLOCK, pages_of, ring_rows, up
from kvkeep.plan.candidates import Candidate
from kvkeep.policies.request import PAGE
from kvkeep.stores.resident.banks import bank_columns
from kvkeep.stores.resident.paged import pool_rows

Left = tuple[LayerGeometry, list[int]]
"""A layer, and how many of its entries left, by pass."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of one cache after ``tokens`` tokens. resident, compressed, device, host, disk: entries attention reads
    directly, those in a smaller form, and checkpoints by place, as ``cache.memory()`` measures them. hand: the largest
    chunk of one layer beside them. workspace: the most that recall holds for a moment. budget: entries of each full
    layer, None where there is none. exact: of those, how many are kept as they are. away: entries that have left. kept:
    tokens whose entries attention still reads in some form. stored: entries of a KV head that the fate still has."""

    tokens: int
    budget: int | None
    chunk: int
    exact: int
    away: int
    kept: int
    resident: int
    stored: int = 0
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

    def held(self, shared: bool) -> int:
        """Return the bytes of the device's memory while nothing is read or written; ``shared``: it is the host's,
        too."""
        return self.resident + self.compressed + self.device + (self.host if shared else 0)

    def memory(self, shared: bool) -> int:
        """Return the bytes of the device's memory at the worst moment; ``shared``: it is the host's, too."""
        return self.held(shared) + self.hand + self.workspace


def sizes(
    geometry: ModelGeometry,
    candidate: Candidate,
    tokens: int,
    budget: int | None,
    new: int = 0,
    *,
    shared: bool = True,
    steps: int = 0,
    model: Any = None,
) -> Sizes:
    """Return what ``candidate`` holds after ``tokens`` tokens read at once and ``steps`` more one by one, with room for
    ``new`` where room is taken ahead. ``budget``: entries of each full layer, for those that have one. ``shared``:
    whether the device's memory is the host's. ``model``: for selectors whose budgets are measured on it; without,
    their layers and heads are taken to be alike.

    Raises BudgetError where the method cannot work in so few entries.
    """
    method, prompt, tokens = candidate.method, tokens, tokens + steps
    sliding = geometry.sliding_bytes(tokens, stepped=steps > 0 or prompt == 1)
    largest = max(_entry(layer, geometry) for layer in geometry.full_layers)
    if candidate.keeps_all:
        layout = method.selector.layout
        limit = prompt + new if layout == "static" else None
        rows = limit or (pool_rows(tokens) if layout == "paged" else up(tokens))
        hand = prompt * largest if layout == "paged" else 0
        full = rows * geometry.full_bytes_per_token
        return Sizes(tokens, limit, tokens, tokens, 0, tokens, sliding + full, hand=hand)
    assert budget is not None
    chunk = method.chunk(geometry, Budget.parse(budget), budget)
    arriving = [*_chunks(prompt, chunk), *[1] * steps]
    held = Sizes(tokens, budget, chunk, budget, 0, tokens, sliding, hand=min(chunk, prompt) * largest)
    if method.selector.in_order:
        over = _over(arriving, budget)
        left = [(layer, over) for layer in geometry.full_layers]
        rows = ring_rows(min(tokens, budget), budget)
        held = replace(held, away=sum(over), resident=sliding + rows * geometry.full_bytes_per_token)
    else:
        held, left = _selected(held, geometry, candidate, arriving, model)
    return _checkpointed(held, geometry, candidate, arriving, left, shared) if method.checkpoints else held


def _selected(
    held: Sizes, geometry: ModelGeometry, candidate: Candidate, arriving: list[int], model: Any
) -> tuple[Sizes, list[Left]]:
    """Return the same with layers whose entries a selector chooses, and how many left each of them."""
    method = candidate.method
    selector, fate, recall = method.selector, method.store_fate, method.recall
    assert held.budget is not None
    tail, within, exact, sinks = method.division(geometry, held.budget)
    moved = sinks is not None and _moves(arriving, exact)
    budgets = selector.budgets(model, geometry, exact)
    resident, compressed, workspace, hand, stored = held.resident, 0, 0, held.hand, 0
    shared = {layer.source for layer in geometry.layers if layer.source != layer.index}
    alike = Counter(
        (_shape(layer), tuple(_by_head(budgets[layer.index], layer)), layer.index in shared)
        for layer in geometry.full_layers
    )
    gone: list[Left] = []
    for (layer, own, read_again), count in alike.items():
        left = _over(arriving, min(own))
        if fate.keeps:  # what comes back drives others out; a layer that reads these entries, too, asks by one query
            swapped = recall.swapped(min(own) // 2)
            left = [one + (swapped if one == 1 or (one and read_again) else 0) for one in left]
        gone += [(layer, left)] * count
        store = fate.holds(layer, geometry, within, left)
        reader = recall.holds(layer, geometry, held.tokens, max(0, held.tokens - min(own)))
        size = sum(_bank(budget, held.tokens, tail) for budget in own) * _head(layer, geometry)
        if moved and sinks is not None:
            size += sinks * layer.kv_heads * layer.key_dim * geometry.dtype_bytes
        resident, compressed = resident + count * size, compressed + count * store.compressed
        hand += count * store.shrunk
        moving = _moved(max(own), arriving, tail, layer, geometry) + (8 * len(own) if len(set(own)) > 1 else 0)
        workspace = max(workspace, moving, store.workspace + reader.workspace)
        stored = 0 if fate.merges or not fate.keeps else store.entries or sum(left)
    whole = method.checkpoints or fate.merges or fate.makes_room
    kept = held.tokens if whole else min(held.tokens, exact + stored)
    away = sum(gone[0][1])
    sums = {"resident": resident, "compressed": compressed, "workspace": workspace, "hand": hand, "stored": stored}
    return replace(held, exact=exact, away=away, kept=kept, **sums), gone


def _checkpointed(
    held: Sizes, geometry: ModelGeometry, candidate: Candidate, arriving: list[int], left: list[Left], shared: bool
) -> Sizes:
    """Add checkpoints: of all entries where they are the backing, else of those that ``left``, by pass; of all tokens
    ``arriving`` where they are residuals."""
    method = candidate.method
    backed = method.recall.backed
    away = held.tokens if backed else held.away
    stride, where = candidate.stride, candidate.where or "host"
    largest = max(_entry(layer, geometry) for layer in geometry.full_layers)
    places = {"device": held.device, "host": held.host, "disk": held.disk}
    if not stride:
        work = 0
        paged: dict[int, list[int]] = {}  # layers that lost alike have one list
        for layer, own in left:
            rows = arriving if backed else own
            if id(rows) not in paged:
                paged[id(rows)] = pages_of(rows)
            pages = paged[id(rows)]
            places[where] += sum(pages) * _entry(layer, geometry)
            if where != "device" and not shared and pages:
                work = max(work, min(PAGE, max(pages), away) * _entry(layer, geometry))
    else:
        stride = min(stride, len(geometry.layers))
        anchors = geometry.residual_anchors(stride)
        pages = pages_of(arriving)
        vectors = sum(1 for anchor in anchors if anchor)
        places[where] += vectors * sum(pages) * geometry.residual_bytes_per_token
        if 0 in anchors:
            places["device"] += 4 * up(held.tokens, BLOCK)
        if stride > 1:
            work = away * (geometry.residual_bytes_per_token + largest)
        else:
            work = min(away, PAGE, PAGE if 0 in anchors else max(pages)) * largest
            if method.recall.reads_single:  # entries of all lanes are projected together
                work = max(work, away * largest)
    away = held.tokens if backed else held.away
    return replace(held, away=away, kept=held.tokens, workspace=max(held.workspace, work), **places)


# -- rules ------------------------------------------------------------------------------------------------


def _entry(layer: LayerGeometry, geometry: ModelGeometry) -> int:
    return layer.entry_elements * geometry.dtype_bytes


def _head(layer: LayerGeometry, geometry: ModelGeometry) -> int:
    return (layer.key_dim + layer.value_dim) * geometry.dtype_bytes


def _shape(layer: LayerGeometry) -> LayerGeometry:
    """Return a layer without its place in the model: layers of one shape hold the same."""
    return replace(layer, index=0, source=0)


def _by_head(budgets: Sequence[int], layer: LayerGeometry) -> list[int]:
    return [*budgets] * (layer.kv_heads if len(budgets) == 1 else 1)


def _bank(budget: int, tokens: int, tail: int) -> int:
    """Return the columns and the tail of a lane once ``tokens`` came."""
    columns = bank_columns(budget, tokens)
    return columns + tail if columns else 0


def _chunks(tokens: int, chunk: int) -> list[int]:
    """Return how a prompt is cut: what does not divide comes first."""
    first = tokens % chunk
    return ([first] if first else []) + [chunk] * (tokens // chunk)


def _over(counts: list[int], room: int) -> list[int]:
    """Return how many entries each of ``counts`` drives out of room for so many."""
    before = over = 0
    gone = []
    for count in counts:
        before += count
        now = before - room if before > room else 0
        gone.append(now - over)
        over = now
    return gone


def _moves(counts: list[int], entries: int) -> bool:
    """Tell whether a stream has moved beyond its sinks."""
    past = 0
    for count in counts:
        if past + (count == 1) > entries:
            return True
        past += count
    return False


def _moved(columns: int, arriving: list[int], tail: int, layer: LayerGeometry, geometry: ModelGeometry) -> int:
    """Return the bytes of a bank before it grew for the last time: it is there until it has been copied."""
    held = before = seen = 0
    for count in arriving:
        seen += count
        if (needed := bank_columns(columns, seen)) > held:
            before, held = held, needed
        if held == columns:
            break
    beside = 16 * layer.kv_heads  # slots, scores and counts
    return before * beside + (before + tail) * _entry(layer, geometry) if before else 0
