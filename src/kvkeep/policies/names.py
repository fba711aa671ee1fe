"""The names of methods and their parts, for looking at a name before torch is imported. A test compares them with the
registry."""

from __future__ import annotations

import sys
from collections.abc import Collection

from kvkeep.errors import UsageError, unknown
from kvkeep.plugins import PARTS, points

STOCK = "stock"
"""transformers' own cache, which is asked for as a method where the two are compared."""

ONESHOT = "oneshot"
"""What a method ends with whose prompts are read at once, and compressed then: "h2o+oneshot"."""

FORMER = {"ladder": "tiers", "missed": "fetch-on-miss", "longcache": "quest"}
"""Names that a part or a method had in stores and sessions of earlier versions."""

METHODS = (
    "full", "static", "paged", "kv-direct", "window", "streaming-llm", "h2o", "h2o-fisher", "snapkv", "tova",
    "expected-attention", "kvzip", "pyramidkv", "duo-attention", "knorm", "random", "lru", "quantized", "revive",
    "quest", "kvreviver", "kvreviver-fisher", "kvslimmer", "kv-lru", "snapkv+verified", STOCK,
)  # fmt: skip

FATES = ("drop", "checkpoint", "quantize", "tiers", "segments", "sketch", "merge", "kvslimmer")

RECALLS = ("verified", "pages", "fetch-on-miss")

LAB = (
    "lowrank", "cam", "asymkv", "kvslimmer-exact", "asymkv-published", "kvslimmer-published", "certified", "redecode",
    "kvpress",
)  # fmt: skip
"""Parts and methods that the lab adds where it is installed."""


def check_names(spec: str) -> None:
    """Raise UsageError, with the nearest names, for a method or a part that does not exist. Where a program adds parts,
    only the registry knows all names, and those it may know are not refused here."""
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
    """Raise UsageError for a method with a part of the lab that is not ``known``."""
    for name in (part.partition(":")[0] for part in spec.split("+")):
        if name in LAB and name not in known:
            raise UsageError(f"'{name}' comes with the lab, which is not installed: pip install 'kvkeep[lab]'.")
