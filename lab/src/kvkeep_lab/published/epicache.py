"""``epicache``: the entries that one episode of a conversation attends to stay (Kim et al., arXiv:2509.17396).

The text is cut into segments, which k-means groups by their embeddings into episodes. Each episode has a cache of its
own: the segments nearest to its centre are read a second time, and the entries that they attend to most stay. A
question is answered with the cache of the episode whose centre its embedding is most like.

Details follow the authors' code (github.com/apple/ml-epicache). Its option ``llm`` embeds a segment as here: by the
mean of the model's own token embeddings. The other options are embedding models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.contracts.selector import Excerpt, ReconstructionPieces
from kvkeep.errors import UsageError
from kvkeep.policies.papers import Paper
from kvkeep.policies.selectors.kvzip import KVzip
from kvkeep_lab.published.papers import EPICACHE
from kvkeep_lab.published.text_scores import LargestOfText

INSTRUCTION = (
    "\n\nCollect what matters in this part of the conversation: the speakers and what they are like, events and their "
    "dates, details of their lives, plans and promises, opinions, relationships and feelings."
)
"""Words before an episode's segments, which ask for what the authors' words ask for."""

STARTS, ROUNDS, SEED = 10, 100, 42
"""Of k-means: starts, of which the best counts, the largest number of rounds, and the seed."""

Embedding = Callable[[Tensor], Tensor]
"""The model's embedding of ids."""


@dataclass(frozen=True)
class EpiCache(KVzip):
    """The entries that the segments of one episode attend to most stay.

    As kvzip, with other queries: the ``medoids`` segments nearest to the episode's centre are read after the text, as
    one message. A query's weights are normalised over the text. Every layer has the same budget, which goes to the
    entries with the highest scores of all its heads beyond each head's share ``least``.
    """

    leaves: ClassVar[str] = "least attended by segments of an episode"
    source: ClassVar[str] = "arXiv:2509.17396"
    papers: ClassVar[Sequence[Paper]] = (EPICACHE,)

    episodes: int = 4
    """Episodes of a text."""
    medoids: int = 8
    """Segments of an episode that are read, at most :attr:`piece` tokens."""
    segment: int = 128
    """Tokens of a segment."""
    episode: int = 0
    """The episode, from 1 on; 0: the one whose centre the last segment, perhaps a question, is most like."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.episodes, self.medoids, self.segment) < 1 or not 0 <= self.episode <= self.episodes:
            raise UsageError(
                "EpiCache takes at least 1 episode, 1 medoid and 1 token of a segment, and an episode from 1 to the "
                "number of episodes (0: that of the last segment)."
            )

    @property
    def reconstruction(self) -> ReconstructionPieces:
        return ReconstructionPieces(self.piece, self.sinks, LargestOfText, Excerpt(INSTRUCTION, self.nearest))

    def shares(self, received: Sequence[Tensor], rows: int, entries: int) -> list[list[int]]:
        """Return the entries of every lane, divided by :meth:`KVzip.shares` within each layer."""
        return [share for part in received for share in super(EpiCache, self).shares([part], rows, entries)]

    def nearest(self, ids: Tensor, real: Tensor | None, embed: Embedding) -> Tensor:
        """Return the slots of the segments that are read, (rows, n), in the order of the text. Where an episode has
        fewer segments, those nearest to its centre follow. ids: (rows, slots). real: the same, False for padding."""
        found = []
        for row in range(len(ids)):
            points, there = self._points(ids[row], None if real is None else real[row], embed)
            labels, centres = clusters(points[there], self.episodes)
            likeness = points[there] @ F.normalize(centres, dim=1).T  # (segments, episodes)
            number = min(self.episode, len(centres)) - 1 if self.episode else int((points[-1] @ centres.T).argmax())
            order = (likeness[:, number] + 2.0 * (labels == number)).argsort(descending=True, stable=True)
            missing = (~there).nonzero().flatten()  # only padding
            found.append(torch.cat([there.nonzero().flatten()[order], missing])[: self.medoids].sort().values)
        size = min(self.segment, ids.shape[1])
        starts = torch.stack(found) * size + ids.shape[1] % size
        slots = starts[..., None] + torch.arange(size)
        return slots.flatten(1).to(ids.device)

    def matched(self, text: Tensor, question: Tensor, embed: Embedding) -> EpiCache:
        """Return the selector of the episode whose centre a question (tokens,) about a ``text`` (tokens,) is most
        like."""
        points, there = self._points(text, None, embed)
        centres = clusters(points[there], self.episodes)[1]
        mean = embed(question).detach().float().mean(0).cpu()
        return replace(self, episode=int((centres @ mean).argmax()) + 1)

    def _points(self, ids: Tensor, real: Tensor | None, embed: Embedding) -> tuple[Tensor, Tensor]:
        """Return the normalised embeddings of the segments of ``ids`` (slots,), counted from its end, (segments, hidden
        size) float32, and whether each has a token besides padding."""
        size = min(self.segment, len(ids))
        first = len(ids) % size
        embedded = embed(ids[first:]).detach().float().unflatten(0, (-1, size))
        counts = torch.full((len(embedded),), size, device=ids.device)
        if real is not None:
            weights = real[first:].unflatten(0, (-1, size))
            embedded, counts = embedded * weights[..., None], weights.sum(1)
        return F.normalize(embedded.sum(1), dim=1).cpu(), (counts > 0).cpu()


def clusters(points: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the cluster of each of ``points`` (n, dim) float32, (n,), and the centres (clusters, dim), by k-means: the
    best of :data:`STARTS` starts from k-means++. There are fewer than ``count`` clusters of fewer distinct points."""
    generator = torch.Generator().manual_seed(SEED)
    found = [_lloyd(points, _started(points, count, generator)) for _ in range(STARTS)]
    labels, centres, _ = min(found, key=lambda one: one[2])
    return labels, centres


def _started(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the first centres: points drawn in proportion to the squared distance from the nearest one before."""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    while len(chosen) < count:
        far = (points[:, None] - points[chosen]).square().sum(2).amin(1)
        if not bool((far > 0).any()):
            break
        chosen.append(int(far.multinomial(1, generator=generator)))
    return points[chosen]


def _lloyd(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return clusters, centres, and the sum of squared distances, when no point changes its cluster any more."""
    labels = torch.full((len(points),), -1)
    for _ in range(ROUNDS):
        far = torch.cdist(points, centres).square()
        nearest = far.argmin(1)
        if torch.equal(nearest, labels):
            break
        labels = nearest
        sums = torch.zeros_like(centres).index_add_(0, labels, points)
        counts = labels.bincount(minlength=len(centres))[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return labels, centres, float((points - centres[labels]).square().sum())
