"""The effective rank of what scores attention, and what truncating it does: KV-Direct's Fig. 5 and 6
(arXiv:2603.19664, sections 3.3 and 5.7).

Norms and rotation left aside, a head's score of residuals i and j is h_i M h_j^T / sqrt(d), M = W_q W_k^T (Eq. 18).
Its effective rank at 90 % is the least r with (s_1^2 + ... + s_r^2) / sum_i s_i^2 >= 0.9 (Eqs. 19-20). M is never
formed: with W_q = Q_q R_q and W_k = Q_k R_k its singular values are those of R_q R_k^T, which is d_head by d_head.

Three things are measured beside it. Several query heads share a KV head: a key is asked by all of them, by M stacked
over the group. And a score at distance D is h_i W_q R_D W_k^T h_j: rotation stands between the two, so the rank
depends on the distance. And energies of s_i^4, as they come of squaring the eigenvalues of M M^T where those are
taken for singular values: not what Eq. 19 says, but near what the paper prints for the model that is also ours.

Truncation keeps, of each head's W_k and W_v, the part in its first r left singular vectors: of every token (the
weights themselves, as the paper's text says; and of keys or values alone, and of all but the first token), or of
those that left the newest 32 or so (method ``lowrank:r``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import bind
from kvkeep.models.head_weights import HeadWeights, head_weights
from kvkeep_lab.analyses.measures import effective_rank
from kvkeep_lab.compare import cases, compare, judge
from kvkeep_lab.generation import greedy

ENERGY = 0.9
DISTANCES = (1, 16, 256)
EVERY: dict[str, tuple[tuple[str, ...], int]] = {
    "keys and values": (("key", "value"), 0),
    "keys": (("key",), 0),
    "values": (("value",), 0),
    "all but the first": (("key", "value"), 1),
}
"""Ways to truncate every entry: what of it, and how many of the text's first tokens are left as they are."""

LEFT = "lowrank"
SHARES = (1 / 4, 1 / 2, 3 / 4, 1)
ROOM = 128
"""Entries of budget beside the text: none leaves the cache, all that are not among the newest are truncated."""


PAPER = {1.0: ("100", "5e-4"), 0.5: ("5-15", "10.9"), 0.125: ("5-10", "> 11")}
"""Token match in percent and KL by the share of d_head, as section 5.7 tells them of its models (below 15 of 64: one
range)."""


@dataclass(frozen=True)
class LayerRank:
    """One layer. dim: d_head. heads: the effective rank of each query head's M; groups: of each KV head's, stacked;
    turned: the mean over query heads by distance, None where positions are not rotated. energy: E(r) of r = 1 ...
    dim, the mean over query heads. fourth, fourth_energy: as ``heads`` and ``energy``, of fourth powers of the
    singular values."""

    layer: int
    kind: str
    dim: int
    heads: list[float]
    groups: list[float]
    turned: dict[int, float] | None
    energy: list[float]
    fourth: list[float]
    fourth_energy: list[float]


@dataclass(frozen=True)
class Truncation:
    """One rank and one way to truncate. match: the share of greedy tokens that are the full cache's. kl, top1: of the
    distributions given the full cache's text, mean in nats, and the share with the same largest. error: why there is
    nothing else."""

    way: str
    rank: int
    match: float | None = None
    kl: float | None = None
    top1: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Ranks:
    """All layers, and what truncation does to a prompt."""

    layers: list[LayerRank]
    prompt_tokens: int = 0
    new_tokens: int = 0
    truncations: tuple[Truncation, ...] = ()

    def mean(self, of: str = "heads") -> float:
        """Return the mean rank over all "heads" or "groups", or that of fourth powers over all heads ("fourth")."""
        return fmean(value for layer in self.layers for value in getattr(layer, of))

    def energy(self, rank: int, of: str = "energy") -> float:
        """Return the share of M's "energy" (or "fourth_energy") that ``rank`` holds, the mean over all query
        heads."""
        weighted = [(getattr(layer, of)[min(rank, layer.dim) - 1], len(layer.heads)) for layer in self.layers]
        return sum(share * count for share, count in weighted) / sum(count for _, count in weighted)


@torch.no_grad()
def ranks(model: Any, *, progress: Callable[[int, int], None] = lambda done, total: None) -> list[LayerRank]:
    """Return every layer's effective ranks, from the weights alone. Raises UnsupportedModelError for a family whose
    heads have no weights of their own."""
    adapter = bind(model)
    geometry = ModelGeometry.from_config(model.config)
    weights = head_weights(model)
    turns = _turns(adapter, geometry)
    found = []
    for layer, mine in zip(geometry.layers, weights, strict=True):
        keys = weights[layer.source].key
        assert keys is not None
        found.append(_layer(adapter, layer, mine, keys, turns))
        progress(layer.index + 1, len(weights))
    return found


def _turns(adapter: Adapter, geometry: ModelGeometry) -> bool:
    full = [layer.index for layer in geometry.full_layers]
    try:
        adapter.require("turn", full, "ranks by distance")
    except UnsupportedModelError:
        return False
    return True


def _layer(adapter: Adapter, layer: LayerGeometry, weights: HeadWeights, keys: Tensor, turns: bool) -> LayerRank:
    query = weights.query.transpose(1, 2)  # (heads, hidden, dim)
    key = keys.transpose(1, 2)  # (kv_heads, hidden, dim)
    heads, kv_heads = len(query), len(key)
    singular = product_singular_values(query, key.repeat_interleave(heads // kv_heads, 0))
    energies = singular.square()
    stacked = product_singular_values(query.reshape(kv_heads, -1, query.shape[-1]), key)
    turned = None
    if turns:
        turned = {}
        for distance in DISTANCES:
            by = torch.full((1, key.shape[1]), distance, device=key.device)
            far = adapter.turn(layer.index, key[None], adapter.angles(layer.index, key, by))[0]
            values = product_singular_values(query, far.repeat_interleave(heads // kv_heads, 0))
            turned[distance] = float(effective_rank(values.square(), ENERGY).mean())
    return LayerRank(
        layer.index,
        layer.kind,
        query.shape[-1],
        effective_rank(energies, ENERGY).tolist(),
        effective_rank(stacked.square(), ENERGY).tolist(),
        turned,
        _held(energies),
        effective_rank(energies.square(), ENERGY).tolist(),
        _held(energies.square()),
    )


def _held(energies: Tensor) -> list[float]:
    """Return E(r), the mean over heads."""
    return (energies.cumsum(-1) / energies.sum(-1, keepdim=True)).mean(0).tolist()


def product_singular_values(a: Tensor, b: Tensor) -> Tensor:
    """Return the singular values of A B^T that can differ from 0, falling, for a (..., m, dim), b (..., n, dim) with
    m and n at least dim: (..., dim) float64."""
    triangles = [torch.linalg.qr(part.double(), mode="r").R for part in (a, b)]
    return torch.linalg.svdvals(triangles[0] @ triangles[1].transpose(-1, -2))


def default_ranks(dim: int) -> list[int]:
    """Return the ranks that are tried unasked: the quarters of d_head, and all of it."""
    return sorted({max(1, round(share * dim)) for share in SHARES})


def truncations(
    model: Any,
    prompt: Sequence[int],
    listed: Sequence[int],
    *,
    new: int,
    progress: Callable[[str, float, float | None], None] = lambda text, done, total: None,
) -> list[Truncation]:
    """Truncate to every rank of ``listed``, in both ways, and continue ``prompt`` (token ids) by ``new`` greedy
    tokens. Raises UsageError for a rank out of 1 ... d_head."""
    bind(model)
    geometry = ModelGeometry.from_config(model.config)
    dim = max(max(layer.key_dim, layer.value_dim) for layer in geometry.layers)
    for rank in listed:
        if not 1 <= rank <= dim:
            raise UsageError(f"A rank is from 1 to the width of a head, here {dim}, not {rank}.")
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    found = _every_entry(model, ids, listed, new, lambda done, total: progress("truncated weights", done, total))
    methods = [f"lowrank:{rank}" for rank in listed]
    budget = str(len(prompt) + new + ROOM)
    comparison = compare(model, prompt, cases(methods, [budget]), new=new, progress=progress)
    for rank, row in zip(listed, comparison.rows, strict=True):
        found.append(Truncation(LEFT, rank, row.match, row.kl_mean, row.top1, row.error))
    return found


@torch.no_grad()
def _every_entry(
    model: Any, ids: Tensor, listed: Sequence[int], new: int, tell: Callable[[int, int], None]
) -> list[Truncation]:
    def continued() -> list[int]:
        return greedy(model, ids, new, past_key_values=DynamicCache(config=model.config))[0]

    def distributions(tokens: Sequence[int]) -> Tensor:
        given = torch.cat([ids, ids.new_tensor([list(tokens[:-1])])], dim=1)
        return model(given, use_cache=False, logits_to_keep=new).logits[0].float().cpu()

    wanted = [(way, rank) for way in EVERY for rank in listed]
    tell(0, len(wanted))
    expected = continued()
    full = distributions(expected)
    found: list[Truncation] = []
    for way, rank in wanted:
        try:
            with truncated(model, rank, *EVERY[way]):
                got, logits = continued(), distributions(expected)
        except UnsupportedModelError as error:
            return [Truncation(way, rank, error=str(error)) for way, rank in wanted]
        judged = [judge(*both) for both in zip(full, logits, expected, strict=True)]
        found.append(
            Truncation(
                way,
                rank,
                fmean(a == b for a, b in zip(got, expected, strict=True)),
                fmean(position.kl for position in judged),
                fmean(position.agrees for position in judged),
            )
        )
        tell(len(found), len(wanted))
    return found


@contextmanager
def truncated(model: Any, rank: int, parts: Sequence[str] = ("key", "value"), spared: int = 0) -> Iterator[None]:
    """Within the block, let each head's ``parts`` keep only what lies in the first ``rank`` left singular vectors of
    its W_k, or W_v. The first ``spared`` tokens of a text are left as they are. Raises UnsupportedModelError where
    keys and values have no modules of their own."""
    adapter = bind(model)
    handles = []
    try:
        for weights in head_weights(model):
            attention = getattr(adapter.layers[weights.layer], "self_attn", None)
            for part in parts:
                if (weight := weights.parts.get(part)) is None:
                    continue
                if (module := getattr(attention, f"{part[0]}_proj", None)) is None:
                    raise UnsupportedModelError(
                        f"'{adapter.family}' has no key and value projections of their own to truncate."
                    )
                handles.append(module.register_forward_hook(_onto(weight, rank, spared)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _onto(weight: Tensor, rank: int, spared: int) -> Any:
    """Return the hook that projects an output (..., heads * dim) onto the first directions of weight (heads, dim,
    hidden)."""
    first = torch.linalg.svd(weight, full_matrices=False).U[..., :rank]
    projector = first @ first.transpose(-1, -2)  # (heads, dim, dim)

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        bias = 0 if module.bias is None else module.bias  # not a part of W
        rows = (output - bias).unflatten(-1, projector.shape[:2]).unsqueeze(-2)
        kept = (rows @ projector.to(output.dtype)).flatten(-3) + bias
        if spared and output.shape[-2] > 1:  # a whole text; single tokens come later
            kept[..., :spared, :] = output[..., :spared, :]
        return kept

    return hook
