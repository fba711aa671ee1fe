"""The bytes of a cache, before it exists. Pure functions of the geometry, with each part's rule of allocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from kvkeep.budget import DEFAULT_CHUNK, LONGEST_CHUNK, Budget
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.pages import pages_of, recent_pages_of
from kvkeep.memory.pinned import pinned_bytes
from kvkeep.memory.rows import BLOCK, ring_rows, up
from kvkeep.policies.methods import PAGE
from kvkeep.policies.registry import Everything, Method
from kvkeep.stores.checkpoints.prices import longest_chunk
from kvkeep.stores.checkpoints.spec import CheckpointSpec
from kvkeep.stores.checkpoints.staged import (
    BUFFERS,
    buffer_elements,
    evicted_together,
    staged_entries,
    stages,
)
from kvkeep.stores.readers.backed import VOTERS
from kvkeep.stores.recurrent import NOTES
from kvkeep.stores.resident.banks import bank_columns

Evictions = tuple[LayerGeometry, int, list[int]]
"""A layer, the number of layers of its shape, and the entries that each of them evicts in each pass."""

BOOKKEEPING_BYTES = 16
"""Maximum bytes of an entry's slot, score and place in a table."""
TOKEN_BYTES = 9
"""Bytes of a token's id, position and padding flag."""
FLOAT_BYTES = 4
COPIES = 3
"""The most copies of a layer's evicted entries in memory while it takes over a text that was read twice: those that
are kept, the same in the store's order, and one chunk's choice of them."""


@dataclass(frozen=True)
class Sizes:
    """The bytes of one cache; ``cache.memory()`` measures the same."""

    tokens: int
    """Tokens of the text."""
    budget: int | None
    """Entries of each full layer; None without a budget."""
    exact: int
    """Entries of the budget that stay unchanged."""
    evicted: int
    """Evicted entries."""
    resident: int
    """Bytes of the entries that attention reads directly."""
    stored: int = 0
    """Evicted entries per KV head that the fate stores."""
    compressed: int = 0
    """Bytes of compressed entries."""
    device: int = 0
    """Bytes of checkpoints on the device."""
    host: int = 0
    """Bytes of checkpoints in the host's memory."""
    disk: int = 0
    """Bytes of checkpoints on disk."""
    index: int = 0
    """Bytes by which readers choose what they recall."""
    chunk_bytes: int = 0
    """Bytes of the largest chunk of one layer, which is held in addition to the entries during a pass."""
    results: int = 0
    """Bytes of that chunk's attention in one layer, float32: of all entries so far, and of those that are added. On a
    CPU they are not counted."""
    workspace: int = 0
    """Peak bytes of temporary memory during recall."""

    def memory(self, shared: bool) -> int:
        """Return the peak bytes of device memory. shared: host and device have one memory."""
        between = self.resident + self.compressed + self.device + (self.host if shared else 0)
        return between + self.index + self.chunk_bytes + self.results + self.workspace


def sizes(
    geometry: ModelGeometry,
    method: Method,
    tokens: int,
    budget: int | None,
    spec: CheckpointSpec | None = None,
    *,
    shared: bool = True,
    steps: int = 0,
    model: Any = None,
) -> Sizes:
    """Return the size of a cache after a prompt of ``tokens`` tokens and ``steps`` decoded tokens.

    budget: entries of each full layer; unused if the method needs none. spec: the checkpoint, if the
    method has one (default: entries in the host's memory). shared: host and device have one memory. model: for
    selectors that measure their budgets on the model; without a model, all layers and heads get equal budgets.

    Raises BudgetError if the budget is too small for the method.
    """
    prompt, tokens = tokens, tokens + steps
    fixed = geometry.fixed_bytes(tokens)
    if method.selector.keeps_all:
        reserved = budget if method.budgeted else None
        resident = fixed + (reserved or up(tokens)) * geometry.full_bytes_per_token
        return Sizes(tokens, reserved, tokens, 0, resident)
    assert budget is not None
    spec = spec or CheckpointSpec("kv", "host")
    staged = method.checkpoints and not shared and stages(spec, method.recall.endless)
    longest = longest_chunk(geometry) if staged else LONGEST_CHUNK
    chunk = method.chunk(geometry, Budget.parse(budget), budget, longest=longest)
    first = prompt % chunk  # the remainder of the prompt is the first chunk
    arriving = [*([first] if first else []), *[chunk] * (prompt // chunk), *[1] * steps]
    read, widest = min(chunk, prompt), max((layer.value_dim for layer in geometry.full_layers), default=0)
    results = 0 if shared else 2 * FLOAT_BYTES * read * geometry.attention_heads * (widest + 2)
    size = Sizes(tokens, budget, budget, 0, fixed, chunk_bytes=read * widest_bytes(geometry), results=results)
    if method.selector.in_order:
        ring, block = budget, 1
        if staged:
            ring = budget - staged_entries(budget, geometry, PAGE)
            block = evicted_together(ring)
        evicted = _evicted(arriving, ring, block)
        shapes = Counter(replace(layer, index=0, source=0) for layer in geometry.full_layers)
        evictions = [(layer, count, evicted) for layer, count in shapes.items()]
        rows = ring_rows(min(tokens, ring), ring)
        readers = [(method.recall.holds(layer, geometry, tokens, sum(evicted)), count) for layer, count, _ in evictions]
        size = replace(
            size,
            evicted=sum(evicted),
            resident=fixed + rows * geometry.full_bytes_per_token,
            index=sum(reader.bookkeeping * count for reader, count in readers),
            workspace=max((reader.workspace for reader, _ in readers), default=0),
        )
    else:
        size, evictions = _selected(size, geometry, method, arriving, model)
    if not method.checkpoints:
        return size
    if staged:
        return _staged(size, geometry, method, arriving, evictions)
    return _checkpointed(size, geometry, method, spec, arriving, evictions, shared)


def _selected(
    size: Sizes, geometry: ModelGeometry, method: Method, arriving: list[int], model: Any
) -> tuple[Sizes, list[Evictions]]:
    """Return the size with layers whose entries a selector chooses, and the evictions of these layers."""
    selector, fate, recall = method.selector, method.store_fate, method.recall
    assert size.budget is not None
    tail, within, exact, sinks = method.division(geometry, size.budget)
    starts = [0, *accumulate(arriving)]
    moves = any(start + (count == 1) > exact for start, count in zip(starts, arriving, strict=False))
    budgets = method.budgets(model, geometry, exact)
    groups = Counter(  # layers of one shape have equal sizes
        (replace(layer, index=0, source=0), _by_head(budgets[layer.index], layer)) for layer in geometry.full_layers
    )
    resident, compressed, index, workspace, chunk_bytes, stored = size.resident, 0, 0, 0, size.chunk_bytes, 0
    evictions: list[Evictions] = []
    for (layer, heads), count in groups.items():
        evicted = _evicted(arriving, min(heads))
        evictions.append((layer, count, evicted))
        store = fate.holds(layer, geometry, within, evicted)
        reader = recall.holds(layer, geometry, size.tokens, max(0, size.tokens - min(heads)))
        columns = sum(reached + tail for budget in heads if (reached := bank_columns(budget, size.tokens)))
        bank = columns * (layer.key_dim + layer.value_dim) * geometry.dtype_bytes
        if moves and sinks is not None:  # the original keys of sinks are also kept
            bank += sinks * layer.kv_heads * layer.key_dim * geometry.dtype_bytes
        resident, compressed = resident + count * bank, compressed + count * store.compressed
        index += count * reader.bookkeeping
        chunk_bytes += count * store.shrunk
        moving = _moved(max(heads), arriving, tail, layer, geometry) + (8 * len(heads) if len(set(heads)) > 1 else 0)
        if selector.divides:
            moving = max(moving, _divided(heads, max(arriving), size.tokens, layer, geometry))
        workspace = max(workspace, moving, store.workspace + reader.workspace)
        stored = 0 if fate.stores.merges or not fate.stores.keeps else store.entries or sum(evicted)
    return replace(
        size,
        exact=exact,
        evicted=sum(evictions[0][2]),
        resident=resident,
        compressed=compressed,
        index=index,
        workspace=workspace,
        chunk_bytes=chunk_bytes,
        stored=stored,
    ), evictions


def _pages(method: Method, capacity: int | None, counts: list[int]) -> list[int]:
    """Return the rows of each page of a layer's keys in a checkpoint after appending ``counts`` rows."""
    if capacity is None:
        return pages_of(counts)
    if method.recall.endless:
        return recent_pages_of(sum(counts), capacity)
    return [ring_rows(sum(counts), capacity)]


def _staged(
    size: Sizes, geometry: ModelGeometry, method: Method, arriving: list[int], evictions: list[Evictions]
) -> Sizes:
    """Return the size with a checkpoint in pinned memory, and its buffers on the device."""
    backed = method.recall.backed
    host = sum(
        count * pinned_bytes(arriving if backed else counts, layer.entry_elements * geometry.dtype_bytes)
        for layer, count, counts in evictions
    )
    assert size.budget is not None
    first, staged = geometry.full_layers[0], 0 if backed else staged_entries(size.budget, geometry, PAGE)
    buffers = BUFFERS * first.kv_heads * buffer_elements(geometry, staged, PAGE)[first.index] * geometry.dtype_bytes
    return replace(
        size,
        evicted=size.tokens if backed else size.evicted,
        host=size.host + host,
        device=size.device + (buffers if host else 0),
    )


def _checkpointed(
    size: Sizes,
    geometry: ModelGeometry,
    method: Method,
    spec: CheckpointSpec,
    arriving: list[int],
    evictions: list[Evictions],
    shared: bool,
) -> Sizes:
    """Return the size with checkpoints. They contain all entries if they back a recall, else the evicted entries.
    Checkpoints of residuals contain all tokens ``arriving``."""
    recall, where, layers = method.recall, spec.where, len(geometry.layers)
    evicted = size.tokens if recall.backed else size.evicted
    stride = {"kv": 0, "tokens": layers}.get(spec.kind, min(spec.stride, layers))  # layers per stored residual
    places = {"device": size.device, "host": size.host, "disk": size.disk}
    work = 0
    if not stride:
        for layer, count, counts in evictions:
            entry = layer.entry_elements * geometry.dtype_bytes
            pages = _pages(method, spec.capacity, arriving if recall.backed else counts)
            places[where] += count * sum(pages) * entry
            if where != "device" and not shared and pages:
                work = max(work, min(PAGE, max(pages), evicted) * entry)
    else:
        widest, anchors, pages = widest_bytes(geometry), geometry.residual_anchors(stride), pages_of(arriving)
        places[where] += sum(1 for anchor in anchors if anchor) * sum(pages) * geometry.residual_bytes_per_token
        if 0 in anchors:
            places["device"] += 4 * up(size.tokens, BLOCK)
        if stride > 1:
            work = evicted * (geometry.residual_bytes_per_token + widest)
        else:
            work = min(evicted, PAGE, PAGE if 0 in anchors else max(pages)) * widest
    return replace(size, evicted=evicted, workspace=max(size.workspace, work), **places)


def widest_bytes(geometry: ModelGeometry) -> int:
    """Return the largest bytes of a token's keys and values in one full layer."""
    return geometry.dtype_bytes * max((layer.entry_elements for layer in geometry.full_layers), default=0)


def _by_head(budgets: Sequence[int], layer: LayerGeometry) -> tuple[int, ...]:
    return (*budgets,) * (layer.kv_heads if len(budgets) == 1 else 1)


def _evicted(arriving: list[int], budget: int, block: int = 1) -> list[int]:
    """Return the number of entries that each pass evicts. arriving: new entries in each pass. block: how many entries
    are evicted together."""
    over = [up(max(0, count - budget), block) for count in accumulate(arriving, initial=0)]
    return [after - before for before, after in pairwise(over)]


def _moved(columns: int, arriving: list[int], tail: int, layer: LayerGeometry, geometry: ModelGeometry) -> int:
    """Return the bytes of a bank before its last growth: the old bank exists until it has been copied."""
    grown = sorted({bank_columns(columns, tokens) for tokens in accumulate(arriving, initial=0)})
    before = grown[-2] if len(grown) > 1 else 0
    slots = 16 * layer.kv_heads  # scores and counts
    return before * slots + (before + tail) * layer.entry_elements * geometry.dtype_bytes if before else 0


def _divided(heads: Sequence[int], chunk: int, tokens: int, layer: LayerGeometry, geometry: ModelGeometry) -> int:
    """Return the most bytes of the copies by which a layer divides its budget: of the entries of each bank and of the
    chunk, and of all of them with as many places in every lane as the longest has."""
    longest = min(tokens, sum(heads) + chunk)
    entry = (layer.key_dim + layer.value_dim) * geometry.dtype_bytes + 16  # slots, scores and counts
    return (sum(heads) + len(heads) * (chunk + longest)) * entry


# -- the peak ---------------------------------------------------------------------------------------------


def grant(
    geometry: ModelGeometry,
    method: Method,
    budget: int | None,
    tokens: int,
    spec: CheckpointSpec | None = None,
    *,
    shared: bool = True,
    chunk: int | None = None,
    rows: int | None = None,
    model: Any = None,
) -> int:
    """Return the peak bytes of memory of a session up to ``tokens`` tokens. A server reserves them before the answer
    begins (:mod:`kvkeep.serve.admission`), and a cache fits in a memory that has them (:mod:`kvkeep.plan.fitting`).

    The sum includes entries, codes, bookkeeping, checkpoints in memory, and the temporary memory of a step: the chunk
    of one layer, recall, and logits. It excludes disk, weights, hidden states, and the copy by which the keys or values
    of one layer grow where they are one tensor (on a GPU, and without the native library).

    budget: entries of each full layer. chunk: tokens of a prompt that a cache
    without a budget reads at a time. rows: rows whose logits a pass computes; default: those that verify drafts.
    spec, shared, model: see :func:`sizes`.
    """

    def peak_of(method: Method, spec: CheckpointSpec | None) -> int:
        """Return the peak bytes of entries, checkpoints, recall and tables."""
        layers = geometry.full_layers
        size = sizes(geometry, method, tokens, budget, spec, shared=shared, steps=1, model=model)
        entries = size.exact + size.stored if size.budget is not None else 0
        tables = BOOKKEEPING_BYTES * sum(layer.kv_heads for layer in layers) * entries + TOKEN_BYTES * up(tokens + 1)
        if method.recall.drafts:  # queries that choose the resident entries again, and their results
            elements = sum(layer.key_dim + layer.value_dim + 1 for layer in layers)
            tables += FLOAT_BYTES * VOTERS * geometry.attention_heads * elements
            tables += method.recall.tail(budget or 0) * geometry.recurrent_bytes()  # one for each draft
        elif method.selector.keeps_all:
            tables += NOTES * geometry.recurrent_bytes()
        return size.memory(shared) + tables

    peak = peak_of(method, spec)
    if (reading := method.reading) is not None:  # a checkpoint contains the whole text until its second reading
        first = replace(method, fate=reading.fate, recall=Everything())
        text = CheckpointSpec("kv", "host") if spec is None else replace(spec, kind="kv")
        size = sizes(geometry, method, tokens, budget, shared=shared, model=model)
        stored = min(tokens, size.stored * len(geometry.full_layers))  # at worst, a layer has the places of all
        copies = COPIES * stored * widest_bytes(geometry) if size.compressed else 0
        peak = max(peak, peak_of(first, text) + copies)
    if rows is None:
        rows = 1
        if method.recall.drafts and budget is not None:  # the drafts and the token before them
            rows = min(method.recall.tail(budget), method.chunk(geometry, Budget.parse(budget), budget))
    logits = rows * geometry.vocab_size * (geometry.dtype_bytes + 2 * FLOAT_BYTES)  # computed and sampled
    if not method.selector.keeps_all:
        return peak + logits  # the sizes include its chunk
    return peak + logits + min(chunk or DEFAULT_CHUNK, tokens) * widest_bytes(geometry)
