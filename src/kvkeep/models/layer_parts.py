"""The parts of a decoder layer that the library can run: its matrices and norms, which families name differently.

Only names are compared here. Whether a layer computes what the library does with these parts is seen by a trial
(layer_trial.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from kvkeep.errors import trial
from kvkeep.models.mlps import Mlp, activation_of, mlp_of
from kvkeep.models.packed import PackedLinear
from kvkeep.native.structures import IN_TURN, SIDE_BY_SIDE, SUMMED_FIRST

_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM-4
    ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),  # AFMoE
    ("input_layernorm", None, "pre_ff_layernorm", None),  # Falcon-H1
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
    ("operator_norm", None, "ffn_norm", None),  # LFM2
    ("norm", None, None, None),  # Nemotron-H
    ("input_layernorm", None, "input_layernorm", None),  # Command-R, Phi-2
)
"""What families call the norms before attention, after it, before the MLP, and after it. Where one norm is both before
attention and before the MLP, these read the same residual."""
_OF_HEADS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))
"""The same of norms of queries and keys. The second are computed after the rotation (Hunyuan)."""
_SIDE_NORM = "post_per_layer_input_norm"
"""The norm of what a layer makes of its side input."""
_ATTENTIONS = ("self_attn", "attention", "mixer")
"""What families call the module of attention."""
_PROJECTIONS = {"keys": "k_proj", "values": "v_proj", "gates": "gate_proj"}
"""What they call the projections beside that of queries, ``q_proj``."""
_JOINED = {"qkv_proj": "joined", "query_key_value": "heads"}
"""What they call one projection of queries, keys and values: of all heads, or head by head."""
_OUTS = ("o_proj", "out_proj", "dense")
"""What they call the output projection."""
CLIP = "clip_qkv"
"""What they call the bound of queries, keys and values, a field of the config (OLMo)."""
_MLPS = ("block_sparse_moe", "mlp", "feed_forward", "shared_mlp")
"""What they call the MLP, or the mixture; another one after it runs beside it (Granite). Nemotron-H has none here."""


class Side(NamedTuple):
    """What a layer makes of its side input, a vector of each token (Gemma 4's embeddings of each layer)."""

    gate: PackedLinear
    """Of the residual: what the input is multiplied by."""
    projection: PackedLinear
    norm: Any
    """The module of the norm of what is projected."""
    activation: int
    """Of the gates: a KvActivation."""


class LayerParts(NamedTuple):
    """The parts of a layer."""

    attention: Any
    """The module of attention."""
    projections: Mapping[str, PackedLinear]
    """The projections of "queries", "keys", "values" and "gates", as far as the layer has them; or one, either "joined"
    (all queries, then all keys, then all values) or of "heads" (query, key and value of one head after the other)."""
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
    scales: dict[str, float]
    """Factors by their names in the library's structure."""
    recurrent: nn.Module | None
    """A recurrent module beside attention (Falcon-H1)."""
    recurrent_scale: float
    """What its output is multiplied by before it is added to that of attention."""
    side: Side | None
    drops: bool
    """Whether it has a dropout in training."""

    @property
    def splits(self) -> bool:
        """Whether the library can run the layer up to its MLP, and nothing but the residual follows that."""
        return self.side is None and self.scales["output_scale"] == 1 and self.orders[0] == IN_TURN

    def added(self, normed: Tensor) -> Tensor:
        """Return what :attr:`mlps` add to the residual for what enters them, (batch, tokens, hidden)."""
        outputs = [one(normed) for one in self.mlps]
        first, *others = [one[0] if isinstance(one, tuple) else one for one in outputs]
        found: Tensor = sum(others, start=first)
        if (norm := self.norms["post_mlp_norm"]) is not None:
            found = norm(found)
        return found if (scale := self.scales["mlp_scale"]) == 1 else found * scale


def parts_of(layer: Any) -> LayerParts:
    """Return the parts of ``layer``. Raises AttributeError or TypeError if it has others."""
    attention = _named(layer, _ATTENTIONS)
    mlps = [one for name in _MLPS if isinstance(one := getattr(layer, name, None), nn.Module)]
    names = {name for name, _ in layer.named_children() if name.endswith("norm")} - {_SIDE_NORM}
    places = next((one for one in _NORMS if {*one} - {None} == names), None)
    if places is None or bool(mlps) != any(places[2:]):
        raise TypeError("it has norms in other places")
    norms = [None if name is None else getattr(layer, name) for name in places]
    of_heads = next((one for one in _OF_HEADS if hasattr(attention, one[0])), _OF_HEADS[0])
    kinds = ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "query_norm", "key_norm")
    found = dict(zip(kinds, [*norms, *(getattr(attention, name, None) for name in of_heads)], strict=True))
    side = _side(layer)
    found |= {"value_norm": getattr(attention, "v_norm", None), "side_norm": side and side.norm}
    same = places[0] is not None and places[0] == places[2]
    recurrent = getattr(layer, "mamba", None)
    return LayerParts(
        attention,
        _projections(attention),
        _named(attention, _OUTS),
        found,
        of_heads is _OF_HEADS[1],
        mlps,
        _side_by_side(mlps) if mlps else None,
        (SIDE_BY_SIDE, SUMMED_FIRST) if same or getattr(layer, "use_parallel_residual", False) else (IN_TURN,),
        _scales(layer, attention),
        recurrent if isinstance(recurrent, nn.Module) else None,
        float(getattr(layer, "ssm_out_multiplier", 1.0)),
        side,
        any(isinstance(one, nn.Dropout) and one.p > 0 for one in layer.modules()),
    )


def _named(module: Any, names: Sequence[str]) -> Any:
    for name in names:
        if (found := getattr(module, name, None)) is not None:
            return found
    raise TypeError(f"it has none of {', '.join(names)}")


def _projections(attention: Any) -> dict[str, PackedLinear]:
    for name, form in _JOINED.items():
        if hasattr(attention, name):
            return {form: getattr(attention, name)}
    found = {"queries": attention.q_proj}
    found |= {part: getattr(attention, name, None) for part, name in _PROJECTIONS.items()}
    return {part: one for part, one in found.items() if one is not None}


def _scales(layer: Any, attention: Any) -> dict[str, float]:
    residual = getattr(layer, "residual_multiplier", 1.0)  # Granite's; the others are Falcon-H1's and Gemma 4's
    found = {
        "input_scale": getattr(layer, "attention_in_multiplier", 1.0),
        "key_scale": getattr(attention, "key_multiplier", 1.0),
        "attention_scale": getattr(layer, "attn_out_multiplier", residual),
        "mlp_scale": residual,
        "output_scale": getattr(layer, "layer_scalar", 1.0),
    }
    return {name: float(one) for name, one in found.items()}


def _side(layer: Any) -> Side | None:
    if (gate := getattr(layer, "per_layer_input_gate", None)) is None:
        return None
    return Side(gate, layer.per_layer_projection, getattr(layer, _SIDE_NORM), activation_of(layer.act_fn))


def _side_by_side(mlps: Sequence[nn.Module]) -> Mlp | None:
    found = None
    with trial("an MLP"):
        found = mlp_of(mlps[-1]) if len(mlps) == 1 else mlp_of(mlps[1]).beside(mlp_of(mlps[0]))
    return found
