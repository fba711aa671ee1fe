"""What became of an entry: the words in which a cache says where each token is."""

from __future__ import annotations

from enum import IntEnum


class Whereabouts(IntEnum):
    """Where one slot's key and value are, in one layer and KV head.

    The numbers are written into the pages of ``kvkeep inspect``; new ones go at the end.
    """

    DROPPED = 0  # gone: attention will never see it again
    RESIDENT = 1  # attention reads it as it is
    CHECKPOINTED = 2  # not resident, and exact keys and values can be rebuilt
    QUANTISED = 3  # kept in fewer bits
    MERGED = 4  # averaged into another entry
    SKETCHED = 5  # only its part in a summary of many entries is left
