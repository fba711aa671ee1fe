"""The reader of ``endless``: beyond a number of tokens, a step attends to the newest entries and to a few blocks.

The entries before the resident ones are in a checkpoint, with the keys of their positions in the text. They form blocks
of consecutive tokens. A step chooses blocks for each lane by representatives of their keys, and places them one after
the other, in the order of the text, directly before the newest entries. So no distance exceeds the model's positions
(InfLLM, arXiv:2402.04617, gives all of them one far position instead). Scores depend on distances alone: instead of
turning the keys of a block, the reader turns the queries back by as many positions as the block moves.

The representatives are the centroids of the block's keys without their rotation. InfLLM chooses keys by the attention
that they received; centroids follow from the checkpoint, so nothing has to be saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.site import Site
from kvkeep.errors import UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.meter import nbytes
from kvkeep.memory.rows import Buffer, up
from kvkeep.models.adapter import Adapter
from kvkeep.step.plan import LayerStep
from kvkeep.stores.checkpoints.entries import EntryCheckpoint
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.read_evicted import ReadEvicted

QUERIES = 64
"""Queries of a step that are compared with all representatives, or attend to the blocks, at a time."""
ROUNDS = 4
"""Iterations of k-means."""


class RecalledBlocks(ReadEvicted):
    """Attends to all entries of a text of at most ``exact`` tokens, like :class:`ReadEvicted`. Beyond them it attends
    to ``count`` blocks of ``size`` tokens, of which the first is always one, and to all entries after the last block.
    Each block has ``representatives`` centroids."""

    def __init__(
        self, site: Site, adapter: Adapter, count: int, size: int, representatives: int, exact: int | None
    ) -> None:
        assert isinstance(site.checkpoint, EntryCheckpoint)
        self.checkpoint, self.index, self.meter = site.checkpoint, site.layer.index, site.meter
        self.adapter, self.count, self.size, self.exact = adapter, count, size, exact
        self.representatives = representatives
        self._centroids = Buffer()  # (lanes, blocks * representatives, key_dim)
        self._members = Buffer()  # (lanes, blocks * representatives, 1), the logarithm of each centroid's keys

    @property
    def bookkeeping_bytes(self) -> int:
        return nbytes(self._centroids.data, self._members.data)

    def plan(self, layer: Layer) -> LayerStep | None:
        return super().plan(layer) if self._exactly(layer) else None

    def attend(self, layer: Layer, step: AttentionInputs) -> Tensor:
        if self._exactly(layer):
            return super().attend(layer, step)
        if layer.ledger.visible is not None or step.wide(layer.length) is not None:
            raise UsageError(
                f"Beyond {self.exact} tokens blocks are recalled, and a row with padding or a mask of yours over the "
                "past has none of its own; read each text by itself, or shorten it."
            )
        settled = layer.attends_settled(step)
        if settled:
            layer.settle()
        taken = layer.evicted.taken or 0
        blocks = taken // self.size
        before = None
        if blocks:
            self._extend(blocks)
            before = self._recalled(step, self._chosen(layer, step, blocks), blocks)
        near = [layer.segment(piece, step, None) for piece in layer.resident.pieces(ordered=False)]
        if taken > blocks * self.size:
            keys, values = self.checkpoint.between(self.index, blocks * self.size, taken)
            near.append(Segment(keys[:, None], values[:, None]))
        if not settled:
            near.append(step.arriving())
        output, _ = attend(step.query, near, step.scaling, before)
        if step.last:
            layer.finish()
        return output

    def truncate(self, layer: Layer, length: int) -> None:
        rows = length // self.size * self.representatives
        for kept in (self._centroids, self._members):
            kept.truncate(rows)

    def select(self, layer: Layer, lanes: Tensor) -> None:
        for rows in (self._centroids, self._members):
            rows.select(lanes)

    def _exactly(self, layer: Layer) -> bool:
        return self.exact is None or layer.ledger.length <= self.exact

    def _turned(self, vectors: Tensor, by: Tensor) -> Tensor:
        """Return ``vectors`` (rows, heads, n, dim) at positions that are ``by`` (rows or 1, n or 1) greater."""
        return self.adapter.turn(self.index, vectors, self.adapter.angles(self.index, vectors, by))

    def _extend(self, blocks: int) -> None:
        """Find the representatives of all blocks up to ``blocks`` that have none."""
        known = self._centroids.length // self.representatives
        if known >= blocks:
            return
        start, stop = known * self.size, blocks * self.size
        keys, _ = self.checkpoint.between(self.index, start, stop)
        slots = torch.arange(start, stop, device=keys.device)
        plain = self._turned(keys[:, None].float(), -slots[None])[:, 0]
        centroids, members = centroids_of(plain.unflatten(1, (-1, self.size)), self.representatives)
        self._centroids.append(centroids.flatten(1, 2).to(keys.dtype))
        self._members.append(members.log().flatten(1, 2)[..., None])

    def _chosen(self, layer: Layer, step: AttentionInputs, blocks: int) -> Tensor:
        """Return the blocks of each lane, (lanes, n) in ascending order: those with the greatest share of any query's
        attention to all blocks, by the representatives."""
        lanes, wanted, device = len(step.query), min(blocks, self.count), step.query.device
        if wanted == blocks:
            return torch.arange(blocks, device=device).expand(lanes, -1)
        slots = torch.arange(layer.ledger.length - step.queries, layer.ledger.length, device=device)
        distance = layer.length - layer.resident.evicted  # of the newest block
        queries = self._turned(step.query.float(), (distance - slots)[None])
        keys, members = self._centroids.view().float().transpose(1, 2), self._members.view()[:, None, None, :, 0]
        best = torch.full((lanes, blocks), float("-inf"), device=device)
        for part in queries.split(QUERIES, 2):
            scores = (part.flatten(1, 2) @ keys).unflatten(1, part.shape[1:3]) * step.scaling + members
            shares = scores.unflatten(-1, (blocks, -1)).logsumexp(-1).softmax(-1)
            best = torch.maximum(best, shares.amax((1, 2)))
        best[:, 0] = float("inf")
        return best.topk(wanted, 1).indices.sort(1).values

    def _recalled(self, step: AttentionInputs, chosen: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return attention to the ``chosen`` blocks (lanes, n) before the newest entries, and its log-sum-exp."""
        lanes, count = chosen.shape
        keys, values = self.checkpoint.blocks(self.index, chosen, self.size)
        places = torch.arange(blocks - count, blocks, device=chosen.device)
        moved = ((chosen - places) * self.size).reshape(-1, 1)
        segment, found = Segment(keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]), []
        for part in step.query.split(QUERIES, 2):
            query = self._turned(part[:, None].expand(-1, count, -1, -1, -1).flatten(0, 1), moved)
            with self.meter.holding(keys, values, query):
                outputs, lse = (
                    result.unflatten(0, (lanes, count)) for result in attend(query, [segment], step.scaling)
                )
            total = lse.logsumexp(1)
            found.append((((lse - total[:, None]).exp()[..., None] * outputs.float()).sum(1), total))
        output, total = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
        return output, total


def representatives_bytes(layer: LayerGeometry, geometry: ModelGeometry, count: int) -> int:
    """Return the bytes of ``count`` representatives of each KV head, and of the logarithms of their keys."""
    return layer.kv_heads * up(count) * (layer.key_dim * geometry.dtype_bytes + 4)


def recalled_bytes(layer: LayerGeometry, geometry: ModelGeometry, blocks: int, size: int) -> int:
    """Return the bytes of copies of ``blocks`` blocks for each KV head, and of the queries that are turned for them."""
    queries = geometry.attention_heads * QUERIES * layer.key_dim
    return blocks * (size * layer.entry_elements + queries) * geometry.dtype_bytes


def centroids_of(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` centroids of the keys of each block, (lanes, blocks, ``count``, dim), and the number of keys of
    each, (lanes, blocks, ``count``): k-means that begins with evenly spaced keys. keys: (lanes, blocks, size, dim)
    float32. A centroid may have no keys."""
    centroids = keys[:, :, :: keys.shape[2] // count].clone()
    for _ in range(ROUNDS):
        nearest = (2 * keys @ centroids.mT - centroids.square().sum(-1)[:, :, None]).argmax(-1)
        member = torch.nn.functional.one_hot(nearest, count).to(keys.dtype)
        members = member.sum(2)
        means = member.mT @ keys / members.clamp(min=1)[..., None]
        centroids = torch.where(members[..., None] > 0, means, centroids)
    return centroids, members
