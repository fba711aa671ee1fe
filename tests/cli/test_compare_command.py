"""``kvkeep compare`` as a person and a program meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvkeep_lab import compare as lab
from kvkeep_lab.cli.compare import nats, specs

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def common(model_folder: Path, tmp_path: Path, words: str) -> tuple[str, ...]:
    (tmp_path / "text.txt").write_text(words)
    return ("compare", "-m", str(model_folder), "-f", str(tmp_path / "text.txt"), "-n", "8")


def test_json_has_all_its_fields_and_nothing_else(run: Run, common: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = str(tmp_path / "compare.png")
    code, out, err = run(*common, "-x", "kv-direct,static", "-x", "full", "-b", "16,25%", "-o", picture, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert set(report) == {"machine", "prompt_tokens", "new_tokens", "context", "reference", "rows", "figure"}
    assert (report["prompt_tokens"], report["new_tokens"], report["context"]) == (200, 8, 208)
    assert set(report["machine"]) >= {"model", "dtype", "threads", "torch", "device"}
    for row in (report["reference"], *report["rows"]):
        assert set(row) == {
            "method", "budget", "exactness", "entries", "match", "differs_at", "kl_mean", "kl_max", "kl", "top1",
            "perplexity", "memory", "prefill_s", "tokens_per_s", "tokens", "away", "recalled", "left_out",
            "merges", "error",
        }  # fmt: skip
        assert set(row["memory"]["checkpoint_bytes"]) == {"device", "host", "disk"}
    rows = {(row["method"], row["budget"]): row for row in report["rows"]}
    assert list(rows) == [
        ("full", None), ("kv-direct", "16"), ("static", "16"), ("kv-direct", "25%"), ("static", "25%"),
    ]  # fmt: skip
    assert rows["kv-direct", "25%"]["entries"] == 52 and len(rows["kv-direct", "25%"]["kl"]) == 8
    assert rows["kv-direct", "16"]["match"] == 1.0 and "larger budget" in rows["static", "16"]["error"]
    assert report["figure"] == picture and Path(picture).stat().st_size > 10_000


def test_the_table_is_whole_and_tells_what_was_refused(run: Run, common: tuple[str, ...]) -> None:
    code, out, err = run(*common, "-x", "kv-direct,full,static", "-b", "16,25%")
    assert code == 0, err
    heading = " ".join(out.splitlines()[:2])
    for word in ("class", "budget", "entries", "match", "differs", "KL", "perplexity", "resident", "checkpoints"):
        assert word in heading
    assert "static at 16: The static cache holds 16" in out and "stock" in out
    assert not list(Path(common[4]).parent.glob("*.png"))  # none was asked for


def test_a_text_is_shortened_and_that_is_said(run: Run, common: tuple[str, ...]) -> None:
    code, out, err = run(*common, "-x", "full", "--limit", "50", "--json")
    assert code == 0 and json.loads(out)["prompt_tokens"] == 50
    assert "Only the first 50 of the text's 200 tokens are read." in err.replace("\n", " ")
    code, out, _ = run(*common, "-x", "full", "--limit", "50", "-p", "the of", "--json")
    assert json.loads(out)["prompt_tokens"] > 52  # with the template's own tokens
    code, out, _ = run(*common, "-x", "full", "--limit", "50", "-p", "the of", "--raw", "--json")
    assert json.loads(out)["prompt_tokens"] == 52


def test_commas_part_methods_but_not_parameters() -> None:
    assert specs(["kv-direct, h2o", "full,h2o"]) == ["kv-direct", "h2o", "full"]
    assert specs(["h2o:recent=0.5,sinks=4,window", "streaming-llm+quantize:bits=4,group=32"]) == [
        "h2o:recent=0.5,sinks=4", "window", "streaming-llm+quantize:bits=4,group=32",
    ]  # fmt: skip


def test_zero_is_printed_where_it_is_zero() -> None:
    assert [nats(value) for value in (None, 0.0, 3.21e-12, 0.0042, 0.25)] == ["-", "0", "3.2e-12", "4.2e-03", "0.250"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-x", "kvdirect"), "did you mean kv-direct"),
        (("-b", "12.5.1%"), "cannot be read"),
        (("-b", ","), "nothing to compare"),
        (("-o", "compare.doc"), "end in .png"),
        (("-n", "400"), "512 positions"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Run, common: tuple[str, ...], arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = run(*common, "-x", "full", *arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and out == "" and len(lines) == 1 and sentence in lines[0]


def test_figures_need_their_extra_before_anything_is_read(
    run: Run, common: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep_lab.figures.find_spec", lambda name: None)
    monkeypatch.setattr("kvkeep.models.loading.load", lambda *given, **options: pytest.fail("a model was loaded"))
    code, out, err = run(*common, "-x", "full", "-o", "compare.png")
    assert code == 2 and out == "" and "pip install 'kvkeep[figures]'" in err


def test_nothing_measured_is_a_failure(run: Run, common: tuple[str, ...]) -> None:
    code, out, err = run(*common, "-x", "kv-direct", "-b", "3", "--json")
    assert code == 1 and "No method could be measured" in err
    assert "smallest is 16" in json.loads(out)["rows"][0]["error"]


def test_an_interrupt_prints_what_was_measured(
    run: Run, common: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = lab.Reference.measure, []

    def second_time_interrupted(*arguments: Any) -> lab.Row:
        calls.append(arguments)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return honest(*arguments)

    monkeypatch.setattr(lab.Reference, "measure", second_time_interrupted)
    code, out, err = run(*common, "-x", "kv-direct", "-b", "16,32", "--json")
    assert code == 1 and "Interrupted; the figures above" in err
    assert [row["error"] for row in json.loads(out)["rows"]] == ["", lab.INTERRUPTED]
    code, out, err = run(*common, "-x", "kv-direct", "-b", "16,32")
    assert code == 1 and "kv-direct at 32: interrupted" in out and "Traceback" not in err


def test_an_interrupt_of_the_reference_leaves_nothing(
    run: Run, common: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab.Reference, "of", interrupted)
    code, out, err = run(*common, "-x", "full")
    assert code == 1 and out == "" and "nothing to compare" in err


def test_help(run: Run) -> None:
    code, out, _ = run("compare", "--help")
    assert code == 0 and "--json" in out and "--limit" in out


def test_what_was_merged_is_told(run: Run, common: tuple[str, ...]) -> None:
    code, out, err = run(*common, "-x", "kvslimmer:sinks=4,h2o", "-b", "32")
    assert code == 0, err
    assert "pairs merged, 0 shares of keys clamped." in " ".join(out.split()) and out.count("pairs merged") == 1
