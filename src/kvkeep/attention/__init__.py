"""Attention over segments: the mathematics every cache method shares."""

from kvkeep.attention.attend import Segment, attend, weighed
from kvkeep.attention.received import received
from kvkeep.attention.recall import recall_attend

__all__ = ["Segment", "attend", "recall_attend", "received", "weighed"]
