"""Checks of a cache that was restored: whatever a file says, the cache is as reading a text leaves it.

Checksums notice damage. These checks notice content that kvkeep does not write, such as an index out of range, before
it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvkeep import transfer
from kvkeep.cache import KeepCache
from kvkeep.memory.extent import ShapeError, within
from kvkeep.memory.rows import BLOCK, Rows
from kvkeep.models.adapter import decoder_of
from kvkeep.stores.layer import Layer
from kvkeep.stores.recurrent import STATE

_ENTRIES = re.compile(r"layer\.\d+\.(resident\.(\d+\.)?)?(keys|values)|checkpoint\..+")
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a part of the state."""


def form_of(part: Tensor | Rows) -> Form:
    """Return the form of a tensor, or of a store that holds at least one row."""
    if isinstance(part, Tensor):
        return tuple(part.shape), part.dtype
    _, row = next(part.read(part.first, part.first + 1))
    return (*row.shape[:-2], part.length - part.first, row.shape[-1]), row.dtype


def check_shares(cache: KeepCache, shares: list[Any], rows: int) -> None:
    """Raise ShapeError unless ``shares`` has entries for each full layer's lanes, on average at most those of
    ``cache``."""
    layers = cache.geometry.full_layers
    if not (cache.reading or cache.method.selector.divides) or len(shares) != len(layers):
        raise ShapeError("it has shares of the budget, and such a cache has none")
    total = torch.zeros(rows, dtype=torch.int64)
    for layer, given in zip(layers, shares, strict=True):
        if len(given) not in (1, layer.kv_heads, rows * layer.kv_heads) or {*map(type, given)} != {int}:
            raise ShapeError(f"layer {layer.index} has no share of the budget for each KV head")
        within("shares", torch.tensor(given), 0, 2**31)
        total += torch.tensor(given).repeat(rows * layer.kv_heads // len(given)).view(rows, -1).sum(1)
    resident = cache.method.division(cache.geometry, cache.entries or 0).resident
    within("shares", total, 0, resident * sum(layer.kv_heads for layer in layers) + 1)


def check_restored(
    cache: KeepCache, state: Mapping[str, Form], pieces: set[str], past: dict[str, Any], ids: Tensor
) -> None:
    """Raise ShapeError unless ``cache`` holds the parts ``state`` and ``pieces``, with the numbers ``past``
    (:func:`kvkeep.transfer.header`), has the sizes of its model and method, and all indices are in range. ids: the
    token ids, (rows, tokens)."""
    forms = {name: form_of(part) for name, part in transfer.parts(cache).items()}
    others = {name: form for name, form in forms.items() if name not in pieces}
    if transfer.header(cache) != past or not pieces <= set(forms) or others != state:
        raise ShapeError(f"it does not hold the tensors of method '{cache.method.name}'")
    _check_ledger(cache, forms, past, ids)
    _check_checkpoint(cache, forms, past)
    for number, (layer, holding) in enumerate(zip(cache.geometry.layers, cache.holdings, strict=True)):
        if isinstance(holding, Layer):
            if holding.length != past["length"]:
                raise ShapeError(f"layer {number} has {holding.length} of {past['length']} tokens")
            holding.check()
        elif f"layer.{number}.keys" in forms:
            length = past["length"] if layer.window is None else min(past["length"], layer.window - 1)
            for kind, width in (("keys", layer.key_dim), ("values", layer.value_dim)):
                _check_shape(f"layer.{number}.{kind}", forms, (past["rows"], layer.kv_heads, length, width))
    _check_dtype(cache, forms)


def check_end(cache: KeepCache, length: int, state: Mapping[str, Tensor]) -> None:
    """Raise ShapeError unless ``state`` has the windows and recurrent states of ``cache``, which has read a text, at
    the block's end after ``length`` tokens."""
    if length % BLOCK or not 0 < length <= cache.get_seq_length():
        raise ShapeError(f"no block ends after {length} tokens")
    now, forms = transfer.last_token_state(cache), {name: form_of(tensor) for name, tensor in state.items()}
    if {name: dtype for name, (_, dtype) in forms.items()} != {name: one.dtype for name, one in now.items()}:
        raise ShapeError(f"it does not have the windows and recurrent states of {length} tokens")
    for name, tensor in now.items():
        _, number, part = name.split(".", 2)
        layer, shape = cache.geometry.layers[int(number)], tuple(tensor.shape)
        if not part.startswith(STATE):
            count = length if layer.window is None else min(length, layer.window - 1)
            shape = (cache.rows, layer.kv_heads, count, layer.key_dim if part == "keys" else layer.value_dim)
        _check_shape(name, forms, shape)


def _check_shape(name: str, forms: Mapping[str, Form], shape: tuple[int, ...]) -> None:
    if forms[name][0] != shape:
        raise ShapeError(f"'{name}' is of shape {forms[name][0]}")


def _check_ledger(cache: KeepCache, forms: Mapping[str, Form], past: dict[str, Any], ids: Tensor) -> None:
    length, rows = past["length"], past["rows"]
    vocabulary = cache.model.get_input_embeddings().num_embeddings
    within("token ids", ids, 0, vocabulary)
    wanted: dict[str, Form] = {"visible": ((rows, length), torch.bool)} if "visible" in forms else {}
    if cache.ledger.records:
        wanted |= dict.fromkeys(("positions", "ids"), ((rows, length, 1), torch.int32))
        looked_up = getattr(decoder_of(cache.model), "rotary_emb", None) is None
        limit = (cache.geometry.max_positions if looked_up else None) or 2**31
        within("positions", cache.ledger.positions.view(), 0, limit)
        within("ids", cache.ledger.ids.view(), 0, vocabulary)
    if (ids.shape != (rows, length) and ids.numel()) or wanted != {
        name: forms[name] for name in ("visible", "positions", "ids") if name in forms
    }:
        raise ShapeError(f"its ids are not of {rows} rows of {length} tokens")
    if cache.positions is not None:
        cache.positions.check(rows, length, len(cache.layers))


def _check_checkpoint(cache: KeepCache, forms: Mapping[str, Form], past: dict[str, Any]) -> None:
    """Check the rows of a checkpoint: residuals of each token, or as many evicted keys as values."""
    spans = {name: (rows.first, rows.length) for name, rows in cache.checkpoint_rows()}
    for name, (first, end) in spans.items():
        kind, _, number = name.partition(".")
        layer, capacity = cache.geometry.layers[int(number)], cache.checkpoint.capacity  # type: ignore[union-attr]
        if kind == "residual":
            lanes, width = past["rows"], cache.geometry.hidden_size
        else:
            lanes, width = past["rows"] * layer.kv_heads, layer.key_dim if "keys" in kind else layer.value_dim
        if first < end:
            _check_shape(f"checkpoint.{name}", forms, (lanes, end - first, width))
        if (kind == "residual" and end != past["length"]) or spans[name.replace("keys", "values")] != (first, end):
            raise ShapeError(f"'checkpoint.{name}' is not of all tokens")
        in_pages = first % BLOCK == 0 and cache.checkpoint.beginning(int(number)) == BLOCK  # type: ignore[union-attr]
        if first and end - first != capacity and not in_pages:
            raise ShapeError(f"'checkpoint.{name}' cannot have lost entries")


def _check_dtype(cache: KeepCache, forms: Mapping[str, Form]) -> None:
    """Raise ShapeError unless all entries have one dtype: the model's, or a 16-bit one if it ran under autocast."""
    model_dtype = next(cache.model.parameters()).dtype
    found = {dtype for name, (_, dtype) in forms.items() if _ENTRIES.fullmatch(name)}
    if len(found) > 1 or any(
        one != model_dtype and not (model_dtype == torch.float32 and one.is_floating_point and one.itemsize == 2)
        for one in found
    ):
        raise ShapeError(f"its entries are not all of {str(model_dtype).removeprefix('torch.')}")
