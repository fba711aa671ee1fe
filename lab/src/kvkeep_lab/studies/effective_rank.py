"""``effective-rank``: the rank of the matrices that compute attention scores, and the effect of truncation to a rank:
KV-Direct's Fig. 5 and 6 (arXiv:2603.19664, sections 3.3 and 5.7).

Without norms and rotation, a head's score of residuals i and j is h_i M h_j^T / sqrt(d), with M = W_q W_k^T (Eq. 18).
The effective rank of M at 90 % is the least r with (s_1^2 + ... + s_r^2) / sum_i s_i^2 >= 0.9 (Eqs. 19-20). The study
also measures:

* M stacked over the query heads of a KV head;
* W_q R_D W_k^T, with the rotation by a distance D;
* energies of s_i^4. Eq. 19 has squares, but these energies are close to the paper's numbers for the same model;
* the error of each score by the best M of rank r, divided by its bound s_(r+1) ||h_i|| ||h_j|| / sqrt(d) (Eq. 22).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvkeep.decode.prompt import encode, question
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import bind
from kvkeep_lab.figures import FilePath, blank, dress, save, styled
from kvkeep_lab.head_weights import HeadWeights, head_weights
from kvkeep_lab.statistics import each, effective_rank, where
from kvkeep_lab.studies.base import LEAST, Count, Flag, Progress, Study, Trial, first_tokens, part, rising
from kvkeep_lab.studies.truncation import LOWRANK, WAYS, Truncation, best_scores, truncations
from kvkeep_lab.tables import Table, fixed, number, percent
from kvkeep_lab.tasks.base import Metric

ENERGY = 0.9
DISTANCES = (1, 16, 256)
PAPER = {1.0: ("100", "5e-4"), 0.5: ("5-15", "10.9"), 0.125: ("5-10", "> 11")}
"""Token match in percent and KL by the share of d_head, from section 5.7 for the paper's models (one range below 15 of
64)."""


@dataclass(frozen=True)
class LayerRank:
    """One layer."""

    layer: int
    kind: str
    dim: int
    """d_head."""
    heads: list[float]
    """Effective rank of M of each query head."""
    groups: list[float]
    """Effective rank of the stacked M of each KV head."""
    turned: dict[int, float] | None
    """Mean effective rank over query heads with rotation, by distance; None if positions are not rotated."""
    energy: list[float]
    """E(r) for r = 1 ... dim, the mean over query heads."""
    fourth: list[float]
    """Effective rank of each query head by fourth powers of the singular values."""
    fourth_energy: list[float]
    """E(r) by fourth powers of the singular values."""


@dataclass(frozen=True)
class Ranks:
    """All layers, and the effect of truncation on a prompt."""

    layers: list[LayerRank]
    prompt_tokens: int = 0
    new_tokens: int = 0
    truncations: tuple[Truncation, ...] = ()
    errors: dict[int, float] = field(default_factory=dict)
    """By rank below d_head: the greatest error of a score by its bound (Eq. 22), of all pairs of tokens of the prompt,
    heads and layers."""

    def values(self, of: str) -> list[float]:
        """Return all ranks of ``of``: "heads", "groups" or "fourth"."""
        return [value for layer in self.layers for value in getattr(layer, of)]

    def energy(self, rank: int, of: str = "energy") -> float:
        """Return the share of M's "energy" (or "fourth_energy") within ``rank``, the mean over all query heads."""
        weighted = [(getattr(layer, of)[min(rank, layer.dim) - 1], len(layer.heads)) for layer in self.layers]
        return sum(share * count for share, count in weighted) / sum(count for _, count in weighted)


class EffectiveRank(Study):
    """KV-Direct's Fig. 5 and 6; truncation needs a text to continue."""

    name = "effective-rank"
    command = "rank"
    about = "the effective rank of W_q W_k^T at 90 % of its energy, and tokens and KL after truncation"
    protocol = (
        "From the weights: the least rank with 90 % of the energy of M = W_q W_k^T, by query head. Then a prompt is "
        "continued greedily with keys and values truncated to a rank: of every entry, of keys or values alone, of all "
        "but the first token, or of those that are not among the newest (lowrank); and with scores by the best M of "
        "that rank (Eq. 21), keys and values left whole. KL is of the full cache's text. Eq. 22: the greatest error of "
        "such a score by its bound, of all pairs of the prompt's tokens, heads and layers, at every rank."
    )
    found = Ranks
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rank", "effective rank, mean over heads", "lower", "number"),
        Metric("share", "effective rank by the width of a head", "lower"),
        Metric("half_energy", "energy that half of the width holds"),
        Metric("half_match", "tokens that are the same at half of the width"),
        Metric("half_kl", "KL at half of the width (nats)", "lower", "number"),
        Metric("whole_match", "tokens that are the same at all of the width"),
        Metric("bound", "error of a score by its bound, the greatest", "lower", "number"),
    )
    certain = ("rank", "share", "half_energy", "bound")  # the others are means over the prompt
    text = "optional"

    shares: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Flag(default=[0.25, 0.5, 0.75, 1.0])] = Field(
        [0.125, 0.25, 0.5, 0.75, 0.9375, 1.0], description="of a head's width, ranks that are truncated to"
    )
    ranks: Annotated[list[Count], rising] | None = Field(None, description="ranks that are truncated to, for shares")
    prompt: Annotated[str | None, Flag("--prompt", "-p", default=None)] = Field(
        "Explain why the sky is blue in simple terms.",
        min_length=1,
        description="prompt to continue, in the chat template, with truncated keys and values",
    )
    limit: Annotated[int | None, Flag(default=512)] = Field(
        None, ge=LEAST, description="number of tokens to read from the file, which is then continued"
    )
    new: Annotated[int, Flag("--max-tokens", "-n", default=32)] = Field(30, ge=1, description="tokens written")

    def check(self, files: Sequence[Path]) -> None:
        if files and self.prompt is not None:
            raise UsageError("The study continues one text; give --prompt or --file, not both.")
        if self.ranks is not None and self.prompt is None and not files:
            raise UsageError("--ranks needs a text to continue; give --prompt or --file.")

    def measure(self, trial: Trial) -> Ranks:
        """Compute ranks, and truncate to the selected ranks. Raises UnsupportedModelError for a family without weights
        per head."""
        layers = layer_ranks(trial.model, part(trial.progress, 0, 2))
        dim = layers[0].dim
        if self.prompt is not None:
            ids = encode(trial.tokenizer, question(None, self.prompt))
        elif trial.sources:
            ids = first_tokens(trial.loaded, trial.sources, self.limit)[0].tolist()
        else:
            return Ranks(layers)
        listed = self.ranks or sorted({max(1, round(share * dim)) for share in self.shares})
        rows = truncations(trial.model, ids, listed, new=self.new, progress=part(trial.progress, 1, 2))
        errors = score_errors(trial.model, ids, [rank for rank in listed if rank < dim])
        return Ranks(layers, len(ids), self.new, tuple(rows), errors)

    def scores(self, found: Ranks) -> dict[str, float]:
        dim = found.layers[0].dim
        scores = {
            "rank": fmean(found.values("heads")),
            "share": fmean(rank / layer.dim for layer in found.layers for rank in layer.heads),
            "half_energy": found.energy(dim // 2),
        }
        for row in where(found.truncations, way=WAYS[0], error=""):
            assert row.match is not None and row.kl is not None
            scores |= {"half_match": row.match, "half_kl": row.kl} if row.rank == dim // 2 else {}
            scores |= {"whole_match": row.match} if row.rank == dim else {}
        return scores | ({"bound": max(found.errors.values())} if found.errors else {})

    def tables(self, found: Ranks) -> list[Table]:
        dim = found.layers[0].dim
        shape = Table(
            "Effective rank at 90 % of the energy",
            ["of", "mean", "of d_head", "least", "most", f"energy of rank {dim // 2}"],
            notes=[
                "Stacked: M of all query heads of a KV head. Turned: rotation stands between the two. The paper's "
                "means: 21.2 of 64 (SmolLM2-135M), 20.0 of 64 (Qwen2.5-0.5B), 70.2 of 256 (Gemma 3 4B); its rank 32 "
                "of 64 holds more than 95 %."
            ],
        )
        energies = {"heads": found.energy(dim // 2), "fourth": found.energy(dim // 2, "fourth_energy")}
        for of, words in (("heads", "query heads"), ("groups", "KV heads, stacked"), ("fourth", "fourth powers")):
            values = found.values(of)
            sizes = [number(fmean(values)), percent(fmean(values) / dim, 0), number(min(values)), number(max(values))]
            shape.rows.append([words, *sizes, percent(energies.get(of))])
        for distance in found.layers[0].turned or {}:
            mean = fmean((layer.turned or {})[distance] for layer in found.layers)
            shape.rows.append([f"turned by {distance}", number(mean), percent(mean / dim, 0), "", "", ""])
        return [shape, *([self._truncated(found)] if found.truncations else [])]

    def _truncated(self, found: Ranks) -> Table:
        dim = found.layers[0].dim
        table = Table(
            f"Truncated: match and KL (nats), {found.prompt_tokens} tokens read, {found.new_tokens} written",
            ["rank", "energy of M", *WAYS, "the paper's"],
            notes=sorted({row.error for row in found.truncations if row.error}),
        )
        if found.errors:
            greatest = max(found.errors.values())
            table.notes = [*table.notes, f"The greatest error of a score is {number(greatest)} of its bound (Eq. 22)."]
        by_rank = {(row.way, row.rank): row for row in found.truncations}
        for rank in each(found.truncations, "rank"):
            rows = [by_rank.get((way, rank)) for way in WAYS]  # an earlier result has fewer ways
            cells = ["-" if row is None else f"{percent(row.match, 0)}, {number(row.kl, 2)}" for row in rows]
            paper = "{} %, {}".format(*PAPER[rank / dim]) if rank / dim in PAPER else ""
            table.rows.append([f"{rank}", percent(found.energy(rank)), *cells, paper])
        return table

    def details(self, found: Ranks) -> list[Table]:
        distances, heads = list(found.layers[0].turned or {}), found.values("heads")
        table = Table(
            "By layer, mean over its heads",
            ["layer", "", "d_head", "query heads", "least", "most", "stacked", *(f"turned by {d}" for d in distances)],
            notes=[f"{sum(rank <= 10 for rank in heads)} of {len(heads)} query heads have a rank of 10 or less."],
        )
        for layer in found.layers:
            ends = [f"{end(layer.heads):.0f}" for end in (min, max)]
            means = [fmean(layer.groups), *((layer.turned or {})[distance] for distance in distances)]
            row = [f"{layer.layer}", layer.kind, f"{layer.dim}", fixed(fmean(layer.heads), 1), *ends]
            table.rows.append([*row, *(fixed(mean, 1) for mean in means)])
        return [table]

    def draw(self, found: Ranks, path: FilePath, *, title: str) -> None:
        """Draw Fig. 5 with a dot for each query head (colour and area: effective rank over d_head), and with
        truncations Fig. 6."""
        tall = 1.6 + 0.24 * max(len(layer.heads) for layer in found.layers)
        figure = blank(tall + (3.4 if found.truncations else 0))
        parts: Any = figure.subfigures(2, 1, height_ratios=[tall, 3.4]) if found.truncations else [figure]
        _dots(parts[0].subplots(), found)
        if found.truncations:
            _fig_6(parts[1].subplots(1, 2), found)
        figure.suptitle(title, fontsize=11)
        save(figure, path)


@torch.no_grad()
def layer_ranks(model: Any, progress: Progress = lambda what, done, total: None) -> list[LayerRank]:
    """Return every layer's effective ranks, from the weights alone. Raises UnsupportedModelError for a family without
    weights per head."""
    adapter = bind(model)
    geometry = ModelGeometry.from_config(model.config)
    weights = head_weights(model)
    try:
        adapter.require("turn", [layer.index for layer in geometry.full_layers], "ranks by distance")
    except UnsupportedModelError:
        turns = False
    else:
        turns = True
    found = []
    for layer, mine in zip(geometry.layers, weights, strict=True):
        keys = weights[layer.source].key
        assert keys is not None
        found.append(_layer(adapter, layer, mine, keys, turns))
        progress("layers", layer.index + 1, len(weights))
    return found


@torch.no_grad()
def score_errors(model: Any, prompt: Sequence[int], ranks: Sequence[int]) -> dict[int, float]:
    """Return by rank the greatest error of a score of residuals by M_r, divided by its bound (Eq. 22), of all pairs of
    the prompt's tokens, query heads and layers."""
    weights, geometry = head_weights(model), ModelGeometry.from_config(model.config)
    greatest = dict.fromkeys(ranks, 0.0)

    def watch(mine: HeadWeights, keys: Tensor) -> Callable[..., None]:
        def see(module: Any, given: tuple[Tensor, ...]) -> None:
            rows = given[0][0].double()  # (tokens, hidden)
            key = keys.repeat_interleave(len(mine.query) // len(keys), 0).double()
            products, others = rows @ mine.query.double().transpose(1, 2), rows @ key.transpose(1, 2)
            values = product_singular_values(mine.query.transpose(1, 2), key.transpose(1, 2))
            lengths = rows.norm(dim=1)
            for rank in ranks:
                less = products - products @ best_scores(mine.query, keys, rank).double()
                errors = (less @ others.transpose(1, 2)).abs()
                bounds = values[:, rank, None, None] * lengths[:, None] * lengths
                greatest[rank] = max(greatest[rank], float((errors / bounds).max()))

        return see

    handles = []
    try:
        for layer, mine in zip(geometry.layers, weights, strict=True):
            keys = weights[layer.source].key
            assert keys is not None
            handles.append(mine.module.register_forward_pre_hook(watch(mine, keys)))
        model(torch.tensor([list(prompt)], device=next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return greatest


def _layer(adapter: Adapter, layer: LayerGeometry, weights: HeadWeights, keys: Tensor, turns: bool) -> LayerRank:
    query = weights.query.transpose(1, 2)  # (heads, hidden, dim)
    key = keys.transpose(1, 2)  # (kv_heads, hidden, dim)
    heads, kv_heads = len(query), len(key)
    energies = product_singular_values(query, key.repeat_interleave(heads // kv_heads, 0)).square()
    stacked = product_singular_values(query.reshape(kv_heads, -1, query.shape[-1]), key)
    turned: dict[int, float] = {}
    for distance in DISTANCES if turns else ():
        by = torch.full((1, key.shape[1]), distance, device=key.device)
        far = adapter.turn(layer.index, key[None], adapter.angles(layer.index, key, by))[0]
        values = product_singular_values(query, far.repeat_interleave(heads // kv_heads, 0))
        turned[distance] = float(effective_rank(values.square(), ENERGY).mean())
    heads_, groups, fourth = (
        effective_rank(part, ENERGY).tolist() for part in (energies, stacked.square(), energies.square())
    )
    about, kept = (layer.index, layer.kind, query.shape[-1]), (_kept_energy(energies), _kept_energy(energies.square()))
    return LayerRank(*about, heads_, groups, turned or None, kept[0], fourth, kept[1])


def _kept_energy(energies: Tensor) -> list[float]:
    """Return E(r), the mean over heads."""
    return (energies.cumsum(-1) / energies.sum(-1, keepdim=True)).mean(0).tolist()


def product_singular_values(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest dim singular values of A B^T in falling order, (..., dim) float64; the others are 0. ``a``:
    (..., m, dim). ``b``: (..., n, dim). m and n are at least dim."""
    triangles = [torch.linalg.qr(part.double(), mode="r").R for part in (a, b)]
    return torch.linalg.svdvals(triangles[0] @ triangles[1].transpose(-1, -2))


def _dots(axes: Any, found: Ranks) -> None:
    dots = [(layer.layer, head, rank / layer.dim) for layer in found.layers for head, rank in enumerate(layer.heads)]
    across, up, shares = zip(*dots, strict=True)
    drawn = axes.scatter(across, up, c=shares, s=[160 * share for share in shares], cmap="coolwarm", vmin=0, vmax=0.8)
    axes.figure.colorbar(drawn, ax=axes, label="rank / d_head", pad=0.01, extend="max")
    dress(axes, "effective rank of W_q W_k^T at 90 % of the energy", "layer")
    axes.grid(False)
    axes.set_ylabel("query head")
    axes.set_yticks(range(max(up) + 1))
    axes.margins(0.03, 0.12)


def _fig_6(panels: Any, found: Ranks) -> None:
    match, divergence = panels
    dim = found.layers[0].dim
    for place, way in enumerate(WAYS):
        rows = where(found.truncations, way=way, error="")
        if rows:
            ranks = [row.rank for row in rows]
            style = styled(place, "all but the newest (lowrank:r)" if way == LOWRANK else way, None)
            match.plot(ranks, [100 * (row.match or 0) for row in rows], **style)
            divergence.plot(ranks, [row.kl for row in rows], **style)
    paper: dict[str, Any] = {"color": "black", "alpha": 0.5, "linewidth": 5, "label": "the paper's"}
    match.plot([dim / 2, dim / 2], [5, 15], **paper)
    divergence.plot([dim / 2 - 1.5, dim / 2 + 1.5], [10.9, 10.9], **paper)
    dress(match, "tokens that are the full cache's, %", "rank r", legend=True)
    dress(divergence, "mean KL, nats", "rank r", y="log", legend=True)
    match.set_ylim(0, 104)
    divergence.set_ylim(1e-3, 30)  # the full rank leaves only rounding errors, below the axis
