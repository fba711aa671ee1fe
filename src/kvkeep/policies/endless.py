"""The request of ``endless`` that continues a text of another exact method past the maximum context length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.methods import Request
from kvkeep.policies.recalls.passages import MatchingPassages

ENDLESS = "endless"
SHARES = 4, 8
"""Without a budget that leaves positions for passages, a quarter of the positions is the budget, or else an eighth."""


def endless(request: Request, geometry: ModelGeometry) -> Request:
    """Return the request of a cache that takes the entries of one with ``request``, and continues their text beyond the
    model's positions. It has the same budget, or else one of :data:`SHARES`, and as many passages as fit beside it, at
    most the default number. Raises UsageError if a cache with ``request`` does not have all entries, BudgetError if
    no passage fits, and UnsupportedModelError."""
    check_keeps(request)
    if request.method.recall.endless:
        return request
    if (limit := geometry.max_positions) is None:
        raise UsageError("This model has no maximum number of positions, so its texts need no continuation.")
    passages, budgets = MatchingPassages(), [str(limit // share) for share in SHARES]
    if request.budget is not None and request.budget.amount:
        budgets.insert(0, str(request.budget))
    options = {name: value for name, value in request.options().items() if name != "checkpoint"}
    for budget in budgets:
        made = Request.parse(ENDLESS, budget, **options)
        entries, chunk = made.entries(geometry)
        count = min(passages.count, passages.fitting(limit, entries, chunk))
        if count >= 1:
            return made if count == passages.count else Request.parse(f"{ENDLESS}+passages:{count}", budget, **options)
    raise BudgetError(
        f"The model's {limit} positions have no space for {ENDLESS}'s passages of {passages.size} tokens beside the "
        "newest tokens; use 'streaming-llm'."
    )


def endless_options(cache: Mapping[str, Any], geometry: ModelGeometry) -> dict[str, Any]:
    """Return :func:`endless` as options of a :class:`~kvkeep.cache.KeepCache`, for the options ``cache``."""
    request = endless(Request.parse(**cache), geometry)
    options = {name: value for name, value in request.options().items() if value is not None}
    return {"method": request.method.name, "budget": str(request.budget), **options}


def check_keeps(request: Request | None) -> None:
    """Raise UsageError unless a cache with ``request`` (None: transformers' cache) keeps all entries of its text."""
    if request is None or request.method.recall.endless:
        return
    method = request.method
    if method.exactness is not Exactness.EXACT:
        raise UsageError(
            f"Method '{method.name}' does not keep every entry, so '{ENDLESS}' could not recall the older ones; use an "
            "exact method, such as kv-direct."
        )
