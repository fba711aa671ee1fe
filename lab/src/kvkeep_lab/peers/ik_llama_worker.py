"""Times ik_llama.cpp through its server. Questions and answers (worker.py):

* ``{"do": "load", "program", "source", "threads", "tokens"}`` -> ``{"versions"}``: the first question, asked once;
  ``program``: the path of its ``llama-server``; ``source``: a GGUF file; ``tokens``: maximum tokens of a row;
* ``{"do": "time", "ids", "steps", "options"}`` -> ``{"prefill_s", "steps_s"}``: reads one prompt, then generates greedy
  tokens; ``options``: additional arguments of the program. The seconds are the server's own, without those of HTTP. It
  reports the sum of all steps, so each of ``steps_s`` is their mean.
"""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

START_S = 120.0
"""Maximum seconds for a server to start."""


class IkLlamaError(Exception):
    """A question that cannot be answered."""


class IkLlamaAnswerer:
    """One file, with a server for each set of options."""

    def __init__(self) -> None:
        self.command: list[str] = []
        self.made: dict[tuple[str, ...], str] = {}

    def load(self, program: str, source: str, threads: int, tokens: int) -> dict[str, Any]:
        """Store the options. Each server is started when it is first timed."""
        sizes = ["-t", f"{threads}", "-tb", f"{threads}", "-c", f"{tokens}", "-np", "1", "-fa", "on", "--log-disable"]
        self.command = [program, "-m", source, *sizes]
        said = subprocess.run([program, "--version"], capture_output=True, text=True)
        lines = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith("version")]
        return {"versions": {"ik_llama.cpp": lines[0].split(maxsplit=1)[1]} if lines else {}}

    def time(self, ids: list[list[int]], steps: int, options: list[str]) -> dict[str, Any]:
        """Time one prompt and ``steps`` tokens after it. The first token comes from the prompt."""
        if len(ids) > 1:
            raise IkLlamaError("only one row is timed here")
        # A stream, because the server refuses to send a whole answer that is not valid UTF-8.
        body = {
            "prompt": ids[0], "n_predict": steps + 1, "temperature": 0, "cache_prompt": False, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        request = urllib.request.Request(
            self._server(tuple(options)) + "/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            events = [json.loads(line.removeprefix(b"data:")) for line in answer if b'"timings"' in line]
        times = events[-1]["timings"]
        if (times["prompt_n"], times["predicted_n"]) != (len(ids[0]), steps + 1):
            raise IkLlamaError(f"it read {times['prompt_n']} tokens and generated {times['predicted_n']}")
        return {"prefill_s": times["prompt_ms"] / 1000, "steps_s": [times["predicted_ms"] / 1000 / steps] * steps}

    def _server(self, options: tuple[str, ...]) -> str:
        """Return the address of the server with these options."""
        if options not in self.made:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            process = subprocess.Popen([*self.command, *options, "--port", f"{port}"], stdout=subprocess.DEVNULL)
            atexit.register(process.kill)
            self.made[options] = _ready(process, f"http://127.0.0.1:{port}")
        return self.made[options]


def _ready(process: subprocess.Popen[bytes], url: str) -> str:
    """Return ``url`` when the server answers there."""
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url + "/health"):
                return url
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise IkLlamaError("its server did not start")


ANSWERER = IkLlamaAnswerer
"""The class that ``worker.py`` instantiates."""
