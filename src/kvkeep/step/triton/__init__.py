"""Executes steps on a GPU by kernels of its own (:mod:`kvkeep.step.triton.kernels`), written in Triton.

One launch writes the new entries of all sessions of a pass, and two attend for all of them: entries are read where they
lie, in blocks of 512 from the first one that a query sees; then the blocks are combined in order, in float32.

**What is promised.** On one model of GPU, with one version of triton, the attention of a query has the same bits for
the same entries: whether they lie in a ring, in pages or in one tensor, whether the method is ``full`` or ``kv-direct``
with any budget, whatever other sessions the pass has, and at whatever place of a batch it is. What is not: the same
bits on another model of GPU or with another triton, which may choose other instructions; and the same bits of a model
in chunks of another size, because torch's products, around the attention, may add in another order for another number
of rows. Passes of more than 16 tokens of a session add in another order than those of fewer.

Steps whose received attention is recorded, and those that read codes, are left to :mod:`kvkeep.step.torch`.
"""

from functools import partial

from kvkeep.step.native import attend_all as _attend_all
from kvkeep.step.native import in_order
from kvkeep.step.torch import wrote
from kvkeep.step.triton.calls import CollectedForGpu as CollectedAttention
from kvkeep.step.triton.calls import GpuCall, attends, can_attend, can_join, supports_dims
from kvkeep.step.triton.steps import run

attend_all = partial(_attend_all, call=GpuCall)

__all__ = [
    "CollectedAttention",
    "GpuCall",
    "attend_all",
    "attends",
    "can_attend",
    "can_join",
    "in_order",
    "run",
    "supports_dims",
    "wrote",
]
