"""``recompute``: compares the time of recomputing evicted entries with that of reading them.

In KV-Direct (arXiv:2603.19664, section 5.8, Fig. 7), recomputing is up to five times as fast as reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvkeep_lab.figures import COLOURS, FilePath, blank, dress, save, styled
from kvkeep_lab.partial import Interruption
from kvkeep_lab.recall_timing import APART, ATTEND, READ, RECOMPUTE, RERUN, RecallReport, RecallRow, run
from kvkeep_lab.shapes import SHAPES, Shape, shaped
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import Count, Flag, Study, Trial, part, rising
from kvkeep_lab.tables import Table, fixed, number
from kvkeep_lab.tasks.base import Metric

WAYS = (RECOMPUTE, READ, APART, ATTEND, *RERUN)
PAPER = {1: (1.1, 1.1), 100: (0.46, 0.68), 500: (0.17, 0.3)}
"""KV-Direct's Fig. 7, from its section 5.8: minimum and maximum ratio over its models, by number of tokens N."""

COUNTED = (1, 50, 100, 500)
"""Values of N in the metrics."""


@dataclass(frozen=True)
class Reports:
    """The report of the loaded model, and those of layers with other shapes."""

    reports: list[RecallReport]


class Recompute(Study):
    """KV-Direct's Fig. 7, for several numbers of tokens, shapes and kinds of storage."""

    name = "recompute"
    about = "compare three ways to get the keys and values of N tokens in one layer: recompute, read, attend in place"
    protocol = (
        "The keys and values of N tokens in one layer are projected from their residuals in one product, copied "
        "(in one piece, or entry by entry), or attended in place. They come from memory and from disk, into warm "
        "buffers and into cold ones (processor caches swept, freed memory returned, files out of the page "
        "cache). Times are those of the fastest round. Arithmetic: the time that the measured rates of products "
        "and copies allow."
    )
    found = Reports
    metrics: ClassVar[tuple[Metric, ...]] = tuple(
        Metric(f"{name}_{count}", f"recompute by read, {words}, N = {count}", "lower", "number")
        for count in COUNTED
        for name, words in (("warm", "memory, warm"), ("cold", "memory, cold"), ("disk", "disk, cold"))
    )

    counts: Annotated[list[Count], rising, Flag(default=[1, 5, 10, 50, 100, 200, 500, 1000, 2000, 4096])] = Field(
        [1, 10, 50, 100, 200, 500, 1000], min_length=1, description="numbers of tokens N"
    )
    rounds: int = Field(5, ge=1, description="number of rounds; each round measures everything once")
    beside: list[Shape] = Field(
        ["qwen2.5-0.5b", "qwen3-0.6b", "qwen2.5-1.5b"],
        description=f"shapes of additional layers with random weights: {', '.join(SHAPES)}, or 'none'",
    )
    slow: bool = Field(
        True, description="measure the kinds of checkpoints that run whole layers too: residual:4, tokens"
    )
    folder: str | None = Field(None, description="folder for the files on disk; by default the user's cache folder")

    def measure(self, trial: Trial) -> Reports:
        reports: list[RecallReport] = []
        names = [trial.loaded.name, *self.beside]
        for place, name in enumerate(names):
            model = shaped(name, trial.model.dtype, trial.model.device) if place else trial.model
            options: dict[str, Any] = {"slow": self.slow and not place, "folder": self.folder}
            steps = part(trial.progress, place, len(names))
            try:
                reports.append(run(model, name, counts=self.counts, rounds=self.rounds, progress=steps, **options))
            except Interruption as stop:
                if not place and not stop.found.rows:
                    raise KeyboardInterrupt from None
                raise Interruption(Reports([*reports, stop.found])) from None
        return Reports(reports)

    def as_json(self, found: Reports) -> dict[str, Any]:
        return {"models": asdict(found)["reports"]}

    def scores(self, found: Reports) -> dict[str, float]:
        rows, scores = found.reports[0].rows, {}
        for name, place, buffers in (("warm", "device", "warm"), ("cold", "device", "cold"), ("disk", "disk", "cold")):
            for row in where(rows, way=READ, place=place, buffers=buffers):
                if row.recompute_ratio is not None and row.n in COUNTED:
                    scores[f"{name}_{row.n}"] = row.recompute_ratio
        return scores

    def tables(self, found: Reports) -> list[Table]:
        return [*_times(found.reports[0]), self._ratios(found)]

    def details(self, found: Reports) -> list[Table]:
        places = list(found.reports[0].roofline.bandwidth)
        table = Table(
            "Shapes and rates",
            [*("model", "d", "w", "bytes", "layers", "GFLOP/s"), *(f"GB/s, {place}" for place in places), "break-even"],
            notes=["Break-even: projecting a residual at hand beats reading from what gives fewer GB/s."],
        )
        for one in found.reports:
            shape = [one.model, f"{one.hidden}", f"{one.width}", f"{one.itemsize}", ", ".join(map(str, one.layers))]
            rates = [one.roofline.bandwidth.get(place, 0.0) for place in places] + [one.break_even_bytes_per_s]
            shape.append(fixed(one.roofline.flops / 1e9, 0))
            table.rows.append([*shape, *(fixed(rate / 1e9) for rate in rates)])
        return [table, *(times for one in found.reports[1:] for times in _times(one))]

    def _ratios(self, found: Reports) -> Table:
        cases = each(found.reports[0].rows, "place", "buffers")
        table = Table(
            "Recompute by read: below 1, recomputing is faster",
            ["model, N", *(f"{place}, {buffers}" for place, buffers in cases), "entry by entry", "the paper's"],
            notes=["Entry by entry: from memory, warm, of entries that lie apart."],
        )
        for report in found.reports:
            rows = {(row.n, row.way, row.place, row.buffers): row for row in report.rows}
            for count in self.counts:
                ratios = [_number(rows.get((count, READ, *case)), "recompute_ratio", 2) for case in cases]
                apart = _number(rows.get((count, APART, "device", "warm")), "recompute_ratio", 2)
                paper = "-".join(f"{value:g}" for value in dict.fromkeys(PAPER.get(count, ())))
                table.rows.append([f"{report.model}, {count:,}", *ratios, apart, paper])
        return table

    def draw(self, found: Reports, path: FilePath, *, title: str) -> None:
        """Draw Fig. 7: the first model's times with memory and with disk, and below them every model's ratio of
        recomputing to reading."""
        figure = blank(9.4)
        grid: Any = figure.subplots(2, 2, sharey="row")
        for (times, ratios), (place, lies) in zip(grid.T, (("device", "in memory"), ("disk", "on disk")), strict=True):
            _draw_times(times, found.reports[0], place)
            _draw_ratios(ratios, found.reports, place)
            words = f"{found.reports[0].model}: ms for one layer, {lies}, cold buffers"
            dress(times, words, "N, tokens", x="log", y="log", legend=True)
            words = f"recompute / read, {lies} (thin: entry by entry; dotted: roofline)"
            dress(ratios, words, "N, tokens", x="log", y="log")
        handles, labels = grid[1][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        figure.suptitle(title, fontsize=11)
        save(figure, path)


def _times(report: RecallReport) -> list[Table]:
    tables = []
    for place, buffers in each(report.rows, "place", "buffers"):
        rows = {(row.n, row.way): row for row in where(report.rows, place=place, buffers=buffers)}
        shown = [way for way in WAYS if any(key[1] == way for key in rows)]
        table = Table(
            f"{report.model}: ms for one layer, from {place}, {buffers} buffers",
            ["N", *shown, "recompute, arithmetic", "read, arithmetic"],
        )
        for count in dict.fromkeys(count for count, _ in rows):
            cells = [_number(rows.get((count, way)), "ms") for way in shown]
            roofs = [_number(rows.get((count, way)), "roofline_ms") for way in (RECOMPUTE, READ)]
            table.rows.append([f"{count:,}", *cells, *roofs])
        tables.append(table)
    return tables


def _number(row: RecallRow | None, name: str, digits: int = 3) -> str:
    return number(None if row is None else getattr(row, name), digits)


def _draw_times(axes: Any, report: RecallReport, place: str) -> None:
    rows = where(report.rows, place=place, buffers="cold")
    for series, way in enumerate((RECOMPUTE, READ, ATTEND, APART, *RERUN)):
        if not (mine := _by_count(rows, way)):
            continue
        counts, roofs = [row.n for row in mine], [row.roofline_ms for row in mine]
        axes.plot(counts, [row.ms for row in mine], **styled(series, way))
        if None not in roofs:
            axes.plot(counts, roofs, color=COLOURS[series % len(COLOURS)], linestyle=":", label=f"{way}, roofline")


def _draw_ratios(axes: Any, reports: Sequence[RecallReport], place: str) -> None:
    axes.axhline(1, color="0.4", linewidth=1)
    for series, report in enumerate(reports):
        for buffers, line in (("warm", "-"), ("cold", "--")):
            rows = [row for row in where(report.rows, place=place, buffers=buffers) if row.recompute_ratio is not None]
            for way in (READ, APART):
                shown = [(row.n, row.recompute_ratio) for row in _by_count(rows, way)]
                style = {"color": COLOURS[series % len(COLOURS)], "marker": "", "linewidth": 0.8, "alpha": 0.6}
                if way == READ:
                    style = styled(series, f"{report.model}, {buffers}", 3.5)
                if shown:
                    axes.plot(*zip(*shown, strict=True), line, **style)
        roofs = {row.way: row.roofline_ms for row in report.rows if row.place == place}
        if (recompute := roofs.get(RECOMPUTE)) and (read := roofs.get(READ)):
            axes.axhline(recompute / read, color=COLOURS[series % len(COLOURS)], linestyle=":", linewidth=1)
    for n, (low, high) in PAPER.items():
        label = "the paper's" if n == 1 else None
        axes.plot([n, n], [low * 0.97, high * 1.03], color="black", linewidth=5, alpha=0.5, label=label)


def _by_count(rows: Iterable[RecallRow], way: str) -> list[RecallRow]:
    return sorted((row for row in rows if row.way == way), key=lambda row: row.n)
