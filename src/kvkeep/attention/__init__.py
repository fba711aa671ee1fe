"""Attention over segments: the mathematics every cache method shares."""

from kvkeep.attention.attend import attend, attend_scored, received
from kvkeep.step.plan import Segment

__all__ = ["Segment", "attend", "attend_scored", "received"]
