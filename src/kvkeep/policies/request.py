"""The options of a cache, parsed before any model is loaded: for the command line and for the library."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from kvkeep.budget import MIN_CHUNK, Budget
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.methods import Method, resolve
from kvkeep.stores.checkpoints.spec import CheckpointSpec

PAGE = 512
"""Rows rebuilt at a time by default."""


class Options(TypedDict, total=False):
    """The keyword options of a :class:`~kvkeep.cache.KeepCache`."""

    checkpoint: str | None
    where: str | None
    capacity: int | None
    folder: str | os.PathLike[str] | None
    chunk: int | None
    page: int
    context: int | None
    batch: int
    recall: str | None


@dataclass(frozen=True)
class Request:
    """The parsed options of a :class:`~kvkeep.cache.KeepCache`, which documents each of them."""

    method: Method
    budget: Budget | None = None
    checkpoint: str | None = None
    where: str | None = None
    capacity: int | None = None
    folder: str | None = None
    chunk: int | None = None
    page: int = PAGE
    context: int | None = None
    batch: int = 1

    @classmethod
    def parse(
        cls, method: str | None = None, budget: int | str | Budget | None = None, **options: Unpack[Options]
    ) -> Request:
        """Parse the options of a :class:`~kvkeep.cache.KeepCache`. Raises UsageError or BudgetError for names, numbers
        and options that are wrong for every model."""
        given: dict[str, Any] = {**options}
        recall, checkpoint, folder = given.pop("recall", None), given.get("checkpoint"), given.get("folder")
        texts = {"method": method, "recall": recall, "checkpoint": checkpoint, "where": given.get("where")}
        for name, text in texts.items():
            if text is not None and (not isinstance(text, str) or not text):
                raise UsageError(f"The {name} must be a name, not {text!r}.")
        if recall is not None:
            spec = f"{method or 'snapkv'}+{recall}"
        else:
            spec = method or ("kv-direct" if budget is not None else "full")
        made = resolve(spec)
        parsed = None if budget is None else Budget.parse(budget)
        for name in ("capacity", "chunk", "context", "page", "batch"):
            number = given.get(name)
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise UsageError(f"The {name} of a cache must be a whole number of at least 1, not {number!r}.")
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise UsageError(f"The folder of a checkpoint must be a path, not {folder!r}.")
        given |= {"checkpoint": made.kind or checkpoint, "folder": None if folder is None else os.fspath(folder)}
        request = cls(made, parsed, **given)
        request._check(spec, checkpoint)
        return request

    def _check(self, spec: str, checkpoint: str | None) -> None:
        """Raise UsageError for options that the method does not take, and for a missing budget."""
        for option in ("checkpoint", "where", "capacity", "folder", "budget", "chunk"):
            value = checkpoint if option == "checkpoint" else getattr(self, option)
            if value is not None and option not in self.method.options:
                others = "'kv-direct' and 'endless' do" if option == "capacity" else "'kv-direct' does"
                raise UsageError(f"Method '{spec}' takes no {option}; {others}.")
        if self.method.budgeted and self.budget is None:
            if self.method.selector.keeps_all:
                raise UsageError(f"Method '{spec}' needs a budget: its maximum number of entries (budget=4096).")
            raise UsageError(f"Method '{spec}' needs a budget: entries (512), bytes (64MB), or a share (25%).")
        if self.method.reading is not None and self.method.checkpoints and self.checkpoint not in (None, "kv"):
            raise UsageError(
                f"Method '{spec}' needs a checkpoint of kind 'kv', because it keeps the entries of its first pass; "
                f"leave checkpoint '{self.checkpoint}' out."
            )
        if self.method.kind and checkpoint not in (None, self.method.kind):
            raise UsageError(
                f"The checkpoint of method '{spec}' is of kind '{self.method.kind}'; leave '{checkpoint}' out."
            )
        if self.method.checkpoints:
            where = self.where or ("disk" if self.folder is not None else "host")
            CheckpointSpec.parse(self.checkpoint or "kv", where, capacity=self.capacity, folder=self.folder)

    @property
    def reading(self) -> Request | None:
        """The request of the method that reads a text first; None without one."""
        made = self.method.reading
        return None if made is None else replace(self, method=made, checkpoint="kv", capacity=None)

    def entries(self, geometry: ModelGeometry) -> tuple[int, int]:
        """Return the entries of each full layer, and the tokens of a prompt that are read at a time. Raises BudgetError
        for a budget that is too small, and UnsupportedModelError for a layer whose state is not keys and values."""
        assert self.budget is not None
        for layer in geometry.unbounded_layers:
            raise UnsupportedModelError(
                f"'{geometry.model_type}' has a '{layer.kind}' layer (layer {layer.index}), whose state is "
                "not keys and values that could be rebuilt; use method 'full'."
            )
        exact = self.method.exactness is Exactness.EXACT
        least = min(self.chunk, MIN_CHUNK) if exact and self.chunk else self.chunk
        zero = self.method.fate.checkpoints and (not self.method.recall.backed or self.method.reads_all)
        waiting = self.method.recall.tail(sys.maxsize)
        entries = self.budget.entries(
            geometry, context=self.context, batch=self.batch, chunk=least, zero=zero, waiting=waiting
        )
        return entries, self.method.chunk(geometry, self.budget, entries, self.chunk)

    def spec(self, geometry: ModelGeometry, device: str) -> CheckpointSpec:
        """Return the kind and place of the checkpoint: by default the smaller of kv and residual, outside the model's
        memory."""
        kind = self.checkpoint
        if self.method.reading is not None:
            kind = kind or "kv"
        if kind is None:
            vectors, entries = (geometry.checkpoint_bytes_per_token(name) for name in ("residual", "kv"))
            hybrid = any(layer.recurrent for layer in geometry.full_layers)  # rebuilding would run the recurrence, too
            kind = "residual" if vectors < entries and not hybrid else "kv"
        where = self.where or ("disk" if device == "cpu" else "host")
        return CheckpointSpec.parse(kind, where, capacity=self.capacity, folder=self.folder)

    def options(self) -> dict[str, Any]:
        """Return the options with which :meth:`parse` makes this request again, besides method and budget."""
        names = ("where", "capacity", "folder", "chunk", "page", "context", "batch")
        checkpoint = None if self.method.kind else self.checkpoint
        return {"checkpoint": checkpoint, **{name: getattr(self, name) for name in names}}
