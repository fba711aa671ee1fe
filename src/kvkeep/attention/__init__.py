"""Attention over segments: the mathematics every cache method shares."""

from kvkeep.attention.attend import Segment, attend, weighed
from kvkeep.attention.recall import recall_attend
from kvkeep.attention.received import received

__all__ = ["Segment", "attend", "recall_attend", "received", "weighed"]
