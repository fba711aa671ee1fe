"""``--budget auto``: the planner's recommendation, where a command asks for a cache."""

from __future__ import annotations

from typing import Any

from kvkeep.cli.output import note
from kvkeep.errors import UsageError

AUTO = "auto"


def check_auto(
    method: str | None, budget: str | None, checkpoint: str | None, where: str | None, memory: str | None
) -> None:
    """Raise UsageError for what the planner would decide, or a memory that nobody plans for."""
    if budget != AUTO:
        if memory is not None:
            raise UsageError("A memory is for '--budget auto'; leave it out.")
        return
    for name, value in (("method", method), ("checkpoint", checkpoint), ("where", where)):
        if value is not None:
            raise UsageError(f"With '--budget auto' the planner chooses; leave --{name} out.")
    if memory is not None:
        from kvkeep.plan.planner import parse_memory

        parse_memory(memory)


def planned(
    model: Any, context: int, memory: str | None, answer: int
) -> tuple[str, str | None, str | None, str | None]:
    """Return method, budget, checkpoint and where for a prompt of ``context`` tokens, and tell why."""
    from kvkeep.plan.planner import recommend

    choice = recommend(model, context, memory, answer=answer, tell=note)
    note(choice.reason)
    return choice.method, None if choice.budget is None else str(choice.budget), choice.checkpoint, choice.where
