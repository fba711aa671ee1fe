"""Attention over segments: the mathematics every cache method shares."""

from kvkeep.attention.attend import Segment, attend

__all__ = ["Segment", "attend"]
