"""The long forms of what a server promises, by ``make soak``: each test is one check, and says its numbers in a line.

Tests are marked ``soak`` with the number of their check. They run where the variable SOAK is set: to "all", or to the
numbers of some ("2,6"). The quick forms are in tests/serve.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

from kvkeep.models.loading import Loaded

SOAK = os.environ.get("SOAK", "")


class Lines:
    """What checks say: how far they are, and at the end their numbers, of which a table is made."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.rows = config, list[tuple[int, str]]()

    def write(self, text: str, end: str = "\n") -> None:
        """Say something at once, past what pytest captures."""
        if SOAK:
            capture: Any = self.config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled():
                print(f"\r\033[K{text}" if sys.stdout.isatty() else text, end=end, flush=True)


class Say:
    """A check's own lines."""

    def __init__(self, lines: Lines, number: int) -> None:
        self._lines, self._number = lines, number

    def progress(self, text: str) -> None:
        """Say how far the check is."""
        self._lines.write(f"{self._number}: {text} ...", end="" if sys.stdout.isatty() else "\n")

    def __call__(self, text: str) -> None:
        """Say what was found, in a line that is the check's row of the list."""
        self._lines.write(f"{self._number}: {text}")
        self._lines.rows.append((self._number, text))


LINES = pytest.StashKey[Lines]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    numbers = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("soak"))}
    wanted = {*numbers.values()} if SOAK == "all" else {int(number) for number in SOAK.split(",") if number}
    if unknown := wanted - {*numbers.values()}:
        raise pytest.UsageError(f"There is no check {min(unknown)}; there are {sorted({*numbers.values()})}.")
    left = [item for item in items if (numbers[item] in wanted if item in numbers else not SOAK)]
    config.hook.pytest_deselected(items=[*{*items} - {*left}])
    items[:] = sorted(left, key=lambda item: numbers[item]) if SOAK else left


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Say:
    mark = request.node.get_closest_marker("soak")
    return Say(request.config.stash.setdefault(LINES, Lines(request.config)), mark.args[0] if mark else 0)


@pytest.fixture(scope="session")
def real() -> Loaded:
    """SmolLM2 with the weights that a server takes by default; its tests are marked real."""
    from kvkeep import load

    return load("smollm2", device="cpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    mark = item.get_closest_marker("soak")
    if mark is not None and report.failed:
        lines = item.config.stash.setdefault(LINES, Lines(item.config))
        reason = str(call.excinfo.value).partition("\n")[0] if call.excinfo else ""
        lines.rows.append((mark.args[0], f"FAILED: {reason}"))
        lines.write(f"{mark.args[0]}: FAILED: {reason}")
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if SOAK and LINES in config.stash:
        rows = [
            "| check | |",
            "| ---: | --- |",
            *(f"| {number} | {text} |" for number, text in config.stash[LINES].rows),
        ]
        terminalreporter.write("\n" + "\n".join(rows) + "\n\n")
