"""Binding: the registration points through which a bounded cache takes part in a model's forward pass.

transformers documents three: attention functions by name, mask functions by name, and torch's module hooks. With a
cache that has no :class:`~kvkeep.models.forward.Hooks`, the model runs stock SDPA with stock masks. For a cache that
keeps all entries only the forward passes are hooked (:func:`watch`), so that an interrupted pass is undone.

Hooks are named functions, so a bound model can be saved and pickled; ``torch.compile`` compiles the code between them.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Container
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import AttentionInterface

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.adapter import Adapter, beyond_sdpa, decoder_of, layers_of
from kvkeep.models.chunks import all_but_last_chunk, check_input
from kvkeep.models.forward import Hooks, Reading, current_attender, current_probe, set_attender
from kvkeep.models.same_text import PREPARE, prepare
from kvkeep.step.scores import Scaling
from kvkeep.step.sinks import attend_beyond_sdpa

P = ParamSpec("P")
R = TypeVar("R")
NAME = "kvkeep"
_CUT_QUERIES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
"""Families that compare the name of their attention only to leave out queries, of which :func:`_cuts_queries` takes
care."""
_COMPARES = re.compile(r"""_attn_implementation\s*(==|!=|in)\s*[^\n]*["']sdpa["']""")
_LOCK = threading.RLock()
"""The lock of binding and unbinding: threads may create a model's first caches at the same time."""
# Last positions whose outputs the caller uses (0: all), set by the outermost forward.
_keep_last: ContextVar[int] = ContextVar("kvkeep_keep_last", default=0)


def _uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function that runs in every layer and step out of compiled code. Called always, torch's own decorator
    would cost as much as a small kernel."""
    disabled = torch.compiler.disable(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # in transformers' order, because other packages wrap attention functions
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers: streamed for a bounded cache; else SDPA, or
    :func:`~kvkeep.step.sinks.attend_beyond_sdpa`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (cap := kwargs.get("softcap")) is not None:
        scale = Scaling(scale, cap)
    output = _streamed(module, query, key, value, attention_mask, scale, kwargs)
    if output is not None:
        return output, None
    if (output := attend_beyond_sdpa(module, query, key, value, attention_mask, scale)) is not None:
        return output.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


@_uncompiled
def _streamed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    given: dict[str, Any],
) -> Tensor | None:
    """Return (batch, queries, heads, value_dim), or None for stock attention."""
    attender = current_attender()
    layer_idx = getattr(module, "layer_idx", None)
    if attender is None or layer_idx is None or not attender.attends(layer_idx):
        return None
    sinks = given.get("s_aux")
    unsupported = ["position_bias"] if given.get("position_bias") is not None else []
    unsupported += ["s_aux"] if sinks is not None and sinks is not getattr(module, "sinks", None) else []
    for name in unsupported:
        raise UnsupportedModelError(
            f"'{type(module).__name__}' uses '{name}' in its attention, which bounded caches do not support; use "
            "method 'full'."
        )
    output = attender.attend(module, query, key, value, mask, scaling)
    return None if output is None else output.transpose(1, 2).contiguous()


AttentionInterface.register(NAME, attention_forward)


@_uncompiled
def recurrent_forward(
    module: Any, forward: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """The forward of a recurrent module in a bound model: the cache decides which tokens ``forward``, the one before,
    reads at once. Returns (batch, tokens, hidden_size)."""
    hooks: Hooks | None = getattr(kwargs.get("cache"), "hooks", None)
    if hooks is None or args:
        return forward(hidden_states, *args, **kwargs)

    def run(part: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        return forward(part, **kwargs | {"cache": cache, "attention_mask": mask})

    return hooks.recur(module.layer_idx, run, hidden_states, kwargs["cache"], kwargs.get("attention_mask"))


def mask_forward(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask function registered with transformers: SDPA's mask, or None for a cache whose attention is causal and
    masks only left padding, because the cache knows that padding."""
    attender = current_attender()
    if getattr(attender, "packed", False):
        return None  # each session's attention has a separate mask
    if getattr(attender, "masks_itself", False) and _is_causal(
        kwargs.get("mask_function"), getattr(attender, "windows", ())
    ):
        return None
    return sdpa_mask(*args, **kwargs)


AttentionMaskInterface.register(NAME, mask_forward)


def _is_causal(mask_function: Any, windows: Container[int]) -> bool:
    """Return whether a mask shows each token all tokens up to it, or those in one of ``windows``."""
    if mask_function is causal_mask_function:
        return True
    code, parts = _parts(mask_function)
    if code is not _SLIDING[0] or [_parts(one)[0] for one in parts] != _SLIDING[1]:
        return False
    return parts[0].__closure__[0].cell_contents in windows


def _parts(mask_function: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the code of a mask function of transformers, and the functions that it combines."""
    inner = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    return getattr(mask_function, "__code__", None), inner[0] if inner and isinstance(inner[0], tuple) else ()


def _sliding() -> tuple[Any, list[Any]]:
    code, parts = _parts(sliding_window_causal_mask_function(1))
    return code, [_parts(one)[0] for one in parts]


_SLIDING = _sliding()
"""The code of the mask functions of sliding windows, and of those that each of them combines."""


class Replacement(partial[Any]):
    """A function in place of a method: ``Replacement(function, object, method)`` passes both, and the arguments, to the
    function. It has the method's signature, by which transformers decides what a model takes."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.args[1])


class Binding:
    """The hooks of a model, and its adapter if a bounded cache uses it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.adapter: Adapter | None = None
        self.decoder = decoder_of(model)
        names = list(inspect.signature(self.decoder.forward).parameters)
        before = partial(_before_decoder, names)
        self.decoder.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        self.decoder.register_forward_hook(_after_decoder, with_kwargs=True, always_call=True)
        if self.decoder is not model:
            model.register_forward_pre_hook(_before_model, with_kwargs=True)
            model.register_forward_hook(_after_model, always_call=True)
        if hasattr(type(model), PREPARE) and PREPARE not in vars(model):
            setattr(model, PREPARE, Replacement(prepare, model, getattr(model, PREPARE)))

    def stream(self) -> Adapter:
        """Register streamed attention and the hooks of the layers' residuals. After an error or an interrupt, none of
        them remains."""
        if self.adapter is not None:
            return self.adapter
        model, layers = self.model, layers_of(self.decoder)
        if (reason := _unstreamable(model, self.decoder)) is not None:
            raise UnsupportedModelError(f"'{model.config.model_type}' {reason}; use method 'full'.")
        with ExitStack() as undo:
            undo.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation(NAME)
            if model.config._attn_implementation != NAME:
                raise UnsupportedModelError(
                    f"'{model.config.model_type}' does not use transformers' attention interface, which bounded caches "
                    "need; use method 'full'."
                )
            for module in self.decoder.modules():  # a layer that was copied from another model has a config of its own
                config: Any = getattr(module, "config", None)
                if (before := getattr(config, "_attn_implementation", NAME)) != NAME:
                    undo.callback(setattr, config, "_attn_implementation", before)
                    config._attn_implementation = NAME
            for index, layer in enumerate(layers):
                undo.enter_context(layer.register_forward_pre_hook(partial(_entering, index), with_kwargs=True))
            adapter = Adapter(model)
            undo.pop_all()
        for module in adapter.recurrent.values():
            if not isinstance(module.forward, Replacement):  # an interrupt may have left some
                module.forward = Replacement(recurrent_forward, module, module.forward)
        self.adapter = adapter
        return adapter


def _unstreamable(model: Any, decoder: nn.Module) -> str | None:
    """Return why the attention of ``model`` cannot be streamed; None if nothing is known against it."""
    known = ("sdpa", NAME, "eager") if beyond_sdpa(decoder) else ("sdpa", NAME)
    if (before := model.config._attn_implementation) not in known:
        return (
            f"runs '{before}' attention, and bounded caches need 'sdpa': load the model with "
            "attn_implementation='sdpa', or if it does not support that"
        )
    if model.config.model_type not in _CUT_QUERIES:
        with suppress(OSError):  # the code has no file
            if _COMPARES.search(inspect.getsource(inspect.getmodule(type(model)) or type(model))):
                return (
                    "runs other code when its attention is not called 'sdpa', as sparse attention does, and bounded "
                    "caches register one under another name"
                )
    if any(isinstance(at := getattr(module, "layer_idx", 0), int) and at < 0 for module in decoder.modules()):
        return "runs one attention module in several layers, so a bounded cache cannot tell them apart"
    return None


def watch(model: Any) -> Binding:
    """Hook the beginning and the end of the forward passes of ``model``; a second call changes nothing."""
    with _LOCK:
        binding = getattr(model, "_kvkeep_binding", None)
        if binding is None:
            binding = model._kvkeep_binding = Binding(model)
        return binding


def bind(model: Any) -> Adapter:
    """Bind ``model`` (a second call changes nothing) and return its adapter. Raises UnsupportedModelError if its
    attention cannot be streamed."""
    with _LOCK:
        return watch(model).stream()


@_uncompiled
def _entering(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Report the residual entering layer ``index``."""
    probe, attender = current_probe(), current_attender()
    if probe is None and attender is None:
        return
    hidden = args[0] if args else kwargs["hidden_states"]
    if probe is not None:
        probe(index, hidden)
    if (enter := getattr(attender, "enter_layer", None)) is not None:
        enter(index, hidden)


def _before_decoder(
    names: list[str], decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Run prompts in chunks, and begin the cache's forward pass."""
    given = dict(zip(names, args, strict=False)) | kwargs
    hooks: Hooks | None = getattr(given.get("cache"), "hooks", None)
    if torch.compiler.is_compiling() and (hooks is None or not hooks.streams):
        return None  # the stock cache's pass is compiled completely
    return _open(decoder, given, hooks)


@torch.compiler.disable
def _open(decoder: nn.Module, given: dict[str, Any], hooks: Hooks | None) -> tuple[Any, ...] | None:
    keep = _keep_last.get()
    _keep_last.set(0)  # used once, so that an interrupt leaves no value behind
    if hooks is None:
        if current_probe() is None:
            set_attender(None)  # an interrupt may have left another cache's pass open
        return ((), given | {"logits_to_keep": 0}) if _cuts_queries(decoder, given) else None
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    tokens = ids if ids is not None else embeddings
    if tokens is None:
        return None
    set_attender(None)
    if hooks.single is not None:
        hooks.single.owner.take()
        given = _read(decoder, given, hooks, hooks.single, tokens, keep)
    mask = given.get("attention_mask")
    positions = hooks.begin_forward(given.get("input_ids"), given.get("inputs_embeds"), given.get("position_ids"), mask)
    if positions is not None:
        given["position_ids"] = positions
    set_attender(hooks)
    return (), given


def _cuts_queries(decoder: Any, given: dict[str, Any]) -> bool:
    """Return whether layers that share keys would leave out queries, where the mask may be left to SDPA's
    ``is_causal``, which takes the others for the first ones. Gemma 4 does not do so under the name ``sdpa``."""
    last = given.get("logits_to_keep")
    return isinstance(last, int) and last > 1 and decoder.config._attn_implementation == NAME


def _read(
    decoder: nn.Module, given: dict[str, Any], hooks: Hooks, cache: Reading, tokens: Tensor, keep: int
) -> dict[str, Any]:
    """Run all chunks of a long input but the last; return the arguments of the last pass."""
    check_input(cache, decoder, tokens, given.get("attention_mask"))
    total = tokens.shape[1]
    cache.record.grow_to(cache.length + total)
    cache.admit(total)
    earlier: list[Tensor] = []
    if total > 1 and len(sizes := cache.chunks(total)) > 1:
        given, earlier = all_but_last_chunk(decoder, given, cache, sizes, keep)
    last = given.get("logits_to_keep")
    if isinstance(last, int) and (cache.observes or _cuts_queries(decoder, given)):
        given["logits_to_keep"] = 0  # layers that share keys need all queries
    else:
        last = 0
    for hook in cache.pass_hooks:
        hook.before(given["cache"], given)
    hooks.keep_outputs(earlier, last)  # not before: a hook may run passes of its own
    return given


def _after_decoder(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """End the cache's forward pass, and put the outputs of earlier chunks before the last one's."""
    past = kwargs.get("cache")
    hooks: Hooks | None = getattr(past, "hooks", None)
    if hooks is None or (torch.compiler.is_compiling() and not hooks.streams):
        return None
    return _close(past, hooks, output)


@torch.compiler.disable
def _close(past: Any, hooks: Hooks, output: Any) -> Any:
    if current_attender() is not hooks:
        return None
    set_attender(None)
    cache: Reading | None = hooks.single
    try:
        hooks.end_forward(completed=output is not None)
        return None if cache is None else _finish(past, hooks, cache, output)
    finally:
        if cache is not None and not (cache.record.continues or cache.rehearsing):  # else more passes follow
            cache.owner.leave()


def _finish(past: Any, hooks: Hooks, cache: Reading, output: Any) -> Any:
    """Return the output of a single cache's pass, with those of the chunks before it; None if nothing is changed."""
    for hook in cache.pass_hooks if output is not None else ():
        hook.after(past)
    earlier, last = hooks.take_outputs()
    if output is not None and cache.must_reread:
        past.compress()
    if output is None or not (earlier or last):
        return None
    rows = torch.cat([*earlier, output[0][:, -last:]], dim=1)
    if isinstance(output, tuple):
        return (rows, *output[1:])
    output.last_hidden_state = rows
    return output


@torch.compiler.disable
def _before_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("logits_to_keep", 0)
    _keep_last.set(wanted if isinstance(wanted, int) else 0)


@torch.compiler.disable
def _after_model(model: nn.Module, args: Any, output: Any) -> None:
    _keep_last.set(0)
