"""How neighbours are merged: one file for each way, and their names."""

from kvkeep.policies.merging.asymkv import AsymKV
from kvkeep.policies.merging.base import Merging
from kvkeep.policies.merging.kvslimmer import KVSlimmer
from kvkeep.policies.merging.kvslimmer_exact import KVSlimmerExact

MERGING: dict[str, type[Merging]] = {
    "asymkv": AsymKV,
    "kvslimmer": KVSlimmer,
    "kvslimmer-exact": KVSlimmerExact,
}
