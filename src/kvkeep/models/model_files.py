"""What a model's files may state, before transformers allocates and computes by it: sizes, settings, added tokens."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvkeep.errors import ModelError
from kvkeep.models.gguf.facts import MAX_LAYERS

MAX_ITEMS, MAX_NUMBER = 65_536, 1 << 53
"""Items of a list (factors, types of layers), and the largest whole number."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_UNBOUNDED = ("time_step_limit", "time_step_max")
"""Keys whose numbers may be infinite."""
MAX_NAME, MAX_NAMES = 256, 1 << 20
"""Characters of an added token, and of all of them. A million characters take up to eight seconds to prepare."""
_LISTED = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


def check_config(stated: dict[str, Any], name: str) -> None:
    """Raise ModelError for absurd numbers in the config of the model ``name``: of layers, which transformers would
    allocate, of items, or not finite."""
    for part in (stated, *(part for part in stated.values() if isinstance(part, dict))):
        for key in _LAYERS:
            if (count := part.get(key, 1)) is not None and not (type(count) is int and 0 < count <= MAX_LAYERS):
                raise _damaged(name, key, count, f"not 1 to {MAX_LAYERS}")
        if isinstance(window := part.get("sliding_window"), int) and window < 0:
            raise _damaged(name, "sliding_window", window, "a negative number of tokens")
    _check(stated, "", name)


def check_index(folder: Path, name: str) -> None:
    """Raise ModelError if an index of weights in ``folder`` names a file elsewhere, or one that is missing. An index
    that cannot be read is left to transformers."""
    for path in folder.glob("*.index.json"):
        try:
            parts = {*json.loads(path.read_bytes())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        for part in parts:
            if not isinstance(part, str) or not part or Path(part).name != part or not (folder / part).is_file():
                raise ModelError(
                    f"The model '{name}' is damaged or incomplete: its {path.name} names {str(part)[:60]!r}, which is "
                    "no file beside it; get its files again."
                )


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


def check_names(names: Iterable[str], place: object) -> None:
    """Raise ModelError for added tokens of ``place`` that are too long, or too many."""
    total = 0
    for name in names:
        total += len(name)
        if len(name) > MAX_NAME:
            raise ModelError(
                f"'{place}' has an added token of {len(name):,} characters, {name[:20]!r}..., and kvkeep reads at most "
                f"{MAX_NAME}; remove it from the tokenizer."
            )
        if total > MAX_NAMES:
            raise ModelError(
                f"'{place}' has added tokens whose names have more than {MAX_NAMES:,} characters, and kvkeep reads no "
                "more; remove some from the tokenizer."
            )


def check_folder(folder: Path) -> None:
    """Raise ModelError for a folder whose tokenizer has too many or too long added tokens. Files that cannot be read
    are left to transformers."""
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
        path = folder / name
        if path.is_file():
            try:
                check_names(_names(path.read_text(encoding="utf-8")), folder)
            except (OSError, ValueError, RecursionError):
                continue


def _names(text: str) -> Iterator[str]:
    """Yield the names that a file states. A large vocabulary is not parsed."""
    listed = [json.JSONDecoder().raw_decode(text, hit.end())[0] for hit in _LISTED.finditer(text)]
    stated: Any = {"added_tokens": [one for part in listed for one in part]} if listed else json.loads(text)
    inside = [stated, *(stated.values() if isinstance(stated, dict) else ())]
    for part in inside:
        for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            content = one.get("content") if isinstance(one, dict) else one
            if isinstance(content, str) and part is not stated:
                yield content
    if isinstance(stated, dict) and all(isinstance(one, int) for one in stated.values()):
        yield from stated  # added_tokens.json


def check_tokenizer(tokenizer: Any, place: object) -> None:
    """Raise ModelError for a tokenizer whose longest text is no number."""
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float) or not longest > 0:
        raise ModelError(
            f"The tokenizer of '{place}' is damaged: its model_max_length is {str(longest)[:40]!r}, no number above 0."
        )


def check_ids(generation: Any, place: object) -> None:
    """Raise ModelError for a generation_config whose special tokens have no ids."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        stated = getattr(generation, name, None)
        several = stated if isinstance(stated, list) and name == "eos_token_id" else [stated]
        if stated is not None and not all(type(one) is int and -1 <= one < 1 << 31 for one in several):
            raise ModelError(
                f"The generation_config.json of '{place}' is damaged: its {name} is {str(stated)[:40]!r}, no token id."
            )
