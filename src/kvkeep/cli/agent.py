"""``kvkeep agent``: a coding agent that uses this machine's server. The agent's own configuration stays as it is."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Annotated, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import typer

from kvkeep.cli import options
from kvkeep.cli.output import loading, note
from kvkeep.cli.recorder import RequestRecorder
from kvkeep.errors import KvkeepError, Stopped, UsageError, reason_of, unknown
from kvkeep.files import write_whole

URL = "http://127.0.0.1:8000"
"""Where ``kvkeep serve`` listens by default."""
MODEL = "qwen2.5-coder-1.5b"
MEMORY, CONVERSATIONS = "2GB", 2
"""The memory of a server that is started, and the conversations of the longest context for which it chooses a cache."""
ANSWER_TOKENS = 4096
"""The longest answer that an agent plans for; a context has place for it and for what an agent sends."""
IDLE_MS = 3_600_000
"""Milliseconds that an agent waits for the next part of an answer: a long start takes minutes to read."""
RECORDED_CONTEXT = 32_768
"""The context length in the setup of an agent whose request is recorded: that of :data:`MODEL`."""
POLL_S, TIMEOUT_S = 0.1, 10.0
"""Seconds between two looks at a server that starts, and of one request to it."""
STOP_S, SOON_S = 60.0, 1.0
"""Seconds that a server has at its end to store what it has read, and those after which a line says so."""


@dataclass(frozen=True)
class Endpoint:
    """A server, as its clients need it."""

    url: str
    """Without a path."""
    key: str
    model: str
    context: int
    """Tokens of the model's context."""


@dataclass(frozen=True)
class Setup:
    """What points a client at a server."""

    environment: Mapping[str, str]
    """Variables of its environment; an empty one hides a value of the user's."""
    arguments: tuple[str, ...] = ()
    """Arguments before those of the user."""


def openai(server: Endpoint) -> Setup:
    """Return the variables of OpenAI's packages, for chat completions and responses."""
    variables = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
    return Setup(variables)


def anthropic(server: Endpoint) -> Setup:
    """Return the variables of Anthropic's packages, for messages."""
    variables = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": server.key, "ANTHROPIC_API_KEY": ""}
    return Setup(variables | {"ANTHROPIC_MODEL": server.model})


def claude(server: Endpoint) -> Setup:
    """Return the setup of Claude Code. Its requests for titles and its subagents use the same model, and its system
    prompt does not begin with a header that changes with every session."""
    roles = ("DEFAULT_OPUS", "DEFAULT_SONNET", "DEFAULT_HAIKU", "SMALL_FAST")
    return Setup(
        {
            **anthropic(server).environment,
            **{f"ANTHROPIC_{role}_MODEL": server.model for role in roles},
            "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
            "CLAUDE_CODE_USE_BEDROCK": "",
            "CLAUDE_CODE_USE_VERTEX": "",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": f"{ANSWER_TOKENS}",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": f"{server.context}",
            "API_TIMEOUT_MS": f"{IDLE_MS}",
        }
    )


def codex(server: Endpoint) -> Setup:
    """Return the setup of Codex: overrides of its configuration, whose values are TOML. JSON's strings are."""
    provider = {
        "name": "kvkeep",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
        "env_key": "KVKEEP_API_KEY",
        "stream_idle_timeout_ms": IDLE_MS,
    }
    values = {"model": server.model, "model_provider": "kvkeep", "model_context_window": server.context}
    values |= {f"model_providers.kvkeep.{name}": value for name, value in provider.items()}
    overrides = [part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Setup({"KVKEEP_API_KEY": server.key}, tuple(overrides))


def opencode(server: Endpoint) -> Setup:
    """Return the setup of opencode: a configuration that it lays over the user's."""
    model = {"name": server.model, "limit": {"context": server.context, "output": ANSWER_TOKENS}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvkeep",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key, "timeout": IDLE_MS},
        "models": {server.model: model},
    }
    chosen = f"kvkeep/{server.model}"
    content = {"provider": {"kvkeep": provider}, "model": chosen, "small_model": chosen}
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


def qwen(server: Endpoint) -> Setup:
    """Return the setup of Qwen Code."""
    return Setup(openai(server).environment, ("--auth-type", "openai", "--model", server.model))


CLIENTS: Mapping[str, tuple[str, Callable[[Endpoint], Setup]]] = {
    "claude": ("@anthropic-ai/claude-code", claude),
    "codex": ("@openai/codex", codex),
    "opencode": ("opencode-ai", opencode),
    "qwen": ("@qwen-code/qwen-code", qwen),
}
"""Clients by the name of their program: the package on npm, and the setup."""


def agent(
    name: Annotated[str | None, typer.Argument(help=f"{', '.join(CLIENTS)}.", show_default=False)] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of the agent.", show_default=False)
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A running server.", show_default=f"{URL}; if none runs there, one is started"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="Model of the server to start, or that a recorded request names.",
            show_default=MODEL,
        ),
    ] = None,
    memory: Annotated[str, typer.Option(help="Memory for the conversations of the server to start.")] = MEMORY,
    show: Annotated[
        bool, typer.Option("--print", help="Print what the agent, or any other client, needs, and run nothing.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answer nothing, and write the agent's longest request to a new file (kvkeep warm FILE).",
        ),
    ] = None,
) -> None:
    """Run a coding agent on this machine's server: claude, codex, opencode or qwen.

    If no server runs, one is started, and stopped with the agent. The agent's own configuration is neither
    read nor changed. Example: kvkeep agent claude -- -p "What does main.py do?"
    """
    from kvkeep.serve.http.keys import VARIABLE, keys_given

    if record is not None:
        if show or url is not None:
            raise UsageError("--record runs the agent without a server; leave --print and --url out.")
        if os.path.lexists(record):
            raise UsageError(f"There is already something at '{record}'; name another file.")
        if record.suffix != ".json":
            raise UsageError(f"kvkeep warm reads a request from a file whose name ends in .json; '{record}' does not.")
    if url is not None and model is not None:
        raise UsageError("--url names a server that has its model already; leave --model out.")
    if name is None and not show:
        raise UsageError(f"Name an agent: {', '.join(CLIENTS)}; or print what any other client needs with --print.")
    if name is not None and name not in CLIENTS:
        raise unknown("agent", name, CLIENTS)
    program = installed(name) if name is not None and not show else ""
    if record is not None:
        assert name is not None
        raise typer.Exit(run_recorded(name, program, model or MODEL, arguments or [], record))
    key = next(iter(keys_given()), "kvkeep")
    found = running(url or URL, key, f"set {VARIABLE} to one of its keys", required=url is not None)
    if found is not None and model not in (None, found.model):
        found = None
    if show:
        if found is None:
            what = "server" if model is None else f"server with the model '{model}'"
            raise KvkeepError(f"No {what} runs at {URL}; start one ('kvkeep serve'), or name its --url.")
        for setup in [openai, anthropic] if name is None else [CLIENTS[name][1]]:
            print(*shell_lines(name, setup(found)), sep="\n")
        return
    assert name is not None
    if found is not None:
        raise typer.Exit(run(program, CLIENTS[name][1](found), arguments or [], found.url))
    model = model or MODEL
    options.check_model(model)
    with started(model, memory, key) as server:
        raise typer.Exit(run(program, CLIENTS[name][1](server), arguments or [], server.url))


def shell_lines(name: str | None, setup: Setup) -> Iterator[str]:
    """Yield what a shell needs to run a client: variables, and the command of a named one."""
    for variable, value in setup.environment.items():
        yield f"export {variable}={shlex.quote(value)}"
    if name is not None:
        yield shlex.join([name, *setup.arguments])


def installed(name: str) -> str:
    """Return the path of the client's program. Raises UsageError if it is not installed."""
    if (path := shutil.which(name)) is None:
        raise UsageError(
            f"'{name}' is not installed; it is the npm package {CLIENTS[name][0]}: npm install -g {CLIENTS[name][0]}"
        )
    return path


def run_recorded(name: str, program: str, model: str, arguments: list[str], path: Path) -> int:
    """Run a client without a model, write its longest request to a new file, and return 0: its own exit code
    says that it got no answer. Raises KvkeepError if it sent no request, or the file cannot be written."""
    recorder = RequestRecorder(model)
    with recorder.listening() as url:
        note(f"the agent's requests are recorded and not answered; ask something short, and leave {name}")
        run(program, CLIENTS[name][1](Endpoint(url, "kvkeep", model, RECORDED_CONTEXT)), arguments, url)
    if not recorder.longest:
        raise KvkeepError(f"'{name}' sent no request for an answer, so '{path}' was not written; ask it something.")
    try:
        write_whole(path, lambda file: file.write(recorder.longest))
    except OSError as error:
        raise KvkeepError(f"'{path}' cannot be written: {reason_of(error)}; name another file.") from None
    command = shlex.join(["kvkeep", "warm", f"{path}", "--model", model])
    note(f"{len(recorder.longest):,} bytes are written to {path}; read them ahead with: {command}")
    return 0


# -- servers ------------------------------------------------------------------------------------------------


def running(url: str, key: str, remedy: str, required: bool) -> Endpoint | None:
    """Return the server at ``url``, once its model is loaded; None if there is none. required: raise KvkeepError
    instead. remedy: what to do about a server that refuses the key."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        wait_ready(url, lambda: None)
        found = call(f"{url}/v1/models", key)["data"][0]
        if found["owned_by"] != "kvkeep":
            raise KeyError
        return Endpoint(url, key, found["id"], context_of(url, key, found["id"]))
    except HTTPError as error:
        if error.code in (401, 403):
            raise KvkeepError(f"The server at {url} refuses the key; {remedy}.") from None
        reason = "it is not a server of kvkeep"
    except (KeyError, IndexError, TypeError):
        reason = "it is not a server of kvkeep"
    except (OSError, HTTPException, ValueError) as error:
        reason = reason_of(getattr(error, "reason", error))
    if required:
        raise KvkeepError(f"The server at {url} cannot be used: {reason}; start one with 'kvkeep serve'.")
    return None


def wait_ready(url: str, check: Callable[[], None]) -> None:
    """Wait until the server at ``url`` has loaded its model. check: is called while it loads, and may raise.

    Raises:
        OSError: it does not listen, or is no server of kvkeep.
        Stopped: by Ctrl-C.
    """
    try:
        while True:
            try:
                call(f"{url}/ready")
                return
            except HTTPError as error:
                if error.code != 503 or not _is_loading(error):
                    raise
            check()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise Stopped("Interrupted before the agent was started.") from None


def _is_loading(error: HTTPError) -> bool:
    """Return whether a server says that it loads its model."""
    with suppress(ValueError, LookupError, TypeError):
        return bool(json.load(error)["error"]["code"] == "loading")
    return False


def context_of(url: str, key: str, model: str) -> int:
    """Return the tokens of the model's context."""
    return int(call(f"{url}/tokenize", key, {"model": model, "prompt": "a"})["max_model_len"])


def call(url: str, key: str = "", body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON that a server of this machine sends; a ``body`` is posted. No proxy is used."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = Request(url, None if body is None else json.dumps(body).encode(), headers)
    with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as reply:
        return json.load(reply)


@contextmanager
def started(model: str, memory: str, key: str) -> Iterator[Endpoint]:
    """Start ``kvkeep serve`` on a free port within the block, and yield it when its model is loaded. It ends with this
    process, however that ends. Raises KvkeepError, with its sentence, if it does not start."""
    from kvkeep.cli.startup import fetch_model

    fetch_model(model)
    code = "from kvkeep.cli.agent import serve_while_open; serve_while_open()"
    given = ["--model", model, "--port", "0", "--memory", memory, "--conversations", f"{CONVERSATIONS}"]
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen(
            [sys.executable, "-c", code, "serve", *given],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            start_new_session=True,  # Ctrl-C is for the agent
        )
        assert server.stdin is not None

        def check() -> None:
            if server.poll() is not None:
                raise KvkeepError(f"No server could be started: {last_line(said)}")

        try:
            note(f"starting a server: {model} (to keep one for several agents: kvkeep serve --model {model})")
            with loading(model):
                while (url := first_url(said)) is None:
                    check()
                    time.sleep(POLL_S)
                wait_ready(url, check)
            name = call(f"{url}/v1/models", key)["data"][0]["id"]
            yield Endpoint(url, key, name, context_of(url, key, name))
            if server.poll() is not None:
                note(f"the server had ended before the agent: {last_line(said)}")
        except KeyboardInterrupt:
            raise Stopped("Interrupted before the agent was started.") from None
        finally:
            server.stdin.close()
            try:
                server.wait(SOON_S)
            except subprocess.TimeoutExpired:
                note("the server stores what it has read")
                with suppress(subprocess.TimeoutExpired):
                    server.wait(STOP_S)
            server.kill()
            server.wait()


def serve_while_open() -> None:
    """Run the command line until it ends, or standard input does: the process that holds its other end is gone."""
    from kvkeep.cli import program

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    program()


def first_url(said: IO[str]) -> str | None:
    """Return the URL in the first line of a server's messages; None if there is none yet."""
    said.seek(0)
    line = said.readline()
    return line.split()[0] if line.startswith("http") and line.endswith("\n") else None


def last_line(said: IO[str]) -> str:
    """Return the last line of a server's messages."""
    said.seek(0)
    lines = said.read().split("\n")
    return next((line.removeprefix("kvkeep: ") for line in reversed(lines) if line.strip()), "it said nothing")


# -- clients ------------------------------------------------------------------------------------------------


def run(program: str, setup: Setup, arguments: list[str], url: str) -> int:
    """Run a client with the user's terminal, and return its exit code. Ctrl-C is the client's; a signal that ends this
    process is passed on to it. Raises KvkeepError if it cannot be run."""
    host = urlsplit(url).hostname or ""
    direct = {name: ",".join(filter(None, (os.environ.get(name), host))) for name in ("NO_PROXY", "no_proxy")}
    environment = {**os.environ, **direct, **setup.environment}
    client: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: Any) -> None:
        for one in client:
            one.send_signal(number)

    passed = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in passed}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to the client, too
    try:
        client.append(subprocess.Popen([program, *setup.arguments, *arguments], env=environment))
        code = client[0].wait()
    except OSError as error:
        raise KvkeepError(f"'{program}' cannot be run: {reason_of(error)}.") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code < 0 and -code != signal.SIGINT:
        note(f"{Path(program).name} was ended by {signal.Signals(-code).name}")
    return code if code >= 0 else 128 - code
