"""Studies that time engines by others in the same rounds as kvkeep's caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import Field

from kvkeep_lab.peers.engines import LlamaCpp, PeerEngine, Vllm, opened
from kvkeep_lab.studies.base import EngineName, Study, Trial


class EngineStudy(Study):
    """A study with options for engines by others and their interpreters."""

    peers: list[EngineName] | None = Field(
        None, description="other engines to time in the same rounds: llama.cpp, ik_llama.cpp, vllm, vllm:compiled"
    )
    llama_cpp: str | None = Field(
        None, description=f"Python interpreter of an environment with llama.cpp; by default ${LlamaCpp.python}"
    )
    vllm: str | None = Field(
        None, description=f"Python interpreter of an environment with vLLM; by default ${Vllm.python}"
    )

    @property
    def interpreters(self) -> dict[str, str | None]:
        """The given interpreters, by the environment variable that each overrides."""
        return {LlamaCpp.python: self.llama_cpp, Vllm.python: self.vllm}

    @contextmanager
    def engines(self, trial: Trial, tokens: int, rows: int = 1) -> Iterator[tuple[Sequence[PeerEngine], list[str]]]:
        """Open the engines for the block. Yield the opened engines, and a sentence for each engine: its version, or the
        reason why it is missing. tokens: maximum tokens of prompt and steps. rows: maximum rows."""
        with opened(self.peers or (), trial.loaded, self.interpreters, tokens, rows) as (engines, absent):
            versions = {name: version for engine in engines for name, version in engine.versions.items()}
            yield engines, [*(f"{name} {version}." for name, version in versions.items()), *absent]
