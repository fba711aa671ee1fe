"""A model under test: one model with one cache method within one budget. Tasks use it without access to the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.generate import generate
from kvkeep.errors import UsageError
from kvkeep.models.loading import Loaded
from kvkeep.stock import memory_of
from kvkeep_lab.peers import PeerReader, peer_of
from kvkeep_lab.reading import cache_for, continued, read, scores, whole_bytes
from kvkeep_lab.reference import Reference, ReferenceCase, ReferenceRow


@dataclass(frozen=True)
class AnswerCost:
    """What one answer took. prefill_s: seconds of the prompt. token_s: seconds of each token after the first, None
    where there is none. memory: bytes afterwards, as ``cache.memory()`` gives them. entries: the budget of a full
    layer, None where it has none. whole_bytes: what an unbounded cache of bfloat16 would hold."""

    prompt_tokens: int
    prefill_s: float
    token_s: float | None
    memory: dict[str, Any]
    exactness: str
    entries: int | None
    whole_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes of entries that attention reads, in full or compressed."""
        return int(self.memory["resident_bytes"]) + int(self.memory["compressed_bytes"])


@dataclass(frozen=True)
class SubjectAnswer:
    """What was written, greedily, and its cost. logs: ln p of each token of the right answer, where one was given."""

    text: str
    tokens: list[int]
    cost: AnswerCost
    logs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Likelihood:
    """How likely a continuation is: ln p of each of its tokens, and whether each is the likeliest."""

    logs: list[float]
    greedy: bool


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

    def write(self, ids: Sequence[int], new: int, ended: Callable[[str], bool] | None = None) -> SubjectAnswer:
        """Read a prompt and answer greedily by up to ``new`` tokens. An end of text ends it, and so does ``ended``,
        called with the text so far. Methods that draft do so in rounds."""
        context = len(ids) + new
        cache = self._cache(context)
        if isinstance(cache, PeerReader):
            return self._written(cache, ids, new, ended or (lambda text: False))
        made = generate(self.loaded.model, self.tokenizer, ids, cache, max_new_tokens=new, ended=ended)
        steps = len(made.tokens) - 1
        seconds = [made.timing.prefill_s, *([made.timing.decode_s / steps] if steps > 0 else [])]
        return SubjectAnswer(made.text, made.tokens, self._cost(cache, len(ids), context, seconds))

    def examine(self, ids: Sequence[int], right: Sequence[int], new: int) -> SubjectAnswer:
        """Return ln p of each token of a ``right`` answer to a prompt, and what is written without it.

        The right answer is given token by token, as decoding would. Where each of its tokens is the likeliest, the
        greedy answer begins with it, and nothing more is run; elsewhere the prompt is read again, and up to ``new``
        tokens are written. The cost is of the first reading, so methods that draft make no rounds.
        """
        context = len(ids) + max(new, len(right))
        cache = self._cache(context)
        logs, seconds, agrees = [], [], True
        passed = read(self.loaded.model, self._tensor(ids), cache, len(right), right)
        for (logits, elapsed), token in zip(passed, right, strict=True):
            logs.append(float(logits.double().log_softmax(-1)[token]))
            seconds.append(elapsed)
            agrees = agrees and int(logits.argmax()) == token
        cost = self._cost(cache, len(ids), context, seconds)
        if agrees:
            return SubjectAnswer(self.tokenizer.decode(list(right)), list(right), cost, logs)
        return replace(self.write(ids, new), cost=cost, logs=logs)

    def score(self, ids: Sequence[int], first: int, step: int = 1) -> tuple[list[float], AnswerCost]:
        """Return ln p of each token from number ``first`` on: those before it are read as a prompt, the others ``step``
        at a time. Each attends to what the cache holds of earlier steps, and to its own step."""
        cache = self._full(len(ids))
        passed = list(scores(self.loaded.model, self._tensor(ids), cache, first, step))
        logs = [log for found, _ in passed for log in found]
        stepwise = sum(seconds for _, seconds in passed[1:])
        seconds = [passed[0][1], *([stepwise / (len(logs) - 1)] if len(logs) > 1 else [])]
        return logs, self._cost(cache, len(ids), len(ids), seconds)

    def weigh(self, ids: Sequence[int], continuations: Sequence[Sequence[int]]) -> tuple[list[Likelihood], AnswerCost]:
        """Read a prompt once, and return how likely each of ``continuations`` (a token each at least) is.

        They are given token by token, as decoding would, side by side; where the cache is exact many at once, and the
        cost has no seconds of a token. A budget in percent is of the prompt and the longest of them. The cost's bytes
        are those of the prompt, before the cache is repeated for each.
        """
        context = len(ids) + max(map(len, continuations))
        cache = self._full(context)
        exact = getattr(cache, "exactness", Exactness.EXACT) == Exactness.EXACT
        logs: list[list[float]] = [[] for _ in continuations]
        greedy, seconds, cost = [True] * len(continuations), [], None
        passed = continued(self.loaded.model, self._tensor(ids), cache, continuations, exact)
        for position, (logits, elapsed) in enumerate(passed):
            cost = cost or self._cost(cache, len(ids), context, [elapsed])
            seconds.append(elapsed)
            likely, best = logits.double().log_softmax(-1), logits.argmax(-1).tolist()
            for row, tokens in enumerate(continuations):
                if position < len(tokens):
                    logs[row].append(float(likely[row, tokens[position]]))
                    greedy[row] = greedy[row] and best[row] == tokens[position]
        assert cost is not None
        token_s = None if exact or not seconds[1:] else fmean(seconds[1:])
        return [Likelihood(*found) for found in zip(logs, greedy, strict=True)], replace(cost, token_s=token_s)

    def compare(self, ids: Sequence[int], new: int) -> ReferenceRow:
        """Return how far ``new`` tokens after the prompt are from the unbounded cache's."""
        key = (*ids, new)
        if key not in self.references:
            self.references[key] = Reference.of(self.loaded.model, ids, new, self.chunk)
        return self.references[key].measure(ReferenceCase(self.method, self.budget))

    def _cost(self, cache: Any, prompt_tokens: int, context: int, seconds: Sequence[float]) -> AnswerCost:
        """Return the cost of a prompt whose first of ``seconds`` is its own, the others of a token each; ``context``:
        tokens of prompt and answer at most."""
        exactness, entries = str(getattr(cache, "exactness", Exactness.EXACT)), getattr(cache, "entries", None)
        token_s, full_bytes = fmean(seconds[1:]) if seconds[1:] else None, whole_bytes(self.loaded.model, context)
        return AnswerCost(
            prompt_tokens, seconds[0], token_s, memory_of(cache).as_dict(), exactness, entries, full_bytes
        )

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self.loaded.model.device)

    def _cache(self, context: int) -> Any:
        return cache_for(self.loaded.model, self.method, self.budget, context, self.chunk)

    def _full(self, context: int) -> Any:
        """Return a cache for texts that are scored; raises UsageError where a peer reads by itself."""
        cache = self._cache(context)
        if isinstance(cache, PeerReader):
            raise UsageError(
                f"'{self.method}' runs the model by itself, so it cannot score a given text; use it with "
                "generated answers only."
            )
        return cache

    def _written(self, reader: PeerReader, ids: Sequence[int], new: int, ended: Callable[[str], bool]) -> SubjectAnswer:
        """Write greedily with what does the reading itself."""
        model = self.loaded.model
        stated = model.generation_config.eos_token_id
        ends = stated if isinstance(stated, list) else [stated]
        tokens: list[int] = []
        seconds: list[float] = []
        text = ""
        for logits, elapsed in read(model, self._tensor(ids), reader, new):
            tokens.append(int(logits.argmax()))
            seconds.append(elapsed)
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            if tokens[-1] in ends or ended(text):
                break
        return SubjectAnswer(text, tokens, self._cost(reader, len(ids), len(ids) + new, seconds))
