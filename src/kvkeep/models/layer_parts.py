"""The parts of a decoder layer that the library can run: its matrices and norms, which families name differently.

Only names are compared here. Whether a layer computes what the library does with these parts is seen by a trial
(fused.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from kvkeep.models.experts import PackedExperts
from kvkeep.models.packed import PackedLinear
from kvkeep.models.routers import LibraryRouter

_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM-4
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
)
"""What families call the norms before attention, after it, before the MLP, and after it."""
_OF_HEADS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
"""The same of norms of queries and keys. The second are computed after the rotation (Hunyuan)."""


class LayerParts(NamedTuple):
    """The parts of a layer."""

    qkv: Sequence[PackedLinear]
    """The projections of queries, keys and values, or one of all."""
    out: PackedLinear
    gates: Sequence[PackedLinear]
    """The projections of gates and ups, or one of both; of a mixture none."""
    down: Sequence[PackedLinear]
    """The last projection of the MLP; of a mixture none."""
    activation: Any
    """The function of gates; None of a mixture."""
    norms: dict[str, Any]
    """The modules of norms by their names in the library's structure, or None."""
    rotates_first: bool
    """Whether queries and keys are rotated before their norms."""
    mlp: Any
    """The module of the MLP or the mixture."""
    router: LibraryRouter | None
    """The router of a mixture, if the library runs it, and beside it there are only experts."""
    shared: Any
    """A module beside a mixture that every token runs through; or None."""
    residual_scale: float
    """What is multiplied by the outputs of attention and MLP before the residual is added."""

    @property
    def matrices(self) -> list[PackedLinear]:
        """All matrices."""
        return [*self.qkv, self.out, *self.gates, *self.down]

    def mixed(self, normed: Tensor) -> Tensor:
        """Return what a mixture adds to the residual for what enters it, (batch, tokens, hidden)."""
        found = self.mlp(normed)
        found = found[0] if isinstance(found, tuple) else found
        if self.shared is not None:
            found = found + self.shared(normed)
        if (norm := self.norms["post_mlp_norm"]) is not None:
            found = norm(found)
        return found if self.residual_scale == 1 else found * self.residual_scale


def parts_of(layer: Any) -> LayerParts:
    """Return the parts of ``layer``. Raises AttributeError or TypeError if it has others."""
    attention = layer.self_attn
    mlp = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
    mixture = isinstance(getattr(mlp, "experts", None), PackedExperts)
    gates, down, activation = ([], [], None) if mixture else _gated(mlp)
    shared = getattr(layer, "shared_mlp", None)
    names = {name for name, _ in layer.named_children() if name.endswith("norm")}
    places = next((one for one in _NORMS if {*one} - {None} == names), None)
    if places is None:
        raise TypeError("it has norms in other places")
    norms = [None if name is None else getattr(layer, name) for name in places]
    of_heads = next((one for one in _OF_HEADS if hasattr(attention, one[0])), _OF_HEADS[0])
    kinds = ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "query_norm", "key_norm")
    return LayerParts(
        _named(attention, "qkv_proj") or [attention.q_proj, attention.k_proj, attention.v_proj],
        attention.o_proj,
        gates,
        down,
        activation,
        dict(zip(kinds, [*norms, *(getattr(attention, name, None) for name in of_heads)], strict=True)),
        of_heads is _OF_HEADS[1],
        mlp,
        _router_of(mlp) if mixture and shared is None else None,
        shared,
        float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _gated(mlp: Any) -> tuple[list[Any], list[Any], Any]:
    """Return the matrices of a gated MLP, and its activation."""
    gates = _named(mlp, "gate_up_proj") or [mlp.gate_proj, mlp.up_proj]
    return gates, [mlp.down_proj], mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn


def _router_of(mixture: Any) -> LibraryRouter | None:
    found = [vars(one).get("forward") for one in mixture.children() if one is not mixture.experts]
    return found[0] if len(found) == 1 and isinstance(found[0], LibraryRouter) and mixture.experts.down.native else None


def _named(module: Any, name: str) -> list[Any]:
    return [getattr(module, name)] if hasattr(module, name) else []
