"""NVIDIA's kvpress (https://github.com/NVIDIA/kvpress), run in a process with a separate environment.

``kvpress:NAME`` is a method of kvkeep instead: there a press only chooses the entries within kvkeep's budget.
"""

from __future__ import annotations

import atexit
import base64
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.memory.meter import Memory
from kvkeep_lab.peers.base import Peer, PeerReader, entries_of
from kvkeep_lab.peers.process import PeerProcess

PYTHON = "KVKEEP_KVPRESS_PYTHON"
"""Environment variable with the path of the interpreter that has kvpress."""


@dataclass(frozen=True)
class KvpressPeer(Peer):
    """A press, run by kvpress: one pass over the complete prompt, pruned layer by layer during the pass.

    The budget is the number of prompt entries that are kept, including ``unseen``. Generated tokens are added to it and
    are never pruned. The process starts when it is first needed, and serves all prompts of the model.
    """

    about: ClassVar[str] = "a press of NVIDIA's kvpress, by kvpress itself: one pass, then pruned (peer-kvpress:snapkv)"
    needs: ClassVar[str] = f"an interpreter that has kvpress (--kvpress or {PYTHON})"

    press: str
    """Class of the package or its short name ("SnapKVPress", "snapkv"); "full" does not prune."""
    unseen: int = 0
    """Number of last prompt tokens that are read after the others are pruned; 0: the press sees the complete prompt."""
    options: str = ""
    """Parameters of the press as text ("window_size=32,kernel_size=7")."""

    @classmethod
    def from_spec(cls, text: str) -> KvpressPeer:
        """Return the peer for ``NAME`` or ``NAME,PARAMETER=VALUE,...``; raises UsageError without a name."""
        press, *given = text.split(",")
        if not press or "=" in press:
            raise UsageError(
                "'peer-kvpress' needs the name of a press: peer-kvpress:snapkv, or :full to prune nothing."
            )
        unseen = [part.removeprefix("unseen=") for part in given if part.startswith("unseen=")]
        if not all(part.isdigit() for part in unseen):
            raise UsageError(f"'peer-kvpress:{text}' is not understood: unseen is a whole number, not '{unseen[0]}'.")
        options = ",".join(part for part in given if not part.startswith("unseen="))
        return cls(press, int(unseen[-1]) if unseen else 0, options)

    @property
    def takes(self) -> tuple[str, ...]:
        """The accepted options: ("budget",), or () for "full"."""
        return () if self.press == "full" else ("budget",)

    @property
    def versions(self) -> dict[str, str]:
        return {} if KvpressProcess.current is None else KvpressProcess.current.versions

    def open(self, model: Any, budget: str | None, context: int) -> PeerReader:
        entries = None if budget is None else entries_of(model, budget, context)
        if entries is not None and entries <= self.unseen:
            raise UsageError(
                f"A budget of {entries} entries is too small beside the {self.unseen} unseen tokens; give a larger one."
            )
        return _Remote(KvpressProcess.serving(model), self, entries)


class _Remote(PeerReader):
    def __init__(self, process: KvpressProcess, peer: KvpressPeer, entries: int | None) -> None:
        self.process, self.peer, self.entries = process, peer, entries
        self.exactness = Exactness.EXACT if entries is None else Exactness.LOSSY
        self._last: dict[str, Any] = {}

    def step(self, ids: Tensor) -> tuple[Tensor, float]:
        given = ids[0].tolist()
        if not self._last:
            press = "" if self.entries is None else self.peer.press
            keep = len(given) if self.entries is None else self.entries - self.peer.unseen
            self._last = self.process.ask(
                do="read", ids=given, press=press, options=self.peer.options, keep=keep, unseen=self.peer.unseen
            )
            self.process.reader = self
        elif self.process.reader is not self:
            raise KvkeepError("kvpress reads one prompt at a time, and another prompt is in progress.")
        else:
            self._last = self.process.ask(do="next", token=given[0])
        logits = torch.frombuffer(bytearray(base64.b64decode(self._last["logits"])), dtype=torch.float32)
        return logits, self._last["seconds"]

    def memory(self) -> Memory:
        resident, largest, peak = (self._last.get(name, 0) for name in ("held", "largest", "peak"))
        return Memory(resident, peak_cache_bytes=peak, peak_workspace_bytes=largest)


class KvpressProcess(PeerProcess):
    """The process of one model."""

    current: ClassVar[KvpressProcess | None] = None

    @classmethod
    def serving(cls, model: Any) -> KvpressProcess:
        """Return the process for ``model``; only one runs at a time. Raises UsageError if no interpreter is given or
        the model has no folder, KvkeepError if the process fails to start."""
        python, folder = os.environ.get(PYTHON, ""), str(model.name_or_path)
        if not python:
            raise UsageError(
                "kvpress needs a separate environment, because it requires another version of transformers: "
                f"create one, pip install kvpress there, and give its interpreter (--kvpress PYTHON, or {PYTHON})."
            )
        if not folder:
            raise UsageError("kvpress loads the model itself, and this model has no name or folder to load it from.")
        about = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
        key = (os.getpid(), python, folder, *about.values())  # a fork must not use its parent's pipes
        if cls.current is None or cls.current.closed or cls.current.key != key:
            cls.stop()
            cls.current = cls(python, key)
            try:
                readable = cls.current.folder(model, folder)
                answer = cls.current.ask(do="load", folder=readable, threads=torch.get_num_threads(), **about)
            except KvkeepError:
                cls.stop()
                raise
            cls.current.versions = answer["versions"]
        return cls.current

    @classmethod
    def stop(cls) -> None:
        """End the process, if there is one."""
        if cls.current is not None:
            cls.current.close()
        cls.current = None

    def __init__(self, python: str, key: tuple[Any, ...]) -> None:
        super().__init__("kvpress", python, "kvpress_worker.py")
        self.key, self.versions, self.reader = key, dict[str, str](), object()
        self._copy: tempfile.TemporaryDirectory[str] | None = None

    def folder(self, model: Any, folder: str) -> str:
        """Return a folder or hub id with the weights of ``model``. A model from a GGUF file is written to a folder."""
        if not Path(folder).is_dir() or list(Path(folder).glob("*.safetensors")):
            return folder
        self._copy = tempfile.TemporaryDirectory()
        model.save_pretrained(self._copy.name)
        return self._copy.name

    def close(self) -> None:
        """End the process and remove its temporary files."""
        super().close()
        if self._copy is not None:
            self._copy.cleanup()


atexit.register(KvpressProcess.stop)
