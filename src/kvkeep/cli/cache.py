"""``kvkeep cache``: lists and manages the store of sessions and blocks."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvkeep.budget import size
from kvkeep.cli import options
from kvkeep.cli.output import note, print_json, show
from kvkeep.errors import SessionError, UsageError

if TYPE_CHECKING:
    from kvkeep.blocks.store import SessionInfo, Store

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a session, owner/name, or the path of its folder.")]
Exported = Annotated[Path, typer.Argument(metavar="FILE", help="File with an exported session or text.")]
NewFile = Annotated[Path, typer.Argument(metavar="FILE", help="File to write the session to.")]


@dataclass(frozen=True)
class StorePlace:
    """Where the store is."""

    sessions: options.Sessions = None

    def store(self) -> Store:
        """Return the named store, which exists, or the user's. Raises SessionError and UsageError."""
        from kvkeep.blocks.store import user_store

        if self.sessions is not None and not os.path.exists(self.sessions):
            raise SessionError(
                f"There is no folder '{self.sessions}'; give the folder of the sessions with --sessions."
            )
        store = user_store(self.sessions)
        store.check()
        return store

    def found(self, name: str) -> tuple[Store, str]:
        """Return the store of a session, which exists if it is a path, and its name there."""
        from kvkeep.blocks.store import place_of

        store, word = place_of(name, self.sessions)
        if word == name:
            return self.store(), word
        store.check()
        if not store.files(word).exists():
            raise SessionError(f"There is no session at '{name}'.")
        return store, word


@app.callback(invoke_without_command=True)
def cache(context: typer.Context) -> None:
    """List the saved sessions and their blocks; delete, check, export and import them.

    Without a command, it only lists them.
    """
    if context.invoked_subcommand is None:
        _list(StorePlace().store())


@app.command("list")
@options.command
def list_(place: StorePlace, json: options.Json = False) -> None:
    """List the sessions, last used first, and the size of the whole store."""
    from kvkeep.blocks import beginnings

    store = place.store()
    if not json:
        _list(store)
        return
    found, (blocks, count) = store.sessions(), store.blocks.count()
    total = {"blocks": blocks, "bytes": count, "quota": store.blocks.quota, "folder": str(store.folder)}
    kept = beginnings.stored(store.blocks)._asdict()
    print_json({"sessions": [_facts(info) for info in found], "beginnings": kept} | total)


def _list(store: Store) -> None:
    from kvkeep.blocks import beginnings

    found, (blocks, count) = store.sessions(), store.blocks.count()
    table = Table(box=None, header_style="bold")
    for heading in ("session", "size", "used", "saves", "tokens", "method", "budget", "model"):
        table.add_column(heading, justify="right" if heading in ("size", "saves", "tokens") else "left")
    for info in found:
        about = [str(info.saves), str(info.tokens), info.method or "", info.budget or "none", info.model or ""]
        rest = about if info.problem is None else ["", "", _problem(info), "", ""]
        table.add_row(info.name, size(info.bytes), _used(info), *map(Text, rest))
    if found:
        show(table)
    quota = "" if store.blocks.quota is None else f" of at most {size(store.blocks.quota)}"
    note(f"{_number(len(found), 'session')}; {_number(blocks, 'block')}, {size(count)}{quota}, in {store.folder}.")
    if (kept := beginnings.stored(store.blocks)).tokens:
        note(f"Prompts can begin with {kept.tokens:,} stored tokens ({size(kept.bytes)}).")


@app.command("show")
@options.command
def show_(name: Name, place: StorePlace, json: options.Json = False) -> None:
    """Show size, age, saves and cache of a session; the exit code is 1 if it cannot be read."""
    store, word = place.found(name)
    info = store.info(word)
    if json:
        print_json(_facts(info) | {"name": name})
    else:
        _show(info, name)
    if info.problem is not None and not info.in_use:
        raise typer.Exit(1)


def _show(info: SessionInfo, name: str) -> None:
    table = Table(box=None, show_header=False)
    lines = {"session": name, "folder": info.path, "size": size(info.bytes), "used": _used(info)}
    if info.problem is not None or info.created is None:
        lines["problem"] = info.problem or ""
    else:
        lines |= {"age": _age(info.created), "saves": str(info.saves), "tokens": str(info.tokens)}
        lines |= {"method": info.method or "", "budget": info.budget or "none", "model": info.model or ""}
        if info.missing:
            lines["missing"] = f"{_number(info.missing, 'block')}; the text will be read again"
    for what, value in lines.items():
        table.add_row(what, Text(value))
    show(table)


@app.command("delete")
@options.command
def delete(
    place: StorePlace,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Names of sessions, or owner/name.")] = None,
    unused: Annotated[
        bool, typer.Option("--unused", help="Delete blocks that belong to no session, and records of answers.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Delete sessions, and their blocks unless other sessions have them. A session in use is not deleted."""
    if not names and not unused:
        raise UsageError("Name the sessions to delete; 'kvkeep cache' lists them.")
    store = place.store()
    before = store.blocks.count()
    for name in names or ():
        store.remove(name)
    if unused:
        store.remove_unused()
    blocks, count = (max(old - new, 0) for old, new in zip(before, store.blocks.count(), strict=True))
    what = f"Deleted {', '.join(names or ['unused blocks'])}: {_number(blocks, 'block')}, {size(count)}."
    _done(what, {"deleted": names or [], "blocks": blocks, "bytes": count}, json)


@app.command("check")
@options.command
def check(place: StorePlace, json: options.Json = False) -> None:
    """Read every block and session, and remove damaged blocks; the exit code is 1 if something is damaged, and 0 if a
    session only lacks blocks, whose text will be read again."""
    from kvkeep.blocks.verify import verify

    found = verify(place.store())
    if json:
        print_json(asdict(found))
    else:
        for sentence in (*found.damaged, *found.other_version):
            note(sentence)
        for name, missing in found.incomplete.items():
            note(f"The session '{name}' lacks {_number(missing, 'block')}, whose text will be read again.")
        sound = f"{_number(found.blocks, 'block')}, {size(found.bytes)}, and {_number(found.sessions, 'session')}"
        note(f"{sound} are undamaged.")
    if found.damaged:
        raise typer.Exit(1)


@app.command("export")
@options.command
def export(name: Name, file: NewFile, place: StorePlace, json: options.Json = False) -> None:
    """Write a session and its blocks to a new file, for 'kvkeep cache import' on this or another machine."""
    from kvkeep.blocks import archive

    store, word = place.found(name)
    missing = archive.export(store, word, file)
    _done(f"Wrote {name} to {file}{_lacks(missing)}.", {"exported": name, "file": str(file), "missing": missing}, json)


@app.command("import")
@options.command
def import_(
    file: Exported,
    place: StorePlace,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of the session; of a text that was read ahead, its owner.",
            show_default="local, the owner of all texts of a server without keys",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Add an exported session or text, after checking every byte. Import files of people you trust only."""
    from kvkeep.blocks import archive
    from kvkeep.blocks.store import LOCAL_OWNER, place_of, user_store

    facts: dict[str, Any] = {"imported": name, "file": str(file)}
    if archive.has_text(file):
        owner = LOCAL_OWNER if name is None else name
        blocks, missing = archive.add_text(file, user_store(place.sessions), owner)
        what = f"{_number(blocks - missing, 'block')} of a text for {owner}"
        facts |= {"imported": owner, "blocks": blocks - missing}
    elif name is None:
        raise UsageError("The file contains a session; give it a name (kvkeep cache import FILE NAME).")
    else:
        missing, what = archive.add(file, *place_of(name, place.sessions)), name
    _done(f"Imported {file} as {what}{_lacks(missing)}.", facts | {"missing": missing}, json)


def _done(sentence: str, facts: dict[str, Any], json: bool) -> None:
    if json:
        print_json(facts)
    else:
        note(sentence)


def _facts(info: SessionInfo) -> dict[str, Any]:
    now = time.time()
    ages = {"unused_s": now - info.used, "age_s": None if info.created is None else now - info.created}
    return {name: value for name, value in asdict(info).items() if name not in ("used", "created")} | ages


def _problem(info: SessionInfo) -> str:
    from kvkeep.blocks.store import UNSAVED

    if info.other_version:
        return "of another version"
    return "never saved" if info.problem == UNSAVED else "cannot be read"


def _lacks(missing: int) -> str:
    return f" without {_number(missing, 'block')}, whose text will be read again" if missing else ""


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _used(info: SessionInfo) -> str:
    return "now" if info.in_use else f"{_age(info.used)} ago"


def _age(since: float) -> str:
    """Return the time since ``since`` as text in one unit."""
    passed = max(time.time() - since, 0)
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= scale:
            return f"{passed / scale:.0f} {unit}"
    return f"{passed:.0f} s"
