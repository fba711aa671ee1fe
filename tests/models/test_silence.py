"""What is silenced while a model loads."""

from __future__ import annotations

import logging
import sys

import pytest

from kvkeep.models.silence import silenced


@pytest.mark.parametrize("handled", [False, True])
def test_warnings_of_kvkeep_are_printed_once_and_progress_bars_are_not(
    handled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(sys.stderr)] if handled else [])
    log = logging.getLogger("kvkeep.native.library")
    with silenced():
        log.warning("Compiling ...")
        log.info("a detail")
        print("50 % of a bar", file=sys.stderr)
    log.warning("after")
    assert capsys.readouterr().err == "Compiling ...\nafter\n"
