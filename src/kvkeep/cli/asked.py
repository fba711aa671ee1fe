"""The cache that a command's options ask for: understood before a model is loaded, made when there is one."""

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
    """request: what was asked for; None: transformers' own cache. memory: bytes that the planner may use, where it
    chooses (``auto``)."""

    request: Request | None
    auto: bool = False
    memory: str | None = None

    def cache(self, model: Any, context: int | None = None, answer: int = 0) -> Any:
        """Return the cache, for a text of ``context`` tokens, ``answer`` of which are to be written."""
        from transformers import DynamicCache

        from kvkeep.cache import KeepCache

        request = self._planned(model, (context or _positions(model)) - answer, answer) if self.auto else self.request
        if request is None:
            return DynamicCache(config=model.config)
        return KeepCache(model, request=replace(request, context=context))

    def _planned(self, model: Any, prompt: int, answer: int) -> Request:
        """Return the planner's choice, and tell why."""
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
    """Return what the options ask for. kv_budget_tokens, kv_budget_mb: method kv-lru with that budget, 0 for none, as
    in llama.cpp. exact: by draft and verify. memory: for a budget of "auto". Raises UsageError for what cannot be
    meant together, and as :meth:`~kvkeep.policies.request.Request.parse` does."""
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
        from kvkeep.plan.planner import parse_memory

        parse_memory(memory)
    return Asked(None, True, memory)


def _positions(model: Any) -> int:
    return getattr(model.config, "max_position_embeddings", None) or 4096
