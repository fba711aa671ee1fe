"""Executes steps by the native library. The bits of a result depend on the entries, never on where they lie.

The library (native/attention.h) counts entries from a row's first token and goes through them in blocks of 512 in
order, so a query's result is the same to the bit whether it comes alone or with others, and wherever entries lie.
"""

from kvkeep.step.native.calls import Call, CollectedAttention, attend_all, in_order, received, scored
from kvkeep.step.native.entries import can_attend, can_join, can_read, spans_of, supports_dims
from kvkeep.step.native.steps import can_insert, insert, run, run_layers

__all__ = [
    "Call",
    "CollectedAttention",
    "attend_all",
    "can_attend",
    "can_insert",
    "can_join",
    "can_read",
    "in_order",
    "insert",
    "received",
    "run",
    "run_layers",
    "scored",
    "spans_of",
    "supports_dims",
]
