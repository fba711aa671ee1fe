"""Names with parameters, as people write them, and what is said about what is not understood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvkeep import UsageError
from kvkeep.policies.specs import build, parameters


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


THINGS: dict[str, type[Any]] = {"thing": Thing, "word": Word, "bare": Bare}


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
    ],
)
def test_parameters(text: str, made: Any) -> None:
    built = build("thing", text, THINGS)
    assert built == made and [*map(type, vars(built).values())] == [*map(type, vars(made).values())]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thng", ["Unknown kind 'thng'", "did you mean thing?", "bare, thing, word"]),
        (":7", ["Unknown kind ''", "bare, thing, word"]),
        ("thing:conut=7", ["'thing:conut=7'", "kind 'thing'", "count, share, word"]),
        ("thing:7,8", ["'thing:7,8'", "count, share, word"]),  # only the first may go without a name
        ("thing:=7", ["count, share, word"]),
        ("thing:seven", ["count is a whole number, not 'seven'"]),
        ("thing:count=7.5", ["count is a whole number, not '7.5'"]),
        ("thing:share=half", ["share is a number, not 'half'"]),
        ("bare:7", ["kind 'bare' takes no parameters"]),
    ],
)
def test_what_is_not_understood_is_said(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        build("kind", text, THINGS)
    assert all(word in str(raised.value) for word in words), raised.value


def test_parameters_have_defaults() -> None:
    assert parameters(Thing) == {"count": 3, "share": 0.5, "word": "none"} and parameters(Bare) == {}
