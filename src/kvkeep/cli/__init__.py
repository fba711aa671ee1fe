"""The command line: ``kvkeep COMMAND``. One file for each command, imported when it is run.

Other packages add commands by an entry point of the group ``kvkeep.commands`` that names a table like :data:`COMMANDS`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from kvkeep.errors import KvkeepError

COMMANDS = {
    "generate": ("kvkeep.cli.generate:generate", "Answer a prompt, or a question about a file, inside a cache budget."),
    "chat": ("kvkeep.cli.chat:chat", "Talk with a model; Ctrl-C stops an answer, not the program."),
    "plan": ("kvkeep.cli.plan:plan", "Predict bytes and times of every cache that fits in a memory."),
    "methods": ("kvkeep.cli.methods:methods", "List the methods: who leaves, what becomes of it, how it comes back."),
    "models": ("kvkeep.cli.models:models", "List the embedded models, and whether they are on this machine."),
    "demo": ("kvkeep.cli.demo:demo", "Answer a question about a long text, with the full cache and within a budget."),
}
"""Name: where the command is (``module:function``, or a Typer application), and its line in ``kvkeep --help``."""


def main() -> None:
    """Run the command line. Errors leave one sentence on standard error, and no traceback."""
    if missing := [package for package in ("typer", "rich") if find_spec(package) is None]:
        print(
            f"kvkeep: the command line needs {' and '.join(missing)}: pip install 'kvkeep[cli]'.",
            file=sys.stderr,
        )
        sys.exit(2)
    from kvkeep.cli.lazy import application

    try:
        application(COMMANDS)()
    except KvkeepError as error:
        print(f"kvkeep: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
