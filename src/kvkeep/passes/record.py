"""What a cache knows of the text that it has read, and the functions that it calls with its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.memory.rows import BLOCK

Listener = Callable[[int], None]
"""Receives the number of tokens so far."""


class TextRecord:
    """The text of one cache."""

    def __init__(self) -> None:
        self._plain = True
        self._unread: Tensor | None = None  # of passes whose positions or mask lie on a device: reading waits for it
        self.text: tuple[int, list[int]] | None = None
        """The length of the text that was read, and a digest of each row; None if not known."""
        self.continues = False
        """The present pass reads a part of a text that is not its last."""
        self.blocks: list[str] = []
        """Names of the blocks that have been stored (:mod:`kvkeep.blocks`)."""
        self.ends: dict[int, dict[str, Tensor]] = {}
        """The windows and recurrent states at ends of blocks (:mod:`kvkeep.blocks`) and at :attr:`message_end`, by the
        number of tokens."""
        self.message_end = 0
        """The number of tokens at the end of the last message of the prompt that is read next. 0: there is none."""
        self.on_progress: Listener | None = None
        """Called after every pass."""
        self.on_block: Listener | None = None
        """Called after a pass when the tokens so far are a whole number of blocks
        (:data:`~kvkeep.memory.rows.BLOCK`), or :attr:`message_end`. With it, chunks of an exact cache also end there,
        and at the last block end before a prompt's last token. At these places
        :func:`kvkeep.transfer.last_token_state` returns what windows and recurrent states need to begin again."""
        self._undone = False

    def begin_with(self, plain: bool) -> None:
        """Note that the cache was given the entries of a text. plain: whether its token ids alone give it."""
        self._plain, self._unread = plain, None

    @property
    def plain(self) -> bool:
        """Whether the text is given by its token ids alone: entries of an exact cache depend on nothing else."""
        if self._unread is not None:
            self._plain, self._unread = self._plain and bool(self._unread), None
        return self._plain

    def note_pass(self, plain: bool | Tensor) -> None:
        """Note a pass. plain: whether its token ids alone give its part of the text; a tensor is not read before
        :attr:`plain` is."""
        if isinstance(plain, Tensor):
            self._unread = plain if self._unread is None else self._unread & plain
        else:
            self._plain = self._plain and plain

    def note_text(self, text: tuple[int, list[int]] | None) -> None:
        """Set :attr:`text`."""
        self.text = text

    def grow_to(self, length: int) -> None:
        """Forget :attr:`text` if it lacks some of the ``length`` tokens that are read after the next pass."""
        if self.text is not None and self.text[0] < length:
            self.text = None

    def expect_more(self, more: bool) -> None:
        """Note whether the text goes on after the tokens of the next passes."""
        self.continues = more

    def name_blocks(self, names: Sequence[str]) -> None:
        """Note which blocks of the text are stored, by name."""
        self.blocks = [*names]

    def keep_ends(self, ends: dict[int, dict[str, Tensor]]) -> None:
        """Set :attr:`ends`."""
        self.ends = {**ends}

    @property
    def end_bytes(self) -> int:
        """Bytes of :attr:`ends`."""
        return sum(tensor.nbytes for end in self.ends.values() for tensor in end.values())

    def end_message(self, length: int) -> None:
        """Set :attr:`message_end`."""
        self.message_end = length

    def tell(self, on_progress: Listener | None = None, on_block: Listener | None = None) -> None:
        """Set :attr:`on_progress` and :attr:`on_block`, each only if it is given."""
        self.on_progress, self.on_block = on_progress or self.on_progress, on_block or self.on_block

    def tell_nobody(self) -> None:
        """Call no listener from now on."""
        self.on_progress = self.on_block = None

    def note_undone(self) -> None:
        """Note that a pass was undone. Entries that it had evicted for good are missing."""
        self._undone = True

    def take_undone(self) -> bool:
        """Return whether a pass was undone since the last call."""
        undone, self._undone = self._undone, False
        return undone

    def forget_from(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        self.ends = {count: state for count, state in self.ends.items() if count <= length}
        del self.blocks[length // BLOCK :]
        if self.text is not None and length < self.text[0]:
            self.text = None

    def select(self, rows: Sequence[int]) -> None:
        """Make the rows of the batch those of ``rows``."""
        if self.text is not None:
            length, digests = self.text
            self.text = length, [digests[row] for row in rows]
        self.blocks, self.ends = [], {}


def given_by_ids(ids: Tensor | None, positions: Tensor | None, mask: Any, start: int) -> bool | Tensor:
    """Return whether a pass is given by its token ids: it has no embeddings, no padding and no other mask, and its
    positions are those from ``start`` on. On a device the result is a tensor, because comparing would wait."""
    given = [one for one in (positions, mask) if one is not None]
    if ids is None or any(not isinstance(one, Tensor) or one.ndim != 2 for one in given):
        return False
    same: bool | Tensor = True
    if mask is not None:
        same = mask.all()
    if positions is not None:
        stop = start + positions.shape[1]
        same = same & (positions == torch.arange(start, stop, device=positions.device)).all()
    return bool(same) if isinstance(same, Tensor) and same.device.type == "cpu" else same
