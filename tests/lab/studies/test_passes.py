"""``kvkeep analyse passes``: all sizes are timed, and every pass is taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvkeep_lab.studies.base import Trial
from kvkeep_lab.studies.passes import SESSIONS, TEXT, AllPasses, Passes, PassTimes
from measuring import copying, loaded

from kvkeep.errors import UsageError


@pytest.mark.usefixtures("kernels")
def test_each_size_has_its_passes(tmp_path: Path) -> None:
    study = Passes(contexts=[20, 40], tokens=[4, 2], budget="16", rounds=2, passes=3)
    found = study.measure(Trial(copying(tmp_path)))
    kinds = [(TEXT, 1), (TEXT, 2), (TEXT, 4), (SESSIONS, 2), (SESSIONS, 4)]
    listed = [(context, method) for context in (20, 40) for method in ("full", "kv-direct")]
    assert [(one.context, one.method, one.whose, one.tokens) for one in found.times] == [
        (*case, *kind) for case in listed for kind in kinds
    ]
    assert all(len(one.passes_ms) == 6 and min(one.passes_ms) > 0 for one in found.times)
    assert [row[3:5] == ["", ""] for row in study.tables(found)[0].rows] == [False] * 8


def test_ratios_are_relative_to_one_token_of_one_text() -> None:
    listed = [("full", 9, TEXT, 1, [4.0, 2.0, 2.0]), ("full", 9, TEXT, 8, [3.0]), ("kv-direct", 9, TEXT, 1, [1.0])]
    found = AllPasses([PassTimes(*one) for one in listed] + [PassTimes("full", 9, SESSIONS, 8, [5.0])])
    assert [found.ratio(one) for one in found.times] == [1.0, 1.5, 1.0, 2.5]


def test_a_method_without_drafts_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be taken back"):
        Passes().measure(Trial(loaded()))
