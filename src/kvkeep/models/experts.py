"""Experts whose matrices stay packed: the rows of a token go through those of the experts that it is routed to.

transformers holds the matrices of all experts of a layer in two parameters, (experts, outputs, inputs). Here they are
packed one below the other, and each expert multiplies with its part. One call of the library runs all experts of a
layer. It groups the rows of a prompt by expert, so a pass reads each matrix once, and a step reads only those that it
needs. Activations are tables of all bfloat16 numbers, which torch computes once, in double precision: in float32 its
exponentials differ between processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvkeep.errors import UsageError, trial
from kvkeep.models.packed import Blocks, Packed, WithPointers, quantised
from kvkeep.native.library import kernels
from kvkeep.native.structures import PANEL_OUTPUTS, KvExperts, address_of, array

GATES, UPS, DOWN = "gate_up_proj", "up_proj", "down_proj"
"""The parameters of a layer's experts: gates and ups (experts, 2 * inner, hidden), or only ups, and (experts, hidden,
inner)."""


@dataclass(frozen=True, eq=False)
class ExpertForm:
    """How transformers holds the matrices of a layer's experts, and what these make of gates and ups."""

    first: str
    """The name of the first matrices: :data:`GATES`, or :data:`UPS` for experts without gates."""
    transposed: bool
    """Whether weights are (experts, inputs, outputs), with gate and up columns interleaved (gpt-oss)."""
    biases: bool
    """Whether outputs have biases."""
    gate_values: Tensor
    """(65536,) bfloat16: what a gate becomes, or an up of experts without gates. Number i is that of the bits i."""
    up_values: Tensor | None
    """The same of ups, by which gates are multiplied; None: ups stay as they are."""

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of the matrices."""
        return self.first, DOWN

    @property
    def names(self) -> set[str]:
        """The names of all parameters."""
        return {*self.matrices, *(f"{one}_bias" for one in self.matrices if self.biases)}

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape (experts, outputs, inputs) of matrices whose shape is ``stored`` in transformers."""
        total, outputs, inputs = stored
        return (total, inputs, outputs) if self.transposed else (total, outputs, inputs)

    def rows(self, name: str, weight: Tensor) -> Tensor:
        """Return the matrices of a parameter, (experts, outputs, inputs), all gates before all ups; or its biases,
        (experts, outputs)."""
        if not self.transposed:
            return weight
        weight = weight.transpose(1, -1) if weight.ndim == 3 else weight
        return torch.cat((weight[:, ::2], weight[:, 1::2]), 1) if name.startswith(GATES) else weight

    def activated(self, outputs: Tensor) -> Tensor:
        """Return the inputs of the down matrices, (rows, inner), for the ``outputs`` of the first ones."""
        if self.first == UPS:
            return _looked_up(self.gate_values, outputs)
        gates, ups = outputs.chunk(2, -1)
        return _looked_up(self.gate_values, gates) * (
            ups if self.up_values is None else _looked_up(self.up_values, ups)
        )


def _looked_up(table: Tensor, numbers: Tensor) -> Tensor:
    return table.to(numbers.device)[numbers.contiguous().view(torch.int16).long() & 0xFFFF]


class Experts(NamedTuple):
    """The experts of one layer in transformers."""

    module: Any
    form: ExpertForm


class PackedExperts(WithPointers, nn.Module):
    """The experts of one layer. gates: matrices whose outputs are gates and then ups, in one matrix or in two, or only
    ups. Each has the rows of all experts, one after the other."""

    pointers = ("struct",)
    gates_bias: Tensor | None
    """(experts, outputs of the gates and ups) bfloat16"""
    down_bias: Tensor | None
    """(experts, hidden) bfloat16"""

    def __init__(self, experts: Experts, gates: Sequence[Packed], down: Packed) -> None:
        super().__init__()
        module, self.form = experts
        self.num_experts = int(module.num_experts)
        self.gates, self.down = nn.ModuleList(gates), down
        for name, of in zip(("gates_bias", "down_bias"), self.form.matrices, strict=True):
            bias = getattr(module, f"{of}_bias").detach() if self.form.biases else None
            made = None if bias is None else self.form.rows(of, bias).to(torch.bfloat16).contiguous()
            self.register_buffer(name, made)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of the chosen experts' outputs, (tokens, hidden). top_k_index, top_k_weights: the chosen
        experts of each token and their weights, (tokens, k); a padded token may have some that do not exist."""
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise UsageError("Packed experts have no gradient; load the model with weights float32.")
        rows = hidden_states.to(torch.bfloat16).contiguous()
        if self.down.native:
            out, chosen = torch.empty_like(rows), top_k_index.long().contiguous()
            weights = top_k_weights.float().contiguous()
            kernels().kvkeep_run_experts(address_of(self.struct), rows, chosen, weights, out)
            return out.to(hidden_states.dtype)
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            if 0 <= expert < self.num_experts:
                tokens, places = torch.where(top_k_index == expert)
                outputs = self._multiplied(self._gates(), expert, rows[tokens], self.gates_bias)
                found = self._multiplied([self.down], expert, self.form.activated(outputs), self.down_bias)
                found = (found * top_k_weights[tokens, places, None]).to(hidden_states.dtype)
                out.index_add_(0, tokens, found.float())
        return out.to(hidden_states.dtype)

    def _gates(self) -> list[Packed]:
        return [one for one in self.gates if isinstance(one, Packed)]

    def _multiplied(self, matrices: Sequence[Packed], expert: int, rows: Tensor, biases: Tensor | None) -> Tensor:
        """Return ``rows`` times an expert's parts of ``matrices``, side by side. These are stored as rows of blocks.
        biases: of all outputs, (experts, outputs)."""
        found, column = [], 0
        for one in matrices:
            width = one.out_features // self.num_experts
            part = Blocks(one.kind, one.data[expert * width : (expert + 1) * width].cpu())
            bias = None if biases is None else biases[expert, column : column + width]
            found.append(nn.functional.linear(rows, part.dense(rows.dtype).to(rows.device), bias))
            column += width
        return torch.cat(found, -1)

    @cached_property
    def struct(self) -> KvExperts:
        """The experts as a struct for the kernels. Its tensors must outlive it."""
        outputs = sum(one.out_features for one in self._gates())
        struct = KvExperts(
            gates=tuple(one.struct for one in self._gates()),
            down=self.down.struct,
            gates_bias=array(self.gates_bias),
            down_bias=array(self.down_bias),
            gate_values=array(self.form.gate_values),
            up_values=array(self.form.up_values),
            experts=self.num_experts,
            hidden=self.down.out_features // self.num_experts,
            inner=self.down.in_features,
            gated=outputs // self.num_experts // self.down.in_features - 1,
        )
        struct.kept = [*self.buffers(), self.form]  # as long as the pointers, even if the modules move
        return struct

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.__dict__.pop("struct", None)  # their pointers become invalid
        return super()._apply(fn, recurse)


def packed_experts(weights: Sequence[Tensor | Blocks], bits: int, count: int) -> list[Packed]:
    """Return packed matrices of all ``count`` experts: ``weights`` (experts, outputs, inputs), or rows of blocks; those
    of one kind are joined, the rows of each expert one after the other."""
    made = [one if isinstance(one, Blocks) else quantised(one.flatten(0, 1), bits) for one in weights]
    if len(made) > 1 and len({one.kind for one in made}) == 1:
        rows = torch.cat([one.rows.unflatten(0, (count, -1)) for one in made], 1)
        made = [Blocks(made[0].kind, rows.flatten(0, 1))]
    return [Packed(one) for one in made]


def experts_of(model: Any) -> dict[str, Experts]:
    """Return the experts of a model that can be packed, by module name: those of each kind, and with each setting, are
    compared with their own forward."""
    found = {name: one for name, one in model.named_modules() if type(one).__name__.endswith("Experts")}
    kinds = {name: (type(one), _settings(one)) for name, one in found.items()}
    with torch.device("cpu"):  # transformers builds models on the meta device
        forms = {kind: _form(found[name]) for kind, name in {kind: name for name, kind in kinds.items()}.items()}
    return {name: Experts(one, form) for name, one in found.items() if (form := forms[kinds[name]]) is not None}


def _settings(module: Any) -> frozenset[tuple[str, Any]]:
    """Return the numbers and names that a module has: layers of one kind may differ in a limit."""
    return frozenset((name, one) for name, one in vars(module).items() if isinstance(one, int | float | str))


def _form(experts: Any) -> ExpertForm | None:
    """Return the form of experts that compute what :class:`PackedExperts` does; None: they compute something else."""
    names = {name for name, _ in experts.named_parameters()}
    first, biases = GATES if GATES in names else UPS, f"{DOWN}_bias" in names
    for transposed in (False, True) if first == GATES else (False,):
        with trial("experts"):
            form = ExpertForm(first, transposed, biases, *_activations(experts, transposed))
            if names == form.names and _agrees(experts, form):
                return form
    return None


@torch.no_grad()
def _activations(experts: Any, transposed: bool) -> tuple[Tensor, Tensor | None]:
    """Return what each bfloat16 number becomes as a gate and as an up."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    if not transposed:
        return experts.act_fn(every.double()).to(torch.bfloat16), None
    gates = experts._apply_gate(torch.stack((every, torch.zeros_like(every)), -1).flatten())  # times 0 + 1
    return gates, every.clamp(-experts.limit, experts.limit) + 1


@torch.no_grad()
def _agrees(experts: Any, form: ExpertForm) -> bool:
    """Return whether such experts compute what :class:`PackedExperts` does, by a few small ones."""
    shapes = [tuple(getattr(experts, name).shape) for name in form.matrices]
    if any(len(shape) != 3 for shape in shapes):
        return False
    (_, outputs, inputs), (_, hidden, width) = (form.shape(shape) for shape in shapes)
    factor = 2 if form.first == GATES else 1
    if (outputs, inputs) != (factor * width, hidden) or hidden % PANEL_OUTPUTS or width % PANEL_OUTPUTS:
        return False
    count, hidden, width = 3, 4 * PANEL_OUTPUTS, 2 * PANEL_OUTPUTS
    small: Any = object.__new__(type(experts))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.bfloat16) / 4

    sizes = {form.first: (count, factor * width, hidden), DOWN: (count, hidden, width)}
    parameters = {name: nn.Parameter(random(*form.shape(shape))) for name, shape in sizes.items()}
    if form.biases:
        parameters |= {f"{name}_bias": nn.Parameter(random(count, shape[1])) for name, shape in sizes.items()}
    small.__dict__.update(experts.__dict__ | {"num_experts": count, "_parameters": parameters})
    x, chosen, weights = random(5, hidden), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]]), random(5, 2).abs()
    first, (down,) = (packed_experts([form.rows(name, parameters[name].detach())], 16, count) for name in form.matrices)
    packed = PackedExperts(Experts(small, form), first, down)
    for scale in (1, 64):  # some limit what their gates return
        ours, wanted = (one(scale * x, chosen, weights) for one in (packed, partial(type(experts).forward, small)))
        if not bool((ours - wanted).float().abs().max() <= 0.03 * wanted.float().abs().max()):
            return False
    return True
