"""The names of methods and parts, for checks before torch is imported. A test compares them with the registry."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Literal

from kvkeep.errors import UsageError, unknown
from kvkeep.plugins import PARTS, how, points

STOCK = "stock"
"""The method that is transformers' cache, for comparisons."""

ONESHOT = "oneshot"
"""The suffix of a method's name that makes it read prompts in one pass: "h2o+oneshot"."""

FORMER = {"blocks": "passages", "ladder": "tiers", "missed": "fetch-on-miss", "longcache": "quest"}
"""Former names, which stored sessions and results may still have."""

SYSTEM: Literal["system"] = "system"
"""The pin of a prompt's instructions, whose number of tokens follows from the prompt."""
Pin = int | Literal["system"]
"""A number of first tokens, or :data:`SYSTEM`."""

METHODS = (
    "full", "kv-direct", "window", "streaming-llm", "h2o", "snapkv", "tova", "expected-attention", "kvzip", "pyramidkv",
    "adakv", "knorm", "keydiff", "random", "lru", "endless", "quantized", "revive", "kvreviver", "kvslimmer",
    "snapkv+verified", STOCK,
)  # fmt: skip

FATES = ("drop", "checkpoint", "quantize", "tiers", "sketch", "merge", "kvslimmer")

RECALLS = ("verified", "passages")

KV_LRU = "kv-lru"
"""The lab's method that the options of llama.cpp's pull request choose."""

LAB = (
    "static", "paged", "h2o-fisher", "kvreviver-fisher", "duo-attention", "pages", "fetch-on-miss", KV_LRU, "quest",
    "segments", "sketch-variants", "lowrank", "cam", "asymkv", "kvslimmer-exact", "asymkv-published",
    "kvslimmer-published", "attention-matching", "highest-attention", "epicache", "kvgrad",
    "merge-values", "redecode", "kvpress",
)  # fmt: skip
"""Parts and methods that the lab adds."""

INSTEAD = {"certified": "a step that reads every entry is faster; use SELECTOR+checkpoint"}
"""Names of stored sessions that no part has, with a reason and what to use."""


def checked_pin(given: str | int) -> Pin:
    """Return the pin that a user gave. Raises UsageError."""
    if given == SYSTEM:
        return SYSTEM
    if not ((text := str(given)).isascii() and text.isdigit()):
        raise UsageError(f"A pin is 'system' or a number of first tokens, not '{text}'.")
    return int(text)


def check_names(spec: str) -> None:
    """Raise UsageError, with the nearest names, for a method or a part that does not exist. After the registry is
    imported, this function does nothing, because a program may have added parts."""
    added = {point.name for point in points(PARTS)}
    check_lab(spec, added)
    if "kvkeep.policies.registry" in sys.modules:
        return
    first, *rest = (part.partition(":")[0] for part in spec.split("+"))
    name = FORMER.get(first, first)
    if name not in {*METHODS, *added}:
        raise unknown("method", name, {*METHODS, *added}, "'kvkeep methods'")
    if rest[-1:] == [ONESHOT]:
        rest.pop()
    if rest and FORMER.get(rest[-1], rest[-1]) in {*RECALLS, *added}:
        rest.pop()
    if rest and FORMER.get(rest[0], rest[0]) not in {*FATES, *added}:
        raise unknown("fate", rest[0], {*FATES, *added})


def check_lab(spec: str, known: Collection[str]) -> None:
    """Raise UsageError for a method with a part of the lab, unless it is ``known``, and for a name in
    :data:`INSTEAD`."""
    for given in (part.partition(":")[0] for part in spec.split("+")):
        if (name := FORMER.get(given, given)) in LAB and name not in known:
            raise UsageError(f"'{name}' comes with the lab, which is not installed: {how('lab')}.")
        if name in INSTEAD and name not in known:
            raise UsageError(f"kvkeep has no '{name}': {INSTEAD[name]}.")
