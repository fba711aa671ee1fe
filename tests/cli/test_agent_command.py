"""``kvkeep agent``: it points a client at a server, runs it, and leaves nothing: no process, no file of the user's."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import httpx
import pytest
from running import KEYS, serving

from kvkeep.cli import agent

Run = Callable[..., tuple[int, str, str]]
SERVER = agent.Endpoint("http://127.0.0.1:1", 'it\'s "a" key', "tiny", 2048)
CLIENT = """#!{python}
import json, os, sys, urllib.request
base = os.environ.get("OPENAI_BASE_URL", "")
models = json.load(urllib.request.urlopen(base + "/models")) if base and {asks} else None
json.dump([sys.argv[1:], dict(os.environ), models], open({report!r}, "w"))
{end}
"""


@pytest.fixture
def address() -> Iterator[str]:
    with serving(keys=[]) as (found, _):
        yield found


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Callable[[], Any]]]:
    """Makes a program that writes what it gets and ends as given; the returned function reads it. The user's home stays
    empty."""
    folder, home = tmp_path / "bin", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(home))

    def made(name: str, end: str = "", asks: bool = False) -> Callable[[], Any]:
        report = folder / "report.json"
        (folder / name).write_text(CLIENT.format(python=sys.executable, report=str(report), end=end, asks=asks))
        (folder / name).chmod(0o755)
        return lambda: json.loads(report.read_text())

    yield made
    assert not [*home.iterdir()]


def test_a_client_gets_the_server_its_arguments_and_its_exit_code(run: Run, client: Any, address: str) -> None:
    report = client("qwen", "sys.exit(7)")
    code, _, err = run("agent", "qwen", "--url", f"{address}/v1/", "--", "-p", "two words")
    arguments, environment, _ = report()
    assert code == 7 and not err
    assert arguments == ["--auth-type", "openai", "--model", "tiny", "-p", "two words"]
    assert environment["OPENAI_BASE_URL"] == f"{address}/v1" and environment["OPENAI_MODEL"] == "tiny"
    assert "127.0.0.1" in environment["no_proxy"].split(",")


def test_a_client_that_crashes_is_told(run: Run, client: Any, address: str) -> None:
    client("claude", "os.kill(os.getpid(), 11)")
    code, _, err = run("agent", "claude", "--url", address)
    assert code == 139 and err == "claude was ended by SIGSEGV\n"


def test_a_signal_that_ends_the_command_ends_the_client(run: Run, client: Any, address: str) -> None:
    client("claude", "import time; os.kill(os.getppid(), 15); time.sleep(60)")
    code, _, err = run("agent", "claude", "--url", address)
    assert code == 143 and "SIGTERM" in err


def test_ctrl_c_is_the_clients(run: Run, client: Any, address: str) -> None:
    client("claude", "os.kill(os.getppid(), 2); sys.exit(3)")
    assert run("agent", "claude", "--url", address)[::2] == (3, "")


def test_a_key_comes_from_the_environment(run: Run, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = client("codex")
    with serving() as (address, _):
        code, _, err = run("agent", "codex", "--url", address)
        assert code == 1 and "refuses the key; set KVKEEP_API_KEYS" in err
        monkeypatch.setenv("KVKEEP_API_KEYS", KEYS[1])
        assert run("agent", "codex", "--url", address)[0] == 0
    assert report()[1]["KVKEEP_API_KEY"] == KEYS[1] and KEYS[1] not in " ".join(report()[0])


@pytest.mark.turns(4)
@pytest.mark.parametrize("print_of", [*agent.CLIENTS, None])
def test_what_is_printed_is_for_a_shell(print_of: str | None, run: Run, client: Any, address: str) -> None:
    report = client(print_of or "none")
    code, out, _ = run("agent", *([print_of] if print_of else []), "--print", "--url", address)
    assert code == 0
    command = "" if print_of else "none"
    subprocess.run(["sh", "-ec", out + command], check=True)
    arguments, environment, _ = report()
    assert address in " ".join([*arguments, *environment.values()])


def test_overrides_of_codex_are_toml() -> None:
    setup = agent.codex(SERVER)
    assert setup.arguments[::2] == ("-c",) * (len(setup.arguments) // 2)
    found = tomllib.loads("\n".join(setup.arguments[1::2]))
    provider = found["model_providers"][found["model_provider"]]
    assert (found["model"], found["model_context_window"]) == ("tiny", 2048)
    assert provider["base_url"] == "http://127.0.0.1:1/v1" and setup.environment[provider["env_key"]] == SERVER.key


def test_the_model_of_opencode_is_one_of_its_provider() -> None:
    found = json.loads(agent.opencode(SERVER).environment["OPENCODE_CONFIG_CONTENT"])
    for name in (found["model"], found["small_model"]):
        provider, _, model = name.partition("/")
        assert found["provider"][provider]["models"][model]["limit"]["context"] == 2048
    assert found["provider"][provider]["options"]["apiKey"] == SERVER.key


def test_every_model_of_claude_is_the_servers() -> None:
    found = agent.claude(SERVER).environment
    named = {name: value for name, value in found.items() if name.endswith("_MODEL")}
    assert set(named.values()) == {"tiny"} and "ANTHROPIC_DEFAULT_HAIKU_MODEL" in named
    assert found["ANTHROPIC_API_KEY"] == "" and found["ANTHROPIC_BASE_URL"] == SERVER.url


SENDS = """
called = {"input": "river", "tools": [{"a": 1}]}
counted = {"messages": ["z" * 999], "tools": [{"a": 1}]}  # no request for an answer
for body in ({"messages": [], "tools": []}, called, {"input": "x" * 99}, counted):
    path = "/messages/count_tokens" if body is counted else "/responses"
    try:
        urllib.request.urlopen(urllib.request.Request(base + path, json.dumps(body).encode()))
    except urllib.error.HTTPError as error:
        assert error.code == 400 and "has recorded" in json.load(error)["error"]["message"]
sys.exit(5)
"""


def test_the_longest_request_with_tools_is_recorded(run: Run, client: Any, tmp_path: Path) -> None:
    report = client("qwen", SENDS, asks=True)
    path = tmp_path / "request.json"
    code, _, err = run("agent", "qwen", "--model", "tiny", "--record", str(path), "--", "-p", "hello")
    arguments, _, models = report()
    assert code == 0 and f"kvkeep warm {path}" in err and path.stat().st_mode & 0o777 == 0o600
    assert arguments[-2:] == ["-p", "hello"] and models["data"][0]["id"] == "tiny"
    assert json.loads(path.read_text()) == {"input": "river", "tools": [{"a": 1}]}


def test_what_cannot_be_recorded_is_one_sentence(run: Run, client: Any, address: str, tmp_path: Path) -> None:
    client("qwen")
    path = tmp_path / "request.json"
    code, _, err = run("agent", "qwen", "--record", str(path))
    assert code == 1 and "sent no request for an answer" in err and not path.exists()
    client("qwen", SENDS)
    code, _, err = run("agent", "qwen", "--record", str(tmp_path / "none" / "request.json"))
    assert code == 1 and "cannot be written: no such file or directory" in err
    assert "without a server" in run("agent", "qwen", "--url", address, "--record", str(path))[2]
    assert "already something" in run("agent", "qwen", "--record", str(tmp_path))[2]
    assert "ends in .json; 'request' does not" in run("agent", "qwen", "--record", "request")[2]


def test_a_server_that_is_not_loading_is_not_waited_for(run: Run, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(url: str, *_: Any) -> Any:
        raise HTTPError(url, 503, "", Message(), io.BytesIO(b'{"error": {"code": "stopping"}}'))

    client("claude")
    monkeypatch.setattr(agent, "call", stops)
    code, _, err = run("agent", "claude", "--url", "http://127.0.0.1:1")
    assert code == 1 and "it is not a server of kvkeep" in err


def test_what_cannot_be_run_is_one_sentence(
    run: Run, client: Any, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client("claude")
    (tmp_path / "bin" / "codex").write_text("no program")
    (tmp_path / "bin" / "codex").chmod(0o755)
    page = f"{address}/page"
    for given, sentence in (
        (("claude", "--url", "http://127.0.0.1:9"), "cannot be used: connection refused"),
        (("claude", "--url", page), "it is not a server of kvkeep"),
        (("claude", "--url", address, "-m", "smollm2"), "leave --model out"),
        (("codex", "--url", address), "codex' cannot be run: "),
        (("claude", "-m", "nosuch"), "Unknown model 'nosuch'"),
        (("claude", "-m", "./missing.gguf"), "There is no model at"),
    ):
        code, out, err = run("agent", *given)
        assert code in (1, 2) and not out and sentence in err and err.count("\n") == 1, err
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run("agent", "claude", "--url", address)
    assert code == 2 and "npm install -g @anthropic-ai/claude-code" in err


def test_ctrl_c_before_the_client_starts(run: Run, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(url: str, *_: Any) -> Any:
        raise HTTPError(url, 503, "", Message(), io.BytesIO(b'{"error": {"code": "loading"}}'))

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    client("claude")
    monkeypatch.setattr(agent, "call", loads)
    monkeypatch.setattr("kvkeep.cli.agent.time.sleep", interrupted)
    code, out, err = run("agent", "claude")
    assert (code, out, err) == (130, "", "kvkeep: Interrupted before the agent was started.\n")


# -- a server of its own --------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server runs where one listens by default."""
    monkeypatch.setattr(agent, "URL", "http://127.0.0.1:9")


@pytest.mark.slow
@pytest.mark.usefixtures("nowhere")
def test_a_server_is_started_and_ends_with_the_client(
    run: Run, client: Any, long_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = client("qwen", "sys.exit(4)", asks=True)
    code, _, err = run("agent", "qwen", "-m", str(long_model_folder), "--memory", "50MB")
    assert code == 4 and "starting a server" in err
    _, environment, models = report()
    assert models["data"][0]["id"] == environment["OPENAI_MODEL"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(environment["OPENAI_BASE_URL"])


@pytest.mark.usefixtures("nowhere")
def test_a_server_that_does_not_start_says_why(run: Run, client: Any, model_folder: Path) -> None:
    client("claude")
    code, _, err = run("agent", "claude", "-m", str(model_folder), "--memory", "much")
    assert code == 1 and "No server could be started: The memory 'much' is not a number of bytes" in err


def test_a_server_ends_when_the_command_is_killed(model_folder: Path) -> None:
    code = "from kvkeep.cli.agent import serve_while_open; serve_while_open()"
    command = [sys.executable, "-c", code, "serve", "--model", str(model_folder), "--port", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(60) in (0, -15)
