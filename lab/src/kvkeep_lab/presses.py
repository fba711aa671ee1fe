"""``kvpress``: the scores of a press of NVIDIA's kvpress package (https://github.com/NVIDIA/kvpress) say who stays.

A press with a ``score`` method looks at one layer's keys and values, in order, and at the hidden states of the tokens
that were just read, and gives every entry a number. Here these numbers drive kvkeep's own eviction: the budget is hard,
prompts come in chunks, and evicted entries may have any fate.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.contracts.selector import Candidates
from kvkeep.errors import KvkeepError, UnsupportedModelError, UsageError, unknown
from kvkeep.geometry import ModelGeometry
from kvkeep.models import binding
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.models.forward import current_attender
from kvkeep.policies.selectors.scored import HIGHEST, Scored

PACKAGE = "kvpress"


@dataclass(frozen=True)
class KVPress(Scored):
    """Those that a press of the kvpress package scores highest.

    The press scores the entries at the end of every chunk of a prompt, resident and new ones in the order of the text,
    as the package scores a prompt at its end. Entries keep their scores. Entries without a score stay; the lowest score
    is evicted first, and after all scored entries the oldest. Decoded tokens get no score: a press is made for prompts,
    and would read all keys at every step. Nor does a chunk no longer than the press' ``window_size`` or ``n_sink``,
    until the next longer chunk scores it.

    Presses that need attention weights, or a query for every key, are refused, and so are rows of different length.
    """

    leaves: ClassVar[str] = "least scored by a press"
    source: ClassVar[str] = "github.com/NVIDIA/kvpress"
    across_heads: ClassVar[bool] = True
    files: ClassVar[Sequence[str]] = ("options",)

    needs_kv: ClassVar[bool] = True

    press: str
    """A class of the package with a ``score`` method, or its short name ("SnapKVPress", "snapkv")."""
    options: str = ""
    """The press' own parameters ("window_size=32,kernel_size=7"); the budget gives its ``compression_ratio``."""

    @classmethod
    def from_spec(cls, text: str) -> KVPress:
        """Return the selector for ``NAME`` or ``NAME,PARAMETER=VALUE,...``."""
        press, _, options = text.partition(",")
        return cls(press.removeprefix("press="), options)

    def __post_init__(self) -> None:
        # Every cache has its own: presses learn from the model they are used with.
        object.__setattr__(self, "_scorer", _made(self.press, self.options))

    @property
    def observation_window(self) -> int:
        """The last query's attention, which is not used: this is when scores are made, with what was held at hand."""
        return 1

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return ``entries`` for every layer. Presses also see what attention modules are called with, so the model
        is hooked, once."""
        scorer: Any = self._scorer  # type: ignore[attr-defined]
        with _explained(scorer, "learn what it needs from this model"):
            getattr(scorer, "post_init_from_model", lambda model: None)(model)
        _hook(model)
        return super().budgets(model, geometry, entries)

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return the press' scores at the end of a chunk, else the scores as they are."""
        scorer: Any = self._scorer  # type: ignore[attr-defined]
        assert entries.scores is not None
        if entries.new <= max(1, *(getattr(scorer, name, 0) or 0 for name in ("window_size", "n_sink"))):
            return entries.scores
        if isinstance(entries.first, Tensor):
            raise UsageError("Scores of kvpress ignore padding; pass rows of the same length, or one row at a time.")
        if (running := _running.get()) is None:
            if current_attender() is None:  # what a round accepts after its pass has no scores of its own
                return entries.scores
            raise UnsupportedModelError(
                "This model calls its attention modules in a way that hooks cannot observe; use another model."
            )
        module, hidden, kwargs = running
        assert entries.keys is not None and entries.values is not None
        # After a rollback some lanes may have lost more than others: the oldest that not all have keep their scores.
        empty = int((entries.slots < 0).sum(1).max())
        order = entries.slots.argsort(1)[:, empty:]
        keys, values = (
            part.gather(1, order[..., None].expand(-1, -1, part.shape[2])).unflatten(0, (-1, entries.heads))
            for part in (entries.keys, entries.values)
        )
        # Presses that choose by themselves take int(n * (1 - ratio)): half an entry more, so that it is the budget.
        scorer.compression_ratio = max(0.0, 1 - (entries.budget + 0.5) / order.shape[1])
        _offset.set(entries.length - entries.new)
        with _explained(scorer, f"score {order.shape[1]} entries by {entries.new} queries in layer {entries.layer}"):
            scores = scorer.score(module, hidden, keys, values, None, kwargs).flatten(0, 1).float()
            return entries.scores.scatter(1, order, scores.nan_to_num(-HIGHEST).clamp(-HIGHEST, HIGHEST))


# -- presses ----------------------------------------------------------------------------------------


def presses() -> dict[str, Any]:
    """Return the package's presses that have a score, by their short names. Raises UsageError without the package."""
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise UsageError(
            f"kvpress is not installed, or not all it imports ({error}): "
            "pip install --no-deps kvpress, and pip install cachetools datasets fire."
        ) from None
    # kvpress wraps all attention functions known to transformers, and hands what is inside a dropout by position.
    ALL_ATTENTION_FUNCTIONS[binding.NAME] = binding.attention_forward
    found = {name: getattr(package, name) for name in dir(package) if name.endswith("Press") and name != "ScorerPress"}
    return {_short(name): press for name, press in found.items() if inspect.isclass(press) and hasattr(press, "score")}


def _short(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").removesuffix("press")


def _made(name: str, options: str) -> Any:
    """Return the press ``name``. Raises UsageError for names and values that are not its own."""
    known = presses()
    if not name:
        raise UsageError(f"Method 'kvpress' needs the name of a press (kvpress:snapkv): {', '.join(known)}.")
    if _short(name) not in known:
        raise unknown("press of kvpress", name, known)
    made = known[_short(name)]
    takes = {field.name: field.default for field in fields(made) if field.init and field.name != "compression_ratio"}
    given: dict[str, Any] = {}
    for part in (part for part in options.split(",") if part):
        key, _, text = part.partition("=")
        if key not in takes:
            raise UsageError(
                f"'{part}' is not understood: {made.__name__} takes {', '.join(takes) or 'no parameters'}."
            )
        given[key] = _value(text, takes[key])
    try:
        return made(**given)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"{made.__name__} refused these parameters: {error}.") from None


def _value(text: str, default: Any) -> Any:
    """Return what ``text`` says, as the kind of thing that ``default`` is."""
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if default not in (None, MISSING) and type(value) is not type(default):
        raise UsageError(f"'{text}' is not understood: a value like {default!r} is wanted.")
    return value


@contextmanager
def _explained(scorer: Any, doing: str) -> Any:
    """Turn whatever a press raises into a sentence: it is written for a few families, and for whole prompts."""
    try:
        yield
    except KvkeepError:
        raise
    except Exception as error:
        kind = UsageError if isinstance(error, AssertionError) else UnsupportedModelError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise kind(f"kvpress' {type(scorer).__name__} could not {doing}: {reason.rstrip('.')}.") from error


# -- what attention modules are called with -----------------------------------------------------------

_hooked: WeakSet[nn.Module] = WeakSet()
# The attention module at work in this context, its input (batch, new, hidden_size), and what else it was given.
_running: ContextVar[tuple[nn.Module, Tensor, dict[str, Any]] | None] = ContextVar("kvkeep_kvpress", default=None)
# Tokens before the chunk at work.
_offset: ContextVar[int] = ContextVar("kvkeep_kvpress_offset", default=0)


def _hook(model: Any) -> None:
    """Let every attention module of ``model`` say what it is called with, and know its rotary embedding."""
    if model in _hooked:
        return
    decoder = decoder_of(model)
    modules: list[Any] = [getattr(layer, "self_attn", getattr(layer, "attn", None)) for layer in layers_of(decoder)]
    if None in modules:
        raise UnsupportedModelError(f"'{type(model).__name__}' has layers whose attention module is not found.")
    rotary = getattr(decoder, "rotary_emb", None)
    for index, module in enumerate(modules):
        module.register_forward_pre_hook(_entering, with_kwargs=True)
        module.register_forward_hook(_leaving, with_kwargs=True, always_call=True)
        if rotary is not None and not hasattr(module, "rotary_emb"):
            typed = "layer_type" in inspect.signature(rotary.forward).parameters
            own = partial(rotary, layer_type=decoder.config.layer_types[index]) if typed else rotary
            module.__dict__["rotary_emb"] = partial(_ahead, own)  # not a submodule: the model has it already
    _hooked.add(model)


def _ahead(rotary: Any, rows: Tensor, positions: Tensor, *args: Any) -> Any:
    """Presses count positions from the first token they are shown, which is a chunk's."""
    return rotary(rows, positions + _offset.get(), *args)


def _entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Layers that are run to rebuild entries are handed other caches; nobody scores by them.
    if getattr(kwargs.get("cache"), "stream", None) is not None:
        given = kwargs | {"past_key_values": kwargs["cache"]}  # its name in the transformers that kvpress asks for
        _running.set((module, (args[0] if args else kwargs["hidden_states"]).detach(), given))


def _leaving(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if getattr(kwargs.get("cache"), "stream", None) is not None:
        _running.set(None)
