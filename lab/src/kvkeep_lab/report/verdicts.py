"""Verdicts on a paper's claims, by measurements with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvkeep_lab.paper import Claim
from kvkeep_lab.report.chapter import Verdict, VerdictOutcome
from kvkeep_lab.report.formatting import code, difference_text, estimate_text, limit, listed, titled, ways
from kvkeep_lab.statistics import Estimate, student
from kvkeep_lab.tasks.base import Metric

ERROR = 0.05
"""Maximum probability that a true claim has one or more cases judged wrong by chance."""


@dataclass(frozen=True)
class ClaimCase:
    """One case of a claim: a method at a budget, perhaps minus another method; in a study, the number itself."""

    name: str = ""
    """Name in Markdown; "" in a study."""
    budget: str | None = None
    values: Sequence[float] = ()
    """The samples; empty without measurements."""
    certain: bool = False
    """Whether the value is the same for every seed and run, so that it needs no interval."""
    floored: bool = False
    """Whether it and its comparison have the worst possible value, so that they show nothing."""


@dataclass(frozen=True)
class JudgedCase:
    """A case with its outcome and interval."""

    case: ClaimCase
    outcome: VerdictOutcome
    found: Estimate | None = None


def judge(
    values: Sequence[float],
    at_least: float | None = None,
    at_most: float | None = None,
    *,
    scale: tuple[float, float] = (-math.inf, math.inf),
    share: float = 1 - ERROR,
) -> tuple[VerdictOutcome, Estimate]:
    """Return whether the mean of the distribution of ``values`` (at least one) is within limits, and Student's interval
    that covers ``share``.

    The claim holds if the interval is within the limits. It also holds if all values equal a limit; there is no
    interval then. The claim does not hold if the interval is beyond a limit, or if a limit is an end of ``scale`` (the
    minimum and maximum of a value) and at least one value does not reach it. Otherwise the claim is undecided.
    """
    low, high = _limits(at_least, at_most)
    if min(values) == max(values) and values[0] in (low, high):
        return VerdictOutcome.HOLDS, Estimate(values[0], values[0], values[0], len(values))
    found, (least, greatest) = student(values, share, scale), scale
    short = (low == greatest and min(values) < low) or (high == least and max(values) > high)
    if short or found.high < low or found.low > high:
        return VerdictOutcome.DIFFERS, found
    return VerdictOutcome.HOLDS if low <= found.low and found.high <= high else VerdictOutcome.OPEN, found


def judged_cases(claim: Claim, metric: Metric, cases: Sequence[ClaimCase], judges: bool = True) -> list[JudgedCase]:
    """Return the outcome and interval of each case; with ``judges`` False, only the interval. Intervals become wider
    with the number of measured cases, so that all of them cover their means with a probability of 1 - :data:`ERROR`
    (Bonferroni)."""
    share = 1 - ERROR / max(1, sum(bool(case.values) for case in cases))
    (least, greatest), (low, high) = metric.scale, _limits(claim.at_least, claim.at_most)
    scale = (least - greatest, greatest - least) if claim.than else (least, greatest)
    judged = []
    for case in cases:
        if not case.values:
            judged.append(JudgedCase(case, VerdictOutcome.UNMEASURED))
        elif case.certain:
            value, holds = case.values[0], all(low <= value <= high for value in case.values)
            outcome = VerdictOutcome.HOLDS if holds else VerdictOutcome.DIFFERS
            judged.append(
                JudgedCase(case, outcome if judges else VerdictOutcome.MEASURED, Estimate(value, value, value, 1))
            )
        else:
            outcome, found = judge(case.values, claim.at_least, claim.at_most, scale=scale, share=share)
            outcome = VerdictOutcome.MEASURED if not judges else VerdictOutcome.OPEN if case.floored else outcome
            judged.append(JudgedCase(case, outcome, found))
    return judged


def verdict(claim: Claim, metric: Metric, cases: Sequence[ClaimCase], why: str = "") -> Verdict:
    """Return the verdict on a claim. The claim holds if it holds in every case, and it does not hold if one case
    contradicts it. ``why``: the reason why measurements cannot decide the claim; "" if they can."""
    judged = judged_cases(claim, metric, cases, not why)
    outcomes = {one.outcome for one in judged}
    order = (
        VerdictOutcome.DIFFERS,
        VerdictOutcome.OPEN,
        VerdictOutcome.MEASURED,
        VerdictOutcome.UNMEASURED,
        VerdictOutcome.HOLDS,
    )
    outcome = next((outcome for outcome in order if outcome in outcomes), VerdictOutcome.UNMEASURED)
    deciding = [one.found.n for one in judged if one.found is not None and one.outcome is outcome]
    ours = tuple(_ours(metric, claim, judged))
    return Verdict(claim.says, outcome, ours, min(deciding, default=0), _reading(metric, claim), why)


def _limits(at_least: float | None, at_most: float | None) -> tuple[float, float]:
    return -math.inf if at_least is None else at_least, math.inf if at_most is None else at_most


_WORDS = {
    (VerdictOutcome.DIFFERS, False): "Not so",
    (VerdictOutcome.HOLDS, False): "So",
    (VerdictOutcome.OPEN, False): "Undecided",
    (VerdictOutcome.OPEN, True): "Undecided, because both score nothing",
    (VerdictOutcome.MEASURED, False): "Ours",
    (VerdictOutcome.MEASURED, True): "Ours, where both score nothing",
    (VerdictOutcome.UNMEASURED, False): "Not measured",
}


def _ours(metric: Metric, claim: Claim, judged: Sequence[JudgedCase]) -> Iterator[str]:
    """Yield a sentence for the cases of each outcome, with the smallest and the largest mean."""
    for (outcome, floored), word in _WORDS.items():
        if some := [one for one in judged if one.outcome is outcome and one.case.floored is floored]:
            found = [one for one in some if one.found is not None]
            if some[0].case.name:
                names = ways((one.case.name, one.case.budget) for one in some)
                yield f"{word}: {names}{_numbers(metric, claim, found)}."
            else:
                yield from (
                    f"{titled(metric)}: {estimate_text(metric, one.found)}." for one in found if one.found is not None
                )


def _numbers(metric: Metric, claim: Claim, judged: Sequence[JudgedCase]) -> str:
    if len(texts := {_one(metric, claim, one) for one in judged}) < 2:
        return "".join(f": {text}{' each' if len(judged) > 1 else ''}" for text in texts)
    ends = sorted(judged, key=lambda one: one.found.mean if one.found else 0.0)
    least, greatest = (
        f"{_one(metric, claim, one)} for {ways([(one.case.name, one.case.budget)])}" for one in (ends[0], ends[-1])
    )
    return f": from {least} to {greatest}"


def _one(metric: Metric, claim: Claim, judged: JudgedCase) -> str:
    found = judged.found
    assert found is not None
    text = difference_text(metric, found) if claim.than else estimate_text(metric, found)
    return f"{text} (N = {found.n})"


def _reading(metric: Metric, claim: Claim) -> str:
    """Return the numeric form of the claim as a sentence."""
    methods = f" of {listed(map(code, claim.methods))}" if claim.methods else ""
    less = f" less that of {listed(map(code, claim.than))}" if claim.than else ""
    where = (f" at {listed(claim.budgets)}" if claim.budgets else " at every budget") if claim.methods else ""
    bounds = (("at least", claim.at_least), ("at most", claim.at_most))
    limits = [f"{word} {limit(metric, bound, bool(claim.than))}" for word, bound in bounds if bound is not None]
    return f"{titled(metric)}{methods}{less}{where}{f', {listed(limits)}' if limits else ''}"
