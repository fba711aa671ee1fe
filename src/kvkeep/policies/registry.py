"""The registry: selectors, fates, recalls, and presets.

:func:`register` adds to it. An installed package adds a selector, a fate, a recall or a preset by an entry point of the
group :data:`~kvkeep.plugins.PARTS`; the entry point's name is the part's name
(:func:`kvkeep.policies.methods.load_plugins`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from inspect import get_annotations, isabstract
from typing import Any

from kvkeep.contracts.fate import Fate
from kvkeep.contracts.recall import Recall
from kvkeep.contracts.selector import Selector
from kvkeep.errors import UsageError
from kvkeep.policies.fates.checkpoint import Checkpointed
from kvkeep.policies.fates.drop import Drop, Kept
from kvkeep.policies.fates.kvslimmer import KVSlimmer
from kvkeep.policies.fates.merge import Merge
from kvkeep.policies.fates.quantize import Quantize
from kvkeep.policies.fates.sketch import Sketch
from kvkeep.policies.fates.tiers import InTiers
from kvkeep.policies.names import FORMER, ONESHOT, STOCK
from kvkeep.policies.recalls.blocks import PromisingBlocks
from kvkeep.policies.recalls.unnamed import Evicted
from kvkeep.policies.recalls.verified import Verified
from kvkeep.policies.selectors.adakv import AdaKV
from kvkeep.policies.selectors.expected_attention import ExpectedAttention
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.policies.selectors.keydiff import KeyDiff
from kvkeep.policies.selectors.knorm import KNorm
from kvkeep.policies.selectors.kvzip import KVzip
from kvkeep.policies.selectors.lru import LRU
from kvkeep.policies.selectors.nobody import Nobody
from kvkeep.policies.selectors.pyramidkv import PyramidKV
from kvkeep.policies.selectors.random import Random
from kvkeep.policies.selectors.snapkv import SnapKV
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.policies.selectors.tova import Tova
from kvkeep.policies.selectors.window import OldestFirst, Window
from kvkeep.policies.specs import parameters

SELECTORS: dict[str, type[Selector]] = {
    "window": Window,
    "streaming-llm": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
    "tova": Tova,
    "expected-attention": ExpectedAttention,
    "kvzip": KVzip,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "random": Random,
    "lru": LRU,
}

FATES: dict[str, type[Fate]] = {
    "drop": Drop,
    "checkpoint": Checkpointed,
    "quantize": Quantize,
    "tiers": InTiers,
    "sketch": Sketch,
    "merge": Merge,
    "kvslimmer": KVSlimmer,
}

RECALLS: dict[str, type[Recall]] = {
    "verified": Verified,
    "blocks": PromisingBlocks,
}

PEERS = ("stock-", "peer-", "prompt-")
"""Prefixes of the names of the lab's peers."""


@dataclass(frozen=True)
class Preset:
    """A method with a name: a selector, a fate, and perhaps a recall. Its parameters are the fate's."""

    selector: Selector
    fate: type[Fate]
    summary: str
    """What the method does, in a sentence."""
    source: str
    """The paper."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Parameters that differ from the fate's defaults."""
    recall: Recall = field(default_factory=Evicted)
    closed: bool = False
    """The preset takes no parameters."""


PRESETS: dict[str, Preset] = {
    "full": Preset(
        Nobody(),
        Kept,
        "All entries, in buffers that grow by blocks; a step copies one entry.",
        "kv-caching-tutorial, section 7",
        closed=True,
    ),
    "kv-direct": Preset(
        OldestFirst(),
        Checkpointed,
        "The newest entries within the budget; all others in a checkpoint, where attention reads them exactly.",
        "arXiv:2603.19664, Algorithm 1",
        closed=True,
    ),
    "endless": Preset(
        OldestFirst(),
        Checkpointed,
        "Exact up to the model's positions; beyond them the newest entries, and the blocks of older ones that have the "
        "words of the question.",
        PromisingBlocks.source,
        {"kind": "kv"},
        recall=PromisingBlocks(),
    ),
    "quantized": Preset(
        Window(),
        Quantize,
        "The newest entries exactly, older ones at 8, 4 or 2 bits: keys per channel, values per token.",
        "arXiv:2402.02750",
        {"exact": 128},
    ),
    "revive": Preset(
        H2O(halflife=256),
        InTiers,
        "Newest and heavy entries exactly, all others at 16, 8, 4 or 2 bits by their current attention.",
        "kvkeep; codes after arXiv:2402.02750",
    ),
    "kvreviver": Preset(
        H2O(),
        Sketch,
        "Recent entries and heavy hitters exactly, all others in a count sketch; they may come back, as estimates.",
        "KVReviver, Algorithms 1 to 4",
        {"swap": 1.1},
    ),
    "kvslimmer": Preset(
        H2O(),
        KVSlimmer,
        "Merges the least attended neighbours into one entry, whose key follows from attention, values and output.",
        KVSlimmer.source,
    ),
}
"""Methods with a name. Every selector is a method, too: it drops the entries that it evicts."""

LISTED = ("snapkv+verified",)
"""Combinations that lists of methods name beside the presets."""


def register(name: str, part: type[Selector] | type[Fate] | type[Recall] | Preset) -> None:
    """Register ``part`` as ``name``: a selector, a fate or a recall (a frozen dataclass of its parameters), or a
    :class:`Preset`. Methods (``NAME``, ``NAME+FATE+RECALL``), tables, plans and experiments can then use it. A preset
    may have the name of its fate.

    Raises UsageError for a name that is taken or that a method's name cannot contain, and for an incomplete part.
    """
    taken = isinstance(name, str) and (name in (STOCK, ONESHOT, *FORMER) or name.startswith(PEERS))
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or taken:
        raise UsageError(
            f"{name!r} cannot be the name of a part: use letters, digits, '-', '_' and '.', and no reserved name."
        )
    home = _home(name, part)
    others = [known[name] for known in _HOMES if name in known and known[name] is not part]
    if not all(_share_name(part, other) for other in others):
        raise UsageError(f"'{name}' is the name of another part already; choose another.")
    home[name] = part


def _share_name(one: Any, other: Any) -> bool:
    """Return whether one is a preset and the other its fate: both may then have the same name."""
    return any(isinstance(preset, Preset) and preset.fate is fate for preset, fate in ((one, other), (other, one)))


def unregister(name: str, *parts: Any) -> None:
    """Remove the ``parts`` that are registered as ``name``."""
    for home in _HOMES:
        if any(home.get(name) is part for part in parts):
            del home[name]


_HOMES: tuple[dict[str, Any], ...] = (SELECTORS, FATES, RECALLS, PRESETS)


def _home(name: str, part: Any) -> dict[str, Any]:
    """Return the table that a part belongs to. Raises UsageError for an object of another kind, and for an incomplete
    part."""
    if isinstance(part, Preset):
        return PRESETS
    kinds: tuple[tuple[type, dict[str, Any]], ...] = ((Selector, SELECTORS), (Fate, FATES), (Recall, RECALLS))
    found = [(kind, known) for kind, known in kinds if isinstance(part, type) and issubclass(part, kind)]
    if not found:
        raise UsageError(f"'{name}' is no selector, fate, recall or preset, so it cannot be registered.")
    kind, home = found[0]
    if isabstract(part):
        lacks = ", ".join(sorted(part.__abstractmethods__))
        raise UsageError(f"'{name}' cannot be registered: '{part.__name__}' does not implement {lacks}.")
    if missing := " and ".join(field for field in get_annotations(kind) if not hasattr(part, field)):
        raise UsageError(f"'{name}' cannot be registered: '{part.__name__}' does not say its {missing}.")
    if wrong := [one for one in part.files if one not in parameters(part)]:
        raise UsageError(f"'{name}' cannot be registered: its 'files' are names of parameters, and not '{wrong[0]}'.")
    if kind is Selector and not _ranks(part):
        raise UsageError(
            f"'{name}' cannot be registered: '{part.__name__}' does not implement rank, and has no scores to rank by "
            "(observation_window or scores_arrivals)."
        )
    return home


def _ranks(selector: type[Selector]) -> bool:
    """Return whether a selector implements an order, or has scores for the default order."""
    overrides = any(getattr(selector, name) is not getattr(Selector, name) for name in ("rank", "observation_window"))
    return overrides or selector.scores_arrivals or selector.keeps_all
