"""The command line as a person and a program meet it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from families import tiny
from gguf_files import written

from kvkeep.cli.cache_options import CacheOptions
from kvkeep.models.embedded import EMBEDDED, gguf_path
from kvkeep.models.fetching import growing_path
from kvkeep.models.folders import cache_folder

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def text(tmp_path: Path, words: str) -> str:
    (tmp_path / "text.txt").write_text(words)
    return str(tmp_path / "text.txt")


def test_generate_json_has_all_its_fields_and_nothing_else(run: Run, model_folder: Path, text: str) -> None:
    common = ("generate", "-m", str(model_folder), "-f", text, "-p", "the of", "-n", "9", "--json")
    code, out, err = run(*common, "-x", "kv-direct", "-b", "32", "-c", "residual", "-w", "disk")
    assert code == 0, err
    answer = json.loads(out)
    assert set(answer) >= {"text", "tokens", "prompt_tokens", "method", "class", "memory", "timing"}
    assert set(answer["memory"]) == {
        "resident_bytes", "compressed_bytes", "checkpoint_bytes", "bookkeeping_bytes", "peak_cache_bytes",
        "peak_workspace_bytes", "process_bytes",
    }  # fmt: skip
    assert set(answer["memory"]["checkpoint_bytes"]) == {"device", "host", "disk"}
    assert set(answer["timing"]) >= {"prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s"}
    assert (answer["method"], answer["class"], len(answer["tokens"])) == ("kv-direct", "exact", 9)
    assert answer["memory"]["checkpoint_bytes"]["disk"] > 0
    for options in (("-x", "stock"), ("-b", "32", "-c", "residual:2", "-w", "host"), ("-b", "32", "-c", "tokens")):
        assert json.loads(run(*common, *options)[1])["tokens"] == answer["tokens"]


def test_excerpts_of_a_file_are_read_in_its_place(run: Run, model_folder: Path, tmp_path: Path, words: str) -> None:
    (tmp_path / "long.txt").write_text(f"{words} " * 3)
    common = ("generate", "-m", str(model_folder), "-f", str(tmp_path / "long.txt"), "-p", "is it", "-n", "2")
    code, out, err = run(*common, "--excerpts", "200", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["excerpts"]["tokens"] <= 200 < answer["excerpts"]["of"] == 600, err
    assert answer["prompt_tokens"] < 210
    assert "has read 128 of the file's 600 tokens" in run(*common, "--excerpts", "200")[2]


def test_a_prompt_that_is_too_long_is_told_what_reads_it(run: Run, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("the of and to " * 200)
    common = ("generate", "-m", str(model_folder), "-n", "2", "--json", "-f", str(tmp_path / "long.txt"))
    for options, remedy in (
        (("-p", "is it"), "read only the passages that match the prompt (--excerpts 2048), continue"),
        (("-p", "the of", "--excerpts", "700"), "read fewer --excerpts, continue"),
        ((), "continue past them with the method endless (-x endless -b 1024)"),
    ):
        code, out, err = run(*common, *options, "-b", "12.5%")
        assert code == 2 and not out and err.count("\n") == 1 and f"512 positions; {remedy}" in err, err
    for way in (("--excerpts", "256"), ("-x", "endless+passages:count=2,size=16", "-b", "64")):
        assert run(*common, "-p", "the of", *way)[0] == 0


@pytest.mark.parametrize(
    ("flags", "method", "held"),
    [
        (("--kv-budget-tokens", "32"), "kv-lru", True),
        (("--kv-budget-mb", "1"), "kv-lru", True),
        (("--kv-budget-tokens", "0"), "full", False),
        (("--kv-budget-tokens", "0", "--kv-budget-mb", "0", "-b", "32"), "kv-direct", True),
    ],
)
def test_the_flags_of_the_pull_request(
    run: Run, model_folder: Path, text: str, flags: tuple[str, ...], method: str, held: bool
) -> None:
    """A budget makes it kv-lru; 0 is as if the flag were not there."""
    code, out, err = run("generate", "-m", str(model_folder), "-f", text, "-n", "5", "--json", *flags)
    assert code == 0, err
    answer = json.loads(out)
    assert (answer["method"], len(answer["tokens"])) == (method, 5)
    assert (sum(answer["memory"]["checkpoint_bytes"].values()) > 0) == held


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-p", "a", "-b", "12.5.1%"), "Budget"),
        (("-p", "a", "-b", "32", "-c", "residuals"), "did you mean residual"),
        (("-p", "a", "-b", "32", "-w", "disk", "--folder", "/nowhere"), "no such file"),
        (("-p", "a", "-x", "stock", "-b", "32"), "takes no budget"),
        (("-p", "a", "--kv-budget-tokens", "32", "-b", "32"), "without --method, --budget or a selector"),
        (("-p", "a", "--kv-budget-tokens", "32", "--kv-budget-mb", "1"), "one of them"),
        ((), "nothing to answer"),
        (("-p", "a", "--seed", "9" * 23), "A seed is a whole number"),
        (("-p", "a", "-b", "64", "-x", "streaming-llm:sinks=99999"), "beside 99999 sinks"),
        (("-p", "a", "-b", "99999999999", "-x", "static"), "not enough memory"),
        (("-p", "a", "--excerpts", "128"), "give a prompt and --file"),
        (("-p", "a\udcff"), "not UTF-8"),
        (("-p", "a", "-f", "PIPE"), "no program writes to it"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Run, model_folder: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    os.mkfifo(tmp_path / "PIPE")
    arguments = tuple(str(tmp_path / one) if one == "PIPE" else one for one in arguments)
    code, out, err = run("generate", "-m", str(model_folder), *arguments)
    assert code in (1, 2) and out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("kvkeep: ") and sentence in lines[0]


@pytest.mark.parametrize(
    "command",
    [("generate", "a", "-m"), ("plan", "-m"), ("models", "--explain"), ("chat", "-m"), ("cache", "list", "--sessions")],
)
def test_a_name_that_is_too_long_is_one_sentence(run: Run, command: tuple[str, ...]) -> None:
    code, _, err = run(*command, "1" * 300)
    assert code in (1, 2) and err.startswith("kvkeep: ") and len(err.splitlines()) == 1


def test_methods_and_models_as_json(run: Run) -> None:
    found = json.loads(run("methods", "--json")[1])
    names = {row["name"]: row for row in found["methods"]}
    assert names["kv-direct"]["class"] == "exact" and "stock" in names
    assert names["kv-lru"]["class"] == "reversible" and "capacity" in names["kv-lru"]["options"]
    assert {"pages", "verified", "fetch-on-miss"} <= set(found["recalls"])
    models = json.loads(run("models", "--json")[1])["models"]
    assert {"smollm2", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"} == {row["name"] for row in models}
    assert "kv-direct" in run("methods")[1]


def test_models_says_what_is_here_and_what_a_download_takes(run: Run) -> None:
    growing = growing_path(EMBEDDED["qwen2.5-coder-1.5b"])
    growing.parent.mkdir(parents=True)
    growing.write_bytes(b"a part")
    lines = [line.split(maxsplit=1) for line in run("models")[1].splitlines() if len(line.split()) > 1]
    shown = {name: text for name, text in lines}
    assert shown["qwen2.5-coder-0.5b"].startswith("no (491.4 MB)")
    assert shown["qwen2.5-coder-1.5b"].startswith("in part (1.1 GB)")
    (whole := gguf_path(EMBEDDED["smollm2"])).write_bytes(b"x" * 1000)  # a damaged file counts
    rows = {row["name"]: row for row in json.loads(run("models", "--json")[1])["models"]}
    found = {name: (row["fetched"], row["path"], row["bytes_on_disk"]) for name, row in rows.items()}
    assert found["smollm2"] == (True, str(whole), 1000) and found["gemma3-270m"] == (False, None, 0)
    assert found["qwen2.5-coder-1.5b"] == (False, None, 6)


def test_models_explains_a_file(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path / "tiny.gguf", keys={"general.author": "me"})
    code, out, _ = run("models", "--explain", str(file))
    assert code == 0 and "who made the model" in out and "F32" in out and "BF16" in out
    found = json.loads(run("models", "--explain", str(file), "--pre", "qwen2", "--json")[1])
    assert found["tokenizer"]["pre"] == "qwen2" and found["config"]["num_hidden_layers"] == 1


def test_a_share_is_of_the_models_positions_at_most() -> None:
    """Where they run out."""
    model = tiny("llama", positions=128)
    cases = ("kv-direct", "50%", 10, 32), ("kv-direct", "50%", 10**15, 64), ("streaming-llm", "20%", 200, 50)
    for method, share, answer, entries in cases:
        assert CacheOptions(method, share).parse().build(model, 54 + answer, answer).entries == entries


def test_chat_survives_a_question_that_is_too_long(run: Run, model_folder: Path) -> None:
    stdin = "the " * 600 + "\nthe of\n/reset\n/what\nwas it\n"
    arguments = ("chat", "-m", str(model_folder), "-n", "3", "--at-end")
    code, out, err = run(*arguments, "ask", stdin=stdin)
    assert code == 1 and len(out.splitlines()) == 2
    assert "context of 512" in err and "forgotten" in err
    code, out, err = run(*arguments, "endless", stdin=stdin)  # as by default: it is read beyond the positions
    assert len(out.splitlines()) == 3


def test_interrupting_leaves_one_sentence_and_no_files(tmp_path: Path, model_folder: Path, text: str) -> None:
    """A real process, a real SIGINT, while it writes."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    command = [
        sys.executable, "-u", "-m", "kvkeep", "generate", "-m", str(model_folder), "-f", text,
        "-b", "16", "-c", "residual:2", "-w", "disk", "--folder", str(folder), "-n", "300",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)  # the answer has begun
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        errors = process.stderr.read()
    assert process.returncode == 1
    assert "Interrupted; the answer above is not complete." in errors and "Traceback" not in errors
    assert list(folder.iterdir()) == []


HELP = """
import contextlib, io, sys
imported = set()
sys.addaudithook(lambda event, given: imported.add(given[0]) if event == "import" else None)
from kvkeep.cli import COMMANDS, main
for arguments in [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["lab", "run", "-h"]]:
    sys.argv, out = ["kvkeep", *arguments], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    assert "Usage: kvkeep" in out.getvalue() or "--version" in arguments, arguments
    assert not {"torch._C", "transformers.dependency_versions_check", "numpy.linalg"} & imported, arguments
"""


def test_help_needs_neither_torch_nor_transformers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds to import. What is shown is what the commands understand."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("COLUMNS", "200")
    assert "[default: (kv-direct with a budget, full without)]" in run("generate", "--help")[1]
    assert " Answer a question about a long text with the full cache, and with four methods" in run("demo", "--help")[1]
    assert "Budget of the methods that have one: entries per layer (512), bytes" in run("stream", "--help")[1]
    assert "Check on your model what kvkeep promises: bits, tokens, KL, bytes." in run("--help")[1]


def test_commands_of_the_lab_say_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.plugins.entry_points", lambda **_: [])
    for command in ("bench", "lab"):
        code, out, err = run(command, "list")
        assert code == 2 and out == "" and err.count("\n") == 1 and "pip install ./lab in a clone" in err


ODD = """from kvkeep.cli import output, standard_streams
standard_streams.prepare()
output.note("é")
output.write("é")"""


BAR = """import sys
from kvkeep.cli import output, standard_streams
standard_streams.prepare()
with output.reading(9) as advance:
    advance(3)
output.note("nobody hears")
print("said", file=sys.stderr)
output.write("heard")"""


def test_streams_that_are_closed_or_full(model_folder: Path) -> None:
    command = f"{sys.executable} -m kvkeep"
    for redirected, code, sentence in (
        (f"{command} --help >&-", 1, "kvkeep: Standard output is closed"),
        (f"{command} --help >/dev/full", 1, "kvkeep: Writing to standard output failed: no space left"),
        (f"{command} --help 2>&-", 0, ""),
        (f"FORCE_COLOR=1 {sys.executable} -c '{BAR}' 2>/dev/full", 0, ""),  # as on a terminal that is gone
        (f"{command} chat -m {model_folder} <&-", 2, "kvkeep: Standard input is closed"),
        (f"PYTHONIOENCODING=ascii {sys.executable} -c '{ODD}'", 0, "\\xe9"),
    ):
        done = subprocess.run(["sh", "-c", redirected], capture_output=True, text=True)
        assert done.returncode == code and done.stderr.startswith(sentence), (redirected, done.stderr)
        assert len(done.stderr.splitlines()) <= 2


def test_the_cache_folder(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVKEEP_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
    for name in ("HOME", "KVKEEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    code, out, err = run("models")
    sentence = "kvkeep: This user has no home folder; set KVKEEP_CACHE to a folder for kvkeep's files.\n"
    assert (code, out, err) == (2, "", sentence)


def test_a_selector_drafts(run: Run, model_folder: Path) -> None:
    common = ("generate", "-m", str(model_folder), "-p", "the man was here and " * 12, "-n", "12", "--json")
    plain = json.loads(run(*common, "-x", "full")[1])
    for selector, *options in (("snapkv", "-b", "16"), ("h2o", "-b", "20"), ("window", "-b", "24", "-c", "tokens")):
        code, out, err = run(*common, *options, "--drafts", selector)
        assert code == 0, err
        answer = json.loads(out)
        assert answer["tokens"] == plain["tokens"] and answer["class"] == "exact"
        assert answer["method"] == f"{selector}+verified" and answer["drafted"] >= answer["accepted"] >= 0
    code, out, err = run(*common[:-1], "-b", "16", "--drafts", "h2o")
    assert code == 0 and "drafts accepted" in err and out.strip()
    for wrong in (("h2o",), ("kv-direct", "-b", "16"), ("h2o", "-b", "16", "-x", "snapkv"), ("no-such", "-b", "16")):
        code, out, err = run(*common, "--drafts", *wrong)
        assert code == 2 and not out and err.count("\n") == 1
    chat = ("chat", "-m", str(model_folder), "-b", "16", "--drafts", "snapkv", "-n", "5")
    code, out, err = run(*chat, stdin="the man\n/method\n")
    assert code == 0 and "snapkv+verified within 16" in err


@pytest.mark.parametrize("method", ["no-such-method", "snapkv+oneshot+quantize:4"])
def test_a_wrong_method_is_refused_before_a_model_is_downloaded(run: Run, text: str, method: str) -> None:
    """No test's cache folder has the model."""
    code, out, err = run("generate", "-m", "qwen2.5-coder-1.5b", "-f", text, "-x", method, "-b", "25%")
    assert code == 2 and not out and "Fetching" not in err and len(err.splitlines()) == 1


def test_the_system_prompt_is_pinned_or_the_command_says_why_not(run: Run, model_folder: Path, text: str) -> None:
    common = ("generate", "-m", str(model_folder), "-f", text, "-p", "the of", "-n", "5", "--json")
    lossy = (*common, "-x", "window", "-b", "24", "--system", "the man was here")
    answers = [json.loads(run(*lossy, *pin)[1])["tokens"] for pin in ((), ("--pin", "system"), ("--pin", "6"))]
    assert answers[0] != answers[1] == answers[2]
    whole = [json.loads(run(*common, *pin)[1])["tokens"] for pin in ((), ("--pin", "system"))]
    assert whole[0] == whole[1]
    for options, sentence in (
        (("-b", "24", "-x", "window", "--pin", "30"), "30 pinned tokens leave no room for others in a budget of 24"),
        (("-b", "24", "-x", "window", "--pin", "all"), "A pin is 'system' or a number of first tokens, not 'all'."),
        (("-b", "24", "-x", "window", "--pin", "system", "--raw"), "'--pin system' pins nothing; give --system or"),
        (("-x", "stock", "--pin", "3"), "takes no pin; 'kv-direct' does."),
    ):
        code, out, err = run(*common, *options)
        assert code == 2 and sentence in " ".join(err.split()) and not out
