"""The command line: ``kvkeep COMMAND``. Each command is a module, imported when the command runs.

Other packages add commands by an entry point of the group ``kvkeep.commands`` that names a table like :data:`COMMANDS`.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import NoReturn

from kvkeep.cli import standard_streams
from kvkeep.errors import KvkeepError, UsageError, ran_out_of_memory
from kvkeep.plugins import how

COMMANDS = {
    "generate": ("kvkeep.cli.generate:generate", "Answer a prompt, or a question about a file, within a cache budget."),
    "chat": ("kvkeep.cli.chat.command:chat", "Chat with a model in the terminal, and save the conversation."),
    "serve": (
        "kvkeep.cli.serve.command:serve",
        "Serve conversations to clients of OpenAI and Anthropic over HTTP, all within one memory limit.",
    ),
    "warm": ("kvkeep.cli.warm:warm", "Prefill a long text, so that the next server begins with it."),
    "agent": ("kvkeep.cli.agent:agent", "Run Claude Code, Codex, opencode or Qwen Code on this machine's server."),
    "cache": (
        "kvkeep.cli.cache:app",
        "List the saved sessions and their blocks; delete, check, export and import them.",
    ),
    "plan": ("kvkeep.cli.plan:plan", "Show how many bytes every cache takes for a text, and which ones fit in memory."),
    "methods": ("kvkeep.cli.methods:methods", "List the methods: what they evict, store and recall."),
    "models": ("kvkeep.cli.models:models", "List the embedded models, and which of them are on this machine."),
    "demo": ("kvkeep.cli.demo:demo", "Compare five caches on a question about a long text."),
}
"""Commands by name: the location (``module:function``, or a Typer application) and the line in ``kvkeep --help``."""


_NO_MEMORY = "There is not enough memory ({}); use a smaller budget, text or model, or allow the process more memory."
LAB = ("verify", "prove", "bench", "compare", "inspect", "stream", "longchat", "recompute", "analyse", "lab")
"""Commands of the lab, a separate distribution (package ``kvkeep_lab``, ``pip install ./lab``)."""


def program() -> None:
    """Run the command line as a process. It exits without Python's teardown of two thousand modules, which takes half a
    second."""
    codes: list[int] = []  # none after an exception, which Python then reports
    atexit.register(_end, codes)  # registered first, so it runs last: after threads are joined
    try:
        main()
    except SystemExit as error:
        codes.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    codes.append(0)


def _end(codes: list[int]) -> None:
    with suppress(OSError, ValueError):  # Python reports what cannot be flushed
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if codes:
            os._exit(codes[0])


def main() -> None:
    """Run the command line. An error is one sentence on standard error, without a traceback."""
    try:
        _run()
    except KvkeepError as error:
        if not isinstance(error, MemoryError) and ran_out_of_memory(error):  # it was taken for something else
            _fail(_NO_MEMORY.format("the data could not be read"), 1)
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        standard_streams.discard(sys.stdout)
        sys.exit(1)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a library written in Rust raises no Exception
        if not ran_out_of_memory(error):
            raise
        _fail(_NO_MEMORY.format(str(error).strip().partition("\n")[0] or "MemoryError"), 1)


def _run() -> None:
    from kvkeep.native.library import check_environment
    from kvkeep.native.room import address_space_left, share_heap

    if missing := [package for package in ("typer", "rich") if find_spec(package) is None]:
        raise UsageError(f"The command line needs {' and '.join(missing)}: {how('cli')}.")
    from kvkeep.cli.lazy import application

    if address_space_left() is not None:
        share_heap()  # before there are threads
    standard_streams.prepare()
    check_environment()
    try:
        application(COMMANDS, LAB)(prog_name="kvkeep")
    except SystemExit:
        sys.stdout.flush()
        raise


def _fail(sentence: str, code: int) -> NoReturn:
    with suppress(OSError, AttributeError):
        print(f"kvkeep: {sentence}", file=sys.stderr, flush=True)
    sys.exit(code)
