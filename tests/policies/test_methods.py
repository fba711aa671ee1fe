"""Methods by name: their parts, promises and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from families import tiny
from helpers import bounded

from kvkeep import BudgetError, KeepCache, KvkeepError, UnsupportedModelError, UsageError
from kvkeep.contracts.exactness import Exactness
from kvkeep.policies.methods import methods, resolve
from kvkeep.policies.registry import SELECTORS
from kvkeep.policies.selectors.snapkv import SnapKV
from kvkeep.policies.specs import required


def test_every_method_resolves_by_its_name() -> None:
    for name, method in methods().items():
        assert method.name == name and resolve(name) == method and method.summary and method.source is not None


@pytest.mark.parametrize("selector", [name for name, made in SELECTORS.items() if not required(made)])
def test_a_selector_without_a_fate_drops(selector: str) -> None:
    for said in (selector, f"{selector}+drop"):
        method = resolve(said)
        assert method.name == said  # as it was written: reports and saved sessions repeat it
        assert method.exactness is Exactness.LOSSY and (method.becomes, method.returns) == ("dropped", "never")
        waits = (
            ("where", "folder", "page") if method.reading else ()
        )  # such a method reads a checkpoint until it chooses
        assert method.options == ("budget", "chunk", *waits) and method.leaves and method.summary


@pytest.mark.parametrize("kind", ["", "kv", "residual:3", "tokens"])
def test_checkpoints_make_any_selector_exact(kind: str) -> None:
    method = resolve(f"h2o:recent=0.25+checkpoint:{kind}")
    assert method.exactness is Exactness.EXACT and method.checkpoints and method.kind == (kind or None)
    assert "checkpoint" in method.options and method.becomes == "checkpointed"


def test_every_part_of_a_method_takes_parameters() -> None:
    cache = KeepCache(tiny("llama"), "snapkv:8,kernel=3+checkpoint:residual:3", 32, where="host")
    assert str(cache.spec) == "residual:3"  # of the name; where it has none, the option says
    assert str(KeepCache(tiny("llama"), "window+checkpoint", 32, checkpoint="kv").spec) == "kv"
    assert {layer.resident.selector for layer in bounded(cache)} == {SnapKV(8, 3)}
    fate: Any = resolve("kvreviver:vague=0.2").fate
    assert (fate.swap, fate.vague) == (1.1, 0.2)  # a preset's own default, and what was given
    assert resolve("revive:exact=0.1").fate.exact == 0.1 and resolve("h2o+ladder").fate == resolve("h2o+tiers").fate
    assert resolve("lru+missed:8").recall == resolve("lru+fetch-on-miss:8").recall  # a former name, in saved sessions
    assert resolve("longcache:4+verified") == resolve("quest:4+verified")  # its name in stores and sessions of 0.1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h20", ["Unknown method 'h20'", "did you mean h2o?"]),
        ("banana", ["Unknown method 'banana': 'kvkeep methods' lists all."]),
        ("h2o+chekpoint", ["Unknown fate 'chekpoint'", "did you mean checkpoint?", "drop"]),
        ("h2o+", ["Unknown fate ''"]),
        ("h2o:windw=3", ["'h2o:windw=3'", "selector 'h2o' takes recent"]),
        ("h2o+drop:3", ["fate 'drop' takes no parameters"]),
        # What exists is not called unknown.
        ("kv-direct:3", ["'kv-direct' is a method of its own, without parameters"]),
        ("kvreviver+drop", ["'kvreviver' is a method of its own, without another fate"]),
        # Parts that mean nothing together.
        ("h2o+cam", ["attention of the last step"]),
        ("window+kvslimmer", ["accumulated attention; use h2o"]),
        ("h2o+merge+pages:1", ["count it twice"]),
        ("h2o+sketch:swap=1.1+pages:1", ["cannot bring back the exact entries"]),
        ("kv-direct+pages:1", ["recalls everything at every step already; use 'window+RECALL'"]),
        ("full+verified", ["This method evicts nothing, so there is nothing to recall; leave the recall out."]),
        ("kv-lru+pages", ["'kv-lru' is a method of its own, without another recall"]),
        # Values that mean nothing.
        ("streaming-llm:positions=nowhere", ["'cache' or 'absolute'"]),
        ("h2o:recent=nan", ["recent is a number, not 'nan'"]),
        ("h2o:halflife=-1", ["a number of queries"]),
        ("snapkv:window=0", ["1 or more queries"]),
        ("snapkv:kernel=2", ["odd number"]),
        ("expected-attention:future=0", ["at least 1 position"]),
        ("kvzip:least=0", ["above 0 and at most"]),
        ("adakv+kvslimmer", ["evicts nothing", "snapkv"]),
        ("pyramidkv:beta=inf", ["beta is a number, not 'inf'"]),
        ("lru:threshold=2", ["share of attention"]),
        ("h2o+quantize:3", ["8, 4 or 2 bits"]),
        ("h2o+sketch:vague=0.6", ["share of the budget"]),
        ("h2o+sketch:swap=0.5", ["a factor of at least 1"]),
        ("h2o+sketch-variants:by=mode", ["median"]),
        ("h2o+sketch-variants:keys=averaged,estimate=shrunk", ["with estimate=plain, not 'shrunk'"]),
        ("kvslimmer:cap=1", ["is 2 or more"]),
        ("kvslimmer:slack=0", ["a share of the budget or a number"]),
        ("h2o+pages:x", ["a whole number of them, or 'all'"]),
        ("h2o+certified:0.1", ["kvkeep has no 'certified': a step that reads every entry is faster"]),
        ("h2o+fetch-on-miss:-1", ["a limit of at least 0"]),
        ("h2o+verified:0", ["at least 1 token in a run"]),
        ("h2o+checkpoint+redecode", ["use fate 'drop'"]),
        ("kv-lru+redecode", ["without another recall"]),
    ],
)
def test_an_invalid_method_is_refused_with_its_reason(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(text)
    assert all(word in str(raised.value) for word in words), raised.value
    assert raised.value.exit_code == 2 and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "given", "budget", "words"),
    [
        (UsageError, {"method": "h2o"}, None, "'h2o' needs a budget"),
        *[
            (UsageError, {"method": "h2o", name: value}, 32, f"'h2o' takes no {name}")
            for name, value in {"checkpoint": "kv", "where": "host", "capacity": 3, "folder": "/tmp"}.items()
        ],
        (UsageError, {"method": "streaming-llm:positions=cache+checkpoint"}, 32, "rotated for the wrong one"),
        (
            UsageError,
            {"method": "kvzip+checkpoint:residual"},
            32,
            "of kind 'kv', because .* leave checkpoint 'residual' out",
        ),
        *[
            (UsageError, {"method": f"h2o+{recall}", "checkpoint": kind}, 32, "'kv' or 'residual'")
            for recall in ("pages:2", "fetch-on-miss:8")
            for kind in ("tokens", "residual:2")
        ],
        (BudgetError, {"method": "h2o"}, 0, "leaves 'h2o' nothing to attend to"),
        (UsageError, {"method": "h2o+quantize:exact=-1"}, 200, "The parameter 'exact'"),
        (BudgetError, {"method": "streaming-llm:16"}, 16, "no space for entries beside 16 sinks"),
        (BudgetError, {"method": "kvslimmer"}, 35, "beside 32 sinks; give at least 36"),
        (BudgetError, {"method": "h2o+sketch"}, 11, "at least 12"),
        (BudgetError, {"method": "revive"}, 24, "a group of 32 that are quantised by attention; give at least"),
        (BudgetError, {"method": "h2o+verified", "chunk": 3}, 3, "give at least 4"),
    ],
)
def test_invalid_options_of_a_cache_are_refused_with_their_reason(
    kind: type[KvkeepError], given: dict[str, Any], budget: int | None, words: str
) -> None:
    with pytest.raises(kind, match=words):
        KeepCache(tiny("llama"), budget=budget, **{"chunk": None if budget is None else 8} | given)


def test_the_smallest_budget_named_in_a_refusal_is_enough() -> None:
    for method in ("revive", "h2o+quantize:8", "h2o+quantize:2", "lowrank:4", "kvslimmer"):
        with pytest.raises(BudgetError, match="give at least") as refusal:
            KeepCache(tiny("llama"), method, 12, chunk=8)
        words = str(refusal.value).replace(",", " ").replace(".", " ").split()
        least = next(int(word) for word in words[words.index("give") :] if word.isdigit())
        KeepCache(tiny("llama"), method, least, chunk=8)
        with pytest.raises(BudgetError):
            KeepCache(tiny("llama"), method, least - 1, chunk=8)


def test_models_that_a_part_does_not_support_are_refused() -> None:
    for family in ("gpt2", "deepseek_v3"):
        with pytest.raises(UnsupportedModelError, match=r"merging.*h2o\+merge"):
            KeepCache(tiny(family), "kvslimmer:sinks=4", 32)
        with pytest.raises(UnsupportedModelError, match="queries of positions ahead.*use snapkv"):
            KeepCache(tiny(family), "expected-attention", 32)
    with pytest.raises(UnsupportedModelError, match="phi3"):
        KeepCache(tiny("phi3"), "h2o-fisher", 100)
