"""``patching``: another prompt's residuals at one layer, and what the rest of the model makes of them (KV-Direct's
Fig. 8, arXiv:2603.19664, section 5.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import layers_of
from kvkeep.models.binding import bind
from kvkeep.models.forward import probing
from kvkeep_lab.figures import COLOURS, FilePath, dress, panels
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import Study, Trial
from kvkeep_lab.tables import Table, number
from kvkeep_lab.tasks.base import Metric

DONOR, RECIPIENT = "What is the capital of Australia?", "What language is spoken in France?"  # the paper's


@dataclass(frozen=True)
class Patching:
    """KL(patched || donor) of the next token's distributions, in nats, with the residuals entering ``layer`` replaced.

    also_reads: what later layers read beside the residuals, so that the paper's claim is not about this model.
    """

    layer: int
    kl: float
    also_reads: str = ""

    @property
    def holds(self) -> bool:
        """The residual stream determines everything after it, wherever it is all that is handed on."""
        return self.kl == 0 or bool(self.also_reads)


@dataclass(frozen=True)
class Patches:
    """By layer."""

    rows: list[Patching]


class PatchingStudy(Study):
    """KV-Direct's Fig. 8."""

    name = "patching"
    about = "residual patching: a donor's residuals in a recipient's pass, layer by layer"
    protocol = (
        f"The donor asks '{DONOR}', the recipient '{RECIPIENT}'. At each layer in turn all of the recipient's "
        "residuals are replaced by the donor's; KL (patched || donor) of the next token's distributions, in nats."
    )
    found = Patches
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("kl", "largest KL of all layers whose input is all that is handed on (nats)", "lower", "number"),
        Metric("layers", "layers at which it is exactly 0"),
    )
    certain = ("kl", "layers")

    @torch.no_grad()
    def measure(self, trial: Trial) -> Patches:
        """Patch every layer, at all positions. Both prompts are tokenized without a chat template; the longer one loses
        its first tokens until both are as long."""
        model = trial.model
        layers = layers_of(bind(model).decoder)
        geometry = ModelGeometry.from_config(model.config)
        prompts = [trial.tokenizer(text).input_ids for text in (DONOR, RECIPIENT)]
        length = min(map(len, prompts))
        donor, recipient = (torch.tensor([prompt[-length:]], device=model.device) for prompt in prompts)
        entering: list[Tensor] = []
        with probing(lambda index, hidden: entering.append(hidden)):
            expected = _distribution(model, donor)
        rows: list[Patching] = []
        for index, layer in enumerate(layers):
            with replacing(layer, hidden_states=entering[index]):
                patched = _distribution(model, recipient)
            kl = float((patched.exp() * (patched - expected)).sum())
            rows.append(Patching(index, kl, _also_reads(model, geometry, index)))
            trial.progress("layers", len(rows), len(layers))
        return Patches(rows)

    def scores(self, found: Patches) -> dict[str, float]:
        """Return the largest KL, and the share of layers without any."""
        claimed = [row for row in found.rows if not row.also_reads]
        if not claimed:
            return {}
        zero = sum(row.kl == 0 for row in claimed) / len(claimed)
        return {"kl": max((row.kl for row in claimed), key=abs), "layers": zero}

    def tables(self, found: Patches) -> list[Table]:
        table = Table(
            "KL by layers",
            ["what later layers read", "layers", "with KL = 0", "largest KL", "the paper's"],
            notes=["The paper: 0 at all 30 layers of SmolLM2-135M and all 24 of Qwen2.5-0.5B."],
        )
        for reads in each(found.rows, "also_reads"):
            mine = where(found.rows, also_reads=reads)
            worst = max((row.kl for row in mine), key=abs)
            counts = [f"{len(mine)}", f"{sum(row.kl == 0 for row in mine)}"]
            what = f"the residual, and {reads}" if reads else "the residual alone"
            table.rows.append([what, *counts, number(worst), "" if reads else "0"])
        return [table]

    def draw(self, found: Patches, path: FilePath, *, title: str) -> None:
        """Draw the KL at each layer; what is 0 lies on the axis."""
        with panels(path, title, height=3) as (axes,):
            for place, (alone, words) in enumerate(((True, "nothing else is read"), (False, "something else is, too"))):
                mine = [row for row in found.rows if (not row.also_reads) == alone]
                if mine:
                    layers, sizes = [row.layer for row in mine], [abs(row.kl) for row in mine]
                    axes.plot(layers, sizes, "o", color=COLOURS[place], label=words, clip_on=False)
            dress(axes, "|KL (patched || donor)|, nats", "layer whose input is replaced", legend=True)
            axes.set_yscale("symlog", linthresh=1e-12)
            axes.set_ylim(0, 100)


@contextmanager
def replacing(layer: nn.Module, **replaced: Any) -> Iterator[None]:
    """Within the block, hand ``layer`` other ``hidden_states`` (its first argument) or other keyword arguments."""

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


def _distribution(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits[0, -1].double().log_softmax(-1)


def _also_reads(model: Any, geometry: ModelGeometry, index: int) -> str:
    if getattr(model.config.get_text_config(decoder=True), "hidden_size_per_layer_input", None):
        return "an embedding of the token at every layer"
    sources = {layer.source for layer in geometry.layers[index:] if layer.source < index}
    return f"the keys and values of layer {min(sources)}" if sources else ""
