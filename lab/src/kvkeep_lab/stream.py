"""A text of any length through one cache: does memory stay, does time stay, does the model keep its wits?

StreamingLLM's claim (arXiv:2309.17453, Figs. 3 and 5), on the user's own model and text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from kvkeep.cache import memory_of
from kvkeep.stores.meter import Memory

STEPS = 16
"""Tokens at the end of each stretch that are read one by one, and timed."""


@dataclass(frozen=True)
class Stretch:
    """Some tokens in a row.

    start: the first's number in the text. perplexity: of each, given all before it that the cache keeps. read_ms,
    step_ms: milliseconds a token, read in chunks, and one by one (median). memory: afterwards.
    """

    start: int
    tokens: int
    perplexity: float
    read_ms: float
    step_ms: float
    memory: Memory


@torch.inference_mode()
def stream(
    model: Any,
    ids: Sequence[int],
    cache: Any,
    *,
    stretch: int = 1024,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Stretch]:
    """Read ``ids`` into ``cache``, ``stretch`` tokens at a time, and yield what each stretch was like.

    The last token is only predicted. Raises UsageError where the cache cannot go on, before the stretch that it cannot
    take; what was yielded until then stands.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(ids)], device=device)
    for start in range(0, tokens.shape[1] - 1, stretch):
        own = tokens[:, start : min(start + stretch, tokens.shape[1] - 1)]
        steps = min(STEPS, own.shape[1] - 1)
        if callable(admit := getattr(cache, "admit", None)):
            admit(own.shape[1])
        begin = time.perf_counter()
        rows = [model(own[:, : own.shape[1] - steps], past_key_values=cache).logits[0]]
        read = time.perf_counter() - begin
        took = []
        for number in range(own.shape[1] - steps, own.shape[1]):
            begin = time.perf_counter()
            rows.append(model(own[:, number : number + 1], past_key_values=cache).logits[0])
            took.append(time.perf_counter() - begin)
        expected = tokens[0, start + 1 : start + own.shape[1] + 1]
        loss = torch.nn.functional.cross_entropy(torch.cat(rows).float(), expected)
        progress(start + own.shape[1], tokens.shape[1] - 1)
        yield Stretch(
            start,
            own.shape[1],
            math.exp(float(loss)),
            1e3 * read / (own.shape[1] - steps),
            1e3 * median(took) if took else float("nan"),
            memory_of(cache),
        )
