"""Methods with a name; those of a fate have the fate's."""

from __future__ import annotations

from kvkeep.contracts.fate import Fate
from kvkeep.contracts.selector import Selector
from kvkeep.policies.fates.checkpoint import Checkpointed
from kvkeep.policies.fates.drop import Kept
from kvkeep.policies.registry import Preset
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.policies.selectors.lru import LRU
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.policies.selectors.window import Window
from kvkeep_lab.published.asymkv import AsymKV
from kvkeep_lab.published.asymkv_published import AsymKVPublished
from kvkeep_lab.published.attention_matching import AttentionMatching
from kvkeep_lab.published.cam import Cam
from kvkeep_lab.published.fetch_on_miss import FetchOnMiss
from kvkeep_lab.published.h2o_fisher import H2OFisher
from kvkeep_lab.published.highest_attention import HighestAttention
from kvkeep_lab.published.kvslimmer_exact import KVSlimmerExact
from kvkeep_lab.published.kvslimmer_published import KVSlimmerPublished
from kvkeep_lab.published.lowrank import LowRank
from kvkeep_lab.published.paged import InBlocks
from kvkeep_lab.published.segments import Segments
from kvkeep_lab.published.sketch_variants import SketchVariants
from kvkeep_lab.published.static import Preallocated


def _named(selector: Selector, fate: type[Fate]) -> tuple[type[Fate], Preset]:
    """Return a fate and its preset, whose description is the first line of the fate's docstring."""
    return fate, Preset(selector, fate, (fate.__doc__ or "").partition("\n")[0], fate.source)


STATIC = Preset(
    Preallocated(),
    Kept,
    "All entries, in memory allocated once for the budget's entries.",
    "kv-caching-tutorial, section 13",
    closed=True,
)
PAGED = Preset(
    InBlocks(),
    Kept,
    "All entries, in blocks of 32; rows with the same beginning share them, copy-on-write.",
    "arXiv:2309.06180, section 4",
    closed=True,
)
KVREVIVER_FISHER = Preset(
    H2OFisher(),
    SketchVariants,
    "As kvreviver; the Fisher information of a layer's key and value weights sets its budget.",
    "KVReviver, Algorithms 1 to 4 and appendix D",
    {"swap": 1.1},
)
KV_LRU = Preset(
    LRU(),
    Checkpointed,
    "Evicts the least recently used entries; after a step, up to 64 entries that it may have missed come back.",
    LRU.source,
    recall=FetchOnMiss(),
    closed=True,
)
QUEST = Preset(
    StreamingLLM(),
    Segments,
    "Sinks, the newest, and for each query the highest-scoring segments of all others: bounds the work of a "
    "step, not the memory.",
    Segments.source,
)
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
