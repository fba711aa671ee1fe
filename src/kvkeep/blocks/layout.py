"""Checks of a session's tensors against the cache that restores them.

:func:`check_tensors` runs before a tensor is used. It checks names, shapes and dtypes of entries, checkpoint rows, ids
and positions. :func:`check_restored` runs afterwards. It checks that each part holds the tensors of the session, and
that all indices are in range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep import transfer
from kvkeep.cache import KeepCache
from kvkeep.geometry import LayerGeometry
from kvkeep.memory.extent import ShapeError, within
from kvkeep.memory.rows import Rows
from kvkeep.models.adapter import decoder_of
from kvkeep.stores.layer import Layer
from kvkeep.stores.recurrent import STATE

_OF_LAYER = re.compile(r"layer\.(0|[1-9][0-9]{0,5})\.(.+)")
_OF_ROWS = re.compile(r"checkpoint\.((keys|values|residual)\.(0|[1-9][0-9]{0,5}))")
NAME_OF_IDS = "token_ids"
_ENTRIES = re.compile(r"layer\.\d+\.(resident\.(\d+\.)?)?(keys|values)|checkpoint\..+")


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, part: Tensor | Rows) -> TensorForm:
        """Return the form of a tensor, or of a store that holds at least one row."""
        if isinstance(part, Tensor):
            return cls(tuple(part.shape), part.dtype)
        _, row = next(part.read(part.first, part.first + 1))
        return cls((*row.shape[:-2], part.length - part.first, row.shape[-1]), row.dtype)


def check_shares(cache: KeepCache, shares: list[Any], rows: int) -> None:
    """Raise ShapeError unless ``shares`` has entries for each full layer's lanes, on average at most those of
    ``cache``."""
    layers = cache.geometry.full_layers
    if not (cache.reading or cache.method.selector.divides) or len(shares) != len(layers):
        raise ShapeError("it has shares of the budget, and such a cache has none")
    for layer, of_layer in zip(layers, shares, strict=True):
        if type(of_layer) is not list or len(of_layer) not in (1, layer.kv_heads, rows * layer.kv_heads):
            raise ShapeError(f"layer {layer.index} has no share of the budget for each KV head")
        if any(type(share) is not int or not 0 <= share < 2**31 for share in of_layer):
            raise ShapeError(f"layer {layer.index} has a share of the budget that is not a number of entries")
    resident = cache.method.division(cache.geometry, cache.entries or 0).resident
    for row in range(max(rows, 1)):
        lanes = [
            of_layer * (max(rows, 1) * layer.kv_heads // len(of_layer))
            for layer, of_layer in zip(layers, shares, strict=True)
        ]
        parts = [
            sum(of_layer[row * layer.kv_heads :][: layer.kv_heads])
            for layer, of_layer in zip(layers, lanes, strict=True)
        ]
        if sum(parts) > resident * sum(layer.kv_heads for layer in layers):
            raise ShapeError("its shares exceed the budget")


def check_tensors(cache: KeepCache, stored: Mapping[str, TensorForm], past: dict[str, Any]) -> None:
    """Raise ShapeError unless names, shapes and dtypes are those of ``cache`` after ``past["length"]`` tokens in
    ``past["rows"]`` rows."""
    length, rows = past["length"], past["rows"]
    if length and not rows:
        raise ShapeError("it has tokens and no rows")
    ids = stored.get(NAME_OF_IDS)
    if ids not in (TensorForm((rows, length), torch.int32), TensorForm((0,), torch.int32)):
        raise ShapeError(f"'{NAME_OF_IDS}' is not {rows} rows of {length} ids")
    expected = {
        "positions": (TensorForm((rows, length, 1), torch.int32), cache.ledger.records and length > 0),
        "ids": (TensorForm((rows, length, 1), torch.int32), cache.ledger.records and length > 0),
        "visible": (TensorForm((rows, length), torch.bool), "visible" in stored),
        "cache_positions": (None, cache.positions is not None),
    }
    for name, (form, wanted) in expected.items():
        if (name in stored) != wanted or (wanted and form is not None and stored[name] != form):
            raise ShapeError(f"'{name}' is missing, or of another shape or dtype")
    for name, one in stored.items():
        if name in expected or name == NAME_OF_IDS:
            continue
        if (match := _OF_LAYER.fullmatch(name)) is not None and int(match[1]) < len(cache.layers):
            _check_part(cache, int(match[1]), match[2], one, past)
        elif (match := _OF_ROWS.fullmatch(name)) is not None and cache.checkpoint is not None:
            _check_rows(cache, match[1], match[2], int(match[3]), one, past)
        else:
            raise ShapeError(f"'{name}' does not belong to such a cache")
    _check_first(cache, stored, past)


def _check_part(cache: KeepCache, number: int, name: str, one: TensorForm, past: dict[str, Any]) -> None:
    """Check entries of a layer. The part that restores another tensor checks it."""
    layer, state = cache.geometry.layers[number], cache.holdings[number]
    if name.startswith(STATE) and number in cache.made.states:
        return
    if isinstance(state, Layer):
        if name.startswith("resident.") and name.rpartition(".")[2] in ("keys", "values"):
            _check_entries(f"layer.{number}.{name}", one, layer, 3)
        return
    if not layer.owns_entries or name not in ("keys", "values"):
        raise ShapeError(f"'layer.{number}.{name}' does not belong to such a cache")
    _check_entries(f"layer.{number}.{name}", one, layer, 4)
    length = past["length"] if layer.window is None else min(past["length"], layer.window - 1)
    if one.shape[:3] != (past["rows"], layer.kv_heads, length):
        raise ShapeError(f"'layer.{number}.{name}' does not have the entries of {length} tokens")


def _check_entries(name: str, one: TensorForm, layer: LayerGeometry, axes: int) -> None:
    width = layer.key_dim if name.endswith("keys") else layer.value_dim
    if len(one.shape) != axes or one.shape[-1] != width or not one.dtype.is_floating_point:
        raise ShapeError(f"'{name}' does not have the width of the model's entries")


def _check_rows(cache: KeepCache, name: str, kind: str, number: int, one: TensorForm, past: dict[str, Any]) -> None:
    """Check rows of a checkpoint: residuals of each token, or evicted entries."""
    known = {known for known, _ in cache.checkpoint_rows()} | {"residual.0"}
    if name not in known or (kind == "residual") != cache.checkpoint.by_token:  # type: ignore[union-attr]
        raise ShapeError(f"'checkpoint.{name}' does not belong to such a cache")
    layer = cache.geometry.layers[number]
    if kind == "residual":
        lanes, width = past["rows"], cache.geometry.hidden_size
    else:
        lanes, width = past["rows"] * layer.kv_heads, layer.key_dim if kind == "keys" else layer.value_dim
    if len(one.shape) != 3 or (one.shape[0], one.shape[2]) != (lanes, width) or not one.dtype.is_floating_point:
        raise ShapeError(f"'checkpoint.{name}' is of another shape or dtype")


def _check_first(cache: KeepCache, stored: Mapping[str, TensorForm], past: dict[str, Any]) -> None:
    """Check the first rows of a checkpoint: they are equal within a layer, and residuals end at the last token."""
    names = {name for name, _ in cache.checkpoint_rows()}
    names |= {name.removeprefix("checkpoint.") for name in stored if name == "checkpoint.residual.0"}
    if set(past["first"]) != names:
        raise ShapeError("its checkpoint is not that of such a cache")
    for name, first in past["first"].items():
        one, twin = stored.get(f"checkpoint.{name}"), name.replace("keys.", "values.")
        end = first + (one.shape[1] if one is not None else 0)
        other = stored.get(f"checkpoint.{twin}")
        capacity = cache.checkpoint.capacity  # type: ignore[union-attr]
        count = end - first
        if name.startswith("residual.") and end != past["length"]:
            raise ShapeError(f"'checkpoint.{name}' does not have the residuals of {past['length']} tokens")
        if first and (capacity is None or count != capacity):
            raise ShapeError(f"'checkpoint.{name}' cannot have lost entries")
        if past["first"][twin] != first or (other.shape[1] if other is not None else 0) != count:
            raise ShapeError(f"'checkpoint.{name}' and its values are not of the same entries")


def check_restored(
    cache: KeepCache, stored: Mapping[str, TensorForm], ids: Mapping[str, Tensor], past: dict[str, Any]
) -> None:
    """Raise ShapeError unless ``cache`` holds the tensors ``stored`` and all its indices are in range. ids: the tensors
    of token ids."""
    length, rows = past["length"], past["rows"]
    if (cache.get_seq_length(), cache.rows) != (length, rows if length else cache.rows):
        raise ShapeError(f"its layers are not of {length} tokens")
    for state in cache.holdings:
        if isinstance(state, Layer):
            if state.length != length:
                raise ShapeError(f"layer {state.index} has {state.length} of {length} tokens")
            state.check()
    if cache.positions is not None:
        cache.positions.check(rows, length, len(cache.layers))
    again = transfer.parts(cache)
    forms = {name: TensorForm.of(one) for name, one in again.items()}
    if forms != {name: one for name, one in stored.items() if name != NAME_OF_IDS}:
        raise ShapeError(f"it does not hold the tensors of method '{cache.method.name}'")
    vocabulary = cache.model.get_input_embeddings().num_embeddings
    for name, numbers in ids.items():
        within(name, numbers, 0, vocabulary)
    if "positions" in again:
        looked_up = getattr(decoder_of(cache.model), "rotary_emb", None) is None
        within(
            "positions",
            cache.ledger.positions.view(),
            0,
            (cache.geometry.max_positions if looked_up else None) or 2**31,
        )
    _check_dtype(cache, forms)


def _check_dtype(cache: KeepCache, tensors: Mapping[str, TensorForm]) -> None:
    """Raise ShapeError unless all entries have one dtype: the model's, or a 16-bit one if it ran under autocast."""
    model_dtype = next(cache.model.parameters()).dtype
    found = {one.dtype for name, one in tensors.items() if _ENTRIES.fullmatch(name)}
    if len(found) > 1 or any(
        one != model_dtype and not (model_dtype == torch.float32 and one.itemsize == 2) for one in found
    ):
        raise ShapeError(f"its entries are not all of {str(model_dtype).removeprefix('torch.')}")
