"""Fates that are also methods of the same name, each with its preset."""

from __future__ import annotations

from kvkeep.contracts.fate import Fate
from kvkeep.contracts.selector import Selector
from kvkeep.policies.registry import Preset
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.policies.selectors.window import Window
from kvkeep_lab.published.asymkv import AsymKV
from kvkeep_lab.published.asymkv_published import AsymKVPublished
from kvkeep_lab.published.attention_matching import AttentionMatching
from kvkeep_lab.published.cam import Cam
from kvkeep_lab.published.highest_attention import HighestAttention
from kvkeep_lab.published.kvslimmer_exact import KVSlimmerExact
from kvkeep_lab.published.kvslimmer_published import KVSlimmerPublished
from kvkeep_lab.published.lowrank import LowRank


def _named(selector: Selector, fate: type[Fate]) -> tuple[type[Fate], Preset]:
    """Return a fate and its preset, whose description is the first line of the fate's docstring."""
    return fate, Preset(selector, fate, (fate.__doc__ or "").partition("\n")[0], fate.source)


LOWRANK = (
    LowRank,
    Preset(
        Window(),
        LowRank,
        "Entries truncated to a rank of each head's projections; here to show that it fails.",
        LowRank.source,
        {"exact": 1},
    ),
)
CAM = (
    Cam,
    Preset(
        StreamingLLM(),
        Cam,
        "Sinks and the newest; while decoding, an evicted entry's value is added to the next entries, by chance.",
        Cam.source,
    ),
)
ASYMKV = _named(H2O(), AsymKV)
KVSLIMMER_EXACT = _named(H2O(), KVSlimmerExact)
ASYMKV_PUBLISHED = _named(Window(), AsymKVPublished)
KVSLIMMER_PUBLISHED = _named(Window(), KVSlimmerPublished)
ATTENTION_MATCHING = _named(HighestAttention(), AttentionMatching)
