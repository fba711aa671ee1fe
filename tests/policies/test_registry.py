"""The registry: parts of others become methods like kvkeep's own, and names stay unambiguous."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
from families import tiny
from helpers import prompt, step
from torch import Tensor

from kvkeep import KeepCache, Selector, UsageError, methods, register
from kvkeep.contracts import Candidates
from kvkeep.policies import registry
from kvkeep.policies.fates.drop import Drop
from kvkeep.policies.methods import resolve
from kvkeep.policies.registry import FATES, PRESETS, RECALLS, SELECTORS

pytestmark = pytest.mark.usefixtures("registered")


@dataclass(frozen=True)
class Oldest(Selector):
    """The oldest stay."""

    leaves: ClassVar[str] = "newest"
    source: ClassVar[str] = "a test"
    few: int = 3

    def rank(self, entries: Candidates) -> Tensor:
        return -entries.slots


def test_names_are_unambiguous() -> None:
    """A selector alone is a method, and no name has a character that a method's name gives a meaning to."""
    kinds = (SELECTORS, FATES, RECALLS, PRESETS)
    every = [name for kind in kinds for name in kind]
    assert set(SELECTORS) - {"kvpress"} <= set(methods())
    # A preset may be known by the name of its fate.
    assert {name for name in every if every.count(name) > 1} <= set(FATES) & set(PRESETS)
    assert all(name == name.lower().strip() and not set(name) & set(":+,= ") for name in every)


def test_what_is_registered_is_a_method_and_may_be_registered_again() -> None:
    for _ in range(2):
        register("oldest", Oldest)
    assert resolve("oldest:few=5+checkpoint").selector == Oldest(5) and "oldest" in methods()
    assert methods()["oldest"].summary == "The oldest stay." and methods()["oldest"].leaves == "newest"
    for spec in ("oldest", "oldest+quantize:4", "oldest+verified"):
        cache = KeepCache(tiny("llama"), spec, 100)
        step("llama", cache, prompt(1, 140))
        assert spec != "oldest" or all(states[..., :80].all() for states in cache.entry_states())


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("", Oldest, "cannot be the name of a part"),
        ("the oldest", Oldest, "cannot be the name of a part"),
        ("old+est", Oldest, "cannot be the name of a part"),
        ("stock", Oldest, "cannot be the name of a part"),
        (3, Oldest, "cannot be the name of a part"),
        ("abstract", Selector, "'Selector' does not implement rank"),
        ("h2o", Oldest, "'h2o' is the name of another part"),
        ("verified", Drop, "'verified' is the name of another part"),
        ("kv-direct", Oldest, "'kv-direct' is the name of another part"),
        ("full", Oldest, "'full' is the name of another part"),
        ("thing", int, "no selector, fate, recall or preset"),
        ("thing", Oldest(), "no selector, fate, recall or preset"),
    ],
)
def test_what_cannot_be_registered_is_said(name: str, part: type[Selector], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        register(name, part)


def test_plugins_are_loaded_and_broken_ones_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> type[Selector]:
        raise ImportError("no such module")

    points = [
        SimpleNamespace(name="oldest", value="mine:Oldest", load=lambda: Oldest),
        SimpleNamespace(name="other", value="theirs:Other", load=broken),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
    registry.load_plugins.__wrapped__()
    assert SELECTORS["oldest"] is Oldest and "other" not in SELECTORS
    assert "The part 'other' of 'theirs:Other' is left out: no such module" in caplog.text
