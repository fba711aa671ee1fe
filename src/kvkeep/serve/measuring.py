"""Measures the machine once, while a server is idle. Until then, predicted times are estimates."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from kvkeep.errors import KvkeepError
from kvkeep.files import write_whole
from kvkeep.models.weight_memory import free_memory
from kvkeep.plan.background import BUSY
from kvkeep.plan.estimate import busy, named
from kvkeep.plan.rates import failure_file, measured, rates_file
from kvkeep.private_files import make_folder
from kvkeep.serve.engine import Engine

IDLE_S = 60.0
"""Seconds without an answer before a measurement begins."""
IDLE_POLL_S = 1.0
"""Seconds between checks whether the server is idle."""
REQUEST_POLL_S = 0.05
"""Seconds between checks for a new request during a measurement."""
TIMEOUT_S = 900.0
MAX_ATTEMPTS = 5
"""Interrupted measurements after which the server gives up."""
NEEDED_BYTES = 4 * 10**9
"""Bytes that must be free. A measurement uses less than half of them."""


class Measuring:
    """Measures this machine in a separate process while ``engine`` is idle, unless it was measured or has failed
    before.

    A request ends the measurement at once. The measurement restarts when the server is idle again. tell: called with a
    line when the measurement has ended or failed.
    """

    def __init__(self, engine: Engine, tell: Callable[[str], None]) -> None:
        parameter = next(engine.model.parameters())
        self.engine, self.tell = engine, tell
        self.device, self.dtype = str(parameter.device), parameter.dtype
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-measuring", daemon=True)

    def start(self) -> None:
        """Wait for idleness in a new thread. Only ``kvkeep calibrate`` measures accelerators, because a measurement
        there cannot make way for answers."""
        if self.device == "cpu":
            self._thread.start()

    def stop(self) -> None:
        """End the measurement or the wait."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            for _ in range(MAX_ATTEMPTS):
                if not self._wait_until_idle() or not self._needed() or self._measure():
                    return
        except (OSError, KvkeepError) as error:
            self._failed(str(error))

    def _needed(self) -> bool:
        """Return whether there are no rates yet, a place to save them, and no record of a failed measurement."""
        folder = rates_file(self.device, self.dtype).parent
        make_folder(folder)
        if not os.access(folder, os.W_OK) or failure_file(self.device, self.dtype).exists():
            return False
        return measured(self.device, self.dtype) is None

    def _wait_until_idle(self) -> bool:
        """Wait until the server has been idle for a while and the machine has resources; return False when stopped."""
        since = time.monotonic()
        while not self._stop.wait(IDLE_POLL_S):
            if self._busy() or _loaded():
                since = time.monotonic()
            elif time.monotonic() - since >= IDLE_S:
                return True
        return False

    def _busy(self) -> bool:
        return bool(self.engine.running) or self.engine.waiting > 0

    def _measure(self) -> bool:
        """Measure; return False if a request or another measuring process interrupted it."""
        command = [sys.executable, "-m", "kvkeep.plan.background"]
        command += [self.device, named(self.dtype), f"{torch.get_num_threads()}"]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, stderr=errors, start_new_session=True, **streams)
            try:
                deadline = time.monotonic() + TIMEOUT_S
                while process.poll() is None and time.monotonic() < deadline:
                    if self._stop.wait(REQUEST_POLL_S):
                        return True
                    if self._busy():
                        return False
            finally:
                process.kill()
                code = process.wait()
                assert process.stdin is not None
                process.stdin.close()
            if code == BUSY:
                return False
            late = time.monotonic() >= deadline
            if code == 0:
                file = rates_file(self.device, self.dtype)
                self.tell(f"the measurement of this machine is complete; plans use it from now on ({file})")
            else:
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                self._failed(f"more than {TIMEOUT_S:.0f} s" if late else said or f"exit code {code}")
        return True

    def _failed(self, reason: str) -> None:
        """Report the failure once, to the user and to later processes."""
        self.tell(f"the measurement of this machine failed ({reason}); predicted times stay estimates")
        with suppress(OSError, KvkeepError):
            content = f"{reason}\n".encode()
            write_whole(failure_file(self.device, self.dtype), lambda file: file.write(content), private=True)


def _loaded() -> bool:
    """Return whether other programs keep the machine busy, or too little memory is free."""
    return busy() or free_memory(torch.device("cpu")) < NEEDED_BYTES
