"""Servers under load, as the bench measures them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import tokenizer
from families import tiny
from kvkeep_lab import serving
from kvkeep_lab.partial import INTERRUPTED, Interruption
from kvkeep_lab.peers.servers import SERVERS, Ours, Running, server_of
from kvkeep_lab.serving import StreamedAnswer, fitting, writing_rate
from kvkeep_lab.studies.base import Trial
from kvkeep_lab.studies.bench import Bench

from kvkeep import KeepCache
from kvkeep.errors import UsageError
from kvkeep.models.loading import Loaded
from kvkeep.serve.admission import Arbiter

Run = Callable[..., tuple[int, str, str]]


def test_the_writing_rate_counts_the_time_when_all_streams_write() -> None:
    early = StreamedAnswer(0.0, [1.0, 2.0, 3.0, 4.0, 5.0], 5)
    late = StreamedAnswer(0.0, [3.0, 3.5, 4.0, 4.5], 8)  # two tokens a piece
    assert writing_rate([early, late]) == pytest.approx((1 + 3) * 13 / 9 / 1.5)
    assert writing_rate([early]) == 1.0
    assert writing_rate([early, StreamedAnswer(0.0, [5.0, 6.0], 2)]) is None


def test_a_percentage_budget_is_of_the_models_positions() -> None:
    loaded = Loaded(tiny("llama"), tokenizer(), "tiny", "tiny")
    server = Ours(loaded, 100, 1, "h2o", "25%", "20MB")
    with server.command(1) as (line, _):
        assert line[-4:] == ["--method", "h2o", "--budget", "25%"]
    started = KeepCache(loaded.model, "h2o", "25%")  # a quarter of 512 positions, and not of 100 tokens
    assert started.entries == 128
    assert fitting(server, 100, "20MB") == Arbiter(20 * 10**6).fitting(started, 100)


def test_a_served_bench_measures_what_clients_see(run: Run, model_folder: Path) -> None:
    options = ("--contexts", "40", "--sessions", "1,2", "--steps", "3", "--memory", "50MB", "-b", "20", "--json")
    code, out, err = run("bench", "--serve", "-m", str(model_folder), "--only", "h2o", *options)
    assert not code, err
    rows = json.loads(out)["servers"]
    assert [(row["label"], row["sessions"], row["error"]) for row in rows] == [("kvkeep h2o", n, "") for n in (1, 2)]
    for row in rows:
        assert row["tokens_s"] > 0 and row["first_s"] > 0 and row["peak_bytes"] > 10**7 and row["fit"] > 2


def test_an_interrupt_or_a_fault_keeps_the_finished_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is started: one fails in an answer, one does not start, and the last one is interrupted."""
    requests: list[tuple[str, int, int]] = []

    @contextmanager
    def running(server: Ours) -> Iterator[Running]:
        if server.method == "full":
            raise OSError("no port")
        yield Running(0, "")

    def answers(
        server: Ours, running: Running, context: int, count: int, steps: int
    ) -> tuple[list[StreamedAnswer], int]:
        if steps > 2:
            requests.append((server.method, context, count))
            if count == 2:
                raise RuntimeError("a fault\nof a server")
            if len(requests) == stops_at:
                raise KeyboardInterrupt
        return [StreamedAnswer(0.0, [1.0, 2.0], 2)], 10

    monkeypatch.setattr(Ours, "running", running)
    monkeypatch.setattr(serving, "_answers", answers)
    trial = Trial(Loaded(tiny("llama"), tokenizer(), "tiny", "tiny"))
    study = Bench(serve=True, contexts=[40, 50], sessions=[1, 2], steps=3, memory="20MB", budget="20")
    study = study.model_copy(update={"methods": ["h2o", "full", "window"]})
    stops_at = 7
    with pytest.raises(Interruption) as stop:
        study.measure(trial)
    rows = stop.value.found.servers
    places = [(context, count) for context in (40, 50) for count in (1, 2)]
    labels = [f"kvkeep {method}" for method in ("h2o", "full", "window")]
    assert [(row.label, row.context, row.sessions) for row in rows] == [(one, *at) for one in labels for at in places]
    fault = "RuntimeError: a fault."
    assert [row.error for row in rows] == [
        *("", fault, "", fault), *["OSError: no port."] * 4, *("", fault, INTERRUPTED, INTERRUPTED),
    ]  # fmt: skip
    requests.clear()
    stops_at = 1
    with pytest.raises(KeyboardInterrupt) as nothing:
        study.measure(trial)
    assert not isinstance(nothing.value, Interruption)


def test_servers_that_cannot_be_measured_are_reported(
    run: Run, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVKEEP_VLLM_PYTHON", raising=False)
    common = ("bench", "--serve", "-m", str(model_folder), "--contexts", "16", "--sessions", "1", "--steps", "3")
    code, out, _ = run(*common, "--only", "none", "--peers", "vllm,llama.cpp", "--json")
    assert not code
    assert [row["error"].split(" ")[0] for row in json.loads(out)["servers"]] == ["vllm", "llama.cpp"]
    for wrong, says in (
        (("--peers", "vlm"), "did you mean vllm"),
        (("--clock", "processor"), "leave --clock and --process out"),
        (("--memory", "much"), "much"),
    ):
        code, out, err = run(*common, *wrong)
        assert code and not out and says in err and "Traceback" not in err
    with pytest.raises(UsageError, match=r"did you mean llama\.cpp"):
        server_of("llama")
    assert all(name == kind.name for name, kind in SERVERS.items())
