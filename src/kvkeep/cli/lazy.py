"""A group of commands that imports a command's module when it runs; ``kvkeep --help`` imports none."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import kvkeep
from kvkeep.errors import KvkeepError, UsageError, unknown
from kvkeep.plugins import PartlyLeftOut, each_plugin, first_line, how

GROUP = "kvkeep.commands"
Table = Mapping[str, tuple[str, str]]
"""Commands by name: the location (``module:function``, or a Typer application) and the line of help."""


class Commands(TyperGroup):
    """The commands of a table."""

    table: Table = MappingProxyType({})
    missing: frozenset[str] = frozenset()
    """Names of the lab's commands if the lab is missing."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the table's order."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a placeholder that has only the command's line of help."""
        return TyperCommand(cmd_name, help=self.table[cmd_name][1]) if cmd_name in self.table else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command itself."""
        if args and args[0] in self.missing:
            raise UsageError(f"'kvkeep {args[0]}' needs the lab, which is not installed: {how('lab')}.")
        if args and not args[0].startswith("-") and args[0] not in self.table:
            raise unknown("command", args[0], self.table, "'kvkeep --help'")
        name, placeholder, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, placeholder, rest
        where = self.table[name][0]
        try:
            return name, loaded(name, where), rest
        except Exception as error:  # from a package's module, or from Typer for an unsupported signature
            if isinstance(error, KvkeepError) or where.startswith(("kvkeep.", "kvkeep_lab.")):
                raise
            raise KvkeepError(f"The command '{name}' ({where}) is broken: {first_line(error)}.") from error


def application(commands: Table, lab: Sequence[str] = ()) -> Commands:
    """Return the command line with ``commands`` and the commands of installed packages. lab: names of the lab's
    commands, for the error message if the lab is missing."""
    if "_KVKEEP_COMPLETE" in os.environ:  # a shell asks for completions: warnings would overwrite its prompt
        logging.disable()
    table = dict(commands)

    def add(name: str, added: Any) -> None:
        if not isinstance(added, Mapping):
            raise UsageError(f"a table of commands, modules and lines of help is a dict, not {added!r:.60}")
        taken = []
        for command, (where, line) in added.items():
            theirs = command in lab and not where.startswith("kvkeep_lab.")
            if theirs or table.setdefault(command, (where, line)) != (where, line):
                taken.append(command)
        if taken:
            raise PartlyLeftOut(taken, "a command has this name already; choose another")

    each_plugin(GROUP, add)
    group = typer.main.get_command(_application())
    assert isinstance(group, Commands)
    group.table, group.missing = table, frozenset(lab) - table.keys()
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
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Run language models inside a hard budget for the key/value cache."""

    return app


def _version(requested: bool) -> None:
    if requested:
        print(f"kvkeep {kvkeep.__version__}")
        raise typer.Exit


def loaded(name: str, where: str) -> Any:
    """Return the command at ``where``, "module:function" or a Typer application."""
    module, _, attribute = where.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name=name)(found)
        found = app
    command: Any = typer.main.get_command(found)
    command.name = name
    command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", command.help or "")  # Typer keeps the line breaks of a docstring
    command.context_settings.setdefault("help_option_names", ["-h", "--help"])
    return command
