"""What a config.json may state, before transformers allocates and computes by it."""

from __future__ import annotations

import math
from typing import Any

from kvkeep.errors import ModelError
from kvkeep.models.gguf.facts import MAX_LAYERS

MAX_ITEMS, MAX_NUMBER = 65_536, 1 << 53
"""Items of a list (factors, types of layers), and the largest whole number."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_UNBOUNDED = ("time_step_limit", "time_step_max")
"""Keys whose numbers may be infinite."""


def check_config(stated: dict[str, Any], name: str) -> None:
    """Raise ModelError for absurd numbers in the config of the model ``name``: of layers, which transformers would
    allocate, of items, or not finite."""
    for part in (stated, *(part for part in stated.values() if isinstance(part, dict))):
        for key in _LAYERS:
            if (count := part.get(key, 1)) is not None and not (type(count) is int and 0 < count <= MAX_LAYERS):
                raise _damaged(name, key, count, f"not 1 to {MAX_LAYERS}")
        if isinstance(window := part.get("sliding_window"), int) and window < 0:
            raise _damaged(name, "sliding_window", window, "fewer than no tokens")
    _check(stated, "", name)


def _check(value: Any, key: str, name: str) -> None:
    if isinstance(value, dict):
        for inner, one in value.items():
            _check(one, inner, name)
    elif isinstance(value, list):
        if len(value) > MAX_ITEMS:
            raise _damaged(name, key, f"a list of {len(value):,}", f"and no model has more than {MAX_ITEMS:,}")
        for one in value:
            _check(one, key, name)
    elif isinstance(value, float) and not math.isfinite(value) and key not in _UNBOUNDED:
        raise _damaged(name, key, value, "not a finite number")
    elif isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise _damaged(name, key, value, "too large for any model")


def _damaged(name: str, key: str, value: Any, why: str) -> ModelError:
    return ModelError(f"The config of '{name}' is damaged: its {key[:60]} is {str(value)[:40]}, {why}.")
