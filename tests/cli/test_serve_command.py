"""``kvkeep serve``: what it refuses, and what sessions are that name nothing."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import tokenizer
from families import tiny

from kvkeep import plugins
from kvkeep.cli.serve import process
from kvkeep.cli.serve.defaults import default_cache, describe_default
from kvkeep.cli.serve.process import HTTPServer
from kvkeep.cli.serve.server_options import (
    LimitOptions,
    MemoryOptions,
    NetworkOptions,
    StoreOptions,
    process_options,
)
from kvkeep.errors import UsageError
from kvkeep.models import loading
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine


def test_what_cannot_be_served_is_one_sentence(run: Any, model_folder: Path) -> None:
    common = ("serve", "--model", str(model_folder), "--memory", "50MB")
    for wrong, sentence in (
        (("-x", "full", "--host", "256.0.0.1"), "cannot listen on 256.0.0.1"),
        (("-x", "stock"), "cannot be used here"),
        (("-x", "h2o"), "budget"),
        (("-x", "h2o", "-b", "64", "--at-end", "endless"), "'h2o' does not keep every entry"),
        (("-x", "full", "--quota", "1GB", "--private"), "leave it or --quota out"),
        (("-x", "full", "--age", "30", "--private"), "leave it or --age out"),
    ):
        code, _, err = run(*common, *wrong)
        assert code == 2 and sentence in err and "Traceback" not in err


def test_without_a_method_the_memory_decides() -> None:
    loaded = Loaded(tiny("llama"), tokenizer(), "tiny", "tiny")
    engine = Engine(loaded, 1)
    positions = engine.geometry.max_positions
    assert positions is not None
    whole = engine.geometry.kv_bytes_per_token * positions
    roomy, tight = (
        default_cache(loaded, 2 * conversations * whole // share, conversations)
        for conversations, share in ((3, 1), (3, 4))
    )
    assert roomy == {"method": "full"} and tight["method"] == "kv-direct"
    for given in (roomy, tight):
        told = describe_default(Engine(loaded, 6 * whole, **given))
        assert "--pin" not in told
        assert given["method"] in told and f"conversations of {positions:,} tokens" in told
    assert "(exact); " in told and int(told.split("(exact); ")[1].split(" ")[0]) >= 3
    for given, useless in ((roomy, True), ({"method": "h2o", "budget": 32}, False)):
        told = describe_default(Engine(loaded, 6 * whole, **given), "system")
        assert ("--pin only matters to requests that name a lossy method" in told) is useless
    endless = Engine(loaded, 6 * whole, capacity=2000, method="endless+passages:count=2,size=16", budget=32)
    told = describe_default(endless)
    assert f"(exact up to {positions} tokens); sessions of endless store at most 2,000 older tokens" in told
    with pytest.raises(UsageError, match="fewer --conversations"):
        default_cache(loaded, 6 * whole, 10**6)


def test_it_listens_before_anything_is_loaded(
    run: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a home without files. Probes are answered meanwhile, other requests when the model is loaded. It says which
    memory it takes, and why."""
    events, pending = list[Any](), list[Future[int]]()
    load, start, serve = loading.load, HTTPServer.start, HTTPServer.serve_until_exit
    threads = ThreadPoolExecutor()
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))

    def noted(self: HTTPServer) -> None:
        start(self)
        events.append(("listens", self.url))

    def loaded(*given: Any, **options: Any) -> Loaded:
        url = events[-1][1]
        for path in ("/health", "/ready"):
            found = httpx.get(url + path)
            assert found.status_code == 503 and found.json()["error"]["code"] == "loading"
        pending.append(threads.submit(lambda: httpx.get(f"{url}/v1/models", timeout=60).status_code))
        events.append("loads")
        return load(*given, **options)

    def served(self: HTTPServer, app: Any) -> None:
        assert not pending[-1].done()
        ends = threads.submit(serve, self, app)
        assert pending[-1].result(60) == 200 and httpx.get(f"{self.url}/health").status_code == 200
        self.should_exit = True
        ends.result(60)
        events.append("answered")

    monkeypatch.setattr(HTTPServer, "start", noted)
    monkeypatch.setattr(HTTPServer, "serve_until_exit", served)
    monkeypatch.setattr(loading, "load", loaded)
    monkeypatch.setattr(process, "_stop_on_signals", lambda *given: None)
    common = ("serve", "--model", str(model_folder), "--port", "0", "--sessions", str(tmp_path))
    code, _, err = run(*common)
    assert code == 0 and [*events[0][:1], *events[1:]] == ["listens", "loads", "answered"], err
    assert "for 8 conversations of" in err and "'full' (exact); 8 conversations of" in err
    code, _, err = run(*common, "--memory", "400KB", "-b", "auto")
    assert code == 0 and "each of 8 conversations: 'kv-direct' is used with" in err and "(exact); 8 conver" in err
    code, _, err = run(*common, "-x", "full", "--conversations", "3")
    assert code == 0 and "for 3 conversations of" in err and "(exact); 3 conversations" in err
    monkeypatch.setattr("kvkeep.cli.serve.defaults.free_memory", lambda device: 4 * 10**6)
    code, _, err = run(*common, "--conversations", "1000", "-x", "full")
    assert code == 0 and "memory: 1.0 MB, a quarter of the 4.0 MB that are free; 1000 conversations" in err


def test_requests_that_wait_for_a_model_that_cannot_be_loaded_end(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, pending, threads = HTTPServer.start, list[Future[int]](), ThreadPoolExecutor()

    def noted(self: HTTPServer) -> None:
        start(self)
        pending.append(threads.submit(lambda: httpx.get(f"{self.url}/v1/models", timeout=60).status_code))
        while not self.server_state.connections:  # a damaged file is refused at once
            time.sleep(0.01)

    monkeypatch.setattr(HTTPServer, "start", noted)
    (damaged := tmp_path / "damaged.gguf").write_bytes(b"GGUF and no more")
    options = ("--port", "0", "--sessions", str(tmp_path / "store"), "-x", "full")
    code, _, err = run("serve", "--model", str(damaged), *options)
    assert code == 1 and "is cut short" in err and "Traceback" not in err
    assert pending[0].result(60) == 503


def test_without_the_connector_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "points", lambda group: ())
    for given in ({"replicas": "2"}, {"bucket": "s3://talks"}):
        with pytest.raises(UsageError, match=r"needs the connector kvkeep-cluster.*pip install ./connectors/cluster"):
            process_options()(**given).check(MemoryOptions(), NetworkOptions(), LimitOptions(), StoreOptions())
    process_options()().check(MemoryOptions(), NetworkOptions(), LimitOptions(), StoreOptions())
