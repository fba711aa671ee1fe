"""Methods by name: a selector (what is evicted) × a fate (how it is stored) × a recall (how it comes back)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from kvkeep.budget import Budget
from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.recall import Recall
from kvkeep.contracts.selector import Selector
from kvkeep.errors import BudgetError, UsageError, unknown
from kvkeep.geometry import ModelGeometry
from kvkeep.plugins import PARTS, each_plugin
from kvkeep.policies.fates.checkpoint import Recorded
from kvkeep.policies.fates.drop import Drop
from kvkeep.policies.names import check_lab
from kvkeep.policies.recalls.unnamed import Everything, Evicted
from kvkeep.policies.registry import (
    FATES,
    FORMER,
    LISTED,
    ONESHOT,
    PRESETS,
    RECALLS,
    SELECTORS,
    STOCK,
    Preset,
    register,
    unregister,
)
from kvkeep.policies.selectors.window import OldestFirst
from kvkeep.policies.specs import build, required


class Division(NamedTuple):
    """How the entries of a layer's budget are divided."""

    tail: int
    """Entries for tokens that wait for a decision."""
    within: int
    """All other entries."""
    resident: int
    """The exact entries among these."""
    sinks: int | None
    """First entries with an additional unrotated key; None: positions are those of the text."""


@dataclass(frozen=True)
class Method:
    """A selector, a fate and a recall."""

    name: str
    """The user's spelling."""
    selector: Selector
    fate: Fate
    recall: Recall
    summary: str
    """What the method does, in a sentence."""
    source: str
    """The paper."""
    oneshot: bool = False
    """A prompt is read in one pass and compressed afterwards. The budget holds from then on."""

    @property
    def exactness(self) -> Exactness:
        """What the method promises about its output."""
        return self.recall.exactness or self.fate.exactness

    @property
    def leaves(self) -> str:
        """Which entries are evicted, in a few words."""
        return self.fate.leaves or self.selector.leaves

    @property
    def becomes(self) -> str:
        """How evicted entries are stored, in a few words."""
        if not self.recall.backed:
            return self.fate.label
        stored = self.store_fate.stores.keeps or self.fate.stores.makes_room
        return f"{self.fate.label} and checkpointed" if stored else "checkpointed"

    @property
    def returns(self) -> str:
        """How evicted entries come back, in a few words."""
        return self.recall.label or self.fate.returns

    @property
    def store_fate(self) -> Fate:
        """The fate of evicted entries; they are dropped where a checkpoint has all of them."""
        return Drop() if self.recall.backed and self.fate.checkpoints else self.fate

    @property
    def checkpoints(self) -> bool:
        """Whether entries are kept in a checkpoint."""
        return self.recall.backed or self.fate.checkpoints

    @property
    def reading(self) -> Method | None:
        """The method that reads a text first, for a selector that chooses after a second reading; else None."""
        if self.selector.reconstruction is None:
            return None
        return replace(self, selector=OldestFirst(), fate=Recorded("kv"), recall=Evicted())

    @property
    def reads_all(self) -> bool:
        """Whether every step attends to all entries of a checkpoint, so that the budget may be 0."""
        return self.recall.backed and not self.recall.label

    @property
    def kind(self) -> str | None:
        """The kind of checkpoint in the method's name; None where the cache's options choose it."""
        return self.fate.kind or None

    @property
    def budgeted(self) -> bool:
        """Whether the method needs a budget."""
        return self.selector.budgeted

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a cache with this method."""
        if self.selector.keeps_all:
            return ("budget",) if self.budgeted else ()
        chunk = () if self.oneshot else ("chunk",)
        if not self.checkpoints:
            return ("budget", *chunk, "where", "folder", "page") if self.reading else ("budget", *chunk)
        capacity = () if self.recall.drafts else ("capacity",)
        return ("budget", "checkpoint", "where", *capacity, "folder", *chunk, "page")

    @property
    def any_length(self) -> bool:
        """Whether a text may be longer than the model's positions."""
        return self.recall.endless or self.sinks is not None

    @property
    def sinks(self) -> int | None:
        """The number of first entries that stay, where positions are places in the cache. None where positions are
        those of the text, whose length the model's positions then limit."""
        fate = self.store_fate
        return self.selector.sinks_in_cache(not (fate.stores.keeps or self.recall.backed or self.recall.label))

    def division(self, geometry: ModelGeometry, entries: int) -> Division:
        """Return how a budget of ``entries`` is divided. Raises BudgetError for too few."""
        tail, fate = self.recall.tail(entries), self.store_fate
        within = entries - tail
        if self.recall.backed and within < 1 and not self.reads_all:
            raise BudgetError(
                f"A budget of {entries} entries leaves method '{self.name}' nothing to attend to; give a larger budget."
            )
        (self.fate if self.reads_all else fate).fits(self.name, geometry, within)
        resident, sinks = fate.resident(within), self.sinks
        return Division(tail, within, resident if sinks is None else max(resident - (sinks + 1) // 2, 1), sinks)

    def chunk(self, geometry: ModelGeometry, budget: Budget, entries: int, chunk: int | None = None) -> int:
        """Return the tokens of a prompt that are read at a time with a budget of ``entries``. chunk: the user's choice.
        Raises BudgetError where they do not fit."""
        if self.oneshot:
            return sys.maxsize
        layers = len(geometry.full_layers) if self.exactness is Exactness.EXACT else 0
        longest = budget.chunk_for(entries, chunk, layers)
        return self.fate.chunk(self.name, entries, longest, chunk is not None)

    def refusal(self) -> str | None:
        """Return why the parts cannot be combined, in a sentence; None where they can."""
        if self.oneshot and self.selector.keeps_all:
            return "This method evicts nothing, so there is nothing to compress after the prompt; leave 'oneshot' out."
        if self.oneshot and self.reading is not None:
            return "This method always reads the whole text before it compresses; leave 'oneshot' out."
        if self.recall.label and self.selector.keeps_all:
            return "This method evicts nothing, so there is nothing to recall; leave the recall out."
        if self.recall.label and not self.recall.endless and self.selector.in_order:
            return "'kv-direct' recalls everything at every step already; use 'window+RECALL'."
        if self.selector.divides and self.fate.stores.makes_room:
            return "This fate evicts nothing, so the selector has no entries to divide; use 'snapkv'."
        for part in (self.fate, self.recall):
            if (reason := part.refuses(self)) is not None:
                return reason
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
    """Return the method of three parts. The recall gives its summary; a recall without a label leaves that to the
    selector."""
    about = recall if recall.label else selector
    recall = _default_recall(selector, fate, recall)
    return Method(name, selector, fate, recall, _first_sentence(about), about.source or selector.source)


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


def _first_sentence(made: object) -> str:
    text = " ".join((type(made).__doc__ or "").partition("\n\n")[0].replace("``", "").split())
    return text.partition(". ")[0].removesuffix(".") + "."
