"""How far rebuilt keys and values are from the cached ones; and sliding windows beyond their length, where KV-Direct's
recompute breaks (section 5.4); ours must not."""

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
from kvkeep.geometry import CheckpointKind, ModelGeometry
from kvkeep.models.adapter import layers_of
from kvkeep.models.binding import bind
from kvkeep.models.forward import attending, probing
from kvkeep_lab.reading import greedy
from kvkeep_lab.studies.patching import replacing
from kvkeep_lab.tables import Table, number


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference of rebuilt and cached keys, and of values."""

    keys: float = 0.0
    values: float = 0.0

    def __or__(self, other: Difference) -> Difference:
        """Return the larger of both."""
        return Difference(max(self.keys, other.keys), max(self.values, other.values))

    @property
    def none(self) -> bool:
        """Whether not a bit differs."""
        return self.keys == 0 and self.values == 0

    def __str__(self) -> str:
        return f"{number(self.keys)}, {number(self.values)}"


def difference(rebuilt: tuple[Tensor, Tensor], cached: tuple[Tensor, Tensor]) -> Difference:
    """Compare keys with keys and values with values."""
    return Difference(*(float((a.double() - b.double()).abs().max()) for a, b in zip(rebuilt, cached, strict=True)))


def observed(decoder: Any, ids: Tensor, cache: Any) -> tuple[list[Tensor], Any]:
    """Run stock attention over ``ids`` (1, tokens); return the residuals entering each layer, and the filled cache."""
    entering: list[Tensor] = []
    device = next(decoder.parameters()).device
    with attending(None), probing(lambda index, hidden: entering.append(hidden)):
        decoder(input_ids=ids.to(device), cache=cache, use_cache=True)
    return entering, cache


@dataclass(frozen=True)
class Windows:
    """After a text longer than the window.

    held: the keys and values that transformers' own windowed cache holds, against those rebuilt at the absolute
    positions (the paper's Eq. 16 expects keys to differ here). matching: kv-direct's greedy tokens equal to the stock
    cache's, by checkpoint kind. The paper's recompute runs sliding layers without their window:
    blind: what that does to the same keys and values, and blind_logits to the last logits; blind_matching: its greedy
    tokens equal to the stock cache's, each after the stock cache's own.
    """

    text_tokens: int
    window: int
    held: Difference
    matching: dict[str, int]
    blind: Difference
    blind_logits: float
    blind_matching: int
    of: int

    @property
    def holds(self) -> bool:
        """Not a bit differs in what the window holds, and all tokens are the same."""
        return self.held.none and all(matching == self.of for matching in self.matching.values())

    def table(self) -> Table:
        """Return what was rebuilt and recomputed."""
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
    """Return how long a text the check takes: past the widest window, twice its length if that is no more than 512
    beyond; 0 where the model has no sliding layers, or too few positions to get past them."""
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
    """Return how keys and values rebuilt at absolute positions, and those of a pass without windows, differ from what
    transformers' windowed cache holds."""
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
    """Within the block, have every layer of ``model`` attend to all that came before, as the paper's recompute does."""
    with ExitStack() as stack:  # a layer without a mask is causal
        for layer in layers_of(bind(model).decoder):
            stack.enter_context(replacing(layer, attention_mask=None))
        yield


def _last(entries: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cut whole keys and values to as many of the newest as a window kept."""
    count = kept[0].shape[-2]
    return entries[0][..., -count:, :], entries[1][..., -count:, :]
