"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import accelerator  # noqa: F401 - before anything imports triton
import pytest
import torch
from cases import TURN
from families import tiny
from hypothesis import HealthCheck, settings

from kvkeep import plugins
from kvkeep.cli.lazy import GROUP
from kvkeep.plugins import PARTS

WORDS = (  # noqa: SIM905
    "the a of and to in is was it for on as with his he at by from her she that which or be this had not are but "
    "have an they you were their one all we can has there been if more when will would who so no out up into than "
    "them only its time over new some could these two may then do first any my now such like our man me even most"
).split()


settings.register_profile("busy machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
_FOLDERS = itertools.count()
SHARE = 12
PARTS_OF_SUITE = {
    "quick": "a twelfth of the cases of each test, and no slow or real ones",
    "change": "no slow tests, and of those with the mark 'turns' the cases of this turn: for every change",
    "rest": "what 'change' leaves out",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    lines = (f"{name}: {text}" for name, text in PARTS_OF_SUITE.items())
    parser.addoption("--part", choices=[*PARTS_OF_SUITE], help="; ".join(lines) + ". All tests without it.")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("COLUMNS", None)  # xdist sets it for its workers, and tables would be as narrow
    if find_spec("absl") is not None:
        # rouge-score imports absl, whose handler keeps the stderr of that moment: pytest's capture of one test. When
        # uvicorn configures logging in a later test, it closes all handlers, and this one closes its stream.
        from absl import logging

        logging.get_absl_handler().python_handler.stream = sys.__stderr__
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # a worker of xdist has none
        config.pluginmanager.register(AsTheyHappen(terminal))
    plugins.entry_points = without(installed())  # before tests are collected: cases are made of the methods there are


def installed() -> frozenset[str]:
    """The packages that add parts or commands here, but for the lab: the user's own, which no test is about. Those that
    a test lays in a folder come later."""
    dists = [point.dist for group in (PARTS, GROUP) for point in entry_points(group=group)]
    return frozenset(dist.name for dist in dists if dist is not None) - {"kvkeep-lab"}


def without(packages: frozenset[str]) -> Callable[..., list[EntryPoint]]:
    """``entry_points`` without those of some packages."""

    def others(**group: str) -> list[EntryPoint]:
        return [point for point in entry_points(**group) if point.dist is None or point.dist.name not in packages]

    return others


class AsTheyHappen:
    """Shows a failure when it happens; the summary at the end shows it again."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line("")
            self.terminal.section(f"{report.nodeid} ({report.when})", sep="_", red=True, bold=True)
            report.toterminal(self.terminal._tw)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the ``--part`` of the suite. Each KVKEEP_TURN begins at another case."""
    if (part := config.getoption("--part")) is None:
        return
    quick = part == "quick"
    left_out = {"slow", "real"} if quick else {"slow"}
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not left_out & {mark.name for mark in item.iter_markers()}:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for own in cases.values() for item in _in_turn(own, SHARE if quick else None)}
    if part == "rest":
        kept = {*items} - kept
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _in_turn(cases: list[pytest.Item], share: int | None) -> list[pytest.Item]:
    """Of the cases of one test, return one of so many as ``share`` or its mark ``turns`` says."""
    mark = cases[0].get_closest_marker("turns")
    share = share or (mark.args[0] if mark is not None else 1)
    return cases[TURN % min(len(cases), share) :: share]


def pytest_collection_finish() -> None:
    """What is imported by now stays, and the garbage collector need not look at it again."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _few_tokens_tell_what_layers_are_worth() -> Iterator[None]:
    """``h2o-fisher`` has a model write texts before it divides a budget: 127 steps of each family otherwise."""
    fisher = find_spec("kvkeep_lab") and import_module("kvkeep_lab.published.fisher")
    if not fisher:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fisher, "TOKENS", 12)
        yield


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """Nothing a test writes lands in the user's folders, except that real models are taken from there."""
    if request.node.get_closest_marker("real") is None:
        folder = tmp_path_factory.getbasetemp() / f"cache{next(_FOLDERS)}"
        folder.mkdir()
        monkeypatch.setenv("KVKEEP_CACHE", str(folder))
    monkeypatch.setenv("KVKEEP_DATA", str(tmp_path_factory.getbasetemp() / f"data{next(_FOLDERS)}"))


@pytest.fixture
def kernels() -> None:
    """The CPU kernels; a test is skipped where there are none."""
    from kvkeep.native.library import library

    if library() is None:
        pytest.skip("no kernels on this machine")


@pytest.fixture
def choose() -> Iterator[Callable[[str], None]]:
    """Take a path of the native library in this process; after the test it is the one before."""
    from kvkeep.native import library

    with pytest.MonkeyPatch.context() as environment:

        def chosen(path: str) -> None:
            environment.setenv("KVKEEP_CPU", path)
            assert library.path() == path

        yield chosen
    library.path()


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The embedded model, for tests that are marked real."""
    from kvkeep import load
    from kvkeep.errors import ModelError

    try:
        return load("smollm2", weights="float32", device="cpu")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture
def registered() -> Iterator[None]:
    """What a test registers is gone after it."""
    from kvkeep.policies import registry
    from kvkeep.policies.methods import load_plugins

    load_plugins()  # which stay
    homes: list[dict[str, Any]] = [registry.SELECTORS, registry.FATES, registry.RECALLS, registry.PRESETS]
    before = [dict(home) for home in homes]
    yield
    for home, own in zip(homes, before, strict=True):
        home.clear()
        home.update(own)


def tokenizer() -> Any:
    """A tokenizer of whole words, with a chat template, for the tiny models' vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "<unk>", "<user>", "<bot>", *WORDS][:97])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", bos_token="<s>")
    made.chat_template = (
        "{% for m in messages %}{{ '<user> ' if m['role'] != 'assistant' else '<bot> ' }}"
        "{{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    return made


def saved(model: Any, folder: Path) -> Path:
    """Write a model and the tokenizer into a folder, and return it."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny Llama and its tokenizer, as a user's own model would lie there."""
    return saved(tiny("llama"), tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def long_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a model of 2,048 positions: its texts have several blocks."""
    return saved(tiny("llama", 2, 2048), tmp_path_factory.mktemp("long-llama"))


@pytest.fixture(scope="session")
def words() -> str:
    """A text of 200 words the tiny tokenizer knows."""
    return " ".join(WORDS[(7 * number) % len(WORDS)] for number in range(200))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run one command in this process: (exit code, standard output, standard error)."""
    from kvkeep.cli import main

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvkeep", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode(errors="surrogateescape"))))
        with pytest.raises(SystemExit) as leaving:
            main()
            raise SystemExit(0)
        code = leaving.value.code
        captured = capsys.readouterr()
        return code if isinstance(code, int) else 1 if code else 0, captured.out, captured.err

    return call
