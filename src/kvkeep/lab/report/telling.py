"""How numbers are told: percent of a share, the perplexity of nats, intervals in brackets."""

from __future__ import annotations

import math

from kvkeep.lab.intervals import Estimate
from kvkeep.lab.tasks.base import Metric


def titled(metric: Metric) -> str:
    """Return what stands over a column of a metric, or over its figure."""
    return f"{metric.label} (%)" if metric.kind == "share" else metric.label


def shown(metric: Metric, value: float) -> float:
    """Return a mean as it is told: percent of a share, the perplexity of nats."""
    match metric.kind:
        case "share":
            return 100 * value
        case "number":
            return value
        case "perplexity":
            return math.exp(value)


def number(metric: Metric, value: float) -> str:
    """Return a mean as a person reads it."""
    return f"{shown(metric, value):.1f}" if metric.kind == "share" else f"{shown(metric, value):.3g}"


def change(metric: Metric, value: float) -> str:
    """Return a difference as a person reads it: signed, or of perplexities a factor."""
    match metric.kind:
        case "share":
            return f"{100 * value:+.1f}"
        case "number":
            return f"{value:+.3g}"
        case "perplexity":
            return f"× {math.exp(value):.3g}"


def told(metric: Metric, found: Estimate) -> str:
    """Return an estimate as a person reads it, its interval in brackets."""
    mean, low, high = (number(metric, value) for value in (found.mean, found.low, found.high))
    return mean if found.n == 1 else f"{mean} [{low}, {high}]"


def differing(metric: Metric, found: Estimate) -> str:
    """Return an estimate of a difference as a person reads it, its interval in brackets."""
    mean, low, high = (change(metric, value) for value in (found.mean, found.low, found.high))
    return mean if found.n == 1 else f"{mean} [{low}, {high}]"
