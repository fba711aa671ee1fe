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
from kvkeep.blocks.names import chain, origin, tail_key
from kvkeep.blocks.text import Block, TextRows, entry_forms
from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.cached_text import common_prefix
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.rows import BLOCK

log = logging.getLogger(__name__)


def begins(cache: KeepCache) -> bool:
    """Return whether a cache of this kind can begin with blocks: it is exact, and made of the entries of full layers
    alone."""
    if cache.exactness is not Exactness.EXACT or cache.reading or cache.positions is not None:
        return False
    if any(layer.kind not in ("full", "shared") for layer in cache.geometry.layers):
        return False
    return cache.checkpoint is None or not cache.checkpoint.by_token


def find(folder: BlockFolder, space: str, cache: KeepCache, prompt: Sequence[int]) -> list[BlockName]:
    """Return the blocks in ``folder`` with which ``cache``, which is empty, can begin ``prompt``, and perhaps a tail
    after them."""
    if (first := _first(cache)) is None:
        return []
    names = [BlockName(space, key) for key in chain(first, prompt[:-1])]
    names = names[: folder.use(names)]
    tail = BlockName(space, tail_key(names[-1].key if names else first.hex()))
    return [*names, tail] if folder.use([tail]) else names


def begin(folder: BlockFolder, cache: KeepCache, names: Sequence[BlockName], prompt: Sequence[int]) -> int:
    """Fill ``cache``, which is empty, with the first tokens of ``prompt`` from blocks; return how many. One token at
    least is left to read. A block that is missing or damaged ends them."""
    found, error = folder.read_first(names)
    if error is not None:
        log.warning("A prompt is read from token %d on: %s", len(found) * BLOCK, error)
    blocks: list[Block] = []
    for number, block in enumerate(found):
        ids = block[NAME_OF_IDS][0].tolist()
        count = common_prefix(ids, prompt[number * BLOCK : -1])
        if count == len(ids):
            blocks.append(block)
        elif count and len(ids) < BLOCK:  # a tail may have other tokens than the prompt
            blocks.append(
                {name: rows[..., :count] if name == NAME_OF_IDS else rows[:, :count] for name, rows in block.items()}
            )
        if count < BLOCK:
            break
    fill(cache, blocks)
    return cache.get_seq_length()


@outside_inference_mode
def fill(cache: KeepCache, blocks: Sequence[Block]) -> None:
    """Fill ``cache``, which is empty and :func:`begins`, with ``blocks`` in order."""
    if not blocks:
        return
    device = cache.made.device
    ids = torch.cat([block[NAME_OF_IDS] for block in blocks], 1)[..., None].to(device)
    length = ids.shape[1]
    positions = torch.arange(length, dtype=torch.int32, device=device)[None, :, None]
    cache.ledger.restore(length, 1, ids, positions, None)
    for layer in cache.geometry.full_layers:
        target = cache.layers[layer.index]
        keys, values = (
            [block[f"{kind}.{layer.index}"][None].to(device) for block in blocks] for kind in ("keys", "values")
        )
        target.adopt(keys, values)


def keep(
    folder: BlockFolder, space: str, cache: KeepCache, ids: Sequence[int], stop: Callable[[], bool] = lambda: False
) -> None:
    """Store the text ``ids`` that ``cache`` has read: its whole blocks, and the tail after them. stop: called before
    each of them; if it returns True, no more are stored. Raises StoreError."""
    if (first := _first(cache)) is None:
        return
    text = TextRows(cache, transfer.parts(cache))
    if text.forms != entry_forms(cache.geometry, next(cache.model.parameters()).dtype):
        return
    names = [BlockName(space, key) for key in chain(first, ids)]
    known = folder.use(names)
    for number in range(known, len(names)):
        if stop():
            return
        write(folder, names[number : number + 1], text, [ids], number)
    if not stop() and (tail := text.tail()):
        tail[NAME_OF_IDS] = torch.tensor([ids[text.whole :]], dtype=torch.int32)
        folder.write(BlockName(space, tail_key(names[-1].key if names else first.hex())), tail, replace=True)


def _first(cache: KeepCache) -> bytes | None:
    """Return the digest that the first block of a text follows; None if ``cache`` cannot begin with blocks."""
    if not begins(cache):
        return None
    return origin(cache, entry_forms(cache.geometry, next(cache.model.parameters()).dtype))


def write(
    folder: BlockFolder, names: Sequence[BlockName], text: TextRows, ids: Sequence[Sequence[int]], first: int
) -> None:
    """Write the blocks ``names`` of a text, from block ``first`` on. ids: of the whole text, by row. Raises
    StoreError."""
    for number, name in enumerate(names, first):
        rows = torch.tensor([row[number * BLOCK :][:BLOCK] for row in ids], dtype=torch.int32)
        folder.write(name, text.block(number) | {NAME_OF_IDS: rows})
