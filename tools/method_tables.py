"""The tables of docs/methods.md, as Markdown: selectors, fates, recalls, named methods, and what can be combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvkeep.cli.methods import COLUMNS, given, plain, rows_of_methods

Rows = list[list[str]]  # the first row holds the headings


def printed(name: str) -> str:
    """Return the table of this name as Markdown."""
    return _markdown(TABLES[name]())


def _methods() -> Rows:
    """Return rows for the named methods, except plain selectors."""
    from kvkeep.policies.methods import parts

    columns = COLUMNS | {"source": "source"}
    rows = ({**row, "name": _code(row["name"])} for row in rows_of_methods() if row["name"] not in parts()["selectors"])
    return [list(columns.values()), *([row[key] for key in columns] for row in rows)]


_PARTS = {
    "selectors": {"leaves": "evicts"},
    "fates": {"label": "evicted entries are", "returns": "recalled, without a recall"},
    "recalls": {"label": "recalled"},
}


def _parts(kind: str) -> Rows:
    """Return rows for the selectors, fates or recalls, with their former names."""
    from kvkeep.policies.methods import parts
    from kvkeep.policies.names import FORMER

    rows = [[kind.removesuffix("s"), *_PARTS[kind].values(), "parameters", "source"]]
    for name, made in parts()[kind].items():
        called = [_code(name), *(f"(also {_code(former)})" for former, current in FORMER.items() if current == name)]
        about = (getattr(made, key) for key in _PARTS[kind])
        rows.append([" ".join(called), *about, _code(_parameters(made)), made.source])
    return rows


def _combinations() -> Rows:
    """Return a row for each fate: its selectors, and the exactness without a recall and with each recall.

    Parts have default parameters, and those of a preset if they change the row. Numbered reasons for refusals follow.
    """
    from kvkeep.policies.methods import combined, parts
    from kvkeep.policies.registry import PRESETS, Evicted
    from kvkeep.policies.specs import required

    selectors, fates, recalls = (
        {name: made() for name, made in registry.items() if not required(made)} for registry in parts().values()
    )
    names = {type(fate): name for name, fate in fates.items()}
    for preset in PRESETS.values():
        given = ",".join(f"{key}={value}" for key, value in preset.defaults.items())
        if given and preset.fate in names:  # a preset's fate may have no name
            fates[f"{names[preset.fate]}:{given}"] = preset.fate(**preset.defaults)
    reasons: list[str] = []

    def answer(selector: Any, fate: Any, recall: Any) -> str:
        method = combined("", selector, fate, recall)
        if (reason := method.refusal()) is None:
            return str(method.exactness)
        if reason not in reasons:
            reasons.append(reason)
        return f"no [{reasons.index(reason) + 1}]"

    rows: dict[str, list[str]] = {}
    for name, fate in fates.items():
        plain = {key: answer(selector, fate, Evicted()) for key, selector in selectors.items()}
        refused = [key for key, text in plain.items() if text.startswith("no")]
        accepted = [key for key in selectors if key not in refused]
        which = "all"
        if refused:
            which = f"all but {_listed(refused)}" if len(refused) < len(accepted) else f"only {_listed(accepted)}"
            which += f" [{', '.join(dict.fromkeys(plain[key].strip('no []') for key in refused))}]"
        row = [which, _distinct(plain[key] for key in accepted)]
        row += [_distinct(answer(selectors[key], fate, recall) for key in accepted) for recall in recalls.values()]
        if rows.get(name.partition(":")[0]) != row:
            rows[name] = row
    heading = ["fate", "selectors", "alone", *(f"+{name}" for name in recalls)]
    table = [heading, *([_code(name), *row] for name, row in rows.items())]
    return [*table, *([f"[{number}] {reason}"] for number, reason in enumerate(reasons, 1))]


TABLES: dict[str, Callable[[], Rows]] = {
    "methods": _methods,
    **{kind: partial(_parts, kind) for kind in _PARTS},
    "combinations": _combinations,
}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(_code(name) for name in names)


def _distinct(answers: Any) -> str:
    return ", ".join(dict.fromkeys(answers)) or "-"


def _parameters(made: type[Any]) -> str:
    from kvkeep.policies.specs import parameters

    return given({key: plain(value) for key, value in parameters(made).items()})


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _markdown(rows: Rows) -> str:
    """Return rows as a Markdown table; rows with one cell become a list below it."""
    lines = [f"| {' | '.join(row)} |" for row in rows if len(row) > 1]
    lines.insert(1, "| " + " | ".join("---" for _ in rows[0]) + " |")
    notes = [f"* {row[0]}" for row in rows if len(row) == 1]
    return "\n".join([*lines, *(["", *notes] if notes else [])])
