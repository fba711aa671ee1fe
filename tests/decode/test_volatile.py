"""Lines of a system prompt that change with each session."""

from __future__ import annotations

import pytest

from kvkeep.decode.volatile import steady


def conversation(system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]


def test_a_header_that_changes_is_left_out_and_named() -> None:
    first, second = (f"x-anthropic-billing-header: a=1; cch={one};\nYou are brief.\nAlways." for one in ("f3", "9c"))
    (one, notes), (other, _) = steady(conversation(first)), steady(conversation(second))
    assert one == other == conversation("You are brief.\nAlways.") and "billing-header" in notes[0]


@pytest.mark.parametrize(
    "line", ["Today's date: 2026-11-28", "  Today's date: Sat Nov 28 2026", "Current date: 28 November", "- Date: 1.2."]
)
def test_a_date_moves_to_the_first_question(line: str) -> None:
    found, notes = steady(conversation(f"You are brief.\n{line}\nAlways."))
    assert found[0]["content"] == "You are brief.\nAlways."
    assert found[1]["content"] == f"{line.strip()}\n\nWhy?" and "date" in notes[0]


@pytest.mark.parametrize("text", ["Write the date: like 2026.", "Update: now", "The date is a fruit.", "", "Dates"])
def test_other_lines_stay(text: str) -> None:
    assert steady(conversation(text)) == (conversation(text), [])
    assert steady(conversation("x")[1:]) == (conversation("x")[1:], [])
