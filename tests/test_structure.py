"""What others build upon: the names that kvkeep exports, and which parts go together."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from families import tiny
from helpers import prompt, step

import kvkeep
from kvkeep import KeepCache, UsageError
from kvkeep.policies import registry
from kvkeep.policies.methods import parts, resolve

ROOT = Path(__file__).parents[1]


# -- names ------------------------------------------------------------------------------------------------


def test_every_exported_name_is_there_and_listed_in_order() -> None:
    assert sorted(kvkeep.__all__) == kvkeep.__all__ == sorted(kvkeep._HOME_OF)
    assert dir(kvkeep) == sorted([*kvkeep.__all__, "__version__"])
    for name in kvkeep.__all__:
        assert getattr(kvkeep, name).__module__.startswith("kvkeep."), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvkeep.nothing  # noqa: B018


def test_pages_name_what_is_exported() -> None:
    rooms = {path.stem for path in (ROOT / "src" / "kvkeep").iterdir()}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"\bkvkeep\.([A-Za-z]\w*)", page.read_text(encoding="utf-8")))
        assert named <= {*kvkeep.__all__, *rooms, "commands", "parts", "md", "git"}, page.name


def test_importing_kvkeep_imports_neither_torch_nor_transformers() -> None:
    """They take seconds; a name brings in what it needs when it is first asked for."""
    code = "import sys, kvkeep; kvkeep.UsageError; print(sorted({'torch', 'transformers', 'typer'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# -- parts ------------------------------------------------------------------------------------------------


def specs() -> Iterator[str]:
    """Every selector with every fate and every recall, and every preset with every recall."""
    known = parts()
    for recall in ("", *known["recalls"]):
        tail = f"+{recall}" if recall else ""
        for selector in known["selectors"]:
            if selector != "kvpress":  # which is none without the name of a press
                yield from (f"{selector}+{fate}{tail}" for fate in known["fates"])
        yield from (f"{preset}{tail}" for preset in registry.PRESETS)


def test_every_combination_works_or_says_why_not() -> None:
    """Of about 700; some read a text."""
    refused, taken = {}, []
    for spec in specs():
        try:
            resolve(spec)
        except UsageError as error:
            refused[spec] = str(error)
            continue
        taken.append(spec)
    for spec, reason in refused.items():
        assert reason.startswith(f"'{spec}' is not understood") and reason.endswith("."), reason
        why = reason.partition("is not understood")[2].lstrip(".: ")
        assert ". " not in why and len(why.split()) > 5, reason
    assert len(refused) < len(taken) > 400
    for number, spec in enumerate(taken):
        method = resolve(spec)
        given = {
            name: size for name, size in (("budget", 170), ("chunk", 32)) if name in method.options and method.budgeted
        }
        cache = KeepCache(tiny("llama"), spec, **given)
        if number % 17 == 0:
            for low, high in ((0, 200), (200, 201)):
                assert step("llama", cache, prompt(1, 201)[:, low:high]).isfinite().all(), spec
