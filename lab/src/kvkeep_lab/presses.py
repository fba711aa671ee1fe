"""``kvpress``: evicts by the scores of a press of NVIDIA's kvpress package (https://github.com/NVIDIA/kvpress).

A press with a ``score`` method receives one layer's keys and values, in order, and the hidden states of the tokens that
were just read, and returns a score for every entry. kvkeep evicts by these scores: the budget is hard, prompts are read
in chunks, and evicted entries may have any fate.
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

    The press scores resident and new entries at the end of every chunk of a prompt, in the order of the text, as the
    package scores a prompt at its end. Entries keep their scores. The lowest score is evicted first. Entries without a
    score are evicted after all scored entries, the oldest first.

    Decoded tokens have no score, because a press is designed for prompts and would read all keys at every step. A chunk
    that is not longer than the press' ``window_size`` or ``n_sink`` has no scores until the next longer chunk.

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
    """Parameters of the press ("window_size=32,kernel_size=7"). The budget determines its ``compression_ratio``."""

    @classmethod
    def from_spec(cls, text: str) -> KVPress:
        """Return the selector for ``NAME`` or ``NAME,PARAMETER=VALUE,...``."""
        press, _, options = text.partition(",")
        return cls(press.removeprefix("press="), options)

    def __post_init__(self) -> None:
        # Each cache has a separate press, because presses store properties of the model.
        object.__setattr__(self, "_scorer", _made(self.press, self.options))

    @property
    def observation_window(self) -> int:
        """Request the last query's attention. The attention is ignored, but the call computes the scores while all
        entries are available."""
        return 1

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return ``entries`` for every layer. The first call adds hooks to the model, because presses also read the
        inputs of attention modules."""
        scorer: Any = self._scorer  # type: ignore[attr-defined]
        with _explained(scorer, "learn what it needs from this model"):
            getattr(scorer, "post_init_from_model", lambda model: None)(model)
        _hook(model)
        return super().budgets(model, geometry, entries)

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return the press' scores at the end of a chunk; otherwise return the current scores."""
        scorer: Any = self._scorer  # type: ignore[attr-defined]
        assert entries.scores is not None
        if entries.new <= max(1, *(getattr(scorer, name, 0) or 0 for name in ("window_size", "n_sink"))):
            return entries.scores
        if isinstance(entries.first, Tensor):
            raise UsageError("Scores of kvpress ignore padding; pass rows of the same length, or one row at a time.")
        if (running := _running.get()) is None:
            if current_attender() is None:  # accepted drafts have no scores
                return entries.scores
            raise UnsupportedModelError(
                "This model calls its attention modules in a way that hooks cannot observe; use another model."
            )
        module, hidden, kwargs = running
        assert entries.keys is not None and entries.values is not None
        # After a rollback, lanes may have different numbers of entries. The oldest ones that some lanes lack keep their
        # scores.
        empty = int((entries.slots < 0).sum(1).max())
        order = entries.slots.argsort(1)[:, empty:]
        keys, values = (
            part.gather(1, order[..., None].expand(-1, -1, part.shape[2])).unflatten(0, (-1, entries.heads))
            for part in (entries.keys, entries.values)
        )
        # Some presses keep int(n * (1 - ratio)) entries. Half an entry is added so that this is the budget.
        scorer.compression_ratio = max(0.0, 1 - (entries.budget + 0.5) / order.shape[1])
        _offset.set(int(entries.length) - entries.new)
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
    # kvpress wraps all attention functions of transformers and passes dropout to them by position.
    ALL_ATTENTION_FUNCTIONS[binding.NAME] = binding.attention_forward
    found = {name: getattr(package, name) for name in dir(package) if name.endswith("Press") and name != "ScorerPress"}
    return {_short(name): press for name, press in found.items() if inspect.isclass(press) and hasattr(press, "score")}


def _short(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").removesuffix("press")


def _made(name: str, options: str) -> Any:
    """Return the press ``name``. Raises UsageError for an unknown name, parameter or value."""
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
    """Return the value of ``text`` in the type of ``default``."""
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
    """Convert any error of a press to a sentence. Presses are written for a few families, and for complete prompts."""
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
# The running attention module of this context, its input (batch, new, hidden_size), and its other arguments.
_running: ContextVar[tuple[nn.Module, Tensor, dict[str, Any]] | None] = ContextVar("kvkeep_kvpress", default=None)
# Number of tokens before the current chunk.
_offset: ContextVar[int] = ContextVar("kvkeep_kvpress_offset", default=0)


def _hook(model: Any) -> None:
    """Make every attention module of ``model`` record its arguments, and give it its rotary embedding."""
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
            module.__dict__["rotary_emb"] = partial(_ahead, own)  # not registered as a submodule a second time
    _hooked.add(model)


def _ahead(rotary: Any, rows: Tensor, positions: Tensor, *args: Any) -> Any:
    """Shift the positions that a press counts from the start of the chunk to those of the text."""
    return rotary(rows, positions + _offset.get(), *args)


def _entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Layers that run to rebuild entries have other caches and need no scores.
    if getattr(kwargs.get("cache"), "stream", None) is not None:
        given = kwargs | {"past_key_values": kwargs["cache"]}  # the name in older transformers, which kvpress uses
        _running.set((module, (args[0] if args else kwargs["hidden_states"]).detach(), given))


def _leaving(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if getattr(kwargs.get("cache"), "stream", None) is not None:
        _running.set(None)
