"""The expected attention of keys, from the mean and covariance of queries (arXiv:2510.00636).

For a Gaussian query of mean m and covariance C, E exp(s q k) = exp(s m k + s^2 k C k / 2), where s scales scores. The
cost is a product for each key, for any number of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
