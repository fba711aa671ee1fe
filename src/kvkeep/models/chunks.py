"""A long input of a bound model, cut into chunks: all but the last are passes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from kvkeep.errors import UsageError
from kvkeep.models.forward import Reading
from kvkeep.models.same_text import GOES_ON

_ALONG_SEQUENCE = (
    "input_ids", "inputs_embeds", "position_ids", "token_type_ids", "mm_token_type_ids", "cache_position",
    "per_layer_inputs",
)  # fmt: skip
_BY_LAYER = ("output_hidden_states", "output_attentions", "output_router_logits")  # outputs of each layer


def check_input(cache: Reading, decoder: nn.Module, tokens: Tensor, mask: Any) -> None:
    """Raise UsageError for an input that ``cache`` cannot read: of another model or batch, without new tokens, or with
    a mask that does not cover them. tokens: ids or vectors, (batch, tokens, ...)."""
    if cache.decoder not in (None, decoder):
        raise UsageError("This cache was made for another model; make one for this model.")
    total = tokens.shape[1]
    if not total:
        raise UsageError(
            f"The input has no new token: the cache already holds all {cache.length}; append the next tokens to "
            "the input."
        )
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] < cache.length + total:
        raise UsageError(
            f"The attention mask covers {mask.shape[1]} tokens, but the cache holds {cache.length} and the input has "
            f"{total} more. {GOES_ON}"
        )
    if cache.length and cache.rows != len(tokens):
        raise UsageError(
            f"The cache holds a batch of {cache.rows}, and the input is a batch of {len(tokens)}; call reset() before "
            "another batch, or use one cache for each batch."
        )


def all_but_last_chunk(
    decoder: nn.Module, given: dict[str, Any], cache: Reading, sizes: Sequence[int], keep: int
) -> tuple[dict[str, Any], list[Tensor]]:
    """Run all chunks of a long input but the last; return the last one's arguments, and those outputs of the others
    that the caller uses."""
    for wish in _BY_LAYER:
        if given.get(wish, getattr(getattr(decoder, "config", None), wish, None)):
            raise UsageError(
                f"'{wish}' is not available for an input longer than the cache's chunk of {cache.chunk}; give the "
                "cache a larger chunk."
            )
    past, total, earlier = cache.length, sum(sizes), []
    stops = [*accumulate(sizes)]
    cache.record.expect_more(True)
    try:
        for start, stop in zip([0, *stops], stops[:-1], strict=False):
            output = decoder(**_slice(given, start, stop, total, past))
            rows = output[0]
            wanted = rows.shape[1] if keep == 0 else min(rows.shape[1], max(0, stop - (total - keep)))
            if wanted:
                earlier.append(rows[:, rows.shape[1] - wanted :])
    finally:
        cache.record.expect_more(False)
    return _slice(given, stops[-2], total, total, past), earlier


def _slice(given: dict[str, Any], start: int, stop: int, total: int, past: int) -> dict[str, Any]:
    """Cut arguments along the new tokens to ``start``..``stop``; masks also cover the past."""
    cut = dict(given)
    for name in _ALONG_SEQUENCE:
        value = cut.get(name)
        if isinstance(value, Tensor):
            axis = 0 if value.ndim == 1 else 1
            cut[name] = value.narrow(axis, start, stop - start) if value.shape[axis] == total else value
    mask = cut.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        cut["attention_mask"] = mask[:, : mask.shape[1] - total + stop]
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        cut["attention_mask"] = mask[:, :, start:stop, : mask.shape[-1] - total + stop]
    elif isinstance(mask, dict):
        raise UsageError("Attention masks by layer type cannot be divided into chunks; pass a 2-D attention mask.")
    return cut
