"""Options that are looked at before torch is imported and anything is loaded: a mistake is told within a second.

What only a method's parts know (their parameters, which options they take) is looked at by
:func:`kvkeep.cli.asked.asked`, before the model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvkeep.budget import Budget, bytes_of
from kvkeep.errors import UsageError
from kvkeep.models.model_names import check_device, checked_format, place_of
from kvkeep.policies.names import check_names
from kvkeep.stores.checkpoints.spec import CheckpointSpec

AUTO = "auto"


def check_model(model: str, weights: str = "auto", device: str | None = None, *, config: bool = False) -> None:
    """Raise UsageError or ModelError for a model that is nowhere, and for an unknown format or device. config: the file
    of a config is a model, too."""
    checked_format(weights)
    check_device(device)
    if not (config and model.endswith(".json") and Path(model).expanduser().is_file()):
        place_of(model)


def check_cache(
    method: str | None = None,
    budget: str | None = None,
    *,
    kv_budget_tokens: int | None = None,
    kv_budget_mb: int | None = None,
    exact: bool = False,
    memory: str | None = None,
    **options: Any,
) -> tuple[str | None, str | None]:
    """Return method and budget of a cache, of whichever options give them, as far as they are understood without the
    methods themselves. Raises UsageError or BudgetError for a cache that no model could have."""
    given = [f"{kv_budget_tokens}" if kv_budget_tokens else "", f"{kv_budget_mb}MB" if kv_budget_mb else ""]
    if any(given):
        if method is not None or budget is not None or exact or all(given):
            raise UsageError(
                "--kv-budget-tokens and --kv-budget-mb are method kv-lru with a budget; give one of them, "
                "without --budget, --method and --exact."
            )
        method, budget = "kv-lru", "".join(given)
    if budget == AUTO:
        _check_auto({"method": method, "checkpoint": options.get("checkpoint"), "where": options.get("where")}, memory)
        return method, budget
    if memory is not None:
        raise UsageError("--memory is used with '--budget auto' only; leave it out.")
    if method is not None:
        check_names(method)
    Budget.parse(budget)
    CheckpointSpec.parse(options.get("checkpoint") or "kv", options.get("where") or "host")
    return method, budget


def _check_auto(chosen: dict[str, Any], memory: str | None) -> None:
    for name, value in chosen.items():
        if value is not None:
            raise UsageError(f"With '--budget auto' the planner chooses; leave --{name} out.")
    if memory is not None:
        bytes_of(memory)
