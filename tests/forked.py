"""Programs that a test speaks to, signals and kills, in processes of their own.

By fork: importing torch and transformers takes five seconds of every new interpreter, and is here already. What a
process does at its very end, an interpreter of its own does: tests of that start one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from typing import Any


def started(run: Callable[[], object], env: Mapping[str, str] | None = None, **given: Any) -> subprocess.Popen[Any]:
    """Start ``run`` as if it were a program. ``given``: of :class:`subprocess.Popen`, which has set up the child's
    streams and session by the time it would start another program, and learns then that it did."""

    def child() -> None:
        code = 1
        try:
            _others_closed()
            _streams()
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_IGN)  # as an interpreter begins
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            run()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        except BaseException:  # nothing may go on as the test
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(code)

    return subprocess.Popen([sys.executable], preexec_fn=child, **given)


def exit_codes(*functions: Callable[[], object]) -> list[int | None]:
    """Run functions at the same time, each in a forked process, and return how these ended."""
    processes = [get_context("fork").Process(target=function) for function in functions]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def kvkeep(*arguments: str) -> Callable[[], None]:
    """The command line, imported anew: what it prints with looks at its streams as it is made."""

    def run() -> None:
        for name in [name for name in sys.modules if name.startswith("kvkeep.cli")]:
            del sys.modules[name]
        sys.argv = ["kvkeep", *arguments]
        from kvkeep.cli import main

        main()

    return run


def _others_closed() -> None:
    """What the test has open is its own; the numbers stay taken, since its objects may close them."""
    null = os.open(os.devnull, os.O_RDWR)
    for handle in range(3, 1024):
        with suppress(OSError):
            os.fstat(handle)
            if handle != null:
                os.dup2(null, handle)


def _streams() -> None:
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
