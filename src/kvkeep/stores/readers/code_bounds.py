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
from kvkeep.memory.meter import nbytes
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
        self._keys: Tensor | None = None  # those behind the groups, (lanes, n, dim) float32
        self._lengths: Tensor | None = None  # of their errors, (lanes, n) float16; 0 but for keys that had a code

    @property
    def pages(self) -> int:
        return self.length

    def extend(self, keys: Tensor) -> None:
        """Take the next keys, (lanes, n, dim)."""
        keys, lengths = keys.float(), keys.new_zeros(keys.shape[:2], dtype=torch.float16)
        if self._keys is not None and self._lengths is not None:
            keys, lengths = torch.cat([self._keys, keys], 1), torch.cat([self._lengths, lengths], 1)
        self.length += keys.shape[1] - (0 if self._keys is None else self._keys.shape[1])
        coded = keys.shape[1] // GROUP * GROUP
        if coded:
            self._encode(keys[:, :coded].unflatten(1, (-1, GROUP)), lengths[:, :coded].unflatten(1, (-1, GROUP)))
        self._keys, self._lengths = keys[:, coded:].clone(), lengths[:, coded:].clone()

    def _encode(self, keys: Tensor, lengths: Tensor) -> None:
        """Encode groups of keys, (lanes, groups, GROUP, dim), whose errors have ``lengths`` already."""
        codes, scales, offsets = encode(keys.transpose(2, 3), self.bits)
        decoded = CodedKeys(codes, scales, offsets, self.bits).dense(torch.float32).view_as(keys)
        lengths = ((keys - decoded).norm(dim=-1) + lengths.float()) * UPWARDS
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
        assert self._keys is not None and self._lengths is not None
        scores, lengths = rows @ self._keys.transpose(1, 2), self._lengths
        if self._parts[0].length:
            keys, of_codes = self._coded()
            scores, lengths = torch.cat([keys.scores(rows), scores], 2), torch.cat([of_codes, lengths], 1)
        bound = torch.baddbmm(scores, rows.norm(dim=2, keepdim=True), lengths.float()[:, None])
        return bound.unflatten(1, query.shape[1:3])

    def slack(self, query: Tensor) -> Tensor:
        """Return how far a score may be below :meth:`upper`, in the same shape."""
        assert self._lengths is not None
        lengths = self._lengths if not self._parts[0].length else torch.cat([self._coded()[1], self._lengths], 1)
        return 2 * query.float().norm(dim=3, keepdim=True) * lengths.float()[:, None, None]

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on. Of a group that is cut, the codes are decoded, and keep the lengths of
        their errors."""
        self.length = min(self.length, length)
        if self._keys is None or self._lengths is None:
            return
        groups, rest = divmod(self.length, GROUP)
        if groups < self._parts[0].length:
            keys, lengths = self._coded()
            cut = slice(groups * GROUP, groups * GROUP + rest)
            self._keys, self._lengths = keys.dense(torch.float32)[:, cut].clone(), lengths[:, cut].clone()
        else:
            self._keys, self._lengths = self._keys[:, :rest].clone(), self._lengths[:, :rest].clone()
        for rows in self._parts:
            rows.truncate(groups)

    def select(self, lanes: Tensor) -> None:
        for rows in self._parts:
            rows.select(lanes)
        if self._keys is not None and self._lengths is not None:
            index = lanes.to(self._keys.device)
            self._keys, self._lengths = self._keys.index_select(0, index), self._lengths.index_select(0, index)

    def state(self) -> dict[str, Tensor]:
        if self._keys is None or self._lengths is None:
            return {}
        saved = {"bounds.keys": self._keys, "bounds.lengths": self._lengths}
        parts = {f"bounds.{number}": rows.view() for number, rows in enumerate(self._parts) if rows.length}
        return saved | parts

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        if "bounds.keys" in state:
            self.length = length
            self._keys, self._lengths = state["bounds.keys"], state["bounds.lengths"]
            for number, rows in enumerate(self._parts):
                if (part := state.get(f"bounds.{number}")) is not None:
                    rows.append(part)

    def check(self, extent: Extent) -> None:
        groups, rest = divmod(extent.slots, GROUP)
        if self.length != extent.slots or {rows.length for rows in self._parts} != {groups}:
            raise ShapeError(f"bounds are not of {extent.slots} slots")
        if self._keys is None or self._lengths is None:
            return
        fits("bounds", self._keys, (extent.lanes, rest, extent.key_dim), torch.float32)
        fits("bounds", self._lengths, (extent.lanes, rest), torch.float16)
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
        return nbytes(*(rows.data for rows in self._parts), self._keys, self._lengths)


def code_bounds_bytes(heads: int, dim: int, bits: int, tokens: int) -> int:
    """Return the maximum bytes of the bounds of up to ``tokens`` keys of width ``dim`` in ``heads`` KV heads."""
    groups, rest = tokens // GROUP, min(tokens, GROUP - 1)
    group = dim * (GROUP * bits // 8 + 4) + 2 * GROUP
    return heads * (up(groups, BLOCK) * group + rest * (4 * dim + 2))
