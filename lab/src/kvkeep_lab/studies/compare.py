"""``compare``: the quality of methods on one text (:mod:`kvkeep_lab.reference`): KV-Direct's Fig. 4 and 9."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.prompt import encode, question, shortened
from kvkeep.errors import UsageError
from kvkeep_lab.figures import COLOURS, FilePath, blank, dress, save, styled
from kvkeep_lab.reading import whole_bytes
from kvkeep_lab.reference import Comparison, Row, cases, compare
from kvkeep_lab.studies.base import BudgetText, Flag, MethodName, Study, Trial, text_of, unique
from kvkeep_lab.tables import Table, fixed, megabytes, percent

log = logging.getLogger(__name__)

METHODS = ["kv-direct", "streaming-llm", "h2o", "snapkv", "tova", "window"]
_LOWEST = -9  # the decade (nats) below which no axis goes that shows methods which are not exact


class Compare(Study):
    """Methods and budgets against the full cache, on one prompt or text."""

    name = "compare"
    about = "methods and budgets against the full cache: tokens, KL, perplexity, bytes, speed"
    protocol = (
        "One prompt is read and continued by every method at every budget: free-running (match, KL of texts that may "
        "have parted, speed), and teacher-forced, given the full cache's continuation token by token (KL of one text, "
        "top-1, perplexity). KL in nats. The reference is transformers' own cache, in 16 bits kvkeep's 'full'."
    )
    found = Comparison
    text = "optional"

    prompt: Annotated[str | None, Flag("--prompt", "-p")] = Field(None, description="the question or instruction")
    methods: Annotated[list[MethodName], unique, Flag("--method", "-x")] = Field(
        METHODS, min_length=1, description="see 'kvkeep methods'"
    )
    budgets: Annotated[list[BudgetText], unique, Flag("--budget", "-b")] = Field(
        ["12.5%", "25%", "50%"],
        min_length=1,
        description="entries per layer (64), bytes (4MB), shares of prompt and continuation (25%)",
    )
    new: Annotated[int, Flag("--max-tokens", "-n")] = Field(
        64, ge=1, description="tokens written and compared; ends of text are ignored"
    )
    limit: int | None = Field(None, ge=1, description="tokens of the file that are read")
    raw: Annotated[bool | None, Flag("--raw/--chat")] = Field(
        None,
        description="continue the text as it is, or put it into the model's chat template; raw for a file without a "
        "prompt",
    )
    chunk: int | None = Field(None, ge=1, description="tokens of the prompt taken at a time")

    def check(self, files: Sequence[Path]) -> None:
        if not files:
            question(None, self.prompt)

    def measure(self, trial: Trial) -> Comparison:
        text = text_of(trial.sources) if trial.sources else None
        if text is not None and self.limit is not None:
            text, count = shortened(trial.tokenizer, text, self.limit)
            if count > self.limit:
                log.warning("Only the first %s of the text's %s tokens are read.", f"{self.limit:,}", f"{count:,}")
        raw = self.raw if self.raw is not None else bool(trial.sources) and not self.prompt
        ids = encode(trial.tokenizer, question(text, self.prompt), raw=raw)
        listed = cases(self.methods, self.budgets)
        found = compare(trial.model, ids, listed, new=self.new, chunk=self.chunk, progress=trial.progress)
        return replace(found, whole_bytes=whole_bytes(trial.model, found.context))

    def problem(self, found: Comparison) -> str | None:
        return None if found.measured else "No method could be measured; the reasons are above."

    def as_json(self, found: Comparison) -> dict[str, Any]:
        return super().as_json(found) | {"context": found.context}

    def tables(self, found: Comparison) -> list[Table]:
        """Return quality and cost of each row, the best of each budget in bold, and what was refused below."""
        recalls = _RECALL if any(row.recalled is not None for row in found.measured) else []
        columns = [*_NAMED, *_quality(found.reference), *recalls, *_cost(found)]
        table = Table(
            f"{found.prompt_tokens:,} tokens read, {found.new_tokens} written",
            [heading for heading, _, _ in columns],
            notes=[
                f"{found.reference.method.capitalize()} is the reference; KL in nats, the best of a budget in bold.",
                "Free-running: match, KL where texts may have parted. Teacher-forced: other KLs, top-1, perplexity.",
                "Of bfloat16: held bytes as a share of the full cache's in bfloat16.",
                *(f"`{row.label}`: {row.error}" for row in found.rows if row.error),
                *(
                    f"`{row.label}`: {row.merges[0]:,} pairs merged, {row.merges[1]:,} shares of keys clamped."
                    for row in found.measured
                    if row.merges[0] > 0
                ),
            ],
            named=len(_NAMED),
        )
        for row in (found.reference, *found.measured):
            peers = [peer for peer in found.measured if peer.budget == row.budget and row.budget is not None]
            table.rows.append([_cell(row, peers, show, badness) for _, show, badness in columns])
        return [table]

    def draw(self, found: Comparison, path: FilePath, *, title: str) -> None:
        """Draw token match (free-running) and KL (teacher-forced) by the bytes held, and both KLs at each position of
        the smallest budget. One budget alone gives bars instead of lines. Raises UsageError if no row was measured."""
        rows = found.measured
        if not rows:
            raise UsageError("There is nothing to draw: no method was measured.")
        budgets = _budgets(rows)
        floor = _floor(rows)
        shown = [row for row in rows if row.budget in (None, *budgets[:1])]
        strips = 1.2 + 0.28 * len(shown)  # inches
        title = f"{title}: {found.prompt_tokens:,} tokens read, {found.new_tokens} written, against the full cache"
        if len(budgets) > 1:
            figure = blank(4.6 + strips)
            parts: Any = figure.subfigures(2, 1, height_ratios=[4.3, strips])
            _lines(parts[0], rows, budgets, floor)
            pair = parts[1].subplots(1, 2, sharey=True)
            _positions(pair, shown, floor, f" at {budgets[0]}")
            pair[0].set_yticks(range(len(shown)), [row.method for row in shown])
        else:
            figure = blank(0.7 + strips)
            grid: Any = figure.subplots(1, 4, sharey=True, width_ratios=[1, 1, 1.3, 1.3])
            _bars(grid[0], grid[1], shown, floor)
            _positions(grid[2:], shown, floor)
            title += f", budget {budgets[0]}" if budgets else ""
        figure.suptitle(title, fontsize=11)
        save(figure, path)


# -- the table ----------------------------------------------------------------------------------------

Column = tuple[str, Callable[[Row], str], Callable[[Row], float | None] | None]
"""A heading, what stands in a row, and what makes a row the best of its budget (the smallest is), if anything does."""


def _quality(reference: Row) -> list[Column]:
    def surprise(row: Row) -> float | None:
        """How far the perplexity is from the reference's: one that is too sure is no better than one that is not."""
        assert reference.perplexity is not None
        return None if row.perplexity is None else abs(math.log(row.perplexity / reference.perplexity))

    return [
        ("entries", lambda row: "all" if row.entries is None else f"{row.entries:,}", None),
        ("match", lambda row: percent(row.match, 0), lambda row: _negative(row.match)),
        ("differs at", lambda row: "-" if row.differs_at is None else str(row.differs_at), None),
        ("KL, free", lambda row: nats(row.kl_free_mean), None),
        ("KL, forced", lambda row: nats(row.kl_mean), lambda row: row.kl_mean),
        ("its largest", lambda row: nats(row.kl_max), None),
        ("top-1", lambda row: percent(row.top1, 0), lambda row: _negative(row.top1)),
        ("perplexity", lambda row: "-" if row.perplexity is None else f"{row.perplexity:#.4g}".rstrip("."), surprise),
    ]


_NAMED: list[Column] = [
    ("method", lambda row: f"`{row.method}`", None),
    ("class", lambda row: row.exactness, None),
    ("budget", lambda row: row.budget or "-", None),
]

_RECALL: list[Column] = [
    (
        "recalled of a head",
        lambda row: "-" if row.recalled is None else f"{row.recalled:,.0f} of {row.away:,.0f}",
        None,
    ),
    ("left out at most", lambda row: percent(row.left_out), None),
]


def _cost(found: Comparison) -> list[Column]:
    def share(row: Row) -> float | None:
        """What a row holds of an unbounded bfloat16 cache's bytes."""
        return row.held_bytes / found.whole_bytes if found.whole_bytes else None

    return [
        ("resident", lambda row: megabytes(row.memory["resident_bytes"]), lambda row: row.memory["resident_bytes"]),
        ("held, of bfloat16", lambda row: percent(share(row), 0), None),
        ("compressed + checkpoints", lambda row: megabytes(row.kept_bytes or None), None),
        ("prefill s", lambda row: fixed(row.prefill_s), None),
        ("tokens/s", lambda row: fixed(row.tokens_per_s, 1), lambda row: _negative(row.tokens_per_s)),
    ]


def _cell(
    row: Row, peers: Sequence[Row], show: Callable[[Row], str], badness: Callable[[Row], float | None] | None
) -> str:
    """Return what stands in a cell, in bold where no other row of the same budget is better and one is worse."""
    text = show(row)
    if badness is None or row not in peers:
        return text
    values = {show(peer): value for peer in peers if (value := badness(peer)) is not None}
    best = min(values, key=lambda key: values[key], default=text)
    return f"**{text}**" if text == best and len(values) > 1 else text


def nats(value: float | None) -> str:
    """Return a KL as a person reads it: 0 only where it is 0."""
    if not value:
        return "-" if value is None else "0"
    return f"{value:.3f}" if value >= 1e-2 else f"{value:.1e}"


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


# -- the figure ---------------------------------------------------------------------------------------


def _budgets(rows: Sequence[Row]) -> list[str]:
    """Return the budgets as asked, by the bytes that were held within them."""
    held = {row.budget: [one.held_bytes for one in rows if one.budget == row.budget] for row in rows if row.budget}
    return sorted(held, key=lambda budget: median(held[budget]))


def _floor(rows: Sequence[Row]) -> float:
    """Return the lowest KL that is drawn: a decade below the smallest of the methods that are not exact, or of those
    that are where there is no other."""
    found = [row.kl_mean for row in rows if row.kl_mean]
    others = [row.kl_mean for row in rows if row.kl_mean and row.exactness != Exactness.EXACT]
    smallest = min(others or found, default=1e-5)
    return 10.0 ** max(math.floor(math.log10(smallest)) - 1, _LOWEST if others else -20)


def _lines(figure: Any, rows: Sequence[Row], budgets: Sequence[str], floor: float) -> None:
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(dict.fromkeys(row.method for row in rows)):
        mine = sorted((row for row in rows if row.method == name), key=lambda row: row.held_bytes)
        held = [row.held_bytes / 1e6 for row in mine]
        style = styled(number, name, None) | {"linestyle": "-" if number < len(COLOURS) else "--"}
        style |= {"clip_on": False, "zorder": 3}
        left.plot(held, [_hundredths(row) for row in mine], **style)
        right.plot(held, [max(row.kl_mean or 0.0, floor) for row in mine], **style)
    across = "keys and values held, for the budget asked"
    dress(left, "Match, free-running (%)", across, x="log")
    dress(right, "Mean KL, teacher-forced (nats)", across, x="log", y="log")
    for axes in (left, right):
        axes.xaxis.minorticks_off()
        axes.set_xticks(*_ticks(rows, budgets))
        axes.set_title(axes.get_title("left"), loc="left", fontsize=10, pad=9)
    left.set_ylim(0, 100)
    right.set_ylim(bottom=floor)
    if below := _below(rows, floor):
        words, place = f"below the axis: {below}", {"xycoords": "axes fraction", "textcoords": "offset points"}
        right.annotate(words, (0, 0), (6, 9), fontsize=8, **place)
    handles, labels = left.get_legend_handles_labels()
    columns = math.ceil(len(labels) / math.ceil(len(labels) / 7))  # rows of about the same length
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _ticks(rows: Sequence[Row], budgets: Sequence[str]) -> tuple[list[float], list[str]]:
    """Return where the bytes axis is marked, in MB, and the labels: each budget at its median, and whatever was held
    without a budget where there is room for it."""
    marks = {median(row.held_bytes for row in rows if row.budget == name) / 1e6: name for name in budgets}
    for held in sorted((row.held_bytes / 1e6 for row in rows if row.budget is None), reverse=True):
        if all(abs(math.log(held / other)) > 0.4 for other in marks):
            marks[held] = "no budget"
    return list(marks), [f"{held:.3g} MB\n{name}" for held, name in marks.items()]


def _bars(left: Any, right: Any, rows: Sequence[Row], floor: float) -> None:
    places = list(range(len(rows)))
    colours = [COLOURS[0] if row.exactness == Exactness.EXACT else "0.6" for row in rows]
    divergences = [row.kl_mean or 0.0 for row in rows]
    matches = left.barh(places, [_hundredths(row) for row in rows], color=colours, height=0.65)
    left.bar_label(matches, [f"{_hundredths(row):.0f}" for row in rows], padding=3, fontsize=9)
    left.set_xlim(0, 119)
    left.set_xticks([0, 50, 100])
    left.set_yticks(places, [row.method for row in rows])
    lengths = [max(value - floor, 0.0) for value in divergences]
    bars = right.barh(places, lengths, left=floor, color=colours, height=0.65)
    labels = [f"{nats(value)}{' (below the axis)' * (value < floor)}" for value in divergences]
    right.bar_label(bars, labels, padding=3, fontsize=9)
    dress(left, "Match, free-running (%)", "blue: methods that call themselves exact", grid="x")
    dress(right, "Mean KL, forced (nats)", x="log", grid="x")
    right.set_xlim(floor, max(10 * floor, *divergences) * 30)
    left.invert_yaxis()  # shared: the first row on top


def _positions(pair: Any, rows: Sequence[Row], floor: float, where: str = "") -> None:
    """Draw one strip a method, a cell a position, coloured by the logarithm of its KL: teacher-forced, free-running."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    highest = max(value for row in rows for value in (*row.kl, *row.kl_free))
    style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis"}
    style["norm"] = LogNorm(floor, max(highest, 10 * floor))
    named = (("teacher-forced", [row.kl for row in rows]), ("free-running", [row.kl_free for row in rows]))
    for axes, (name, values) in zip(pair, named, strict=True):
        image = axes.imshow([[max(value, floor) for value in own] for own in values], **style)
        for number in range(1, len(rows)):
            axes.axhline(number - 0.5, color="white", linewidth=2)
        axes.set_title(f"KL{where}, {name} (nats)", loc="left", fontsize=10)
        axes.set_xlabel("token of the continuation")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(axis="y", length=0)
        axes.spines[:].set_visible(False)
    pair[0].figure.colorbar(image, ax=list(pair), pad=0.01, extend="min")


def _below(rows: Sequence[Row], floor: float) -> str:
    """Say whose KL lies below the axis, and where its largest is."""
    below: dict[str, float] = {}
    for row in rows:
        if row.kl_mean is not None and row.kl_mean < floor:
            below[row.method] = max(below.get(row.method, 0.0), row.kl_mean)
    return ", ".join(f"{name} ({nats(value)})" for name, value in below.items())


def _hundredths(row: Row) -> float:
    return 100 * (row.match or 0.0)
