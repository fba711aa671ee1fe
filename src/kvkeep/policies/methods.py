"""From names to methods, and from options to the request of a cache, before any model is loaded."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypedDict, Unpack

from kvkeep.budget import LONGEST_CHUNK, MIN_CHUNK, Budget
from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.recall import Recall
from kvkeep.contracts.selector import Selector
from kvkeep.errors import UnsupportedModelError, UsageError, unknown
from kvkeep.geometry import ModelGeometry
from kvkeep.plugins import PARTS, each_plugin
from kvkeep.policies.names import FORMER, ONESHOT, STOCK, check_lab
from kvkeep.policies.registry import (
    FATES,
    LISTED,
    PRESETS,
    RECALLS,
    SELECTORS,
    Everything,
    Evicted,
    Method,
    Preset,
    register,
    unregister,
)
from kvkeep.policies.specs import build, required
from kvkeep.stores.checkpoints.prices import longest_chunk
from kvkeep.stores.checkpoints.spec import CheckpointSpec
from kvkeep.stores.checkpoints.staged import stages

PAGE = 512
"""Rows rebuilt at a time by default."""

_MEANINGLESS = ("context", "page", "batch")  # options without effect on a cache without a budget


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
    pin: int


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
        pin = given.pop("pin", 0)
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
            if number is not None and (type(number) is not int or not 0 < number < 2**31):
                limit = ", and below 2**31" if type(number) is int and number > 0 else ""
                raise UsageError(f"The {name} of a cache must be a whole number of at least 1{limit}, not {number!r}.")
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise UsageError(f"The folder of a checkpoint must be a path, not {folder!r}.")
        if type(pin) is not int or not 0 <= pin < 2**31:
            raise UsageError(f"The pin of a cache must be a number of first tokens (0: none), not {pin!r}.")
        given |= {"checkpoint": made.kind or checkpoint, "folder": None if folder is None else os.fspath(folder)}
        request = cls(made, parsed, **given)
        request._check(spec, checkpoint)
        return request.pinning(pin)

    def pinning(self, count: int) -> Request:
        """Return the request with the first ``count`` tokens pinned. Raises UsageError if the method cannot pin
        them."""
        method = self.method.pinned(count)
        if method.pin and (reason := method.refusal()) is not None:
            raise UsageError(f"Method '{method.name}' cannot pin {count} tokens. {reason}")
        return replace(self, method=method)

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

    def entries(self, geometry: ModelGeometry, device: str = "cpu") -> tuple[int, int]:
        """Return the entries of each full layer, and the tokens of a prompt that are read at a time on this kind of
        device. Raises BudgetError for a budget that is too small, and UnsupportedModelError for a layer whose state is
        not keys and values."""
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
        staged = device == "cuda" and self.method.checkpoints
        staged = staged and stages(self.spec(geometry, device), self.method.recall.endless)
        longest = longest_chunk(geometry) if staged else LONGEST_CHUNK
        return entries, self.method.chunk(geometry, self.budget, entries, self.chunk, longest)

    def spec(self, geometry: ModelGeometry, device: str) -> CheckpointSpec:
        """Return the kind and place of the checkpoint: by default the smaller of kv and residual, outside the model's
        memory; on a GPU kv, whose copies are hidden behind the work of a step."""
        kind = self.checkpoint
        if self.method.reading is not None:
            kind = kind or "kv"
        if kind is None:
            vectors, entries = geometry.residual_checkpoint_bytes_per_token(), geometry.full_bytes_per_token
            hybrid = any(layer.recurrent for layer in geometry.full_layers)  # rebuilding would run the recurrence, too
            smaller = vectors < entries and not hybrid and self.capacity is None
            kind = "residual" if smaller and device != "cuda" else "kv"
        where = self.where or ("disk" if device == "cpu" else "host")
        return CheckpointSpec.parse(kind, where, capacity=self.capacity, folder=self.folder)

    def options(self) -> dict[str, Any]:
        """Return the options with which :meth:`parse` makes this request again, besides method and budget."""
        names = ("where", "capacity", "folder", "chunk", "page", "context", "batch")
        checkpoint = None if self.method.kind else self.checkpoint
        pinned = {"pin": self.method.pin} if self.method.pin else {}  # as in sessions of caches that pin nothing
        return {"checkpoint": checkpoint, **{name: getattr(self, name) for name in names}, **pinned}


def requested(method: str | None = None, budget: Any = None, **options: Any) -> Request | None:
    """Return the request of a cache, None for "stock". Raises as :meth:`Request.parse`, and for options that
    "stock" does not take."""
    if method != STOCK:
        return Request.parse(method, budget, **options)
    if given := [
        name for name, value in {"budget": budget, **options}.items() if value is not None and name not in _MEANINGLESS
    ]:
        raise UsageError(f"Method 'stock' is transformers' own cache and takes no {given[0]}; 'kv-direct' does.")
    return None


def resolve(spec: str, *, files: bool = True) -> Method:
    """Return the method that ``spec`` names: a preset's name, ``SELECTOR``, ``SELECTOR+FATE``, ``SELECTOR+FATE+RECALL``
    or ``PRESET+RECALL``. Each part may have parameters after a colon (``streaming-llm:sinks=8+quantize:4``). With
    ``+oneshot`` at the end the method reads a prompt in one pass. Without a fate, evicted entries are dropped, or left
    to the recall. files: whether parameters that name files are allowed.

    Raises UsageError for an unknown name, with the near matches, and for parts that cannot be combined, with the
    reason.
    """
    load_plugins()
    return _resolved(spec, files)


def _resolved(spec: str, files: bool = True) -> Method:
    spec = "+".join(map(_current, spec.split("+")))
    check_lab(spec, {*SELECTORS, *FATES, *RECALLS, *PRESETS})
    first, *rest = spec.split("+")
    name, oneshot = first.partition(":")[0], rest[-1:] == [ONESHOT]
    if oneshot:
        rest.pop()
    recalls = bool(rest) and rest[-1].partition(":")[0] in RECALLS
    recall: Recall = build("recall", rest.pop(), RECALLS, files=files) if recalls else Evicted()
    if name in PRESETS:
        method = _of_preset(spec, first, PRESETS[name], rest, recall, files)
    elif name in SELECTORS:
        fate = build("fate", "+".join(rest) if rest else "drop", FATES, files=files)
        method = combined(spec, build("selector", first, SELECTORS, files=files), fate, recall)
    elif name == STOCK:
        raise UsageError(
            f"'{STOCK}' is transformers' own cache and cannot be used here; use 'full', which keeps every entry too."
        )
    else:
        raise unknown("method", name, [*names(), STOCK], "'kvkeep methods'")
    method = replace(method, oneshot=oneshot)
    if (reason := method.refusal()) is not None:
        raise UsageError(f"'{spec}' is not understood. {reason}")
    return method


def _current(part: str) -> str:
    """Return a part of a method's name under its current name."""
    name, colon, given = part.partition(":")
    return FORMER.get(name, name) + colon + given


def combined(name: str, selector: Selector, fate: Fate, recall: Recall) -> Method:
    """Return the method of three parts. The first sentence of the recall's docstring is its summary; a recall without
    a label leaves that to the selector."""
    about = recall if recall.label else selector
    recall = _default_recall(selector, fate, recall)
    fate = fate if selector.reconstruction is None else fate.after_second_reading()
    summary = " ".join((type(about).__doc__ or "").partition("\n\n")[0].replace("``", "").split())
    summary = summary.partition(". ")[0].removesuffix(".") + "."
    return Method(name, selector, fate, recall, summary, about.source or selector.source)


def _default_recall(selector: Selector, fate: Fate, recall: Recall) -> Recall:
    """Return ``recall``. Without one, and with a checkpoint beside resident entries that are not in the order of the
    text, every step attends to the checkpoint, which holds all entries."""
    return Everything() if fate.checkpoints and not selector.in_order and not recall.label else recall


def _of_preset(spec: str, first: str, preset: Preset, rest: list[str], recall: Recall, files: bool) -> Method:
    name, _, given = first.partition(":")
    replaces = preset.recall.label and (preset.closed or type(recall) is not type(preset.recall))
    if rest or (preset.closed and given) or (recall.label and replaces):
        without = "another fate" if rest else "parameters" if given else "another recall"
        raise UsageError(f"'{spec}' is not understood: '{name}' is a method of its own, without {without}.")
    fate: Any = build("method", first, {name: preset.fate}, files=files)
    chosen = {key for key, value in vars(fate).items() if value != getattr(preset.fate(), key)}
    fate = replace(fate, **{key: value for key, value in preset.defaults.items() if key not in chosen})
    recall = _default_recall(preset.selector, fate, recall if recall.label else preset.recall)
    return Method(spec, preset.selector, fate, recall, preset.summary, preset.source)


@cache
def load_plugins() -> None:
    """Register the parts of installed packages, once in each process. Parts that cannot be listed, or built by name,
    are left out."""
    each_plugin(PARTS, _plugged)


def _plugged(name: str, part: Any) -> None:
    """Register the object of an entry point: a part, or a tuple of a fate and its preset."""
    pieces = part if isinstance(part, tuple) else (part,)
    try:
        for one in pieces:
            register(name, one)
        _listable(name)
    except BaseException:
        unregister(name, *pieces)
        raise


def _listable(name: str) -> None:
    """Raise for a part that would break the lists of all parts or of all methods."""
    for kind, known in (("selector", SELECTORS), ("fate", FATES), ("recall", RECALLS)):
        if name in known and not required(known[name]):
            build(kind, name, known)
    if name in PRESETS or (name in SELECTORS and not required(SELECTORS[name])):
        made = _resolved(name)
        for column in ("exactness", "leaves", "becomes", "returns", "options", "reading"):
            getattr(made, column)


def names() -> list[str]:
    """Return the names of listed methods: presets, selectors without required parameters, and a few combinations."""
    load_plugins()
    unnamed = [name for name, made in SELECTORS.items() if not required(made)]
    kept = [name for name, preset in PRESETS.items() if preset.closed and not preset.recall.backed]
    return [*kept, *unnamed, *(name for name in PRESETS if name not in kept), *LISTED]


def methods() -> dict[str, Method]:
    """Return all listed methods by name."""
    return {name: resolve(name) for name in names()}


def parts() -> dict[str, dict[str, type[Any]]]:
    """Return all registered selectors, fates and recalls: for each of these kinds, the classes by name."""
    load_plugins()
    return {"selectors": dict(SELECTORS), "fates": dict(FATES), "recalls": dict(RECALLS)}
