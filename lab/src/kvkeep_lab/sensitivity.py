"""The second derivatives of the loss by all pairs of neighbouring keys at once (KVSlimmer, sections 4.1-4.2).

:mod:`kvkeep.policies.fates.kvslimmer` gives the formulas.

Values are (..., tokens, dim), attention (..., queries, tokens), outputs and E (..., queries, dim); results are (...,
queries, tokens - 1), one per pair. No c_ij is materialised: products of values, outputs and E give their norms and
their products with E.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvkeep.policies.fates.kvslimmer import best_share, diagonal, mixed


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Sensitivities of every query and pair: g_ij = E . c_ij, and the norms of the c_ij."""

    g11: Tensor
    g12: Tensor
    g22: Tensor
    norm11: Tensor
    norm12: Tensor
    norm22: Tensor
    external: Tensor
    """|E|, (..., queries, 1)."""

    @property
    def cosines(self) -> tuple[Tensor, Tensor, Tensor]:
        """cos(E, c_11), cos(E, c_12), cos(E, c_22) (Eq. 31); nan if one of the two vectors is 0."""
        return (
            self.g11 / (self.external * self.norm11),
            self.g12 / (self.external * self.norm12),
            self.g22 / (self.external * self.norm22),
        )

    @property
    def exact_weight(self) -> Tensor:
        """Weight of key m in the merged key (Eq. 30); the weight of key m + 1 is 1 minus it."""
        return best_share(self.g11, self.g12, self.g22)

    @property
    def closed_weight(self) -> Tensor:
        """The weight without E, under the assumption of Eq. 32 (Eq. 33)."""
        return best_share(self.norm11, -self.norm12, self.norm22)


def sensitivity(external: Tensor, attention: Tensor, values: Tensor, outputs: Tensor) -> Sensitivity:
    """Return the sensitivities of every query and pair in float64, because attention is small and c_12 contains its
    square."""
    external, attention, values, outputs = (part.double() for part in (external, attention, values, outputs))
    first, second = attention[..., :-1], attention[..., 1:]
    square, pair = _gram(values, outputs)
    toward = external @ values.transpose(-1, -2) - (external * outputs).sum(-1, keepdim=True)  # E . r_i
    both = toward[..., :-1] + toward[..., 1:]
    length = square.clamp(min=0).sqrt()  # |r_i|
    length_both = (square[..., :-1] + 2 * pair + square[..., 1:]).clamp(min=0).sqrt()  # |r_m + r_m+1|
    here, next_, shared = diagonal(first), diagonal(second), mixed(first, second)
    return Sensitivity(
        here * toward[..., :-1],
        shared * both,
        next_ * toward[..., 1:],
        here.abs() * length[..., :-1],
        shared.abs() * length_both,
        next_.abs() * length[..., 1:],
        external.norm(dim=-1, keepdim=True),
    )


def _gram(values: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return r_i . r_i, (..., queries, tokens), and r_m . r_m+1, (..., queries, tokens - 1)."""
    shift = values.mean(-2, keepdim=True)  # leaves residuals unchanged and reduces cancellation
    values, outputs = values - shift, outputs - shift
    squares = outputs.square().sum(-1, keepdim=True)
    met = outputs @ values.transpose(-1, -2)
    neighbours = (values[..., :-1, :] * values[..., 1:, :]).sum(-1)
    square = values.square().sum(-1).unsqueeze(-2) - 2 * met + squares
    pair = neighbours.unsqueeze(-2) - met[..., :-1] - met[..., 1:] + squares
    return square, pair
