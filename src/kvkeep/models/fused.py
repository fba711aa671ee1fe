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
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.errors import trial
from kvkeep.models.altup import replace_altup
from kvkeep.models.forward import current_attender
from kvkeep.models.layer_parts import CLIP, parts_of
from kvkeep.models.layer_trial import agrees
from kvkeep.models.mlps import Mlp, joined, replace_mlps
from kvkeep.models.norms import FusedNorm, fuse_norm, ours
from kvkeep.models.packed import PackedLinear, WithPointers
from kvkeep.models.recurrences import replace_recurrence
from kvkeep.models.rotary import Rotation, has_kinds, replace_rotary, rotations_of
from kvkeep.models.routers import replace_routers
from kvkeep.models.unchanged import Unchanged
from kvkeep.native import structures
from kvkeep.native.library import kernels, library, trim_memory
from kvkeep.native.structures import KvLayer, address_of, array
from kvkeep.step.native import run_layers
from kvkeep.step.plan import Planned, Writes
from kvkeep.step.scores import CAP
from kvkeep.step.sinks import sinks_of

_SIDE_WIDTH = "hidden_size_per_layer_input"
"""The attribute of layers that take a side input, or None, as their second argument."""
_TAKEN = {
    "attention_mask", "cache", "layer_past", "position_embeddings", "per_layer_input", "shared_kv_states",
    "mamba_attention_mask",
}  # fmt: skip
"""Arguments of layers that do not reach their attention."""


class FusedLayer(WithPointers):
    """Replaces the forward of a decoder layer."""

    pointers = ("struct", "address")

    def __init__(self, layer: Any) -> None:
        """Raise AttributeError or TypeError if the layer has another layout."""
        self.layer, self.parts = layer, parts_of(layer)
        parts, self.attention = self.parts, self.parts.attention
        self.dim = getattr(self.attention, "head_dim", None) or self.attention.head_size
        self.mlp = parts.mlp
        """Its MLP or mixture; None: modules run it, or it has none."""
        projections, queries = parts.projections, parts.out.in_features
        first, keys = next(iter(projections.values())), projections.get("keys")
        self.hidden, self.heads = first.in_features, queries // self.dim
        self.gated = 2 if "gates" in projections else int("keys" in projections and first.out_features == 2 * queries)
        """Where the gates of attention's output are: 1: after the queries of each head, in their projection
        (Qwen3-Next); 2: in a projection of their own (AFMoE); 0: there are none."""
        one_of_all = bool({"joined", "heads"} & {*projections})
        key = (first.out_features - queries) // 2 if one_of_all else 0 if keys is None else keys.out_features
        self.kv_heads = key // self.dim
        """0: it reads the entries of an earlier layer."""
        outputs = {"queries": (1 + (self.gated == 1)) * queries, "keys": key, "values": key, "gates": queries}
        outputs |= dict.fromkeys(("joined", "heads"), queries + 2 * key)
        shapes = {name: (one.out_features, one.in_features) for name, one in projections.items()}
        wanted = {name: (outputs[name], self.hidden) for name in projections}
        if shapes != wanted or (parts.out.out_features, queries) != (self.hidden, self.heads * self.dim):
            raise TypeError("its matrices do not have the shapes of Llama's")
        matrices = [*projections.values(), parts.out, *([] if parts.side is None else parts.side[:2])]
        if self.dim % 2 or any(type(one) is not PackedLinear or not one.plain for one in matrices):
            raise TypeError("its matrices are not the library's, or its heads have an odd width")
        fused: dict[str, FusedNorm | None] = {name: norm and norm.forward for name, norm in parts.norms.items()}
        if any(norm is not None and not isinstance(norm, FusedNorm) for norm in fused.values()):
            raise TypeError("a norm is not the library's")
        of_heads = (
            ("query_norm", 1 if self.gated == 1 else self.heads),
            ("key_norm", self.kv_heads),
            ("value_norm", 1),
        )
        for name, heads in of_heads:
            if (norm := fused[name]) is not None and norm.weight.numel() not in (self.dim, heads * self.dim):
                raise TypeError("its queries, keys and values have norms of another width")
        self._weights, self.norms = fused, [norm for norm in fused.values() if norm is not None]
        self.unchanged = Unchanged([layer], self.norms)
        self._projections = joined([*projections.values()])
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
        if not parts.splits and self.mlp is None:
            raise TypeError("its MLP, which reads what attention reads or is not the last part, is not the library's")
        self.shares = bool(getattr(self.attention, "store_full_length_kv", False))
        """Whether later layers read its entries (Gemma 4)."""
        self.window: int | None = None
        """The number of entries that its attention sees; None: all."""
        self.in_tuple = False
        """Whether the layer returns its output in a tuple."""
        self.group: FusedLayers | None = None
        """Runs this layer and those after it that rotate by the same angles; None where an earlier layer runs it."""

    @property
    def separate(self) -> bool:
        """Whether it needs a call of its own: it shares entries with other layers, or has a recurrent module or a side
        input."""
        return self.shares or not self.kv_heads or self.parts.recurrent is not None or self.parts.side is not None

    @functools.cached_property
    def struct(self) -> KvLayer:
        """The layer as a struct for the kernels. Its tensors must outlive it."""
        parts, projections = self.parts, self._projections
        struct = KvLayer(
            qkv=tuple(part.struct for part in projections),
            gated=self.gated,
            by_head="heads" in parts.projections,
            values_are_keys="keys" in parts.projections and "values" not in parts.projections,
            out=parts.out.struct,
            qkv_bias=tuple(array(part.bias) for part in projections),
            out_bias=array(parts.out.bias),
            sinks=array(self.sinks),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=self.dim,
            rotated=self.rotation.channels,
            rotation=self.rotation.kind,
            order=self.order,
            rotates_first=parts.rotates_first,
            clip=getattr(self.attention.config, CLIP, None) or 0.0,
            scaling=self.attention.scaling,
            cap=getattr(self.attention, CAP, None) or 0.0,
            **parts.scales,
        )
        mlp = None if self.mlp is None else self.mlp.struct
        if mlp is not None:
            struct.mlp = address_of(mlp)
        matrices = [*projections, parts.out]
        if parts.side is not None:
            struct.side_gate, struct.side_projection = parts.side.gate.struct, parts.side.projection.struct
            struct.side_activation = parts.side.activation
            matrices += parts.side[:2]
        for name, norm in self._weights.items():
            if norm is not None:
                setattr(struct, name, norm.struct)
        # Keeps the buffers alive as long as the pointers, even if the modules move.
        struct.kept = [mlp, *(buffer for part in matrices for buffer in part.buffers())]
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

    def scaled_as_before(self) -> bool:
        """Return whether its output is multiplied by the number that it was compared with."""
        scale = self.layer._buffers.get("layer_scalar")
        return scale is None or float(scale) == self.parts.scales["output_scale"]

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's original forward."""
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the layer's original forward."""
        cache = kwargs["cache"] if "cache" in kwargs else kwargs.get("layer_past")
        angles, mask = kwargs.get("position_embeddings"), kwargs.get("attention_mask")
        hooks = getattr(cache, "hooks", None)
        if hooks is not None and self.attention.layer_idx < hooks.ran:
            return self._returned(hidden_states)
        side, *rest = args if args and hasattr(self.layer, _SIDE_WIDTH) else (kwargs.get("per_layer_input"), *args)
        interface = ALL_ATTENTION_FUNCTIONS.get(self.attention.config._attn_implementation)
        if (
            rest
            or interface is None
            or (0 if angles is None else angles[0].shape[-1]) != self.rotation.angles
            or not ours(hidden_states)
            or (side is not None and not ours(side))
            or (side is None) != (self.parts.side is None)
            or kwargs.get("output_attentions")
            or (self.parts.drops and self.layer.training)
            or not self.unchanged()
            or not self.scaled_as_before()
        ):
            return self.plain(hidden_states, *args, **kwargs)
        more = {name: one for name, one in kwargs.items() if name not in _TAKEN}
        scales = self._scales(kwargs["position_ids"]) if self.beta else None
        if (
            self.group is not None
            and scales is None
            and hooks is not None
            and (planned := hooks.every_layer())
            and self.group.can_run(planned)
        ):
            hooks.ran = self.attention.layer_idx + len(self.group.layers)
            return self._returned(self.group(hidden_states, angles, planned, hooks.writes))
        added = self._recurrent(hidden_states, cache, kwargs.get("mamba_attention_mask"))
        query, key, value, gate, residual = self._enter(hidden_states, angles)
        if scales is not None:
            query *= scales
        if not self.kv_heads:
            key, value = kwargs["shared_kv_states"][self.attention.layer_type]
        elif cache is not None:
            key, value = cache.update(key, value, self.attention.layer_idx)
        if self.shares:
            kwargs["shared_kv_states"][self.attention.layer_type] = key, value
        if self.window is not None:
            more["sliding_window"] = self.window
        if hasattr(self.attention, "sinks"):
            more["s_aux"] = self.attention.sinks
        if hasattr(self.attention, CAP):
            more["softcap"] = getattr(self.attention, CAP)
        output, _ = interface(
            self.attention, query, key, value, mask, dropout=0.0, scaling=self.attention.scaling, **more
        )
        return self._returned(self._leave(output, gate, added, side, residual))

    def _returned(self, output: Tensor) -> Any:
        return (output,) if self.in_tuple else output

    def _scales(self, positions: Tensor) -> Tensor | None:
        """Return the factors of queries, (batch or 1, 1, tokens, 1) bfloat16; None: all are 1."""
        if int(positions.max()) < self.scaled_from:
            return None
        # torch's logarithms of float32 differ between processors.
        scales = [1 + self.beta * math.log(1 + max(0, one) // self.scaled_from) for one in positions.flatten().tolist()]
        return torch.tensor(scales).to(torch.bfloat16).view(len(positions), 1, -1, 1)

    def _recurrent(self, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor | None:
        """Return the output of the recurrent module beside attention, (batch, tokens, hidden); None without one."""
        if (module := self.parts.recurrent) is None:
            return None
        norm, scale = self._weights["input_norm"], self.parts.recurrent_scale
        output: Tensor = module(hidden_states=x if norm is None else norm(x), cache=cache, attention_mask=mask)
        return (output if scale == 1 else output * scale).contiguous()

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

    def _leave(
        self, output: Tensor, gate: Tensor | None, added: Tensor | None, side: Tensor | None, residual: Tensor
    ) -> Tensor:
        result, given = torch.empty_like(residual), (self.address, output.contiguous(), gate, added)
        if self.mlp is not None:
            side = None if side is None else side.contiguous()
            kernels().kvkeep_after_attention(*given, side, residual, result)
            return result
        normed = torch.empty_like(residual)
        kernels().kvkeep_before_mlp(*given, residual, result, normed)
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
        same = [one.forward for one in modules] == self.layers and self._unchanged()
        return same and all(one.scaled_as_before() for one in self.layers)

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
    for holder in model.modules():
        for module in holder.children():
            # The order matters: reading the weight of a packed matrix unpacks it.
            if "RMSNorm" in type(module).__name__ or "LayerNorm" in type(module).__name__:
                with trial("a norm"):
                    fuse_norm(module, getattr(holder, "head_dim", None))
    replace_mlps(model)
    replace_altup(model)
    for module in [*model.modules()]:  # with their norms
        replace_recurrence(module)
    done: list[FusedLayer] = []
    rotations = rotations_of(model)
    for index, layer in enumerate(layers):
        with trial(f"layer {index} runs by its modules"):
            fused = FusedLayer(layer)
            if agrees(fused, rotations):
                layer.forward = fused
                done.append(fused)
                rotations.sort(key=fused.rotation.__ne__)  # most likely the next layer has the same
    if done and [one.attention.layer_idx for one in done] == [*range(len(layers))]:
        for _, found in groupby(done, functools.partial(_common, model)):
            members = [*found]
            if not members[0].separate:
                members[0].group = FusedLayers(members, layers)
        if type(layers) is nn.ModuleList:
            layers.__class__ = FusedList
    trim_memory()  # releases the joined matrices
    return len(done)


def _common(model: Any, layer: FusedLayer) -> tuple[Any, ...]:
    """Return what layers that run in one call have in common."""
    kind = layer.attention.config.layer_types[layer.attention.layer_idx] if has_kinds(model) else None
    return kind, layer.separate, layer.hidden, layer.heads, layer.kv_heads, layer.dim, layer.rotation.angles
