"""Beginnings: a cache takes the first tokens of a prompt from blocks, whoever stored them for the same owner.

Only exact caches do, because their entries depend on nothing but the tokens before. A text is found by the names of its
blocks (:mod:`~kvkeep.blocks.names`), so nobody has to name a session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from kvkeep import transfer
from kvkeep.blocks.folder import BlockFolder, BlockName
from kvkeep.blocks.layout import NAME_OF_IDS
from kvkeep.blocks.names import chain, origin
from kvkeep.blocks.text import Block, TextRows, entry_forms
from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import StoreError
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.rows import BLOCK
from kvkeep.stores.dynamic import DynamicLayer

log = logging.getLogger(__name__)


def begins(cache: KeepCache) -> bool:
    """Return whether a cache of this kind can begin with blocks: it is exact, and made of the entries of full layers
    alone."""
    if cache.exactness is not Exactness.EXACT or cache.reading or cache.positions is not None:
        return False
    if any(layer.kind not in ("full", "shared") for layer in cache.geometry.layers):
        return False
    return cache.checkpoint is None or not cache.checkpoint.by_token


def names_of(cache: KeepCache, space: str, ids: Sequence[int]) -> list[BlockName]:
    """Return the names of the whole blocks of a text in a cache like ``cache``; none if it cannot begin with blocks."""
    if not begins(cache):
        return []
    first = origin(cache, entry_forms(cache.geometry, next(cache.model.parameters()).dtype))
    return [] if first is None else [BlockName(space, key) for key in chain(first, ids)]


def find(folder: BlockFolder, space: str, cache: KeepCache, prompt: Sequence[int]) -> list[BlockName]:
    """Return the blocks in ``folder`` with which ``cache``, which is empty, can begin ``prompt``; they leave at least
    one token to read."""
    names = names_of(cache, space, prompt[:-1])
    return names[: folder.use(names)]


def begin(folder: BlockFolder, cache: KeepCache, names: Sequence[BlockName], ids: Sequence[int]) -> int:
    """Fill ``cache``, which is empty, with the tokens ``ids`` of blocks; return how many. A block that is missing or
    damaged ends them."""
    blocks: list[Block] = []
    for number, name in enumerate(names):
        try:
            block = folder.read(name)
        except StoreError as error:
            log.warning("A prompt is read from token %d on: %s", number * BLOCK, error)
            break
        if block[NAME_OF_IDS][0].tolist() != [*ids[number * BLOCK :][:BLOCK]]:
            log.warning("A prompt is read from token %d on: block %s is of another text.", number * BLOCK, name.key)
            break
        blocks.append(block)
    fill(cache, blocks)
    return len(blocks) * BLOCK


@outside_inference_mode
def fill(cache: KeepCache, blocks: Sequence[Block]) -> None:
    """Fill ``cache``, which is empty and :func:`begins`, with ``blocks`` in order."""
    if not blocks:
        return
    length, device = len(blocks) * BLOCK, cache.made.device
    ids = torch.cat([block[NAME_OF_IDS] for block in blocks], 1)[..., None].to(device)
    positions = torch.arange(length, dtype=torch.int32, device=device)[None, :, None]
    cache.ledger.restore(length, 1, ids, positions, None)
    for layer in cache.geometry.full_layers:
        target = cache.layers[layer.index]
        keys, values = (
            [block[f"{kind}.{layer.index}"][None].to(device) for block in blocks] for kind in ("keys", "values")
        )
        if isinstance(target, DynamicLayer):
            target.adopt(keys, values)
            continue
        for pair in zip(keys, values, strict=True):
            target.take(*pair)
            target.settle()


def keep(
    folder: BlockFolder, space: str, cache: KeepCache, ids: Sequence[int], stop: Callable[[], bool] = lambda: False
) -> None:
    """Store the whole blocks of the text ``ids`` that ``cache`` has read. stop: called before each block; if it returns
    True, the following ones are not stored. Raises StoreError."""
    names = names_of(cache, space, ids)
    known = folder.use(names)
    if known == len(names) or stop():
        return
    text = TextRows(cache, transfer.parts(cache))
    if text.forms != entry_forms(cache.geometry, next(cache.model.parameters()).dtype):
        return
    for number in range(known, len(names)):
        if stop():
            return
        write(folder, names[number : number + 1], text, [ids], number)


def write(
    folder: BlockFolder, names: Sequence[BlockName], text: TextRows, ids: Sequence[Sequence[int]], first: int
) -> None:
    """Write the blocks ``names`` of a text, from block ``first`` on. ids: of the whole text, by row. Raises
    StoreError."""
    for number, name in enumerate(names, first):
        rows = torch.tensor([row[number * BLOCK :][:BLOCK] for row in ids], dtype=torch.int32)
        folder.write(name, text.block(number) | {NAME_OF_IDS: rows})
