"""The format of numbers, names and tables in a report: shares in percent, nats as perplexity, intervals in brackets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import partial

from kvkeep_lab.statistics import Estimate
from kvkeep_lab.tables import spread
from kvkeep_lab.tasks.base import Metric


def titled(metric: Metric) -> str:
    """Return the title of a metric for a column or a figure."""
    return f"{metric.label} (%)" if metric.percent else metric.label


def shown(metric: Metric, value: float) -> float:
    """Return a mean in the unit of the report: percent for a share, perplexity for nats."""
    return 100 * value if metric.percent else math.exp(value) if metric.kind == "perplexity" else value


def number(metric: Metric, value: float) -> str:
    """Return a mean as text."""
    return f"{shown(metric, value):.1f}" if metric.percent else f"{shown(metric, value):.3g}"


def change(metric: Metric, value: float) -> str:
    """Return a difference as text: signed, or a factor for perplexities."""
    if metric.kind == "perplexity":
        return f"× {math.exp(value):.3g}"
    return f"{100 * value:+.1f}" if metric.percent else f"{value:+.3g}"


def limit(metric: Metric, value: float, difference: bool) -> str:
    """Return a limit of a mean or of a difference as text with its unit."""
    if metric.percent:
        return f"{100 * value:+g} points" if difference else f"{100 * value:g} %"
    return change(metric, value) if difference else number(metric, value)


def estimate_text(metric: Metric, found: Estimate, words: Callable[[Metric, float], str] = number) -> str:
    """Return an estimate as text, with its interval in brackets."""
    return spread(found, partial(words, metric))


def difference_text(metric: Metric, found: Estimate) -> str:
    """Return an estimate of a difference as text."""
    return estimate_text(metric, found, change)


def ways(found: Iterable[tuple[str, str | None]]) -> str:
    """Return names (Markdown) and budgets, grouped by equal budgets."""
    budgets: dict[str, list[str]] = {}
    for name, budget in found:
        budgets.setdefault(name, []).extend([budget] if budget else [])
    names: dict[tuple[str, ...], list[str]] = {}
    for name, of_name in budgets.items():
        names.setdefault(tuple(of_name), []).append(name)
    return "; ".join(
        f"{listed(some)} at {listed(of_name)}" if of_name else listed(some) for of_name, some in names.items()
    )


def listed(words: Iterable[str]) -> str:
    """Return words with commas, and "and" before the last."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def code(word: str) -> str:
    """Return a name as Markdown."""
    return f"`{word}`"


def escaped(text: str) -> str:
    """Return a sentence as Markdown on one line, with all special characters escaped."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))
