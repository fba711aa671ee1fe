"""Real clients on one server: which requests each sends, and whether its model's call and answer arrive.

python tools/clients.py [--python PYTHON] [--agents FOLDER] [--model MODEL] [--fields FILE] [--twice] [NAME ...]

PYTHON has the packages of tools/client_programs.py (pip install openai anthropic openai-agents mini-swe-agent
'pydantic-ai-slim[openai,anthropic]' langchain-openai). FOLDER has the agents of ``kvkeep agent`` (npm install
@anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code). Without MODEL, the model is scripted:
it calls a tool that reads notes.txt, and gives an answer that is known. NAME: a program or an agent; all of them if
none is named. --twice: each runs twice, and the second time shows what comes from the cache.

Each client has a home of its own, works in a folder with notes.txt, and reaches the server through a recorder. FILE
gets the names of all fields of their requests, by path, never a text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
from client_programs import MINI_COMMAND, PROGRAMS, QUESTION, TOOL  # noqa: E402
from scripted_agent import ANSWER, write_agent  # noqa: E402

from kvkeep.cli.agent import CLIENTS, Endpoint, started  # noqa: E402

NOTES = "hello\n"
LIMIT_S = 1800
HEADLESS: Mapping[str, tuple[str, ...]] = {
    "claude": ("-p", QUESTION, "--allowedTools", "Read"),
    "codex": ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", QUESTION),
    "opencode": ("run", QUESTION),
    "qwen": ("-p", QUESTION, "--yolo"),
}
"""The arguments with which an agent answers one question."""
OPAQUE = (
    "arguments",
    "client_metadata",
    "input",
    "input_schema",
    "metadata",
    "parameters",
    "parsed_arguments",
    "schema",
)
"""Fields of objects whose names are the client's, unless they are lists of items."""


@dataclass
class Recorded:
    """The requests of a client."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How many requests of each path and status."""
    fields: dict[str, set[str]] = field(default_factory=dict)
    """Names of fields, by path of the request."""
    errors: list[str] = field(default_factory=list)
    """The server's sentences."""
    results: bool = False
    """Whether a request has the result of a tool."""


def names(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields of an object, with the kinds of items."""
    if isinstance(value, list):
        for one in value:
            yield from names(one, f"{path}[]")
    elif isinstance(value, dict):
        kind = value.get("type") or value.get("role")
        path += f"({kind})" if isinstance(kind, str) and path.endswith("]") else ""
        for name, inner in value.items():
            yield f"{path}.{name}".lstrip(".")
            if name not in OPAQUE or isinstance(inner, list):
                yield from names(inner, f"{path}.{name}")


@contextmanager
def recorder(server: str, recorded: Recorded) -> Iterator[str]:
    """Pass requests on to ``server`` and record them; yield the recorder's URL."""
    target = urlsplit(server)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            upstream = HTTPConnection(target.hostname or "", target.port, timeout=LIMIT_S)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            upstream.request(self.command, self.path, body or None, kept)
            reply = upstream.getresponse()
            path = urlsplit(self.path).path
            said = reply.read() if reply.status >= 400 else b""
            with lock:
                recorded.statuses[path, reply.status] += 1
                recorded.errors += [said.decode(errors="replace")] if said else []
                if body:
                    recorded.fields.setdefault(path, set()).update(names(json.loads(body)))
                recorded.results |= any(mark in body for mark in (b'"tool_result"', b'"tool_call_id"', b"_call_output"))
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # a client that has gone
                self.wfile.write(said)
                while part := reply.read1():
                    self.wfile.write(part)
                    self.wfile.flush()
            upstream.close()

        do_GET = do_POST = do_HEAD = answer

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


def command(name: str, server: Endpoint, options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command of a client, and variables of its environment."""
    if name in PROGRAMS:
        program = str(ROOT / "tools" / "client_programs.py")
        return [options.python, program, name, server.url, server.key, server.model], {}
    setup = CLIENTS[name][1](server)
    path = str(Path(options.agents) / "node_modules" / ".bin" / name)
    return [path, *setup.arguments, *HEADLESS[name]], {**setup.environment}


def call_of(name: str, notes: str) -> tuple[str, str]:
    """Return the tool that the scripted model of a client calls, and its argument."""
    known = {
        "claude": ("Read", notes),
        "codex": ("exec_command", f"cat {notes}"),
        "opencode": ("read", notes),
        "qwen": ("read_file", notes),
        "mini-swe-agent chat": ("bash", MINI_COMMAND),
    }
    return known.get(name, (TOOL, "notes.txt"))


def tokens(url: str) -> tuple[int, int]:
    """Return how many tokens of prompts the server has read, and how many it had in a cache."""
    lines = urlopen(f"{url}/metrics").read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("kvkeep_prompt_tokens_total"))
    cached = sum(int(float(value)) for name, value in found.items() if "cached" in name)
    return sum(int(float(value)) for value in found.values()) - cached, cached


def run(name: str, server: Endpoint, home: Path, options: argparse.Namespace) -> tuple[list[str], Recorded]:
    """Run a client once. Return a row of the table, and its requests."""
    recorded = Recorded()
    before, begun = tokens(server.url), time.monotonic()
    with recorder(server.url, recorded) as url:
        arguments, variables = command(name, replace(server, url=url), options)
        environment = {**os.environ, "HOME": str(home), "PWD": os.getcwd(), **variables}
        for variable in [one for one in environment if one.startswith("XDG_")]:
            del environment[variable]
        try:
            done = subprocess.run(
                arguments, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=LIMIT_S,
            )  # fmt: skip
            code, said = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, said = 124, (error.stdout or b"").decode()
            done = None
    seconds, after = time.monotonic() - begun, tokens(server.url)
    if code and done is not None:
        print(f"{name}: exit code {code}: {(done.stderr or said)[-600:].strip()}", file=sys.stderr)
    for sentence in dict.fromkeys(recorded.errors):
        print(f"{name}: {sentence}", file=sys.stderr)
    if options.show:
        print(f"{name}: {said.strip()}\n{done.stderr.strip() if done else ''}", file=sys.stderr)
    wanted = NOTES.strip() if "mini" in name else ANSWER
    answered = wanted in said if options.model is None else bool(said.strip())
    statuses = Counter[int]()
    for (_, status), count in recorded.statuses.items():
        statuses[status] += count
    row = [
        name,
        ", ".join(recorded.fields),
        str(recorded.statuses.total()),
        ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())),
        "yes" if recorded.results or '"called": ["' in said else "no",
        "yes" if answered and not code else "no",
        *(f"{late - early:,}" for early, late in zip(before, after, strict=True)),
        f"{seconds:.0f}",
    ]
    return row, recorded


def main() -> None:
    """Run the clients, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python")
    parser.add_argument("--agents")
    parser.add_argument("--model")
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--fields", type=os.path.abspath)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--show", action="store_true", help="print what the clients say")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    known = [*(PROGRAMS if options.python else ()), *(CLIENTS if options.agents else ())]
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{unknown[0]} is none of: {', '.join(known)} (--python and --agents say where they are)")
    fields: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as parent:
        os.environ["KVKEEP_DATA"] = f"{parent}/data"
        os.mkdir(f"{parent}/work")
        os.chdir(f"{parent}/work")
        model = options.model or f"{parent}/scripted.gguf"
        notes = f"{parent}/work/notes.txt"
        Path(notes).write_text(NOTES)
        print("| client | requests go to | requests | statuses | tool called | answered | read | cached | seconds |")
        print("| --- | --- | ---: | --- | --- | --- | ---: | ---: | ---: |")
        chosen = options.names or known
        for call, clients in groupby(chosen, lambda name: None if options.model else call_of(name, notes)):
            if call is not None:
                write_agent(Path(model), *call)
            with started(model, options.memory, "kvkeep") as server:
                for name in clients:
                    home = Path(parent) / name.replace(" ", "-")
                    home.mkdir()
                    for _ in range(2 if options.twice else 1):
                        row, recorded = run(name, server, home, options)
                        print(f"| {' | '.join(row)} |", flush=True)
                        for path, found in recorded.fields.items():
                            fields.setdefault(path, set()).update(found)
    if options.fields is not None:
        text = json.dumps({path: sorted(found) for path, found in sorted(fields.items())}, indent=1)
        Path(options.fields).write_text(text + "\n")


if __name__ == "__main__":
    main()
