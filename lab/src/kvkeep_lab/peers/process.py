"""A peer in a process with a separate environment. Questions and answers are lines of JSON.

The other interpreter runs ``worker.py`` with the path of a worker's file. Neither file imports kvkeep.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError, UsageError, reason_of

_PROGRAM = Path(__file__).with_name("worker.py")


class PeerProcess:
    """A process that runs the peer called ``name``. python: an interpreter with the peer. worker: a file in this
    folder. environment: variables in addition to this process's.

    Raises UsageError for an interpreter that cannot run.
    """

    def __init__(self, name: str, python: str, worker: str, **environment: str) -> None:
        self.name, self.closed = name, False
        self._owner = os.getpid()  # a fork must not use its parent's pipes
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process; a pipe could fill up
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        try:
            self._process = subprocess.Popen(
                # -I excludes this folder's modules and kvkeep's packages from the import path
                [python, "-I", str(_PROGRAM), str(_PROGRAM.with_name(worker))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env={**os.environ, **offline, **environment},
                start_new_session=True,  # Ctrl-C does not reach the process; it ends with its input
            )
        except OSError as error:
            self._stderr.close()
            raise UsageError(f"'{python}' cannot be run: {reason_of(error)}.") from error

    def ask(self, **question: Any) -> dict[str, Any]:
        """Return the answer. Raises KvkeepError with the reason if there is none."""
        if self.closed:
            raise KvkeepError(f"The process that runs {self.name} ended earlier.")
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        except BaseException:  # after an interrupt, the next question would receive this answer
            self.close()
            raise
        if not line:
            self._stderr.seek(0)
            lines = self._stderr.read().decode(errors="replace").strip().splitlines() or ["it gave no reason"]
            self.close()
            raise KvkeepError(f"The process that runs {self.name} ended: {lines[-1].rstrip('.')}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KvkeepError(f"{self.name} failed: {answer['error'].rstrip('.')}.")
        return answer

    def close(self) -> None:
        """End the process, if this process started it."""
        if not self.closed and self._owner == os.getpid():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and the processes that it has started
            self._process.communicate()
            self._stderr.close()
        self.closed = True
