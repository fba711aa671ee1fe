"""What becomes of a paper's claims here: numbers of ours decide, each with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvkeep.errors import UsageError
from kvkeep_lab.experiment import Claim, Experiment, PaperValue
from kvkeep_lab.intervals import Estimate, student
from kvkeep_lab.reading import takes
from kvkeep_lab.report.chapter import Outcome, Verdict
from kvkeep_lab.report.sections import Line
from kvkeep_lab.report.telling import code, differing, limit, listed, number, titled, told, ways
from kvkeep_lab.tasks.base import Metric

ERROR = 0.05
"""How often, at most, one claim or more of its cases would be called wrong by chance where all of it is right."""


def judge(
    values: Sequence[float],
    at_least: float | None = None,
    at_most: float | None = None,
    *,
    scale: tuple[float, float] = (-math.inf, math.inf),
    share: float = 1 - ERROR,
) -> tuple[Outcome, Estimate]:
    """Return whether the mean of what ``values`` (one at least) are samples of is within limits, and Student's interval
    that covers ``share``.

    It holds if the interval lies within the limits, or if all values lie on a limit, and then there is no interval. It
    does not hold if the interval lies beyond a limit, or if the limit is an end of ``scale`` (the least and the
    greatest that a value can be) and any value is short of it. Otherwise it cannot be told.
    """
    low, high = -math.inf if at_least is None else at_least, math.inf if at_most is None else at_most
    if min(values) == max(values) and values[0] in (low, high):
        return Outcome.HOLDS, Estimate(values[0], values[0], values[0], len(values))
    found, (least, greatest) = student(values, share, scale), scale
    short = (low == greatest and min(values) < low) or (high == least and max(values) > high)
    if short or found.high < low or found.low > high:
        return Outcome.DIFFERS, found
    return Outcome.HOLDS if low <= found.low and found.high <= high else Outcome.OPEN, found


@dataclass(frozen=True)
class Case:
    """One method at one budget, perhaps less another at the same; found: None where nothing was measured."""

    method: str
    budget: str | None
    than: str | None
    outcome: Outcome
    found: Estimate | None = None


def verdicts(experiment: Experiment, lines: Sequence[Line]) -> list[Verdict]:
    """Return what ``lines`` say of those of the paper's claims, and of its numbers, that our numbers can decide."""
    if experiment.paper is None:
        return []
    claims = [claim for claim in experiment.paper.claims if claim.metric is not None]
    values = [value for value in experiment.paper.values if value.method and is_ours(value.method)]
    claims += [_as_claim(experiment, value) for value in values]
    return [_verdict(experiment, lines, claim) for claim in claims]


def cases(experiment: Experiment, lines: Sequence[Line], claim: Claim) -> list[Case]:
    """Return what became of each method at each budget. The more cases, the wider each one's interval: all of them
    together cover what they should with a share of 1 - :data:`ERROR` (Bonferroni)."""
    assert claim.metric is not None
    asked = [
        (method, budget, other)
        for method in claim.methods
        for budget in (claim.budgets or experiment.budgets if "budget" in takes(method) else (None,))
        for other in claim.than or (None,)
    ]
    measured = {(line.method, line.budget): line for line in lines if line.scores}
    values: list[list[float]] = []
    for method, budget, other in asked:
        line = measured.get((method, budget))
        if line is None:
            values.append([])
        elif other is None:
            values.append(line.values(claim.metric))
        else:
            beside = measured.get((other, budget)) or measured.get((other, None))
            values.append([] if beside is None else line.minus(beside.samples, claim.metric))
    share = 1 - ERROR / max(1, sum(map(bool, values)))
    least, greatest = metric_of(experiment, claim.metric).scale
    scale = (least - greatest, greatest - least) if claim.than else (least, greatest)
    return [
        Case(*way, *judge(given, claim.at_least, claim.at_most, scale=scale, share=share))
        if given
        else Case(*way, Outcome.UNMEASURED)
        for way, given in zip(asked, values, strict=True)
    ]


def metric_of(experiment: Experiment, name: str) -> Metric:
    """Return a metric of an experiment's task."""
    return next(metric for metric in experiment.task.metrics if metric.name == name)


def is_ours(method: str) -> bool:
    """Return whether a method is one of ours."""
    try:
        takes(method)
    except UsageError:
        return False
    return True


def _as_claim(experiment: Experiment, value: PaperValue) -> Claim:
    """Return that ours is the paper's number."""
    metric = metric_of(experiment, value.metric)
    where = f" at {value.budget}" if value.budget else ""
    return Claim(
        says=f"{titled(metric)} of {value.method}{where}: {number(metric, value.value)}"
        + (f" ({value.note})" if value.note else ""),
        metric=value.metric,
        methods=(value.method,),
        budgets=(value.budget,) if value.budget else (),
        at_least=value.value,
        at_most=value.value,
    )


def _verdict(experiment: Experiment, lines: Sequence[Line], claim: Claim) -> Verdict:
    assert claim.metric is not None
    found, metric = cases(experiment, lines, claim), metric_of(experiment, claim.metric)
    outcomes = {case.outcome for case in found}
    order = (Outcome.DIFFERS, Outcome.OPEN, Outcome.HOLDS)
    outcome = next((outcome for outcome in order if outcome in outcomes), Outcome.UNMEASURED)
    deciding = [case.found.n for case in found if case.found is not None and case.outcome is outcome]
    return Verdict(
        claim.says,
        outcome,
        tuple(_ours(metric, claim, found)),
        min(deciding, default=0),
        "" if claim.at_least == claim.at_most else _reading(metric, claim),
    )


_TOLD = {
    Outcome.DIFFERS: "Not so",
    Outcome.HOLDS: "So",
    Outcome.OPEN: "Cannot be told",
    Outcome.UNMEASURED: "Not measured",
}


def _ours(metric: Metric, claim: Claim, found: Sequence[Case]) -> Iterator[str]:
    """Yield a sentence for the cases of each outcome, with the least and the greatest mean."""
    for outcome, word in _TOLD.items():
        if some := [case for case in found if case.outcome is outcome]:
            names = ways((_name(case), case.budget) for case in some)
            yield f"{word}: {names}{_numbers(metric, claim, [case for case in some if case.found is not None])}."


def _numbers(metric: Metric, claim: Claim, found: Sequence[Case]) -> str:
    if len(texts := {_one(metric, claim, case) for case in found}) < 2:
        return "".join(f": {text}{' each' if len(found) > 1 else ''}" for text in texts)
    ends = sorted(found, key=lambda case: case.found.mean if case.found else 0.0)
    least, greatest = (
        f"{ways([(_name(case), case.budget)])} {_one(metric, claim, case)}" for case in (ends[0], ends[-1])
    )
    return f". The least is {least}, the greatest {greatest}"


def _name(case: Case) -> str:
    return code(case.method) if case.than is None else f"{code(case.method)} less {code(case.than)}"


def _one(metric: Metric, claim: Claim, case: Case) -> str:
    assert case.found is not None
    text = differing(metric, case.found) if claim.than else told(metric, case.found)
    if claim.at_least is not None and claim.at_least == claim.at_most and not claim.than:
        mean, low, high = (value - claim.at_least for value in (case.found.mean, case.found.low, case.found.high))
        text += f", {differing(metric, Estimate(mean, low, high, case.found.n))} from theirs"
    return f"{text} (N = {case.found.n})"


def _reading(metric: Metric, claim: Claim) -> str:
    methods = listed(map(code, claim.methods))
    less = f" less that of {listed(map(code, claim.than))}" if claim.than else ""
    where = f" at {listed(claim.budgets)}" if claim.budgets else " at every budget"
    bounds = (("at least", claim.at_least), ("at most", claim.at_most))
    limits = [f"{word} {limit(metric, bound, bool(claim.than))}" for word, bound in bounds if bound is not None]
    return f"{titled(metric)} of {methods}{less}{where}, {listed(limits)}"
