"""``patching``: replaces the residuals at one layer by another prompt's and compares the predictions (KV-Direct's
Fig. 8 and Eq. 10, arXiv:2603.19664, sections 3.1 and 5.3).

Eq. 10: I(K, V; x_t+1 | h^l) = 0 for the residuals h^l of all tokens at any one layer l. With the donor's residuals at
l, the preceding layers hold the recipient's keys and values, or, in the unpatched pass, the donor's: two caches with
the same h^l. If both are equally likely, their information about a token is the Jensen-Shannon divergence of its two
distributions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import layers_of
from kvkeep.models.binding import bind
from kvkeep.models.forward import probing
from kvkeep_lab.figures import COLOURS, FilePath, dress, panels
from kvkeep_lab.reading import greedy
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import Study, Trial
from kvkeep_lab.tables import Table, number
from kvkeep_lab.tasks.base import Metric

DONOR, RECIPIENT = "What is the capital of Australia?", "What language is spoken in France?"  # the paper's

AFTER = 10
"""Tokens that the donor generates, which are then read with the cache of each patched pass."""


@dataclass(frozen=True)
class Patching:
    """The next token after the residuals that enter ``layer`` are replaced. Figures that earlier versions of kvkeep did
    not measure are None."""

    layer: int
    kl: float
    """KL(patched || donor) of the next-token distributions, in nats."""
    also_reads: str = ""
    """Other inputs of later layers besides the residuals; the paper's claim does not cover such a model."""
    information: float | None = None
    """Bits that the cache of the preceding layers carries about the next token, given the residuals (Eq. 10)."""
    later: float | None = None
    """The same bits about one of the donor's later tokens, read with the cache: the maximum of :data:`AFTER`."""

    @property
    def holds(self) -> bool:
        """Whether the residual stream determines the rest of the pass, in a model that passes on only residuals."""
        return self.kl == 0 or bool(self.also_reads)


@dataclass(frozen=True)
class Patches:
    """The measurements by layer."""

    rows: list[Patching]


class PatchingStudy(Study):
    """KV-Direct's Fig. 8 and Eq. 10."""

    name = "patching"
    about = "residual patching: a donor's residuals in a recipient's pass, layer by layer"
    protocol = (
        f"The donor asks '{DONOR}', the recipient '{RECIPIENT}'. At each layer in turn all of the recipient's "
        "residuals are replaced by the donor's; KL (patched || donor) of the next token's distributions, in nats. The "
        "cache of the layers before is then the recipient's beside residuals that are the donor's: the bits that it "
        "carries about the next token (Eq. 10), and about those after it while the donor's are read (the most)."
    )
    found = Patches
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("kl", "largest KL of all layers whose input is all that is handed on (nats)", "lower", "number"),
        Metric("layers", "layers at which it is exactly 0"),
        Metric(
            "information", "bits in keys and values about the next token, the most of all layers", "lower", "number"
        ),
        Metric("later", "bits in them about a token after it, all layers' most", "lower", "number"),
    )
    certain = ("kl", "layers", "information", "later")

    @torch.no_grad()
    def measure(self, trial: Trial) -> Patches:
        """Patch every layer at all positions. Both prompts are tokenized without a chat template. The longer one is cut
        at the start to the length of the other."""
        model = trial.model
        layers = layers_of(bind(model).decoder)
        geometry = ModelGeometry.from_config(model.config)
        prompts = [trial.tokenizer(text).input_ids for text in (DONOR, RECIPIENT)]
        length = min(map(len, prompts))
        donor, recipient = (torch.tensor([prompt[-length:]], device=model.device) for prompt in prompts)
        entering: list[Tensor] = []
        with probing(lambda index, hidden: entering.append(hidden)):
            expected = _distributions(model, donor, DynamicCache(config=model.config))[-1]
        written, _ = greedy(model, donor, AFTER, cache=DynamicCache(config=model.config))
        cache, follows = DynamicCache(config=model.config), torch.tensor([written], device=model.device)
        _distributions(model, donor, cache)
        expected_later = _distributions(model, follows, cache)
        rows: list[Patching] = []
        for index, layer in enumerate(layers):
            cache = DynamicCache(config=model.config)
            with replacing(layer, hidden_states=entering[index]):
                patched = _distributions(model, recipient, cache)[-1]
            kl = float((patched.exp() * (patched - expected)).sum())
            later = float(divergence_bits(_distributions(model, follows, cache), expected_later).max())
            about = _also_reads(model, geometry, index), float(divergence_bits(patched, expected)), later
            rows.append(Patching(index, kl, *about))
            trial.progress("layers", len(rows), len(layers))
        return Patches(rows)

    def scores(self, found: Patches) -> dict[str, float]:
        """Return the largest KL, and the share of layers with a KL of 0."""
        claimed = [row for row in found.rows if not row.also_reads]
        if not claimed:
            return {}
        zero = sum(row.kl == 0 for row in claimed) / len(claimed)
        scores = {"kl": max((row.kl for row in claimed), key=abs), "layers": zero}
        for name in ("information", "later"):
            if bits := [value for row in claimed if (value := getattr(row, name)) is not None]:
                scores[name] = max(bits)
        return scores

    def tables(self, found: Patches) -> list[Table]:
        table = Table(
            "KL by layers",
            [
                "what later layers read", "layers", "with KL = 0", "largest KL", "the paper's",
                "bits about the next token (Eq. 10)", "about one after it", "layers with none of these",
            ],
            notes=[
                "The paper: KL and bits of 0 at all 30 layers of SmolLM2-135M and all 24 of Qwen2.5-0.5B. Bits are "
                "those of keys and values of the layers before, given the residuals of one; the most of all layers."
            ],
        )  # fmt: skip
        for reads in each(found.rows, "also_reads"):
            mine = where(found.rows, also_reads=reads)
            worst = max((row.kl for row in mine), key=abs)
            counts = [f"{len(mine)}", f"{sum(row.kl == 0 for row in mine)}"]
            what = f"the residual, and {reads}" if reads else "the residual alone"
            cells = [what, *counts, number(worst), "" if reads else "0"]
            for name in ("information", "later"):
                bits = [value for row in mine if (value := getattr(row, name)) is not None]
                cells.append(number(max(bits)) if bits else "-")
            table.rows.append([*cells, f"{sum(row.later == 0 for row in mine)}"])
        return [table]

    def draw(self, found: Patches, path: FilePath, *, title: str) -> None:
        """Draw the KL at each layer; a KL of 0 lies on the axis."""
        with panels(path, title, height=3) as (axes,):
            for place, (single, words) in enumerate(
                ((True, "nothing else is read"), (False, "something else is, too"))
            ):
                mine = [row for row in found.rows if (not row.also_reads) == single]
                if mine:
                    layers, sizes = [row.layer for row in mine], [abs(row.kl) for row in mine]
                    axes.plot(layers, sizes, "o", color=COLOURS[place], label=words, clip_on=False)
            dress(axes, "|KL (patched || donor)|, nats", "layer whose input is replaced", legend=True)
            axes.set_yscale("symlog", linthresh=1e-12)
            axes.set_ylim(0, 100)


@contextmanager
def replacing(layer: nn.Module, **replaced: Any) -> Iterator[None]:
    """Replace the ``hidden_states`` of ``layer`` (its first argument) or other keyword arguments within the block."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        wanted = dict(replaced)
        if args and "hidden_states" in wanted:
            args = (wanted.pop("hidden_states"), *args[1:])
        return args, kwargs | wanted

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def divergence_bits(a: Tensor, b: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence in bits of distributions given as logarithms, (..., tokens) to (...): the
    information of a sample about its source, if both are equally likely. It is exactly 0 for equal distributions."""
    middle = torch.logaddexp(a, b) - math.log(2)
    both = torch.stack([a, b]).exp()
    nats = (both.xlogy(both) - both.xlogy(middle.exp())).sum((0, -1)) / 2
    return (nats / math.log(2)).clamp(0, 1).where((a != b).any(-1), 0)


def _distributions(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Return the logarithms of the distributions after each token, (tokens, vocabulary)."""
    return model(ids, cache=cache).logits[0].double().log_softmax(-1)


def _also_reads(model: Any, geometry: ModelGeometry, index: int) -> str:
    if getattr(model.config.get_text_config(decoder=True), "hidden_size_per_layer_input", None):
        return "an embedding of the token at every layer"
    sources = {layer.source for layer in geometry.layers[index:] if layer.source < index}
    return f"the keys and values of layer {min(sources)}" if sources else ""
