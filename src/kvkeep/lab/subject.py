"""Who is examined: one model with one cache method within one budget. Tasks ask it, and know nothing of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from kvkeep.cache import memory_of
from kvkeep.decode.generate import generate
from kvkeep.lab.compare import Case, Reference, Row
from kvkeep.lab.peers import Reader, peer_of
from kvkeep.lab.reading import cache_for, read
from kvkeep.models.loading import Loaded
from kvkeep.policies.request import Exactness


@dataclass(frozen=True)
class Cost:
    """What one answer took. prefill_s: seconds of the prompt. token_s: of each token after it, None where there was but
    one. memory: bytes afterwards, as ``cache.memory()`` has them. entries: the budget of a full layer, None: all."""

    prompt_tokens: int
    prefill_s: float
    token_s: float | None
    memory: dict[str, Any]
    exactness: str
    entries: int | None


@dataclass(frozen=True)
class Answer:
    """What was written, greedily, and its cost."""

    text: str
    tokens: list[int]
    cost: Cost


@dataclass(frozen=True)
class Examination:
    """What was written, greedily; ln p of each token of the right answer; and the cost."""

    text: str
    logs: list[float]
    cost: Cost


@dataclass
class Subject:
    """One model with one way of caching, kvkeep's or a peer's.

    budget: in the user's words, a share being of prompt and answer together; None where the method takes none. chunk:
    tokens of a prompt taken at a time. references: what the unbounded cache wrote, kept for the subjects that follow.
    """

    loaded: Loaded
    method: str
    budget: str | None
    chunk: int | None = None
    references: dict[tuple[int, ...], Reference] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        """The model's own."""
        return self.loaded.tokenizer

    @property
    def versions(self) -> dict[str, str]:
        """What took part beside kvkeep's own, by name: a peer's."""
        peer = peer_of(self.method)
        return {} if peer is None else peer.versions

    def write(self, ids: Sequence[int], new: int) -> Answer:
        """Read a prompt and answer greedily by up to ``new`` tokens, an end of text ending it; methods that draft do so
        in rounds."""
        cache = self._cache(len(ids) + new)
        if isinstance(cache, Reader):
            return self._written(cache, ids, new)
        made = generate(self.loaded.model, self.tokenizer, ids, cache, max_new_tokens=new)
        steps, timing = len(made.tokens) - 1, made.timing
        cost = Cost(
            len(ids),
            timing.prefill_s,
            timing.decode_s / steps if steps > 0 else None,
            made.memory.as_dict(),
            made.exactness,
            getattr(cache, "entries", None),
        )
        return Answer(made.text, made.tokens, cost)

    def examine(self, ids: Sequence[int], right: Sequence[int], new: int) -> Examination:
        """Tell what this subject makes of a ``right`` answer to a prompt, and what it writes by itself.

        The right answer is given token by token, as decoding would. Where each of its tokens is the likeliest, what is
        written greedily begins with it, and nothing more is run; elsewhere the prompt is read again, and up to ``new``
        tokens are written. The cost is of the first reading, so methods that draft make no rounds.
        """
        cache = self._cache(len(ids) + max(new, len(right)))
        prompt = torch.tensor([list(ids)], device=self.loaded.model.device)
        logs, seconds, agrees = [], [], True
        passed = read(self.loaded.model, prompt, cache, len(right), right)
        for (logits, took), token in zip(passed, right, strict=True):
            logs.append(float(logits.double().log_softmax(-1)[token]))
            seconds.append(took)
            agrees = agrees and int(logits.argmax()) == token
        cost = _cost(cache, len(ids), seconds)
        text = self.tokenizer.decode(list(right)) if agrees else self.write(ids, new).text
        return Examination(text, logs, cost)

    def compare(self, ids: Sequence[int], new: int) -> Row:
        """Return how far ``new`` tokens after the prompt are from the unbounded cache's."""
        key = (*ids, new)
        if key not in self.references:
            self.references[key] = Reference.of(self.loaded.model, ids, new, self.chunk)
        return self.references[key].measure(Case(self.method, self.budget))

    def _cache(self, context: int) -> Any:
        return cache_for(self.loaded.model, self.method, self.budget, context, self.chunk)

    def _written(self, reader: Reader, ids: Sequence[int], new: int) -> Answer:
        """Write greedily with what does the reading itself."""
        model = self.loaded.model
        stated = model.generation_config.eos_token_id
        ends = stated if isinstance(stated, list) else [stated]
        tokens: list[int] = []
        seconds: list[float] = []
        for logits, took in read(model, torch.tensor([list(ids)], device=model.device), reader, new):
            tokens.append(int(logits.argmax()))
            seconds.append(took)
            if tokens[-1] in ends:
                break
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(text, tokens, _cost(reader, len(ids), seconds))


def _cost(cache: Any, prompt_tokens: int, seconds: Sequence[float]) -> Cost:
    return Cost(
        prompt_tokens,
        seconds[0],
        fmean(seconds[1:]) if len(seconds) > 1 else None,
        memory_of(cache).as_dict(),
        str(getattr(cache, "exactness", Exactness.EXACT)),
        getattr(cache, "entries", None),
    )
