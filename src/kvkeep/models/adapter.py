"""Computes keys and values from residuals with the model's modules, for any transformers decoder.

KV-Direct (arXiv:2603.19664, Eqs. 13-14) rebuilds K = R_p RMSNorm(h) W_k and V = RMSNorm(h) W_v. Models differ in every
symbol: fused projections, norms on the heads, LayerNorm, latent attention, rotary tables by layer type. So nothing is
re-implemented here: a layer runs with a cache that records its keys and values and then stops the layer. Before first
use, each capability is compared with a plain forward pass. If they differ, the adapter refuses, naming family and
layer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from kvkeep.errors import UnsupportedModelError, trial
from kvkeep.geometry import LayerGeometry
from kvkeep.models.forward import attending, probing, set_attender
from kvkeep.step.scores import CAP


class _Taken(Exception):
    """Carries keys and values of a layer, or the hidden states entering the first."""

    def __init__(self, *taken: Tensor) -> None:
        self.taken = taken


class _Take:
    """A cache that raises :class:`_Taken` with the first keys and values it receives. A hybrid layer may run its
    recurrence before that, from an empty state; its keys and values do not depend on it."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> None:
        raise _Taken(keys, values)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return states

    update_recurrent_state = update_conv_state


class Adapter:
    """Runs parts of one model: ``embed``, ``project``, ``advance``. It holds no state of a sequence."""

    def __init__(self, model: Any) -> None:
        self.decoder = decoder_of(model)
        self.layers: Any = layers_of(self.decoder)
        self.config = self.decoder.config
        self.family = str(getattr(self.config, "model_type", type(model).__name__))
        self._rotary = getattr(self.decoder, "rotary_emb", None)
        self._rotary_by_type = (
            self._rotary is not None and "layer_type" in inspect.signature(type(self._rotary).forward).parameters
        )
        parameters = inspect.signature(type(self.layers[0]).forward).parameters
        self._past = "layer_past" if "layer_past" in parameters else "cache"  # what layers call their cache
        self.latent = any(hasattr(module, "expand_kv") for module in self.decoder.modules())
        """Whether attention caches latents, which are smaller than its keys and values."""
        self.recurrent = {int(module.layer_idx): module for module in self.decoder.modules() if _is_recurrent(module)}
        """The modules that compute recurrent states, by layer."""
        self._checked: dict[str, str | None] = {}
        self._direct = all(self._has_plain_projections(index) for index in range(len(self.layers)))

    # -- public -----------------------------------------------------------------------------------

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the residual entering layer 0, (batch, n, hidden), of token ``ids`` (batch, n)."""

        def stop(layer_idx: int, hidden: Tensor) -> None:
            raise _Taken(hidden)

        def run() -> None:
            with probing(stop):
                self.decoder(input_ids=ids.long(), position_ids=positions.long(), use_cache=False)

        try:
            _aside(None, run)
        except _Taken as signal:
            return signal.taken[0]
        raise UnsupportedModelError(
            f"'{self.family}' calls its layers without running their hooks, which kvkeep needs to read residuals; "
            "use checkpoint kind 'kv'."
        )

    def project(self, layer_idx: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of layer ``layer_idx`` for residuals ``hidden`` (batch, n, hidden) at
        ``positions`` (batch, n): keys and values, (batch, kv_heads, n, dim) each (Eqs. 13-14)."""
        if self._direct:
            return self._project_plain(layer_idx, hidden, positions)
        return self._project_by_layer(layer_idx, hidden, positions)

    def advance(self, layer_idx: int, hidden: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the residual after layer ``layer_idx`` for the residual ``hidden`` before it.

        ``cache`` receives the layer's new keys and values and computes its attention (an Attender).
        """
        output = self._call(layer_idx, hidden, positions, cache, cache)
        return output[0] if isinstance(output, tuple) else output

    def layer_type(self, layer_idx: int) -> str:
        """Return the type of a layer's rotary embedding; "" if all layers share one."""
        return str(self.config.layer_types[layer_idx]) if self._rotary_by_type else ""

    def angles(self, layer_idx: int, like: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for :meth:`turn`, in the dtype of ``like``. by: the number of positions, (batch, n),
        negative for earlier ones. Layers of one type share the result."""
        cos, sin = self._position_embeddings(layer_idx, like, by)
        scale = (cos.float().square() + sin.float().square()).sqrt().reciprocal()  # some rotary embeddings also scale
        return (cos * scale).to(like.dtype), (sin * scale).to(like.dtype)

    def turn(self, layer_idx: int, keys: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return cached ``keys`` (batch, kv_heads, n, dim) rotated by ``angles``. Rotary position embeddings only: R(p
        + by) = R(by) R(p)."""
        rotate = sys.modules[type(self.layers[layer_idx]).__module__].apply_rotary_pos_emb
        return rotate(keys[:, :1], keys, *angles)[1]

    def ahead(self, layer_idx: int, queries: Tensor, by: Tensor, positions: int) -> Tensor:
        """Return the mean of ``queries`` (batch, heads, n, key_dim) at the ``positions`` positions that begin ``by``
        (n,) later, float32. A rotation is linear in its cosines and sines, as in :meth:`turn`, so the mean of rotations
        is the rotation by their means."""
        queries = queries.float()
        moved = self.turn(layer_idx, queries, self.angles(layer_idx, queries, by[None]))
        later = self.angles(layer_idx, queries, torch.arange(positions, device=queries.device)[None])
        return self.turn(layer_idx, moved, (later[0].mean(1, keepdim=True), later[1].mean(1, keepdim=True)))

    def runs_all(self, recurrent: Sequence[LayerGeometry]) -> bool:
        """Return whether the modules that compute the states of these layers are known (:attr:`recurrent`)."""
        return {layer.index for layer in recurrent} == {*self.recurrent}

    # -- trials -------------------------------------------------------------------------------------

    def _call(self, layer_idx: int, hidden: Tensor, positions: Tensor, cache: Any, attender: Any = None) -> Any:
        return _aside(
            attender,
            self.layers[layer_idx],
            hidden,
            attention_mask=None,
            position_ids=positions.long(),
            position_embeddings=self._position_embeddings(layer_idx, hidden, positions),
            use_cache=True,
            **{self._past: cache},
        )

    def _position_embeddings(self, layer_idx: int, hidden: Tensor, positions: Tensor) -> Any:
        if self._rotary is None:
            return None
        if self._rotary_by_type:
            return self._rotary(hidden, positions.long(), self.layer_type(layer_idx))
        return self._rotary(hidden, positions.long())

    def _project_by_layer(self, layer_idx: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        try:
            self._call(layer_idx, hidden, positions, _Take())
        except _Taken as signal:
            keys, values = signal.taken
            return keys, values
        raise UnsupportedModelError(f"'{self.family}' passes no keys and values to a cache at layer {layer_idx}.")

    def _project_plain(self, layer_idx: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same result without the query's projection, for layers with Llama's layout."""
        layer = self.layers[layer_idx]
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        shape = (*hidden.shape[:-1], -1, attention.head_dim)
        keys = attention.k_proj(normed).view(shape)
        if getattr(attention, "k_norm", None) is not None:
            keys = attention.k_norm(keys)
        keys = keys.transpose(1, 2)
        values = attention.v_proj(normed).view(shape).transpose(1, 2)
        cos, sin = self._position_embeddings(layer_idx, hidden, positions)
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        return rotate(keys[:, :1], keys, cos, sin)[1], values

    def _has_plain_projections(self, layer_idx: int) -> bool:
        """Return whether :meth:`_project_plain` gives identical results on random residuals."""
        with trial(self.family), suppress(UnsupportedModelError):
            hidden, positions = self._sample(4)
            plain = self._project_plain(layer_idx, hidden, positions)
            by_layer = self._project_by_layer(layer_idx, hidden, positions)
            return all(a.shape == b.shape and _close(a, b) for a, b in zip(plain, by_layer, strict=True))
        return False

    def _sample(self, count: int) -> tuple[Tensor, Tensor]:
        weight = next(self.decoder.parameters())
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, count, self.config.hidden_size, generator=generator)
        return hidden.to(weight.device, weight.dtype), torch.arange(count, device=weight.device).unsqueeze(0)

    # -- checks -------------------------------------------------------------------------------------

    def require(
        self, capability: str, layers: list[int], wanted_for: str, instead: str = "use checkpoint kind 'kv'"
    ) -> None:
        """Check ``capability`` ("project", "advance", "turn") on ``layers`` against a forward pass.

        Raises UnsupportedModelError naming the family, the layer and the difference, and what to do ``instead``.
        """
        if capability not in self._checked:
            rotated = "their keys cannot be rotated to other positions"
            others = "their layers need more than a residual and its positions"
            found: str | None = rotated if capability == "turn" else others
            with trial(self.family):
                found = self._compare(capability, layers)
            self._checked[capability] = found
        if (reason := self._checked[capability]) is not None:
            raise UnsupportedModelError(
                f"'{self.family}' models cannot be used with {wanted_for}: {reason}; {instead}."
            )

    @torch.no_grad()
    def _compare(self, capability: str, layers: list[int]) -> str | None:
        """Return the difference between adapter and model on a few tokens; None if they agree."""
        count = 8
        device = next(self.decoder.parameters()).device
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, self.config.vocab_size, (1, count), generator=generator).to(device)
        positions = torch.arange(count, device=device).unsqueeze(0)
        entering: list[Tensor] = []
        cache = DynamicCache(config=self.config)
        with attending(None), probing(lambda _, hidden: entering.append(hidden)):
            self.decoder(input_ids=ids, cache=cache, use_cache=True)
        if len(entering) != len(self.layers):
            return f"{len(entering)} of its {len(self.layers)} layers could be observed"
        if capability != "turn" and entering[0].ndim > 3:
            return f"its layers pass on {len(entering[0])} residual streams, and kvkeep stores one"
        for index in layers if capability in ("project", "turn") else ():
            rebuild = self.project if capability == "project" else self._there_and_back
            (keys, values), cached = rebuild(index, entering[index], positions), cache.layers[index]
            if keys.shape != cached.keys.shape or not (_close(keys, cached.keys) and _close(values, cached.values)):
                return f"keys and values rebuilt at layer {index} differ from the cached ones"
        if capability in ("project", "turn"):
            return None
        if not _close(self.embed(ids, positions), entering[0]):
            return "the residual entering layer 0 does not follow from the token ids"
        for index in range(len(self.layers) - 1):
            if not _close(self.advance(index, entering[index], positions, _PlainAttention()), entering[index + 1]):
                return f"the residual leaving layer {index} does not follow from the one entering it"
        return None

    def _there_and_back(self, index: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projection at late positions, rotated back."""
        keys, values = self.project(index, hidden, positions + 1000)
        angles = self.angles(index, keys, positions.new_full(positions.shape, -1000))
        return self.turn(index, keys, angles), values


class _PlainAttention:
    """The empty cache of a layer that runs over a whole sequence with stock causal attention."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def attends(self, layer_idx: int) -> bool:
        return False


def _aside(attender: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` in a separate context where ``attender`` computes attention. The forward pass in progress, and
    hooks that capture layer outputs, do not see the call."""
    context = Context()
    context.run(set_attender, attender)
    return context.run(function, *args, **kwargs)


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding (the order of sums may differ)."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(a.dtype, 5e-2)
    scale = float(b.detach().float().abs().max().clamp(min=1e-6))
    return bool(((a - b).float().abs().max() <= tolerance * scale).item())


def _is_recurrent(module: nn.Module) -> bool:
    """Return whether a module reads and writes a recurrent state: it knows its layer, and has a short convolution."""
    parameters = inspect.signature(type(module).forward).parameters
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves and hasattr(module, "layer_idx") and {"cache", "attention_mask"} <= set(parameters)


def decoder_of(model: Any) -> Any:
    """Return the module that owns the decoder layers (``model.model`` for most families)."""
    return model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "base_model", model)


def beyond_sdpa(decoder: Any) -> bool:
    """Return whether attention has sinks or capped scores, so that transformers does not run it as SDPA."""
    modules = [*decoder.modules()]
    return any(
        isinstance(getattr(one, "sinks", None), Tensor) or getattr(one, CAP, None) is not None for one in modules
    )


def layers_of(decoder: Any) -> nn.ModuleList:
    """Return the list of decoder layers."""
    for name in ("layers", "h"):
        if isinstance(getattr(decoder, name, None), nn.ModuleList):
            return getattr(decoder, name)
    raise UnsupportedModelError(f"kvkeep finds no list of decoder layers in '{type(decoder).__name__}'.")


def processes(model: Any) -> int:
    """Return the number of processes that share each layer's heads; 1: this process computes all of them."""
    return getattr(model, "tp_size", None) or 1


def devices(model: Any) -> list[str]:
    """Return the devices that run layers by ``device_map``, in order; empty without a map. Layers offloaded to the
    processor or to disk run on the first accelerator, or on the processor if there is none."""
    places = (getattr(model, "hf_device_map", None) or {}).values()
    names = [f"cuda:{place}" if isinstance(place, int) else str(place) for place in places]
    found = dict.fromkeys(name for name in names if name not in ("cpu", "disk"))
    return list(found) or ["cpu"] * bool(places)
