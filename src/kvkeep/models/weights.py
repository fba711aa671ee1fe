"""Reads a model's weights, and refuses files that lack some."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor

from kvkeep.errors import ModelError


def read_weights(kind: Any, source: str | os.PathLike[str] | None, name: str, **options: Any) -> Any:
    """Return ``kind.from_pretrained(source, **options)``, refusing incomplete files. Weights on the CPU are in memory
    of this process: those that transformers returns lie in mapped files, and change with them.

    transformers initialises missing weights at random, and only logs that. Raises ModelError, with ``name``, when a
    weight is missing, or its shape differs from config.json.
    """
    # Wrong shapes are reported below, because transformers only logs them.
    model, report = kind.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    refuse_incomplete(name, report["missing_keys"], [entry[0] for entry in report["mismatched_keys"]])
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and type(tensor.data) is Tensor:
            tensor.data = tensor.data.clone()
    return model


def refuse_incomplete(name: str, missing: Iterable[str], other: Iterable[str]) -> None:
    """Raise ModelError, with ``name``, for weights that are ``missing``, and for ``other`` ones of a wrong shape."""
    for what, keys in (("it lacks", sorted(missing)), ("its config states another shape for", sorted(other))):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(
                f"The model '{name}' is damaged or incomplete: {what} {keys[0]}{more}; get its files again."
            )
