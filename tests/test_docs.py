"""The examples in the documentation run as they are written."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_examples(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import kvkeep

    monkeypatch.chdir(tmp_path)
    loaded = kvkeep.load("smollm2")
    names: dict[str, Any] = {
        "kvkeep": kvkeep, "model": loaded.model, "tokenizer": loaded.tokenizer,
        "system_prompt_ids": loaded.tokenizer("You are kind.", return_tensors="pt").input_ids,
    }  # fmt: skip
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec", dont_inherit=True), names)
    if page.name == "README.md":
        printed = capsys.readouterr().out
        assert "Paris" in printed and "resident_bytes" in printed and "Rome" in printed


def test_command_examples_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kvkeep line is parsed by the real command line (nothing is run)."""
    from click import Context

    from kvkeep.cli import COMMANDS
    from kvkeep.cli.lazy import application

    lines = [
        line.partition("#")[0].partition("<")[0].strip()
        for page in PAGES for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()
    ]  # fmt: skip
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("kvkeep ")]
    assert len(commands) >= 7
    group: Any = application(COMMANDS)
    for command in commands:
        name, within = "kvkeep", group
        while hasattr(within, "resolve_command"):  # a group of commands
            name, within, command = within.resolve_command(Context(within), command)
        within.make_context(name, command)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_method_has_a_section() -> None:
    from kvkeep import methods

    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name in methods():
        assert f"\n## {name}\n" in text
    assert sys.version_info >= (3, 11)


def test_every_experiment_is_told_how_to_run() -> None:
    from kvkeep_lab.experiment import packaged

    text = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`kvkeep lab run ([\w-]+)`", text)) == set(packaged())
