"""The cache that a command's options ask for: parsed before the model is loaded, built after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvkeep.cli.output import note
from kvkeep.errors import UsageError

if TYPE_CHECKING:
    from kvkeep.policies.request import Request

AUTO = "auto"


@dataclass(frozen=True)
class Asked:
    """The options of a cache. request: None is transformers' own cache; auto: the planner chooses the request, within
    ``memory`` bytes."""

    request: Request | None
    auto: bool = False
    memory: str | None = None

    def cache(self, model: Any, context: int | None = None, answer: int = 0) -> Any:
        """Return the cache for ``context`` tokens, of which the last ``answer`` are generated; where the model's
        positions run out, no more than those."""
        from transformers import DynamicCache

        from kvkeep.cache import KeepCache

        if context is not None and answer and (self.request is None or self.request.method.sinks is None):
            prompt = context - answer
            context = max(min(context, _positions(model) or context), prompt + 1)
            answer = context - prompt
        request = (
            self._planned(model, (context or _positions(model) or 4096) - answer, answer) if self.auto else self.request
        )
        if request is None:
            return DynamicCache(config=model.config)
        return KeepCache(model, request=replace(request, context=context))

    def _planned(self, model: Any, prompt: int, answer: int) -> Request:
        """Return the planner's choice and print its reason."""
        from kvkeep.plan.planner import recommend
        from kvkeep.policies.request import Request

        choice = recommend(model, prompt, self.memory, answer=answer, tell=note)
        note(choice.reason)
        return Request.parse(choice.method, choice.budget, checkpoint=choice.checkpoint, where=choice.where)


def asked(
    method: str | None,
    budget: str | None,
    *,
    kv_budget_tokens: int | None = None,
    kv_budget_mb: int | None = None,
    exact: bool = False,
    memory: str | None = None,
    **options: Any,
) -> Asked:
    """Return the parsed options.

    Args:
        kv_budget_tokens, kv_budget_mb: method kv-lru with that budget, as in llama.cpp; 0 is off.
        exact: recall by draft and verify.
        memory: bytes for a budget of "auto".

    Raises:
        UsageError: contradicting options, and as :meth:`~kvkeep.policies.request.Request.parse`.
    """
    from kvkeep.stock import requested

    given = [f"{kv_budget_tokens}" if kv_budget_tokens else "", f"{kv_budget_mb}MB" if kv_budget_mb else ""]
    if any(given):
        if method is not None or budget is not None or exact or all(given):
            raise UsageError(
                "--kv-budget-tokens and --kv-budget-mb are method kv-lru with a budget; give one of them, "
                "without --budget, --method and --exact."
            )
        method, budget = "kv-lru", "".join(given)
    if budget != AUTO:
        if memory is not None:
            raise UsageError("A memory is for '--budget auto'; leave it out.")
        return Asked(requested(method, budget, recall="verified" if exact else None, **options))
    chosen = {"method": method, "checkpoint": options.get("checkpoint"), "where": options.get("where")}
    for name, value in chosen.items():
        if value is not None:
            raise UsageError(f"With '--budget auto' the planner chooses; leave --{name} out.")
    if memory is not None:
        from kvkeep.budget import bytes_of

        bytes_of(memory)
    return Asked(None, True, memory)


def _positions(model: Any) -> int | None:
    from kvkeep.geometry import ModelGeometry

    return ModelGeometry.from_config(model.config).max_positions
