"""Packages add methods and commands by entry points: a real one in a folder, as an installer would lay it there."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import pytest
from forked import kvkeep, started
from running import bearer, post, program

from kvkeep.policies.methods import load_plugins

Run = Callable[..., tuple[int, str, str]]

SELECTOR = """
    from dataclasses import dataclass
    import kvkeep
    from kvkeep.policies.fates.checkpoint import Checkpointed

    @dataclass(frozen=True)
    class LargeValues(kvkeep.Selector):
        '''Those with the largest values, and the newest.'''

        newest: int = 16

        leaves = "small values"
        source = "Values and Norms, arXiv:2601.00001"
        needs_kv = True

        def rank(self, entries):
            norms = entries.values.float().norm(dim=-1)
            return norms.masked_fill(entries.slots >= entries.length - self.newest, float("inf"))

    @dataclass(frozen=True)
    class Sized(kvkeep.Selector):
        size: int

        leaves = "some"
        source = "nowhere"

        def rank(self, entries):
            return entries.slots[:, : self.size]  # a fault that shows when it runs

    @dataclass(frozen=True)
    class Faulty(LargeValues):
        def budgets(self, model, geometry, entries):
            raise RuntimeError("no budgets")

    VALUES_CHECKED = kvkeep.Preset(LargeValues(), Checkpointed, "Checked.", "here")
    COMMANDS = {"norms": ("acme_kv:norms", "Print a norm."), "torn": ("acme_kv:torn", "Fails.")}

    def norms(count: int = 3) -> None:
        print(count)
    """

BROKEN = """
    import sys
    from dataclasses import dataclass
    from typing import ClassVar
    import kvkeep

    @dataclass(frozen=True)
    class Unsaid(kvkeep.Selector):
        source: ClassVar[str] = "says not who leaves"

    @dataclass(frozen=True)
    class Untyped(kvkeep.Selector):
        leaves: ClassVar[str] = "the oldest"
        source: ClassVar[str] = "has a parameter of an unknown type"
        scores_arrivals: ClassVar[bool] = True
        count: "Nothing" = 3

    @dataclass(frozen=True)
    class Rankless(kvkeep.Selector):
        leaves: ClassVar[str] = "whoever"
        source: ClassVar[str] = "has no rank"

    NORMS = ("acme_kv:norms", "Print a norm.")
    TAKEN = {"chat": NORMS, "prove": NORMS, "own": NORMS}
    PAIRLESS = {"pairless": "a"}

    def __getattr__(name):
        raise ImportError("no such part\\nand more lines")
    """

ENTRIES = """
    [kvkeep.parts]
    large-values = acme_kv:LargeValues
    sized = acme_kv:Sized
    values-checked = acme_kv:VALUES_CHECKED
    faulty = acme_kv:Faulty
    [kvkeep.commands]
    acme = acme_kv:COMMANDS
    """

WRONG = """
    [kvkeep.parts]
    missing = no_such_module:Part
    leaving = leaving:Part
    unsaid = broken_kv:Unsaid
    untyped = broken_kv:Untyped
    rankless = broken_kv:Rankless
    nothing = broken_kv:Nothing
    h2o = acme_kv:LargeValues
    full+more = acme_kv:LargeValues
    [kvkeep.commands]
    broken = broken_kv:COMMANDS
    odd = broken_kv:__name__
    some = broken_kv:TAKEN
    pairless = broken_kv:PAIRLESS
    """


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None) -> Iterator[Path]:
    """A folder on the path with two distributions, one of which is broken."""
    folder = tmp_path / "site"
    for name, entries in (("acme-kv", ENTRIES), ("broken-kv", WRONG)):
        info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(dedent(entries))
    for name, source in (("acme_kv", SELECTOR), ("broken_kv", BROKEN), ("leaving", "import sys; sys.exit(3)")):
        (folder / f"{name}.py").write_text(dedent(source))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    load_plugins.cache_clear()
    yield folder
    load_plugins.cache_clear()
    for name in ("acme_kv", "broken_kv"):
        sys.modules.pop(name, None)


def forked_kvkeep(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """The command line in a process that has loaded no plugins and prints its warnings."""

    def run() -> None:
        logging.root.handlers.clear()
        load_plugins.cache_clear()
        kvkeep(*arguments)()

    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = started(run, env={**os.environ, **variables}, **pipes)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_a_method_of_a_package_reaches_every_command(packages: Path, run: Run, model_folder: Path) -> None:
    model = ("-m", str(model_folder))

    def answered(*arguments: str, stdin: str = "") -> str:
        code, out, err = run(*arguments, stdin=stdin)
        assert code == 0, (arguments, err)
        return out

    found = json.loads(answered("methods", "--json"))
    assert {"large-values", "values-checked"} <= {row["name"] for row in found["methods"]}
    assert found["selectors"]["sized"] == {"size": None} and found["selectors"]["large-values"] == {"newest": 16}
    assert "2601.00001" in answered("methods", "large-values")
    assert "2601.00001" in answered("methods", "--bibtex", "large-values:newest=4+pages,h2o")
    method = "large-values:newest=4"
    common = (*model, "-n", "3", "--json")
    made = answered("generate", *common, "-p", "the of", "-x", f"{method}+quantize:4", "-b", "80")
    assert json.loads(made)["class"] == "lossy"
    stdin = f"the of\n/method {method} 20\nof\n"
    assert len(answered("chat", *model, "-n", "3", "-b", "16", "-x", "h2o", stdin=stdin).splitlines()) == 2
    plan = json.loads(answered("plan", *model, "-n", "300", "--memory", "60KB", "--json"))
    assert {"large-values", "values-checked"} <= (planned := {row["method"] for row in plan["rows"]})
    assert "faulty" not in planned and plan["left_out"]["faulty"] == "RuntimeError: no budgets"
    with program(*model, "--method", method, "--budget", "32", "--memory", "10MB", fork=True) as server:
        listed = httpx.get(f"{server.address}/v1/methods", headers=bearer()).json()
        assert listed["default"]["method"] == method and "large-values" in {one["name"] for one in listed["data"]}
        own = {"kvkeep": {"method": "large-values", "budget": "20"}}
        body = {"model": server.model, "prompt": "the of and", "max_tokens": 2, **own}
        answer = post(server.address, body, path="/v1/completions")
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0, answer.text


def test_a_broken_package_takes_nothing_with_it(packages: Path) -> None:
    code, out, err = forked_kvkeep("methods", "--json")
    names = {row["name"] for row in json.loads(out)["methods"]}
    assert code == 0 and {"h2o", "full", "large-values"} <= names
    assert not {"missing", "leaving", "unsaid", "untyped", "nothing", "full+more", "rankless"} & names
    lines = err.splitlines()
    said = re.compile(r"'.+ of the package 'broken-kv' (is|are) left out: ")
    assert len(lines) == 12 and all(map(said.match, lines)), err
    for name, reason in (
        ("missing", "No module named 'no_such_module'"),
        ("leaving", "SystemExit: 3"),
        ("unsaid", "does not say its leaves"),
        ("untyped", "name 'Nothing' is not defined"),
        ("nothing", "ImportError: no such part"),
        ("h2o", "another part already"),
        ("broken", "no such part"),
        ("rankless", "does not implement rank, and has no scores"),
        ("odd", "is a dict, not 'broken_kv'"),
        ("pairless", "ValueError: not enough values to unpack"),
        ("chat", "'prove' (broken_kv:TAKEN) of the package 'broken-kv' are left out: a command has this name already"),
    ):
        assert any(line.startswith(f"'{name}' (") and reason in line for line in lines), (name, err)
    code, out, err = forked_kvkeep("torn")
    said = "kvkeep: The command 'torn' (acme_kv:torn) is broken: AttributeError"
    assert code == 1 and not out and err.splitlines()[-1].startswith(said)
    assert forked_kvkeep("norms", "--count", "4")[:2] == forked_kvkeep("own", "--count", "4")[:2] == (0, "4\n")


def test_a_shell_completes_methods_of_packages(packages: Path) -> None:
    for words, listed in (
        ("kvkeep generate --method large", ["large-values"]),
        ("kvkeep compare -x h2o,large", ["h2o,large-values"]),
        ("kvkeep nor", ["norms"]),
    ):
        count = len(words.split()) - 1
        asked = {"_KVKEEP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
        code, out, err = forked_kvkeep(**asked)
        assert (code, out.split(), err) == (0, listed, ""), (words, out, err)
