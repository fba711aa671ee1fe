"""``keydiff``: entries whose keys differ most from the mean key stay (Park et al., arXiv:2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvkeep.contracts.selector import Candidates, Selector


@dataclass(frozen=True)
class KeyDiff(Selector):
    """The entries whose keys are least similar to the mean direction of all keys stay.

    The anchor is the mean of the normalised keys of a lane, resident and new, as cached. The rank of an entry is minus
    the cosine of its key and the anchor. No attention is observed, and the newest entry is not protected. The anchor is
    computed again for every chunk and for every decoded token.
    """

    leaves: ClassVar[str] = "entries whose keys are most like the mean key"
    source: ClassVar[str] = "arXiv:2504.15364"
    needs_kv: ClassVar[bool] = True

    def rank(self, entries: Candidates) -> Tensor:
        assert entries.keys is not None
        keys = F.normalize(entries.keys.float(), dim=-1)  # (lanes, entries, key_dim)
        anchor = keys.masked_fill(entries.slots[..., None] < 0, 0).sum(1, keepdim=True)
        return -F.cosine_similarity(keys, anchor, dim=-1)
