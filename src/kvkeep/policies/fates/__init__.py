"""What becomes of entries that leave: one file for each fate, and their names."""

from kvkeep.policies.fates.base import Fate
from kvkeep.policies.fates.cam import Cam
from kvkeep.policies.fates.checkpointed import Checkpointed
from kvkeep.policies.fates.dropped import Drop
from kvkeep.policies.fates.ladder import OnLadder
from kvkeep.policies.fates.lowrank import LowRank
from kvkeep.policies.fates.merged import Merge
from kvkeep.policies.fates.quantised import Quantised
from kvkeep.policies.fates.segmented import Segmented
from kvkeep.policies.fates.sketched import Sketched

FATES: dict[str, type[Fate]] = {
    "drop": Drop,
    "checkpoint": Checkpointed,
    "quantize": Quantised,
    "ladder": OnLadder,
    "lowrank": LowRank,
    "segments": Segmented,
    "merge": Merge,
    "cam": Cam,
    "sketch": Sketched,
}
