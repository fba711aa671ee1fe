"""Attention by the CPU kernel: entries in pieces, bits that do not depend on anything else than the entries.

The kernel (native/attention.h) counts entries from a row's first token and goes through them in blocks of 512 in
order, so a query's result is the same to the bit whether it comes alone or with others, and wherever entries lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention.described import Described, Stretch, grouped
from kvkeep.native.library import (
    KvAttention,
    address,
    address_of,
    copy_pieces,
    kernels,
    library,
    piece_table,
)

BLOCK = 512
"""Entries of a block, as native/attention.h has it."""


def runs(query: Tensor, keys: Any, values: Any) -> bool:
    """Return whether the kernel attends with these: bfloat16 on the CPU, heads of even width, and kernels there."""
    return (
        query.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and any(kind(keys, values) for kind in (_plain, _stretched, _grouped, _by_channel, _sketched))
        and takes(query.shape[-1], values.shape[-1])
        and library() is not None
    )


def takes(key_dim: int, value_dim: int) -> bool:
    """Return whether the kernel takes heads of such widths: pairs of channels, and no more of them than it has zeros
    for a place without an entry."""
    return key_dim % 2 == 0 and max(key_dim, value_dim) <= 1024


def _plain(keys: Any, values: Any) -> bool:
    return isinstance(keys, Tensor) and _bfloat16(keys) and _bfloat16(values)


def _bfloat16(part: Tensor) -> bool:
    return part.dtype == torch.bfloat16 and part.device.type == "cpu"


def _stretched(keys: Any, values: Any) -> bool:
    return isinstance(keys, Stretch)


def _grouped(keys: Any, values: Any) -> bool:
    """Return whether these are codes in groups of a tile."""
    return _laid_out(keys, values, "grouped") and values.width % 16 == 0


def _by_channel(keys: Any, values: Any) -> bool:
    """Return whether these are codes of 8 bits with a scale for each channel."""
    return _laid_out(keys, values, "by channel") and all(
        part.codes.dtype == torch.int8 and part.codes.shape[2] % 16 == 0 for part in (keys, values)
    )


def _sketched(keys: Any, values: Any) -> bool:
    """Return whether these are estimates of as many sums as the kernel has a median for, or their mean."""
    return (
        _laid_out(keys, values, "sketched")
        and (keys.by == "mean" or len(keys.at) in (1, 3, 5))
        and all(_bfloat16(part.cells) and part.cells.shape[2] % 16 == 0 for part in (keys, values))
    )


def _laid_out(keys: Any, values: Any, layout: str) -> bool:
    return getattr(keys, "layout", "") == layout == getattr(values, "layout", "")


class Call:
    """The arguments of one attention: ``pieces`` as those of a :class:`Described`, or several described before, in the
    order of the text; fewer lanes are read in turns. Codes in groups of 32 entries come before all others.

    query: (lanes, groups, queries, dim). past: query m sees entries before past + m + 1; None: all. first, stop: the
    entries that each lane sees, (lanes,) ints. shift: what is added to the number of an entry for its place in blocks,
    (lanes,) ints: minus the padding before a row, plus what lies before the first entry given. mask: (lanes or 1,
    queries or 1, entries) bool, True is seen.
    """

    def __init__(
        self,
        query: Tensor,
        pieces: Sequence[Described | tuple[Any, Any]],
        scaling: float,
        past: int | None = None,
        first: Tensor | None = None,
        stop: Tensor | None = None,
        shift: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        lanes, groups, queries, dim = query.shape
        self.query = query.contiguous()
        self._parts = [piece if isinstance(piece, Described) else Described([piece]) for piece in pieces]
        self.value_dim = self._parts[0].value_dim
        self.bounds = [None if part is None else part.int().contiguous() for part in (first, stop, shift)]
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self._rows = rows = piece_table(sum(len(table.rows) for table in self._parts))
        copy_pieces(rows, [table.rows for table in self._parts])
        self.entries = sum(table.entries for table in self._parts)
        self.struct = KvAttention(
            self.query.data_ptr(),
            address_of(rows),
            *map(address, self.bounds),
            address(self.mask),
            lanes,
            groups,
            queries,
            dim,
            self.value_dim,
            len(rows),
            self.entries,
            -1 if past is None else past,
            0 if self.mask is None or len(self.mask) == 1 else self.mask.stride(0),
            0 if self.mask is None or self.mask.shape[1] == 1 else self.mask.stride(1),
            scaling,
        )

    def attend(
        self, dtype: torch.dtype = torch.bfloat16, state: Tensor | None = None, resumes: bool = False, last: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Return the output (lanes, groups, queries, value_dim) in ``dtype`` (bfloat16 or float32), and the log-sum-exp
        of scores (lanes, groups, queries) float32; zeros and -inf for a query that sees nothing.

        state: made by :meth:`room`, where an attention takes several calls of whole blocks; a later call ``resumes``
        it, and one that is not the ``last`` returns None.
        """
        output = torch.empty(*self.query.shape[:3], self.value_dim, dtype=dtype) if last else None
        lse = torch.empty(self.query.shape[:3], dtype=torch.float32) if last else None
        kernels().kvkeep_attend(
            address_of(self.struct),
            address(output),
            dtype == torch.float32,
            address(lse),
            address(state),
            resumes,
        )
        return None if output is None or lse is None else (output, lse)

    def room(self) -> Tensor:
        """Return room for the state of an attention in several calls."""
        return torch.empty(self.query.shape[:3].numel() * (2 + self.value_dim), dtype=torch.float32)

    def received(self, lse: Tensor, last: int | None = None, greatest: bool = False) -> Tensor:
        """Return the attention each entry received of the ``last`` queries, (lanes, entries) float32: summed, mean over
        the groups, or with ``greatest`` the maximum over both. lse: as :meth:`attend` returned it, over all entries."""
        lse = lse.contiguous()
        out = torch.empty(len(self.query), self.entries, dtype=torch.float32)
        queries = self.query.shape[2]
        wanted = queries if last is None else min(last, queries)
        kernels().kvkeep_received(address_of(self.struct), lse.data_ptr(), wanted, greatest, out.data_ptr())
        return out


def whole(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, start: int, first: Tensor | None
) -> Tensor | None:
    """Return attention over all entries of a layer at once, (batch, heads, queries, value_dim); None where the kernel
    does not run.

    query: (batch, heads, queries, dim). key, value: (batch, kv_heads, entries, dim), slots ``start`` .. of the text,
    the queries' own last. mask: bool, (batch or 1, 1, queries, entries); None: causal. first: the first slot of each
    row that is not padding, (batch,); None without padding.
    """
    if not runs(query, key, value) or (mask is not None and (mask.dtype != torch.bool or mask.shape[1] > 1)):
        return None
    batch, heads, queries, dim = query.shape
    kv_heads, entries = key.shape[1:3]
    if (
        mask is None
        and first is None
        and not start
        and batch == 1
        and key.stride(2) == dim
        and value.stride(2) == value.shape[3]
    ):
        own = query.reshape(kv_heads, heads // kv_heads, queries, dim)
        return alone(own, key[0], value[0], scaling)[0].view(1, heads, queries, -1)
    own = query.reshape(batch * kv_heads, heads // kv_heads, queries, dim)
    lanes = (key.flatten(0, 1), value.flatten(0, 1))
    if mask is not None:
        mask = mask.expand(-1, -1, queries, -1)[:, 0]
        mask = mask if len(mask) == 1 else mask.repeat_interleave(kv_heads, 0)
    seen = shift = None
    if start or first is not None:
        origin = torch.zeros(batch, dtype=torch.int64) if first is None else first
        shift = (start - origin).repeat_interleave(kv_heads)
        seen = (-shift).clamp(min=0) if mask is None else None
    past = entries - queries if mask is None else None
    done = Call(own, [lanes], scaling, past, seen, None, shift, mask).attend()
    assert done is not None
    return done[0].view(batch, heads, queries, -1)


def alone(query: Tensor, key: Tensor, value: Tensor, scaling: float, reduce: str = "") -> tuple[Tensor, Tensor | None]:
    """Return attention over entries that lie in one piece and that all queries see but for their own later ones, with
    the least overhead; and with ``reduce`` "sum" or "max" what each entry received, as :meth:`Call.received`.

    query: (lanes, groups, queries, dim). key, value: (lanes, n, dim), a lane's rows behind each other, the queries' own
    last. Returns (lanes, groups, queries, value_dim) and (lanes, n) float32. Only where the kernel :func:`runs`.
    """
    (lanes, groups, queries, dim), (_, entries, value_dim) = query.shape, value.shape
    query = query.contiguous()
    output = torch.empty(lanes, groups, queries, value_dim, dtype=torch.bfloat16)
    lse = torch.empty(lanes, groups, queries)
    received = torch.empty(lanes, entries) if reduce else None
    kernels().kvkeep_attend_rows(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        key.stride(0),
        value.stride(0),
        lanes,
        groups,
        queries,
        dim,
        value_dim,
        entries,
        scaling,
        output.data_ptr(),
        lse.data_ptr(),
        address(received),
        reduce == "max",
    )
    return output, received


def each_described(query: Tensor, pieces: Sequence[tuple[Any, Any]]) -> list[Described]:
    """Return pieces, each by itself; none where the kernel does not attend to one of them with such a query."""
    return [Described([pair]) for pair in pieces] if all(runs(query, *pair) for pair in pieces) else []


def at_once(
    query: Tensor, own: Described, others: Sequence[Described], scaling: float, reduce: str = "", each: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Return attention of queries that see every entry, in one call: of ``others``, codes in groups among them first,
    and then ``own``. With ``reduce``, "sum" or "max", also what those of own received, as :meth:`Call.received`; and
    with ``each`` those of the others, in their order."""
    parts = [*sorted(others, key=lambda one: not one.grouped), own]
    call = Call(query, parts, scaling)
    done = call.attend()
    assert done is not None
    output, lse = done
    if not reduce:
        return output, []
    if not each:
        return output, [Call(query, [own], scaling).received(lse, None, reduce == "max")]
    received = call.received(lse, None, reduce == "max").split([one.entries for one in parts], 1)
    return output, [received[parts.index(one)] for one in (own, *others)]


class Run:
    """Attention over entries that come in pieces, in the order of the text, in as few calls as memory allows.

    What is there anyhow is collected for one call. What was formed for the moment is attended at once, in whole blocks;
    those entries of it that begin a further block are kept, copied, until that is whole. origin: as :class:`Call`'s
    ``first``, counted from the first piece; blocks are counted from it.
    """

    def __init__(self, query: Tensor, scaling: float, origin: Tensor | None = None) -> None:
        self.query, self.scaling = query, scaling
        self._origin = origin
        self._pieces: list[Described | tuple[Any, Any]] = []
        self._masks: list[tuple[int, Tensor | None]] = []
        self._newest: tuple[Tensor, Tensor] | None = None  # entries of which query i sees the first i + 1
        self._grouped = 0  # pieces that are codes in groups
        self._state: Tensor | None = None
        self._start = 0  # the entries before those at hand
        self._skipped: Tensor | None = None  # of those at hand, what each lane attended already

    def __bool__(self) -> bool:
        return bool(self._pieces) or self._newest is not None or self._state is not None

    def add(self, key: Any, value: Any, mask: Tensor | None, causal: bool, formed: bool) -> None:
        """Add entries (lanes, n, dim) with a mask (lanes or 1, queries or 1, n) bool, or None. causal: as of a
        Segment; they come after all others. formed: they are not kept anywhere else."""
        if causal:
            self._newest = key, value
            return
        if isinstance(key, Described):
            self._pieces.append(key)
            self._masks.append((key.entries, mask))
            return
        if not isinstance(key, Tensor):
            at = self._grouped if grouped(key) else len(self._pieces)
            self._pieces.insert(at, (key, value))
            self._masks.insert(at, (key.shape[2], mask))
            self._grouped, self._origin = self._grouped + grouped(key), None
            return
        self._pieces.append((key, value))
        self._masks.append((key.shape[1], mask))
        if formed:
            self._attend_blocks()

    def output(self) -> tuple[Tensor, Tensor]:
        """Attend to what is left, and return output and log-sum-exp, float32 both."""
        done = self._call(True).attend(torch.float32, self._state, self._start > 0)
        assert done is not None
        return done

    def weighed(self, greatest: bool) -> tuple[Tensor, Tensor]:
        """Return the output, and the attention each entry received, (lanes, entries), as :meth:`Call.received`."""
        call = self._call(True)
        done = call.attend()
        assert done is not None
        return done[0], call.received(done[1], None, greatest)

    def received(self, lse: Tensor, last: int | None, greatest: bool) -> Tensor:
        """Return the attention that each entry received, (lanes, entries), by a log-sum-exp over more than these."""
        return self._call(True).received(lse, last, greatest)

    def _call(self, last: bool, stop: Tensor | None = None) -> Call:
        entries, pieces = sum(count for count, _ in self._masks), self._pieces
        newest = 0
        if last and self._newest is not None:
            newest, pieces = self._newest[0].shape[1], [*pieces, self._newest]
        if not pieces:  # whole blocks, attended already
            pieces = [self._nothing()]
        mask = self._mask(entries, newest)
        past = entries if newest and mask is None else None
        shift = None
        if self._start or self._origin is not None:
            shift = self._start - (self._origin if self._origin is not None else torch.zeros(1, dtype=torch.int64))
            shift = shift.expand(len(self.query))
        return Call(self.query, pieces, self.scaling, past, self._skipped, stop, shift, mask)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        assert self._state is not None
        lanes, *_, dim = self.query.shape
        value_dim = len(self._state) // self.query.shape[:3].numel() - 2
        return self.query.new_empty(lanes, 0, dim), self.query.new_empty(lanes, 0, value_dim)

    def _mask(self, entries: int, newest: int) -> Tensor | None:
        if all(mask is None for _, mask in self._masks):
            return None
        queries = self.query.shape[2]
        lanes = max(len(mask) for _, mask in self._masks if mask is not None)
        rows = queries if newest or any(mask is not None and mask.shape[1] > 1 for _, mask in self._masks) else 1
        whole = torch.ones(lanes, rows, entries + newest, dtype=torch.bool)
        start = 0
        for count, mask in self._masks:
            if mask is not None:
                whole[..., start : start + count] = mask
            start += count
        if newest:
            whole[..., entries:] = torch.ones(queries, newest, dtype=torch.bool).tril()
        return whole

    def _attend_blocks(self) -> None:
        """Attend to the whole blocks at hand, and keep a copy of what lies behind them."""
        entries = sum(count for count, _ in self._masks)
        origin = torch.zeros(1, dtype=torch.int64) if self._origin is None else self._origin
        blocks = (self._start + entries - origin) // BLOCK * BLOCK + origin - self._start
        stop = blocks.clamp(0, entries)
        low = int(stop.min())
        if not low:
            self._keep(0)
            return
        call = self._call(False, stop.expand(len(self.query)))
        if self._state is None:
            self._state = call.room()
        call.attend(state=self._state, resumes=self._start > 0, last=False)
        self._keep(low)
        self._start += low
        self._skipped = (stop - low).expand(len(self.query)) if len(stop) > 1 else None

    def _keep(self, low: int) -> None:
        """Copy what lies behind the first ``low`` entries, of pieces as of masks."""
        pieces, masks = self._pieces, self._masks
        self._pieces, self._masks = [], []
        for pair, (count, mask) in zip(pieces, masks, strict=True):
            assert not isinstance(pair, Described)  # nothing is formed behind pages
            if (cut := min(low, count)) < count:
                keys, values = (part[:, cut:].clone() for part in pair)
                self._pieces.append((keys, values))
                self._masks.append((count - cut, None if mask is None else mask[..., cut:]))
            low -= cut
