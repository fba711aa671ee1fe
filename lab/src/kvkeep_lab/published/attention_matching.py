"""``attention-matching``: entries that stay get weights and values with which attention is that of the whole text.

Attention Matching (Zweiger et al., arXiv:2602.16284), with keys that are a subset of the text's. For reference queries
q_i, keys k_j and values v_j of the text, and the chosen keys c_l, it fits weights w_l = exp(beta_l) and values u_l:

    attention mass:    sum_l w_l exp(q_i c_l) = sum_j exp(q_i k_j)              non-negative least squares for w
    attention output:  softmax(q_i c + beta) u = softmax(q_i k) v               least squares for u

Details follow the authors' "AM-HighestAttnKeys-basic" (github.com/adamzweiger/compaction): both sides of the first line
are divided by the largest exp(q_i k_j) of the query; its unconstrained solution is clamped to e^-3 .. e^3 and improved
by two steps of projected gradient descent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.hook import ReadingHook
from kvkeep.contracts.part import Site
from kvkeep.contracts.resident import WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.models.binding import bind
from kvkeep.policies.papers import Paper
from kvkeep.step.scores import scores_of
from kvkeep.stores.slots import merged_states
from kvkeep_lab.published.papers import ATTENTION_MATCHING

BOUNDS = math.exp(-3), math.exp(3)
"""The smallest and the largest weight of an entry."""
STEPS = 2
"""Steps of projected gradient descent."""


class TextAndQueries(NamedTuple):
    """A whole text of one layer, and queries of its second reading."""

    keys: Tensor
    """(lanes, slots, key_dim), as cached."""
    values: Tensor
    """(lanes, slots, value_dim), as cached."""
    real: Tensor | None
    """(lanes, slots) bool, False for padding; None: no padding."""
    queries: Tensor
    """(lanes, n, key_dim), of all heads that share the lane, rotated to positions after the text."""
    valid: Tensor
    """(lanes, n) bool, False for queries of padding."""
    scaling: float
    """The factor of products of queries with keys."""


class ReferenceQueries(ReadingHook):
    """Keeps about ``limit`` queries of each KV head of one layer, of a reading of ``tokens`` tokens."""

    def __init__(self, limit: int, tokens: int) -> None:
        self.limit, self.tokens, self.scaling = limit, tokens, 1.0
        self.queries: list[Tensor] = []
        """Of each pass (lanes, heads * n, key_dim)."""
        self.valid: list[Tensor] = []
        """Of each pass (lanes, heads * n) bool, False for padding."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [*self.queries, *self.valid]

    def attended(self, layer: Any, step: AttentionInputs) -> None:
        stride = max(1, -(-self.tokens * step.query.shape[1] // self.limit))
        none = torch.zeros(step.query.shape[:3], device=step.query.device)
        real = layer.ledger.unpadded(none, layer.heads) == 0
        self.queries.append(step.query[:, :, ::stride].flatten(1, 2).clone())
        self.valid.append(real[:, :, ::stride].flatten(1))
        self.scaling = step.scaling

    def chosen(self, source: Any, target: Any) -> None:
        """Let the store fit the entries of ``target``, which uses the queries up."""
        keys, values = source.everything()
        visible = source.ledger.visible_by(source.heads)
        real = None if visible is None else visible[:, 0, 0, : keys.shape[1]]
        queries, valid = torch.cat(self.queries, 1), torch.cat(self.valid, 1)
        self.queries, self.valid = [], []
        with target.evicted.meter.holding(keys, values):
            target.evicted.fit(TextAndQueries(keys, values, real, queries, valid, self.scaling), target.resident)


class Matched(EvictedStore):
    """Holds no entries. A fitted entry stands for the whole text: a rollback into the text removes it."""

    keeps = False
    merges = True

    def __init__(self, ledger: Ledger, meter: Meter, ridge: float) -> None:
        self.ledger, self.meter, self.ridge = ledger, meter, ridge

    def fit(self, text: TextAndQueries, resident: WorkingSet) -> None:
        """Change the resident entries so that attention to them is like attention to the whole text."""
        with self.meter.merging():
            for bank in resident.banks:
                extra, newest = bank.counted()
                lanes = range(len(bank.slots)) if bank.lanes is None else bank.lanes.tolist()
                for number, lane in enumerate(lanes):
                    columns = (bank.slots[number] >= 0).nonzero().flatten()
                    if not (len(columns) and bool(text.valid[lane].any())):
                        continue
                    scores, values, chosen = _of_lane(text, lane, bank.slots[number, columns].long())
                    weights, fitted = matched(scores, values, chosen, self.ridge)
                    bank.values[number, columns] = fitted.to(bank.values.dtype)
                    extra[number, columns] = weights - 1
                    newest[number, columns] = text.keys.shape[1] - 1

    def states(self, lanes: int, length: int) -> Tensor:
        return merged_states(self.ledger, lanes, length)


@dataclass(frozen=True)
class AttentionMatching(Fate):
    """The entries that stay get weights and values that make their attention like that of the whole text.

    The queries are those of the second reading. Each KV head is fitted by itself. Entries that are evicted later are
    dropped.
    """

    queries: int = 4096
    """About how many queries of each KV head are matched; the authors take up to 50,000."""
    ridge: float = 1e-4
    """The weight of the squared changes of values beside the squared errors of the output, as a share of the largest
    eigenvalue. The authors' default is 0."""

    label: ClassVar[str] = "matched"
    source: ClassVar[str] = "arXiv:2602.16284"
    papers: ClassVar[Sequence[Paper]] = (ATTENTION_MATCHING,)
    stores: ClassVar[type[EvictedStore]] = Matched

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise UsageError(
                f"Fate 'attention-matching' matches the attention of at least 1 query, not {self.queries}."
            )
        if not self.ridge >= 0:
            raise UsageError(f"The 'ridge' of attention-matching is 0 or more, not {self.ridge:g}.")

    def refuses(self, method: Any) -> str | None:
        if method.selector.reconstruction is None:
            return (
                "Fate 'attention-matching' needs the queries of a second reading; use the selector highest-attention "
                "or kvzip."
            )
        return "Its fit changes the values of all entries that stay; use 'kvzip'." if method.pin else None

    def check(self, model: Any, geometry: ModelGeometry) -> None:
        if bind(model).latent:
            raise UnsupportedModelError(
                f"'{geometry.model_type}' caches latents, whose values cannot be fitted alone; use kvzip."
            )

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return Matched(site.ledger, site.meter, self.ridge)

    def reading_hook(self, tokens: int) -> ReadingHook:
        return ReferenceQueries(self.queries, tokens)


def _of_lane(text: TextAndQueries, lane: int, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of a lane's queries, (n, entries) float32, the values (entries, value_dim) float32, and the
    places of ``slots`` among the entries, without padding."""
    keys, values = text.keys[lane].float(), text.values[lane].float()
    if text.real is not None:
        real = text.real[lane]
        keys, values, slots = keys[real], values[real], real.cumsum(0)[slots] - 1
    queries = text.queries[lane][text.valid[lane]].float()
    return scores_of(queries @ keys.T, text.scaling), values, slots


def matched(scores: Tensor, values: Tensor, chosen: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return the weights (t,) and the values (t, value_dim) of the entries ``chosen`` (t,), all float32. scores: (n,
    entries), of the reference queries and all entries. values: (entries, value_dim)."""
    if len(chosen) == len(values):
        return torch.ones(len(chosen), device=values.device), values[chosen]
    masses = (scores - scores.amax(1, keepdim=True)).exp()
    weights = bounded_weights(masses[:, chosen].double(), masses.sum(1).double())
    attention = (scores[:, chosen] + weights.log()).softmax(1)  # float64
    kept = values[chosen].double()
    output = (scores.softmax(1) @ values).double()
    return weights.float(), (kept + least_squares(attention, output - attention @ kept, ridge)).float()


def bounded_weights(masses: Tensor, total: Tensor) -> Tensor:
    """Return w within :data:`BOUNDS` with ``masses`` w near ``total``; masses (n, t), total (n,)."""
    weights = (1 + least_squares(masses, (total - masses.sum(1))[:, None])[:, 0]).clamp(*BOUNDS)
    step = 1 / squared_norm(masses).clamp(min=1e-6)
    for _ in range(STEPS):
        weights = (weights - step * (masses.T @ (masses @ weights - total))).clamp(*BOUNDS)
    return weights


def least_squares(design: Tensor, target: Tensor, ridge: float = 0.0) -> Tensor:
    """Return the x, (t, m), with the least |design x - target|^2 + ridge |design|^2 |x|^2; without a ridge, the
    shortest. In float64, because LAPACK rounds otherwise from call to call."""
    if ridge:
        gram = design.T @ design
        gram.diagonal().add_(ridge * squared_norm(design))
        return torch.cholesky_solve(design.T @ target, torch.linalg.cholesky(gram))
    rcond = torch.finfo(torch.float32).eps * max(design.shape)  # what is 0 in float32 is 0
    return torch.linalg.lstsq(design, target, rcond=rcond).solution


def squared_norm(design: Tensor) -> Tensor:
    """Return about the square of the largest singular value, by three steps of power iteration."""
    direction = design.new_ones(design.shape[1])
    for _ in range(3):
        direction = design.T @ (design @ direction / direction.norm())
    return direction.norm()
