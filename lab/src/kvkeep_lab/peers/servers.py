"""Servers with an OpenAI interface, by kvkeep and others. Each is a process that ends with its block."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, ClassVar

import torch

from kvkeep.cli.agent import CONVERSATIONS, MEMORY
from kvkeep.errors import KvkeepError, UsageError, reason_of, unknown
from kvkeep.models.loading import Loaded
from kvkeep.policies.methods import resolve
from kvkeep_lab.peers.engines import IkLlamaCpp, LlamaCpp, PeerEngine, Vllm, file_of, program_of, written
from kvkeep_lab.process_rollup import process_memory_of

START_S = 300.0
"""Maximum seconds for a server to start."""
START_POLL_S = 0.05
"""Seconds between checks whether it has started."""
END_S = 15.0
"""Maximum seconds for a server to end."""


class Server(ABC):
    """A server with one model. tokens: maximum tokens of a session. sessions: maximum concurrent sessions. interpreter:
    path of an interpreter with the server; None selects the environment variable's."""

    name: ClassVar[str]
    """Its name in ``--peers``."""
    engine: ClassVar[type[PeerEngine] | None] = None
    """Engine whose interpreter runs the server; None: the current interpreter."""
    usage: ClassVar[bool] = False
    """Whether a stream can end with the number of tokens. Otherwise every piece of text counts as one token."""

    def __init__(self, loaded: Loaded, tokens: int, sessions: int, interpreter: str | None = None) -> None:
        self.loaded, self.tokens, self.sessions, self.interpreter = loaded, tokens, sessions, interpreter
        self.threads = torch.get_num_threads()

    @property
    def label(self) -> str:
        """Label of its rows."""
        return self.name

    @property
    def model(self) -> str:
        """Name of its model in requests."""
        return self.loaded.name

    @contextmanager
    @abstractmethod
    def command(self, port: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:
        """Yield the command line of a server at a port, and its environment variables. Raises UsageError if the program
        or the model's files are missing."""

    @contextmanager
    def running(self) -> Iterator[Running]:
        """Run the server during the block. Raises the UsageError of :meth:`command`, and KvkeepError if the server does
        not start."""
        port = _free_port()
        with self.command(port) as (line, variables), tempfile.TemporaryFile() as said:
            offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": f"{self.threads}"}
            try:
                process = subprocess.Popen(
                    line,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **offline, **variables},
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(f"'{line[0]}' cannot be run: {reason_of(error)}.") from error
            try:
                _wait(self.name, process, f"http://127.0.0.1:{port}/v1/models", said)
                yield Running(process.pid, f"http://127.0.0.1:{port}/v1")
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Running:
    """A server's process and its address."""

    def __init__(self, pid: int, url: str) -> None:
        self.pid, self.url = pid, url

    def memory(self) -> int:
        """Return the bytes of the process and its children, with their proportional share of shared pages (PSS)."""
        return sum(_pss(pid) for pid in _family(self.pid))

    def anonymous(self) -> int:
        """Return the bytes of the process and its children in memory without a file."""
        return sum(_status(pid, "RssAnon") for pid in _family(self.pid))

    def peak(self) -> int:
        """Return the largest number of bytes (RSS) that the process and its children have had in memory, files that
        they map included."""
        return sum(_status(pid, "VmHWM") for pid in _family(self.pid))

    def kill(self) -> None:
        """End the process and its children with SIGKILL, so that they store nothing more."""
        os.killpg(self.pid, signal.SIGKILL)


class Ours(Server):
    """``kvkeep serve`` with sessions of one method and budget. memory: memory of all sessions, as in the command."""

    name = "kvkeep"
    usage = True

    def __init__(self, loaded: Loaded, tokens: int, sessions: int, method: str, budget: str, memory: str) -> None:
        super().__init__(loaded, tokens, sessions)
        self.method, self.budget, self.memory = method, budget, memory

    @property
    def label(self) -> str:
        return f"kvkeep {self.method}"

    @property
    def requested_budget(self) -> str | None:
        """Budget of its sessions; None if the method takes no budget."""
        return self.budget if "budget" in resolve(self.method).options else None

    @contextmanager
    def command(self, port: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:
        method = ["--method", self.method] + (
            [] if self.requested_budget is None else ["--budget", self.requested_budget]
        )
        where = ["--port", f"{port}", "--model", self.loaded.name, "--memory", self.memory]
        with tempfile.TemporaryDirectory() as folder:  # an earlier run's store would have read the prompts
            where += ["--sessions", folder]
            yield [sys.executable, "-m", "kvkeep", "serve", *where, *method], {"KVKEEP_API_KEYS": ""}


class KvkeepForAgents(Server):
    """``kvkeep serve`` as ``kvkeep agent`` starts it. folder: that of its store."""

    name = "kvkeep"
    usage = True

    def __init__(self, loaded: Loaded, tokens: int, sessions: int, folder: Path) -> None:
        super().__init__(loaded, tokens, sessions)
        self.folder = folder

    @contextmanager
    def command(self, port: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:
        where = ["--port", f"{port}", "--model", self.loaded.name, "--sessions", f"{self.folder}"]
        sizes = ["--memory", MEMORY, "--conversations", f"{CONVERSATIONS}"]
        yield [sys.executable, "-m", "kvkeep", "serve", *where, *sizes], {"KVKEEP_API_KEYS": ""}


class LlamaServer(Server):
    """llama.cpp's own server with the model's GGUF file. Each of its slots has space for ``tokens`` tokens; it has one
    for each session."""

    name = "llama-server"
    usage = True
    program: ClassVar[str] = "KVKEEP_LLAMA_SERVER"
    """Environment variable with the path of the program."""
    options: ClassVar[Sequence[str]] = ("-fa", "on", "--jinja", "--no-kv-unified", "--cache-reuse", "256")
    """A slot for each conversation, and a prompt that differs early reuses later parts of its slot. The prompt cache in
    memory (--cache-ram) is on by default."""

    @contextmanager
    def command(self, port: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:
        sizes = ["-np", f"{self.sessions}", "-c", f"{self.sessions * self.tokens}"]
        threads = ["-t", f"{self.threads}", "-tb", f"{self.threads}"]
        where = ["-m", file_of(self.loaded), "--alias", self.model, "--port", f"{port}"]
        yield [program_of(self.program, self.name), *where, *threads, *sizes, *self.options], {}


class IkLlamaServer(LlamaServer):
    """The server of ik_llama.cpp."""

    name = IkLlamaCpp.name
    program = IkLlamaCpp.python
    options: ClassVar[Sequence[str]] = ("-fa", "on", "--jinja", "--log-disable")  # it logs to a file in any folder


class LlamaCppServer(Server):
    """llama-cpp-python's server with the model's GGUF file."""

    name = LlamaCpp.name
    engine = LlamaCpp

    @contextmanager
    def command(self, port: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:
        threads = ["--n_threads", f"{self.threads}", "--n_threads_batch", f"{self.threads}"]
        # by default a request interrupts the previous one
        options = ["--n_ctx", f"{self.tokens}", "--interrupt_requests", "false", "--flash_attn", "true", *threads]
        where = ["--model", file_of(self.loaded), "--model_alias", self.model, "--port", f"{port}"]
        yield [LlamaCpp.interpreter(self.interpreter), "-m", "llama_cpp.server", *where, *options], {}


class FolderServer(Server):
    """A server that loads the model from a folder."""

    @cached_property
    def folder(self) -> str:
        """The model's folder, or its hub id. A model from a GGUF file is written once, so that a server that is started
        again finds what it compiled for this folder."""
        kept = ExitStack()
        weakref.finalize(self, kept.close)
        return kept.enter_context(written(self.loaded))


class VllmServer(FolderServer):
    """vLLM's server with the model's folder, as bfloat16, without compilation."""

    name = Vllm.name
    engine = Vllm
    usage = True
    compiled: ClassVar[bool] = False
    options: ClassVar[Sequence[str]] = ("--no-enable-prefix-caching",)

    @contextmanager
    def command(self, port: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:
        interpreter = Vllm.interpreter(self.interpreter)
        sizes = ["--max-model-len", f"{self.tokens}", "--max-num-seqs", f"{self.sessions}"]
        line = ["--model", self.folder, "--served-model-name", self.model, "--port", f"{port}", "--dtype", "bfloat16"]
        eager = [] if self.compiled else ["--enforce-eager"]
        line += ["--host", "127.0.0.1", *sizes, *eager, *self.options]
        variables = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        yield [interpreter, "-m", "vllm.entrypoints.openai.api_server", *line], variables


class CompiledVllmServer(VllmServer):
    """vLLM's server with compilation, which takes a minute at the start."""

    name = "vllm:compiled"
    compiled = True


class VllmForAgents(CompiledVllmServer):
    """vLLM's server with calls of tools, and with beginnings that are reused."""

    name = "vllm"
    options: ClassVar[Sequence[str]] = (
        "--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser",
        "hermes",
    )  # fmt: skip


class TransformersServer(FolderServer):
    """``transformers serve`` of the installed transformers, as bfloat16. It runs requests one after another."""

    name = "transformers"
    batching: ClassVar[bool] = False

    @property
    def model(self) -> str:
        return self.folder

    @contextmanager
    def command(self, port: int) -> Iterator[tuple[list[str], Mapping[str, str]]]:
        program = Path(sys.executable).with_name("transformers")
        if not program.exists() and shutil.which("transformers") is None:
            raise UsageError("'transformers serve' is not installed here: pip install 'transformers[serving]'.")
        line = [f"{program}", "serve", self.folder, "--host", "127.0.0.1", "--port", f"{port}"]
        yield [*line, "--dtype", "bfloat16", *(["--continuous-batching"] if self.batching else [])], {}


class BatchingTransformersServer(TransformersServer):
    """``transformers serve`` with continuous batching."""

    name = "transformers:batching"
    batching = True


SERVERS: dict[str, type[Server]] = {
    kind.name: kind
    for kind in (
        LlamaCppServer,
        IkLlamaServer,
        VllmServer,
        CompiledVllmServer,
        TransformersServer,
        BatchingTransformersServer,
    )
}
"""Servers by others, by name."""


def server_of(name: str) -> type[Server]:
    """Return the server called ``name``; raises UsageError for an unknown one."""
    if name not in SERVERS:
        raise unknown("peer", name, SERVERS)
    return SERVERS[name]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _wait(name: str, process: subprocess.Popen[bytes], url: str, said: IO[bytes]) -> None:
    """Wait until a server answers. Raises KvkeepError if it ends or exceeds :data:`START_S`."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        time.sleep(START_POLL_S)
        with suppress(OSError):
            try:
                urllib.request.urlopen(url, timeout=5).close()
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 503:  # the model is being loaded
                    continue
            return
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines() or ["it gave no reason"]
    how = "did not answer" if process.poll() is None else "ended"
    raise KvkeepError(f"The server {name} {how}: {lines[-1].rstrip('.')}.")


def _family(pid: int) -> Sequence[int]:
    """Return a process and its descendants."""
    every = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                every += _family(int(child))
    return every


def _status(pid: int, field: str) -> int:
    """Return the bytes of a field of a process's ``status``; 0 if the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return 0


def _pss(pid: int) -> int:
    with suppress(OSError):  # the process has ended
        return process_memory_of(Path(f"/proc/{pid}/smaps_rollup")).pss
    return 0
