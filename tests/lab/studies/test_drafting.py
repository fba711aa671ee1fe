"""``kvkeep analyse drafts``: answers in two ways, and the tasks that they answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvkeep_lab.copying import KINDS, MODULES, source, tasks_of
from kvkeep_lab.studies.base import Trial
from kvkeep_lab.studies.drafting import Drafting
from measuring import copying, loaded

from kvkeep.errors import UsageError


@pytest.mark.usefixtures("kernels")
def test_both_ways_give_one_answer_in_different_numbers_of_passes(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    found = Drafting(edits=3, rounds=2, new=40).measure(Trial(copying(tmp_path)))
    assert [one.kind for one in found.answers] == ["rewrite"] * 2 + ["quotation"] * 2 + ["edits"] * 3 + ["story"] * 2
    for one in found.answers:
        assert one.same and one.tokens > 1 and one.without.seconds > 0 and one.drafts.seconds > 0
        assert one.without.passes == one.tokens - 1 and not one.without.drafted
        assert one.drafts.passes == one.without.passes - one.drafts.accepted and one.drafts.accepted
    assert Drafting().problem(found) is None and len(Drafting().tables(found)[0].rows) == len(KINDS)


def test_edits_name_what_a_file_has() -> None:
    tasks = tasks_of("edits", 50, 1)
    assert tasks == tasks_of("edits", 50, 1) != tasks_of("edits", 50, 2)
    for task in tasks:
        asked, file = task.messages[-1]["content"], task.messages[1]["content"]
        hit = re.search(r"the function `(\w+)` of (\w+)\.py, rename `(\w+)`", asked)
        assert hit is not None and hit[2] in MODULES and source(hit[2]) in file
        assert f"def {hit[1]}(" in file and hit[3] in file
    with pytest.raises(UsageError, match="names to change"):
        tasks_of("edits", 10_000, 1)


def test_a_model_whose_answers_have_no_drafts_is_refused() -> None:
    with pytest.raises(UsageError, match="have no drafts"):
        Drafting().measure(Trial(loaded()))
