"""``kvkeep plan`` and ``--budget auto`` as a person and a program meet them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.plan.machine import Machine

Run = Callable[..., tuple[int, str, str]]
DOCS = Path(__file__).parents[2] / "docs" / "machines"
EIGHT, SHEET = str(DOCS / "llama-3.1-8b.json"), str(DOCS / "rtx-4090.json")


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command measures the machine by itself."""

    def measured(*given: object) -> None:
        raise AssertionError("the machine was measured")

    monkeypatch.setattr("kvkeep.plan.calibrate.calibrate", measured)


def test_a_large_model_is_planned_from_its_config(run: Run, tmp_path: Path) -> None:
    figure = tmp_path / "plan.png"
    common = ("plan", "-m", EIGHT, "-n", "32768", "--memory", "2GB", "--machine", SHEET, "--json")
    code, out, err = run(*common, "-o", str(figure))
    assert code == 0, err
    answer = json.loads(out)
    assert answer["weight_bytes"] == pytest.approx(16.06e9, rel=0.01)
    assert answer["machine"]["source"] == "from the data sheet, not measured"
    assert answer["recommended"]["class"] == "exact" and answer["recommended"] in answer["rows"]
    assert all(row["memory_bytes"] <= 2e9 for row in answer["rows"])
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert {row["class"] for row in json.loads(run(*common, "--exact")[1])["rows"]} == {"exact"}
    # Without --memory: what the weights leave of the machine.
    code, out, _ = run("plan", "-m", EIGHT, "-n", "4096", "--machine", SHEET)
    assert code == 0 and "recommended" in out and "Take 'full'" in out.replace("\n", " ")


def test_a_table_names_what_to_take(run: Run, model_folder: Path) -> None:
    code, out, err = run("plan", "-m", str(model_folder), "-n", "500", "--memory", "100KB", "--all")
    assert code == 0, err
    assert "recommended" in out and "frontier" in out and "kv-direct" in out
    assert "(estimated; run `kvkeep calibrate --dtype float32` to measure)" in err


def test_predictions_are_checked(run: Run, model_folder: Path) -> None:
    common = ("plan", "-m", str(model_folder), "--check", "--only")
    code, out, err = run(*common, "full,kv-direct kv@,window", "-n", "300,400", "-b", "40%", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert len(answer["rows"]) == 2 * 5 == answer["measured"]
    for row in answer["rows"]:
        assert row["predicted_bytes"] == row["measured_bytes"] and row["measured_step_s"] > 0
    assert "within 25 %" in run(*common, "full", "-n", "300")[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-m", "smolm2"), "did you mean smollm2"),
        (("-m", EIGHT, "-n", "200000", "--machine", SHEET), "131,072 positions"),
        (("-m", EIGHT, "--memory", "1KB", "--machine", SHEET), "the least is"),
        (("-m", EIGHT, "--memory", "25%", "--machine", SHEET), "give bytes"),
        (("-m", EIGHT, "-n", "many", "--machine", SHEET), "whole number"),
        (("-m", EIGHT, "-n", "1,2", "--machine", SHEET), "one context"),
        (("-m", EIGHT, "--machine", "/nowhere.json"), "no such file"),
        (("-m", EIGHT, "--machine", EIGHT), "cannot be understood"),
        (("-m", EIGHT, "--machine", SHEET, "--check"), "leave --machine out"),
        (("-m", EIGHT, "--machine", SHEET, "--acceptance", "2"), "from 0 to 1"),
        (("-m", EIGHT, "--machine", SHEET, "-o", "plan.txt"), "has to end in"),
        (("-m", EIGHT, "--machine", SHEET, "--weights", "float31"), "Unknown weight format"),
        (("-m", str(DOCS / "llama-3.1-70b.json"), "--machine", SHEET), "weights alone"),
    ],
)
def test_bad_input_is_one_sentence(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    code, out, err = run("plan", *arguments)
    assert code in (1, 2) and out == "" and err.strip().count("\n") == 0
    assert err.startswith("kvkeep: ") and sentence in err


def test_without_matplotlib_a_figure_is_refused_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep_lab.figures.find_spec", lambda name: None)
    code, _, err = run("plan", "-m", EIGHT, "--machine", SHEET, "-o", "plan.png")
    assert code == 2 and "pip install" in err


def test_a_budget_of_auto(run: Run, model_folder: Path, words: str) -> None:
    common = ("generate", "-m", str(model_folder), "-f", "-", "-n", "9", "--json")
    expected = json.loads(run(*common, "-x", "stock", stdin=words)[1])["tokens"]
    for memory, methods in (("64KB", ("kv-direct", "snapkv+verified")), ("64MB", ("full",))):
        code, out, err = run(*common, "-b", "auto", "--memory", memory, stdin=words)
        assert code == 0, err
        assert json.loads(out)["method"] in methods and json.loads(out)["tokens"] == expected
        assert "Take '" in err and "Times are estimated; run `kvkeep calibrate" in err
    code, out, err = run("chat", "-m", str(model_folder), "-b", "auto", "-n", "5", "--json", stdin="the of\n")
    assert code == 0 and len(json.loads(out)["turns"]) == 1, err
    for extra, sentence in (
        (("-b", "auto", "-x", "h2o"), "leave --method out"),
        (("-b", "auto", "--capacity", "5"), "a capacity makes it lossy"),
        (("-b", "auto", "--chunk", "7"), "leave --chunk out"),
        (("-b", "auto", "--folder", "x"), "leave --folder out"),
        (("--memory", "64KB"), "--budget auto"),
        (("-b", "auto", "--memory", "much"), "give bytes"),
        (("-b", "auto", "--memory", "10B"), "the least is"),
    ):
        code, out, err = run("generate", "-m", str(model_folder), "-p", "the", *extra)
        assert code == 2 and sentence in err and out == ""


def test_what_a_machine_carries(run: Run, model_folder: Path, tmp_path: Path) -> None:
    common = ("capacity", "-m", EIGHT, "-n", "8192,32768", "--machine", SHEET, "--memory", "4GB", "--gbit", "1,25")
    code, out, err = run(*common, "-x", "full,h2o,kv-direct kv@host", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert [(row["context"], row["cache"]) for row in answer["rows"]] == [
        (tokens, name) for tokens in (8192, 32768) for name in ("full", "h2o", "kv-direct kv@host")
    ]
    full = answer["rows"][0]
    assert full["sessions"] == 3 and full["held_bytes"] == 8192 * 131072 and full["moved_bytes"] == 0
    assert full["fetched_s"] == {
        "1": pytest.approx(8 * full["stored_bytes"] / 1e9),
        "25": pytest.approx(0.3436, rel=1e-3),
    }
    code, out, err = run(*common)
    assert code == 0 and "snapkv+verified kv@host" in out and "25 Gbit/s" in out and "not measured" in err, err
    code, out, err = run("capacity", "-m", str(model_folder), "-n", "400", "-b", "64")
    assert code == 0 and "estimated; run `kvkeep calibrate" in err
    nothing = tmp_path / "sheet.json"
    nothing.write_text(json.dumps(json.loads(Path(SHEET).read_text()) | {"memory_bytes": math.inf}))
    for wrong, sentence in (
        (("-x", "h3o"), "h2o"),
        (("-x", "none"), "Unknown method"),
        (("-n", "4k"), "not understood"),
        (("-n", "nan"), "whole numbers above 0"),
        (("-n", "8192.5"), "whole numbers above 0"),
        (("--gbit", "0"), "above 0"),
        (("--machine", str(nothing)), "finite and above 0"),
    ):
        code, out, err = run(*common, *wrong)
        assert code == 2 and out == "" and sentence in err and err.count("\n") == 1
    code, _, err = run("capacity", "-m", str(DOCS / "llama-3.1-70b.json"), "--machine", SHEET)
    assert code == 2 and "weights alone" in err


def test_a_machine_is_measured_when_asked_to(run: Run, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And plans say that they use what was found."""
    machine = Machine.from_sheet(
        name="made up", device="cpu", flops=2e11, memory=2e10, link=None, disk=1e9, memory_bytes=16e9, host_bytes=16e9,
        layer_step=3e-4, dtype_bytes=4, source="measured",
    )  # fmt: skip
    monkeypatch.setattr("kvkeep.plan.calibrate.calibrate", lambda *given: machine)
    code, out, err = run("calibrate", "--dtype", "float32")
    assert code == 0 and "less than a minute" in err and "memory, GB/s" in out and "kept in" in out, err
    found = json.loads(run("calibrate", "--dtype", "float32", "--json")[1])
    assert Machine.load(found["path"]) == machine and found["machine"]["name"] == "made up"
    code, _, err = run("plan", "-m", str(model_folder), "-n", "500", "--memory", "100KB")
    assert code == 0 and "made up (measured)" in err and "estimated" not in err
    code, out, err = run("calibrate", "--dtype", "float31")
    assert code == 2 and out == "" and "float32" in err
