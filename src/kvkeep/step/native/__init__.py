"""Executes steps by the native library. The bits of a result depend on the entries, never on where they lie.

The library (native/attention.h) counts entries from a row's first token and processes them in order, in blocks of 512.
So a query's result has the same bits in any batch, and wherever the entries lie.
"""

from kvkeep.step.native.calls import Call, CollectedAttention, attend_all, in_order, received, scored
from kvkeep.step.native.entries import attends, can_attend, can_join, can_read, joinable, spans_of, supports_dims
from kvkeep.step.native.steps import can_insert, insert, run, run_layers, wrote

__all__ = [
    "Call",
    "CollectedAttention",
    "attend_all",
    "attends",
    "can_attend",
    "can_insert",
    "can_join",
    "can_read",
    "in_order",
    "insert",
    "joinable",
    "received",
    "run",
    "run_layers",
    "scored",
    "spans_of",
    "supports_dims",
    "wrote",
]
