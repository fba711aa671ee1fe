"""A token of each of many sessions, kept and attended in one call of the CPU kernel a layer.

What the kernel has to know of a session's layer is told once before a pass (:class:`Arrival`): where the new entry will
lie, what leaves for it, and what its query will attend to. So in a pass nothing is done by session and layer in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention.described import Described
from kvkeep.native.library import (
    KvAttention,
    KvInsert,
    KvStep,
    address_of,
    address_table,
    copy_pieces,
    kernels,
    piece_table,
)


def plain(*rows: Tensor | None) -> bool:
    """Return whether the kernel keeps and attends entries in such tensors."""
    return all(one is not None and one.dtype == torch.bfloat16 and one.device.type == "cpu" for one in rows)


class Arrival:
    """The next entry of each lane of one layer, of one row: how the kernel keeps it, and attends once it is there.

    keys, values: (1, lanes, rows, dim) or (lanes, rows, dim), where it goes, in whatever row. They have to stay where
    they are; what changes from one token to the next is told by :attr:`insert` and :meth:`sees`.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        attention = KvAttention(
            lanes=keys.shape[-3], queries=1, dim=keys.shape[-1], value_dim=values.shape[-1], past=-1
        )
        self.struct = KvStep(attention, KvInsert.into(keys, values))
        self.insert: KvInsert = self.struct.insert
        self._attention: KvAttention = self.struct.attention
        self._rows: Any = None
        self._parts: Sequence[Described] = ()

    @property
    def entries(self) -> int:
        """How many entries its query attends to."""
        return self._attention.entries

    def into(self, keys: Tensor | None, values: Tensor | None) -> bool:
        """Return whether it is made for these."""
        return self.keys is keys and self.values is values

    def sees(self, parts: Sequence[Described]) -> Arrival:
        """Let the query attend to everything that is settled once the entry is there: ``parts``, in the order of the
        text where there is one."""
        count = sum(len(part.rows) for part in parts)
        if self._rows is None or len(self._rows) != count:
            self._rows = piece_table(count)
            self._attention.pieces, self._attention.count = address_of(self._rows), count
        copy_pieces(self._rows, [part.rows for part in parts])
        self._attention.entries, self._parts = sum(part.entries for part in parts), parts
        return self

    def report(self, received: int | None, greatest: bool = False) -> None:
        """Let the kernel write what each entry received of the query to the address ``received``, (lanes, entries)
        float32: the mean over the heads of a lane, or with ``greatest`` the maximum. None: nowhere."""
        self.struct.received, self.struct.greatest = received, greatest


class Together:
    """The arrivals of one layer in a row of tokens, and the places of their tokens in it."""

    def __init__(self, arrivals: Sequence[Arrival], tokens: Sequence[int]) -> None:
        self._arrivals = arrivals
        for arrival, token in zip(arrivals, tokens, strict=True):
            arrival.struct.token = token
        self._table = address_table([address_of(one.struct) for one in arrivals])

    @property
    def address(self) -> int:
        """Where the kernel finds the arrivals."""
        return address_of(self._table)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Keep each token's entry and return attention, (1, tokens, heads, value_dim); that of tokens that are not here
        is not set.

        query: (1, heads, tokens, dim). key, value: (1, kv_heads, tokens, dim). bfloat16 on the CPU, all of them.
        """
        heads, tokens = query.shape[1:3]
        query, key, value = query.transpose(1, 2).contiguous(), key.contiguous(), value.contiguous()
        out = torch.empty(1, tokens, heads, value.shape[3], dtype=torch.bfloat16)
        lse = torch.empty(tokens, heads)
        kernels().kvkeep_attend_sessions(
            self.address,
            len(self._arrivals),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            tokens,
            heads,
            False,
            scaling,
            out.data_ptr(),
            lse.data_ptr(),
        )
        return out
