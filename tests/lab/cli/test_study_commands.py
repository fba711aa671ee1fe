"""Commands that run a study: their output for people and programs, and their errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from kvkeep_lab import recall_timing
from kvkeep_lab.cli import study as study_module
from kvkeep_lab.cli.study import command
from kvkeep_lab.partial import INTERRUPTED
from kvkeep_lab.reference import ReferenceAnswer
from kvkeep_lab.studies import STUDIES
from kvkeep_lab.studies.base import Drawn
from kvkeep_lab.studies.long_chat import LongChat

Run = Callable[..., tuple[int, str, str]]

# By command: options, the fields of what is printed for programs, and words of what is printed for people.
COMMANDS = {
    "analyse spectra": ("--limit 60", "tokens rows correlation figure", ["Means over layers"]),
    "analyse alignment": ("--limit 60 --queries 5", "tokens queries loss rows spread figure", ["Means over heads"]),
    "analyse reactivation": (
        "--limit 60", "tokens prompt threshold ratios distances active rows figure", ["no heavy hitters", "17-32"],
    ),
    "analyse bounds": (
        "--limit 60 --pages 8,2,4 --queries 20",
        "tokens queries share rows figure",
        ["largest"],
    ),
    "analyse rank": (
        "--limit 60 --ranks 8,2 -n 4", "layers prompt_tokens new_tokens truncations errors figure",
        ["Effective rank", "Truncated", "60 tokens read, 4 written"],
    ),
    "analyse kept": ("--limit 60 -x window,h2o -b 16", "tokens rows figure", ["window, h2o", "differing"]),
    "analyse held-bytes": ("--lengths 96 --kinds kv", "rows", ["Eq. 28", "allocated", "yes"]),
    "bench": (
        "--contexts 64 -b 16 --rounds 1 --steps 3 --only full,h2o+ --no-slow",
        "rows bytes_per_s weight_bytes notes processes servers",
        ["prefill", "stock", "full", "at least", "h2o+quantize:4 at 64: A budget of 16 entries"],
    ),
    "compare": (
        "-x kv-direct,full -b 16,25% -n 4", "prompt_tokens new_tokens context whole_bytes reference rows figure",
        ["class", "budget", "match", "KL", "perplexity", "resident", "checkpoints", "stock"],
    ),
    "longchat": ("--turns 2 -n 5 -b 16 -x stock,kv-direct,h2o", "budget turns figure", ["After 2 turns", "2/2", "h2o"]),
    "prove": (
        "--prompts 2 --lengths 60 -n 6 -b 20 -x full,window,h2o+verified", "rows answers",
        ["identical", "h2o+verified kv@disk at 20", "window at 20, summary of", "no tie"],
    ),
    "recompute": ("--counts 9,1 --rounds 1 --beside none", "models figure", ["from device, cold buffers", "GFLOP/s"]),
    "stream": ("--stretch 200 --tokens 700 -b 32", "model method budget stretches", ["perplexity", "from token"]),
    "verify": (
        "--quick",
        "model dtype kv_bytes residual_bytes rho reconstruction tokens patching memory windows refused holds",
        ["Every claim held.", "Table 1", "Rebuilt", "Greedy tokens", "KL by layers", "Eq. 28"],
    ),
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path, words: str) -> str:
    (tmp_path / "text.txt").write_text(words)
    return str(tmp_path / "text.txt")


@pytest.fixture
def call(run: Run, model_folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on the tiny model and the text, if it reads one; nothing has to be really cold."""
    monkeypatch.setattr("kvkeep_lab.buffers.SWEEP_BYTES", 1 << 12)
    monkeypatch.setattr("kvkeep_lab.buffers.COPY_BYTES", 1 << 16)

    def called(name: str, *options: str) -> tuple[int, str, str]:
        reads = study_of(name).text != "none" and name != "bench" and not {"-f", "-p"} & set(options)
        return run(*name.split(), "-m", str(model_folder), *(("-f", text) if reads else ()), *options)

    return called


def study_of(name: str) -> Any:
    return next(study for study in STUDIES.values() if name.split()[-1] == (study.command or study.name))


ANSWERED: dict[tuple[str, ...], dict[str, Any]] = {}


def answered(call: Run, name: str, *options: str) -> dict[str, Any]:
    """The JSON object that a command prints with its own options and these; asked once."""
    if (name, *options) not in ANSWERED:
        code, out, err = call(name, *COMMANDS[name][0].split(), *options, "--json")
        assert code == 0, err
        ANSWERED[name, *options] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return ANSWERED[name, *options]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_one_json_object_or_tables(call: Run, name: str) -> None:
    options, fields, words = COMMANDS[name]
    report = answered(call, name)
    assert set(report) == {*fields.split(), "machine"} and report.get("figure") is None
    assert set(report["machine"]) >= {"model", "weights", "threads", "torch", "device"}
    code, out, err = call(name, *options.split())
    assert code == 0 and all(word in out for word in words), out + err
    assert "weights=float32" in err and "Traceback" not in err


def test_output_option_draws_a_figure(call: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    assert answered(call, "analyse bounds", "-o", str(picture))["figure"] == str(picture)
    assert picture.stat().st_size > 10_000
    code, _, err = call("analyse bounds", *COMMANDS["analyse bounds"][0].split(), "-o", str(picture))
    assert code == 0 and "The figure is saved in" in err


# -- what is in the objects ---------------------------------------------------------------------------


def test_rank_needs_no_text_and_takes_a_prompt(run: Run, model_folder: Path) -> None:
    common = ("analyse", "rank", "-m", str(model_folder))
    code, out, err = run(*common, "--json")
    assert code == 0 and json.loads(out)["truncations"] == [], err
    code, out, err = run(*common, "-p", "the of and", "--ranks", "8", "-n", "3", "--json")
    assert code == 0 and len(json.loads(out)["truncations"]) == 6, err


def test_compare_prints_a_row_for_each_method_and_budget(call: Run) -> None:
    report = answered(call, "compare", "-x", "static", "-x", "full", "-x", "kv-direct,full")
    assert (report["prompt_tokens"], report["new_tokens"], report["context"]) == (200, 4, 204)
    for row in (report["reference"], *report["rows"]):
        fields = (
            "method budget exactness entries match differs_at kl_mean kl_max kl kl_free_mean kl_free top1 perplexity "
        )
        fields += "memory prefill_s tokens_per_s tokens away recalled left_out merges error"
        assert set(row) == set(fields.split())
        assert set(row["memory"]["checkpoint_bytes"]) == {"device", "host", "disk"}
    rows = {(row["method"], row["budget"]): row for row in report["rows"]}
    assert list(rows) == [
        ("full", None), ("kv-direct", "16"), ("static", "16"), ("kv-direct", "25%"), ("static", "25%"),
    ]  # fmt: skip
    assert rows["kv-direct", "25%"]["entries"] == 51 and len(rows["kv-direct", "25%"]["kl"]) == 4
    assert rows["kv-direct", "16"]["match"] == 1.0 and "larger budget" in rows["static", "16"]["error"]


def test_a_selector_in_a_file_is_compared(call: Run, tmp_path: Path, registered: None) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nimport kvkeep\n\n@dataclass(frozen=True)\nclass Mine(kvkeep.Selector):\n"
        '    leaves, source = "oldest", "here"\n    def rank(self, entries):\n        return entries.slots.float()\n'
    )
    rows = answered(call, "compare", "-x", f"{file}:Mine")["rows"]
    assert "Mine" in {row["method"] for row in rows if not row["error"]}, rows
    for given, said in ((f"{file}:Yours", "defines no 'Yours'"), (f"{tmp_path}/no.py:Mine", "cannot be used")):
        code, out, err = call("compare", "-x", given)
        assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_json_of_other_commands_has_their_rows(call: Run) -> None:
    turns = answered(call, "longchat")["turns"]
    names = ("stock", "kv-direct", "h2o")
    assert [(row["turn"], row["method"]) for row in turns] == [(turn, name) for turn in (1, 2) for name in names]
    for row in turns:
        fields = "method turn context read written prefill_s decode_s same memory text seconds"
        assert set(row) == set(fields.split())
        assert set(row["memory"]["checkpoint_bytes"]) == {"device", "host", "disk"} and row["text"]
    _, out, _ = call("recompute", "--counts", "1,9", "--rounds", "1", "--beside", "smollm2-135m", "--no-slow", "--json")
    models = json.loads(out)["models"]
    assert len(models) == 2 and all({row["n"] for row in model["rows"]} == {1, 9} for model in models)
    for model in models:
        fields = "model hidden width itemsize layers roofline break_even_bytes_per_s rows interrupted"
        assert set(model) == set(fields.split())
    assert [row["start"] for row in answered(call, "stream")["stretches"]] == [0, 200, 400, 600]
    assert answered(call, "verify")["holds"] is True
    bench = answered(call, "bench")
    assert bench["machine"]["clock"] == "wall"
    assert all(len(row["prefills_s"]) == 1 and len(row["steps_ms"]) == 2 for row in bench["rows"] if not row["error"])
    rows = answered(call, "bench", "--no-stock")["rows"]
    assert {row["label"] for row in rows} < {row["label"] for row in bench["rows"]}
    assert not any(row["label"].startswith("stock") or row["step_ratio"] for row in rows)
    proof = answered(call, "prove", "--in-turn")
    assert [row["label"] for row in proof["rows"]] == ["full", "window at 20"] and len(proof["answers"]) == 2


def test_stream_stores_evicted_entries_where_and_as_long_as_its_options_say(call: Run, tmp_path: Path) -> None:
    sizes = ["--stretch", "150", "--tokens", "500", "-b", "32", "-x", "kv-direct", "--json"]
    for name, limit in (("host", []), ("disk", ["--folder", str(tmp_path), "--capacity", "128"])):
        code, out, err = call("stream", *sizes, "-w", name, *limit)
        assert code == 0, err
        stored = [row["memory"]["checkpoint_bytes"][name] for row in json.loads(out)["stretches"]]
        assert stored[0] > 0 and (stored[2] == stored[0]) == bool(limit)
    code, _, err = call("stream", *sizes, "-x", "h2o", "--capacity", "128")
    assert code == 2 and "takes no capacity" in err


def test_a_shortened_text_is_reported(call: Run, caplog: pytest.LogCaptureFixture) -> None:
    common = ("-x", "full", "--limit", "50", "-n", "4", "--json")
    code, out, _ = call("compare", *common)
    assert code == 0 and json.loads(out)["prompt_tokens"] == 50
    assert "Only the first 50 of the text's 200 tokens are read." in caplog.text


def test_raw_option_skips_the_chat_template(run: Run, model_folder: Path, text: str) -> None:
    common = ("compare", "-m", str(model_folder), "-f", text, "-p", "the of", "-x", "full", "-n", "4", "--json")
    code, out, _ = run(*common, "--limit", "50")
    assert code == 0 and json.loads(out)["prompt_tokens"] > 52  # with the template's own tokens
    code, out, _ = run(*common, "--limit", "50", "--raw")
    assert code == 0 and json.loads(out)["prompt_tokens"] == 52


def test_merged_pairs_are_reported(call: Run) -> None:
    code, out, err = call("compare", "-x", "kvslimmer:sinks=4,h2o", "-b", "32", "-n", "8")
    assert code == 0, err
    assert "pairs merged, 0 shares of keys clamped." in out and out.count("pairs merged") == 1


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("analyse spectra", "-f none.txt", "cannot be read"),
        ("analyse spectra", "-o picture.doc", "end in .png"),
        ("analyse spectra", "--limit 9", "--limit '9' is not understood"),
        ("analyse reactivation", "--ratios 2", "between 0 and 1"),
        ("analyse reactivation", "--threshold 0", "between 0 and 1"),
        ("analyse bounds", "--limit 60 --pages 64", "no page of 64"),
        ("analyse rank", "--ranks 9", "from 1 to the width of a head"),
        ("analyse rank", "-p both -f text.txt", "--prompt or --file"),
        ("analyse kept", "-x full,h2o", "takes no budget"),
        ("bench", "--contexts x", "--contexts 'x' is not understood"),
        ("bench", "--clock sun", "'wall' or 'processor'"),
        ("bench", "--peers lama.cpp", "--peers: Unknown peer 'lama.cpp': did you mean llama.cpp or ik_llama.cpp?"),
        ("bench", "--process --peers vllm", "leave --peers and --clock out"),
        ("bench", "--peers vllm --clock processor", "leave out --clock or --peers"),
        ("compare", "-x kvdirect", "did you mean kv-direct"),
        ("compare", "-x full -b 12.5.1%", "cannot be read"),
        ("compare", "-x full -n 400", "512 positions"),
        ("longchat", "-x ,", "is empty"),
        ("longchat", "-x stock,stock", "names a method twice"),
        ("longchat", "-b x", "--budget: Budget 'x'"),
        ("prove", "--kinds poem", "'summary', 'question'"),
        ("prove", "--lengths 9000", "longer text"),
        ("prove", "-c x", "--checkpoint: Unknown"),
        ("prove", "-w x", "--where: Unknown"),
        ("recompute", "--counts 0", "greater than or equal to 1"),
        ("recompute", "--beside nonsense", "Unknown shape"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(call: Run, name: str, options: str, sentence: str) -> None:
    code, out, err = call(name, *options.split())
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and out == "" and len(lines) == 1 and sentence in lines[0], err


def test_a_text_that_is_missing_or_too_short_is_refused(run: Run, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("the of and")
    code, out, err = run("analyse", "spectra", "-m", str(model_folder), "-f", str(tmp_path / "short.txt"))
    assert code == 2 and out == "" and "3 tokens" in err
    code, out, err = run("analyse", "rank", "-m", str(model_folder), "--ranks", "4")
    assert code == 2 and out == "" and "a text to continue" in err
    code, out, err = run("compare", "-m", str(model_folder))
    assert code == 2 and out == "" and "nothing to answer" in err


def test_a_missing_figure_package_is_reported_before_a_model_is_loaded(
    call: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep_lab.figures.find_spec", lambda name: None)
    monkeypatch.setattr("kvkeep_lab.cli.study.load", lambda *given, **options: pytest.fail("a model was loaded"))
    code, out, err = call("compare", "-x", "full", "-o", "compare.png")
    assert code == 2 and out == "" and "pip install ./lab in a clone" in err


def test_a_command_that_measures_nothing_fails(call: Run, tmp_path: Path) -> None:
    picture = tmp_path / "compare.png"
    code, out, err = call("compare", "-x", "kv-direct", "-b", "3", "-n", "4", "-o", str(picture), "--json")
    assert code == 1 and "No method could be measured" in err and not picture.exists()
    report = json.loads(out)
    assert "smallest is 16" in report["rows"][0]["error"] and report["figure"] is None


# -- what is interrupted ------------------------------------------------------------------------------


interrupted = Mock(side_effect=KeyboardInterrupt)


def test_an_interrupt_before_the_first_result_prints_nothing(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in (
        ("analyse spectra", "kvkeep_lab.studies.spectra.head_weights"),
        ("compare", "kvkeep_lab.reference.ReferenceAnswer.of"),
        ("longchat", "kvkeep_lab.studies.long_chat.LongChat.converse"),
        ("verify", "kvkeep_lab.studies.verify.checkpoint_kinds"),
        ("analyse throughput", "kvkeep_lab.timing._measure"),
    ):
        monkeypatch.setattr(place, interrupted)
        code, out, err = call(name)
        assert code == 1 and out == "" and "nothing to show" in err and "Traceback" not in err


def test_an_interrupted_comparison_prints_the_finished_rows(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = ReferenceAnswer.measure, []

    def second_time(*arguments: Any) -> Any:
        calls.append(arguments)
        return honest(*arguments) if len(calls) % 2 else interrupted()

    monkeypatch.setattr(ReferenceAnswer, "measure", second_time)
    options = ("-x", "kv-direct", "-b", "16,32", "-n", "4")
    code, out, err = call("compare", *options, "--json")
    assert code == 1 and "Interrupted. The results above were measured before that." in err
    assert [row["error"] for row in json.loads(out)["rows"]] == ["", INTERRUPTED]
    code, out, err = call("compare", *options)
    assert code == 1 and "kv-direct at 32: interrupted" in out and "Traceback" not in err


def test_a_pipe_gets_a_line_when_a_part_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvkeep_lab.cli.study.BETWEEN_S", 0.0)
    report, say = study_module._lines()
    report("one", 0.0, 2.0)
    report("two", 1.0, 2.0)
    assert capsys.readouterr().err == "Finished one; 50 % of the work is done.\n"
    say("a row")
    report("three", 2.0, 2.0)
    assert capsys.readouterr().err == "a row\n"


def test_rows_appear_as_they_are_measured_and_sigterm_shows_those(
    call: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe as on a terminal: a line on standard error for each row, before the next one begins."""
    honest, lines = ReferenceAnswer.measure, []

    def ended(*arguments: Any) -> Any:
        lines.append(capsys.readouterr().err)
        if len(lines) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(*arguments)

    monkeypatch.setattr(ReferenceAnswer, "measure", ended)
    code, out, err = call("compare", "-x", "kv-direct,h2o", "-b", "16,32", "-n", "4")
    assert code == 128 + signal.SIGTERM and "The results above were measured before that." in err
    assert lines[0].splitlines()[-1].startswith("stock: match 100 %, KL 0, ")
    assert [line.split(":")[0] for line in lines[1:]] == ["kv-direct at 16", "h2o at 16"]
    assert "h2o at 32: interrupted" in out and out.count("kv-direct") == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_interrupted_studies_print_the_finished_rows(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    converse, samples = LongChat.converse, recall_timing._Bench.samples

    def fourth_turn(*arguments: Any) -> Any:
        for number, turn in enumerate(converse(*arguments)):
            yield turn if number < 3 else interrupted()

    def second_count(self: Any, count: int, turn: int) -> Any:
        yield from samples(self, count, turn) if count < 9 else interrupted()

    monkeypatch.setattr(LongChat, "converse", fourth_turn)
    monkeypatch.setattr(recall_timing._Bench, "samples", second_count)
    code, out, err = call("longchat", "-n", "5", "-b", "16", "--json")
    assert code == 1 and "Interrupted" in err and len(json.loads(out)["turns"]) == 3
    code, out, err = call("recompute", "--counts", "1,9", "--rounds", "1", "--json")
    assert code == 1 and "Interrupted" in err
    (model,) = json.loads(out)["models"]
    assert {row["n"] for row in model["rows"]} == {1} and model["interrupted"]


def test_a_study_that_runs_out_of_positions_prints_the_finished_rows(
    call: Run, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr("kvkeep_lab.studies.long_chat.QUESTIONS", (words,))
    code, out, err = call("longchat", "-b", "16", "-n", "5", "--turns", "9", "-x", "stock,kv-direct")
    assert code == 1 and "512 positions" in err and "held" in out and "Traceback" not in err
    code, out, err = call("stream", *COMMANDS["stream"][0].split(), "-x", "snapkv")
    assert code == 1 and "600 tokens exceed the model's 512" in err and "perplexity" in out and "Traceback" not in err


def test_a_contradicted_claim_makes_verify_fail(call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep_lab.studies.patching.Patching.holds", False)
    code, out, err = call("verify", "--quick", "--json")
    assert code == 1 and "4 measurements contradict a claim" in err and not json.loads(out)["holds"]


def test_every_study_is_a_command_with_an_option_for_each_field(run: Run) -> None:
    code, out, _ = run("analyse", "--help")
    assert code == 0 and all((study.command or study.name) in out for study in STUDIES.values())
    for study in STUDIES.values():
        app = typer.Typer()
        app.command()(command(study))
        parameters = {parameter.name for parameter in typer.main.get_command(app).params}
        assert parameters >= {*study.model_fields, "model", "weights", "device", "json"}
        assert ("output" in parameters) == issubclass(study, Drawn) and ("file" in parameters) == (study.text != "none")
