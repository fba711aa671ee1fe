"""The effect of truncating keys and values to a rank on a text (KV-Direct, arXiv:2603.19664, section 5.7).

Truncation projects keys and values onto the first r left singular vectors of each head's W_k and W_v. The ways differ
in the truncated entries:

* all entries, which truncates the weights as the paper's text says;
* only keys, or only values;
* all entries except the first token's;
* all entries except about 32 of the newest (method ``lowrank:r``).

For section 3.3, scores are also computed by the best M of rank r, M = W_q W_k^T (Eq. 21), with unchanged keys and
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.binding import bind
from kvkeep_lab.head_weights import head_weights
from kvkeep_lab.reading import greedy
from kvkeep_lab.reference import cases, compare, judge
from kvkeep_lab.studies.base import Progress, part

EVERY: dict[str, tuple[tuple[str, ...], int]] = {
    "keys and values": (("key", "value"), 0),
    "keys": (("key",), 0),
    "values": (("value",), 0),
    "all but the first": (("key", "value"), 1),
}
"""Ways to truncate every entry: the truncated parts, and the number of first tokens that are not truncated."""

SCORES = "scores"
LOWRANK = "lowrank"
WAYS = (*EVERY, SCORES, LOWRANK)
SPARE_ENTRIES = 128
"""Entries of the budget in addition to the text, so that no entry is evicted; all but the newest are truncated."""


@dataclass(frozen=True)
class Truncation:
    """One rank and one way to truncate. ``kl`` and ``top1`` compare distributions after the full cache's text."""

    way: str
    rank: int
    match: float | None = None
    """Share of greedy tokens that equal the full cache's."""
    kl: float | None = None
    """Mean KL in nats."""
    top1: float | None = None
    """Share of distributions with the same most probable token."""
    error: str = ""
    """Reason of missing measurements."""


def truncations(
    model: Any, prompt: Sequence[int], listed: Sequence[int], *, new: int, progress: Progress
) -> list[Truncation]:
    """Truncate to every rank of ``listed`` in all ways, and continue ``prompt`` (token ids) by ``new`` greedy tokens.
    Raises UsageError for a rank outside 1 ... d_head."""
    bind(model)
    geometry = ModelGeometry.from_config(model.config)
    dim = max(max(layer.key_dim, layer.value_dim) for layer in geometry.layers)
    for rank in listed:
        if not 1 <= rank <= dim:
            raise UsageError(f"A rank is from 1 to the width of a head, here {dim}, not {rank}.")
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    found = _every_entry(model, ids, listed, new, part(progress, 0, 2))
    listed_cases = cases([f"{LOWRANK}:{rank}" for rank in listed], [str(len(prompt) + new + SPARE_ENTRIES)])
    comparison = compare(model, prompt, listed_cases, new=new, progress=part(progress, 1, 2))
    for rank, row in zip(listed, comparison.rows, strict=True):
        found.append(Truncation(LOWRANK, rank, row.match, row.kl_mean, row.top1, row.error))
    return found


@torch.no_grad()
def _every_entry(model: Any, ids: Tensor, listed: Sequence[int], new: int, progress: Progress) -> list[Truncation]:
    def continued() -> list[int]:
        return greedy(model, ids, new, cache=DynamicCache(config=model.config))[0]

    def distributions(tokens: Sequence[int]) -> Tensor:
        given = torch.cat([ids, ids.new_tensor([list(tokens[:-1])])], dim=1)
        return model(given, use_cache=False, logits_to_keep=new).logits[0].float().cpu()

    wanted = [(way, rank) for way in (*EVERY, SCORES) for rank in listed]
    expected = continued()
    full = distributions(expected)
    found: list[Truncation] = []
    for way, rank in wanted:
        progress("truncated weights", len(found), len(wanted))
        try:
            with scored_by(model, rank) if way == SCORES else truncated(model, rank, *EVERY[way]):
                got, logits = continued(), distributions(expected)
        except UnsupportedModelError as error:
            return [Truncation(way, rank, error=str(error)) for way, rank in wanted]
        judged = [judge(*both) for both in zip(full, logits, expected, strict=True)]
        match = fmean(a == b for a, b in zip(got, expected, strict=True))
        kl, top1 = fmean(position.kl for position in judged), fmean(position.agrees for position in judged)
        found.append(Truncation(way, rank, match, kl, top1))
    return found


@contextmanager
def truncated(model: Any, rank: int, parts: Sequence[str] = ("key", "value"), spared: int = 0) -> Iterator[None]:
    """Within the block, project each head's ``parts`` onto the first ``rank`` left singular vectors of its W_k or W_v.
    The first ``spared`` tokens of a text are not projected. Raises UnsupportedModelError if keys and values have no
    separate modules."""
    mapped = [
        (weights.layer, name, _onto(weights.parts[name], rank))
        for weights in head_weights(model)
        for name in parts
        if name in weights.parts
    ]
    with _mapped(model, mapped, spared):
        yield


@contextmanager
def scored_by(model: Any, rank: int) -> Iterator[None]:
    """Within the block, compute scores by each query head's M_r (Eq. 21), before norms of heads and rotation as in the
    paper. Raises UnsupportedModelError if queries have no separate module."""
    weights, geometry = head_weights(model), ModelGeometry.from_config(model.config)
    mapped = []
    for layer, of_layer in zip(geometry.layers, weights, strict=True):
        keys = weights[layer.source].key
        assert keys is not None
        mapped.append((of_layer.layer, "query", best_scores(of_layer.query, keys, rank)))
    with _mapped(model, mapped, 0):
        yield


def best_scores(query: Tensor, key: Tensor, rank: int) -> Tensor:
    """Return T, (heads, dim, dim), with which queries q T have the scores of M at rank ``rank``. With U, the first left
    singular vectors of M = W_q W_k^T, and with W_q = Q R and U = Q A: U U^T W_q = W_q R^-1 A A^T R.

    query: W_q transposed, (heads, dim, hidden); key: (kv_heads, dim, hidden).
    """
    key = key.repeat_interleave(len(query) // len(key), 0)
    ours, theirs = (torch.linalg.qr(part.double().transpose(1, 2), mode="r").R for part in (query, key))
    first = torch.linalg.svd(ours @ theirs.transpose(1, 2)).U[..., :rank]
    return torch.linalg.lstsq(ours, first @ first.transpose(1, 2) @ ours).solution.float()


def _onto(weight: Tensor, rank: int) -> Tensor:
    """Return the projector (heads, dim, dim) onto the first directions of weight (heads, dim, hidden)."""
    first = torch.linalg.svd(weight, full_matrices=False).U[..., :rank]
    return first @ first.transpose(-1, -2)


@contextmanager
def _mapped(model: Any, maps: Sequence[tuple[int, str, Tensor]], spared: int) -> Iterator[None]:
    """Multiply the outputs of projections, given by layer and name, by a matrix (dim, dim) per head."""
    adapter = bind(model)
    handles = []
    try:
        for layer, name, matrix in maps:
            attention = getattr(adapter.layers[layer], "self_attn", None)
            if (module := getattr(attention, f"{name[0]}_proj", None)) is None:
                raise UnsupportedModelError(f"'{adapter.family}' has no {name} projection of its own to truncate.")
            handles.append(module.register_forward_hook(_multiplying(matrix, spared)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _multiplying(matrix: Tensor, spared: int) -> Any:
    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        bias = 0 if module.bias is None else module.bias  # the bias is not part of W
        rows = (output - bias).unflatten(-1, matrix.shape[:2]).unsqueeze(-2)
        kept = (rows @ matrix.to(output.dtype)).flatten(-3) + bias
        if spared and output.shape[-2] > 1:  # a text; single tokens come later in it
            kept[..., :spared, :] = output[..., :spared, :]
        return kept

    return hook
