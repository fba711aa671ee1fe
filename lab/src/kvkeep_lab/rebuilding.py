"""Keys and values in their stock form, and how far rebuilt ones are from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvkeep.models.forward import attending, probing
from kvkeep_lab.tables import number


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
        decoder(input_ids=ids.to(device), past_key_values=cache, use_cache=True)
    return entering, cache
