"""Methods as people write them: names, parameters after a colon, and what is said about those nobody knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from families import tiny

from kvkeep import KeepCache, UsageError
from kvkeep.policies.fates import FATES
from kvkeep.policies.methods import METHODS, resolve
from kvkeep.policies.recalls import RECALLS
from kvkeep.policies.request import Exactness
from kvkeep.policies.selectors import SELECTORS
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.policies.selectors.knorm import KNorm
from kvkeep.policies.selectors.pyramidkv import PyramidKV
from kvkeep.policies.selectors.random import Random
from kvkeep.policies.selectors.snapkv import SnapKV
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.policies.selectors.tova import Tova
from kvkeep.policies.selectors.window import Window
from kvkeep.policies.specs import build


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
        ("thing:count=7", Thing(7)),
        ("thing:share=0.25", Thing(share=0.25)),
        ("thing:share=1", Thing(share=1.0)),
        ("thing:7,word=a", Thing(7, word="a")),
        ("thing:word=a,count=7", Thing(7, word="a")),
        ("thing:word=a=b", Thing(word="a=b")),
        ("thing:count=-7", Thing(-7)),
        ("word:a", Word("a")),
        ("word:a:b", Word("a:b")),  # a checkpoint kind has a colon of its own
        ("word:word=a:b", Word("a:b")),
        ("bare", Bare()),
        ("bare:", Bare()),
    ],
)
def test_parameters(text: str, made: Any) -> None:
    built = build("thing", text, THINGS)
    assert built == made and [type(value) for value in vars(built).values()] == [
        type(value) for value in vars(made).values()
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thng", ["Unknown kind 'thng'", "did you mean thing?", "bare, thing, word"]),
        ("", ["Unknown kind ''", "bare, thing, word"]),
        (":7", ["Unknown kind ''"]),
        ("thing:conut=7", ["'thing:conut=7'", "kind 'thing'", "count, share, word"]),
        ("thing:7,8", ["'thing:7,8'", "count, share, word"]),  # only the first may go without a name
        ("thing:share=1,7", ["count, share, word"]),
        ("thing:seven", ["count is a whole number, not 'seven'"]),
        ("thing:count=7.5", ["count is a whole number, not '7.5'"]),
        ("thing:count=", ["count is a whole number, not ''"]),
        ("thing:share=half", ["share is a number, not 'half'"]),
        ("thing:=7", ["count, share, word"]),
        ("bare:7", ["kind 'bare' takes no parameters"]),
        ("bare:count=7", ["takes no parameters"]),
    ],
)
def test_what_is_not_understood_is_said(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        build("kind", text, THINGS)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("window", Window()),
        ("streaming-llm", StreamingLLM()),
        ("streaming-llm:8", StreamingLLM(sinks=8)),
        ("streaming-llm:sinks=8,positions=absolute", StreamingLLM(8, "absolute")),
        ("h2o", H2O(recent=0.5)),
        ("h2o:0.25", H2O(recent=0.25)),
        ("snapkv", SnapKV(window=32, kernel=7)),
        ("snapkv:16", SnapKV(16, 7)),
        ("snapkv:16,kernel=5", SnapKV(16, 5)),
        ("tova", Tova()),
        ("pyramidkv", PyramidKV(window=32, kernel=7, beta=20.0)),
        ("pyramidkv:beta=10", PyramidKV(beta=10.0)),
        ("knorm", KNorm()),
        ("random:7", Random(seed=7)),
    ],
)
def test_selectors(text: str, made: Any) -> None:
    assert build("selector", text, SELECTORS) == made


@pytest.mark.parametrize(
    "text",
    [
        "streaming-llm:positions=nowhere",
        "streaming-llm:sinks=-1",
        "h2o:recent=1.5",
        "h2o:recent=-0.5",
        "h2o:recent=nan",
        "snapkv:window=0",
        "snapkv:kernel=2",
        "pyramidkv:beta=0",
        "pyramidkv:beta=nan",
        "pyramidkv:window=-4",
    ],
)
def test_values_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        build("selector", text, SELECTORS)


def test_names_are_unambiguous() -> None:
    """A selector alone is a method, and no name has a character that a spec gives a meaning to."""
    assert set(SELECTORS) - {"kvpress"} <= set(METHODS)
    parts = [part for name in METHODS for part in name.split("+")]  # a combination may be listed, too
    for name in [*parts, *SELECTORS, *FATES, *RECALLS]:
        assert name == name.lower().strip() and not set(name) & set(":+,= ")
    assert all(method.name == name for name, method in METHODS.items())


@pytest.mark.parametrize("name", METHODS)
def test_a_name_is_its_method(name: str) -> None:
    assert resolve(name) is METHODS[name]


@pytest.mark.parametrize("selector", [name for name in SELECTORS if name != "kvpress"])  # which needs a parameter
def test_a_selector_alone_drops(selector: str) -> None:
    alone, said = resolve(selector), resolve(f"{selector}+drop")
    for method in (alone, said):
        assert method.exactness is Exactness.LOSSY and not method.records
        assert method.fate == "dropped" and method.recall == "never"
        assert set(method.options) == {"budget", "chunk"}
        assert method.selector and method.summary
    assert said.name == f"{selector}+drop"  # as it was written: reports and saved sessions repeat it


@pytest.mark.parametrize("kind", ["", ":kv", ":residual:3", ":tokens"])
def test_checkpoints_make_any_selector_exact(kind: str) -> None:
    method = resolve(f"h2o:recent=0.25+checkpoint{kind}")
    assert method.name == f"h2o:recent=0.25+checkpoint{kind}"
    assert method.exactness is Exactness.EXACT and method.records
    assert "checkpoint" in method.options and method.fate == "checkpointed"


def test_both_sides_take_parameters() -> None:
    cache = KeepCache(tiny("llama"), "snapkv:8,kernel=3+checkpoint:residual:3", 32, where="host")
    assert str(cache.spec) == "residual:3"
    assert {layer.selector for layer in cache.layers} == {SnapKV(8, 3)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h20", ["Unknown method 'h20'", "did you mean h2o?"]),
        ("streaming-lm", ["Unknown method 'streaming-lm'", "streaming-llm"]),
        ("snapvk:window=3", ["Unknown method 'snapvk'", "snapkv"]),
        ("snapvk+checkpoint", ["Unknown method 'snapvk'", "snapkv"]),
        ("stok", ["did you mean stock"]),
        ("", ["Unknown method ''"]),
        ("h2o+chekpoint", ["Unknown fate 'chekpoint'", "did you mean checkpoint?", "drop"]),
        ("h2o+", ["Unknown fate ''"]),
        ("h2o+drop+drop", ["Unknown fate 'drop+drop'"]),
        ("h2o:windw=3", ["'h2o:windw=3'", "selector 'h2o' takes recent"]),
        ("h2o:recent=lots", ["recent is a number, not 'lots'"]),
        ("h2o+drop:3", ["fate 'drop' takes no parameters"]),
        ("window:3", ["selector 'window' takes no parameters"]),
    ],
)
def test_methods_nobody_knows(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(text)
    assert all(word in str(raised.value) for word in words), raised.value
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("text", ["kv-direct:3", "full+drop", "paged:block=3", "kv-direct+checkpoint:kv"])
def test_methods_that_are_not_selectors_are_not_called_unknown(text: str) -> None:
    """They exist; what they do not take is parameters or a fate."""
    with pytest.raises(UsageError) as raised:
        resolve(text)
    assert "Unknown method" not in str(raised.value)


@pytest.mark.parametrize("option", [{"checkpoint": "kv"}, {"where": "host"}, {"capacity": 3}, {"folder": "/tmp"}])
def test_options_of_checkpoints_are_refused_where_nothing_is_kept(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"'h2o' takes no {next(iter(option))}"):
        KeepCache(tiny("llama"), "h2o", 32, **option)


def test_a_kind_in_the_name_wins_over_none_given() -> None:
    cache = KeepCache(tiny("llama"), "window+checkpoint:tokens", 32, where="device")
    assert str(cache.spec) == "tokens"
    assert str(KeepCache(tiny("llama"), "window+checkpoint", 32, checkpoint="kv").spec) == "kv"


def test_without_a_budget_it_says_so() -> None:
    with pytest.raises(UsageError, match="'h2o' needs a budget"):
        KeepCache(tiny("llama"), "h2o")
