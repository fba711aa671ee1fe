"""Chooses the tokens of one answer by its settings and noise, independent of other answers."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvkeep.engine.grammar import Grammar, GrammarProcessor
from kvkeep.errors import KvkeepError, UsageError

SMALLEST = 1e-30
"""The smallest temperature above 0: below it, logits / temperature may overflow float32."""


class NotNumbers(KvkeepError):
    """The model computed NaN."""

    def __init__(self) -> None:
        super().__init__(
            "The model computed logits that are not numbers, so no token can be chosen: its weights are damaged, or "
            "too large for their format; get its files again, or load it with weights float32."
        )


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, as in OpenAI's API and transformers."""

    temperature: float = 0.0
    """0 is greedy, and so is anything below :data:`SMALLEST`."""
    top_p: float = 1.0
    """The smallest share of the probability that the likeliest tokens together have, of which one is sampled; 0: the
    likeliest token."""
    top_k: int = 0
    """The number of likeliest tokens to sample from; 0: all."""
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    """Subtracted once from the logit of each token already generated."""
    frequency: float = 0.0
    """Subtracted from a token's logit for each of its occurrences in the answer."""
    seed: int | None = None
    """None: a random seed, so the answer cannot be repeated."""
    grammar: Grammar | None = None
    """The form that the answer must have; None: any text."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition", 1e-3, 100.0),
            ("presence", -2.0, 2.0),
            ("frequency", -2.0, 2.0),
        ):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"'{name}' has to be from {low:g} to {high:g}, not {getattr(self, name)}.")
        if self.top_k < 0:
            raise UsageError(f"'top_k' has to be 0 or more, not {self.top_k}.")

    @property
    def sampled(self) -> bool:
        """Whether tokens are sampled; otherwise the likeliest token is chosen."""
        return self.temperature >= SMALLEST and self.top_p > 0

    def sampler(self, prompt: int, device: torch.device) -> Sampler:
        """Return the sampler of an answer. prompt: the number of tokens before the answer."""
        noise = None
        if self.sampled:
            seed = secrets.randbits(63) if self.seed is None else self.seed
            noise = torch.Generator(device).manual_seed(seed % 2**64 if seed >= 0 else seed)
        return Sampler(self._processors(prompt), self.sampled, noise, self.seed is not None)

    def _processors(self, prompt: int) -> LogitsProcessorList:
        """Return the logits processors: the grammar's, then others in transformers' order."""
        found: list[LogitsProcessor] = [] if self.grammar is None else [self.grammar.processor(prompt)]
        if self.bias:
            found.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in self.bias.items()}))
        if self.repetition != 1.0:
            found.append(RepetitionPenaltyLogitsProcessor(self.repetition))
        if self.presence or self.frequency:
            found.append(_Written(prompt, self.presence, self.frequency))
        if self.sampled:
            if self.temperature != 1.0:
                found.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                found.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                found.append(TopPLogitsWarper(self.top_p))
            if self.min_p:
                found.append(MinPLogitsWarper(self.min_p))
        return LogitsProcessorList(found)


FIELDS = {name: name for name in ("temperature", "top_p", "top_k", "min_p")} | {
    name: f"{name}_penalty" for name in ("repetition", "presence", "frequency")
}
"""Settings of :class:`Sampling`, and their names in requests and in transformers' GenerationConfig."""


def fields(sampling: Sampling) -> dict[str, float]:
    """Return settings of sampling by the names of :data:`FIELDS`."""
    return {field: getattr(sampling, name) for name, field in FIELDS.items()}


LLAMA_SERVER = Sampling(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)
"""The default sampling of llama-server."""


def default_sampling(model: Any) -> Sampling:
    """Return the sampling of answers whose requests give none: the settings that the model's generation_config states,
    and llama-server's for the others. Raises UsageError for a stated setting that is out of range."""
    stated = {name: getattr(model.generation_config, field, None) for name, field in FIELDS.items()}
    return replace(LLAMA_SERVER, **{name: one for name, one in stated.items() if one is not None})


@dataclass(frozen=True)
class Sampler:
    """Chooses the tokens of an answer: the likeliest, or argmax(p / noise) with exponential noise, as in
    ``torch.multinomial``."""

    processors: LogitsProcessorList
    """Convert logits to scores."""
    sampled: bool = False
    """Whether tokens are sampled; otherwise the likeliest token is chosen."""
    generator: torch.Generator | None = None
    """Generates the noise; None: torch's default generator."""
    seeded: bool = True
    """The caller knows the seed, with which transformers would give the same tokens. Other noise takes less time."""
    _ahead: deque[Tensor] = field(default_factory=deque)
    """Noise of the next tokens, which drafts have used; each token has its own, whatever is drafted."""

    @property
    def grammar(self) -> GrammarProcessor | None:
        """The form of the answer; None: any text."""
        return next((one for one in self.processors if isinstance(one, GrammarProcessor)), None)

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return the scores (1, vocabulary) of the token after ``ids`` (1, tokens), by its ``logits`` (1, vocabulary):
        the largest is chosen. Raises NotNumbers for NaN if tokens are sampled."""
        scores = self.draft_scores(ids, logits, 0)
        if self.sampled:
            self._ahead.popleft()
        return scores

    def draft_scores(self, ids: Tensor, logits: Tensor, drafts: int) -> Tensor:
        """Return the scores of a draft, the last ``drafts`` of whose ``ids`` are drafts, too. With the same logits they
        will be those of :meth:`scores`. Raises NotNumbers as it does."""
        scores, likely = logits.to(torch.float32, copy=True), None
        for number, processor in enumerate(self.processors):
            scores = processor(ids, scores)
            if number == self._top_k:
                likely = (scores != float("-inf")).nonzero()[:, 1]
                scores = scores[:, likely]
        if not self.sampled:
            return scores
        while len(self._ahead) <= drafts:
            self._ahead.append(self._noise(logits))
        scores, noise = scores.softmax(-1), self._ahead[drafts]
        if not bool(scores.isfinite().all()):
            raise NotNumbers
        if likely is None:
            return scores / noise
        return torch.zeros_like(noise).index_copy_(1, likely, scores / noise[:, likely])

    @cached_property
    def _top_k(self) -> int | None:
        """The number of the processor after which only the likeliest tokens are left, if those behind it only compare
        scores with each other: top-p sorts them, which takes longer than some layers where they are a whole vocabulary.
        None: there is none."""
        names = [type(one) for one in self.processors]
        found = names.index(TopKLogitsWarper) if self.sampled and TopKLogitsWarper in names else None
        return found if found is None or {*names[found + 1 :]} <= {TopPLogitsWarper, MinPLogitsWarper} else None

    def _noise(self, logits: Tensor) -> Tensor:
        """Return exponential noise for a token, of the shape of its ``logits``."""
        noise = torch.empty_like(logits, dtype=torch.float32)
        if self.seeded:
            return noise.exponential_(1, generator=self.generator)
        return noise.uniform_(generator=self.generator).log_().neg_()


def likeliest(scores: Tensor) -> int:
    """Return the number of the largest of ``scores``, (vocabulary,) float32; the first of equal ones."""
    return int(scores.numpy().argmax() if scores.is_cpu else scores.argmax())  # NumPy's takes less time


class _Written(LogitsProcessor):
    """Subtracts ``presence`` from the logit of every token in the answer, and ``frequency`` for each occurrence."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        written = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
