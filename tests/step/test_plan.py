"""A wrong plan is an error of one sentence, and neither executor writes anything."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep.errors import BadCall
from kvkeep.native import library
from kvkeep.step import native
from kvkeep.step import torch as plain
from kvkeep.step.native import entries as native_entries
from kvkeep.step.native import steps as native_steps
from kvkeep.step.plan import Destination, FullPages, JoinedSpans, LayerStep, Span
from kvkeep.stores.evicted.coded import ByChannel

pytestmark = pytest.mark.usefixtures("kernels")
LANES, ROWS, DIM = 2, 8, 4


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def places(lanes: int = LANES, columns: int = ROWS) -> Tensor:
    return torch.arange(columns, dtype=torch.int32).repeat(lanes, 1)


def good() -> LayerStep:
    """A step that uses every field but ``others``."""
    keys, values, slots = numbers(LANES, ROWS, DIM), numbers(LANES, ROWS, DIM), places()
    append = Destination(keys, values, 0, slots, numbers(LANES, ROWS, dtype=torch.float32),
                         numbers(LANES, ROWS, dtype=torch.float32), places())  # fmt: skip
    beside = places(columns=1), *numbers(2, LANES, 1, dtype=torch.float32), places(columns=1)
    evict = Destination(numbers(LANES, 3, DIM), numbers(LANES, 3, DIM), 2, *beside)
    return LayerStep(
        append, 9, numbers(LANES, ROWS, dtype=torch.float32), True, numbers(LANES, dtype=torch.float32), evict,
        [Span(keys, values, 0, ROWS)], torch.ones(LANES, ROWS, dtype=torch.bool), "sum",
        numbers(LANES, ROWS, dtype=torch.float32),
    )  # fmt: skip


def without(step: LayerStep, **changes: Any) -> LayerStep:
    """A step that takes a row instead of the lowest rank, with changes."""
    return step._replace(ranks=None, **changes)


def appended(**changes: Any) -> Callable[[LayerStep], LayerStep]:
    return lambda step: without(step, append=step.append._replace(**changes))


def evicted(**changes: Any) -> Callable[[LayerStep], LayerStep]:
    return lambda step: step._replace(evict=step.evict and step.evict._replace(**changes))


def spanned(*span: Any) -> Callable[[LayerStep], LayerStep]:
    return lambda step: step._replace(attend=[Span(*span)])


def changed(**changes: Any) -> Callable[[LayerStep], LayerStep]:
    return lambda step: step._replace(**changes)


def bytes_of(lanes: int = LANES, columns: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    return numbers(lanes, columns, dtype=dtype)


ROW = numbers(LANES, ROWS, DIM)
WRONG: list[tuple[str, Callable[[LayerStep], LayerStep]]] = [
    ("append.row", appended(row=ROWS)),
    ("append.row", appended(row=-1)),
    ("append", appended(keys=numbers(LANES, ROWS, DIM, dtype=torch.float32))),
    ("append", appended(keys=numbers(LANES * ROWS, DIM))),
    ("append", lambda step: appended(keys=JoinedSpans(step.attend), values=JoinedSpans(step.attend).values)(step)),
    ("append.slots", appended(slots=places(columns=ROWS + 1))),
    ("append.slots", appended(slots=places().long())),
    ("append.slots", appended(slots=places(ROWS, LANES).T)),
    ("append.slots", appended(slots=None)),
    ("append.scores", appended(scores=bytes_of(columns=ROWS - 1))),
    ("append.scores", appended(scores=bytes_of(dtype=torch.bfloat16))),
    ("append.extra", appended(extra=bytes_of(lanes=1))),
    ("append.extra", appended(newest=None)),
    ("append.newest", appended(newest=bytes_of())),
    ("new_scores", changed(new_scores=numbers(1, dtype=torch.float32))),
    ("evict.row", evicted(row=3)),
    ("evict.row", evicted(row=-1)),
    ("evict", evicted(keys=numbers(1, 3, DIM), values=numbers(1, 3, DIM))),
    ("evict", evicted(keys=numbers(LANES, 3, DIM + 2))),
    ("evict", evicted(keys=bytes_of().view(LANES, 2, DIM), values=bytes_of().view(LANES, 2, DIM), row=0)),
    ("evict.slots", evicted(slots=places(1, 1))),
    ("evict.scores", lambda step: appended(scores=None)(step)._replace(new_scores=None)),
    ("attend", spanned(ROW, ROW, 0, ROWS + 1)),
    ("attend", spanned(ROW, ROW, -1, 2)),
    ("attend", spanned(ROW, ROW, 3, 2)),
    ("attend", spanned(numbers(LANES, ROWS, 2), numbers(LANES, ROWS, DIM), 0, ROWS)),
    ("attend", spanned(ROW, JoinedSpans([Span(ROW, ROW, 0, 2)]), 0, 2)),
    ("seen", changed(seen=torch.ones(LANES, ROWS - 1, dtype=torch.bool))),
    ("seen", changed(seen=torch.ones(LANES, ROWS))),
    ("received", changed(received=bytes_of(dtype=torch.bfloat16))),
    ("first_lane", changed(first_lane=1)),
    ("first_lane", lambda step: step._replace(others=[step])),
    ("append", appended(keys=numbers(1, ROWS, DIM).expand(LANES, ROWS, DIM))),
    ("append", appended(values=numbers(LANES, 1, DIM).expand(LANES, ROWS, DIM))),
    ("append.row", appended(row=2**64 + 3)),
    ("append.slots", appended(slots=places()[None])),
    (
        "append.slots",
        lambda step: step._replace(
            append=step.append._replace(slots=places(columns=4), scores=None, extra=None, newest=None)
        ),
    ),
    ("append.slots", lambda step: without(step, evict=None, append=step.append._replace(slots=None))),
    ("append.scores", appended(scores=bytes_of(columns=ROWS + 4))),
    ("slot", changed(slot=2**32 + 5)),
    ("slot", changed(slot=-1)),
    ("ranks", changed(ranks=bytes_of(columns=ROWS + 4))),
    ("ranks", changed(ranks=bytes_of(columns=ROWS)[None])),
    ("new_scores", changed(new_scores=bytes_of(columns=1))),
    ("evict.row", evicted(row=2**64 + 1)),
    ("evict", evicted(keys=numbers(LANES, 1, DIM).expand(LANES, 3, DIM))),
    ("evict.slots", evicted(slots=places(columns=2))),
    ("evict.slots", evicted(slots=None)),
    ("attend", spanned(ROW, ROW, 0, 2**64 + 1)),
    ("attend", spanned(ROW, ROW, 2**64, 2**64 + 1)),
    ("seen", changed(seen=torch.ones(1, LANES, ROWS, dtype=torch.bool))),
    ("reduce", changed(reduce="median")),
    ("reduce", changed(reduce="")),
    ("received", changed(received=None)),
    ("received", changed(received=bytes_of(columns=ROWS + 4))),
    ("first_lane", changed(first_lane=2**64)),
    ("tokens", changed(tokens=2)),
    ("tokens", changed(tokens=0)),
    ("tokens", lambda step: without(step, evict=None, reduce="", received=None, tokens=2**64 + 1)),
    ("place", changed(place=torch.tensor([0]))),
    (
        "place",
        lambda step: appended(slots=None, scores=None, extra=None, newest=None)(step)._replace(
            evict=None, place=torch.tensor(0)
        ),
    ),
    ("others", lambda step: step._replace(others=[step])),
    ("others", lambda step: step._replace(others=[])),
]
"""A field, and what makes it wrong in a good step. The ``others`` are wrong for a token of twice the heads."""


def everything(step: LayerStep) -> list[Tensor]:
    """Copies of all tensors that a step may write to."""
    parts = [*step.append, *(step.evict or ()), step.received]
    return [part.clone() for part in parts if isinstance(part, Tensor)]


@pytest.mark.parametrize("executor", [native, plain], ids=["library", "torch"])
@pytest.mark.parametrize(("field", "spoil"), WRONG, ids=[f"{n}-{field}" for n, (field, _) in enumerate(WRONG)])
def test_a_wrong_plan_is_an_error_and_writes_nothing(
    field: str, spoil: Callable[[LayerStep], LayerStep], executor: Any
) -> None:
    heads = LANES * (1 + (field == "others"))
    query, entry = torch.ones(1, heads, 1, DIM).bfloat16(), torch.ones(1, heads, 1, DIM).bfloat16()
    if field != "others":
        executor.run([good()], [0], query, entry, entry, 1.0)
    step = spoil(good())
    before = everything(step)
    with pytest.raises(BadCall):
        executor.run([step], [0], query, entry, entry, 1.0)
    assert all(torch.equal(one, other) for one, other in zip(before, everything(step), strict=True))


def test_the_library_reads_ranks_of_two_types() -> None:
    entry = torch.ones(1, LANES, 1, DIM).bfloat16()
    for dtype in (torch.float32, torch.int32, torch.float64, torch.int64):
        step = good()._replace(ranks=bytes_of(dtype=dtype))
        if dtype.itemsize == 4:
            native.run([step], [0], entry, entry, entry, 1.0)
            continue
        with pytest.raises(BadCall):
            native.run([step], [0], entry, entry, entry, 1.0)


def test_a_row_that_is_a_tensor_is_not_for_the_library() -> None:
    keys, values, entry = numbers(LANES, ROWS, DIM), numbers(LANES, ROWS, DIM), torch.ones(1, LANES, 1, DIM).bfloat16()
    step = LayerStep(Destination(keys, values), attend=[Span(keys, values, 0, ROWS)], place=torch.tensor([3]))
    with pytest.raises(BadCall):
        native.run([step], [0], entry, entry, entry, 1.0)
    assert not keys.any()
    plain.run([step], [0], entry, entry, entry, 1.0)
    assert keys.any(2).nonzero()[:, 1].tolist() == [3] * LANES


@pytest.mark.parametrize("token", [-1, 1])
def test_a_token_outside_the_row_is_an_error(token: int) -> None:
    entry = torch.ones(1, LANES, 1, DIM).bfloat16()
    with pytest.raises(BadCall):
        native.run([good()], [token], entry, entry, entry, 1.0)


def test_entries_of_another_type_width_or_number_of_lanes_are_not_written() -> None:
    for entry in (torch.ones(1, LANES, 1, DIM + 2).bfloat16(), torch.ones(1, LANES + 1, 1, DIM).bfloat16()):
        with pytest.raises(BadCall):
            native.run([good()], [0], entry, entry, entry, 1.0)
    for entry in (torch.ones(LANES, DIM + 2).bfloat16(), torch.ones(LANES + 1, DIM).bfloat16(), torch.ones(LANES, DIM)):
        with pytest.raises(BadCall):
            native.insert(good(), entry, entry)


@pytest.mark.parametrize(
    "spoil", [changed(ranks=bytes_of(ROWS, LANES).T), changed(seen=torch.ones(ROWS, LANES, dtype=torch.bool).T)]
)
def test_the_library_is_given_no_numbers_that_lie_apart(spoil: Callable[[LayerStep], LayerStep]) -> None:
    entry = torch.ones(1, LANES, 1, DIM).bfloat16()
    with pytest.raises(BadCall):
        native.run([spoil(good())], [0], entry, entry, entry, 1.0)


@pytest.mark.parametrize(
    "part", [ROW.transpose(1, 2)[:, :DIM].contiguous().transpose(1, 2), numbers(LANES, ROWS, 8)[..., ::2]]
)
def test_the_library_is_given_no_entries_whose_numbers_lie_apart(part: Tensor) -> None:
    entry = torch.ones(1, LANES, 1, DIM).bfloat16()
    with pytest.raises(BadCall):
        native.run([appended(keys=part)(good())], [0], entry, entry, entry, 1.0)


@pytest.mark.parametrize("name", ["scale", "offset"])
def test_codes_whose_scales_are_too_few_are_not_read(name: str) -> None:
    query, scales = torch.ones(LANES, 1, 1, 16).bfloat16(), numbers(LANES, 1, 16, dtype=torch.float16)
    codes = ByChannel(torch.zeros(LANES, ROWS, 16, dtype=torch.int8), scales, scales)
    assert native.Call(query, [Span(codes, codes, 0, ROWS)], 1.0).attend() is not None
    wrong = replace(codes, **{name: scales[:1]})
    with pytest.raises(BadCall):
        native.Call(query, [Span(wrong, codes, 0, ROWS)], 1.0).attend()


def test_what_was_compiled_is_forgotten_with_the_tensors() -> None:
    entry = torch.ones(1, LANES, 1, DIM).bfloat16()
    gc.collect()
    forms, known = len(native_steps._FORMS), len(native_entries._COMPILED)
    step = good()
    for _ in range(2):
        native.run([step], [0], entry, entry, entry, 1.0)
    assert len(native_steps._FORMS) == forms + 1 and len(native_entries._COMPILED) == known + 1
    del step
    gc.collect()
    assert len(native_steps._FORMS) == forms and len(native_entries._COMPILED) == known


def given_other_memory(part: Tensor) -> None:
    part.data = torch.ones(part.shape, dtype=part.dtype)


def made_larger(part: Tensor) -> None:
    shape = part.shape
    part.resize_(part.numel() * 999).resize_(shape)


def freed(part: Tensor) -> None:
    part.untyped_storage().resize_(0)


def cut_in_place(part: Tensor) -> None:
    part.untyped_storage().resize_(0)
    part.untyped_storage().resize_(4)


MOVES: list[tuple[Callable[[Tensor], None], bool]] = [
    (given_other_memory, True), (made_larger, True), (freed, False), (cut_in_place, False)
]  # fmt: skip
PARTS = ("append.keys", "append.values", "append.slots", "append.scores", "evict.keys", "evict.slots", "page", "seen",
         "ranks", "received", "new_scores")  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(("move", "fits"), MOVES)
def test_tensors_that_moved_after_they_were_compiled_are_not_read_there(
    move: Callable[[Tensor], None], fits: bool, name: str
) -> None:
    entry, page = torch.ones(1, LANES, 1, DIM).bfloat16(), numbers(LANES, ROWS, DIM)
    step, joined = good(), JoinedSpans([Span(page, numbers(LANES, ROWS, DIM), 0, ROWS)])
    assert step.evict is not None
    step = step._replace(attend=[Span(joined, joined.values, 0, ROWS)])
    native.run([step], [0], entry, entry, entry, 1.0)
    owner, _, field = name.rpartition(".")
    part: Tensor = page if name == "page" else getattr(getattr(step, owner) if owner else step, field)
    move(part)
    if not fits:
        with pytest.raises((BadCall, RuntimeError)):  # of torch, which takes views
            native.run([step], [0], entry, entry, entry, 1.0)
        return
    if name == "append.slots":
        part.zero_()[:, 1] = -1
    native.run([step], [0], entry, entry, entry, 1.0)
    if name == "append.keys":
        assert (part == 1).all(2).any(1).all()


def test_an_empty_span_is_not_seen() -> None:
    entry = torch.ones(1, LANES, 1, DIM).bfloat16()
    for executor in (native, plain):
        one, other = good(), good()
        other = other._replace(attend=[Span(ROW, ROW, ROWS, ROWS), *other.attend])
        both = [executor.run([step], [0], entry, entry, entry, 1.0) for step in (one, other)]
        assert torch.equal(*both)
        nothing = LayerStep(
            Destination(numbers(LANES, ROWS, DIM), numbers(LANES, ROWS, DIM)), attend=[Span(ROW, ROW, 3, 3)]
        )
        assert not executor.run([nothing], [0], entry, entry, entry, 1.0).any()


def test_ctrl_c_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(tensor: Tensor | None) -> None:
        raise KeyboardInterrupt

    entry = torch.ones(1, LANES, 1, DIM).bfloat16()
    monkeypatch.setattr(library, "array", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native.run([good()], [0], entry, entry, entry, 1.0)
    monkeypatch.undo()
    with pytest.raises(BadCall):
        library.kernels().kvkeep_mlp(None, entry.expand(2, LANES, 1, DIM), entry)


def test_full_pages_are_one_span_until_one_of_them_changes() -> None:
    """Also if a page is replaced by an equal one."""
    keys, values, pages = [numbers(1, 4, 2) for _ in "ab"], [numbers(1, 4, 2) for _ in "ab"], FullPages()
    assert pages.span([], []) is None
    first = pages.span(keys, values)
    assert first is not None and first.stop == 8 and pages.span([*keys], [*values]) is first
    values[1] = values[1].clone()
    second = pages.span(keys, values)
    assert second is not None and second is not first and second.keys.spans[1].values is values[1]
    assert pages.span(keys[:1], values[:1]) is not second and pages.span([], []) is None
