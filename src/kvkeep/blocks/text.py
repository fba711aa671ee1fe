"""The text that a cache has read, as blocks: their rows, and their names.

A block has the rows of :data:`BLOCK` tokens in all full layers. Its name is a digest of everything that its content
depends on: the name of the block before it and its token ids; the first follows a digest of the model, of what computed
the entries, and of their form. So a name stands for a whole text, and equal texts have the same blocks.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvkeep.contracts.exactness import Exactness
from kvkeep.memory.extent import ShapeError
from kvkeep.memory.rows import BLOCK, JoinedRows, Rows, concatenated
from kvkeep.models.fingerprint import fingerprint
from kvkeep.native.structures import NUMERICS_VERSION
from kvkeep.stores.dynamic import DynamicLayer

if TYPE_CHECKING:
    from kvkeep.cache import KeepCache

Block = Mapping[str, Tensor]
NAME_OF_IDS = "token_ids"
"""The name in a block of its token ids, (rows, tokens) int32."""
Forms = dict[str, tuple[Sequence[int], torch.dtype]]
"""Lanes and width, and dtype of rows, by their names in a block."""
_DIGEST_BYTES = 16
TAIL, MESSAGE, STATE = "tail", "message", "state"
"""What is stored after a block: the last text that followed it and filled no block; the end of a prompt's last message,
in which no block ends; and what windows and recurrent states held at the end of the block."""


# -- names ------------------------------------------------------------------------------------------------


def origin(cache: KeepCache, forms: Forms) -> bytes | None:
    """Return the digest that the first block of a text follows; None if the entries of ``cache`` depend on more than
    its token ids. forms: those of the rows of a block."""
    if cache.exactness is not Exactness.EXACT or not cache.stream.record.plain or cache.rows > 1:
        return None
    rows = sorted((name, *shape, str(dtype)) for name, (shape, dtype) in forms.items())
    facts = (fingerprint(cache.model), _computed_by(cache), *rows)
    return blake2b(repr(facts).encode(), digest_size=_DIGEST_BYTES).digest()


def chain(first: bytes, ids: Sequence[int]) -> list[str]:
    """Return the names of all whole blocks of a text that begins after ``first`` (:func:`origin`)."""
    rows, name, names = np.array(ids, np.int32), first, []
    for start in range(0, len(ids) // BLOCK * BLOCK, BLOCK):
        name = blake2b(name + rows[start : start + BLOCK].tobytes(), digest_size=_DIGEST_BYTES).digest()
        names.append(name.hex())
    return names


def key_after(before: str, what: str) -> str:
    """Return the key of :data:`TAIL`, :data:`MESSAGE` or :data:`STATE` after the block ``before``."""
    return blake2b(f"{before} {what}".encode(), digest_size=_DIGEST_BYTES).hexdigest()


def session_key() -> str:
    """Return a new key of a block that no text gives: it belongs to the sessions that name it."""
    return f"x{secrets.token_hex(_DIGEST_BYTES)[1:]}"


def belongs_to_sessions(key: str) -> bool:
    """Return whether a key is one of :func:`session_key`."""
    return key.startswith("x")


def _computed_by(cache: KeepCache) -> tuple[object, ...]:
    """Return what the bits of entries depend on besides model and text. The native library computes the same bits on
    every processor, in any chunks and with every exact method."""
    device, request = cache.made.device, cache.request
    if cache.stream.exact and device.type == "cpu":
        return ("kernels", NUMERICS_VERSION)
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return (torch.__version__, device.type, processor, request.method.name, str(request.budget), request.options())


# -- rows -------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A part of a cache's state that blocks contain: the rows ``start`` to ``stop`` of ``name``."""

    name: str
    start: int
    stop: int


class TextRows:
    """The rows of a cache that has read a text, and the parts of its state that they make up.

    parts: the cache's state (:func:`kvkeep.transfer.parts`).
    """

    def __init__(self, cache: KeepCache, parts: Mapping[str, Tensor | Rows]) -> None:
        self.length, self._parts, self._disk = cache.get_seq_length(), parts, cache.stream.disk
        self._home = None if cache.checkpoint is None else cache.checkpoint.home
        self.start = _first(cache)
        """The first slot of the rows, the beginning of a block: 0, unless a checkpoint has dropped its oldest pages."""
        self.sources: dict[str, Tensor | Rows | JoinedRows] = {}
        """Rows of the text from :attr:`start` on by their names in a block: keys and values of full layers, or
        residuals."""
        self.targets: dict[str, Target] = {}
        """Parts of the state by name."""
        if not self.length:
            return
        for layer in cache.geometry.full_layers:
            for number, kind in enumerate(("keys", "values")):
                self._find(cache.holdings[layer.index], layer.index, number, kind)
        for name, part in parts.items():
            short = name.removeprefix("checkpoint.")
            if short.startswith("residual.") and not isinstance(part, Tensor):
                self._add(short, part, name)

    def _find(self, layer: Any, index: int, number: int, kind: str) -> None:
        short, resident = f"{kind}.{index}", f"layer.{index}.resident.{kind}"
        if isinstance(layer, DynamicLayer):
            return self._add(short, self._parts.get(f"layer.{index}.{kind}"), f"layer.{index}.{kind}")
        checkpoint: Any = self._parts.get(f"checkpoint.{short}")
        newest = getattr(layer.resident, "rows", None)  # those that continue what was evicted in order
        if newest is None:
            return self._add(short, checkpoint, f"checkpoint.{short}")
        rows = newest[number]
        if checkpoint is None or checkpoint.length == rows.first:
            self._add(short, JoinedRows(checkpoint, rows))
            if checkpoint is not None and short in self.sources:
                self.targets[f"checkpoint.{short}"] = Target(short, self.start, checkpoint.length)
        else:
            self._add(short, checkpoint, f"checkpoint.{short}")
        if short in self.sources and resident in self._parts:
            self.targets[resident] = Target(short, rows.first, self.length)
        return None

    def _add(self, short: str, rows: Tensor | Rows | JoinedRows | None, part: str | None = None) -> None:
        """Add rows if they are those of the text from ``start`` on; ``part`` is then restored from them."""
        if rows is None:
            return
        span = (0, rows.shape[-2]) if isinstance(rows, Tensor) else (rows.first, rows.length)
        if span == (self.start, self.length):
            self.sources[short] = rows
            if part is not None:
                self.targets[part] = Target(short, *span)

    @property
    def blocks(self) -> range:
        """The numbers of the whole blocks of the text that there are."""
        return range(self.start // BLOCK, self.length // BLOCK) if self.sources else range(0)

    @property
    def forms(self) -> Forms:
        """The forms of all rows."""
        return forms(self._row())

    @property
    def nbytes(self) -> int:
        """Bytes of all whole blocks."""
        return len(self.blocks) * BLOCK * sum(row.nbytes for row in self._row().values())

    def _row(self) -> dict[str, Tensor]:
        """Return the first row."""
        return {short: self.read(short, self.start, self.start + 1) for short in self.sources}

    def read(self, short: str, start: int, stop: int) -> Tensor:
        """Return the rows ``start`` to ``stop``, (lanes, rows, width)."""
        rows = self.sources[short]
        part = rows.narrow(-2, start, stop - start) if isinstance(rows, Tensor) else concatenated(rows, start, stop)
        return part.flatten(0, -3)

    def block(self, number: int, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return block ``number``: its rows, and its part of the text's ``ids``, by row. Raises EntriesLost."""
        for rows in self.sources.values():
            if not isinstance(rows, Tensor):
                rows.compare([number * BLOCK])
        part = torch.tensor([row[number * BLOCK : (number + 1) * BLOCK] for row in ids], dtype=torch.int32)
        return self._copied(number * BLOCK, (number + 1) * BLOCK) | {NAME_OF_IDS: part}

    def tail(self, stop: int | None = None) -> dict[str, Tensor]:
        """Return the rows of the first ``stop`` tokens (None: of all) that fill no block. Raises EntriesLost."""
        stop = self.length if stop is None else stop
        start = stop // BLOCK * BLOCK
        return self._copied(start, stop) if start < stop else {}

    def _copied(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the rows ``start`` to ``stop``; of a text on disk copies, after which it is known that they could be
        read."""
        rows = {short: self.read(short, start, stop) for short in self.sources}
        if self._home is None or self._home.name != "disk":
            return rows
        rows = {short: one.clone() for short, one in rows.items()}
        self._disk.check()
        return rows


def _first(cache: KeepCache) -> int:
    """Return the first slot that a checkpoint in pages has; 0 where it has dropped none."""
    layers, checkpoint = cache.geometry.full_layers, cache.checkpoint
    if checkpoint is None or not layers or not checkpoint.beginning(layers[0].index):
        return 0
    return checkpoint.first(layers[0].index)


def forms(rows: Block) -> Forms:
    """Return the forms of rows (lanes, n, width), without ids and what windows and recurrent states held."""
    return {
        name: (one.shape[:-2] + one.shape[-1:], one.dtype)
        for name, one in rows.items()
        if name != NAME_OF_IDS and not name.startswith("layer.")
    }


def entry_forms(cache: KeepCache) -> Forms:
    """Return the forms of the entries of one row that a cache of this kind has in all full layers."""
    dtype, found = next(cache.model.parameters()).dtype, Forms()
    for layer in cache.geometry.full_layers:
        found[f"keys.{layer.index}"] = (layer.kv_heads, layer.key_dim), dtype
        found[f"values.{layer.index}"] = (layer.kv_heads, layer.value_dim), dtype
    return found


def pieces(target: Target, blocks: Sequence[Block], tail: Block, number: int) -> Iterator[Tensor]:
    """Yield the rows of a target in order, (lanes, rows, width), as views. number: that of the first block. Raises
    ShapeError if rows are missing."""
    parts = [(at * BLOCK, block[target.name]) for at, block in enumerate(blocks, number)]
    if target.name in tail:
        parts.append(((number + len(blocks)) * BLOCK, tail[target.name]))
    place = target.start
    for first, rows in parts:
        low, high = place - first, min(target.stop - first, rows.shape[-2])
        if 0 <= low < high:
            yield rows if (low, high) == (0, rows.shape[-2]) else rows[:, low:high]
            place = first + high
    if place != target.stop:
        raise ShapeError(f"rows of '{target.name}' are missing")
