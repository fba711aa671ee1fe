"""``kvkeep sessions``: lists and manages the saved sessions of a folder."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import note, print_json, show
from kvkeep.errors import SessionError
from kvkeep.units import size

if TYPE_CHECKING:
    from kvkeep.decode.session_store import SessionInfo, SessionStore

app = typer.Typer(
    help="List, show, remove, export and import saved sessions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a session, or owner/name.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="File of a session.")]


@app.command("list")
def list_(
    owner: Annotated[str | None, typer.Option(help="List only the sessions of this owner.")] = None,
    sessions: options.Sessions = None,
    json: options.Json = False,
) -> None:
    """List the sessions, last used first."""
    from kvkeep.decode.session_store import UNSAVED

    if sessions is not None and not Path(sessions).is_dir():
        raise SessionError(f"There is no folder '{sessions}'; give the folder of the sessions with --sessions.")
    found = _store(sessions).sessions(owner)
    if json:
        print_json({"sessions": [_facts(info) for info in found]})
        return
    table = Table(box=None, header_style="bold")
    for heading in ("session", "size", "used", "turns", "tokens", "method", "budget", "model"):
        table.add_column(heading, justify="right" if heading in ("size", "turns", "tokens") else "left")
    for info in found:
        about = [str(info.turns), str(info.tokens), info.method or "", info.budget or "none", info.family or ""]
        rest = (
            about
            if info.problem is None
            else ["", "", "never saved" if info.problem == UNSAVED else "cannot be read", "", ""]
        )
        used = "now" if info.held else f"{_age(info.used)} ago"
        table.add_row(info.name, size(info.bytes), used, *rest)
    show(table)
    note(f"{len(found)} sessions, {size(sum(info.bytes for info in found))}.")


@app.command("show")
def show_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a session, owner/name, or path to a file.")],
    sessions: options.Sessions = None,
    json: options.Json = False,
) -> None:
    """Show size, age, turns and cache of a session; the exit code is 1 if it cannot be read."""
    info = _info(name, _store(sessions))
    if json:
        print_json(_facts(info))
    else:
        _show(info)
    if info.problem is not None and not info.held:
        raise typer.Exit(1)


def _show(info: SessionInfo) -> None:
    table = Table(box=None, show_header=False)
    lines = {
        "session": info.name,
        "file": info.path,
        "size": size(info.bytes),
        "used": "now" if info.held else f"{_age(info.used)} ago",
    }
    if info.problem is not None or info.created is None:
        lines["problem"] = info.problem or ""
    else:
        lines |= {"age": _age(info.created), "turns": str(info.turns), "tokens": str(info.tokens)}
        lines |= {"method": info.method or "", "budget": info.budget or "none", "model": info.family or ""}
    for what, value in lines.items():
        table.add_row(what, value)
    show(table)


@app.command("rm")
def rm(name: Name, sessions: options.Sessions = None, json: options.Json = False) -> None:
    """Remove a session, unless a program is using it."""
    _store(sessions).remove(name)
    _done(f"Removed {name}.", {"removed": name}, json)


@app.command("export")
def export(name: Name, file: File, sessions: options.Sessions = None, json: options.Json = False) -> None:
    """Copy a session to a file, for 'kvkeep sessions import', or for 'kvkeep chat --session' if it is a chat."""
    _store(sessions).export(name, file)
    _done(f"Wrote {name} to {file}.", {"exported": name, "file": str(file)}, json)


@app.command("import")
def import_(file: File, name: Name, sessions: options.Sessions = None, json: options.Json = False) -> None:
    """Copy a session from a file, after checking every byte."""
    _store(sessions).add(file, name)
    _done(f"Imported {file} as {name}.", {"imported": name, "file": str(file)}, json)


def _store(folder: str | None) -> SessionStore:
    from kvkeep.decode.session_store import SessionStore, sessions_folder

    return SessionStore(sessions_folder(folder))


def _info(name: str, store: SessionStore) -> SessionInfo:
    """Return the description of a session or a session file. ``name`` is a path if it is absolute, begins with a dot or
    a tilde, or has the suffix of session files."""
    from kvkeep.decode.session_store import SUFFIX, info_of

    if name.startswith((".", "~")) or name.endswith(SUFFIX) or Path(name).is_absolute():
        path = Path(name).expanduser()
        if not path.is_file():
            raise SessionError(f"There is no session at '{name}'.")
        info = info_of(path, name)
        if info.problem is not None and not name.endswith(SUFFIX):
            raise SessionError(info.problem)
        return info
    return store.info(name)


def _done(sentence: str, facts: dict[str, Any], json: bool) -> None:
    if json:
        print_json(facts)
    else:
        note(sentence)


def _facts(info: SessionInfo) -> dict[str, Any]:
    now = time.time()
    ages = {"unused_s": now - info.used, "age_s": None if info.created is None else now - info.created}
    return {name: value for name, value in asdict(info).items() if name not in ("used", "created", "mark")} | ages


def _age(since: float) -> str:
    """Return the time since ``since`` as text in one unit."""
    passed = max(time.time() - since, 0)
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= scale:
            return f"{passed / scale:.0f} {unit}"
    return f"{passed:.0f} s"
