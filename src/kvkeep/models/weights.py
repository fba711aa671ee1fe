"""Reading a model's weights, all of which must be in its files."""

from __future__ import annotations

import os
from typing import Any

from kvkeep.errors import ModelError


def read_weights(source: str | os.PathLike[str], name: str, **options: Any) -> Any:
    """Return ``AutoModelForCausalLM.from_pretrained(source, **options)``, refusing incomplete files.

    transformers initialises missing weights at random, with a line in its log only. Raises ModelError, with ``name``,
    when a weight is missing or has another shape than config.json says.
    """
    from transformers import AutoModelForCausalLM

    # Other shapes pass here and are named below: transformers names them in its log only.
    model, report = AutoModelForCausalLM.from_pretrained(
        source, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    missing = sorted(report["missing_keys"])
    other = sorted(entry[0] for entry in report["mismatched_keys"])
    if missing or other:
        what, keys = ("without", missing) if missing else ("with another shape of", other)
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        raise ModelError(
            f"The model '{name}' is damaged or incomplete: it comes {what} {keys[0]}{more}; get its files again."
        )
    return model
