"""Answers with or without drafts (:mod:`kvkeep.engine.drafts`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_drafts(model: Any, *, unless: bool = False) -> Iterator[None]:
    """Within the block, a model's answers have no drafts. unless: nothing changes."""
    config = model.generation_config
    before = config.prompt_lookup_num_tokens
    config.prompt_lookup_num_tokens = before if unless else 0
    try:
        yield
    finally:
        config.prompt_lookup_num_tokens = before
