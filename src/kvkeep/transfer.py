"""Transfer: the past of a :class:`~kvkeep.cache.KeepCache` as named tensors, and a second cache with the same past."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import NotCarried, UsageError
from kvkeep.memory.extent import ShapeError
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.places import MEMORY, Place
from kvkeep.memory.rows import Rows, concatenated
from kvkeep.policies.methods import Options, Request
from kvkeep.stores.dynamic import DynamicLayer
from kvkeep.stores.recurrent import STATE, RecurrentState

Kind = tuple[str | None, Any, Options]  # method, budget, other options of a cache


def state(cache: Any) -> dict[str, Tensor]:
    """Return the tensors of a cache's state by name, as views if they are in one piece. Raises as :func:`parts`."""
    return {name: tensor_of(part) for name, part in parts(cache).items()}


def tensor_of(part: Tensor | Rows) -> Tensor:
    """Return a part of a cache's state as one tensor, a view if it is in one piece."""
    return part if isinstance(part, Tensor) else concatenated(part, part.first, part.length)


def parts(cache: Any) -> dict[str, Tensor | Rows]:
    """Return a cache's state by name: tensors as views, and the rows of the checkpoint in place. Raises KvkeepError for
    an unfinished step that cannot be undone."""
    cache.stream.roll_back()
    tensors: dict[str, Tensor | Rows] = {}
    for number, holding in _holdings(cache):
        tensors |= {f"layer.{number}.{name}": tensor for name, tensor in holding.state().items()}
    for name, rows in cache.checkpoint_rows():
        if rows.first < rows.length:
            tensors[f"checkpoint.{name}"] = rows
    ledger = cache.ledger
    if ledger.positions.length:
        tensors |= {"positions": ledger.positions.view(), "ids": ledger.ids.view()}
    if ledger.visible is not None:
        tensors["visible"] = ledger.visible
    if cache.positions is not None:
        tensors["cache_positions"] = cache.positions.state()
    return tensors


def _holdings(cache: Any) -> Iterator[tuple[int, Any]]:
    """Yield what each layer holds, with the layer's number; a hybrid layer's recurrent state comes by itself."""
    yield from enumerate(cache.holdings)
    yield from cache.made.beside.items()


def header(cache: Any) -> dict[str, Any]:
    """Return the part of a cache's state that is no tensor, as plain types."""
    return {
        "length": cache.get_seq_length(),
        "rows": cache.rows,
        "first": {name: rows.first for name, rows in cache.checkpoint_rows()},
        "shares": cache.shares,
        "plain": cache.stream.record.plain,
    }


def restore(
    cache: Any,
    names: set[str],
    tensor: Callable[[str], Tensor],
    about: dict[str, Any],
    pieces: Mapping[str, Sequence[Tensor]] = {},
) -> None:
    """Restore what :func:`state` and :func:`header` returned in an empty cache. names: names of the tensors; tensor: a
    function that returns one of them, so that only one is in memory at a time. pieces: tensors in several pieces, in
    the order of their rows; stores of rows hold them without a copy where they can."""
    length, device = about["length"], cache.made.device
    cache.stream.record.begin_with(about["plain"])
    ids, positions = (tensor(name).to(device) if name in names else None for name in ("ids", "positions"))
    visible = tensor("visible").to(device) if "visible" in names else None
    cache.ledger.restore(length, about["rows"], ids, positions, visible)
    for number, holding in _holdings(cache):
        prefix, recurrent = f"layer.{number}.", isinstance(holding, RecurrentState)
        given = {
            name.removeprefix(prefix): [piece.to(device) for piece in pieces.get(name) or [tensor(name)]]
            for name in sorted({*names, *pieces})
            if name.startswith(prefix) and name.startswith(f"{prefix}{STATE}") == recurrent
        }
        if given and isinstance(holding, DynamicLayer):
            holding.adopt(given["keys"], given["values"])
        elif given:
            one = {
                name: parts[0] if prefix + name not in pieces else torch.cat(parts, -2) for name, parts in given.items()
            }
            holding.restore(one, length)
        if recurrent and holding.rows != (about["rows"] if length else 0):
            raise ShapeError(f"layer {number} has a recurrent state of {holding.rows} rows, not of {about['rows']}")
    if cache.positions is not None and "cache_positions" in names:
        cache.positions.restore(tensor("cache_positions"))
    saved = {name.removeprefix("checkpoint.") for name in {*names, *pieces} if name.startswith("checkpoint.")}
    if cache.checkpoint is not None:
        cache.checkpoint.expect(saved)
    for name, rows in cache.checkpoint_rows():
        rows.first = rows.length = about["first"].get(name, 0)
        if name in saved:
            part = f"checkpoint.{name}"
            for piece in pieces[part] if part in pieces else [tensor(part)]:
                rows.adopt(piece)


def home_of_blocks(cache: Any) -> Place:
    """Return the place where blocks are read that ``cache`` is to hold without a copy: that of its checkpoint."""
    home = None if cache.checkpoint is None else cache.checkpoint.home
    return MEMORY if home is None or not home.maps else home


def fork(cache: Any, kind: Kind | None, ids: Sequence[int] | None = None) -> Any:
    """Return a second cache that has read the same text, with the same options or with others (``kind``). ids: the
    text's token ids, for a cache that does not keep them."""
    if kind is not None:
        method, budget, options = kind
        twin = _adopted(cache, Request.parse(method or cache.method.name, budget, **options), ids)
    else:
        twin = copied(cache)
    if twin.exactness is Exactness.EXACT:
        twin.stream.record.keep_ends(cache.stream.record.ends)
    return twin


@contextmanager
def _copying(cache: Any) -> Iterator[None]:
    """Undo an unfinished pass, and check before and after the block that the disk returns what was written: digests of
    the copy are made of what it gets."""
    cache.stream.roll_back()
    cache.stream.disk.check(compare=True)
    yield
    cache.stream.disk.check()


def _begin(cache: Any, twin: Any, length: int, ids: Sequence[int] | None = None) -> None:
    """Give the empty ``twin`` all that ``cache`` has of the first ``length`` tokens, but the entries of full layers."""
    if ids is None or cache.ledger.records:
        copy_ledger(cache.ledger, twin.ledger, length, cache.rows)
    else:
        given = torch.tensor([*ids], dtype=torch.int32, device=twin.made.device)[None, :, None]
        twin.ledger.restore(length, 1, given, torch.arange(length, dtype=torch.int32)[None, :, None].to(given), None)
    twin.stream.record.begin_with(cache.stream.record.plain)
    end, state = cache.get_seq_length(), last_token_state(cache)
    restore_last(twin, {name: tensor.clone() for name, tensor in state.items()}, end)
    _record_as(cache, twin)
    if length < end:
        for _, holding in _moving(twin):
            holding.crop(length - end)


def _record_as(cache: Any, twin: Any) -> None:
    """Let the copy ``twin`` record what a crop of ``cache`` may need, if ``cache`` does."""
    for (_, holding), (_, copy) in zip(_moving(cache), _moving(twin), strict=True):
        if record_as := getattr(copy, "record_as", None):
            record_as(holding)


def copied(cache: Any) -> Any:
    """Return a copy of a cache in separate memory; one tensor is copied at a time. Both read the whole blocks of a
    checkpoint on disk where they lie."""
    with _copying(cache):
        twin, given = cache.__class__(cache.model, request=cache.request), parts(cache)
        if (shares := cache.shares) is not None:
            twin.reset(shares)
        stored = [name for name in given if name.startswith("checkpoint.")]
        others = set(given) - set(stored)
        restore(twin, others, lambda name: tensor_of(given[name]).clone(), header(cache), dict.fromkeys(stored, ()))
        _record_as(cache, twin)
        copies = dict(twin.checkpoint_rows())
        for name, rows in cache.checkpoint_rows():
            for block in rows.freeze(rows.length) if rows.lends else ():
                copies[name].adopt(block)
            for _, piece in rows.read(max(rows.first, copies[name].length), rows.length):
                copies[name].append(piece)
    return twin


def lends(cache: Any) -> bool:
    """Return whether another cache can begin with the first entries of ``cache`` (:func:`begun`): its method is "full",
    or "kv-direct" with keys and values on disk."""
    return all(getattr(cache.layers[layer.index], "lends", False) for layer in cache.geometry.full_layers)


@outside_inference_mode
def begun(cache: Any, length: int) -> Any:
    """Return a second cache that has read the first ``length`` tokens of ``cache``, which :func:`lends` them.

    The two caches share blocks of "full" in memory (:func:`shareable`), and those of a checkpoint on disk. The kernel
    reads them where they lie; only a pass with a mask of the caller's own copies all entries. Raises RuntimeError where
    a sliding window has forgotten what would be needed.
    """
    with _copying(cache):
        twin = cache.__class__(cache.model, request=cache.request)
        _begin(cache, twin, length)
        for layer in cache.geometry.full_layers:
            target, (blocks, rest) = twin.layers[layer.index], cache.layers[layer.index].beginning(length)
            if blocks[0]:
                target.adopt(*blocks)
            if rest:
                _append(target, *rest)
    return twin


def lacks(cache: Any, length: int) -> bool:
    """Return whether the checkpoint has lost entries that the first ``length`` tokens of the text attend to without a
    choice: all of an exact text, else the newest ones."""
    first = max((rows.first for _, rows in cache.checkpoint_rows()), default=0)
    exact = cache.exact_tokens is None or length <= cache.exact_tokens
    return first > 0 and (exact or first >= length - (cache.entries or 0))


def shareable(cache: Any, length: int) -> int:
    """Return how many of the first ``length`` tokens' entries another cache would share in memory with ``cache``: whole
    blocks, if its method is "full", and the CPU kernel attends to its entries in pieces."""
    layers = [cache.layers[layer.index] for layer in cache.geometry.full_layers]
    return min((layer.shareable(length) if isinstance(layer, DynamicLayer) else 0 for layer in layers), default=0)


def _append(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Append entries, (batch, kv_heads, n, dim), to a full layer outside a pass."""
    if isinstance(layer, DynamicLayer):
        layer.append(keys, values)
    else:
        layer.take(keys, values)
        layer.settle()


def copy_ledger(source: Ledger, twin: Ledger, length: int, rows: int) -> None:
    """Copy the first ``length`` slots of ``rows`` rows from the ledger ``source`` to the empty ledger ``twin``, as far
    as ``source`` records them."""
    ids, positions = (
        rows.view(0, length).clone() if source.records else None for rows in (source.ids, source.positions)
    )
    visible = None if source.visible is None else source.visible[:, :length].clone()
    twin.restore(length, rows, ids, positions, visible)


def last_token_state(cache: Any) -> dict[str, Tensor]:
    """Return by name, as views, what layers hold for the next token alone: sliding windows and recurrent states. With
    the keys and values of the full layers, they are all that an exact cache needs to continue there."""
    return {
        f"layer.{number}.{name}": tensor
        for number, holding in _moving(cache)
        for name, tensor in holding.state().items()
    }


def restore_last(cache: Any, state: dict[str, Tensor], length: int) -> None:
    """Restore in a cache of ``length`` tokens what :func:`last_token_state` returned. Raises ShapeError if it does not
    fit the layers."""
    moving = dict(_moving(cache))
    if left := [name for name in state if int(name.split(".")[1]) not in moving]:
        raise ShapeError(f"'{left[0]}' is of no window and no recurrent state")
    for number, holding in moving.items():
        prefix = f"layer.{number}."
        given = {name.removeprefix(prefix): part for name, part in state.items() if name.startswith(prefix)}
        holding.restore(given, length)


def rewind(cache: Any, length: int, state: dict[str, Tensor]) -> None:
    """Go back to the first ``length`` tokens, at which ``state`` was returned by :func:`last_token_state`. Full layers
    are cropped as by :meth:`~kvkeep.cache.KeepCache.crop`; an unfinished pass is undone."""
    cache.stream.roll_back(restoring=True)
    if cache.get_seq_length() < length:
        raise UsageError(f"The cache has read {cache.get_seq_length()} tokens, and cannot go back to {length}.")
    if cache.positions is not None:
        cache.positions.check_cut(length)
    for layer in cache.stream.bounded:
        layer.truncate(length)
    restore_last(cache, {name: tensor.to(cache.made.device) for name, tensor in state.items()}, length)
    cache.stream.forget_from(length)


def _moving(cache: Any) -> Iterator[tuple[int, Any]]:
    """Yield what layers hold for the next token alone, with the layer's number: sliding windows, and recurrent
    states."""
    for number, holding in _holdings(cache):
        if cache.geometry.layers[number].kind != "full" or isinstance(holding, RecurrentState):
            yield number, holding


def _adopted(cache: Any, request: Request, ids: Sequence[int] | None) -> Any:
    """Return a cache of another kind with the entries of ``cache``, copied in chunks. ids: as in :func:`fork`."""
    cache.stream.roll_back()
    twin = cache.__class__(cache.model, request=request)
    length, method = cache.get_seq_length(), request.method
    reason = None if cache.reading else _falls_short(cache, twin)
    if reason is None and not twin.reading:
        reason = _reads_itself(twin)
    if ids is not None and not (cache.stream.record.plain and len(ids) == length and cache.rows <= 1):
        raise UsageError(f"These ids are not those of the {length} tokens that the cache has read.")
    if reason is None and twin.ledger.records and not cache.ledger.records and ids is None:
        reason = f"'{method.name}' needs the ids of the text, which '{cache.method.name}' does not keep"
    if reason is not None:
        raise NotCarried(method.name, reason)
    if not length:
        return twin
    with _copying(cache):
        _begin(cache, twin, length, ids)
        chunk = min(length, twin.stream.chunk)
        for layer in cache.geometry.full_layers:
            for keys, values in _chunks(cache, layer.index, chunk):
                _append(twin.layers[layer.index], keys, values)
    if twin.stream.must_reread and not cache.reading:  # else the caller may know what the second reading gives
        twin.compress()
    return twin


def _falls_short(cache: Any, twin: Any) -> str | None:
    """Return why the entries of ``cache`` are not as good as ``twin`` says; None: they are exact, or both are
    ``endless``, none is lost, and ``twin`` is exact up to no more tokens."""
    if cache.exactness is Exactness.EXACT:
        return None
    if cache.exactness is Exactness.LOSSY or not cache.crops or twin.exact_tokens is None:
        return f"'{cache.method.name}' does not hold all entries exactly"
    if cache.exact_tokens < twin.exact_tokens:
        return f"its first {cache.exact_tokens:,} tokens are exact, and {twin.exact_tokens:,} are wanted"
    return None


def _reads_itself(twin: Any) -> str | None:
    """Return why a cache of the method of ``twin`` can only be filled by reading the text; None if entries suffice."""
    method, only = twin.method, "which only reading the text gives"
    if method.selector.observation_window != 0 and method.exactness is not Exactness.EXACT:
        return f"'{method.name}' ranks by attention scores, {only}"
    if twin.positions is not None:
        return f"'{method.name}' gives entries positions of its own, {only}"
    if method.fate.stores.makes_room:
        return f"'{method.name}' merges by attention, {only}"
    if twin.checkpoint is not None and twin.checkpoint.by_token and twin.spec.kind != "tokens":
        return f"checkpoint kind '{twin.spec}' is of residuals, {only}"
    return None


def _chunks(cache: Any, index: int, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all entries of a layer in order, exactly, (batch, kv_heads, n, dim), at most ``chunk`` at a time."""
    layer, rows = cache.layers[index], cache.rows
    if not cache.stream.streams:
        keys, values = layer.keys, layer.values
    else:
        keys, values = layer.everything()
        keys, values = (part.unflatten(0, (rows, -1)) for part in (keys, values))
    yield from zip(keys.split(chunk, 2), values.split(chunk, 2), strict=True)
