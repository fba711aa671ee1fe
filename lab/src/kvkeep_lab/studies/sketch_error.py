"""``sketch-error``: compares the errors of a count sketch's estimates with their bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache

from kvkeep.stores.evicted.coded import CodedKeys, encode
from kvkeep.stores.evicted.groups import GROUP
from kvkeep.stores.evicted.sketch import ROWS, places
from kvkeep_lab.figures import COLOURS, FilePath, dress, panels, styled
from kvkeep_lab.published.sketch_variants import MEDIAN, TalliedSketch
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import Flag, TextStudy, Trial
from kvkeep_lab.tables import Table, number, percent
from kvkeep_lab.tasks.base import Metric

_LEVELS = ((0, 0), (3, 2), (5, 4), (9, 8))
"""Bits of an element with its part of scale and offset, and bits of its code."""

NORMAL, PUBLISHED, KEYS, VALUES = "normal", "keys, as published", "keys, signed", "values"


@dataclass(frozen=True)
class Error:
    """Vectors of one sort at one load, as the mean over layers. Errors are mean squares in units of the vectors' mean
    square s^2."""

    sort: str
    load: float
    """Requested load: vectors per slot."""
    others: float
    """Mean number of other vectors in a vector's slot, which the bounds use."""
    median: float
    """Error of the median of three slots."""
    mean: float
    """Error of the mean of three slots."""
    constant: float
    """Error of the mean of all vectors as the estimate of each, which needs no sketch."""
    crowded: float
    """Share of slots with more than twice the mean number of others (delta = 1 in the Chernoff bound)."""
    coded: float | None = None
    """Error of uniform codes in the same bytes, if slots have 16 bits per element (:func:`coded_error`); None in
    results of earlier versions of kvkeep."""

    @property
    def least(self) -> float:
        """Minimum error of any linear sketch with the same number of slots N, for n independent vectors with a mean of
        0: 1 - N / n, in s^2."""
        return max(0.0, 1 - ROWS / self.load)

    @property
    def predicted(self) -> float:
        """Variance of the median of three normal sums of :attr:`others` vectors, in s^2 (Lemma 2)."""
        return MEDIAN[ROWS] * self.others

    @property
    def bound(self) -> float:
        """a pi / N: the bound of the variance, with a / N = others / r. The variance exceeds it with a probability
        below :attr:`chance`."""
        return math.pi * self.others / ROWS

    @property
    def chance(self) -> float:
        """exp(-a / N): the upper bound of the probability of a variance above :attr:`bound`."""
        return math.exp(-self.others / ROWS)


@dataclass(frozen=True)
class Errors:
    """All sorts and loads."""

    tokens: int
    rows: list[Error]


class SketchError(TextStudy):
    """KVReviver's appendix E: its lemmas and bounds, tested on normal vectors and on a model's keys and values."""

    name = "sketch-error"
    about = "the error of a count sketch's estimates by load, against the bounds, for normal vectors and real entries"
    protocol = (
        "All vectors of a KV head are added to a sketch of 3 rows whose slots hold as many as the load says, and each "
        "is estimated: normal ones (the appendix's assumption), and a passage's keys and values as attention reads "
        "them; keys without signs, as published, and with. Errors are in units of the vectors' mean square. Beside "
        "them: the least error of any linear sketch of as many slots, and that of uniform codes of 2, 4 and 8 bits "
        "with a scale and an offset for 32 elements, in the bytes of the slots in 16 bits."
    )
    found = Errors
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("lemma", "error of the median by the others in a slot, normal vectors, largest load", "lower", "number"),
        Metric("bound", "loads at which the mean error is within the bound, normal vectors"),
        Metric("crowded", "loads at which the Chernoff bound holds"),
        Metric("keys", "error of keys as published by the bound, largest load", "lower", "number"),
        Metric("values", "error of values by the bound, largest load", "lower", "number"),
        Metric("useless", "loads above 3 at which one mean vector is nearer than the sketch, all sorts"),
        Metric("coded", "loads above 3 at which codes of the same bytes are nearer than 1 - N/n, all sorts"),
    )

    tokens: Annotated[int, Flag("--limit")] = Field(
        1024, ge=GROUP, description="number of tokens to read from the text, and vectors in the sketch"
    )
    loads: list[Annotated[float, Field(gt=0)]] = Field(
        [1, 3, 6, 12, 25, 50, 100], min_length=1, description="vectors that share a slot"
    )
    dim: int = Field(128, ge=1, description="of the normal vectors, of which there are 8 heads")

    @torch.no_grad()
    def measure(self, trial: Trial) -> Errors:
        cache = DynamicCache()  # without a config it stores all entries of sliding layers too
        trial.model(self.passage(trial), cache=cache, logits_to_keep=1)
        draw = trial.seed or 0
        normal = torch.randn(8, self.tokens, self.dim, generator=torch.Generator().manual_seed(draw))
        layers = [layer for layer in cache.layers if layer.keys is not None]
        keys, values = ([getattr(layer, part)[0].float() for layer in layers] for part in ("keys", "values"))
        sorts = {NORMAL: ([normal], True), PUBLISHED: (keys, False), KEYS: (keys, True), VALUES: (values, True)}
        rows: list[Error] = []
        for sort, (vectors, signed) in sorts.items():
            for load in self.loads:
                trial.progress(f"{sort}, load {load:g}", len(rows), len(sorts) * len(self.loads))
                parts = [_measure(part, load, signed, draw) for part in vectors]
                rows.append(Error(sort, load, *(fmean(numbers) for numbers in zip(*parts, strict=True))))
        return Errors(self.tokens, rows)

    def scores(self, found: Errors) -> dict[str, float]:
        normal = where(found.rows, sort=NORMAL)
        beyond = [row for row in found.rows if row.load > ROWS]
        last = {row.sort: row for row in found.rows if row.load == max(self.loads)}
        scores = {
            "lemma": last[NORMAL].median / last[NORMAL].others,
            "bound": fmean(row.median <= row.bound for row in normal),
            "crowded": fmean(row.crowded <= row.chance for row in normal),
            "keys": last[PUBLISHED].median / last[PUBLISHED].bound,
            "values": last[VALUES].median / last[VALUES].bound,
        }
        if beyond:
            scores["useless"] = fmean(row.constant < row.median for row in beyond)
        if both := [row.coded < row.least for row in beyond if row.coded is not None]:
            scores["coded"] = fmean(both)
        return scores

    def tables(self, found: Errors) -> list[Table]:
        """Return the errors with the bounds, and the load of slots."""
        sorts = each(found.rows, "sort")
        table = Table(
            f"Error of the median of three, in mean squares; {found.tokens:,} vectors",
            ["load", "Lemma 2", "bound aπ/N", *sorts],
            notes=[
                "In brackets: of the mean of the three slots, and of one mean vector for all, which takes no sketch."
            ],
        )
        crowded = Table("Slots with more than twice the load", ["load", "measured", "Chernoff bound exp(-a/N)"])
        for load in each(found.rows, "load"):
            rows = where(found.rows, load=load)
            (normal,) = where(rows, sort=NORMAL)
            sizes = [f"{number(row.median)} ({number(row.mean)}, {number(row.constant)})" for row in rows]
            table.rows.append([f"{load:g}", number(normal.predicted), number(normal.bound), *sizes])
            crowded.rows.append([f"{load:g}", percent(normal.crowded), percent(normal.chance)])
        bits = Table(
            "In the same bytes: the least error of a linear sketch, and that of codes",
            ["load", "1 - N/n", *(f"coded, {sort}" for sort in sorts)],
            notes=["The first is of independent vectors about 0, whatever the sketch; slots have 16 bits an element."],
        )
        for load in each(found.rows, "load"):
            rows = where(found.rows, load=load)
            coded = ["-" if row.coded is None else number(row.coded, 2) for row in rows]
            bits.rows.append([f"{load:g}", number(rows[0].least, 3), *coded])
        return [table, crowded, bits]

    def draw(self, found: Errors, path: FilePath, *, title: str) -> None:
        """Draw errors by load, with those of the lemma, of the bound and of one mean vector."""
        words = "mean squared error by mean square (dotted: of one mean vector for all)"
        with panels(path, title, height=4.6) as (axes,):
            for place, sort in enumerate(each(found.rows, "sort")):
                mine = where(found.rows, sort=sort)
                axes.plot([row.load for row in mine], [row.median for row in mine], **styled(place, sort, None))
                constant = fmean(row.constant for row in mine)
                axes.axhline(constant, color=COLOURS[place], linewidth=0.8, linestyle=":")
            normal = where(found.rows, sort=NORMAL)
            for attribute, label, style in (("bound", "bound aπ/N", "-"), ("predicted", "Lemma 2", "--")):
                sizes = [getattr(row, attribute) for row in normal]
                axes.plot([row.load for row in normal], sizes, style, color="0.4", linewidth=1, label=label)
            dress(axes, words, "load: vectors that share a slot", x="log", y="log", legend=True)


def coded_error(vectors: Tensor, ratio: float) -> float:
    """Return the mean squared error of uniform codes of ``vectors`` (heads, n, dim), relative to their mean square, in
    the bytes of ``ratio`` n vectors of 16 bits.

    Codes are those of :mod:`kvkeep.stores.evicted.coded`: by channel over 32 vectors, with a scale and an offset of 16
    bits each, so 3, 5 or 9 bits per element. For bytes between two of these, some groups have the lower number of bits
    and the others the higher. Below 3 bits, some vectors are dropped and count as 0. An incomplete last group is left
    out.
    """
    groups = vectors[:, : vectors.shape[1] // GROUP * GROUP].unflatten(1, (-1, GROUP)).transpose(2, 3)
    bits = min(16 * ratio, float(_LEVELS[-1][0]))
    (low, coarse), (high, fine) = next(pair for pair in pairwise(_LEVELS) if bits <= pair[1][0])
    finer = round(groups.shape[1] * (bits - low) / (high - low))
    lost = 0.0
    for part, width in ((groups[:, :finer], fine), (groups[:, finer:], coarse)):
        read = CodedKeys(*encode(part, width), width).dense(torch.float32) if width and part.shape[1] else None
        lost += float((part.transpose(2, 3).flatten(1, 2) - (0 if read is None else read)).square().sum())
    return lost / float(groups.square().sum())


def _measure(vectors: Tensor, load: float, signed: bool, seed: int) -> tuple[float, ...]:
    """Return for a sketch of ``vectors`` (heads, n, dim) the fields of :class:`Error` from ``others`` on."""
    heads, count, dim = vectors.shape
    slots = max(1, round(count / load))
    at = places(torch.arange(count, device=vectors.device).expand(heads, -1), ROWS, slots, seed)
    sketch = TalliedSketch(heads, ROWS, slots, dim, signed, like=vectors)
    sketch.insert(at, vectors)
    square = vectors.square().mean()
    errors = [
        float((sketch.variant(at, by).dense(torch.float32) - vectors).square().mean() / square)
        for by in ("median", "mean")
    ]
    constant = float((vectors - vectors.mean(1, keepdim=True)).square().mean() / square)
    others = [torch.bincount(row, minlength=ROWS * slots)[row] - 1 for row in at[:, 0] % (ROWS * slots)]  # by row
    crowded = fmean(float((shared > 2 * (count - 1) / slots).float().mean()) for shared in others)
    coded = coded_error(vectors, ROWS * slots / count)
    return (count - 1) / slots, errors[0], errors[1], constant, crowded, coded
