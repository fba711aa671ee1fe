"""Write the numbers of the pages in docs/results anew from the stores beside them.

A page names what it shows in a comment, ``<!-- KIND: ... -->``. The lines from there to ``<!-- end -->`` are made here:

* ``claims: NAME; NAME 1 3``: the claims of experiments (all of them, or those with these numbers) with their verdicts;
* ``numbers: NAME``: the main numbers of a study;
* ``paired: STORE MODEL METHOD``: the KL of other methods less that of METHOD, passage by passage;
* ``bytes: STORE MODEL METHOD, METHOD``: the bytes at each budget without and with bookkeeping;
* ``scores: STORE METRIC METHOD [MODEL] [AXIS=VALUE,VALUE]``: a metric of all methods, and that of METHOD less theirs,
  sample by sample, and the number of samples where it is not the same everywhere; only of points with these values;
* ``texts: STORE METRIC METHOD [MODEL] [AXIS=VALUE,VALUE]``: the same with intervals over texts (one for each point of
  the axes and each seed), because one cache answers all questions about a text;
* ``changed: STORE METRIC METHOD [MODEL] [AXIS=VALUE,VALUE]``: of a metric that is 0 or 1, the samples that are right
  with METHOD, those of them that another method loses, and those that it gains;
* ``points: STORE METRIC [MODEL]``: a metric of all methods at each point of the task's axes, in percent or as it is;
* ``answers: NAME``: how much less time KVSlimmer takes than AsymKV, by the length of the answer;
* ``which: BUDGET``: the table of needs, whose first two columns are the page's.

A table under a link to a store, headed by a model, has the KL and match of its methods at its budgets. Words are left
alone.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import fmean

from kvkeep_lab.cell import Point
from kvkeep_lab.experiment import load_experiment
from kvkeep_lab.report import groups
from kvkeep_lab.report.chapter import VerdictOutcome
from kvkeep_lab.report.formatting import titled
from kvkeep_lab.report.group import Group
from kvkeep_lab.report.methods import MethodResult, Samples
from kvkeep_lab.report.studies import StudyGroup
from kvkeep_lab.report.tasks import TaskGroup
from kvkeep_lab.statistics import Estimate, estimate, student
from kvkeep_lab.store import ResultFile
from kvkeep_lab.subject import at_once
from kvkeep_lab.tables import markdown
from kvkeep_lab.tasks.base import Metric

from kvkeep.budget import Budget

RESULTS = Path(__file__).parents[1] / "docs" / "results"
MADE = re.compile(r"^<!-- (\w+): ([^\n]*) -->\n(.*?)^<!-- end -->$", re.M | re.S)
TABLE = re.compile(r"(\]\((\S+\.jsonl)\)[^|\]]*?\n\n\| (smollm2|gemma3-270m) \|(.*)\n\| -.*\n)((?:\|.*\n)+)")
_SAID = re.compile(r"^(So|Ours|Not so|Undecided): ")
BENCH = "bench-methods-zen4.json"


def main() -> None:
    """Rewrite the pages."""
    for page in sorted(RESULTS.glob("*.md")):
        page.write_text(remade(page.read_text("utf-8")), "utf-8")


def remade(page: str) -> str:
    """Return the page with the stores' numbers."""
    return TABLE.sub(_table, MADE.sub(_made, page))


def judged(named: str) -> Iterator[tuple[str, int]]:
    """Yield the claims that a comment names: experiment and number, from 1 on."""
    for part in named.split(";"):
        name, *numbers = part.split()
        paper = load_experiment(name).paper
        count = 0 if paper is None else len(paper.claims)
        yield from ((name, int(number)) for number in numbers or range(1, count + 1))


@cache
def _groups(file: str) -> list[TaskGroup | StudyGroup]:
    store = ResultFile(RESULTS / file)
    store.refresh()
    if not store.records or store.torn:
        raise SystemExit(f"{file} has no results, or a line that is cut off.")
    return groups([store])


def _newest(name: str) -> list[Group]:
    """Return an experiment's groups, one for each model: that of its latest setting, in the first store with one."""
    found: dict[str, Group] = {}
    for store in sorted(RESULTS.glob("lab-*.jsonl")):
        if f'"{name}"' in store.read_text("utf-8"):
            for group in _groups(store.name):
                if group.experiment.name == name:
                    found.setdefault(group.model, group)
    return list(found.values())


def _made(found: re.Match[str]) -> str:
    kind, named, before = found.groups()
    makers = {
        "claims": _claims, "numbers": _numbers, "paired": _paired, "bytes": _bytes, "answers": _answers,
        "scores": _scores, "texts": partial(_scores, by_text=True), "changed": _changed, "points": _points,
    }  # fmt: skip
    lines = _which(named, before) if kind == "which" else makers[kind](named)
    return "\n".join([f"<!-- {kind}: {named} -->", *lines, "<!-- end -->"])


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _head(*cells: str, left: int = 1, right: int | None = None) -> str:
    return markdown(cells, (), left, right)


def _budgets(measured: Iterable[MethodResult]) -> list[str]:
    """Return the budgets of some results, the smallest first."""
    parsed = {one.budget: Budget.parse(one.budget) for one in measured if one.budget}
    return sorted(parsed, key=lambda budget: (parsed[budget].unit, parsed[budget].amount))


def _percent(budgets: Iterable[str]) -> list[str]:
    return [budget.replace("%", " %") for budget in budgets]


def _claims(named: str) -> Iterator[str]:
    headings = ("the paper's", "its claim", "ours", "N", "model", "difference of the protocol", "verdict")
    yield _head(*headings, left=3, right=1)
    chosen: dict[str, list[int]] = {}
    for name, claim in judged(named):
        chosen.setdefault(name, []).append(claim)
    counts: Counter[VerdictOutcome] = Counter()
    settings = []
    for name, numbers in chosen.items():
        experiment = load_experiment(name)
        assert experiment.paper is not None
        where, claims = experiment.paper.where, experiment.paper.claims
        measured = _newest(name)
        decided = [number for number, claim in enumerate(claims, 1) if claim.metric is not None]
        verdicts = [(group, dict(zip(decided, group.judged(), strict=True))) for group in measured]
        for number in numbers:
            claim = claims[number - 1]
            if claim.metric is None or not measured:
                verdict = "no number decides it" if claim.metric is None else "not run"
                yield _line(where, _cell(claim.says), "-", "-", "-", "-", verdict)
                continue
            for group, found in verdicts:
                one = found[number]
                counts[one.outcome] += 1
                judged_here = [text for text in one.ours if not text.startswith("Not measured")]
                # The row's last column names the outcome. If cases have different ones, each keeps its word.
                ours = " ".join(text if len(judged_here) > 1 else _SAID.sub("", text) for text in one.ours)
                yield _line(
                    f"[{where}](lab-{name}.jsonl)", _cell(claim.says), _cell(ours) or "-", str(one.samples or "-"),
                    group.model, _cell(one.why) or "-", one.outcome,
                )  # fmt: skip
        settings += [
            f"* **{where}**, theirs: {_cell(experiment.paper.setting)}."
            + "".join(f" Ours: {_cell(group.ours)}." for group in measured)
        ]
    yield ""
    yield ", ".join(f"{counts[outcome]} {outcome}" for outcome in VerdictOutcome) + "."
    yield ""
    yield from settings


def _cell(text: str) -> str:
    """Return a sentence for a cell: on one line, without the table's sign."""
    return re.sub(r"(?<!\\)([|<>])", r"\\\1", " ".join(text.split()))


def _numbers(name: str) -> Iterator[str]:
    for group in _newest(name):
        assert isinstance(group, StudyGroup)
        yield from group._numbers().markdown().splitlines()[2:]  # without its heading


def _answers(name: str) -> Iterator[str]:
    (group,) = _newest(name)
    assert isinstance(group, StudyGroup)
    counts = (0, 64, 256, 512)
    less = [student([fmean(_less(record.data, count)) for record in group.records]) for count in counts]
    yield _head("tokens of the answer", *map(str, counts))
    yield _line("KVSlimmer takes less time than AsymKV, %", *(_shown(one, "{:.1f}", 100) for one in less))


def _less(data: dict, count: int) -> Iterator[float]:
    """Yield 1 - KVSlimmer / AsymKV of the seconds of a request at each length."""
    seconds = {
        (row["method"], row["length"]): row["prefill_s"] + count * row["mean_ms"] / 1e3
        for row in data["rows"]
        if not row["chunk"]
    }
    for length in sorted({length for _, length in seconds}):
        yield 1 - seconds["kvslimmer-published", length] / seconds["asymkv-published", length]


def _shown(found: Estimate, form: str, factor: float = 1) -> str:
    mean, low, high = (form.format(factor * value) for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


def _group(file: str, *models: str) -> TaskGroup:
    """Return the group of the model that is named, or the only one; not that of a search of parameters."""
    measured = (one for one in _groups(file) if not one.experiment.name.endswith("-tuning"))
    (group,) = (one for one in measured if not models or one.model in models)
    assert isinstance(group, TaskGroup)
    return group


def _result(group: TaskGroup, method: str, budget: str) -> MethodResult | None:
    """Return a method's result with the parameters that were chosen for the budget."""
    chosen = group.experiment.choice(method, group.model, budget)
    return next((one for one in group.results if (one.method, one.budget) == (chosen, budget)), None)


def _paired(named: str) -> Iterator[str]:
    file, model, method = named.split()
    group = _group(file, model)
    budgets = _budgets(group.measured)
    yield _head(f"KL less that of `{method}`", *_percent(budgets))
    for other in group.experiment.methods:
        if other == method:
            continue
        cells = []
        for budget in budgets:
            base, result = _result(group, method, budget), _result(group, other, budget)
            measured = base and result and base.scores and result.scores
            cells.append(_shown(estimate(result.minus(base.samples, "kl")), "{:+.2g}") if measured else "-")
        if set(cells) != {"-"}:
            yield _line(f"`{other}`", *cells)


def _compared(named: str) -> tuple[str, str, Metric, list[MethodResult], list[str]]:
    """Return what a comment names: metric, method, the metric's definition, the results that have it, and budgets."""
    file, name, method, *chosen = named.split()
    places = dict(word.split("=") for word in chosen if "=" in word)
    group = _group(file, *(word for word in chosen if "=" not in word))
    there = [replace(one, samples=_at(one.samples, places)) for one in group.measured]
    measured = [one for one in there if one.values(name)]
    if method not in (one.method for one in measured):
        raise SystemExit(f"{file} has no {name} of {method}: {named}.")
    return name, method, group.metric(name), measured, _budgets(measured)


def _by_way(measured: Iterable[MethodResult], budgets: Sequence[str]) -> dict[tuple[str, str], MethodResult]:
    """Return results by method and budget; those without a budget at each."""
    return {(one.method, at): one for one in measured for at in ([one.budget] if one.budget else budgets)}


def _changed(named: str) -> Iterator[str]:
    """Yield how many right answers of a method each other method loses, and how many it gains."""
    columns = ", right", ", lost", ", gained"
    name, method, metric, measured, budgets = _compared(named)
    results = _by_way(measured, budgets)
    yield _head(f"{metric.label} of `{method}`", *(f"{at}{what}" for at in _percent(budgets) for what in columns))
    for other in dict.fromkeys(one.method for one in measured if one.method != method):
        cells = []
        for budget in budgets:
            one, base = results.get((other, budget)), results.get((method, budget))
            less = [] if one is None or base is None else one.minus(base.samples, name)
            if not less:
                cells += ["-", "-", "-"]
                continue
            shared = [place for place, scores in one.samples.items() if scores.get(name) and place in base.samples]
            right = sum(sum(base.samples[place].get(name, ())) for place in shared)
            cells += [f"{right:.0f}", str(sum(value < 0 for value in less)), str(sum(value > 0 for value in less))]
        yield _line(f"`{other}`", *cells)


def _scores(named: str, by_text: bool = False) -> Iterator[str]:
    name, method, metric, measured, budgets = _compared(named)
    results = _by_way(measured, budgets)
    form, factor = ("{:.1f}", 100) if metric.percent else ("{:.2f}", 1)

    def shown(texts: Iterable[Sequence[float]], form: str, least: float = 0.0) -> str:
        """Return the mean of numbers that are given text by text; a single text has no interval over texts."""
        found = [numbers for numbers in texts if numbers]
        scale = (least, 1.0) if metric.percent else (-math.inf, math.inf)
        if not found or (by_text and len(found) == 1):
            return form.format(factor * fmean(found[0])) if found else "-"
        over = student([fmean(numbers) for numbers in found], scale=scale) if by_text else estimate([*chain(*found)])
        return _shown(over, form, factor)

    numbers = {way: one.values(name) for way, one in results.items()}
    counted = len({len(found) for found in numbers.values()}) > 1
    after = ["", f", `{method}` less it", *([", N"] if counted else [])]
    columns = (f"{word}{what}" for word in _percent(budgets) for what in after)
    yield _head("-ln p a token" if metric.kind == "perplexity" else titled(metric), *columns)
    for other in dict.fromkeys(one.method for one in measured if one.budget or one.method == method):
        cells = []
        for budget in budgets:
            one, base = results.get((other, budget)), results.get((method, budget))
            texts = {} if one is None else one.samples
            cells.append(shown((scores.get(name, []) for scores in texts.values()), form))
            less = []
            if base is not None and other != method:
                less = [base.minus({place: texts[place]}, name) for place in base.samples if place in texts]
            cells.append(shown(less, form.replace(":", ":+"), least=-1.0))
            if counted:
                cells.append(str(len(numbers.get((other, budget), []))) if texts else "-")
        yield _line(f"`{other}`", *cells)


def _at(samples: Samples, places: Mapping[str, str]) -> Samples:
    """Return the samples of the points whose axes have one of the values in ``places``, which commas separate."""
    allowed = {axis: values.split(",") for axis, values in places.items()}
    return {
        (point, seed): scores
        for (point, seed), scores in samples.items()
        if all(str(json.loads(point)[axis]) in values for axis, values in allowed.items())
    }


def _points(named: str) -> Iterator[str]:
    file, name, *models = named.split()
    group = _group(file, *models)
    metric = group.metric(name)
    form, factor = ("{:.0f}", 100) if metric.percent else ("{:.2f}", 1)
    places = {axis: group.places(axis) for axis in group.task.axes}
    axes = [axis for axis in places if len(places[axis]) > 1] or list(places)
    found = {one.label: _by_point(one, name) for one in group.measured}
    points = sorted(
        dict.fromkeys(point for by in found.values() for point in by),
        key=lambda point: [places[axis].index(json.loads(point)[axis]) for axis in places],
    )
    yield _head(titled(metric), *(_heading(json.loads(point), axes) for point in points))
    for label, by in found.items():
        yield _line(label, *(_shown(estimate(by[point]), form, factor) if point in by else "-" for point in points))


def _heading(point: Point, axes: Sequence[str]) -> str:
    """Return some axes of a point as text. Numbers have the name of their axis."""
    return ", ".join(named if isinstance(named := point[axis], str) else f"{axis} {named:,}" for axis in axes)


def _by_point(one: MethodResult, name: str) -> dict[str, list[float]]:
    """Return the numbers of a metric by point as JSON, of all seeds."""
    found: dict[str, list[float]] = {}
    for (point, _), scores in one.samples.items():
        found.setdefault(point, []).extend(scores.get(name, ()))
    return {point: values for point, values in found.items() if values}


def _bytes(named: str) -> Iterator[str]:
    file, model, *methods = named.replace(",", "").split()
    group = _group(file, model)
    budgets = _budgets(group.measured)
    yield _head("% of the bytes of a bfloat16 cache", *_percent(budgets))
    for method in methods:
        cells = []
        for budget in budgets:
            one = _result(group, method, budget)
            measured = one is not None and one.share is not None and one.booked_share is not None
            cells.append(f"{100 * one.share:.1f} + {100 * (one.booked_share - one.share):.1f}" if measured else "-")
        yield _line(f"`{method}`", *cells)


def _which(budget: str, before: str) -> Iterator[str]:
    """Yield the table of needs: the page's first two columns, and the stores' numbers."""
    yield _head(
        "need", "method", "KL (SmolLM2)", "ln p of needles (SmolLM2)", "found, % (Qwen 0.5B)",
        "question seen, `+oneshot`, % (Qwen 0.5B)", "read, s", "step, ms", "bytes, %", "N", left=2,
    )  # fmt: skip
    for row in before.splitlines()[2:]:
        need, method = (cell.strip() for cell in row.strip("|").split("|")[:2])
        yield _line(need, method, *_choice(method.strip("`"), budget))


def _choice(method: str, budget: str) -> Iterator[str]:
    """Yield the cells of a method. Exact methods have the full cache's quality by identity."""
    found = _result(_group("lab-bounded.jsonl", "smollm2"), method, budget)
    needles = _needles(method, budget)
    unseen, seen = (_found(method, need) for need in ("needles", "known-question"))
    counts = [None if found is None else found.scores["kl"].n, *(one and one.n for one in (needles, unseen, seen))]
    exact = method in ("full", "kv-direct")
    yield "exact" if exact else "-" if found is None else _shown(found.scores["kl"], "{:.2g}")
    yield "exact" if exact else "-" if needles is None else _shown(needles, "{:+.2f}")
    for one in (unseen, seen):
        yield "as `full`" if one is None and exact else "-" if one is None else _shown(one, "{:.0f}", 100)
    yield from _times(method)
    yield "-" if found is None or found.booked_share is None else f"{100 * found.booked_share:.1f}"
    yield ", ".join("-" if count is None else str(count) for count in counts)


def _needles(method: str, budget: str) -> Estimate | None:
    """Return the difference of ln p from the full cache's in RULER's needles; None if not measured."""
    for group in _groups("lab-ruler.jsonl"):
        if isinstance(group, TaskGroup) and group.experiment.weights == "bfloat16":
            for one in group.measured:
                if (one.method, one.budget) == (method, budget):
                    return one.beside["loglik"]
    return None


def _found(method: str, need: str) -> Estimate | None:
    """Return the share of needles that a method finds at 25 % (``tools/which_method.py``). If the question is seen, a
    method reads the prompt in one pass."""
    method = at_once(method) if need == "known-question" else method
    for row in json.loads((RESULTS / "which-method.json").read_text("utf-8"))["rows"]:
        if (row["need"], row["budget"], row["method"]) == (need, "25%", method):
            return Estimate(*row["match"], row["n"])
    return None


def _times(method: str) -> tuple[str, str]:
    """Return the times of reading 4,096 tokens and of a step after them, on the processor of the record."""
    rows = json.loads((RESULTS / BENCH).read_text("utf-8"))["rows"]
    found = (row for row in rows if (row["label"], row["context"]) == (method, 4096))
    return next(((f"{row['prefill_s']:.1f}", f"{row['step_ms']:.1f}") for row in found), ("-", "-"))


def _table(found: re.Match[str]) -> str:
    head, file, model, budgets, rows = found.groups()
    group = _group(file, model)
    best: dict[str | None, float] = {}
    for one in group.measured:
        best[one.budget] = min(one.scores["kl"].mean, best.get(one.budget, 99.0))
    lines = []
    for row in rows.splitlines():
        method, cells = row.strip("|").split("|")[0].strip().strip("`"), []
        for budget in (cell.strip().replace(" ", "") for cell in budgets.strip("|").split("|")):
            result = _result(group, method, budget)
            if result is None or not result.scores:
                cells.append("refused" if result is not None and result.error.startswith("A budget of") else "-")
                continue
            kl, match = result.scores["kl"].mean, result.scores["match"].mean
            number = f"{kl:.2g}"
            cells.append(f"{f'**{number}**' if kl == best[budget] else number} · {100 * match:.0f} %")
        lines.append(f"| `{method}` | {' | '.join(cells)} |\n")
    return head + "".join(lines)


if __name__ == "__main__":
    main()
