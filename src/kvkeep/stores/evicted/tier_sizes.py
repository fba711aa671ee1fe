"""The number of groups in each precision tier, and their bytes. The store fills tiers by this rule, and the planner
predicts them by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvkeep.contracts.part import PredictedBytes
from kvkeep.geometry import LayerGeometry
from kvkeep.stores.evicted.groups import GROUP


class Bits(NamedTuple):
    """Bits of a number in keys and in values."""

    keys: int
    values: int


TIERS = (Bits(16, 16), Bits(8, 8), Bits(4, 4), Bits(4, 2))
"""Bits of the tiers; a model whose numbers have 16 bits begins with the second."""

ABOVE = (2.15, 0.95, 0.4, 0.0)
"""The end of each tier: its distance from the depth where entries are dropped, as a share of all groups. An entry is
worth a tier while its squared share of the attention, times the squared error avoided, exceeds a price in bytes. The
attention of groups falls with their rank r of R about like exp(-2.7 r/R) (SmolLM2, 1,024 tokens). So the ends of tiers
differ by ln(error avoided per byte) / 5.4. The errors are the KL measured with codes of one width for all entries."""


def tier_counts(limit: int, prices: Sequence[int], groups: int) -> list[int]:
    """Return the number of a lane's ``groups`` in each tier. The division is the deepest one that fits in ``limit``
    bytes, at ``prices`` bytes a group."""

    ends_above = ABOVE[-len(prices) :]

    def reach(depth: float) -> list[int]:
        ends = [min(groups, max(0, int(groups * (depth - above) + 0.5))) for above in ends_above]
        return [end - above for end, above in zip(ends, [0, *ends], strict=False)]

    def size(depth: float) -> int:
        return sum(count * price for count, price in zip(reach(depth), prices, strict=True))

    low, high = 0.0, 1.0 + ABOVE[0]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return reach(low if size(high) > limit else high)


def tiers_hold(limit: int, layer: LayerGeometry, width: int, left: Sequence[int]) -> PredictedBytes:
    """Return the bytes of one layer's tiers, with ``limit`` bytes a lane. left: the number of
    entries that a lane evicts in each pass. Groups never move up a tier, so the function repeats every pass."""
    if not sum(left):
        return PredictedBytes()
    costs, channels = prices(layer.key_dim, layer.value_dim, width), channel_bytes(layer.value_dim)
    groups_held, waiting, peak = [0] * len(costs), 0, 0
    for count in left:
        coming, waiting = divmod(waiting + count, GROUP)
        if not coming:
            continue
        spare = 0
        for number, wanted in enumerate(tier_counts(limit - channels, costs, sum(groups_held) + coming)):
            spare += wanted
            kept = min(groups_held[number] + coming, spare)
            coming += groups_held[number] - kept
            groups_held[number], spare = kept, spare - kept
        peak = max(peak, sum(count * cost for count, cost in zip(groups_held, costs, strict=True)))
    groups, numbers = sum(groups_held), layer.key_dim + layer.value_dim
    coded = sum(count * cost for count, cost in zip(groups_held, costs, strict=True))
    size = coded + numbers * waiting_bytes(width)
    return PredictedBytes(
        compressed=layer.kv_heads * (size + (channels if groups else 0)),
        bookkeeping=8 * layer.kv_heads * GROUP * (groups + 1),
        workspace=layer.kv_heads * (size + 2 * (max(left) + GROUP) * numbers * width + 4 * numbers * GROUP * groups),
        entries=GROUP * groups + waiting,
        shrunk=layer.kv_heads * (peak - coded),
    )


def prices(key_dim: int, value_dim: int, width: int) -> list[int]:
    """Return the bytes of one group of a lane in each tier."""
    return [group_bytes(key_dim, value_dim, bits) for bits in tiers(width)]


def tiers(width: int) -> tuple[Bits, ...]:
    """Return the tiers of a model whose numbers have ``width`` bytes: the tiers with fewer bits than the numbers."""
    return tuple(bits for bits in TIERS if bits.keys < 8 * width)


def group_bytes(key_dim: int, value_dim: int, bits: Bits) -> int:
    """Return the bytes of one group of one lane."""
    return key_dim * (GROUP * bits.keys // 8 + 4) + GROUP * (value_dim * bits.values // 8 + 4)


def channel_bytes(value_dim: int) -> int:
    """Return the bytes of the mean and deviation of one lane's channels."""
    return 8 * value_dim


def waiting_form(width: int) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of the codes of waiting entries, and that of their scales and offsets, for a model whose numbers
    have ``width`` bytes."""
    return (torch.int8, torch.float16) if width <= 2 else (torch.int16, torch.float32)


def waiting_bytes(width: int) -> int:
    """Return the bytes of one channel of a waiting group."""
    codes, scales = waiting_form(width)
    return GROUP * codes.itemsize + 2 * scales.itemsize
