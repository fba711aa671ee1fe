"""Who leaves: one file for each selector, and their names."""

from kvkeep.policies.selectors.base import Selector
from kvkeep.policies.selectors.duo_attention import DuoAttention
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.policies.selectors.h2o_fisher import H2OFisher
from kvkeep.policies.selectors.knorm import KNorm
from kvkeep.policies.selectors.kvpress import KVPress
from kvkeep.policies.selectors.lru import LRU
from kvkeep.policies.selectors.pyramidkv import PyramidKV
from kvkeep.policies.selectors.random import Random
from kvkeep.policies.selectors.snapkv import SnapKV
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.policies.selectors.tova import Tova
from kvkeep.policies.selectors.window import Window

SELECTORS: dict[str, type[Selector]] = {
    "window": Window,
    "streaming-llm": StreamingLLM,
    "h2o": H2O,
    "h2o-fisher": H2OFisher,
    "snapkv": SnapKV,
    "tova": Tova,
    "pyramidkv": PyramidKV,
    "duo-attention": DuoAttention,
    "knorm": KNorm,
    "random": Random,
    "lru": LRU,
    "kvpress": KVPress,
}
