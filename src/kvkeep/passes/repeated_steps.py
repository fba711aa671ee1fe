"""The steps of a text whose layers evict nothing: planned once for a page, and moved for each token after that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvkeep.step.plan import MovedSteps, TextSteps


class RepeatedSteps:
    """Steps that may apply again to the next tokens of a text. layers: those of its cache."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._steps: dict[int, TextSteps] = {}  # by their number of tokens

    def keep(self, count: int, steps: TextSteps) -> None:
        """Keep the steps of ``count`` tokens, and forget those of memory that a layer no longer uses."""
        for number, one in [*self._steps.items()]:
            if any(self._layers[at].follows(step) is None for at, step in one.by_layer.items()):
                del self._steps[number]
        self._steps[count] = steps

    def again(self, count: int) -> MovedSteps | None:
        """Return earlier steps of ``count`` tokens, moved to the next ones, if all layers take them again. Otherwise
        forget all steps, which hold memory that the layers may no longer use."""
        if (steps := self._steps.get(count)) is not None:
            rows = {self._layers[layer].follows(step) for layer, step in steps.by_layer.items()}
            if len(rows) == 1 and (moved := rows.pop()) is not None:
                return MovedSteps(steps, moved)
            self.forget()
        return None

    def forget_from(self, length: int) -> None:
        """Forget the steps of pages that a text of ``length`` tokens does not have."""
        for count, steps in [*self._steps.items()]:
            if any(step.slot - step.append.row > length for step in steps.by_layer.values()):  # its page's first slot
                del self._steps[count]

    def forget(self) -> None:
        """Forget all steps, because the layers' memory changes."""
        self._steps.clear()
