"""Bounds on scores: codes of all keys, and the length of each code's error.

For any query q, a key k and its code k', q·k = q·k' + q·(k - k') <= q·k' + ‖q‖ ‖k - k'‖ (Cauchy-Schwarz). Codes have a
scale for each channel and 32 keys, as KIVI's (arXiv:2402.02750, section 3). The error's length is measured, not
derived from the scale, so that rounding of scales counts. The bound holds for real numbers; in floating point it holds
up to rounding.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.memory.extent import Extent, ShapeError, fits, fits_each
from kvkeep.memory.rows import Buffer, up
from kvkeep.stores.evicted.coded import CodedKeys, encode
from kvkeep.stores.evicted.groups import GROUP
from kvkeep.stores.readers.bounds import BLOCK

UPWARDS = 1 + 2.0**-10
"""A factor by which a length in float16 is not below that in float32."""


class CodeBounds:
    """The bounds of one layer's keys, each by itself, with codes of ``bits`` bits: 2, 4 or 8. A last group that is not
    full keeps its keys."""

    page: ClassVar[int] = 1
    """Slots with one bound."""

    def __init__(self, bits: int) -> None:
        self.bits, self.length = bits, 0
        self._parts = [Buffer(BLOCK) for _ in range(4)]  # by group: codes, scales, offsets, lengths of errors
        # The keys behind the groups, (lanes, n, dim) float32, and the lengths of their errors, (lanes, n, 1) float16,
        # which are 0 but for keys that had a code.
        self._rest = [Buffer(GROUP), Buffer(GROUP)]

    @property
    def pages(self) -> int:
        return self.length

    def extend(self, keys: Tensor) -> None:
        """Take the next keys, (lanes, n, dim)."""
        new = [keys.float(), keys.new_zeros(*keys.shape[:2], 1, dtype=torch.float16)]
        self.length += keys.shape[1]
        waiting = self._rest[0].length
        if waiting + keys.shape[1] >= GROUP:
            if waiting:
                new = [torch.cat([rows.view(), part], 1) for rows, part in zip(self._rest, new, strict=True)]
            coded = new[0].shape[1] // GROUP * GROUP
            self._encode(*(part[:, :coded].unflatten(1, (-1, GROUP)) for part in new))
            new = [part[:, coded:] for part in new]
            for rows in self._rest:
                rows.truncate(0)
        for rows, part in zip(self._rest, new, strict=True):
            rows.append(part)

    def _encode(self, keys: Tensor, lengths: Tensor) -> None:
        """Encode groups of keys, (lanes, groups, GROUP, dim), whose errors have ``lengths`` already, (lanes, groups,
        GROUP, 1)."""
        codes, scales, offsets = encode(keys.transpose(2, 3), self.bits)
        decoded = CodedKeys(codes, scales, offsets, self.bits).dense(torch.float32).view_as(keys)
        lengths = ((keys - decoded).norm(dim=-1) + lengths[..., 0].float()) * UPWARDS
        parts = codes.flatten(2), scales.flatten(2), offsets.flatten(2), lengths.half()
        for rows, part in zip(self._parts, parts, strict=True):
            rows.append(part)

    def _coded(self) -> tuple[CodedKeys, Tensor]:
        """Return the keys of all groups, and the lengths of their errors, (lanes, entries)."""
        codes, scales, offsets, lengths = (rows.view() for rows in self._parts)
        dim = scales.shape[2]
        keys = CodedKeys(codes.unflatten(2, (dim, -1)), scales[..., None], offsets[..., None], self.bits)
        return keys, lengths.flatten(1)

    def upper(self, query: Tensor) -> Tensor:
        """Return upper bounds of the scores (not scaled) of ``query`` (lanes, heads, queries, dim) with each key:
        (lanes, heads, queries, slots) float32."""
        rows = query.flatten(1, 2).float()
        scores = rows @ self._rest[0].view().transpose(1, 2)
        if self._parts[0].length:
            scores = torch.cat([self._coded()[0].scores(rows), scores], 2)
        bound = torch.baddbmm(scores, rows.norm(dim=2, keepdim=True), self._lengths().float()[:, None])
        return bound.unflatten(1, query.shape[1:3])

    def _lengths(self) -> Tensor:
        """Return the lengths of all errors, (lanes, slots) float16."""
        rest = self._rest[1].view()[..., 0]
        return torch.cat([self._coded()[1], rest], 1) if self._parts[0].length else rest

    def slack(self, query: Tensor) -> Tensor:
        """Return how far any score of a query may be below :meth:`upper`: (lanes, heads, queries, 1) float32."""
        longest = self._lengths().amax(1).float()[:, None, None, None]
        return 2 * longest * query.float().norm(dim=3, keepdim=True)

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on. Of a group that is cut, the codes are decoded, and keep the lengths of
        their errors."""
        self.length = min(self.length, length)
        groups, rest = divmod(self.length, GROUP)
        if groups < self._parts[0].length:
            keys, lengths = self._coded()
            cut = slice(groups * GROUP, groups * GROUP + rest)
            for rows, part in zip(self._rest, (keys.dense(torch.float32), lengths[..., None]), strict=True):
                rows.truncate(0)
                rows.append(part[:, cut])
        for rows in self._rest:
            rows.truncate(rest)
        for rows in self._parts:
            rows.truncate(groups)

    def select(self, lanes: Tensor) -> None:
        for rows in (*self._parts, *self._rest):
            rows.select(lanes)

    def state(self) -> dict[str, Tensor]:
        if self._rest[0].data is None:
            return {}
        saved = {"bounds.keys": self._rest[0].view(), "bounds.lengths": self._rest[1].view()[..., 0]}
        parts = {f"bounds.{number}": rows.view() for number, rows in enumerate(self._parts) if rows.length}
        return saved | parts

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        if "bounds.keys" in state:
            self.length = length
            self._rest[0].append(state["bounds.keys"])
            self._rest[1].append(state["bounds.lengths"][..., None])
            for number, rows in enumerate(self._parts):
                if (part := state.get(f"bounds.{number}")) is not None:
                    rows.append(part)

    def check(self, extent: Extent) -> None:
        groups, rest = divmod(extent.slots, GROUP)
        if self.length != extent.slots or {rows.length for rows in self._parts} != {groups}:
            raise ShapeError(f"bounds are not of {extent.slots} slots")
        if self._rest[0].data is None:
            return
        fits("bounds", self._rest[0].view(), (extent.lanes, rest, extent.key_dim), torch.float32)
        fits("bounds", self._rest[1].view(), (extent.lanes, rest, 1), torch.float16)
        if groups:
            made = CodeBounds(self.bits)
            made.extend(torch.zeros(1, GROUP, extent.key_dim))
            fits_each(
                "bounds",
                [rows.view() for rows in self._parts],
                [rows.view() for rows in made._parts],
                (extent.lanes, groups),
            )

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in (*self._parts, *self._rest))


def code_bounds_bytes(heads: int, dim: int, bits: int, tokens: int) -> int:
    """Return the maximum bytes of the bounds of up to ``tokens`` keys of width ``dim`` in ``heads`` KV heads."""
    return heads * (up(tokens // GROUP, BLOCK) * group_of_codes(dim, bits) + GROUP * (4 * dim + 2))


def group_of_codes(dim: int, bits: int) -> int:
    """Return the bytes of the bounds of one group of keys of width ``dim``."""
    return dim * (GROUP * bits // 8 + 4) + 2 * GROUP
