"""What many tests do: texts, readings, generations, and what a cache holds, looked at from outside."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as memoised
from typing import Any

import pytest
import torch
from families import VOCABULARY, tiny
from torch import Tensor
from transformers import DynamicCache, set_seed

from kvkeep import KeepCache
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.engine.sampling import Sampling
from kvkeep.memory.places import Disk
from kvkeep.memory.rows import Buffer
from kvkeep.stores.in_order import Newest
from kvkeep.stores.layer import Layer

PROMPT, NEW = 45, 4
PLAIN_PATH = {"KVKEEP_CPU": "plain", "ATEN_CPU_CAPABILITY": "default"}
"""The environment of the library's plain path, and torch's."""


# -- texts --------------------------------------------------------------------------------------------


def prompt(rows: int = 1, length: int = PROMPT, seed: int | None = None) -> Tensor:
    """Rows of tokens, no token twice where there are enough: equal tokens have keys of equal norm."""
    generator = torch.Generator().manual_seed(rows if seed is None else seed)
    if length > VOCABULARY - 2:
        return torch.randint(2, VOCABULARY, (rows, length), generator=generator)
    return torch.stack([torch.randperm(VOCABULARY - 2, generator=generator)[:length] + 2 for _ in range(rows)])


def padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of these lengths, padded at the left, and their mask."""
    ids = prompt(len(lengths), max(lengths))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = mask[row, : max(lengths) - length] = 0
    return ids, mask


# -- readings -----------------------------------------------------------------------------------------


def stock(model: Any) -> DynamicCache:
    """transformers' own cache."""
    return DynamicCache(config=(tiny(model) if isinstance(model, str) else model).config)


def forward(model: Any, cache: Any, tokens: Tensor, **options: Any) -> Any:
    """Read ids (rows, n) or vectors (rows, n, hidden) at once. ``model``: or its family."""
    given = {"input_ids" if tokens.ndim == 2 else "inputs_embeds": tokens, "cache": cache}
    with torch.no_grad():
        return (tiny(model) if isinstance(model, str) else model)(**given, **options)


def step(model: Any, cache: Any, tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Return the last logits of a forward pass, or with ``logits_to_keep=0`` all of them."""
    return forward(model, cache, tokens, attention_mask=mask, **({"logits_to_keep": 1} | options)).logits


def read(model: Any, cache: Any, tokens: Tensor, mask: Tensor | None = None, single: int = NEW) -> Tensor:
    """Read all but the last ``single`` tokens at once and those one by one; return the logits after each part."""
    length, logits = tokens.shape[1], []
    mask = torch.ones(tokens.shape[:2], dtype=torch.long) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for low, high in [(0, length - single), *((at, at + 1) for at in range(length - single, length))]:
        place = {"position_ids": positions[:, low:high]}
        logits.append(step(model, cache, tokens[:, low:high], mask[:, :high], **place))
    return torch.cat(logits, 1)


def expected(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return transformers' own logits of all positions of a text, computed once for each."""
    return _expected(model, _frozen(tokens.tolist()), None if mask is None else _frozen(mask.tolist()))


def _frozen(rows: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, rows))


@memoised
def _expected(model: Any, tokens: tuple[tuple[int, ...], ...], mask: tuple[tuple[int, ...], ...] | None) -> Tensor:
    flags = torch.ones(len(tokens), len(tokens[0]), dtype=torch.long) if mask is None else torch.tensor(mask)
    positions = (flags.cumsum(1) - 1).clamp(min=0)
    return step(model, stock(model), torch.tensor(tokens), flags, position_ids=positions, logits_to_keep=0)


def generate(family: str, cache: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """transformers' own generation of :data:`NEW` tokens: greedy, unless ``options`` say otherwise."""
    set_seed(5)
    return tiny(family).generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        cache=cache,
        return_dict_in_generate=True,
        output_logits=True,
        **({"do_sample": False, "max_new_tokens": NEW} | options),
    )


class Drafted(Answer):
    """An answer of kvkeep's engine, with the logits of its tokens."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.logits: list[Tensor] = []

    def take(self, token: int, logits: Tensor | None = None) -> None:
        assert logits is not None
        self.logits.append(logits[None])
        super().take(token, logits)

    @property
    def sequences(self) -> Tensor:
        """All tokens, (1, tokens)."""
        return torch.tensor([[*self.ask.prompt, *self.tokens]])


def drafted(
    model: Any, cache: Any, ids: Tensor, new: int = NEW, sampling: Sampling | None = None, copies: bool = True
) -> Drafted:
    """The answer of kvkeep's engine to a prompt, (1, tokens)."""
    scheduler = Scheduler(model, packed=False)
    answer = Drafted(Ask(ids[0].tolist(), new, sampling or Sampling()), cache, None, [], None)
    before = model.generation_config.prompt_lookup_num_tokens
    model.generation_config.prompt_lookup_num_tokens = before if copies else 0
    try:
        scheduled = scheduler.add(answer)
        while not scheduled.give(scheduler.step()[0].logits):
            pass
    finally:
        model.generation_config.prompt_lookup_num_tokens = before
    return answer


def generated(family: str, lengths: tuple[int, ...], **options: Any) -> Any:
    """What transformers' own cache gives for :func:`padded` rows, computed once."""
    return _generated(family, lengths, tuple(options.items()))


def answered(family: str, ids: Tensor) -> Any:
    """What transformers' own cache gives for a text, computed once."""
    return _answered(family, _frozen(ids.tolist()))


@memoised
def _answered(family: str, ids: tuple[tuple[int, ...], ...]) -> Any:
    return generate(family, stock(family), torch.tensor(ids))


@memoised
def _generated(family: str, lengths: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    return generate(family, stock(family), *padded(list(lengths)), **dict(options))


# -- comparisons --------------------------------------------------------------------------------------


def assert_near(ours: Tensor, theirs: Tensor, within: float = 2e-4) -> None:
    """Equal up to the order in which numbers are added."""
    torch.testing.assert_close(ours, theirs, atol=within, rtol=within)


def assert_same(ours: Any, theirs: Any) -> None:
    """The same tokens were generated, from the same logits."""
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for mine, yours in zip(ours.logits, theirs.logits, strict=True):
        assert_near(mine, yours)


# -- what a cache holds -------------------------------------------------------------------------------


def bounded(cache: KeepCache) -> list[Layer]:
    """The layers whose entries kvkeep streams."""
    return [layer for layer in cache.layers if isinstance(layer, Layer)]


def slots_of(layer: Layer) -> list[list[int]]:
    """The slots each lane holds, read from the banks themselves, in the order in which they lie."""
    if isinstance(layer.resident, Newest):  # a ring, of all lanes alike
        return [layer.resident.resident_slots()[0].nonzero().flatten().tolist()] * (layer.rows * layer.heads)
    lanes: dict[int, list[int]] = {}
    for bank in layer.resident.banks:
        owners = range(bank.slots.shape[0]) if bank.lanes is None else bank.lanes.tolist()
        for lane, slots in zip(owners, bank.slots.tolist(), strict=True):
            assert lane not in lanes
            lanes[lane] = [slot for slot in slots if slot >= 0]
    assert sorted(lanes) == list(range(len(lanes)))
    return [lanes[lane] for lane in sorted(lanes)]


def allocated(cache: KeepCache) -> int:
    """Bytes of all tensors that can be reached from a cache, each storage once; not those of models and requests, nor
    of a ledger on disk."""
    sizes: dict[int, int] = {}
    seen: dict[int, Any] = {}
    walk = [cache]
    while walk:
        value = walk.pop()
        if isinstance(value, Tensor):
            sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif id(value) in seen or value is None or isinstance(value, str | int | ctypes.Structure):
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            walk += value.values()
        elif isinstance(value, list | tuple):
            walk += value
        elif type(value).__name__ in ("Adapter", "Request", "ModelGeometry") or (
            isinstance(value, Buffer) and isinstance(value.home, Disk)
        ):
            continue
        elif type(value).__module__.startswith(("kvkeep", "transformers.cache_utils")):
            walk.append(dict(vars(value)))
    return sum(sizes.values())


def counted(cache: KeepCache) -> int:
    """Bytes that a cache says it holds."""
    memory = cache.memory()
    held = memory.resident_bytes + memory.compressed_bytes + memory.bookkeeping_bytes
    return held + sum(memory.checkpoint_bytes.values())


@contextmanager
def broken(model: Any, layer: int, error: type[BaseException]) -> Iterator[None]:
    """Within the block, forward passes end at the entry of a layer."""

    def stop(*args: Any) -> None:
        raise error

    layers = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    handle = layers[layer].register_forward_pre_hook(stop)
    with pytest.raises(error):
        yield
    handle.remove()
