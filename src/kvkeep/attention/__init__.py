"""Attention over segments: the mathematics every cache method shares."""

from kvkeep.attention.attend import Segment, attend, weighed
from kvkeep.attention.received import received

__all__ = ["Segment", "attend", "received", "weighed"]
