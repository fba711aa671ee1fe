"""The options of a cache. They are checked before torch is imported, and parsed before the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvkeep.budget import Budget, bytes_of
from kvkeep.cli import options
from kvkeep.cli.output import note
from kvkeep.errors import UsageError
from kvkeep.policies.names import KV_LRU, SYSTEM, Pin, check_names, checked_pin
from kvkeep.stores.checkpoints.spec import CheckpointSpec

if TYPE_CHECKING:
    from kvkeep.policies.methods import Request

AUTO = "auto"


@dataclass(frozen=True)
class CacheOptions:
    """The options of a cache as the user gave them."""

    method: options.Method = None
    budget: options.Budget = None
    drafts: Annotated[
        str,
        Option(
            metavar="copies|none|SELECTOR",
            help=f"{options.DRAFTS} Or a selector: the model drafts within the --budget (SELECTOR+verified).",
            rich_help_panel=options.ADVANCED,
        ),
    ] = options.DraftsOption.copies
    memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="With --budget auto: bytes for the cache (64MB).",
            show_default="half of the free memory",
            rich_help_panel=options.CACHE,
        ),
    ] = None
    kv_budget_tokens: Annotated[
        int | None,
        Option(
            min=0,
            metavar="N",
            help="As in llama.cpp: method kv-lru with this budget in entries per layer; 0 is off.",
            rich_help_panel=options.CACHE,
        ),
    ] = None
    kv_budget_mb: Annotated[
        int | None,
        Option(min=0, metavar="N", help="The same with a budget in megabytes.", rich_help_panel=options.CACHE),
    ] = None
    pin: options.PinOption = None
    checkpoint: options.Checkpoint = None
    where: options.Where = None
    capacity: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Maximum number of entries stored (kind kv); the oldest are discarded, which makes the cache lossy.",
            show_default="unlimited",
            rich_help_panel=options.CACHE,
        ),
    ] = None
    folder: Annotated[
        str | None,
        Option(
            metavar="FOLDER",
            help="Folder for --where disk.",
            show_default="the user's cache folder",
            rich_help_panel=options.CACHE,
        ),
    ] = None

    def check(self, chunk: int | None = None) -> None:
        """Check the options as far as possible without torch. Raises UsageError or BudgetError."""
        method, budget = self._resolved()
        if budget == AUTO:
            chosen = {"method": method, "chunk": chunk} | {
                name: getattr(self, name) for name in ("checkpoint", "where", "folder")
            }
            for name, value in chosen.items():
                if value is not None:
                    raise UsageError(f"'--budget auto' chooses this by itself; leave --{name} out.")
            if self.capacity is not None:
                raise UsageError(
                    "With '--budget auto' the cache is exact, and a capacity makes it lossy; leave it out."
                )
            if self.memory is not None:
                bytes_of(self.memory)
            return
        if self.memory is not None:
            raise UsageError("--memory is used with '--budget auto' only; leave it out.")
        if method is not None:
            check_names(method)
        if budget is not None:
            Budget.parse(budget)
        if self.pin is not None:
            checked_pin(self.pin)
        CheckpointSpec.parse(self.checkpoint or "kv", self.where or "host")

    def parse(self, chunk: int | None = None) -> RequestedCache:
        """Check the options, and return the requested cache. Raises the errors of :meth:`check` and
        :meth:`~kvkeep.policies.methods.Request.parse`."""
        from kvkeep.policies.methods import requested

        self.check(chunk)
        method, budget = self._resolved()
        if budget == AUTO:
            return RequestedCache(None, auto=True, memory=self.memory)
        stored: dict[str, Any] = {name: getattr(self, name) for name in ("checkpoint", "where", "capacity", "folder")}
        pin = None if self.pin is None else checked_pin(self.pin)
        if pin is not None:
            stored["pin"] = 1 if pin == SYSTEM else pin  # their number is not known yet
        request = requested(method, budget, chunk=chunk, **stored)
        return RequestedCache(request if pin != SYSTEM or request is None else request.pinning(0), pin=pin)

    @property
    def selects(self) -> bool:
        """Whether a selector drafts."""
        return self.drafts not in [*options.DraftsOption]

    def _resolved(self) -> tuple[str | None, str | None]:
        """Return the method and the budget from the options."""
        method, selects = self.method, self.selects
        limits = [f"{self.kv_budget_tokens}"] if self.kv_budget_tokens else []
        limits += [f"{self.kv_budget_mb}MB"] if self.kv_budget_mb else []
        if limits and (method is not None or self.budget is not None or selects or len(limits) > 1):
            raise UsageError(
                "--kv-budget-tokens and --kv-budget-mb choose method kv-lru and its budget; give only one of them, "
                "without --method, --budget or a selector for --drafts."
            )
        if limits:
            return KV_LRU, limits[0]
        if selects and method is not None:
            raise UsageError(
                f"--drafts {self.drafts} chooses the method '{self.drafts}+verified'; leave --method out, or name the "
                "whole method there."
            )
        return f"{self.drafts}+verified" if selects else method, self.budget


@dataclass(frozen=True)
class RequestedCache:
    """A requested cache; it is built after its model is loaded."""

    request: Request | None
    """The parsed options; None for transformers' cache and for ``--budget auto``."""
    auto: bool = False
    """Whether the budget is ``auto``: :func:`kvkeep.plan.fitting.choose` then makes the request."""
    memory: str | None = None
    """Memory for a budget of ``auto``, as text; None for half of the free memory."""
    pin: Pin | None = None
    """The pinned tokens, as the user gave them. Where they are the instructions, the request pins none yet."""

    def build(self, model: Any, context: int | None = None, answer: int = 0) -> Any:
        """Return the cache for ``context`` tokens; the last ``answer`` of these are generated. The context is limited
        to the model's positions, unless the method continues beyond them."""
        from transformers.cache_utils import DynamicCache

        from kvkeep.cache import KeepCache

        positions = self.positions(model)
        if context is not None and answer and positions is not None:
            context = max(min(context, positions), context - answer + 1)
        request = self._chosen(model, context or positions or 4096) if self.auto else self.request
        if request is None:
            return DynamicCache(config=model.config)
        return KeepCache(model, request=replace(request, context=context))

    def positions(self, model: Any) -> int | None:
        """Return the number of tokens that the model can read and generate with the cache; None: no limit."""
        from kvkeep.geometry import ModelGeometry

        any_length = self.request is not None and self.request.method.any_length
        return None if any_length else ModelGeometry.from_config(model.config).max_positions

    def _chosen(self, model: Any, tokens: int) -> Request:
        """Return the request of a budget of ``auto`` for ``tokens`` tokens, and print the choice."""
        from kvkeep.geometry import ModelGeometry
        from kvkeep.models.weight_memory import free_memory
        from kvkeep.plan.fitting import choose
        from kvkeep.policies.methods import Request

        device = next(model.parameters()).device
        memory = free_memory(device) // 2 if self.memory is None else bytes_of(self.memory)
        choice = choose(ModelGeometry.of(model), tokens, memory, shared=device.type == "cpu")
        note(choice.reason)
        return Request.parse(**choice.options)
