"""The cache that a command's options ask for: parsed before the model is loaded, built after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvkeep.cli.output import note
from kvkeep.cli.validation import AUTO, check_cache

if TYPE_CHECKING:
    from kvkeep.policies.request import Request


@dataclass(frozen=True)
class RequestedCache:
    """The options of a cache. request: None is transformers' own cache; auto: the planner chooses the request, within
    ``memory`` bytes."""

    request: Request | None
    auto: bool = False
    memory: str | None = None

    def cache(self, model: Any, context: int | None = None, answer: int = 0) -> Any:
        """Return the cache for ``context`` tokens, of which the last ``answer`` are generated; where the model's
        positions run out, no more than those."""
        from transformers.cache_utils import DynamicCache

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

        choice = recommend(model, prompt, self.memory, answer=answer)
        note(choice.reason)
        return Request.parse(choice.method, choice.budget, checkpoint=choice.checkpoint, where=choice.where)


def requested_cache(
    method: str | None,
    budget: str | None,
    *,
    kv_budget_tokens: int | None = None,
    kv_budget_mb: int | None = None,
    exact: bool = False,
    memory: str | None = None,
    **options: Any,
) -> RequestedCache:
    """Return the parsed options.

    Args:
        kv_budget_tokens, kv_budget_mb: method kv-lru with that budget, as in llama.cpp; 0 is off.
        exact: recall by draft and verify.
        memory: bytes for a budget of "auto".

    Raises:
        UsageError: contradicting options, and as :meth:`~kvkeep.policies.request.Request.parse`.
    """
    limits = {"kv_budget_tokens": kv_budget_tokens, "kv_budget_mb": kv_budget_mb}
    method, budget = check_cache(method, budget, exact=exact, memory=memory, **limits, **options)
    if budget == AUTO:
        return RequestedCache(None, True, memory)
    from kvkeep.stock import requested

    return RequestedCache(requested(method, budget, recall="verified" if exact else None, **options))


def _positions(model: Any) -> int | None:
    from kvkeep.geometry import ModelGeometry

    return ModelGeometry.from_config(model.config).max_positions
