"""The command line: ``kvkeep COMMAND``. One file for each command, imported when it is run.

Other packages add commands by an entry point of the group ``kvkeep.commands`` that names a table like :data:`COMMANDS`.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import NoReturn

from kvkeep.errors import KvkeepError
from kvkeep.native.library import check_environment

COMMANDS = {
    "generate": ("kvkeep.cli.generate:generate", "Answer a prompt, or a question about a file, inside a cache budget."),
    "chat": ("kvkeep.cli.chat.command:chat", "Talk with a model; Ctrl-C stops an answer, not the program."),
    "serve": ("kvkeep.cli.serve.command:serve", "Serve conversations over HTTP within one memory to OpenAI's clients."),
    "sessions": ("kvkeep.cli.sessions:app", "List, show, remove, export and import saved sessions."),
    "plan": ("kvkeep.cli.plan:plan", "Predict bytes and times of every cache that fits in a memory."),
    "capacity": ("kvkeep.cli.capacity:capacity", "Predict how many sessions a machine carries, by method and length."),
    "calibrate": ("kvkeep.cli.calibrate:calibrate", "Measure this machine once, for the times that plans predict."),
    "methods": ("kvkeep.cli.methods:methods", "List the methods: what they evict, store and recall."),
    "models": ("kvkeep.cli.models:models", "List the embedded models, and whether they are on this machine."),
    "demo": ("kvkeep.cli.demo:demo", "Answer a question about a long text, with the full cache and within a budget."),
}
"""Name: where the command is (``module:function``, or a Typer application), and its line in ``kvkeep --help``."""


LAB = ("verify", "prove", "bench", "compare", "inspect", "stream", "longchat", "recompute", "analyse", "lab")
"""Commands of the lab, a distribution of its own (package ``kvkeep_lab``, ``pip install 'kvkeep[lab]'``)."""


def program() -> None:
    """Run the command line as a process of its own, which ends without taking two thousand modules apart."""
    codes: list[int] = []
    atexit.register(_end, codes)  # the first one, which runs last
    try:
        main()
    except SystemExit as error:
        codes.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    codes.append(0)


def _end(codes: list[int]) -> None:
    """End the process with the code that ``codes`` holds: threads are joined by now, and other functions of
    :mod:`atexit` have run. Without one an exception ended the program, and Python does the rest."""
    if not codes:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return  # as Python reports it
    os._exit(codes[0])


def main() -> None:
    """Run the command line. Errors leave one sentence on standard error, and no traceback."""
    from kvkeep.cli import standard_streams

    if missing := [package for package in ("typer", "rich") if find_spec(package) is None]:
        print(
            f"kvkeep: the command line needs {' and '.join(missing)}: pip install 'kvkeep[cli]'.",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        standard_streams.prepare()
        check_environment()
        _run()
    except KvkeepError as error:
        _leave(str(error), error.exit_code)
    except BrokenPipeError:
        standard_streams.drop(sys.stdout)
        sys.exit(1)
    except (OSError, MemoryError, RuntimeError) as error:
        if (refusal := standard_streams.undelivered()) is not None:
            _leave(f"Standard output cannot be written to: {(refusal.strerror or str(refusal)).lower()}.", 1)
        if not out_of_memory(error):
            raise
        first = str(error).strip().partition("\n")[0] or "MemoryError"
        _leave(f"There is not enough memory for this ({first}); give a smaller budget, text or model.", 1)


def _run() -> None:
    """Run the command and flush standard output, also after an error."""
    from kvkeep.cli.lazy import application

    try:
        application(COMMANDS, LAB)(prog_name="kvkeep")
    except SystemExit:
        sys.stdout.flush()
        raise


def _leave(sentence: str, code: int) -> NoReturn:
    with suppress(OSError, AttributeError):
        print(f"kvkeep: {sentence}", file=sys.stderr, flush=True)
    sys.exit(code)


def out_of_memory(error: BaseException) -> bool:
    """Return whether host or device memory is exhausted; torch has no common error class."""
    stated = "can't allocate memory" in str(error) or "not enough memory" in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or stated
