"""``kvkeep longchat`` as a person and a program meet it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvkeep_lab import longchat as lab

Run = Callable[..., tuple[int, str, str]]


def test_json_is_one_object(run: Run, model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "chat.png"
    code, out, err = run(
        "longchat", "-m", str(model_folder), "--turns", "3", "-n", "5", "-b", "16", "-o", str(picture), "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert set(report) == {"machine", "budget", "turns", "figure"}
    assert [(row["turn"], row["method"]) for row in report["turns"]] == [
        (turn, name) for turn in (1, 2, 3) for name in lab.METHODS
    ]
    for row in report["turns"]:
        assert set(row) == {
            "method", "turn", "context", "read", "written", "prefill_s", "decode_s", "same", "memory", "text",
            "seconds",
        }  # fmt: skip
        assert set(row["memory"]["checkpoint_bytes"]) == {"device", "host", "disk"} and row["same"]
    assert report["figure"] == str(picture) and picture.stat().st_size > 10_000


def test_table_and_refusals(run: Run, model_folder: Path) -> None:
    common = ("longchat", "-m", str(model_folder), "-n", "5", "-b", "16")
    code, out, _ = run(*common, "--turns", "2", "-x", "stock,kv-direct,h2o")
    assert code == 0 and "resident" in out and "2/2" in out and "h2o" in out
    for wrong in (("-x", "nonsense"), ("-x", ","), ("-x", "stock,stock"), ("-o", "chat.txt"), ("--budget", "x")):
        code, out, err = run(*common, *wrong)
        assert code == 2 and not out and err.count("\n") == 1, wrong
    code, out, err = run(*common[:-4], "-b", "16", "-n", "200", "--turns", "9")
    assert code == 1 and "512 positions" in err and "resident" in out and "Traceback" not in err


def test_an_interrupt_leaves_the_turns_until_then(
    run: Run, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Iterator[lab.Turn]:
        for number, row in enumerate(whole(*arguments, **options)):
            if number == 3:
                raise KeyboardInterrupt
            yield row

    whole = lab.converse
    monkeypatch.setattr(lab, "converse", interrupted)
    code, out, err = run("longchat", "-m", str(model_folder), "-n", "5", "-b", "16", "--json")
    assert code == 1 and "Interrupted" in err and len(json.loads(out)["turns"]) == 3
