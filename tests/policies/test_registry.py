"""The registry: registered parts become methods, and names with parameters are parsed."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, get_type_hints

import pytest
from families import tiny
from helpers import prompt, step
from torch import Tensor

from kvkeep import Fate, KeepCache, Selector, UsageError, methods, register
from kvkeep.contracts.selector import Candidates
from kvkeep.policies.fates.drop import Drop
from kvkeep.policies.methods import resolve
from kvkeep.policies.registry import FATES, PRESETS, RECALLS, SELECTORS
from kvkeep.policies.specs import build, parameters, required

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
    """A selector is a method by itself, and names have no character with a meaning in method names."""
    kinds = (SELECTORS, FATES, RECALLS, PRESETS)
    every = [name for kind in kinds for name in kind]
    assert {name for name, made in SELECTORS.items() if not required(made)} <= set(methods())
    # A preset may be known by the name of its fate.
    assert {name for name in every if every.count(name) > 1} <= set(FATES) & set(PRESETS)
    assert all(name == name.lower().strip() and not set(name) & set(":+,= ") for name in every)


def test_a_registered_part_is_a_method_and_may_be_registered_again() -> None:
    for _ in range(2):
        register("oldest", Oldest)
    assert resolve("oldest:few=5+checkpoint").selector == Oldest(5) and "oldest" in methods()
    assert methods()["oldest"].summary == "The oldest stay." and methods()["oldest"].leaves == "newest"
    for spec in ("oldest", "oldest+quantize:4", "oldest+verified"):
        cache = KeepCache(tiny("llama"), spec, 100)
        step("llama", cache, prompt(1, 140))
        assert spec != "oldest" or all(states[..., :80].all() for states in cache.entry_states())


def test_parameters_that_name_files_are_marked_and_can_be_refused() -> None:
    """Every text parameter is marked or takes one of a few words; registered parts are refused like built-in ones."""

    class Taught(Oldest):
        files = ("taught",)
        taught: str = ""

    class Noted(Drop):
        files = ("note",)
        note: str = ""

    register("taught", dataclass(frozen=True)(Taught))
    register("note", dataclass(frozen=True)(Noted))
    words = {
        "checkpoint": {"kind"},
        "sketch-variants": {"estimate", "by", "keys"},
    }
    words |= {"streaming-llm": {"positions"}, "kvpress": {"press"}}
    marked = set()
    for known in (SELECTORS, FATES, RECALLS):
        for name, part in known.items():
            types = get_type_hints(part)
            text = {one.name for one in fields(part) if types[one.name] not in (int, float)}
            assert text == {*part.files} | words.get(name, set()), name
            marked |= {(name, one) for one in part.files}
    marked -= {("kvpress", "options")}  # of the lab, for a package that need not be here
    scores = {(name, "scores") for name in ("duo-attention", "h2o-fisher")}
    assert marked == scores | {("taught", "taught"), ("note", "note")}
    for name, one in marked:
        spec = f"h2o+{name}" if name in FATES else name
        with pytest.raises(UsageError, match=f"The '{one}' of '{name}' may name a file"):
            resolve(f"{spec}:{one}=/none", files=False)
        with pytest.raises(UsageError, match="may name a file"):
            resolve(f"{spec}:{one}=/none+quantize:4" if name in SELECTORS else f"{spec}:/none+pages", files=False)
        assert resolve(spec, files=False) and resolve(f"{spec}:{one}=/none")
    register("of-a-spec", type("OfASpec", (Taught,), {"from_spec": classmethod(lambda cls, text: cls(taught=text))}))
    with pytest.raises(UsageError, match="may name a file"):
        resolve("of-a-spec:/none", files=False)
    assert resolve("of-a-spec", files=False)


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        *((name, Oldest, "cannot be the name of a part") for name in ("", "the oldest", "old+est", "stock", 3)),
        *((name, Oldest, f"'{name}' is the name of another part") for name in ("h2o", "kv-direct", "full")),
        *((name, Oldest, "cannot be the name of a part") for name in ("peer-oldest", "stock-oldest")),
        ("abstract", Fate, "'Fate' does not implement store"),
        ("selector", Selector, "'Selector' does not say its leaves and source"),
        ("mismarked", type("Mismarked", (Oldest,), {"files": "few"}), "names of parameters, and not 'f'"),
        ("verified", Drop, "'verified' is the name of another part"),
        *(("thing", part, "no selector, fate, recall or preset") for part in (int, Oldest())),
    ],
)
def test_invalid_registrations_are_refused(name: str, part: type[Selector], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        register(name, part)


# -- parameters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thing:
    count: int = 3
    share: float = 0.5
    word: str = "none"


@dataclass(frozen=True)
class Word:
    word: str = ""


@dataclass(frozen=True)
class Bare:
    pass


@dataclass(frozen=True)
class Sized:
    size: int
    parts: list[int] = field(default_factory=lambda: [1])


THINGS: dict[str, type[Any]] = {"thing": Thing, "word": Word, "bare": Bare, "sized": Sized}


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("thing", Thing()),
        ("thing:", Thing()),
        ("thing:7", Thing(7)),
        ("thing:count=-7", Thing(-7)),
        ("thing:share=1", Thing(share=1.0)),
        ("thing:7,word=a", Thing(7, word="a")),
        ("thing:word=a=b,count=7", Thing(7, word="a=b")),
        ("word:a:b", Word("a:b")),  # a checkpoint kind has a colon of its own
        ("word:word=a:b", Word("a:b")),
        ("bare:", Bare()),
        ("sized:7", Sized(7)),
    ],
)
def test_parameters_are_parsed_by_name_and_position(text: str, made: Any) -> None:
    built = build("thing", text, THINGS)
    assert built == made and [*map(type, vars(built).values())] == [*map(type, vars(made).values())]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thng", ["Unknown kind 'thng'", "did you mean thing?", "bare, sized, thing, word"]),
        (":7", ["Unknown kind ''", "bare, sized, thing, word"]),
        ("thing:conut=7", ["'thing:conut=7'", "kind 'thing'", "count, share, word"]),
        ("thing:7,8", ["'thing:7,8'", "count, share, word"]),  # only the first may go without a name
        ("thing:=7", ["count, share, word"]),
        ("thing:seven", ["count is a whole number, not 'seven'"]),
        ("thing:count=7.5", ["count is a whole number, not '7.5'"]),
        ("thing:share=half", ["share is a number, not 'half'"]),
        ("bare:7", ["kind 'bare' takes no parameters"]),
        ("sized", ["kind 'sized' needs size"]),
    ],
)
def test_invalid_parameters_are_refused(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        build("kind", text, THINGS)
    assert all(word in str(raised.value) for word in words), raised.value


def test_parameters_have_defaults() -> None:
    assert parameters(Thing) == {"count": 3, "share": 0.5, "word": "none"} and parameters(Bare) == {}
    assert parameters(Sized) == {"size": MISSING, "parts": [1]} and required(Sized) == ["size"]
