"""``kvgrad``: the entries that change the last hidden states of a repetition of the text most stay (KVgrad,
openreview.net/forum?id=cg1wTCJjjk). kvpress calls this a KVgradPress (github.com/NVIDIA/kvpress, pull request 279).

The text is read a second time, as for ``kvzip``. A backward pass after each piece differentiates phi, the sum of the
squares of the last hidden states of the tokens of that pass, by the residual a_p of each of these tokens p between
attention and MLP, in each layer. The score of an entry c is

    max over p of  A_pc |v_c W_O| |d phi / d a_p|

A_pc is the weight that kvzip takes: among the sinks, the piece and its repetition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from kvkeep.attention import received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.selector import ReconstructionPieces
from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.models.layer_parts import LayerParts, parts_of
from kvkeep.policies.selectors.kvzip import KVzip
from kvkeep.reconstruction import ReconstructionReader
from kvkeep.step.torch import sink_scores
from kvkeep.stores.layer import Layer
from kvkeep_lab.published.lookahead import check_gradients, frozen, graph, masked_scores, real_tokens


class Differentiable(ReconstructionReader):
    """Attends in plain operations, with a graph, and scores the entries when the slopes of a pass are known."""

    def attended(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Return attention over all entries and the new ones, and keep the step for :meth:`judge`."""
        new, values = step.arriving(), []
        scores = []
        for _, one in self.past_segments(layer, step):
            key, value = (_tensor(part, layer) for part in (one.key, one.value))
            if one.formed:  # the next segment takes its place
                key, value = key.clone(), value.clone()
            scores.append(masked_scores(step.query, key, one.mask, False, step.scaling))
            values.append(value)
        scores.append(masked_scores(step.query, new.key, new.mask, new.causal, step.scaling))
        scores += [] if step.sinks is None else [sink_scores(step.sinks, step.query)]
        weights = torch.cat(scores, -1).softmax(-1)[..., : layer.length + step.new]
        detached = {name: getattr(step, name).detach() for name in ("query", "key", "value")}
        self.layer, self.step = layer, replace(step, **detached)
        if self.hook is not None:
            self.hook.attended(layer, self.step)
        return weights.to(step.value.dtype) @ torch.cat([*values, new.value], 2)

    def judge(self, slopes: Tensor, output: Tensor) -> None:
        """Raise the scores of the piece's entries by a pass. slopes: |d phi / d a_p|, (rows, queries) float32. output:
        the output projection of each KV head's query heads, (KV heads, heads, hidden size, value_dim)."""
        layer, step = self.layer, self.step
        products = (output.float().transpose(2, 3) @ output.float()).repeat(layer.ledger.batch, 1, 1, 1)
        # The weight exp(score - lse) times the slope is exp(score - (lse - ln slope)).
        lse = layer.ledger.unpadded(self.of_piece(layer, step), layer.heads)
        lse = lse - slopes.log().repeat_interleave(layer.heads, 0)[:, None]
        for piece, segment in self.past_segments(layer, step, [self.piece]):
            values = _tensor(segment.value, layer)[:, 0].float()
            scores = self.scores[:, piece.first : piece.first + values.shape[1]]
            for head in range(step.query.shape[1]):
                one = slice(head, head + 1)
                weights = received(step.query[:, one], segment, lse[:, one], step.scaling, None, "max")
                written = ((values @ products[:, head]) * values).sum(2).clamp(min=0).sqrt()  # |v W_O| by entry
                torch.maximum(scores, weights * written, out=scores)
        del self.layer, self.step


def _tensor(part: Any, layer: Layer) -> Tensor:
    """Return the keys or values of a segment as a tensor (lanes, 1, entries, dim)."""
    return part if isinstance(part, Tensor) else part.dense(layer.dtype)[:, None]


@contextmanager
def going_back(cache: Any, readers: Sequence[Differentiable]) -> Iterator[None]:
    """Run a pass with a graph, differentiate phi by the residuals of its tokens, and let the readers judge."""
    parts = [_parts(layer, cache.geometry.model_type) for layer in layers_of(cache.made.decoder)]
    residuals: list[Tensor] = []
    last: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not residuals:
            args[0].requires_grad_()  # the graph begins behind the first attention
        residuals.append(args[0])

    def end(module: nn.Module, args: Any, output: Any) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    past = cache.ledger.length
    with ExitStack() as stack:
        for part in parts:
            stack.callback(_before_mlp(part).register_forward_pre_hook(note).remove)
        stack.callback(layers_of(cache.made.decoder)[-1].register_forward_hook(end).remove)
        stack.enter_context(frozen(cache.model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(graph(cache.model, cache.meter))
        with torch.enable_grad():
            yield
            real = real_tokens(cache.ledger, past)
            phi = (last[0].float().square().sum(2) * real).sum()
        slopes = [vector_norm(one.float(), dim=2) for one in torch.autograd.grad(phi, residuals)]
        last.clear()
    for layer, reader in zip(cache.geometry.full_layers, readers, strict=True):
        weight = parts[layer.index].out.weight  # (hidden size, heads * value_dim)
        output = weight.unflatten(1, (layer.kv_heads, -1, layer.value_dim)).permute(1, 2, 0, 3)
        reader.judge(slopes[layer.index], output)


def _parts(layer: Any, model_type: str) -> LayerParts:
    try:
        parts = parts_of(layer)
        if parts.recurrent is not None or not {"keys", "joined"} & {*parts.projections}:
            raise TypeError("it has no keys of its own, or a recurrent module beside attention")
        return parts
    except (AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"'kvgrad' does not find the parts of a layer of '{model_type}': {error}; use kvzip."
        ) from error


def _before_mlp(parts: LayerParts) -> nn.Module:
    """Return the module that receives the residual between attention and MLP."""
    return parts.norms["pre_mlp_norm"] or parts.mlps[0]


@dataclass(frozen=True)
class KVGrad(KVzip):
    """The entries that change the last hidden states of a repetition of the text most stay.

    As kvzip, with another score: an entry's weight, times the length of what its value adds to the residual, times the
    length of the gradient of the last hidden states' squares by that residual.
    """

    leaves: ClassVar[str] = "least effect on the text's repetition, by gradient"
    source: ClassVar[str] = "KVgrad (openreview.net/forum?id=cg1wTCJjjk)"

    piece: int = 256
    """Tokens that are repeated at a time."""

    @property
    def reconstruction(self) -> ReconstructionPieces:
        return ReconstructionPieces(self.piece, self.sinks, Differentiable, during=going_back)

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Divide evenly, until the text decides. Raises UnsupportedModelError for a model without gradients, or
        with layers whose parts are not found."""
        if model is not None:
            check_gradients(model, geometry, "kvzip")
            for layer in layers_of(decoder_of(model)):
                _parts(layer, geometry.model_type)
        return super().budgets(model, geometry, entries)
