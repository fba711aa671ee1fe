"""The parts of a decoder layer that the library can run: its matrices and norms, which families name differently.

Only names are compared here. Whether a layer computes what the library does with these parts is seen by a trial
(fused.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from kvkeep.errors import trial
from kvkeep.models.mlps import Mlp, mlp_of
from kvkeep.models.packed import PackedLinear
from kvkeep.native.structures import IN_TURN, SIDE_BY_SIDE, SUMMED_FIRST

_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM-4
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
    ("operator_norm", None, "ffn_norm", None),  # LFM2
    ("norm", None, None, None),  # Nemotron-H
    ("input_layernorm", None, "input_layernorm", None),  # Command-R, Phi-2
)
"""What families call the norms before attention, after it, before the MLP, and after it. Where one norm is both before
attention and before the MLP, these read the same residual."""
_OF_HEADS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))
"""The same of norms of queries and keys. The second are computed after the rotation (Hunyuan)."""
_OUTS = ("o_proj", "out_proj", "dense")
"""The same of the output projection."""
_MLPS = ("block_sparse_moe", "mlp", "feed_forward", "shared_mlp")
"""What they call the MLP, or the mixture; another one after it runs beside it (Granite). Nemotron-H has none here."""


class LayerParts(NamedTuple):
    """The parts of a layer."""

    attention: Any
    """The module of attention."""
    qkv: Sequence[PackedLinear]
    """The projections of queries, keys and values, or one of all."""
    out: PackedLinear
    norms: dict[str, Any]
    """The modules of norms by their names in the library's structure, or None."""
    rotates_first: bool
    """Whether queries and keys are rotated before their norms."""
    mlps: Sequence[nn.Module]
    """The module of the MLP or the mixture, and that of an MLP beside a mixture; or nothing."""
    mlp: Mlp | None
    """All of these, if the library runs them."""
    orders: Sequence[int]
    """How attention and the MLP may follow each other (KvOrder)."""
    residual_scale: float
    """What is multiplied by the outputs of attention and MLP before the residual is added."""

    def added(self, normed: Tensor) -> Tensor:
        """Return what :attr:`mlps` add to the residual for what enters them, (batch, tokens, hidden)."""
        outputs = [one(normed) for one in self.mlps]
        first, *others = [one[0] if isinstance(one, tuple) else one for one in outputs]
        found: Tensor = sum(others, start=first)
        if (norm := self.norms["post_mlp_norm"]) is not None:
            found = norm(found)
        return found if self.residual_scale == 1 else found * self.residual_scale


def parts_of(layer: Any) -> LayerParts:
    """Return the parts of ``layer``. Raises AttributeError or TypeError if it has others."""
    attention = layer.self_attn if hasattr(layer, "self_attn") else layer.mixer
    if getattr(attention.config, "clip_qkv", None) is not None:  # which the small numbers of a trial do not reach
        raise TypeError("it clips queries, keys and values")
    mlps = [one for name in _MLPS if isinstance(one := getattr(layer, name, None), nn.Module)]
    names = {name for name, _ in layer.named_children() if name.endswith("norm")}
    places = next((one for one in _NORMS if {*one} - {None} == names), None)
    if places is None or bool(mlps) != any(places[2:]):
        raise TypeError("it has norms in other places")
    norms = [None if name is None else getattr(layer, name) for name in places]
    of_heads = next((one for one in _OF_HEADS if hasattr(attention, one[0])), _OF_HEADS[0])
    kinds = ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "query_norm", "key_norm")
    joint = attention.qkv_proj if hasattr(attention, "qkv_proj") else None
    return LayerParts(
        attention,
        [attention.q_proj, attention.k_proj, attention.v_proj] if joint is None else [joint],
        next(one for name in _OUTS if (one := getattr(attention, name, None)) is not None),
        dict(zip(kinds, [*norms, *(getattr(attention, name, None) for name in of_heads)], strict=True)),
        of_heads is _OF_HEADS[1],
        mlps,
        _side_by_side(mlps) if mlps else None,
        (SIDE_BY_SIDE, SUMMED_FIRST) if places[0] is not None and places[0] == places[2] else (IN_TURN,),
        float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _side_by_side(mlps: Sequence[nn.Module]) -> Mlp | None:
    found = None
    with trial("an MLP"):
        found = mlp_of(mlps[-1]) if len(mlps) == 1 else mlp_of(mlps[1]).beside(mlp_of(mlps[0]))
    return found
