"""``expected-attention``: the entries that later queries should attend to stay (Devoto et al., arXiv:2510.00636).

For a Gaussian query of mean m and covariance C, E exp(s q k) = exp(s m k + s^2 k C k / 2), where s scales scores. The
cost is a product for each key, for any number of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.contracts.selector import Candidates
from kvkeep.errors import UsageError
from kvkeep.policies.selectors.scored import Scored

FEWEST = 16
"""The fewest queries for a mean and a covariance."""


@dataclass(frozen=True)
class ExpectedAttention(Scored):
    """The entries with the highest expected attention from the next positions stay, weighted by the norm of their
    values.

    The score of an entry is (a + ``epsilon``) |v|. Here v is its value, k its key, and a the softmax over entries of s
    m k + s^2 k C k / 2, the mean over the query heads; s scales scores; m and C are mean and covariance of the queries,
    each rotated to the ``future`` positions by the mean of their rotations. Queries and keys of the sinks do not count.

    The paper scores once, after the prompt, by all its queries. Here every chunk of a prompt scores the resident and
    the new entries by the chunk's queries, so that the budget holds after each. Decoded tokens, and chunks of fewer
    than 16, get no score and stay; the lowest score is evicted first, and then the oldest entry. As in the authors'
    code the norm is that of the value; the paper uses the value after the output projection.
    """

    leaves: ClassVar[str] = "least attended by predicted queries"
    source: ClassVar[str] = "arXiv:2510.00636"
    needs_kv: ClassVar[bool] = True

    future: int = 512
    """Positions ahead, over which the queries' rotations are averaged."""
    sinks: int = 4
    """First entries that stay."""
    epsilon: float = 0.0
    """Added to the expected attention before it is multiplied by the value's norm."""

    def __post_init__(self) -> None:
        if self.future < 1 or self.sinks < 0 or self.epsilon < 0:
            raise UsageError(
                "Expected attention takes a future of at least 1 position, and sinks and epsilon of at least 0."
            )

    @property
    def observation_window(self) -> int:
        """1, so that :meth:`observe` gets keys and values; it ignores the attention of that query."""
        return 1

    @property
    def ahead(self) -> int:
        return self.future

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return new scores at the end of a chunk, else the present scores."""
        assert entries.scores is not None
        if entries.asking is None or entries.new < FEWEST:
            return entries.scores
        assert entries.keys is not None and entries.values is not None
        asking, first = entries.asking, entries.first + self.sinks
        counted, seen = asking.slots >= first, entries.slots >= first
        mean, covariance = statistics(asking.queries, counted)
        share = expected(mean, covariance, entries.keys, seen, asking.scaling)
        scores = (share + self.epsilon) * entries.values.float().norm(dim=-1)
        return scores.where(seen & (counted.sum(1, keepdim=True) >= FEWEST), entries.scores)


def statistics(queries: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (lanes, heads, dim) and covariance (lanes, heads, dim, dim) of ``queries`` (lanes, heads, n, dim)
    float32, over the ``counted`` ones, (lanes, n) bool; zeros for a lane without any."""
    count = counted.sum(1).clamp(min=1)[:, None, None]
    weights = counted[:, None, :, None].to(queries.dtype)
    mean = (queries * weights).sum(2) / count
    apart = (queries - mean[:, :, None]) * weights
    return mean, apart.transpose(2, 3) @ apart / count[..., None]


def expected(mean: Tensor, covariance: Tensor, keys: Tensor, seen: Tensor, scaling: float) -> Tensor:
    """Return the expected share of attention of each key among those ``seen``, mean over heads: (lanes, n) float32.

    mean: (lanes, heads, dim) and covariance: (lanes, heads, dim, dim), from :func:`statistics`. keys: (lanes, n, dim).
    seen: (lanes, n) bool; a lane that sees no key gets nan.
    """
    keys = keys.float()[:, None]
    scores = scaling * (keys @ mean[..., None]).squeeze(-1)
    scores += scaling**2 / 2 * ((keys @ covariance) * keys).sum(-1)
    return torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), -1).mean(1)
