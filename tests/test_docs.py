"""The documentation is true: examples run, every method has its section, links lead somewhere, imports go one way."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import saved
from families import tiny
from gguf_files import written

ROOT = Path(__file__).parents[1]
CORE = ROOT / "src" / "kvkeep"
READMES = [ROOT / "lab" / "README.md", *(ROOT / "connectors").glob("*/README.md")]
PAGES = sorted([*ROOT.glob("*.md"), *READMES, *(ROOT / "docs").rglob("*.md")])
CHEAP = ("generate", "chat", "methods", "models")
"""Commands that run here, on a tiny model. tests/cli runs plans, tests/lab the lab's commands."""
DEAR = ("--fetch", "qwen", "auto", "kvpress", "peer-", "cuda", "gemma3")
"""What needs another package, device or model."""


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read(page), re.DOTALL)


README = ROOT / "README.md"
OF_THE_LAB = (ROOT / "docs" / "lab.md", ROOT / "lab" / "README.md")
EXAMPLES = [page for page in PAGES if page not in (README, *OF_THE_LAB) and blocks(page, "python")]


def commands() -> Iterator[str]:
    """Every kvkeep line of every page, once."""
    lines = (
        " ".join(line.partition("#")[0].split())
        for page in PAGES for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()
    )  # fmt: skip
    yield from dict.fromkeys(line for line in lines if line.startswith("kvkeep "))


def run_examples(page: Path, model: Any, tokenizer: Any) -> None:
    """Run the Python blocks of a page, one after the other, with the names that they expect."""
    import kvkeep

    prompt = tokenizer("You are kind.", return_tensors="pt").input_ids
    names: dict[str, Any] = {"kvkeep": kvkeep, "model": model, "tokenizer": tokenizer, "system_prompt_ids": prompt}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec", dont_inherit=True), names)


@pytest.mark.real
@pytest.mark.slow
def test_the_python_examples_of_the_readme_print_what_they_should(
    smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples(README, smollm2.model, smollm2.tokenizer)
    printed = capsys.readouterr().out
    assert "Paris" in printed and "exactness='exact'" in printed and "Rome" in printed


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_python_examples_run(
    page: Path, smollm2: Any, registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model with the vocabulary of the embedded one, where a page does not load a model itself."""
    monkeypatch.chdir(tmp_path)
    run_examples(page, tiny("llama", positions=8192, vocabulary=len(smollm2.tokenizer)), smollm2.tokenizer)


def test_files_that_pages_name_are_there() -> None:
    named = r"\b(?:tests|src|lab|connectors|tools|deploy|notebooks|docs)/[\w./-]+\.(?:py|toml|json|yaml|ipynb)\b"
    files = [(page.name, name) for page in PAGES for name in re.findall(named, read(page)) if "NAME" not in name]
    assert files and [(page, name) for page, name in files if not (ROOT / name).exists()] == []


def test_the_four_trips_name_files_that_are_there_and_count_them() -> None:
    page = read(ROOT / "docs" / "architecture.md")
    trips = re.search(r"^## Four trips\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert trips is not None
    named = set(re.findall(r"`([\w/]+\.(?:py|h))`", trips[1]))
    assert [name for name in sorted(named) if not (ROOT / name if "tests" in name else CORE / name).exists()] == []
    counts = [int(count) for count in re.findall(r"^### .*: (\d+) files$", trips[1], re.MULTILINE)]
    lists = [re.findall(r"^\d+\. `([\w/]+\.py)`", trip, re.MULTILINE) for trip in trips[1].split("\n### ")[1:]]
    assert counts == [len(set(files)) for files in lists]
    assert all(count <= limit for count, limit in zip(counts, (19, 12, 17, 28), strict=True))


def test_command_examples_are_understood() -> None:
    """Every kvkeep line is parsed by the real command line (nothing is run)."""
    from click import Context

    from kvkeep.cli import COMMANDS
    from kvkeep.cli.lazy import application

    lines = [shlex.split(line.partition("<")[0].partition(" > ")[0])[1:] for line in commands()]
    assert len(lines) >= 7
    group: Any = application(COMMANDS)
    for command in lines:
        name, within = "kvkeep", group
        while command and hasattr(within, "resolve_command"):  # a group of commands
            name, within, command = within.resolve_command(Context(within), command)
        within.make_context(name, command)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "line",
    [line for line in commands() if line.split()[1] in CHEAP and not any(dear in line for dear in DEAR)],
    ids=lambda line: line[7:60],
)
def test_cheap_commands_run(
    line: str, run: Callable[..., tuple[int, str, str]], model_folder: Path, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On a tiny model and a short text, whatever text the line names."""
    monkeypatch.chdir(tmp_path)
    command, _, given = line.partition("<")
    arguments = shlex.split(command)[1:]
    for word in (*arguments, given.strip()):
        if word.endswith(".txt"):
            (tmp_path / word).write_text(words)
    if "smollm2" in arguments:
        file = "--explain" in arguments
        made = written(tmp_path / "a.gguf") if file else saved(tiny("llama", positions=8192), tmp_path / "tiny")
        arguments[arguments.index("smollm2")] = str(made)
    own = ["-m", str(model_folder)] if arguments[0] not in ("methods", "models") and "-m" not in arguments else []
    code, out, err = run(*arguments, *own, stdin=words if given else "")
    assert code == 0 and "Traceback" not in err, err
    assert out.strip() or arguments[0] == "chat"


def test_every_name_has_a_section() -> None:
    from kvkeep.policies.methods import names, parts
    from kvkeep.policies.names import STOCK

    sections = re.findall(r"^### ([a-z0-9+-]+)$", read(ROOT / "docs" / "methods.md"), re.MULTILINE)
    assert len(sections) == len(set(sections))
    assert set(sections) == {STOCK, *names(), *(name for registry in parts().values() for name in registry)}


def test_every_experiment_has_its_command() -> None:
    from kvkeep_lab.experiment import packaged

    text = read(ROOT / "docs" / "reproducing.md")
    assert set(re.findall(r"`kvkeep lab run ([\w-]+)`", text)) == set(packaged())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made for Markdown."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", read(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", read(page)):
        other = (page.parent / target) if target else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), f"{target}#{anchor}"


def modules(node: ast.AST) -> Iterator[str]:
    """What is imported within a node by its full name, but for what is for types only."""
    if isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{name.name}" for name in node.names)
    elif isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        for child in ast.iter_child_nodes(node):
            yield from modules(child)


def test_imports_go_one_way() -> None:
    """As docs/architecture.md has it: a package imports from its own row and from those above."""
    block = re.search(r"```\n(errors .*?)```", read(ROOT / "docs" / "architecture.md"), re.DOTALL)
    assert block is not None
    row_of = {name: row for row, line in enumerate(block[1].splitlines()) for name in line.split()}
    there = {path.relative_to(CORE).parts[0].removesuffix(".py") for path in CORE.rglob("*.py")}
    assert set(row_of) == there - {"__init__", "__main__"}
    for path in CORE.rglob("*.py"):
        own = path.relative_to(CORE).parts[0].removesuffix(".py")
        if own in row_of:
            for name in modules(ast.parse(read(path))):
                assert not name.startswith("kvkeep_"), "the lab and the connectors are on top"
                above = row_of.get(name.split(".")[1], 0) if name.startswith("kvkeep.") else 0
                assert above <= row_of[own], f"{path.relative_to(CORE)} imports {name}"
