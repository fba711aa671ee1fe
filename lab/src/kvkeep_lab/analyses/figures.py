"""The figures of the analyses, laid out as the papers' own."""

from __future__ import annotations

import os
from statistics import fmean
from typing import Any

from kvkeep_lab.analyses.alignment import Alignment
from kvkeep_lab.analyses.bounds import Looseness
from kvkeep_lab.analyses.rank import EVERY, LEFT, Ranks
from kvkeep_lab.analyses.reactivation import Reactivation
from kvkeep_lab.analyses.spectra import PROJECTIONS, Spectra
from kvkeep_lab.figures import COLOURS, DPI, MARKERS, WIDTH_PX, plain, save

Path = str | os.PathLike[str]


def draw_spectra(found: Spectra, path: Path, *, title: str) -> None:
    """Draw KVSlimmer's Fig. 2: cosines by layer, eigenvalues and contributions by mode (thin: each layer; bold: their
    mean). Raises StoreError if the file cannot be written."""
    figure, (left, middle, right) = _panels(3, 4.4)
    for number, name in enumerate(PROJECTIONS):
        rows = [row for row in found.rows if row.projection == name]
        layers, colour = [row.layer for row in rows], COLOURS[number]
        left.plot(
            layers, [row.cosine for row in rows], color=colour, marker=MARKERS[number], markersize=3.5, label=name
        )
        left.plot(layers, [row.apart for row in rows], color=colour, linestyle=":", label=f"{name}, far apart")
        for axes, attribute in ((middle, "eigenvalues"), (right, "contributions")):
            for row in rows:
                axes.plot(
                    _shares(getattr(row, attribute)), getattr(row, attribute), color=colour, alpha=0.12, linewidth=0.6
                )
            lines = [getattr(row, attribute) for row in rows if row.dim == rows[0].dim]
            mean = [fmean(values) for values in zip(*lines, strict=True)]
            axes.plot(_shares(mean), mean, color=colour, linewidth=2)
    left.set_xlabel("layer")
    left.set_title("cosine of neighbours", loc="left", fontsize=10)
    middle.set_title("eigenvalue, share of the sum", loc="left", fontsize=10)
    right.set_title("contribution c_i to the cosine", loc="left", fontsize=10)
    middle.set_yscale("log")
    middle.set_ylim(bottom=1e-5)
    right.set_yscale("symlog", linthresh=1e-3)
    for axes in (middle, right):
        axes.set_xlabel("mode, % of all, largest first")
    for axes in (left, middle, right):
        plain(axes, "both")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def draw_alignment(found: Alignment, path: Path, *, title: str) -> None:
    """Draw KVSlimmer's Fig. 3, one point a head, coloured by layer, and below it the relation pair by pair, by layer.
    Raises StoreError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_PX / DPI, 7.4), dpi=DPI, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    above, below = parts[0].subplots(1, 3), parts[1].subplots(1, 2)
    layers = [row.layer for row in found.rows]
    points = None
    for axes, (x, y, sign) in zip(above, (("11", "12", -1), ("11", "22", 1), ("12", "22", -1)), strict=True):
        across, up = ([getattr(row, f"cos{name}") for row in found.rows] for name in (x, y))
        points = axes.scatter(across, up, c=layers, cmap="viridis", s=12)
        reach = 1.05 * max(map(abs, across + up))
        axes.plot([-reach, reach], [-sign * reach, sign * reach], color="0.5", linewidth=0.8, linestyle="--")
        axes.set_xlabel(f"cos(E, c{x})")
        axes.set_title(f"cos(E, c{y}), mean of each head", loc="left", fontsize=10)
        plain(axes, "both")
    parts[0].colorbar(points, ax=above, label="layer", pad=0.01)
    order = list(dict.fromkeys(layers))
    lines = (
        (below[0], "corr22", "correlation of cos(E, c11), cos(E, c22)", 1),
        (below[0], "corr12", "correlation of cos(E, c11), -cos(E, c12)", 1),
        (below[1], "agree", "signs as in Eq. 32", 100),
        (below[1], "agree_alike", "the same, quarter with the most similar keys", 100),
    )
    for number, (axes, measure, label, scale) in enumerate(lines):
        values = [scale * found.mean(measure, layer) for layer in order]
        axes.plot(order, values, color=COLOURS[number], marker=MARKERS[number], markersize=3.5, label=label)
    below[0].axhline(1, color="0.5", linewidth=0.8, linestyle="--")
    below[0].set_ylim(min(0, *below[0].get_ylim()), 1.05)
    below[0].set_title("pair by pair: 1 is what Eq. 32 says", loc="left", fontsize=10)
    below[1].axhline(50, color="0.5", linewidth=0.8, linestyle=":")
    below[1].set_ylim(0, 100)
    below[1].set_title("share of pairs, % (dotted: by chance)", loc="left", fontsize=10)
    for axes in below:
        axes.set_xlabel("layer")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        plain(axes, "both")
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def draw_reactivation(found: Reactivation, path: Path, *, title: str) -> None:
    """Draw how much is missed by rule and ratio, by layer and by distance. Raises StoreError if the file cannot be
    written."""
    figure, (left, middle, right) = _panels(3, 4.6)
    rules = list(dict.fromkeys(row.rule for row in found.rows))
    ratio = found.ratios[len(found.ratios) // 2]
    for number, rule in enumerate(rules):
        style: dict[str, Any] = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 4}
        ratios = [100 * each for each in found.ratios]
        shares = [100 * found.mean(rule, each, "reactivated") for each in found.ratios]
        missed = [100 * found.mean(rule, each, "missed") for each in found.ratios]
        left.plot(ratios, shares, **style, label=f"{rule}: tokens")
        left.plot(ratios, missed, **style, linestyle=":", label=f"{rule}: of all activations")
        rows = [row for row in found.rows if (row.rule, row.ratio) == (rule, ratio)]
        middle.plot([row.layer for row in rows], [100 * row.reactivated for row in rows], **style, label=rule)
        rates = found.at_distance(rule, ratio)
        shown = [
            (low + high, 100 * rate)
            for (low, high), rate in zip(found.distances, rates, strict=True)
            if rate is not None and rate > 0
        ]
        if shown:
            right.plot(*zip(*((both / 2, rate) for both, rate in shown), strict=True), **style, label=rule)
    left.set_title("become active, %", loc="left", fontsize=10)
    left.set_xlabel("heavy hitters, % of the prompt")
    middle.set_title(f"tokens that become active, %, at {100 * ratio:g} %", loc="left", fontsize=10)
    middle.set_xlabel("layer")
    right.set_title(f"active, % of pairs, at {100 * ratio:g} %", loc="left", fontsize=10)
    right.set_xlabel("tokens back")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    for axes in (left, middle, right):
        axes.legend(frameon=False, fontsize=8)
        plain(axes, "both")
    for axes in (left, middle):
        axes.set_ylim(0, None)
    figure.suptitle(f"{title}; active: above {100 * found.threshold:g} % of a query's attention", fontsize=11)
    save(figure, path)


def draw_bounds(found: Looseness, path: Path, *, title: str) -> None:
    """Draw how far bounds are above the truth, and the pages they cannot rule out, by size of pages (thin: each layer;
    bold: the mean). Raises StoreError if the file cannot be written."""
    figure, (left, right) = _panels(2, 4.2)
    for layer in sorted({row.layer for row in found.rows}):
        rows = [row for row in found.rows if row.layer == layer]
        left.plot([row.page for row in rows], [row.excess for row in rows], color=COLOURS[0], alpha=0.15, linewidth=0.8)
    left.plot(found.pages, [found.mean(page, "excess") for page in found.pages], color=COLOURS[0], marker=MARKERS[0])
    for number, (measure, label) in enumerate((("may", "by the bound may have"), ("have", "have"))):
        shares = [100 * found.mean(page, measure) for page in found.pages]
        right.plot(found.pages, shares, color=COLOURS[number], marker=MARKERS[number], label=label)
    left.set_title("bound above the largest true score", loc="left", fontsize=10)
    right.set_title(f"pages with more than {100 * found.share:g} % of the attention, %", loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("slots of a page")
        axes.set_ylim(0, None)
        plain(axes, "both")
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def draw_rank(found: Ranks, path: Path, *, title: str) -> None:
    """Draw KV-Direct's Fig. 5, a dot for each query head (colour and area: effective rank over d_head), and where
    ranks were truncated to, its Fig. 6. Raises StoreError if the file cannot be written."""
    from matplotlib.figure import Figure

    heads = max(len(layer.heads) for layer in found.layers)
    tall = 1.6 + 0.24 * heads
    figure = Figure(figsize=(WIDTH_PX / DPI, tall + (3.4 if found.truncations else 0)), dpi=DPI, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[tall, 3.4]) if found.truncations else [figure]
    _dots(parts[0].subplots(), found)
    if found.truncations:
        _truncations(parts[1].subplots(1, 2), found)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def _dots(axes: Any, found: Ranks) -> None:
    dots = [(layer.layer, head, rank / layer.dim) for layer in found.layers for head, rank in enumerate(layer.heads)]
    across, up, shares = zip(*dots, strict=True)
    drawn = axes.scatter(across, up, c=shares, s=[160 * share for share in shares], cmap="coolwarm", vmin=0, vmax=0.8)
    axes.figure.colorbar(drawn, ax=axes, label="rank / d_head", pad=0.01, extend="max")
    axes.set_xlabel("layer")
    axes.set_ylabel("query head")
    axes.set_yticks(range(max(up) + 1))
    axes.margins(0.03, 0.12)
    axes.set_title("effective rank of W_q W_k^T at 90 % of the energy", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _truncations(panels: Any, found: Ranks) -> None:
    match, divergence = panels
    dim = found.layers[0].dim
    for number, way in enumerate((*EVERY, LEFT)):
        rows = [row for row in found.truncations if row.way == way and row.match is not None]
        if not rows:
            continue
        label = "all but the newest (lowrank:r)" if way == LEFT else way
        style: dict[str, Any] = {"color": COLOURS[number], "marker": MARKERS[number], "label": label}
        match.plot([row.rank for row in rows], [100 * (row.match or 0) for row in rows], **style)
        divergence.plot([row.rank for row in rows], [row.kl for row in rows], **style)
    paper: dict[str, Any] = {"color": "black", "alpha": 0.5, "linewidth": 5, "label": "the paper's"}
    match.plot([dim / 2, dim / 2], [5, 15], **paper)
    divergence.plot([dim / 2 - 1.5, dim / 2 + 1.5], [10.9, 10.9], **paper)
    match.set_ylim(0, 104)
    match.set_title("tokens that are the full cache's, %", loc="left", fontsize=10)
    divergence.set_yscale("log")
    divergence.set_ylim(1e-3, 30)  # what all of a head leaves is rounding, and below
    divergence.set_title("mean KL, nats", loc="left", fontsize=10)
    for axes in panels:
        axes.set_xlabel("rank r")
        axes.legend(frameon=False, fontsize=8)
        plain(axes, "both")


def _panels(count: int, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_PX / DPI, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(1, count)


def _shares(values: list[float]) -> list[float]:
    return [100 * (number + 1) / len(values) for number in range(len(values))]
