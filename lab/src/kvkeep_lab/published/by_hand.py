"""Entries that are evicted and recalled by hand, as llama.cpp's pull request 21097 does, and what recalls need for it.

The cache has to keep every entry in a checkpoint, resident or not (``kv-lru``, ``SELECTOR+pages``,
``SELECTOR+verified``, ``SELECTOR+checkpoint``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.models.adapter import processes
from kvkeep.stores.checkpoints.spec import CheckpointSpec
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.backed import Backed
from kvkeep.stores.resident.selected import Selected
from kvkeep.stores.slots import compact


@outside_inference_mode
def evict(cache: Any, count: int) -> None:
    """Evict the ``count`` lowest-ranked resident entries of every KV head now. Their copies stay in the checkpoints,
    and the next entries use their space. Raises UsageError for a method that does not keep all entries in
    checkpoints, or that also keeps evicted entries in another form."""
    if count < 0:
        raise UsageError(f"The number of entries to evict must be at least 0, not {count}.")
    for layer in _backed(cache):
        evict_lowest(layer.resident, count)


@outside_inference_mode
def recall(cache: Any, positions: Sequence[int], limit: int = 64) -> int:
    """Recall the entries at ``positions`` (slots of the sequence, padding included) from the checkpoints, in every
    layer and KV head where they are not resident. At most the first ``limit`` of them come back, and each replaces the
    lowest-ranked resident entry. Return the number of recalled entries, over all layers, rows and KV heads. Raises
    UsageError for a slot out of range, for a method that :func:`evict` refuses, and for a kind of checkpoint that
    cannot rebuild single entries."""
    layers = _backed(cache)
    length, slots = cache.get_seq_length(), list(dict.fromkeys(positions))
    if limit < 0 or any(not 0 <= slot < length for slot in slots):
        raise UsageError(f"recall() takes slots from 0 to {length - 1} and a limit of at least 0.")
    if cache.spec is None or not picks(cache.spec, cache.model):
        raise UsageError(f"Checkpoint kind '{cache.spec}' cannot bring back single entries; 'kv' and 'residual' can.")
    chosen = torch.tensor(slots, dtype=torch.int64, device=cache.made.device)
    return sum(_recalled(layer, chosen, limit) for layer in layers)


def picks(spec: CheckpointSpec, model: Any) -> bool:
    """Return whether a checkpoint can return single entries: one of entries, or of the residuals of every layer where
    this process has all heads."""
    return spec.kind == "kv" or (spec.kind == "residual" and spec.stride == 1 and processes(model) == 1)


def _backed(cache: Any) -> list[Layer]:
    cache.compress()
    cache.stream.roll_back()
    fate = cache.method.store_fate
    if not cache.method.recall.backed or fate.stores.keeps or fate.stores.makes_room:
        raise UsageError(
            f"Method '{cache.method.name}' does not keep all its entries in checkpoints alone, so they cannot be "
            "evicted and recalled by hand; use 'kv-lru'."
        )
    layers: list[Layer] = cache.stream.bounded if cache.stream.streams else []
    return layers


def _recalled(layer: Layer, slots: Tensor, limit: int) -> int:
    """Make entries of ``slots`` (n,) resident: the first ``limit`` of every lane that can come back. Return their
    number over all lanes."""
    if not layer.length or not len(slots):
        return 0
    wanted = away(layer)[:, slots]
    wanted &= wanted.cumsum(1) <= min(limit, layer.resident.banks.least_columns)
    chosen = compact(wanted)
    if chosen.shape[1]:
        bring(layer, slots[chosen.clamp(min=0)].masked_fill(chosen < 0, -1))
    return int(wanted.sum())


def evict_lowest(resident: Selected, count: int) -> None:
    """Evict the ``count`` lowest-ranked entries of every lane; no store takes them."""
    for bank in resident.banks:
        leaving = resident.ranking.order(bank, resident.length)
        empty = (bank.slots < 0).sum(1, keepdim=True)
        place = torch.arange(bank.columns, device=leaving.device) < empty + count
        gone = torch.zeros(bank.slots.shape, dtype=torch.bool, device=leaving.device).scatter_(1, leaving, place)
        bank.slots.masked_fill_(gone, -1)
        bank.count_gaps()


def away(layer: Layer) -> Tensor:
    """Return which slots can come back: in the backing, not resident, not padding; (lanes, slots) bool."""
    flags = ~layer.resident.resident_slots()
    if (visible := layer.ledger.visible_by(layer.heads)) is not None:
        flags &= visible[:, 0, 0, : layer.length]
    flags[:, : _reader(layer).first] = False
    return flags


def bring(layer: Layer, slots: Tensor) -> None:
    """Make ``slots`` (lanes, n) resident, -1 for none."""
    if slots.shape[1]:
        layer.resident.swap_in(slots, *picked(_reader(layer), slots))


def picked(reader: Backed, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (lanes, n, dim) of ``slots`` (lanes, n); zeros where a slot is -1."""
    there = slots >= 0
    lane, _ = there.nonzero(as_tuple=True)
    checkpoint = reader.checkpoint
    pick = checkpoint.pick if checkpoint.copies else partial(_projected, checkpoint)
    found = pick(reader.index, lane, slots[there])
    if len(lane) == slots.numel():
        return found[0].view(*slots.shape, -1), found[1].view(*slots.shape, -1)
    filled = tuple(part.new_zeros(*slots.shape, part.shape[-1]) for part in found)
    for rows, part in zip(filled, found, strict=True):
        rows[there] = part
    return filled[0], filled[1]


def _projected(checkpoint: Any, layer: int, lane: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Return single entries, as :meth:`~kvkeep.contracts.checkpoint.Checkpoint.pick`, of the residuals of every layer.
    The slots are projected once for all lanes, a page at a time; then those of each lane are picked."""
    union, place = slot.unique(return_inverse=True)
    ledger, rows = checkpoint.ledger, dict(checkpoint.stores()).get(f"residual.{layer}")
    by_row = torch.arange(ledger.batch, device=slot.device)
    parts: list[tuple[Tensor, Tensor]] = []
    for page_slots in union.split(checkpoint.page):
        ids, positions = (part.view()[:, page_slots].squeeze(-1) for part in (ledger.ids, ledger.positions))
        if rows is None:
            hidden = checkpoint.adapter.embed(ids, positions)
        else:
            picked = rows.pick(by_row.repeat_interleave(len(page_slots)), page_slots.repeat(len(by_row)))
            hidden = picked.unflatten(0, (-1, len(page_slots))).to(slot.device)
        parts.append(checkpoint.adapter.project(layer, hidden, positions))
    keys, values = (torch.cat(part, 2).flatten(0, 1) for part in zip(*parts, strict=True))
    with checkpoint.meter.holding(keys, values):
        return keys[lane, place], values[lane, place]


def halves(resident: Selected, limit: int) -> Tensor:
    """Return half of each lane's capacity, ``limit`` at most: (lanes, 1) int64."""
    limits = torch.empty(resident.banks.lanes, 1, dtype=torch.int64, device=resident.banks.banks[0].slots.device)
    for bank in resident.banks:
        limits[bank.index] = min(limit, bank.columns // 2)
    return limits


def _reader(layer: Layer) -> Backed:
    assert isinstance(layer.reader, Backed)
    return layer.reader
