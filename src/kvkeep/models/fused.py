"""Runs a decoder layer in two kernel calls: one before attention, and one after it.

A step of a small model is mostly the overhead of some forty operations per layer. For layers laid out like Llama's, or
in the other ways of layer_parts.py, with packed weights, the kernels compute everything between residual and attention.
An MLP that the library does not run (mlps.py) remains a module, between the kernels' norm and the next layer.
Kernels use the same chains as the modules (native/layer.h), so keys and values rebuilt by a module have the same bits.
As in the adapter, nothing is assumed of a family: each layer is first compared with its modules on random residuals. A
layer that differs, or whose modules are hooked, runs as in transformers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.errors import trial
from kvkeep.models.altup import replace_altup
from kvkeep.models.forward import current_attender
from kvkeep.models.layer_parts import parts_of
from kvkeep.models.mlps import Mlp, joined, replace_mlps
from kvkeep.models.norms import FusedNorm, fuse_norm, ours
from kvkeep.models.packed import PackedLinear, WithPointers
from kvkeep.models.recurrences import replace_recurrence
from kvkeep.models.rotary import Rotation, has_kinds, replace_rotary, rotations_of
from kvkeep.models.routers import replace_routers
from kvkeep.models.unchanged import Unchanged
from kvkeep.native import structures
from kvkeep.native.library import kernels, library, trim_memory
from kvkeep.native.structures import IN_TURN, KvLayer, address_of, array
from kvkeep.step.native import run_layers
from kvkeep.step.plan import Planned, Writes
from kvkeep.step.scores import CAP
from kvkeep.step.sinks import sinks_of


class FusedLayer(WithPointers):
    """Replaces the forward of a decoder layer."""

    pointers = ("struct", "address")

    def __init__(self, layer: Any) -> None:
        """Raise AttributeError or TypeError if the layer has another layout."""
        self.layer, self.parts = layer, parts_of(layer)
        parts, self.attention = self.parts, self.parts.attention
        self.dim = self.attention.head_dim
        self.mlp = parts.mlp
        """Its MLP or mixture; None: modules run it, or it has none."""
        self.hidden, query = parts.qkv[0].in_features, parts.out.in_features
        self.heads = query // self.dim
        self.gated = len(parts.qkv) == 3 and parts.qkv[0].out_features == 2 * query
        """Whether the projection of each head's queries is followed by gates of its output (Qwen3-Next)."""
        rest = sum(one.out_features for one in parts.qkv) // self.dim - (1 + self.gated) * self.heads
        self.kv_heads = rest // 2
        query, key = (1 + self.gated) * self.heads * self.dim, self.kv_heads * self.dim
        outputs = [query, key, key] if len(parts.qkv) == 3 else [query + 2 * key]
        matrices = [*parts.qkv, parts.out]
        shapes = [(one.out_features, one.in_features) for one in matrices]
        if shapes != [*((one, self.hidden) for one in outputs), (self.hidden, self.heads * self.dim)]:
            raise TypeError("its matrices do not have the shapes of Llama's")
        if self.dim % 2 or any(type(one) is not PackedLinear or not one.plain for one in matrices):
            raise TypeError("its matrices are not the library's, or its heads have an odd width")
        fused: dict[str, FusedNorm | None] = {name: norm and norm.forward for name, norm in parts.norms.items()}
        if any(norm is not None and not isinstance(norm, FusedNorm) for norm in fused.values()):
            raise TypeError("a norm is not the library's")
        for norm, heads in ((fused["query_norm"], 1 if self.gated else self.heads), (fused["key_norm"], self.kv_heads)):
            if norm is not None and norm.weight.numel() not in (self.dim, heads * self.dim):
                raise TypeError("its queries and keys have norms of another width")
        self._weights, self.norms = fused, [norm for norm in fused.values() if norm is not None]
        self.unchanged = Unchanged([layer], self.norms)
        self._qkv = joined(parts.qkv)
        scaling = getattr(self.attention.config, "rope_parameters", None) or {}
        self.beta = float(scaling.get("llama_4_scaling_beta") or 0.0)
        """By how much queries grow with the logarithm of their position (Ministral 3)."""
        self.scaled_from = int(scaling.get("original_max_position_embeddings") or 0)
        """The first position whose query grows."""
        self.rotation = Rotation(0, 0)
        """How queries and keys are rotated (:meth:`change`)."""
        self.sinks = sinks_of(self.attention)
        self.order = self.parts.orders[0]
        """How attention and the MLP follow each other, as the library numbers it (KvOrder)."""
        if self.order != IN_TURN and self.mlp is None:
            raise TypeError("its MLP, which reads what attention reads, is not the library's")
        self.window: int | None = None
        """The number of entries that its attention sees; None: all."""
        self.group: FusedLayers | None = None
        """Runs this layer and those after it that rotate by the same angles; None where an earlier layer runs it."""

    @functools.cached_property
    def struct(self) -> KvLayer:
        """The layer as a struct for the kernels. Its tensors must outlive it."""
        qkv, out = self._qkv, self.parts.out
        struct = KvLayer(
            qkv=tuple(part.struct for part in qkv),
            gated=self.gated,
            out=out.struct,
            qkv_bias=tuple(array(part.bias) for part in qkv),
            out_bias=array(out.bias),
            sinks=array(self.sinks),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=self.dim,
            rotated=self.rotation.channels,
            rotation=self.rotation.kind,
            order=self.order,
            rotates_first=self.parts.rotates_first,
            residual_scale=self.parts.residual_scale,
            scaling=self.attention.scaling,
            cap=getattr(self.attention, CAP, None) or 0.0,
        )
        mlp = None if self.mlp is None else self.mlp.struct
        if mlp is not None:
            struct.mlp = address_of(mlp)
        for name, norm in self._weights.items():
            if norm is not None:
                setattr(struct, name, norm.struct)
        # Keeps the buffers alive as long as the pointers, even if the modules move.
        struct.kept = [mlp, *(buffer for part in (*qkv, out) for buffer in part.buffers())]
        return struct

    @functools.cached_property
    def address(self) -> int:
        """The address of :attr:`struct`."""
        return address_of(self.struct)

    def change(self, rotation: Rotation, mlp: Mlp | None, order: int) -> None:
        """Set how queries and keys are rotated, :attr:`mlp` and :attr:`order`."""
        self.rotation, self.mlp, self.order = rotation, mlp, order
        for name in self.pointers:
            self.__dict__.pop(name, None)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's original forward."""
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the result of the layer's original forward."""
        hooks = getattr(cache, "hooks", None)
        if hooks is not None and self.attention.layer_idx < hooks.ran:
            return hidden_states
        interface = ALL_ATTENTION_FUNCTIONS.get(self.attention.config._attn_implementation)
        if (
            args
            or interface is None
            or (0 if position_embeddings is None else position_embeddings[0].shape[-1]) != self.rotation.angles
            or not ours(hidden_states)
            or kwargs.get("output_attentions")
            or not self.unchanged()
        ):
            given: dict[str, Any] = {"attention_mask": attention_mask, "cache": cache}
            given |= {"position_embeddings": position_embeddings} | kwargs
            return self.plain(hidden_states, *args, **given)
        scales = self._scales(kwargs["position_ids"]) if self.beta else None
        if (
            self.group is not None
            and scales is None
            and hooks is not None
            and (planned := hooks.every_layer())
            and self.group.can_run(planned)
        ):
            hooks.ran = self.attention.layer_idx + len(self.group.layers)
            return self.group(hidden_states, position_embeddings, planned, hooks.writes)
        query, key, value, gate, residual = self._enter(hidden_states, position_embeddings)
        if scales is not None:
            query *= scales
        if cache is not None:
            key, value = cache.update(key, value, self.attention.layer_idx)
        if self.window is not None:
            kwargs["sliding_window"] = self.window
        if hasattr(self.attention, "sinks"):
            kwargs["s_aux"] = self.attention.sinks
        if hasattr(self.attention, CAP):
            kwargs["softcap"] = getattr(self.attention, CAP)
        output, _ = interface(
            self.attention, query, key, value, attention_mask, dropout=0.0, scaling=self.attention.scaling, **kwargs
        )
        return self._leave(output, gate, residual)

    def _scales(self, positions: Tensor) -> Tensor | None:
        """Return the factors of queries, (batch or 1, 1, tokens, 1) bfloat16; None: all are 1."""
        if int(positions.max()) < self.scaled_from:
            return None
        # torch's logarithms of float32 differ between processors.
        scales = [1 + self.beta * math.log(1 + max(0, one) // self.scaled_from) for one in positions.flatten().tolist()]
        return torch.tensor(scales).to(torch.bfloat16).view(len(positions), 1, -1, 1)

    def _enter(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        x = x.contiguous()
        batch, count, _ = x.shape
        query = torch.empty(batch, self.heads, count, self.dim, dtype=torch.bfloat16)
        key = torch.empty(batch, self.kv_heads, count, self.dim, dtype=torch.bfloat16)
        value, gate = torch.empty_like(key), torch.empty_like(query) if self.gated else None
        turns = _turns(angles, self.rotation)
        kernels().kvkeep_before_attention(self.address, x, batch, *turns, query, key, value, gate)
        return query, key, value, gate, x

    def _leave(self, output: Tensor, gate: Tensor | None, residual: Tensor) -> Tensor:
        result = torch.empty_like(residual)
        if self.mlp is not None:
            kernels().kvkeep_after_attention(self.address, output.contiguous(), gate, residual, result)
            return result
        normed = torch.empty_like(residual)
        kernels().kvkeep_before_mlp(self.address, output.contiguous(), gate, residual, result, normed)
        return result + self.parts.added(normed) if self.parts.mlps else result


class FusedLayers(WithPointers):
    """Runs layers of a decoder that follow one another in one call, for tokens whose steps are planned in every layer.
    Their heads have the same shapes, and their rotations the same angles. A call ends at each MLP that modules run."""

    pointers = ("tables",)

    def __init__(self, layers: Sequence[FusedLayer], modules: nn.ModuleList) -> None:
        self.layers, self._modules = layers, modules
        first = layers[0].attention.layer_idx
        self._part = slice(first, first + len(layers))
        self._unchanged = Unchanged([one.layer for one in layers], [norm for one in layers for norm in one.norms])
        self._hooks = [one.layer._forward_hooks for one in layers]
        self._hooks_before = [one.layer._forward_pre_hooks for one in layers]

    def can_run(self, planned: Planned) -> bool:
        """Return whether steps are planned for each layer of the decoder, and none of these is hooked or changed. A
        cache's hook on the input of a layer does not count."""
        layers = {len(steps.planned.by_layer) for steps, _ in planned}
        if layers != {len(self._modules)} or any(self._hooks) or max(map(len, self._hooks_before)) > 1:
            return False
        modules = [*self._modules._modules.values()][self._part]
        return [one.forward for one in modules] == self.layers and self._unchanged()

    @functools.cached_property
    def tables(self) -> list[tuple[Any, slice]]:
        """Of each call: the layers' addresses, and which layers these are."""
        ends = [number for number, one in enumerate(self.layers, 1) if one.mlp is None or number == len(self.layers)]
        return [
            (
                structures.address_table([one.address for one in self.layers[first:last]]),
                slice(self._part.start + first, self._part.start + last),
            )
            for first, last in pairwise([0, *ends])
        ]

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, planned: Planned, writes: Writes) -> Tensor:
        """Return the output of the last layer. x: (1, tokens, hidden). planned: the steps of the tokens. writes: notes
        which of them have written."""
        x, turns = x.clone(memory_format=torch.contiguous_format), _turns(angles, self.layers[0].rotation)
        for layers, part in self.tables:
            last = self.layers[part.stop - self._part.start - 1]
            normed = torch.empty_like(x) if last.mlp is None else None
            run_layers(layers, part, planned, writes, x, *turns, normed)
            if normed is not None:
                x += last.parts.added(normed)
        return x


class FusedList(nn.ModuleList):
    """The layers of a decoder. Its loop over them ends once all of them have run."""

    def __getitem__(self, index: Any) -> Any:
        """Return this list itself for a slice of all layers, of which transformers makes a copy in every pass."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        if index.indices(len(self)) == (0, len(self), 1):
            return self
        return nn.ModuleList([*self._modules.values()][index])

    def __iter__(self) -> Iterator[Any]:
        attender: Any = current_attender()
        for layer in self._modules.values():
            yield layer
            if getattr(attender, "ran", 0) == len(self._modules):
                return


def _turns(angles: tuple[Tensor, Tensor] | None, rotation: Rotation) -> tuple[Tensor | None, Tensor | None]:
    """Return cosines and sines in the kernels' layout, (batch, tokens, channels); None without angles."""
    if angles is None:
        return None, None
    cos, sin = angles
    if rotation.halves:
        cos, sin = (torch.cat((part, part), -1) for part in (cos, sin))
    if cos.dtype != torch.bfloat16 or not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = (part.to(torch.bfloat16).contiguous() for part in (cos, sin))
    return cos, sin


def fuse(model: Any, layers: Any) -> int:
    """Replace norms, MLPs, recurrent modules and ``layers`` of ``model`` by what agrees with them; return the number of
    replaced layers. Without kernels nothing changes."""
    if library() is None:
        return 0
    replace_rotary(model)
    replace_routers(model)
    for module in model.modules():
        # The order matters: reading the weight of a packed matrix unpacks it.
        if "RMSNorm" in type(module).__name__ or "LayerNorm" in type(module).__name__:
            with trial("a norm"):
                fuse_norm(module)
    replace_mlps(model)
    replace_altup(model)
    for module in [*model.modules()]:  # with their norms
        replace_recurrence(module)
    done: list[FusedLayer] = []
    rotations = rotations_of(model)
    for index, layer in enumerate(layers):
        with trial(f"layer {index} runs by its modules"):
            fused = FusedLayer(layer)
            if _agrees(fused, rotations):
                layer.forward = fused
                done.append(fused)
                rotations.sort(key=fused.rotation.__ne__)  # most likely the next layer has the same
    if done and [one.attention.layer_idx for one in done] == [*range(len(layers))]:
        for _, found in groupby(done, functools.partial(_common, model)):
            members = [*found]
            members[0].group = FusedLayers(members, layers)
        if type(layers) is nn.ModuleList:
            layers.__class__ = FusedList
    trim_memory()  # releases the joined matrices
    return len(done)


def _common(model: Any, layer: FusedLayer) -> tuple[Any, ...]:
    """Return what layers that run in one call have in common."""
    kind = layer.attention.config.layer_types[layer.attention.layer_idx] if has_kinds(model) else None
    return kind, layer.hidden, layer.heads, layer.kv_heads, layer.dim, layer.rotation.angles


@torch.no_grad()
def _agrees(fused: FusedLayer, rotations: Sequence[Rotation]) -> bool:
    """Give a fused layer the first rotation and order, and its MLP if possible, with which it agrees with its modules
    on random residuals; return whether there is one. Attention's inputs and the layer's output have to agree to the
    bit: an MLP of the library has been compared with its module (mlps.py). The residuals are two rows at near and far
    positions (some families scale queries at far ones). They are small, so that bfloat16 preserves the sums."""
    if not fused.unchanged():  # hooked: the comparison would run the same modules twice
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, fused.hidden, generator=generator).to(torch.bfloat16) / 64
    places = torch.tensor([[0, 1, 1000, 100_000, 10_000_000]])
    by_modules: dict[tuple[int, bool, bool], tuple[Any, ...]] = {}
    mlps = dict.fromkeys((fused.parts.mlp, None)) if fused.order == IN_TURN else (fused.parts.mlp,)
    for rotation, mlp, order in product(rotations, mlps, fused.parts.orders):
        halves = 1 if rotation.halves else 2
        angle = torch.rand(2, 5, rotation.angles // halves, generator=generator.manual_seed(1)) * 6
        angle = angle.repeat_interleave(2, -1) if rotation.spread else angle.repeat(1, 1, halves)
        angles = (angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)) if rotation.angles else None
        given: dict[str, Any] = {"position_embeddings": angles, "position_ids": places, "use_cache": False}
        if (known := (rotation.angles, rotation.halves, rotation.spread)) not in by_modules:
            by_modules[known] = _watched(fused, functools.partial(fused.plain, x, **given))
        wanted, inputs, options = by_modules[known]
        fused.window = options.get("sliding_window")
        fused.change(rotation, mlp, order)
        found, *attended = _watched(fused, functools.partial(fused, x, **given))
        if not isinstance(wanted, Tensor) or wanted.shape != found.shape or options != attended[1]:
            return False
        if all(map(torch.equal, inputs, attended[0])) and torch.equal(wanted, found):
            return True
    return False


def _watched(fused: FusedLayer, forward: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return what a layer's ``forward`` returns, and queries, keys and values of its attention, and what else that is
    given."""
    config, seen = fused.attention.config, []
    before, trial = config._attn_implementation, f"kvkeep_trial_{id(fused)}"  # a process may load two models

    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = {
            name: one for name, one in kwargs.items() if not (one is None or one is False or isinstance(one, Tensor))
        }
        seen.append((args[:3], given))
        kwargs.pop("softcap", None)  # SDPA refuses it
        return sdpa_attention_forward(module, *args, **kwargs)

    try:
        ALL_ATTENTION_FUNCTIONS[trial] = attention
        config._attn_implementation = trial
        output = forward()
    finally:
        config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[trial]
    ((inputs, given),) = seen
    return output, inputs, given
