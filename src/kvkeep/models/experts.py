"""Experts whose matrices stay packed: the rows of a token go through those of the experts that it is routed to.

transformers holds the matrices of all experts of a layer in two parameters, (experts, outputs, inputs). Here they are
packed one below the other, and each expert multiplies with its part. The rows of a prompt are grouped by expert, so a
pass reads each matrix once, and a step reads only those that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.errors import UsageError
from kvkeep.models.packed import Blocks, Packed, quantised
from kvkeep.native.library import kernels
from kvkeep.native.structures import KIND_NUMBERS, PANEL_OUTPUTS, KvMatrix, address_of, array

GATES, DOWN = "gate_up_proj", "down_proj"
"""The parameters of a layer's experts: gates and ups (experts, 2 * inner, hidden), and (experts, hidden, inner)."""


class PackedExperts(nn.Module):
    """The experts of one layer. gates: matrices whose outputs are gates and then ups, in one matrix or in two. Each has
    the rows of all experts, one after the other."""

    def __init__(self, experts: Any, gates: Sequence[Packed], down: Packed) -> None:
        super().__init__()
        self.num_experts, self.act_fn = int(experts.num_experts), experts.act_fn
        self.gates, self.down = nn.ModuleList(gates), down

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of the chosen experts' outputs, (tokens, hidden). top_k_index, top_k_weights: the chosen
        experts of each token and their weights, (tokens, k)."""
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise UsageError("Packed experts have no gradient; load the model with weights float32.")
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        order = order[: int((chosen < self.num_experts).sum())]  # a padded token may have none
        tokens = order // top_k_index.shape[-1]
        ends = [*accumulate(chosen.bincount(minlength=self.num_experts)[: self.num_experts].tolist())]
        spans = [(expert, begin, end) for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))]
        spans = [one for one in spans if one[1] < one[2]]
        rows = hidden_states[tokens].to(torch.bfloat16)
        gate, up = self._multiplied(self._gates(), rows, spans).chunk(2, -1)
        found = self._multiplied([self.down], self.act_fn(gate) * up, spans)
        found = found * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add_(0, tokens, found.to(hidden_states.dtype))

    def _gates(self) -> list[Packed]:
        return [one for one in self.gates if isinstance(one, Packed)]

    def _multiplied(self, matrices: Sequence[Packed], rows: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return ``rows`` times their experts' parts of ``matrices``, side by side. spans: an expert, its first row and
        the row behind its last one."""
        widths = [one.out_features // self.num_experts for one in matrices]
        stride, rows = sum(widths), rows.contiguous()
        out = torch.empty(len(rows), stride, dtype=torch.bfloat16, device=rows.device)
        for matrix, width, column in zip(matrices, widths, [0, *accumulate(widths)], strict=False):
            for expert, begin, end in spans:
                if matrix.native:
                    place = out.view(-1)[begin * stride + column : (end - 1) * stride + column + width]
                    struct = self.structs[matrix][expert]
                    kernels().kvkeep_product(address_of(struct), rows[begin:end], None, place, stride)
                else:
                    part = Blocks(matrix.kind, matrix.data[expert * width : (expert + 1) * width].cpu())
                    out[begin:end, column : column + width] = nn.functional.linear(
                        rows[begin:end], part.dense(rows.dtype).to(rows.device)
                    )
        return out

    @cached_property
    def structs(self) -> dict[Packed, list[KvMatrix]]:
        """The part of each expert of each matrix, as structs for the kernels."""
        return {one: [*self._parts(one)] for one in (*self._gates(), self.down)}

    def _parts(self, matrix: Packed) -> Iterator[KvMatrix]:
        size, width = len(matrix.data) // self.num_experts, matrix.out_features // self.num_experts
        for expert in range(self.num_experts):
            panels = array(matrix.data[expert * size : (expert + 1) * size])
            yield KvMatrix(panels, matrix.in_features, width, KIND_NUMBERS[matrix.kind])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.__dict__.pop("structs", None)  # their pointers become invalid
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying or saving, without pointers."""
        return {name: value for name, value in self.__dict__.items() if name != "structs"}


def packed_experts(weights: Sequence[Tensor | Blocks], bits: int, count: int) -> list[Packed]:
    """Return packed matrices of all ``count`` experts: ``weights`` (experts, outputs, inputs), or rows of blocks; those
    of one kind are joined, the rows of each expert one after the other."""
    made = [one if isinstance(one, Blocks) else quantised(one.flatten(0, 1), bits) for one in weights]
    if len(made) > 1 and len({one.kind for one in made}) == 1:
        rows = torch.cat([one.rows.unflatten(0, (count, -1)) for one in made], 1)
        made = [Blocks(made[0].kind, rows.flatten(0, 1))]
    return [Packed(one) for one in made]


def experts_of(model: Any) -> dict[str, Any]:
    """Return the modules of a model whose experts can be packed, by name: those of each kind, and with each setting,
    are compared with their own forward."""
    found = {name: one for name, one in model.named_modules() if type(one).__name__.endswith("Experts")}
    kinds = {name: (type(one), _settings(one)) for name, one in found.items()}
    with torch.device("cpu"):  # transformers builds models on the meta device
        agree = {kind: _agrees(found[name]) for kind, name in {kind: name for name, kind in kinds.items()}.items()}
    return {name: one for name, one in found.items() if agree[kinds[name]]}


def _settings(module: Any) -> frozenset[tuple[str, Any]]:
    """Return the numbers and names that a module has: layers of one kind may differ in a limit."""
    return frozenset((name, one) for name, one in vars(module).items() if isinstance(one, int | float | str))


@torch.no_grad()
def _agrees(experts: Any) -> bool:
    """Return whether such experts compute what :class:`PackedExperts` does, by a few small ones."""
    shapes = {name: tuple(one.shape) for name, one in experts.named_parameters()}
    if {*shapes} != {GATES, DOWN} or len(shapes[GATES]) != 3 or len(shapes[DOWN]) != 3:
        return False
    total, hidden, width = shapes[DOWN]
    if shapes[GATES] != (total, 2 * width, hidden) or hidden % PANEL_OUTPUTS or width % PANEL_OUTPUTS:
        return False
    count, hidden, width = 3, 4 * PANEL_OUTPUTS, 2 * PANEL_OUTPUTS
    small: Any = object.__new__(type(experts))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.bfloat16) / 4

    gates, down, x = random(count, 2 * width, hidden), random(count, hidden, width), random(5, hidden)
    small.__dict__.update(experts.__dict__ | {"num_experts": count})
    small.__dict__["_parameters"] = {GATES: nn.Parameter(gates), DOWN: nn.Parameter(down)}
    chosen, weights = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]]), random(5, 2).abs()
    try:
        packed = PackedExperts(small, packed_experts([gates], 16, count), packed_experts([down], 16, count)[0])
        for scale in (1, 64):  # some limit what their gates return
            ours, wanted = (one(scale * x, chosen, weights) for one in (packed, partial(type(experts).forward, small)))
            if not bool((ours - wanted).float().abs().max() <= 0.03 * wanted.float().abs().max()):
                return False
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return False
    return True
