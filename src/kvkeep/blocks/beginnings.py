"""Beginnings: a cache takes the first tokens of a prompt from blocks, whoever stored them for the same owner.

Only exact caches do, because their entries depend on nothing but the tokens before. A text is found by the names of its
blocks (:mod:`~kvkeep.blocks.text`), so a client need not name a session.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep import transfer
from kvkeep.blocks.folder import BlockFolder, BlockName
from kvkeep.blocks.text import (
    MESSAGE,
    NAME_OF_IDS,
    STATE,
    TAIL,
    Block,
    TextRows,
    belongs_to_sessions,
    chain,
    entry_forms,
    forms,
    key_after,
    origin,
)
from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.cached_text import common_prefix
from kvkeep.errors import EntriesLost, StoreError
from kvkeep.memory.disk_rows import check_read
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.rows import BLOCK

log = logging.getLogger(__name__)

ENDS = 4
"""The maximum number of ends, of blocks and of a message, at which windows and recurrent states are kept."""


def begins(cache: KeepCache) -> bool:
    """Return whether a cache of this kind can begin with blocks: it is exact, and made of entries, windows and
    recurrent states."""
    if cache.exactness is not Exactness.EXACT or cache.reading or cache.positions is not None:
        return False
    return not cache.geometry.unbounded_layers and (cache.checkpoint is None or not cache.checkpoint.by_token)


def watch(cache: KeepCache, *places: int, message_end: int = 0) -> None:
    """Keep what windows and recurrent states hold at the end of a block, while the cache reads a prompt and an answer.
    A text can be continued nowhere else: :func:`keep` stores it, and a cache goes back there
    (:func:`kvkeep.transfer.rewind`). Kept are the last end, and the last one before each of ``places``, at most two
    numbers of tokens. message_end: the number of tokens up to the end of the prompt's last message; what they hold
    there is kept as well, because the next prompt may have the answer in another form. Other caches need nothing of
    this."""
    if cache.stream.moving and begins(cache):
        cache.stream.record.end_message(message_end)
        cache.stream.record.tell(on_block=partial(_keep_end, cache, places))


def _keep_end(cache: KeepCache, places: Sequence[int], length: int) -> None:
    ends = {**cache.stream.record.ends}
    ends[length] = {name: tensor.clone() for name, tensor in transfer.last_token_state(cache).items()}
    blocks = [end for end in ends if not end % BLOCK]
    last = {max((end for end in blocks if end <= place), default=0) for place in (*places, length)}
    last.add(cache.stream.record.message_end)
    cache.stream.record.keep_ends({end: state for end, state in ends.items() if end in last})


def find(folder: BlockFolder, space: str, cache: KeepCache, prompt: Sequence[int]) -> list[BlockName]:
    """Return the blocks in ``folder`` with which ``cache``, which is empty, can begin ``prompt``, and perhaps what
    follows them: the tail of a text, or of a message."""
    if (first := _first(cache)) is None:
        return []
    names = [BlockName(space, key) for key in chain(first, prompt[:-1])]
    names = names[: folder.use(names)]
    before = names[-1].key if names else first.hex()
    tails = [one for what in (TAIL, MESSAGE) if folder.size(one := BlockName(space, key_after(before, what)))]
    if len(tails) > 1:
        tails = [max(tails, key=lambda one: _begun_with(folder, one, prompt[len(names) * BLOCK : -1]))]
    return [*names, *tails] if folder.use(tails, saved=len(names) + 1) else names


def _begun_with(folder: BlockFolder, tail: BlockName, text: Sequence[int]) -> int:
    """Return the number of tokens of a tail, if ``text`` begins with them; else 0."""
    with suppress(StoreError, LookupError):
        ids = folder.read(tail)[NAME_OF_IDS].flatten().tolist()
        return len(ids) if ids == [*text[: len(ids)]] else 0
    return 0


def begin(folder: BlockFolder, cache: KeepCache, names: Sequence[BlockName], prompt: Sequence[int]) -> int:
    """Fill ``cache``, which is empty, with the first tokens of ``prompt`` from blocks; return how many. One token at
    least is left to read. A block that is missing or damaged ends them."""
    found, error = folder.read_first(names, transfer.home_of_blocks(cache))
    if error is not None:
        log.warning("A prompt is read from token %d on: %s", len(found) * BLOCK, error)
    blocks: list[Block] = []
    for number, block in enumerate(fitting(cache, found)):
        ids = block[NAME_OF_IDS][0].tolist()
        start = number * BLOCK
        text = prompt[start : min(start + len(ids), len(prompt) - 1)]
        count = len(ids) if ids == text else common_prefix(ids, text)
        if count == len(ids):
            blocks.append(block)
        elif count and len(ids) < BLOCK and not cache.stream.moving:  # a tail may have other tokens than the prompt
            blocks.append({name: rows[:, :count] for name, rows in block.items()})
        if count < BLOCK:
            break
    state = _last_state(folder, names, blocks) if cache.stream.moving else {}
    fill(cache, blocks, state)
    try:
        check_read(*(tensor for block in blocks for tensor in block.values()))
    except EntriesLost as error:
        log.warning("A prompt is read from its first token on: %s", error)
        cache.reset()
    return cache.get_seq_length()


def fitting(cache: KeepCache, blocks: Sequence[Block]) -> list[Block]:
    """Return the first ``blocks`` that hold the entries of one row of ``cache``."""
    expected = entry_forms(cache)

    def fits(block: Block) -> bool:
        ids = block.get(NAME_OF_IDS)
        if ids is None or ids.dtype != torch.int32 or forms(block) != expected:
            return False
        return ids.shape == (1, ids.shape[-1]) and {block[name].shape[-2] for name in expected} == {len(ids[0])}

    return [*itertools.takewhile(fits, blocks)]


def _last_state(folder: BlockFolder, names: Sequence[BlockName], blocks: list[Block]) -> dict[str, Tensor]:
    """Return what windows and recurrent states held after ``blocks``; remove the last ones until that is stored."""
    while blocks:
        if len(blocks[-1][NAME_OF_IDS][0]) < BLOCK:
            return {name: tensor for name, tensor in blocks[-1].items() if name.startswith("layer.")}
        name = names[len(blocks) - 1]
        with suppress(StoreError):
            state = folder.read(one := BlockName(name.space, key_after(name.key, STATE)))
            folder.use([one], saved=len(blocks))
            return state
        blocks.pop()
    return {}


@outside_inference_mode
def fill(cache: KeepCache, blocks: Sequence[Block], state: dict[str, Tensor]) -> None:
    """Fill ``cache``, which is empty and :func:`begins`, with ``blocks`` in order. state: what windows and recurrent
    states held after them."""
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
            [block[f"{kind}.{layer.index}"].unsqueeze(0).to(device) for block in blocks] for kind in ("keys", "values")
        )
        target.adopt(keys, values)
    transfer.restore_last(cache, state, length)


def keep(
    folder: BlockFolder, space: str, cache: KeepCache, ids: Sequence[int], stop: Callable[[], bool] = lambda: False
) -> None:
    """Store the text ``ids`` that ``cache`` has read: its whole blocks, and the tail after them; of what windows and
    recurrent states held, also the end of the last message before the answer. stop: called before each of them; if it
    returns True, no more are stored. Of a text larger than the quota, only the beginning is stored.
    Raises StoreError."""
    if (first := _first(cache)) is None:
        return
    text = TextRows(cache, transfer.parts(cache))
    if text.forms != entry_forms(cache):
        return
    keys = chain(first, ids)
    names = [BlockName(space, key) for key in keys[: folder.fitting(len(keys), text.nbytes)]]
    known = folder.use(names)
    for number in range(known, len(names)):
        if stop():
            return
        folder.write(names[number], text.block(number, [ids]), text=names)
    for length, state in cache.stream.record.ends.items():
        if not length % BLOCK and length <= len(names) * BLOCK:
            folder.write(BlockName(space, key_after(keys[length // BLOCK - 1], STATE)), state, text=names)
    message = cache.stream.record.message_end
    ends = [(MESSAGE, message, cache.stream.record.ends.get(message))]
    if len(names) == len(keys):
        ends.append((TAIL, len(ids), transfer.last_token_state(cache)))
    for what, length, moving in ends:
        before = length // BLOCK
        if moving is None or length > len(ids) or before > len(names) or stop() or not (rows := text.tail(length)):
            continue
        part = torch.tensor([ids[before * BLOCK : length]], dtype=torch.int32)
        name = BlockName(space, key_after(keys[before - 1] if before else first.hex(), what))
        folder.write(name, {**rows, **moving, NAME_OF_IDS: part}, replace=True, text=[*names, name])


class Stored(NamedTuple):
    """What prompts can begin with."""

    tokens: int
    bytes: int


def stored(folder: BlockFolder) -> Stored:
    """Return the tokens and bytes of all blocks with which a prompt of their owner can begin."""
    names = [name for name in folder.names() if not belongs_to_sessions(name.key)]
    tokens = sum(folder.shapes(name).get(NAME_OF_IDS, (0,))[-1] for name in names)
    return Stored(tokens, sum(map(folder.size, names)))


def _first(cache: KeepCache) -> bytes | None:
    """Return the digest that the first block of a text follows; None if ``cache`` cannot begin with blocks."""
    if not begins(cache):
        return None
    return origin(cache, entry_forms(cache))
