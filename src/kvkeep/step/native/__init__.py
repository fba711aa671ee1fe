"""Executes steps by the native library: bits that depend on the entries alone, and on nothing about where they lie.

The library (native/attention.h) counts entries from a row's first token and goes through them in blocks of 512 in
order, so a query's result is the same to the bit whether it comes alone or with others, and wherever entries lie.
"""

from kvkeep.step.native.calls import Call, CollectedAttention, attend_all, in_order, received, scored
from kvkeep.step.native.entries import joins, reads, runs, spans_of, takes
from kvkeep.step.native.steps import insert, inserts, run, run_layers

__all__ = [
    "Call",
    "CollectedAttention",
    "attend_all",
    "in_order",
    "insert",
    "inserts",
    "joins",
    "reads",
    "received",
    "run",
    "run_layers",
    "runs",
    "scored",
    "spans_of",
    "takes",
]
