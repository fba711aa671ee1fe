"""The library refuses what does not fit, before it writes anything: whatever a structure says, no memory is read or
written that the call was not given. With AddressSanitizer (``make sanitize``) these tests also show that it reads none.

Each case takes a call that the library does, changes one thing, and expects the rule that it breaks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep.errors import BadCall
from kvkeep.native.library import kernels
from kvkeep.native.structures import (
    BY_CHANNEL,
    GROUPED,
    KIND_NUMBERS,
    PLAIN,
    SIDE_BY_SIDE,
    SKETCHED,
    KvArray,
    KvAttention,
    KvDeltaNet,
    KvExperts,
    KvInsert,
    KvLayer,
    KvMamba2,
    KvMatrix,
    KvMlp,
    KvNorm,
    KvPiece,
    KvRouter,
    KvRows,
    KvStep,
    address_of,
    address_table,
    array,
    count_table,
    piece_table,
    rows,
)

pytestmark = pytest.mark.usefixtures("kernels")

LANES, GROUPS, QUERIES, DIM, ENTRIES = 2, 3, 4, 32, 64
HEADS = LANES * GROUPS
HALF = 16  # more than half a row is missing where this many numbers are


def bfloat16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


class Numbers:
    """The tensors of a call by name, and a copy of each: none may change where the call is refused."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.kept[name], self.before[name] = tensor, tensor.clone()
        return tensor

    def unchanged(self) -> bool:
        return all(
            torch.equal(self.kept[name].view(torch.uint8), before.view(torch.uint8))
            for name, before in self.before.items()
        )


def plain_piece(numbers: Numbers) -> KvPiece:
    piece = KvPiece(format=PLAIN, entries=ENTRIES)
    piece.keys.rows = rows(numbers("keys", bfloat16(LANES, ENTRIES, DIM)))
    piece.values.rows = rows(numbers("values", bfloat16(LANES, ENTRIES, DIM)))
    return piece


def grouped_piece(numbers: Numbers) -> KvPiece:
    piece, groups = KvPiece(format=GROUPED, entries=ENTRIES), ENTRIES // 32
    codes = torch.randint(0, 255, (LANES, groups, DIM * 32), dtype=torch.uint8)
    for side in (piece.keys, piece.values):
        side.rows, side.bits = rows(numbers(f"codes {len(numbers.kept)}", codes.clone())), 8
        side.scale = side.offset = rows(numbers(f"scale {len(numbers.kept)}", torch.ones(LANES, groups, DIM).half()))
    piece.values.group = 32
    channels = numbers("channels", torch.ones(LANES, DIM))
    piece.values.mean = piece.values.deviation = array(channels)
    return piece


def channel_piece(numbers: Numbers) -> KvPiece:
    piece = KvPiece(format=BY_CHANNEL, entries=ENTRIES)
    for side in (piece.keys, piece.values):
        codes = torch.randint(-99, 99, (LANES, ENTRIES, DIM), dtype=torch.int8)
        side.rows = rows(numbers(f"codes {len(numbers.kept)}", codes))
        side.scale = side.offset = rows(numbers(f"scale {len(numbers.kept)}", torch.ones(LANES, 1, DIM).half()))
    return piece


def sketched_piece(numbers: Numbers) -> KvPiece:
    piece = KvPiece(format=SKETCHED, entries=ENTRIES, sums=3, use_median=1)
    for side in (piece.keys, piece.values):
        side.rows = rows(numbers(f"cells {len(numbers.kept)}", bfloat16(LANES, 20, DIM)))
        side.mean = array(numbers(f"mean {len(numbers.kept)}", torch.ones(LANES, DIM)))
    piece.cell_indices = array(numbers("cells", torch.randint(0, 20, (3, LANES, ENTRIES), dtype=torch.int32)))
    return piece


class Attention:
    """A call of kvkeep_attend over one piece."""

    def __init__(self, made: Callable[[Numbers], KvPiece]) -> None:
        self.numbers, self.table = Numbers(), piece_table(1)
        self.table[0] = made(self.numbers)
        self.piece: KvPiece = self.table[0]
        self.struct = KvAttention(
            query=array(self.numbers("query", bfloat16(LANES, GROUPS, QUERIES, DIM))),
            pieces=address_of(self.table),
            lanes=LANES,
            groups=GROUPS,
            queries=QUERIES,
            dim=DIM,
            value_dim=DIM,
            piece_count=1,
            entries=ENTRIES,
            causal_offset=-1,
            scaling=0.2,
        )
        for name in ("first", "stop", "shift"):
            setattr(self.struct, name, array(self.numbers(name, torch.zeros(LANES, dtype=torch.int32))))
        self.numbers.kept["stop"][:] = ENTRIES
        self.numbers.before["stop"][:] = ENTRIES
        self.struct.mask = rows(self.numbers("mask", torch.ones(LANES, QUERIES, ENTRIES, dtype=torch.bool)))
        self.out = self.numbers("out", torch.zeros(LANES, GROUPS, QUERIES, DIM))
        self.lse = self.numbers("lse", torch.zeros(LANES, GROUPS, QUERIES))
        self.state: Tensor | None = None
        self.received = self.numbers("received", torch.zeros(LANES, ENTRIES))
        self.resumes = False

    def run(self) -> None:
        kernels().kvkeep_attend(address_of(self.struct), self.out, self.lse, self.state, self.resumes)

    def receive(self) -> None:
        kernels().kvkeep_received(address_of(self.struct), self.lse, QUERIES, 0, self.received)


def short(tensor: Tensor) -> Tensor:
    """A tensor without its last number."""
    return tensor.flatten()[:-1]


def wrong(change: Callable[[Any], Any], rule: str, of: str = "plain", id: str = "") -> Any:
    return pytest.param(of, change, rule, id=id)


PIECES = {"plain": plain_piece, "grouped": grouped_piece, "by channel": channel_piece, "sketched": sketched_piece}


def put(place: str, value: Any) -> Callable[[Any], None]:
    """Return a change that sets a field, as in ``piece.keys.rows.lanes``; a tensor as the library reads it."""

    def change(call: Any) -> None:
        *path, name = place.split(".")
        for part in path:
            call = getattr(call, part)
        described = {KvArray: array, KvRows: rows}.get(type(getattr(call, name)), lambda one: one)
        setattr(call, name, described(value))

    return change


def tensor(name: str, value: Any) -> Callable[[Any], None]:
    """Return a change that writes ``value`` to the last number of a tensor."""

    def change(call: Any) -> None:
        for numbers in (call.numbers.kept, call.numbers.before):
            numbers[name].view(-1)[-1] = value

    return change


ATTENTIONS = [
    wrong(put("piece.values.rows", bfloat16(LANES, ENTRIES // 2, DIM)), "within the rows", id="few values"),
    wrong(put("piece.keys.rows", bfloat16(LANES, ENTRIES // 2, DIM)), "within the rows", id="few keys"),
    wrong(put("piece.keys.rows", bfloat16(1, ENTRIES, DIM)), "the same lanes", id="few lanes of keys"),
    wrong(put("piece.keys.rows.lanes", 0), "the same lanes", id="no lanes: a remainder by 0"),
    wrong(put("piece.keys.rows", bfloat16(LANES, ENTRIES, DIM - 2)), "as wide as the query", id="narrow keys"),
    wrong(put("piece.values.rows", bfloat16(LANES, ENTRIES, HALF)), "as wide as the output", id="narrow values"),
    wrong(put("piece.keys.rows", torch.ones(LANES, ENTRIES, DIM, dtype=torch.int8)), "bfloat16", id="int8 keys"),
    wrong(put("piece.keys.rows.lane_stride", 1 << 39), "as wide as the query", id="a stride beyond the tensor"),
    wrong(put("piece.keys.rows.numbers.length", 2**63 - 1), "as wide as the query", id="an absurd length"),
    wrong(put("piece.first", 1), "within the rows", id="a span that ends behind the rows"),
    wrong(put("piece.first", -1), "must not begin before its rows", id="a span that begins before the rows"),
    wrong(put("piece.entries", -1), "or end before it begins", id="a negative number of entries"),
    wrong(put("piece.format", 4), "one of the four formats", id="no such format"),
    wrong(put("struct.entries", ENTRIES + 1), "the entries of its pieces", id="more entries than pieces have"),
    wrong(put("struct.piece_count", 0), "the entries of its pieces", id="no pieces"),
    wrong(put("struct.pieces", None), "must have its pieces", id="no table of pieces"),
    wrong(put("struct.query", bfloat16(LANES, GROUPS, QUERIES, HALF)), "queries must be", id="few queries"),
    wrong(put("struct.groups", 0), "must have query heads", id="no groups"),
    wrong(put("struct.queries", 0), "must have queries", id="no queries: a remainder by 0"),
    wrong(put("struct.dim", DIM - 1), "an even width", id="an odd width"),
    wrong(put("struct.dim", 1 << 20), "within KV_MAX_DIM", id="too wide keys"),
    wrong(put("struct.causal_offset", 2**63 - 1), "a number of entries", id="an absurd offset"),
    wrong(put("struct.window", 4), "a window must end", id="a window of queries that see everything"),
    wrong(put("struct.first", short(torch.zeros(LANES).int())), "one for each lane", id="a short first"),
    wrong(put("struct.first", torch.zeros(LANES).long()), "must be int32", id="a first of int64"),
    wrong(put("struct.mask", torch.ones(LANES, QUERIES, HALF).bool()), "a mask", id="a short mask"),
    wrong(put("struct.mask", torch.ones(LANES, QUERIES, ENTRIES)), "a mask must be bool", id="a float mask"),
    wrong(put("struct.sinks", torch.zeros(HEADS - 1)), "sinks must be", id="sinks of no whole number of sequences"),
    wrong(put("struct.sinks", torch.zeros(0)), "sinks must be", id="no sink: a remainder by 0"),
    wrong(put("struct.sinks", bfloat16(HEADS)), "sinks must be", id="sinks of bfloat16"),
    wrong(put("out", torch.zeros(HALF)), "an output", id="a short output"),
    wrong(put("out", torch.zeros(LANES, GROUPS, QUERIES, DIM).long()), "an output", id="an output of int64"),
    wrong(put("out", None), "an output, or a state", id="neither output nor state"),
    wrong(put("lse", torch.zeros(HALF)), "log-sum-exps", id="a short lse"),
    wrong(put("lse", None), "an output, or a state", id="an output without lse"),
    wrong(put("state", torch.zeros(HALF)), "the state", id="a short state"),
    wrong(put("resumes", True), "must have a state", id="nothing to resume"),
    wrong(put("piece.keys.bits", 5), "2, 4, 8 or 16 bits", "grouped", id="codes of 5 bits"),
    wrong(put("piece.values.bits", 16), "rows of a group", "grouped", id="codes of other bits than they have"),
    wrong(put("piece.keys.rows.rows", 1), "a row for each group", "grouped", id="few groups of codes"),
    wrong(put("piece.values.group", 0), "a multiple of 16", "grouped", id="no channels share a scale"),
    wrong(put("piece.entries", ENTRIES - 1), "whole groups", "grouped", id="a part of a group"),
    wrong(put("piece.keys.scale.rows", 1), "a scale and an offset", "grouped", id="few scales"),
    wrong(put("piece.values.offset", None), "a scale and an offset", "grouped", id="no offsets"),
    wrong(tensor("shift", 5), "begin at a tile", "grouped", id="groups that begin within a tile"),
    wrong(put("piece.keys.rows", bfloat16(LANES, ENTRIES, DIM)), "int8", "by channel", id="bfloat16 for codes"),
    wrong(put("piece.first", 1), "within the rows", "by channel", id="codes behind the rows"),
    wrong(put("piece.keys.scale", None), "for each lane and channel", "by channel", id="no scales of channels"),
    wrong(tensor("cells", 20), "must exist", "sketched", id="a cell behind the last"),
    wrong(tensor("cells", -1), "must exist", "sketched", id="a cell before the first"),
    wrong(put("piece.sums", 4), "1, 3 or 5", "sketched", id="a median of 4"),
    wrong(put("piece.sums", 5), "index of each", "sketched", id="few indices"),
    wrong(put("piece.sums", 0), "must have cells", "sketched", id="no cells: a division by 0"),
    wrong(put("piece.keys.rows.row_stride", 1), "cells of a sketch", "sketched", id="cells that overlap"),
    wrong(put("piece.keys.mean", short(torch.ones(LANES, DIM))), "means of a sketch", "sketched", id="a short mean"),
]


@pytest.mark.parametrize(("of", "change", "rule"), ATTENTIONS)
def test_an_attention_that_does_not_fit_is_refused(of: str, change: Callable[[Any], Any], rule: str) -> None:
    call = Attention(PIECES[of])
    call.run()  # as it is, the library does it
    assert call.lse.isfinite().all()
    call = Attention(PIECES[of])
    change(call)
    with pytest.raises(BadCall, match=rule):
        call.run()
    assert call.numbers.unchanged()


def test_received_attention_that_does_not_fit_is_refused() -> None:
    call = Attention(plain_piece)
    call.run()
    call.receive()
    for name, value, rule in (("received", torch.zeros(HALF), "received"), ("lse", torch.zeros(HALF), "log-sum-exps")):
        call = Attention(plain_piece)
        setattr(call, name, value)
        with pytest.raises(BadCall, match=rule):
            call.receive()
        assert call.numbers.unchanged()


@pytest.mark.parametrize("number", [-(2**31), -1, 2**31 - 1])
@pytest.mark.parametrize("name", ["first", "stop", "shift"])
def test_what_a_lane_sees_ends_at_its_entries(name: str, number: int) -> None:
    """A lane whose range is absurd ends at once, and other lanes are as they were."""
    call, other = Attention(plain_piece), Attention(plain_piece)
    for tensor_name in call.numbers.kept:
        other.numbers.kept[tensor_name].copy_(call.numbers.kept[tensor_name])
    call.numbers.kept[name][1] = number
    call.run()
    other.run()
    assert torch.equal(call.out[0], other.out[0])
    sees = {"first": number < 0, "stop": number > 0, "shift": True}[name]
    if sees and name != "shift":
        assert torch.equal(call.out, other.out)
    assert call.lse[1].isfinite().all() == sees


# ---- inserts and steps -----------------------------------------------------------------------------------------------

COLUMNS = 8


class Step:
    """A step of one token in a bank with ranks, and copies of what it evicts; run alone, or as the step of a layer."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        self.insert = KvInsert(columns=COLUMNS, new_slot=99)
        for name in ("keys", "values"):
            setattr(self.insert, name, rows(self.numbers(name, bfloat16(LANES, COLUMNS, DIM))))
            setattr(self.insert, f"evicted_{name}", rows(self.numbers(f"evicted {name}", bfloat16(LANES, 2, DIM))))
            setattr(self, f"new_{name}", bfloat16(LANES, DIM))
        kinds = {"slots": torch.int32, "scores": torch.float32, "extra": torch.float32, "newest": torch.int32}
        for name, kind in kinds.items():
            setattr(self.insert, name, array(self.numbers(name, torch.ones(LANES, COLUMNS, dtype=kind))))
            setattr(self.insert, f"evicted_{name}", array(self.numbers(f"left {name}", torch.ones(LANES, dtype=kind))))
        self.insert.ranks = array(self.numbers("ranks", torch.rand(LANES, COLUMNS)))
        self.insert.new_scores = array(self.numbers("new scores", torch.rand(LANES)))
        piece = KvPiece(format=PLAIN, entries=COLUMNS)
        piece.keys.rows, piece.values.rows = self.insert.keys, self.insert.values
        self.table = piece_table(1)
        self.table[0] = piece
        attention = KvAttention(
            pieces=address_of(self.table), lanes=LANES, queries=1, dim=DIM, value_dim=DIM, piece_count=1,
            entries=COLUMNS, causal_offset=-1,
        )  # fmt: skip
        self.step = KvStep(
            attention, self.insert, array(self.numbers("received", torch.zeros(LANES, COLUMNS))), evicts=1
        )
        self.query, self.heads, self.tokens = bfloat16(1, HEADS, DIM), HEADS, 1
        self.sinks, self.cap = torch.zeros(HEADS), 0.0
        self.out, self.lse = self.numbers("out", bfloat16(1, HEADS, DIM)), self.numbers("lse", torch.zeros(1, HEADS))

    def write(self) -> None:
        kernels().kvkeep_insert(address_of(self.insert), self.new_keys, self.new_values)  # type: ignore[attr-defined]

    def run(self) -> None:
        table = address_table([address_of(self.step)])
        kernels().kvkeep_attend_sessions(
            address_of(table), 1, self.query, self.new_keys, self.new_values, self.tokens, self.heads, 0, 0.2,
            self.cap, self.sinks, self.out, self.lse,
        )  # type: ignore[attr-defined]  # fmt: skip


INSERTS = [
    ("keys", bfloat16(1, COLUMNS, DIM), "one for each lane"),
    ("values", bfloat16(LANES, COLUMNS // 2, DIM), "a column of its bank"),
    ("keys", None, "within its memory"),
    ("keys", torch.ones(LANES, COLUMNS, DIM), "width and type|same width"),
    ("columns", COLUMNS + 1, "a column of its bank"),
    ("columns", -1, "a number of columns"),
    ("ranks", short(torch.rand(LANES, COLUMNS)), "ranks must be"),
    ("slots", short(torch.ones(LANES, COLUMNS).int()), "slots must be"),
    ("slots", None, "the slots of a column"),
    ("scores", short(torch.ones(LANES, COLUMNS)), "scores and counts"),
    ("newest", None, "the last slot among them"),
    ("new_scores", short(torch.ones(LANES)), "new scores"),
    ("evicted_keys", bfloat16(1, 2, DIM), "a row of each lane"),
    ("evicted_values", bfloat16(LANES, 2, HALF), "the same width"),
    ("evicted_row", 2, "a row of each lane"),
    ("evicted_slots", short(torch.ones(LANES).int()), "one number for each lane"),
]


@pytest.mark.parametrize(("name", "value", "rule"), INSERTS)
def test_an_insert_that_does_not_fit_is_refused(name: str, value: Any, rule: str) -> None:
    Step().write()
    call = Step()
    put(f"insert.{name}", value)(call)
    with pytest.raises(BadCall, match=rule):
        call.write()
    put(f"step.insert.{name}", value)(call)
    with pytest.raises(BadCall):
        call.run()
    assert call.numbers.unchanged()


def test_a_column_outside_the_bank_is_refused() -> None:
    for column in (-1, COLUMNS):
        call = Step()
        call.insert.ranks, call.insert.column = array(None), column
        with pytest.raises(BadCall, match="a column of its bank"):
            call.write()
        assert call.numbers.unchanged()


STEPS = [
    (put("new_keys", bfloat16(1, DIM)), "new entries"),
    (put("query", bfloat16(1, 1, DIM)), "queries must be"),
    (put("out", bfloat16(1, 1, DIM)), "outputs must have"),
    (put("heads", HEADS + 1), "sinks must be"),
    (put("sinks", bfloat16(HEADS)), "sinks must be"),
    (put("tokens", 0), "some of the call"),
    (put("step.token", 1), "some of the call"),
    (put("step.first_lane", 1), "lanes of its token"),
    (put("step.token_lanes", 1), "lanes of its token"),
    (put("step.token_lanes", 4), "a multiple of the lanes"),
    (put("step.received", short(torch.zeros(LANES, COLUMNS))), "received attention"),
    (put("step.attention.queries", 2), "one query"),
    (put("step.attention.entries", COLUMNS + 1), "entries of its pieces"),
    (put("step.attention.dim", DIM * 2), "as wide as the query"),
    (put("step.insert.keys.width", HALF), "as wide as new entries|same width"),
]


@pytest.mark.parametrize(("change", "rule"), STEPS)
def test_a_step_that_does_not_fit_is_refused(change: Callable[[Any], Any], rule: str) -> None:
    Step().run()
    call = Step()
    change(call)
    with pytest.raises(BadCall, match=rule):
        call.run()
    assert call.numbers.unchanged()


SEVERAL = [
    (put("step.attention.causal_offset", COLUMNS - 3), "entries up to its own"),
    (put("step.attention.causal_offset", -1), "entries up to its own"),
    (put("step.attention.queries", COLUMNS + 1), "entries up to its own"),
    (put("step.attention.window", -1), "a window must end"),
    (put("step.insert.ranks", torch.rand(LANES, COLUMNS)), "must not rank"),
    (put("step.insert.evicted_slots", torch.zeros(LANES, dtype=torch.int32)), "must not rank"),
    (put("step.received", torch.zeros(LANES, COLUMNS)), "must not rank"),
    (put("step.evicts", 0), "tokens of their step"),
    (put("step.evicts", 3), "tokens of their step"),
    (put("step.insert.evicted_row", 1), "a row of each lane"),
    (put("step.insert.column", COLUMNS - 1), "a column of its bank"),
    (put("tokens", 1), "some of the call"),
]


@pytest.mark.parametrize(("change", "rule"), SEVERAL)
def test_a_step_of_several_tokens_that_does_not_fit_is_refused(change: Callable[[Any], Any], rule: str) -> None:
    def several() -> Step:
        call = Step()
        for name in ("slots", "scores", "extra", "newest"):
            put(f"step.insert.evicted_{name}", None)(call)
        put("step.insert.ranks", None)(call)
        put("step.received", None)(call)
        call.step.evicts = 2
        call.step.attention.queries, call.step.attention.causal_offset, call.tokens = 2, COLUMNS - 2, 2
        call.query, call.out, call.lse = bfloat16(2, HEADS, DIM), bfloat16(2, HEADS, DIM), torch.zeros(2, HEADS)
        call.new_keys, call.new_values = bfloat16(LANES, 2, DIM), bfloat16(LANES, 2, DIM)
        return call

    several().run()
    call = several()
    change(call)
    with pytest.raises(BadCall, match=rule):
        call.run()
    assert call.numbers.unchanged()


# ---- matrices, layers, digests ---------------------------------------------------------------------------------------


def matrix(inputs: int = 64, outputs: int = 32, dtype: torch.dtype = torch.bfloat16) -> tuple[KvMatrix, Tensor]:
    kind = KIND_NUMBERS["F32" if dtype == torch.float32 else "BF16"]
    source = torch.ones(outputs, inputs, dtype=dtype).view(torch.uint8)
    panels = torch.zeros(kernels().kvkeep_packed_bytes(kind, inputs, outputs), dtype=torch.uint8)
    kernels().kvkeep_pack(kind, inputs, outputs, source, source.shape[1], panels)
    return KvMatrix(array(panels), inputs, outputs, kind), panels


def test_matrices_that_do_not_fit_are_refused() -> None:
    weights, panels = matrix()
    x, y, numbers = bfloat16(3, 64), torch.zeros(3, 32).bfloat16(), Numbers()
    numbers("panels", panels)
    numbers("y", y)

    def product(x: Tensor = x, bias: Tensor | None = None, y: Tensor = y, stride: int = 32, **changed: Any) -> None:
        made = KvMatrix(weights.panels, weights.inputs, weights.outputs, weights.kind)
        for name, value in changed.items():
            put(name, value)(made)
        kernels().kvkeep_product(address_of(made), x, bias, y, stride)

    given = [
        {"x": bfloat16(3, 63)}, {"x": torch.ones(3, 64)}, {"bias": bfloat16(31)}, {"y": bfloat16(3, 31)},
        {"stride": 31}, {"stride": -1}, {"stride": 33}, {"inputs": 63}, {"inputs": 0}, {"outputs": 33},
        {"outputs": -1}, {"kind": 99}, {"kind": -1}, {"panels": short(panels)}, {"panels": None},
    ]  # fmt: skip
    for one in given:
        with pytest.raises(BadCall):
            product(**one)  # type: ignore[arg-type]
    source, index = bfloat16(32, 64).view(torch.uint8), torch.tensor([0, 31])
    kernels().kvkeep_rows(address_of(weights), index, torch.zeros(2, 64))
    for number in (-1, 32, 2**62):
        with pytest.raises(BadCall, match="must exist"):
            kernels().kvkeep_rows(address_of(weights), torch.tensor([0, number]), torch.zeros(2, 64))
    with pytest.raises(BadCall):
        kernels().kvkeep_rows(address_of(weights), index, torch.zeros(1, 64))
    for rows_of_blocks, row_bytes in ((source[1:], 128), (source, 64), (source, 256), (source, -128)):
        with pytest.raises(BadCall, match="all blocks"):
            kernels().kvkeep_pack(KIND_NUMBERS["BF16"], 64, 32, rows_of_blocks, row_bytes, panels)
        with pytest.raises(BadCall, match="all blocks"):
            kernels().kvkeep_unpack(address_of(weights), rows_of_blocks, row_bytes)
    assert numbers.unchanged()
    product()
    assert not numbers.unchanged()


def test_a_product_in_float32_has_no_other_numbers() -> None:
    """Inputs, bias and outputs are all bfloat16 or all float32, and those only of a matrix in float32."""
    types = (torch.bfloat16, torch.float32)
    for dtype, *given in itertools.product(types, repeat=4):
        weights, panels = matrix(dtype=dtype)
        x, bias, y = (torch.ones(size, dtype=one) for size, one in zip(((3, 64), 32, (3, 32)), given, strict=True))
        if len({*given}) == 1 and (x.dtype == torch.bfloat16 or dtype == torch.float32):
            kernels().kvkeep_product(address_of(weights), x, bias, y, 32)
            assert (y == 65).all()
            continue
        with pytest.raises(BadCall):
            kernels().kvkeep_product(address_of(weights), x, bias, y, 32)
        assert (y == 1).all()
    del panels  # it must outlive the calls


class Layer:
    """A decoder layer, and the tensors of its two halves."""

    HIDDEN, KV_HEADS, WIDTH = 64, LANES, (HEADS + 2 * LANES) * DIM

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.mlp = KvMlp(down=self.matrix(96, 64), hidden=self.HIDDEN, inner=96, gated=1, gate_scale=1, scale=1)
        self.mlp.gates[0] = self.matrix(64, 192)
        self.struct = KvLayer(
            out=self.matrix(HEADS * DIM, 64), mlp=address_of(self.mlp), hidden=self.HIDDEN, heads=HEADS, kv_heads=LANES,
            dim=DIM, rotated=DIM, input_scale=1, key_scale=1, attention_scale=1, mlp_scale=1, output_scale=1,
        )  # fmt: skip
        self.struct.qkv[0] = self.matrix(64, self.WIDTH)
        self.struct.input_norm = self.struct.pre_mlp_norm = self.norm(torch.ones(64))
        self.x, self.cos, self.sin = bfloat16(2, 64), bfloat16(2, DIM), bfloat16(2, DIM)
        self.numbers, self.batch = Numbers(), 1
        self.query = self.numbers("query", bfloat16(HEADS, 2, DIM))
        self.key, self.value = (self.numbers(name, bfloat16(LANES, 2, DIM)) for name in ("key", "value"))
        self.attended, self.y = bfloat16(2, HEADS * DIM), self.numbers("y", bfloat16(2, 64))
        self.normed, self.gate = self.numbers("normed", bfloat16(2, 64)), None
        self.added: Tensor | None = bfloat16(2, 64)
        self.side: Tensor | None = None

    def keep(self, one: Any) -> Any:
        self.kept.append(one)
        return one

    def matrix(self, inputs: int, outputs: int) -> KvMatrix:
        return self.keep(matrix(inputs, outputs))[0]

    def norm(self, weight: Tensor) -> KvNorm:
        return KvNorm(array(self.keep(weight)), eps=1e-5)

    def enter(self) -> None:
        kernels().kvkeep_before_attention(
            address_of(self.struct), self.x, self.batch, self.cos, self.sin, self.query, self.key, self.value, self.gate
        )

    def leave(self) -> None:
        given = self.attended, self.gate, self.added, self.side, self.x, self.y
        kernels().kvkeep_after_attention(address_of(self.struct), *given)

    def reach_mlp(self) -> None:
        given = self.attended, self.gate, self.added, self.x, self.y, self.normed
        kernels().kvkeep_before_mlp(address_of(self.struct), *given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("struct.heads", HEADS + 1),
        ("struct.kv_heads", 0),
        ("struct.dim", DIM - 1),
        ("struct.gated", 1),
        ("struct.gated", 2),
        ("struct.gated", 3),
        ("struct.by_head", 1),
        ("struct.values_are_keys", 1),
        ("struct.clip", -1.0),
        ("mlp.hidden", 32),
        ("struct.hidden", 32),
        ("struct.input_norm.weight", short(torch.ones(64))),
        ("struct.input_norm.bias", torch.ones(32)),
        ("struct.input_norm.centred", 2),
        ("struct.query_norm.weight", short(torch.ones(DIM))),
        ("struct.key_norm.weight", short(torch.ones(LANES * DIM))),
        ("struct.order", 3),
        ("struct.cap", -1.0),
        ("struct.rotated", DIM + 2),
        ("struct.rotated", DIM - 1),
        ("struct.rotation", 4),
        ("struct.out_bias", short(bfloat16(64))),
        ("struct.out.panels", None),
        ("x", bfloat16(127)),
        ("batch", 3),
        ("cos", bfloat16(1, DIM)),
        ("query", bfloat16(1, 2, DIM)),
        ("key", bfloat16(1, 2, DIM)),
        ("attended", bfloat16(1, HEADS * DIM)),
        ("y", bfloat16(1, 64)),
        ("normed", bfloat16(1, 64)),
        ("added", bfloat16(1, 64)),
        ("added", torch.ones(2, 64)),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(name: str, value: Any) -> None:
    call = Layer()
    call.enter()
    call.leave()
    call.reach_mlp()
    call = Layer()
    put(name, value)(call)
    of_struct, leaving = "." in name, name in ("attended", "y", "added")
    calls = [call.enter] if not leaving and name != "normed" else []
    calls += [call.leave] if of_struct or leaving else []
    calls += [call.reach_mlp] if of_struct or leaving or name == "normed" else []
    for refused in calls:
        with pytest.raises(BadCall):
            refused()
    assert call.numbers.unchanged()


def test_a_layer_without_its_mlp_ends_before_it() -> None:
    call = Layer()
    call.struct.mlp = None
    call.enter()
    call.reach_mlp()
    with pytest.raises(BadCall, match="must have its MLP"):
        call.leave()
    assert not call.numbers.unchanged()


def test_a_layer_with_gates_needs_a_place_for_them() -> None:
    call = Layer()
    call.struct.gated, call.struct.qkv[0] = 1, call.matrix(64, call.WIDTH + HEADS * DIM)
    for gate in (None, bfloat16(2, HEADS * DIM - 1), torch.ones(2, HEADS * DIM)):
        call.gate = gate
        for refused in (call.enter, call.leave, call.reach_mlp):
            with pytest.raises(BadCall, match="gates must be bfloat16"):
                refused()
    call.struct.query_norm = call.norm(torch.ones(HEADS * DIM))  # of queries that lie apart
    with pytest.raises(BadCall, match="weights and biases of norms"):
        call.enter()
    assert call.numbers.unchanged()
    call.struct.query_norm, call.gate = KvNorm(), bfloat16(2, HEADS * DIM)
    call.enter()
    call.leave()
    assert not call.numbers.unchanged()


def test_projections_that_do_not_fit_each_other_are_refused() -> None:
    call, queries, keys = Layer(), HEADS * DIM, LANES * DIM
    forms: tuple[tuple[dict[str, int], int, str], ...] = (
        ({"gated": 2}, 2 * (queries + keys), ""),
        ({"values_are_keys": 1}, queries + keys, ""),
        ({"kv_heads": 0}, queries, ""),
        ({"by_head": 1, "kv_heads": HEADS}, 3 * queries, ""),
        ({"gated": 2, "values_are_keys": 1}, 2 * queries + keys, "for each head"),
        ({"by_head": 1}, queries + 2 * keys, "for each head"),
        ({"by_head": 1, "kv_heads": HEADS, "gated": 2}, 4 * queries, "for each head"),
        ({"gated": 1}, queries + 2 * keys, "must have its widths"),
        ({"values_are_keys": 1}, queries + 2 * keys, "must have its widths"),
    )
    for fields, outputs, rule in forms:
        call = Layer()
        call.gate, call.key, call.value = bfloat16(2, queries), bfloat16(HEADS, 2, DIM), bfloat16(HEADS, 2, DIM)
        for name, value in fields.items():
            setattr(call.struct, name, value)
        call.struct.qkv[0] = call.matrix(64, outputs)
        if not rule:
            call.enter()
            continue
        with pytest.raises(BadCall, match=rule):
            call.enter()


def test_a_side_input_that_does_not_fit_is_refused() -> None:
    def made() -> Layer:
        call = Layer()
        call.struct.side_gate, call.struct.side_projection = call.matrix(64, 32), call.matrix(32, 64)
        call.struct.side_norm, call.side = call.norm(torch.ones(64)), bfloat16(2, 32)
        return call

    made().leave()
    for name, value, rule in (
        ("side", None, "a side input must be bfloat16"),
        ("side", bfloat16(1, 32), "a side input must be bfloat16"),
        ("side", torch.ones(2, 32), "a side input must be bfloat16"),
        ("struct.side_activation", 4, "a side input must follow the MLP"),
        ("struct.side_gate.outputs", 24, "must have its widths"),
        ("struct.side_gate.inputs", 32, "must have its widths"),
        ("struct.side_projection.outputs", 32, "must have its widths"),
        ("struct.side_norm.weight", torch.ones(32), "weights and biases of norms"),
        ("struct.output_scale", 2.0, ""),
    ):
        call = made()
        put(name, value)(call)
        if not rule:
            call.leave()
            continue
        with pytest.raises(BadCall, match=rule):
            call.leave()
        assert call.numbers.unchanged()
    call = made()
    call.struct.side_gate, call.struct.side_projection = call.matrix(64, 24), call.matrix(24, 64)
    with pytest.raises(BadCall, match="a side input must follow the MLP"):
        call.leave()
    call = made()
    call.struct.mlp = None
    with pytest.raises(BadCall, match="a side input must follow the MLP"):
        call.reach_mlp()


def test_only_norms_and_outputs_that_are_here_are_multiplied() -> None:
    call = Layer()
    call.struct.input_scale, call.struct.input_norm = 2.0, KvNorm()
    with pytest.raises(BadCall, match="only a norm before attention"):
        call.enter()
    call = Layer()
    call.struct.output_scale, call.struct.mlp = 2.0, None
    with pytest.raises(BadCall, match="must have its MLP"):
        call.reach_mlp()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("mlp.hidden", 0, "a multiple of 16"),
        ("mlp.inner", 95, "a multiple of 16"),
        ("mlp.gated", 2, "a multiple of 16"),
        ("mlp.activation", 4, "an activation that the library has"),
        ("mlp.inner", 0, "or a router and experts"),
        ("mlp.gated", 0, "must have its widths"),
        ("mlp.down.inputs", 64, "must have its widths"),
        ("mlp.down_bias", short(bfloat16(64)), "biases must be bfloat16"),
        ("mlp.down_bias", torch.ones(64), "biases must be bfloat16"),
        ("x", bfloat16(2, 63), "rows of its width"),
        ("x", torch.ones(2, 64), "rows of its width"),
        ("y", bfloat16(1, 64), "rows of its width"),
    ],
)
def test_an_mlp_that_does_not_fit_is_refused(name: str, value: Any, rule: str) -> None:
    call = Layer()
    put(name, value)(call)
    with pytest.raises(BadCall, match=rule):
        kernels().kvkeep_mlp(address_of(call.mlp), call.x, call.y)
    assert call.numbers.unchanged()
    call = Layer()
    kernels().kvkeep_mlp(address_of(call.mlp), call.x, call.y)
    assert not call.numbers.unchanged()


def test_what_lies_beside_the_matrices_of_an_mlp_is_checked() -> None:
    call = Layer()
    call.mlp.gates_bias[0] = array(short(bfloat16(192)))
    with pytest.raises(BadCall, match="biases must be bfloat16"):
        kernels().kvkeep_mlp(address_of(call.mlp), call.x, call.y)
    call.mlp.gates_bias[0] = array(None)
    for outputs, inputs in ((2, 64), (1, 32)):
        call.mlp.share = call.matrix(inputs, outputs)
        with pytest.raises(BadCall, match="must have its widths"):
            kernels().kvkeep_mlp(address_of(call.mlp), call.x, call.y)
    assert call.numbers.unchanged()


def test_layers_and_steps_that_do_not_fit_each_other_are_refused() -> None:
    def run(layer: Layer, step: Step, tokens: int = 1, cos: Tensor | None = None, normed: Tensor | None = None) -> None:
        layers, tables = address_table([address_of(layer.struct)]), address_table([address_of(step.step)])
        by_layer, counts = address_table([address_of(tables)]), count_table([1])
        cos = bfloat16(tokens, DIM) if cos is None else cos
        kernels().kvkeep_run_layers(
            address_of(layers), address_of(by_layer), 1, address_of(counts), cos,
            bfloat16(tokens, DIM), layer.y[:tokens], normed,
        )  # fmt: skip

    run(Layer(), Step())
    for change in (put("step.token", 1), put("step.token_lanes", 3), put("step.insert.column", 9)):
        layer, step = Layer(), Step()
        step.step.insert.ranks = array(None)
        change(step)
        with pytest.raises(BadCall):
            run(layer, step)
        assert step.numbers.unchanged() and layer.numbers.unchanged()
    with pytest.raises(BadCall, match="cosines"):
        run(Layer(), Step(), cos=bfloat16(1, HALF))
    layer = Layer()
    layer.struct.order = SIDE_BY_SIDE
    run(layer, Step())
    layer.struct.pre_mlp_norm = KvNorm()
    with pytest.raises(BadCall, match="come in turn"):
        run(layer, Step())
    layer = Layer()
    layer.struct.mlp = None
    run(layer, Step(), normed=layer.normed[:1])
    for normed, rule in ((None, "must have its MLP"), (layer.normed[:1, :63].contiguous(), "enters an MLP")):
        with pytest.raises(BadCall, match=rule):
            run(layer, Step(), normed=normed)


def test_norms_angles_and_digests_that_do_not_fit_are_refused() -> None:
    x, y, weight = bfloat16(3, 64), bfloat16(3, 64), torch.ones(64)
    before = y.clone()
    for factors, result in ((weight, y[:2]), (torch.ones(63), y), (torch.ones(0), y), (weight.bfloat16(), y)):
        norm = KvNorm(array(factors), eps=1e-5)
        with pytest.raises(BadCall):
            kernels().kvkeep_norm(address_of(norm), x, result)
    positions, frequencies = torch.arange(3), torch.ones(32)
    for angles in ((positions.int(), frequencies, y), (positions, frequencies.half(), y), (positions, weight, y)):
        with pytest.raises(BadCall):
            kernels().kvkeep_angles(angles[0], angles[1], 1.0, angles[2], angles[2])
    numbers, found = torch.zeros(2, 32, 8), torch.zeros(2, 4, dtype=torch.int64)
    page = rows(numbers)
    kernels().kvkeep_digests(address_of(page), 0, 4, 8, found)
    for first, blocks, count, digests in ((1, 4, 8, found), (0, 4, 9, found), (-1, 4, 8, found), (0, 4, 8, found[:1])):
        with pytest.raises(BadCall):
            kernels().kvkeep_digests(address_of(page), first, blocks, count, digests)
    assert torch.equal(y, before)


def test_a_tensor_that_the_library_cannot_read_is_refused() -> None:
    for tensor_of, rule in (
        (torch.ones(4, 4).T, "one after the other"),
        (torch.ones(2, device="meta"), "on the CPU"),
        (torch.ones(2, dtype=torch.complex64), "of a type"),
    ):
        with pytest.raises(BadCall, match=rule):
            array(tensor_of)
    with pytest.raises(BadCall, match="numbers of a row"):
        rows(torch.ones(2, 3, 4).transpose(1, 2))


class DeltaNet:
    """A call of kvkeep_delta_net."""

    TOKENS, TAPS, HEADS, WIDTH = 3, 4, 4, 16
    VALUES, CHANNELS = HEADS * WIDTH, 2 * 2 * WIDTH + HEADS * WIDTH

    def __init__(self) -> None:
        self.numbers = Numbers()
        self.struct = KvDeltaNet(
            taps=self.TAPS, key_heads=2, value_heads=self.HEADS, key_dim=self.WIDTH, value_dim=self.WIDTH, eps=1e-6
        )
        for name, size in (
            ("conv", self.TAPS * self.CHANNELS), ("rate", self.HEADS), ("step_bias", self.HEADS), ("norm", self.WIDTH)
        ):  # fmt: skip
            setattr(self.struct, name, array(self.numbers(name, torch.ones(size))))
        self.inputs = self.numbers("inputs", bfloat16(self.TAPS - 1 + self.TOKENS, self.CHANNELS))
        self.gate = self.numbers("gate", bfloat16(self.TOKENS, self.VALUES))
        self.beta, self.decay = (self.numbers(name, bfloat16(self.TOKENS, self.HEADS)) for name in ("beta", "decay"))
        self.state = self.numbers("state", torch.randn(self.VALUES, self.WIDTH))
        self.out = self.numbers("out", bfloat16(self.TOKENS, self.VALUES))

    def run(self) -> None:
        given = self.inputs, self.gate, self.beta, self.decay, self.state, self.out
        kernels().kvkeep_delta_net(address_of(self.struct), *given)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("struct.key_heads", 0, "multiple of its key heads"),
        ("struct.value_heads", 3, "multiple of its key heads"),
        ("struct.key_dim", 24, "multiples of 16"),
        ("struct.value_dim", 0, "multiples of 16"),
        ("struct.taps", 0, "a float32 weight for each tap"),
        ("struct.taps", 5, "a float32 weight for each tap"),
        ("struct.rate", torch.ones(3), "each head or channel"),
        ("struct.norm", torch.ones(15), "each head or channel"),
        ("inputs", bfloat16(5, DeltaNet.CHANNELS), "that its convolution reads"),
        ("gate", bfloat16(2, DeltaNet.VALUES), "of each token"),
        ("beta", bfloat16(3), "of each token and head"),
        ("decay", bfloat16(2, 4), "of each token"),
        ("state", torch.randn(DeltaNet.VALUES, 15), "float32 of each head"),
        ("state", bfloat16(DeltaNet.VALUES, 16), "float32 of each head"),
        ("out", bfloat16(2, DeltaNet.VALUES), "of each token"),
    ],
)
def test_a_delta_net_that_does_not_fit_is_refused(name: str, value: Any, rule: str) -> None:
    call = DeltaNet()
    put(name, value)(call) if "." in name else setattr(call, name, value)
    with pytest.raises(BadCall, match=rule):
        call.run()
    assert call.numbers.unchanged()
    DeltaNet().run()


class Mamba2:
    """A call of kvkeep_mamba2."""

    TOKENS, TAPS, HEADS, WIDTH, STATE = 3, 4, 4, 8, 16
    INNER, CHANNELS = HEADS * WIDTH, HEADS * WIDTH + 2 * 2 * STATE

    def __init__(self) -> None:
        self.numbers = Numbers()
        self.struct = KvMamba2(
            taps=self.TAPS, heads=self.HEADS, head_dim=self.WIDTH, groups=2, state_dim=self.STATE, gate_first=1,
            eps=1e-6, greatest_step=1.0,
        )  # fmt: skip
        for name, size in (
            ("conv", self.TAPS * self.CHANNELS), ("conv_bias", self.CHANNELS), ("rate", self.HEADS),
            ("step_bias", self.HEADS), ("skip", self.HEADS), ("norm", self.INNER),
        ):  # fmt: skip
            setattr(self.struct, name, array(self.numbers(name, torch.ones(size))))
        self.inputs = self.numbers("inputs", bfloat16(self.TAPS - 1 + self.TOKENS, self.CHANNELS))
        self.gate = self.numbers("gate", bfloat16(self.TOKENS, self.INNER))
        self.steps = self.numbers("steps", bfloat16(self.TOKENS, self.HEADS))
        self.state = self.numbers("state", torch.randn(self.INNER, self.STATE))
        self.out = self.numbers("out", bfloat16(self.TOKENS, self.INNER))

    def run(self) -> None:
        given = self.inputs, self.gate, self.steps, self.state, self.out
        kernels().kvkeep_mamba2(address_of(self.struct), *given)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("struct.groups", 0, "multiple of its groups"),
        ("struct.heads", 3, "multiple of its groups"),
        ("struct.head_dim", 6, "its groups and states one of 16"),
        ("struct.head_dim", 4, "its groups and states one of 16"),
        ("struct.state_dim", 24, "its groups and states one of 16"),
        ("struct.taps", 0, "a float32 weight for each tap"),
        ("struct.taps", 5, "a float32 weight for each tap"),
        ("struct.conv_bias", torch.ones(3), "a float32 weight for each tap"),
        ("struct.rate", torch.ones(3), "each head or channel"),
        ("struct.skip", torch.ones(3), "each head or channel"),
        ("struct.norm", torch.ones(15), "each head or channel"),
        ("inputs", bfloat16(5, Mamba2.CHANNELS), "that its convolution reads"),
        ("gate", bfloat16(2, Mamba2.INNER), "of each token"),
        ("steps", bfloat16(3), "of each token and head"),
        ("state", torch.randn(Mamba2.INNER, 15), "float32 of each head"),
        ("out", bfloat16(2, Mamba2.INNER), "of each token"),
    ],
)
def test_a_state_space_that_does_not_fit_is_refused(name: str, value: Any, rule: str) -> None:
    call = Mamba2()
    put(name, value)(call) if "." in name else setattr(call, name, value)
    with pytest.raises(BadCall, match=rule):
        call.run()
    assert call.numbers.unchanged()
    Mamba2().run()


class Experts:
    """A call of kvkeep_run_experts."""

    ROWS, K, COUNT, HIDDEN, INNER = 3, 2, 4, 32, 16

    def __init__(self) -> None:
        self.numbers, outputs = Numbers(), 2 * self.INNER
        self.gates, self.gates_panels = matrix(self.HIDDEN, self.COUNT * outputs)
        self.down, self.down_panels = matrix(self.INNER, self.COUNT * self.HIDDEN)
        self.struct = KvExperts(
            gates=(self.gates,), down=self.down, experts=self.COUNT, hidden=self.HIDDEN, inner=self.INNER, gated=1
        )
        for name, size in (
            ("gates_bias", self.COUNT * outputs), ("down_bias", self.COUNT * self.HIDDEN), ("gate_values", 1 << 16),
            ("up_values", 1 << 16),
        ):  # fmt: skip
            setattr(self.struct, name, array(self.numbers(name, bfloat16(size))))
        self.x, self.y = (self.numbers(name, bfloat16(self.ROWS, self.HIDDEN)) for name in ("x", "y"))
        self.chosen = self.numbers("chosen", torch.tensor([[0, 3], [2, 1], [4, -1]]))
        self.weights = self.numbers("weights", torch.rand(self.ROWS, self.K))

    def run(self) -> None:
        kernels().kvkeep_run_experts(address_of(self.struct), self.x, self.chosen, self.weights, self.y)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("struct.experts", 0, "experts must have widths"),
        ("struct.experts", 5, "matrices of a layer must have its widths"),
        ("struct.experts", 1 << 39, "no more outputs than memory"),
        ("struct.hidden", 24, "multiples of 16"),
        ("struct.inner", 8, "multiples of 16"),
        ("struct.gated", 2, "multiples of 16"),
        ("struct.gated", 0, "matrices of a layer must have its widths"),
        ("struct.gates_bias", bfloat16(127), "biases must be bfloat16"),
        ("struct.down_bias", torch.ones(128), "biases must be bfloat16"),
        ("struct.gate_values", bfloat16(65535), "of each bfloat16 number"),
        ("struct.up_values", torch.ones(65536), "of each bfloat16 number"),
        ("x", torch.ones(3, 32), "bfloat16 rows of their width"),
        ("x", bfloat16(3, 31), "bfloat16 rows of their width"),
        ("y", bfloat16(2, 32), "bfloat16 rows of their width"),
        ("chosen", torch.zeros(3, 2, dtype=torch.int32), "the same number of chosen experts"),
        ("chosen", torch.zeros(5, dtype=torch.int64), "the same number of chosen experts"),
        ("weights", torch.ones(2, 2), "the same number of chosen experts"),
        ("weights", bfloat16(3, 2), "the same number of chosen experts"),
    ],
)
def test_experts_that_do_not_fit_are_refused(name: str, value: Any, rule: str) -> None:
    call = Experts()
    put(name, value)(call) if "." in name else setattr(call, name, value)
    with pytest.raises(BadCall, match=rule):
        call.run()
    assert call.numbers.unchanged()
    Experts().run()


class Router:
    """A call of kvkeep_route."""

    ROWS, K, COUNT, HIDDEN = 3, 2, 5, 32

    def __init__(self) -> None:
        self.numbers = Numbers()
        weight, self.panels = matrix(self.HIDDEN, self.COUNT)
        self.struct = KvRouter(weight=weight, k=self.K, groups=1, taken_groups=1, group_scores=1, scale=1.0)
        self.struct.bias = array(self.numbers("bias", bfloat16(self.COUNT)))
        self.struct.choice_bias = array(self.numbers("choice_bias", torch.ones(self.COUNT)))
        self.x = self.numbers("x", bfloat16(self.ROWS, self.HIDDEN))
        self.logits = self.numbers("logits", torch.ones(self.ROWS, self.COUNT))
        self.weights = self.numbers("weights", torch.ones(self.ROWS, self.K))
        self.chosen = self.numbers("chosen", torch.ones(self.ROWS, self.K, dtype=torch.int64))

    def run(self) -> None:
        kernels().kvkeep_route(address_of(self.struct), self.x, self.logits, self.weights, self.chosen)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("struct.weight.outputs", 0, "a router must have a weight"),
        ("struct.rounded", 3, "in a way that the library has"),
        ("struct.bias", torch.ones(5), "biases of a router"),
        ("struct.choice_bias", torch.ones(4), "biases of a router"),
        ("struct.k", 0, "experts that exist"),
        ("struct.k", 6, "experts that exist"),
        ("struct.scores", 2, "experts that exist"),
        ("struct.groups", 0, "groups of experts"),
        ("struct.groups", 2, "groups of experts"),
        ("struct.taken_groups", 2, "groups of experts"),
        ("struct.group_scores", 3, "groups of experts"),
        ("x", bfloat16(3, 31), "bfloat16 rows of its width"),
        ("logits", torch.ones(3, 4), "a router must write"),
        ("weights", torch.ones(5), "a router must write"),
        ("chosen", torch.ones(3, 2, dtype=torch.int32), "a router must write"),
    ],
)
def test_a_router_that_does_not_fit_is_refused(name: str, value: Any, rule: str) -> None:
    call = Router()
    put(name, value)(call) if "." in name else setattr(call, name, value)
    with pytest.raises(BadCall, match=rule):
        call.run()
    assert call.numbers.unchanged()
    Router().run()


def test_groups_that_are_taken_have_enough_experts() -> None:
    call = Router()
    call.struct.groups, call.struct.taken_groups = 5, 1
    with pytest.raises(BadCall, match="enough experts"):
        call.run()
    call.struct.k, call.struct.group_scores = 1, 2  # a group of one has no second score
    with pytest.raises(BadCall, match="groups of experts"):
        call.run()
    assert call.numbers.unchanged()


def test_an_mlp_has_a_router_with_experts_of_its_width() -> None:
    call, router, experts = Layer(), Router(), Experts()
    call.mlp.router = address_of(router.struct)
    with pytest.raises(BadCall, match="a router and experts"):
        call.leave()
    call.mlp.experts = address_of(experts.struct)
    with pytest.raises(BadCall, match="must have its width"):
        call.leave()
    assert call.numbers.unchanged()


def test_each_expert_has_whole_panels_of_a_matrix() -> None:
    call = Experts()
    first, call.gates_panels = matrix(32, 16)
    rest, more = matrix(32, 112)
    call.struct.gates[0], call.struct.gates[1] = first, rest
    with pytest.raises(BadCall, match="whole panels"):
        call.run()
    assert len(more)
