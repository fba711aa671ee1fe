"""``kvkeep methods --for``: the measured methods for a need."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kvkeep.cli.recommended import NEEDS, measured
from kvkeep.policies.methods import resolve

Run = Callable[..., tuple[int, str, str]]


def test_the_best_method_comes_first_at_each_budget(run: Run) -> None:
    code, out, err = run("methods", "--for", "needles", "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    for budget in {row["budget"] for row in rows}:
        found = [row["match"][0] for row in rows if row["budget"] == budget]
        assert found == sorted(found, reverse=True) and len(found) > 1
    budget = rows[0]["budget"]
    shown = run("methods", "--for", "needles", "--budget", budget)[1]
    assert f"at {budget}" in shown and rows[0]["method"] in shown and "kv-direct" in shown
    best = next(row["method"] for row in rows if row["method"] != "full")
    assert f"kvkeep generate -x {best} -b {budget}" in shown


def test_what_the_first_page_names_is_there(run: Run) -> None:
    for need in NEEDS:
        assert run("methods", "--for", need)[0] == 0
    assert run("methods", "--for", "needles", "--budget", "10%")[0] == 0


def test_every_row_names_a_method_and_numbers_on_their_scales() -> None:
    for row in measured()["rows"]:
        assert resolve(row["method"]) and row["need"] in NEEDS
        mean, low, high = row["match"]
        assert 0 <= low <= mean <= high <= 1 and 0 < row["bytes"] <= 1.2 and row["n"] >= row["texts"] > 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--for", "needle"), "did you mean needles"),
        (("--for", "needles", "-b", "7%"), "7% was not measured"),
        (("-b", "25%"), "--budget chooses rows of --for"),
        (("--for", "needles", "--table", "fates"), "--for prints a table of its own"),
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence(run: Run, given: tuple[str, ...], reason: str) -> None:
    code, _, err = run("methods", *given)
    assert code == 2 and reason in " ".join(err.split())
