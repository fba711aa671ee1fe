"""Rounds of draft and verify (:mod:`~kvkeep.engine.rounds`) for transformers' ``generate``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from kvkeep.cache import KeepCache
from kvkeep.engine.rounds import Rounds, next_input
from kvkeep.engine.sampling import Sampler
from kvkeep.errors import KvkeepError, UsageError


def verified(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode in rounds: ``model.generate(..., cache=cache, custom_generate=kvkeep.verified)``.

    ``cache``: a :class:`~kvkeep.cache.KeepCache` of a method that ends in ``+verified``. It supports greedy decoding
    and sampling, batches with left padding, logits processors and stopping criteria. ``prompt_lookup_num_tokens=0``
    disables drafts copied from the text. transformers passes neither streamer nor tokenizer to a ``custom_generate``:
    to stream, call :func:`kvkeep.generate`, and instead of ``stop_strings`` pass
    ``stopping_criteria=[StopStringCriteria(tokenizer, [...])]``. ``cache.round.statistics`` counts rounds and drafts.
    Raises UsageError for unsupported options.
    """
    cache = model_kwargs.get("cache")
    if not isinstance(cache, KeepCache) or not cache.method.recall.drafts:
        raise UsageError(
            "Decoding in rounds needs a KeepCache whose method ends in '+verified'; use one, or leave out "
            "custom_generate."
        )
    for wish in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, wish, None):
            raise UsageError(f"'{wish}' is not available while decoding in rounds; leave out custom_generate.")
    if (generation_config.num_beams or 1) > 1:
        raise UsageError(
            "Beam search does not decode in rounds; leave out custom_generate. The cache is exact without it, too."
        )
    if synced_gpus:
        raise UsageError("Decoding in rounds does not synchronise with other processes; leave out synced_gpus.")
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    cache.compress()
    output = _Output(logits_processor, stopping_criteria, generation_config)
    sampler, copies = Sampler(logits_processor, generation_config.do_sample), generation_config.prompt_lookup_num_tokens
    run = Rounds(cache, input_ids, sampler, output.add, stopping_criteria.max_length, copies=copies != 0)
    output.rounds = run
    run.start(outputs.logits[:, -1], model_kwargs.get("attention_mask"))
    del outputs
    rounds = run.rounds()
    try:
        wanted = next(rounds, None)
        while wanted is not None:
            wanted = next_input(rounds, model(**wanted._asdict(), cache=cache, use_cache=True).logits)
    except BaseException:
        with suppress(KvkeepError):  # raised again at the next use of the cache
            run.stream.abandon()
        raise
    return output.result()


class _Output:
    """Handles new tokens as transformers' ``generate`` does: checks its criteria, and returns the tokens with their
    logits and scores."""

    rounds: Rounds
    """The rounds that choose the tokens; set before the first token."""

    def __init__(
        self, processor: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig
    ) -> None:
        self.processor, self.criteria, self.config = processor, criteria, config
        self.wanted = config.return_dict_in_generate and (config.output_logits or config.output_scores)
        self.reported: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by row: logits and scores of its tokens

    def add(self, row: int, token: int, logits: Tensor) -> bool:
        """Add a row's next token, chosen by ``logits`` (rows, vocabulary); return whether it is the last."""
        tokens = self.rounds.tokens[:, : self.rounds.lengths[row]]
        if self.wanted:
            raw = logits.to(copy=True, dtype=torch.float32)
            scores = self.processor(tokens[:, :-1], raw.clone())
            self.reported.setdefault(row, []).append((raw[row], scores[row]))
        return bool(self.criteria(tokens, None)[row])

    def result(self) -> Tensor | GenerateDecoderOnlyOutput:
        """Return the sequences. Rows that finished earlier are padded at the right."""
        rounds, config = self.rounds, self.config
        longest = max(rounds.lengths)
        sequences = rounds.tokens[:, :longest].clone()
        for row, length in enumerate(rounds.lengths):
            if length < longest:
                sequences[row, length:] = config._pad_token_tensor
        if not config.return_dict_in_generate:
            return sequences
        logits, scores = (
            tuple(
                torch.stack(
                    [
                        row[step][part] if step < len(row) else torch.zeros_like(row[0][part])
                        for _, row in sorted(self.reported.items())
                    ]
                )
                for step in range(longest - rounds.prompt)
            )
            if wanted
            else None
            for part, wanted in enumerate((config.output_logits, config.output_scores))
        )
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, cache=rounds.cache)
