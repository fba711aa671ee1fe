"""The command line: ``kvkeep COMMAND``. One file for each command."""

from __future__ import annotations

import sys

import typer

from kvkeep.cli.analyse import analyse
from kvkeep.cli.bench import bench
from kvkeep.cli.chat import chat
from kvkeep.cli.compare import compare
from kvkeep.cli.demo import demo
from kvkeep.cli.generate import generate
from kvkeep.cli.inspect import inspect
from kvkeep.cli.lab import app as lab
from kvkeep.cli.longchat import longchat
from kvkeep.cli.methods import methods
from kvkeep.cli.models import models
from kvkeep.cli.plan import plan
from kvkeep.cli.prove import prove
from kvkeep.cli.recompute import recompute
from kvkeep.cli.stream import stream
from kvkeep.cli.verify import verify
from kvkeep.errors import KvkeepError

app = typer.Typer(
    help="Run language models inside a hard budget for the key/value cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    *(generate, chat, plan, methods, models, demo),
    *(verify, prove, bench, compare, inspect, stream, longchat, recompute),
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(analyse, name="analyse")
app.add_typer(lab, name="lab")


def main() -> None:
    """Run the command line. Errors leave one sentence on standard error, and no traceback."""
    try:
        app()
    except KvkeepError as error:
        print(f"kvkeep: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
