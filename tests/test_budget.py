"""Budgets are read as they are written, and refused with the smallest that would do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.budget import DEFAULT_CHUNK, LONGEST_CHUNK, MIN_CHUNK, SPARE, Budget, bytes_of, size
from kvkeep.errors import BudgetError, UnsupportedModelError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry


def model(*kinds: str, max_positions: int | None = 2048, window: int = 33) -> ModelGeometry:
    """A model whose layers take 2 heads * (8 + 8) elements * 2 bytes = 64 bytes per token each."""
    layers = tuple(
        LayerGeometry(index, kind, 2, 8, 8, window if kind == "sliding" else None, index)
        for index, kind in enumerate(kinds)
    )
    return ModelGeometry("toy", 32, layers, 4, 97, max_positions, 2)


FULL = model("full", "full")
MIXED = model("sliding", "full", "sliding", "full")


@pytest.mark.parametrize(
    ("value", "unit", "amount"),
    [
        (512, "tokens", 512), ("512", "tokens", 512), ("512tok", "tokens", 512), (" 512 Tokens ", "tokens", 512),
        ("0", "tokens", 0), (0, "tokens", 0), ("4096B", "bytes", 4096), ("800KB", "bytes", 800_000),
        ("64MB", "bytes", 64_000_000), ("64 mb", "bytes", 64_000_000), ("64MiB", "bytes", 64 * 2**20),
        ("1.5GB", "bytes", 1_500_000_000), ("1.5gib", "bytes", 3 * 2**29),
        ("25%", "percent", 25), ("12.5 %", "percent", 12.5), ("100%", "percent", 100),
    ],
)  # fmt: skip
def test_parse(value: Any, unit: str, amount: float) -> None:
    budget = Budget.parse(value)
    assert (budget.unit, budget.amount) == (unit, amount)
    assert str(budget) == str(value).strip()
    assert Budget.parse(str(budget)) == budget
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize(
    "value",
    [
        "", "  ", "-1", -1, "-5MB", "nan", "NaN%", "inf", "101%", "100.01%", "1.5tok", "1.5", "lots", "64M", "MB", "%",
        "1 2", "1,5GB", "1e3", "0x10", "5%%", "٣", "9" * 5000, 0.25, float("nan"), True, b"512", [512],
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_examples(value: Any) -> None:
    with pytest.raises(BudgetError) as refused:
        Budget.parse(value)
    message = str(refused.value)
    assert "512tok" in message and "64MB" in message and "25%" in message
    assert message.count(". ") == 0 and message.endswith(".")


@given(st.text(max_size=12))
def test_any_text_is_a_budget_or_a_budget_error(text: str) -> None:
    try:
        budget = Budget.parse(text)
    except BudgetError:
        return
    assert str(budget) == text.strip() and budget.amount >= 0


def test_tokens_are_of_each_full_layer_and_percent_of_the_context_or_of_the_positions_of_the_model() -> None:
    assert Budget.parse(512).entries(MIXED, context=100, batch=7) == 512
    assert {Budget.parse(zero).entries(MIXED) for zero in ("0", "0tok", "0MB", "0%")} == {0}
    assert Budget.parse("25%").entries(FULL, context=1003) == 250
    assert Budget.parse("25%").entries(FULL) == 512
    assert Budget.parse("0.1%").entries(FULL, context=100_000) == 100
    with pytest.raises(BudgetError, match="give the context"):
        Budget.parse("25%").entries(replace(FULL, max_positions=None))


def test_bytes_pay_the_windows_first() -> None:
    window_bytes = 2 * 48 * 64  # 2 sliding layers of 33: 32 entries, and room for 16 more
    budget = Budget.parse(f"{window_bytes + 100 * 128 + 127}B")
    assert budget.entries(MIXED) == 100
    assert budget.entries(MIXED, context=10) == 100 + (2 * 32 * 64 + 127) // 128
    assert budget.entries(FULL) == (window_bytes + 100 * 128 + 127) // 128


@given(
    geometry=st.sampled_from([FULL, MIXED]),
    size=st.integers(0, 200_000),
    batch=st.integers(1, 4),
    context=st.none() | st.integers(1, 500),
    chunk=st.none() | st.integers(1, 64),
)
def test_bytes_are_never_exceeded_nor_wasted(
    geometry: ModelGeometry, size: int, batch: int, context: int | None, chunk: int | None
) -> None:
    """What fits is used to the last whole entry; a refusal names the smallest budget, exactly."""
    per_entry = batch * geometry.full_bytes_per_token
    fixed = batch * geometry.sliding_bytes(context)
    try:
        entries = Budget.parse(f"{size}B").entries(geometry, context=context, batch=batch, chunk=chunk)
    except BudgetError as refused:
        smallest = re.search(r"the smallest for this model is (\d+)B", str(refused))
        assert smallest and size < int(smallest[1])
        least = Budget.parse(f"{smallest[1]}B").entries(geometry, context=context, batch=batch, chunk=chunk)
        assert least == (chunk or MIN_CHUNK)
        with pytest.raises(BudgetError):
            Budget.parse(f"{int(smallest[1]) - 1}B").entries(geometry, context=context, batch=batch, chunk=chunk)
        return
    if size == 0:
        assert entries == 0
        return
    assert fixed + entries * per_entry <= size < fixed + (entries + 1) * per_entry


@given(context=st.integers(1, 100_000), hundredths=st.integers(1, 10_000))
def test_a_refused_share_names_one_that_would_do(context: int, hundredths: int) -> None:
    try:
        entries = Budget.parse(f"{hundredths / 100:.2f}%").entries(FULL, context=context)
    except BudgetError as refused:
        if context < MIN_CHUNK:
            assert f"the smallest is {MIN_CHUNK} entries" in str(refused)
            return
        smallest = re.search(r"context of \d+ is ([\d.]+%)", str(refused))
        assert smallest and Budget.parse(smallest[1]).entries(FULL, context=context) >= MIN_CHUNK
        return
    assert entries == context * hundredths // 10_000


def test_messages_keep_the_unit_of_the_user() -> None:
    with pytest.raises(BudgetError, match=r"Budget '1' holds 1 entry, less than"):
        Budget.parse(1).entries(FULL)
    with pytest.raises(BudgetError, match=r"Budget '8tok' holds 8 entries, less than one chunk of 16; .* 16tok\."):
        Budget.parse("8tok").entries(FULL)
    with pytest.raises(BudgetError, match=r"the smallest is 16 \(or 0, which recalls everything\)\."):
        Budget.parse(8).entries(FULL, zero=True)
    with pytest.raises(BudgetError, match=r"Budget '1KB' holds 7 entries.*smallest for this model is 2048B"):
        Budget.parse("1KB").entries(FULL)
    with pytest.raises(BudgetError, match=r"less than one chunk of 64; the smallest is 64\."):
        Budget.parse(63).entries(FULL, chunk=64)
    with pytest.raises(BudgetError, match=r"less than the 6144B that the sliding-window layers hold.*is 8192B"):
        Budget.parse("4KB").entries(MIXED)


def test_nothing_to_govern_and_impossible_circumstances_are_refused() -> None:
    with pytest.raises(BudgetError, match="has no effect"):
        Budget.parse("64MB").entries(model("sliding", "sliding"))
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        Budget.parse(512).entries(model("full", "linear_attention"))
    for wrong in ({"batch": 0}, {"context": 0}, {"chunk": 0}, {"context": -5}):
        with pytest.raises(BudgetError, match=next(iter(wrong))):
            Budget.parse(512).entries(FULL, **wrong)


@given(entries=st.integers(0, 2000), chunk=st.none() | st.integers(1, 600))
def test_chunks_fit_the_budget(entries: int, chunk: int | None) -> None:
    if entries and entries < (chunk or MIN_CHUNK):
        with pytest.raises(BudgetError, match="less than one chunk"):
            Budget.parse(entries).chunk_for(entries, chunk)
        return
    chosen = Budget.parse(entries).chunk_for(entries, chunk)
    assert entries == 0 or chosen <= entries
    assert chosen == (chunk or (min(DEFAULT_CHUNK, entries) if entries else DEFAULT_CHUNK))


@given(entries=st.integers(MIN_CHUNK, 2000), chunk=st.none() | st.integers(1, 600), layers=st.integers(1, 80))
def test_chunks_of_exact_caches_take_a_share_of_all_layers(entries: int, chunk: int | None, layers: int) -> None:
    chosen = Budget.parse(entries).chunk_for(entries, chunk, layers)
    least = chunk or Budget.parse(entries).chunk_for(entries)
    assert chosen == chunk or least <= chosen <= LONGEST_CHUNK
    assert chosen == least or SPARE * chosen <= entries * layers


def test_a_size_is_bytes_and_one_at_least() -> None:
    assert bytes_of("1.5GiB") == 3 * 2**29 and bytes_of(7) == 7 and bytes_of(" 2 kb ") == 2000
    wrong: list[Any] = ["64", "25%", "much", "", "0MB", "0.5B", "-5MB", 0, -5, True, None, 1.5, [1]]
    for text in wrong:
        with pytest.raises(UsageError, match=r"The quota '.*' is not a number of bytes; give bytes"):
            bytes_of(text, "quota")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (1_550_000, "1.6 MB"),
        (94_371_840, "94.4 MB"),
        (10**12, "1000.0 GB"),
    ],
)
def test_sizes_have_the_largest_unit_that_they_reach(count: int, text: str) -> None:
    assert size(count) == text
