"""Compares a fused layer with its modules: nothing is assumed of a family beyond the names of its parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.errors import trial
from kvkeep.models.layer_parts import CLIP
from kvkeep.models.rotary import Rotation


@torch.no_grad()
def agrees(fused: Any, rotations: Sequence[Rotation]) -> bool:
    """Give a fused layer the first rotation and order, and its MLP if possible, with which it agrees with its modules
    on random residuals; return whether there is one. Attention's inputs, the entries that other layers read, and the
    layer's output have to agree to the bit: an MLP of the library has been compared with its module (mlps.py).

    In modules, torch computes the activation of a side input. So the output has to agree to the bit where this input is
    0, and up to rounding elsewhere. A bound of queries, keys and values is lowered for one more comparison, as the
    others may not reach it."""
    if not fused.unchanged():  # hooked: the comparison would run the same modules twice
        return False
    compared = _Comparison(fused)
    mlps = dict.fromkeys((fused.parts.mlp, None)) if fused.parts.splits else (fused.parts.mlp,)
    for rotation, mlp, order in product(rotations, mlps, fused.parts.orders):
        with trial(f"{rotation}"):  # modules refuse angles of another width
            fused.change(rotation, mlp, order)
            if compared.same():
                return compared.same_by_side() and compared.same_where_clipped()
    return False


class _Comparison:
    """Residuals and other arguments for which a fused layer is compared with its modules. The residuals are two rows at
    near and far positions (some families scale queries at far ones). They are small, so that bfloat16 preserves the
    sums."""

    def __init__(self, fused: Any) -> None:
        self.fused, self._generator = fused, torch.Generator().manual_seed(0)
        self._x = self._random(2, 5, fused.hidden, scale=1 / 64)
        attention, side = fused.attention, fused.parts.side
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}
        if not fused.kv_heads:
            shape = 2, fused.heads // attention.num_key_value_groups, 5, fused.dim
            self._shared = {attention.layer_type: (self._random(*shape), self._random(*shape))}
        self._side = None if side is None else torch.zeros(2, 5, side.gate.out_features, dtype=torch.bfloat16)
        self._by_modules: dict[tuple[int, bool, bool], tuple[Any, ...]] = {}

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(torch.bfloat16)

    @property
    def _form(self) -> tuple[int, bool, bool]:
        """What modules see of the rotation."""
        rotation = self.fused.rotation
        return rotation.angles, rotation.halves, rotation.spread

    def same(self, near: float = 0.0) -> bool:
        """Return whether the inputs of attention are equal, and outputs up to ``near`` times the greatest."""
        if self._form not in self._by_modules:
            self._by_modules[self._form] = self._run(self.fused.plain)
        wanted, inputs, options = self._by_modules[self._form]
        self.fused.window = options.get("sliding_window")
        found, attended, given = self._run(self.fused)
        if not isinstance(wanted, Tensor) or wanted.shape != found.shape or options != given:
            return False
        apart = (wanted.float() - found.float()).abs().max()
        return all(map(torch.equal, inputs, attended)) and bool(apart <= near * wanted.float().abs().max())

    def same_by_side(self) -> bool:
        """Return whether the layers agree on a random side input, if they read one."""
        if self._side is None:
            return True
        self._side, self._by_modules = self._random(*self._side.shape), {}
        return self.same(near=0.03)

    def same_where_clipped(self) -> bool:
        """Return whether the layers agree where half of the queries are clipped, if they clip some."""
        fused, config = self.fused, self.fused.attention.config
        if not (bound := getattr(config, CLIP, None)):
            return True
        _, (queries, *_), _ = self._by_modules[self._form]
        try:
            setattr(config, CLIP, float(queries.float().abs().median()))
            self._by_modules = {}
            fused.change(fused.rotation, fused.mlp, fused.order)
            return self.same()
        finally:
            setattr(config, CLIP, bound)
            fused.change(fused.rotation, fused.mlp, fused.order)

    def _run(self, forward: Callable[..., Any]) -> tuple[Any, tuple[Tensor, ...], dict[str, Any]]:
        """Return what a forward returns, the queries, keys and values of its attention and those that it has for other
        layers, and what else its attention is given."""
        fused, rotation, generator = self.fused, self.fused.rotation, torch.Generator().manual_seed(1)
        halves = 1 if rotation.halves else 2
        angle = torch.rand(2, 5, rotation.angles // halves, generator=generator) * 6
        angle = angle.repeat_interleave(2, -1) if rotation.spread else angle.repeat(1, 1, halves)
        angles = (angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)) if rotation.angles else None
        places = torch.tensor([[0, 1, 1000, 100_000, 10_000_000]])
        given: dict[str, Any] = {"position_embeddings": angles, "position_ids": places, "use_cache": False}
        if self._side is not None:
            given["per_layer_input"] = self._side
        shared = dict(self._shared)
        if fused.shares or not fused.kv_heads:
            given["shared_kv_states"] = shared
        output, inputs, options = _watched(fused, functools.partial(forward, self._x, **given))
        if isinstance(output, tuple) and len(output) == 1:
            fused.in_tuple, (output,) = True, output
        return output, (*inputs, *(one for pair in shared.values() for one in pair)), options


def _watched(fused: Any, forward: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return what a layer's ``forward`` returns, and queries, keys and values of its attention, and what else that is
    given."""
    config, seen = fused.attention.config, []
    before, name = config._attn_implementation, f"kvkeep_trial_{id(fused)}"  # a process may load two models

    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = {
            key: one for key, one in kwargs.items() if not (one is None or one is False or isinstance(one, Tensor))
        }
        seen.append((args[:3], given))
        kwargs.pop("softcap", None)  # SDPA refuses it
        return sdpa_attention_forward(module, *args, **kwargs)

    try:
        ALL_ATTENTION_FUNCTIONS[name] = attention
        config._attn_implementation = name
        output = forward()
    finally:
        config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[name]
    ((inputs, given),) = seen
    return output, inputs, given
