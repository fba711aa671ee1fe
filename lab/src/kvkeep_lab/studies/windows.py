"""Differences of rebuilt and cached keys and values, and a check beyond the length of sliding windows. KV-Direct's
recompute fails there (section 5.4); kvkeep's must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.cache import KeepCache
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import layers_of
from kvkeep.models.binding import bind
from kvkeep.models.forward import attending, probing
from kvkeep_lab.reading import greedy
from kvkeep_lab.shapes import CheckpointKind
from kvkeep_lab.studies.patching import replacing
from kvkeep_lab.tables import Table, number


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences of rebuilt and cached keys, and of values."""

    keys: float = 0.0
    values: float = 0.0

    def __or__(self, other: Difference) -> Difference:
        """Return the larger difference of each."""
        return Difference(max(self.keys, other.keys), max(self.values, other.values))

    @property
    def none(self) -> bool:
        """Whether there is no difference."""
        return self.keys == 0 and self.values == 0

    def __str__(self) -> str:
        return f"{number(self.keys)}, {number(self.values)}"


def difference(rebuilt: tuple[Tensor, Tensor], cached: tuple[Tensor, Tensor]) -> Difference:
    """Compare keys with keys and values with values."""
    return Difference(*(float((a.double() - b.double()).abs().max()) for a, b in zip(rebuilt, cached, strict=True)))


def observed(decoder: Any, ids: Tensor, cache: Any) -> tuple[list[Tensor], Any]:
    """Run stock attention over ``ids`` (1, tokens). Return the residuals before each layer, and the filled cache."""
    entering: list[Tensor] = []
    device = next(decoder.parameters()).device
    with attending(None), probing(lambda index, hidden: entering.append(hidden)):
        decoder(input_ids=ids.to(device), cache=cache, use_cache=True)
    return entering, cache


@dataclass(frozen=True)
class Windows:
    """The check after a text that is longer than the window. *Blind* is the paper's recompute, which runs sliding
    layers without their window."""

    text_tokens: int
    window: int
    held: Difference
    """Difference of the entries in transformers' windowed cache and those rebuilt at absolute positions. The paper's
    Eq. 16 expects keys to differ here."""
    matching: dict[str, int]
    """Number of kv-direct's greedy tokens that equal the stock cache's, by checkpoint kind."""
    blind: Difference
    """Difference of the same entries with the blind recompute."""
    blind_logits: float
    """Largest difference of the last logits with the blind recompute."""
    blind_matching: int
    """Number of the blind recompute's greedy tokens that equal the stock cache's, each after the stock cache's text."""
    of: int
    """Number of compared tokens."""

    @property
    def holds(self) -> bool:
        """Whether the entries in the window are equal to the bit, and all tokens are the same."""
        return self.held.none and all(matching == self.of for matching in self.matching.values())

    def table(self) -> Table:
        table = Table(
            f"Beyond the window ({self.text_tokens:,} tokens, window {self.window:,})",
            ["", "max |ΔK|, max |ΔV|", "tokens that are the stock cache's"],
            notes=[
                "The paper's recompute knows no windows: HellaSwag falls from 49.2 to 25.0 % (section 5.4). Here it "
                f"moves logits by up to {self.blind_logits:.2g}."
            ],
        )
        table.rows.append(["rebuilt at absolute positions, in the window", f"{self.held}", ""])
        for kind, matching in self.matching.items():
            table.rows.append([f"`kv-direct`, {kind}", "", f"{matching}/{self.of}"])
        blind = [f"{self.blind}", f"{self.blind_matching}/{self.of}"]
        table.rows.append(["recomputed without windows, as in the paper", *blind])
        return table


def text_length(geometry: ModelGeometry, new: int = 0) -> int:
    """Return the length of the check's text: twice the widest window, but at most 512 tokens beyond it. Return 0 for a
    model without sliding layers, or with too few positions to exceed their windows."""
    windows = [layer.window for layer in geometry.sliding_layers if layer.window is not None]
    if not windows:
        return 0
    length = min(2 * max(windows), max(windows) + 512) + 64
    if geometry.max_positions is not None:
        length = min(length, geometry.max_positions - new)
    return length if length > max(windows) else 0


@torch.no_grad()
def beyond_the_window(
    model: Any, ids: Tensor, *, new: int = 12, kinds: Sequence[CheckpointKind] = ("residual", "tokens")
) -> Windows:
    """Compare the stock cache, kv-direct, and the paper's recompute after the first tokens of ``ids``."""
    geometry = ModelGeometry.from_config(model.config)
    window = max(layer.window or 0 for layer in geometry.sliding_layers)
    ids = ids[:, : text_length(geometry, new)].to(next(model.parameters()).device)
    if ids.shape[1] <= window:
        raise UsageError(f"A text of {ids.shape[1]} tokens does not reach beyond a window of {window}.")
    held, blind = _in_the_window(model, geometry, ids)
    expected, _ = greedy(model, ids, new, cache=DynamicCache(config=model.config))
    matching: dict[str, int] = {}
    for kind in kinds:
        direct = KeepCache(model, "kv-direct", max(16, window // 4), checkpoint=kind, where="host")
        got, _ = greedy(model, ids, new, cache=direct)
        matching[kind] = sum(a == b for a, b in zip(got, expected, strict=True))
    sequence = torch.cat([ids, ids.new_tensor([expected[:-1]])], dim=1)
    honest = model(sequence, use_cache=False, logits_to_keep=new).logits[0]
    with without_windows(model):
        wrong = model(sequence, use_cache=False, logits_to_keep=new).logits[0]
    off = float((wrong.double() - honest.double()).abs().max())
    same = int((wrong.argmax(-1).cpu() == torch.tensor(expected)).sum())
    return Windows(ids.shape[1], window, held, matching, blind, off, same, new)


def _in_the_window(model: Any, geometry: ModelGeometry, ids: Tensor) -> tuple[Difference, Difference]:
    """Return two differences from the entries in transformers' windowed cache: of entries rebuilt at absolute
    positions, and of entries of a pass without windows."""
    adapter = bind(model)
    entering, cache = observed(adapter.decoder, ids, DynamicCache(config=model.config))
    with without_windows(model):
        _, unbound = observed(adapter.decoder, ids, DynamicCache())
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    kept_differences, blind = Difference(), Difference()
    for index in (layer.index for layer in geometry.sliding_layers):
        kept = (cache.layers[index].keys, cache.layers[index].values)
        unbound_entries = (unbound.layers[index].keys, unbound.layers[index].values)
        kept_differences |= difference(_last(adapter.project(index, entering[index], positions), kept), kept)
        blind |= difference(_last(unbound_entries, kept), kept)
    return kept_differences, blind


@contextmanager
def without_windows(model: Any) -> Iterator[None]:
    """Within the block, every layer of ``model`` attends to all preceding tokens, as in the paper's recompute."""
    with ExitStack() as stack:  # a layer without a mask is causal
        for layer in layers_of(bind(model).decoder):
            stack.enter_context(replacing(layer, attention_mask=None))
        yield


def _last(entries: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the newest of all keys and values, the number of those in a window."""
    count = kept[0].shape[-2]
    return entries[0][..., -count:, :], entries[1][..., -count:, :]
