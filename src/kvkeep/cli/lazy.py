"""A group of commands whose modules are imported when they are run: ``--help`` imports none of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

import kvkeep
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.plugins import PartlyLeftOut, each_plugin, first_line

GROUP = "kvkeep.commands"
Table = Mapping[str, tuple[str, str]]


def application(own: Table, lab: Sequence[str] = ()) -> Any:
    """Return the command line: ``own`` commands and those of installed packages. ``lab``: names of the lab's commands,
    for the error when it is not installed."""
    table = dict(own)
    if "_KVKEEP_COMPLETE" in os.environ:  # a shell asks, whose line is not to be written over
        logging.disable()

    def add(name: str, commands: Any) -> None:
        if not isinstance(commands, Mapping):
            raise UsageError(f"a table of commands, modules and lines of help is a dict, not {commands!r:.60}")
        for command, entry in commands.items():
            pair = isinstance(entry, Sequence) and len(entry) == 2 and not isinstance(entry, str)
            if not pair or not all(isinstance(text, str) for text in (command, *entry)):
                raise UsageError(f"the entry of {command!r} is no pair of a module and a line of help")
        free = {
            command: entry
            for command, entry in commands.items()
            if table.get(command, entry) == entry and (command not in lab or entry[0].startswith("kvkeep_lab."))
        }
        table.update(free)
        if taken := [command for command in commands if command not in free]:
            raise PartlyLeftOut(taken, "a command has this name already; choose another")

    each_plugin(GROUP, add)
    group = typer.main.get_command(_application())
    assert isinstance(group, Commands)
    Commands.table, Commands.missing = table, frozenset(lab) - table.keys()
    return group


def _application() -> typer.Typer:
    app = typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def top(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
        ] = False,
    ) -> None:
        """Run language models inside a hard budget for the key/value cache."""

    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvkeep {kvkeep.__version__}")
        raise typer.Exit


class Commands(TyperGroup):
    """Commands by name; ``table``: module and help of each; ``missing``: names of a package that is not installed."""

    table: ClassVar[Table] = {}
    missing: ClassVar[frozenset[str]] = frozenset()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the table's order."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a placeholder with the command's line of help."""
        if cmd_name not in self.table:
            return None
        stand_in = typer.Typer(add_completion=False)
        stand_in.command(name=cmd_name, help=self.table[cmd_name][1])(_nothing)
        return typer.main.get_command(stand_in)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command itself."""
        if args and args[0] in self.missing:
            raise UsageError(
                f"'kvkeep {args[0]}' comes with the lab, which is not installed: pip install 'kvkeep[lab]'."
            )
        name, stand_in, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, stand_in, rest
        where = self.table[name][0]
        try:
            return name, loaded(name, where), rest
        except Exception as error:  # of a package's module, or of a signature that Typer has no use for
            if isinstance(error, KvkeepError) or where.startswith(("kvkeep.", "kvkeep_lab.")):
                raise
            raise KvkeepError(f"The command '{name}' ({where}) is broken: {first_line(error)}.") from error


def loaded(name: str, where: str) -> Any:
    """Return the command at ``where``, "module:function" or a Typer application."""
    module, _, attribute = where.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name=name)(found)
        found = app
    command = typer.main.get_command(found)
    command.name = name
    command.context_settings.setdefault("help_option_names", ["-h", "--help"])
    return command


def _nothing() -> None:
    """The placeholder of a command that is not imported yet."""
