"""The names of methods and their parts, for looking at a name before torch is imported. A test compares them with the
registry."""

from __future__ import annotations

import sys

from kvkeep.errors import unknown
from kvkeep.plugins import PARTS, points

STOCK = "stock"
"""transformers' own cache, which is asked for as a method where the two are compared."""

ONESHOT = "oneshot"
"""What a method ends with whose prompts are read at once, and compressed then: "h2o+oneshot"."""

FORMER = {"ladder": "tiers", "missed": "fetch-on-miss", "longcache": "quest"}
"""Names that a part or a method had in stores and sessions of earlier versions."""

UNLISTED = ("kvpress",)
"""Selectors that are no method without parameters, and so in no list of methods."""

METHODS = (
    "full", "static", "paged", "kv-direct", "window", "streaming-llm", "h2o", "h2o-fisher", "snapkv", "tova",
    "expected-attention", "kvzip", "pyramidkv", "duo-attention", "knorm", "random", "lru", "quantized", "lowrank",
    "revive", "quest", "cam", "kvreviver", "kvreviver-fisher", "asymkv", "kvslimmer", "kvslimmer-exact",
    "asymkv-published", "kvslimmer-published", "kv-lru", "snapkv+verified", STOCK,
)  # fmt: skip

FATES = (
    "drop", "checkpoint", "quantize", "tiers", "lowrank", "segments", "sketch", "merge", "cam", "asymkv", "kvslimmer",
    "kvslimmer-exact", "asymkv-published", "kvslimmer-published",
)  # fmt: skip

RECALLS = ("verified", "pages", "certified", "fetch-on-miss", "redecode")


def check_names(spec: str) -> None:
    """Raise UsageError, with the nearest names, for a method or a part that does not exist. Where packages or a
    program add parts, only the registry knows all names, and nothing is refused here."""
    if "kvkeep.policies.registry" in sys.modules or any(points(PARTS)):
        return
    first, *rest = (part.partition(":")[0] for part in spec.split("+"))
    name = FORMER.get(first, first)
    if name not in METHODS and name not in UNLISTED:
        raise unknown("method", name, METHODS, "'kvkeep methods'")
    if rest[-1:] == [ONESHOT]:
        rest.pop()
    if rest and FORMER.get(rest[-1], rest[-1]) in RECALLS:
        rest.pop()
    if rest and FORMER.get(rest[0], rest[0]) not in FATES:
        raise unknown("fate", rest[0], FATES)
