"""The tail of banks: columns behind the resident entries, for drafts that are not verified yet."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvkeep.contracts.entries import Piece
from kvkeep.stores.resident.banks import Banks


class DraftTail:
    """The tail of all ``banks`` of one layer."""

    def __init__(self, banks: Banks) -> None:
        self.banks = banks

    def write(self, keys: Tensor, values: Tensor, after: int) -> None:
        """Write new entries (lanes, n, dim) behind the first ``after`` entries of the tail."""
        for bank in self.banks:
            span = slice(bank.used + after, bank.used + after + keys.shape[1])
            bank.keys[:, span], bank.values[:, span] = bank.of(keys), bank.of(values)

    def read(self, count: int) -> tuple[Tensor, Tensor]:
        """Return copies of the first entries, (lanes, count, dim)."""
        first = self.banks.banks[0]
        keys, values = (part.new_empty(self.banks.lanes, count, part.shape[2]) for part in (first.keys, first.values))
        for bank in self.banks:
            span = slice(bank.used, bank.used + count)
            keys[bank.index], values[bank.index] = bank.keys[:, span], bank.values[:, span]
        return keys, values

    def pieces(self, count: int) -> Iterator[Piece]:
        """Yield the resident entries, with the first ``count`` of the tail behind them."""
        for bank in self.banks:
            if bank.columns and bank.used + count:
                yield bank.piece(count)
