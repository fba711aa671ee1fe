"""KV-Direct's Table 3: greedy tokens of every way to decode, against the stock cache's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.cache import KeepCache


@dataclass(frozen=True)
class Tokens:
    """One way of decoding. ratio: seconds by the stock cache's, prompt included.

    differs_at: the first token that is another one; gap: by how much the stock cache preferred its own there, in
    logits (about the dtype's rounding: a tie, decided by the order of sums).
    """

    way: str
    matching: int
    of: int
    seconds: float
    ratio: float
    differs_at: int | None = None
    gap: float | None = None

    @property
    def holds(self) -> bool:
        """All tokens are the same."""
        return self.matching == self.of


@torch.no_grad()
def same_tokens(
    model: Any, ids: Tensor, *, kinds: Sequence[str], new: int = 30, budgets: Sequence[int] = (0, 64)
) -> Iterator[Tokens]:
    """Decode greedily with the stock cache, without any, and with kv-direct at each budget and checkpoint kind."""
    greedy(model, ids, 2, past_key_values=DynamicCache(config=model.config))  # warms up
    expected, stock_s = greedy(model, ids, new, past_key_values=DynamicCache(config=model.config))
    yield Tokens("stock cache", new, new, stock_s, 1.0)
    ways: list[tuple[str, int | None, str]] = [("no cache", None, "")]
    ways += [(f"kv-direct B={budget}, {kind}", budget, kind) for budget in budgets for kind in kinds]
    for way, budget, kind in ways:
        options: dict[str, Any] = {"use_cache": False}
        if budget is not None:
            options = {"past_key_values": KeepCache(model, "kv-direct", budget, checkpoint=kind, where="device")}
        got, seconds = greedy(model, ids, new, **options)
        yield _compared(model, ids, way, got, expected, seconds, stock_s)


def greedy(model: Any, ids: Tensor, new: int, **options: Any) -> tuple[list[int], float]:
    """Return ``new`` greedy tokens after ``ids``, ends of text ignored, and the seconds they took."""
    ids = ids.to(next(model.parameters()).device)
    start = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, **options
    )
    return output[0, ids.shape[1] :].tolist(), time.perf_counter() - start


def _compared(
    model: Any, ids: Tensor, way: str, got: list[int], expected: list[int], seconds: float, stock_s: float
) -> Tokens:
    same = [a == b for a, b in zip(got, expected, strict=True)]
    differs_at, gap = None, None
    if not all(same):
        differs_at = same.index(False)
        before = torch.tensor([expected[:differs_at]], dtype=ids.dtype)
        sequence = torch.cat([ids.cpu(), before], dim=1).to(next(model.parameters()).device)
        logits = model(sequence, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits[0, -1]
        gap = float(logits[expected[differs_at]] - logits[got[differs_at]])
    return Tokens(way, sum(same), len(same), seconds, seconds / stock_s, differs_at, gap)
