"""Attention of one layer by the kernels: tasks, their launches, and calls as those of the native library."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kvkeep.errors import KvkeepError, ran_out_of_memory
from kvkeep.plugins import first_line
from kvkeep.step import native
from kvkeep.step.constants import on_device, sent
from kvkeep.step.plan import Segment, Span, Writes
from kvkeep.step.scores import cap_of
from kvkeep.step.triton import kernels
from kvkeep.step.triton.tables import PageTable, alignment, divided, piece, readable_span

MAX_DIM = 256
"""The maximum width of keys and values."""
MAX_FEW = 16
"""The maximum number of queries whose blocks of entries are read at the same time. As many tokens are planned at most.
"""
FEW_ROWS, MANY_ROWS = 16, 32
"""Rows of a tile of queries: the most whose numbers fit in registers with heads of 128 numbers of 16 bits. Tiles of
float32 have the fewer rows: with heads of 256 numbers, more would not fit in the shared memory of every GPU."""
ATTENDS = {"num_warps": 8, "enable_fp_fusion": False}
COPIES = {"num_warps": 1, "enable_fp_fusion": False}
"""How kernels are compiled: those that read tiles of entries, and those that read a row at a time."""
EVERYTHING = 2**40
"""Behind all entries."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attends(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernels attend with such tensors: floating-point ones on a GPU that runs the kernels."""
    return dtype in _DTYPES and (kernels.INTERPRETED.value or (device.type == "cuda" and works(device, dtype)))


@cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels give what plain operations give, for a few queries and for many. If not, a warning
    says why: a machine may have no C compiler, which triton needs, and older GPUs have no products of bfloat16."""
    numbers = torch.arange(2 * 70 * MAX_DIM, device=device).sin().to(dtype).view(2, 70, MAX_DIM)
    try:
        for queries in (1, MAX_FEW + 1):
            query, past = numbers[:, None, -queries:].repeat(1, 2, 1, 1), 70 - queries
            found = GpuCall(query, [Span(numbers, numbers, 0, 70)], 0.3, past).attend(torch.float32)
            seen = torch.ones(queries, 70, dtype=torch.bool, device=device).tril(past)
            scores = 0.3 * query.float() @ numbers[:, None].float().transpose(2, 3)
            wanted = scores.masked_fill(~seen, float("-inf")).softmax(3) @ numbers[:, None].float()
            if found is None or not torch.allclose(found[0], wanted, atol=0.01):
                raise KvkeepError("they differ from torch's operators")
    except Exception as error:
        if isinstance(error, torch.AcceleratorError) or ran_out_of_memory(error):
            raise
        warnings.warn(
            f"triton's kernels do not attend to entries of {dtype} on '{device}' ({first_line(error)}), so operators "
            "of torch attend instead; triton needs a C compiler.",
            stacklevel=2,
        )
        return False
    return True


def can_attend(query: Tensor, keys: Any, values: Any) -> bool:
    """Return whether the kernels attend with these tensors: all of one type, on the same GPU, in heads of supported
    widths."""
    if not attends(query.dtype, query.device):
        return False
    return supports_dims(keys.shape[-1], values.shape[-1]) and readable_span(keys, values, query)


def supports_dims(key_dim: int, value_dim: int) -> bool:
    """Return whether the kernels support these widths of a head."""
    return max(key_dim, value_dim) <= MAX_DIM


def can_join(query: Tensor, segment: Segment) -> bool:
    """Return whether the kernels attend to a segment together with others."""
    return native.joinable(query, segment) and can_attend(query, segment.key, segment.value)


@dataclass(slots=True)
class LaneTask:
    """The queries of some lanes, and the entries that they attend to."""

    lanes: int
    queries: int
    spans: Sequence[Span]
    """In the order of the text. Lane l reads lane l mod n of a span with n lanes."""
    past: int = EVERYTHING
    """Query m sees entries before past + m + 1."""
    query: int = 0
    """The place of the first query in its tensor."""
    output: int = 0
    """The place of its result."""
    head: int = 0
    """The first of its heads."""
    mask: Tensor | None = None
    """(lanes or 1, queries or 1, entries or more) bool, True is seen."""
    bounds: Sequence[Tensor | None] = (None, None, None)
    """First entries, the ones behind the last, and what is added to the number of an entry to find its place in blocks:
    (lanes,) int32 each."""


@dataclass(slots=True)
class Layout:
    """Where queries, or results, of a launch lie: strides of lanes, of queries that share a lane, and of tokens."""

    tensor: Tensor
    lane: int
    group: int
    token: int


@dataclass(slots=True)
class Writing:
    """New entries of some lanes, and where they and those that they evict go."""

    key: Tensor
    """(1, lanes, tokens, key_dim)"""
    value: Tensor
    numbers: list[int]
    """The fields of some writes."""
    lanes: int
    """The maximum number of their lanes."""
    steps: list[int]
    """Ids of the steps that write, which are noted in ``writes``."""
    writes: Writes

    def launch(self, table: Tensor) -> None:
        """Write them. table: it begins with the numbers."""
        key, value = self.key, self.value
        count = len(self.numbers) // kernels.W_FIELDS.value * self.lanes
        widths = {"K": padded(key.shape[3]), "V": padded(value.shape[3]), "DIM": key.shape[3]}
        strides = key.stride(1), key.stride(2), value.stride(1), value.stride(2)
        given = {**widths, "VALUE_DIM": value.shape[3], **COPIES}
        kernels.write_entries[count,](table, key, value, *strides, self.lanes, **given)
        self.writes.steps.update(self.steps)


@dataclass(slots=True)
class _Numbers:
    """The fields of some tasks, and of the pieces that they read."""

    tasks: list[int]
    pieces: list[int]
    pages: list[PageTable | None]
    """Tables that must live until the kernels are launched."""
    parts: int = 0
    """Rows of partial results."""
    blocks: int = 1
    """The maximum number of blocks that a lane reads."""
    results: int = 0
    """The number of queries, those of every lane and group."""

    @classmethod
    def of(cls, tasks: Sequence[LaneTask], groups: int, rows: int) -> _Numbers:
        """Return the numbers of tasks. rows: partial results of a block, 0 if there are none."""
        made = cls([], [], [])
        for task in tasks:
            pages, spans = divided(task.spans)
            stop = paged = 0 if pages is None else pages.entries
            pieces = len(tasks) * kernels.T_FIELDS.value + len(made.pieces)
            for span in spans:
                made.pieces += piece(span, stop - paged)
                stop += span.entries
            blocks = triton.cdiv(min(stop, task.past + task.queries), kernels.BLOCK_ENTRIES)
            blocks += any(bound is not None for bound in task.bounds)  # the first one may begin within a block
            made.tasks += [task.lanes, task.queries, stop, task.past, task.query, task.output]
            made.tasks += [0, 0, 0] if pages is None else [pages.numbers.data_ptr(), pages.index_at, paged]
            made.tasks += [pieces, len(spans)]
            if (mask := task.mask) is None:
                made.tasks += [0, 0, 0]
            else:
                made.tasks.append(mask.data_ptr())
                made.tasks += [mask.stride(axis) if mask.shape[axis] > 1 else 0 for axis in (0, 1)]
            made.tasks += [0 if bound is None else bound.data_ptr() for bound in task.bounds]
            made.tasks += [made.parts, blocks, task.head, made.results]
            made.pages.append(pages)
            made.parts, made.blocks = made.parts + rows * blocks, max(made.blocks, blocks)
            made.results += task.lanes * groups * task.queries
        return made


def launch(
    tasks: Sequence[LaneTask],
    query: Layout,
    output: Layout,
    groups: int,
    scaling: float,
    sinks: Tensor | None = None,
    state: Tensor | None = None,
    resumes: bool = False,
    last: bool = True,
    writing: Writing | None = None,
) -> Tensor:
    """Attend, and return the log-sum-exp of scores, in order of task, lane, group and query, float32. state, resumes,
    last: as those of :meth:`GpuCall.attend`. writing: what is written before."""
    queries = max(task.queries for task in tasks)
    few, narrow = queries <= MAX_FEW, query.tensor.dtype != torch.float32
    rows = MANY_ROWS if narrow and not few else FEW_ROWS
    lanes, tiles = max(task.lanes for task in tasks), triton.cdiv(queries * groups, rows)
    made = _Numbers.of(tasks, groups, lanes * tiles * rows if few else 0)
    device, dim, value_dim = query.tensor.device, tasks[0].spans[0].keys.shape[-1], tasks[0].spans[0].values.shape[-1]
    before = () if writing is None else writing.numbers
    table = on_device([*before, *made.tasks, *made.pieces], device)
    tasks_at, anchor = table[len(before) :], table.view(query.tensor.dtype)
    lse = torch.empty(made.results, dtype=torch.float32, device=device)
    shapes = {"ROWS": rows, "V": padded(value_dim), "VALUE_DIM": value_dim}
    reads = {"K": padded(dim), "DIM": dim, "ALIGN": alignment(dim, query.tensor.dtype), "CAP": cap_of(scaling)}
    reads["VALUE_ALIGN"] = alignment(value_dim, query.tensor.dtype)
    counts = lanes, tiles, groups
    queried = query.lane, query.group, query.token
    stored = output.tensor, lse, lse if state is None else state, lse if sinks is None else sinks
    placed = output.lane, output.group, output.token
    ends = 1 if sinks is None else len(sinks), int(resumes), int(last)
    programs = len(tasks) * lanes * tiles
    with torch.cuda.device_of(query.tensor):
        if writing is not None:
            writing.launch(table)
        if few:
            sums = torch.empty(made.parts, 2, dtype=torch.float32, device=device)
            partial = torch.empty(made.parts, shapes["V"], dtype=torch.float32, device=device)
            kernels.attend_block[programs, made.blocks](
                tasks_at, anchor, query.tensor, partial, sums, scaling, *queried, *counts,
                **shapes, **reads, **ATTENDS,
            )  # fmt: skip
            kernels.combine[programs, min(rows, queries * groups)](
                tasks_at, partial, sums, *stored, *placed, *counts, *ends, **shapes, SINKS=sinks is not None, **COPIES
            )
        else:
            kernels.attend_chunk[programs,](
                tasks_at, anchor, query.tensor, *stored, scaling, *queried, *placed, *counts, *ends,
                **shapes, **reads, SINKS=sinks is not None, **ATTENDS,
            )  # fmt: skip
    return lse


def padded(width: int) -> int:
    """Return the number of columns of a tile for heads of this width: products need 16, and a power of two."""
    return max(16, triton.next_power_of_2(width))


class GpuCall:
    """The arguments of one attention, as those of the native library's (:class:`kvkeep.step.native.Call`)."""

    def __init__(
        self,
        query: Tensor,
        spans: Sequence[Span],
        scaling: float,
        past: int | None = None,
        first: Tensor | None = None,
        stop: Tensor | None = None,
        shift: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        lanes, _, queries, _ = query.shape
        self.query, self.scaling, self._sinks = query.contiguous(), scaling, sinks
        self.value_dim: int = spans[0].values.shape[-1]
        mask, *bounds = (
            None if part is None else sent(part.contiguous(), query.device)
            for part in (mask, *(None if bound is None else bound.int() for bound in (first, stop, shift)))
        )
        if window is not None and past is not None:
            mask = query.new_ones(1, queries, sum(span.entries for span in spans), dtype=torch.bool)
            mask = mask.tril(past).triu(past - window + 1)
        self._task = LaneTask(lanes, queries, spans, EVERYTHING if past is None else past, mask=mask, bounds=bounds)

    @staticmethod
    def reads(query: Tensor, keys: Any, values: Any) -> bool:
        """Return whether the kernels attend with these tensors."""
        return can_attend(query, keys, values)

    def attend(
        self, dtype: torch.dtype = torch.bfloat16, state: Tensor | None = None, resumes: bool = False, last: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Return the output (lanes, groups, queries, value_dim) in ``dtype``, and the log-sum-exp of scores (lanes,
        groups, queries) float32; zeros and -inf for a query that sees no entry. state, resumes, last: as those of the
        native library's."""
        lanes, groups, queries, dim = self.query.shape
        output = self.query.new_empty(lanes, groups, queries, self.value_dim, dtype=dtype)
        width = self.value_dim
        given = Layout(self.query, groups * queries * dim, queries * dim, dim)
        result = Layout(output, groups * queries * width, queries * width, width)
        lse = launch([self._task], given, result, groups, self.scaling, self._sinks, state, resumes, last)
        return (output, lse.view(lanes, groups, queries)) if last else None

    def new_state(self) -> Tensor:
        """Return an empty state for an attention in several calls."""
        size = self.query.shape[:3].numel() * (2 + self.value_dim)
        return self.query.new_empty(size, dtype=torch.float32)


class CollectedForGpu(native.CollectedAttention):
    """Attention over entries that arrive in pieces, as the native library's."""

    call_type = GpuCall
