"""A model under test, with one cache method within one budget. Tasks use it without access to the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.generate import generate
from kvkeep.engine.answer import Ask
from kvkeep.engine.grammar import Grammar
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.loading import Loaded
from kvkeep.policies.methods import resolve
from kvkeep.policies.names import ONESHOT, STOCK
from kvkeep.stock import memory_of
from kvkeep_lab.peers import PeerReader, Shortener, peer_of
from kvkeep_lab.peers.base import entries_of
from kvkeep_lab.reading import (
    PINNED,
    ReadCache,
    Readings,
    answered,
    cache_for,
    continued,
    copied,
    read,
    read_text,
    scores,
    whole_bytes,
)
from kvkeep_lab.reference import ReferenceAnswer, ReferenceCase, ReferenceRow
from kvkeep_lab.shared_pass import takes_over


@dataclass(frozen=True)
class AnswerCost:
    """The cost of one answer."""

    prompt_tokens: int
    prefill_s: float
    """Seconds of the prompt."""
    token_s: float | None
    """Seconds of each token after the first; None if there is none."""
    memory: dict[str, Any]
    """Bytes after the answer, as ``cache.memory()`` returns them."""
    exactness: str
    entries: int | None
    """Budget of a full layer; None without one."""
    whole_bytes: int
    """Bytes of an unbounded cache in bfloat16."""

    @property
    def held_bytes(self) -> int:
        """Bytes of entries that attention reads, in full or compressed."""
        return int(self.memory["resident_bytes"]) + int(self.memory["compressed_bytes"])


@dataclass(frozen=True)
class SubjectAnswer:
    """A greedy answer and its cost."""

    text: str
    tokens: list[int]
    cost: AnswerCost
    logs: list[float] = field(default_factory=list)
    """ln p of each token of the right answer, if there was one."""


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a continuation."""

    logs: list[float]
    """ln p of each of its tokens."""
    greedy: bool
    """Whether each of its tokens is the most probable."""


@dataclass(frozen=True)
class ReadText:
    """A text that is read once, before questions about it are known."""

    ids: tuple[int, ...]
    context: int
    """Maximum tokens of the text, the longest question and its answer. A budget in percent is a share of them."""
    head: int = 0
    """Number of its first tokens that no peer leaves out: the chat template and the instruction."""


def at_once(method: str) -> str:
    """Return the name of a method that reads each prompt in one pass before it evicts entries: ``method`` itself if it
    evicts none, or reads the whole text first anyway."""
    if method == STOCK or peer_of(method) is not None:
        return method
    name = method.removesuffix(PINNED)
    found = resolve(name)
    once = found.oneshot or found.reading is not None or found.selector.keeps_all
    return method if once else f"{name}+{ONESHOT}{method.removeprefix(name)}"


@dataclass
class Subject:
    """One model with one cache method, kvkeep's or a peer's."""

    loaded: Loaded
    method: str
    budget: str | None
    """The budget as the user wrote it; a share is of prompt and answer together. None for methods without a budget."""
    chunk: int | None = None
    """Tokens of a prompt read at a time."""
    references: dict[tuple[int, ...], ReferenceAnswer] = field(default_factory=dict)
    """Answers of the unbounded cache, shared with later subjects."""
    readings: Readings = field(default_factory=dict)
    """What methods share of reading texts, shared with later subjects."""
    _texts: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """What :meth:`written_once` wrote."""
    _read: tuple[ReadText, dict[str, tuple[Any, ...]]] | None = None
    """The text that was read last, and what was made of it, by method. An episodic method is a method for each
    episode."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.loaded.tokenizer

    @property
    def versions(self) -> dict[str, str]:
        """Versions of packages other than kvkeep's, by name, for a peer."""
        peer = peer_of(self.method)
        return {} if peer is None else peer.versions

    def write(
        self,
        ids: Sequence[int],
        new: int,
        ended: Callable[[str], bool] | None = None,
        shared: bool = False,
        pinned: int = 0,
    ) -> SubjectAnswer:
        """Read a prompt and generate greedily up to ``new`` tokens. An end of text ends the answer, and so does
        ``ended``, which is called with the text so far.

        shared: methods share what they can of reading the prompt, which stays in :attr:`readings`; only those that
        draft then follow the model's generation config. pinned: as :attr:`~kvkeep_lab.tasks.base.Sample.instructions`.
        """
        context = len(ids) + new
        cache = self._cache(context, pinned)
        if isinstance(cache, PeerReader):
            return self._written(cache, ids, new, ended)
        if not shared or (isinstance(cache, KeepCache) and cache.method.recall.drafts):
            pieces = list[str]()
            made = generate(
                self.loaded.model,
                self.tokenizer,
                ids,
                cache,
                max_new_tokens=new,
                on_text=pieces.append,
                interrupted=None if ended is None else lambda: ended("".join(pieces)),
            )
            steps = len(made.tokens) - 1
            seconds = [made.timing.prefill_s, *([made.timing.decode_s / steps] if steps > 0 else [])]
            text = self.tokenizer.decode(made.tokens, skip_special_tokens=True)
            return SubjectAnswer(text, made.tokens, self._cost(cache, len(ids), context, seconds))
        first, shares = None, takes_over(cache, len(ids))
        if isinstance(cache, KeepCache) and cache.reading:  # within the budget it reads no text again
            shares = cache.entries is not None and cache.entries < len(ids)
        if shares:
            first = read_text(self.loaded.model, self._tensor(ids), cache, self.readings)
            cache = first.cache
        return self._written(cache, ids, new, ended, first)

    def written_once(self, ids: Sequence[int], new: int) -> str:
        """Return the text that :meth:`write` writes after a prompt; a repeated prompt is not read again."""
        key = (self.method, self.budget, new, *ids)
        if key not in self._texts:
            self._texts[key] = self.write(ids, new).text
        return self._texts[key]

    def examine(self, ids: Sequence[int], right: Sequence[int], new: int) -> SubjectAnswer:
        """Return ln p of each token of a ``right`` answer to a prompt, and the answer generated without it.

        The right answer is read token by token, as in decoding. If each of its tokens is the most probable, the greedy
        answer begins with it, and no second run is needed. Otherwise up to ``new`` tokens are generated, one pass a
        token. The cost is that of the first run.
        """
        context = len(ids) + max(new, len(right))
        if peer_of(self.method) is None:
            return self.examine_after(ReadText(tuple(ids), context), (), right, new)
        cache = self._cache(context)
        logs, seconds, agrees = self._given(cache, ids, right)
        cost = self._cost(cache, len(ids), context, seconds)
        if agrees:
            return SubjectAnswer(self.tokenizer.decode(list(right)), list(right), cost, logs)
        return replace(self.write(ids, new), cost=cost, logs=logs)

    def examine_after(self, text: ReadText, ids: Sequence[int], right: Sequence[int], new: int) -> SubjectAnswer:
        """Do the same as :meth:`examine` with a question ``ids`` about a text that is read before. Consecutive calls
        with the same text read it once, and each continues a copy of its cache. The seconds of the prompt are those of
        the text and of the question. No ``ids``: the text ends with the question. Raises UsageError for a peer that
        reads the text itself."""
        if isinstance(peer := peer_of(self.method), Shortener):
            return self._shortened(peer, text, ids, lambda full, prompt: full.examine_after(prompt, ids, right, new))
        before = self._after(text, ids)
        twin, first = copied(before.cache), None if ids else before
        logs, seconds, agrees = self._given(twin, ids, right, first)
        seconds[0] += before.seconds if ids else 0
        cost = self._cost(twin, len(text.ids) + len(ids), text.context, seconds)
        if agrees:
            return SubjectAnswer(self.tokenizer.decode(list(right)), list(right), cost, logs)
        return replace(self._written(copied(before.cache), ids, new, first=first), cost=cost, logs=logs)

    def write_after(
        self, text: ReadText, questions: Sequence[Sequence[int]], new: int, grammar: Grammar | None = None
    ) -> list[SubjectAnswer]:
        """Generate greedily up to ``new`` tokens after each of the ``questions`` (at least a token each) about a text
        that is read before, as :meth:`examine_after` does. Their passes are shared where the engine can; of the seconds
        each answer has the share of its tokens. grammar: the form of the answers. Raises as :meth:`examine_after`
        does."""
        if isinstance(peer := peer_of(self.method), Shortener):

            def shortened(ids: Sequence[int]) -> SubjectAnswer:
                return self._shortened(
                    peer, text, ids, lambda full, prompt: full.write_after(prompt, [ids], new, grammar)[0]
                )

            return [shortened(ids) for ids in questions]
        before = [self._after(text, ids) for ids in questions]
        asks = [Ask([*text.ids, *ids], new, Sampling(grammar=grammar)) for ids in questions]
        found = self._answers_to(asks, [copied(one.cache) for one in before], [text.context] * len(asks))
        return [
            replace(answer, cost=replace(answer.cost, prefill_s=one.seconds + answer.cost.prefill_s))
            for one, answer in zip(before, found, strict=True)
        ]

    def write_each(self, prompts: Sequence[Sequence[int]], new: int, pinned: Sequence[int]) -> list[SubjectAnswer]:
        """Do the same as :meth:`write` with each of ``prompts``, without penalties that the model's generation_config
        states. Answers share passes where the engine can; each has seconds in proportion to the tokens that it reads
        and writes. pinned: one number for each prompt."""
        contexts = [len(ids) + new for ids in prompts]
        caches = [self._cache(context, first) for context, first in zip(contexts, pinned, strict=True)]
        if any(isinstance(cache, PeerReader) for cache in caches):
            return [self._written(cache, ids, new) for cache, ids in zip(caches, prompts, strict=True)]
        return self._answers_to([Ask(ids, new) for ids in prompts], caches, contexts)

    def _answers_to(self, asks: Sequence[Ask], caches: Sequence[Any], contexts: Sequence[int]) -> list[SubjectAnswer]:
        """Generate the answers to ``asks``, each in its cache, which holds the first tokens of the prompt. The seconds
        of a prompt are those of the tokens that the cache did not hold. contexts: the maximum tokens of each prompt and
        answer."""
        read = [len(ask.prompt) - cache.get_seq_length() for ask, cache in zip(asks, caches, strict=True)]
        start = time.perf_counter()
        answers = answered(self.loaded.model, asks, caches)
        token_s = (time.perf_counter() - start) / (sum(read) + sum(len(answer.tokens) for answer in answers))
        found = list[SubjectAnswer]()
        for count, answer, context in zip(read, answers, contexts, strict=True):
            seconds = [count * token_s, *[token_s] * (len(answer.tokens) - 1)]
            cost = self._cost(answer.cache, len(answer.ask.prompt), context, seconds)
            text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            found.append(SubjectAnswer(text, answer.tokens, cost))
        return found

    def _shortened(
        self,
        peer: Shortener,
        text: ReadText,
        ids: Sequence[int],
        answered: Callable[[Subject, ReadText], SubjectAnswer],
    ) -> SubjectAnswer:
        """Return what ``answered`` returns of a full cache and of what ``peer`` makes of the text for the question
        ``ids``. Raises BudgetError if the budget has no space for the text, or exceeds the model's positions."""
        entries = entries_of(self.loaded.model, self.budget or "100%", text.context)
        positions = ModelGeometry.from_config(self.loaded.model.config).max_positions
        if positions is not None and entries > positions:
            raise BudgetError(
                f"A prompt of {entries:,} tokens exceeds the model's context of {positions:,}; give a smaller budget."
            )
        known = self._known(text)
        if self.method not in known:
            limit = entries - text.head - (text.context - len(text.ids))
            if limit < 1:
                raise BudgetError(f"A budget of {entries} tokens has no space for a text; give a larger one.")
            start = time.perf_counter()
            made = peer.read(self.loaded, text.ids[text.head :], limit)
            full = replace(self, method="full", budget=None, _read=None)
            known[self.method] = (made, full), time.perf_counter() - start
        (select, full), reading = known[self.method]
        start = time.perf_counter()
        prompt = ReadText((*text.ids[: text.head], *select(ids)), entries)
        reading += time.perf_counter() - start
        answer = answered(full, prompt)
        cost = replace(
            answer.cost,
            prompt_tokens=len(text.ids) + len(ids),
            prefill_s=answer.cost.prefill_s + reading,
            exactness=str(Exactness.LOSSY),
            entries=entries,
            whole_bytes=whole_bytes(self.loaded.model, text.context),
        )
        return replace(answer, cost=cost)

    def at_once(self) -> Subject:
        """Return the subject that reads each prompt in one pass before it evicts entries."""
        method = at_once(self.method)
        return self if method == self.method else replace(self, method=method, _read=None)

    def score(self, ids: Sequence[int], first: int, step: int = 1) -> tuple[list[float], AnswerCost]:
        """Return ln p of each token from index ``first`` on. Earlier tokens are read as a prompt, the others ``step``
        at a time. Each token attends to the cached entries of earlier steps, and to its step."""
        cache = self._full(len(ids))
        passed = list(scores(self.loaded.model, self._tensor(ids), cache, first, step))
        logs = [log for found, _ in passed for log in found]
        stepwise = sum(seconds for _, seconds in passed[1:])
        seconds = [passed[0][1], *([stepwise / (len(logs) - 1)] if len(logs) > 1 else [])]
        return logs, self._cost(cache, len(ids), len(ids), seconds)

    def weigh(self, ids: Sequence[int], continuations: Sequence[Sequence[int]]) -> tuple[list[Likelihood], AnswerCost]:
        """Read a prompt once, and return the likelihood of each of ``continuations`` (at least a token each).

        Continuations are read token by token, as in decoding, as rows of a batch. An exact cache reads many tokens at
        once, and the cost then has no seconds per token. The base of a budget in percent is the prompt and the longest
        continuation. The bytes of the cost are those of the prompt, before the cache is repeated for each continuation.
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
        """Return the comparison of ``new`` tokens after the prompt with the unbounded cache's tokens."""
        key = (*ids, new)
        if key not in self.references:
            self.references[key] = ReferenceAnswer.of(self.loaded.model, ids, new, self.chunk)
        return self.references[key].measure(ReferenceCase(self.method, self.budget))

    def _known(self, text: ReadText) -> dict[str, tuple[Any, ...]]:
        """Return what was made of ``text`` so far, by method, and last the seconds that it took. Another text's is
        forgotten."""
        if self._read is None or self._read[0] != text:
            self._read = text, {}
        return self._read[1]

    def _after(self, text: ReadText, question: Sequence[int]) -> ReadCache:
        """Return the cache that has read ``text``, which answers ``question``."""
        known = self._known(text)
        if (method := self._matched(text, question)) not in known:
            cache = replace(self, method=method)._full(text.context)
            known[method] = read_text(self.loaded.model, self._tensor(text.ids), cache, self.readings)
        return ReadCache(*known[method])

    def _matched(self, text: ReadText, question: Sequence[int]) -> str:
        """Return the method; if it has a cache for each episode of a text, that of the episode that ``question`` is
        about."""
        if not question or self.method == STOCK or peer_of(self.method) is not None:
            return self.method
        if (matched := getattr(resolve(self.method.removesuffix(PINNED)).selector, "matched", None)) is None:
            return self.method
        both = (self._tensor(ids)[0] for ids in (text.ids, question))
        chosen = matched(*both, self.loaded.model.get_input_embeddings())
        first, plus, rest = self.method.partition("+")
        return f"{first}{',' if ':' in first else ':'}episode={chosen.episode}{plus}{rest}"

    def _given(
        self, cache: Any, ids: Sequence[int], right: Sequence[int], first: ReadCache | None = None
    ) -> tuple[list[float], list[float], bool]:
        """Read ``ids``, which ``first`` has read if it is given, and then the tokens of a ``right`` answer one by one.
        Return ln p and the seconds of each, and whether each is the most probable."""
        logs, seconds, agrees = [], [], True
        passed = read(self.loaded.model, self._tensor(ids), cache, len(right), right, first)
        for (logits, elapsed), token in zip(passed, right, strict=True):
            logs.append(float(logits.double().log_softmax(-1)[token]))
            seconds.append(elapsed)
            agrees = agrees and int(logits.argmax()) == token
        return logs, seconds, agrees

    def _cost(self, cache: Any, prompt_tokens: int, context: int, seconds: Sequence[float]) -> AnswerCost:
        """Return the cost of an answer. The first of ``seconds`` is the time of the prompt, the others are times of a
        token each; ``context``: maximum tokens of prompt and answer."""
        exactness, entries = str(getattr(cache, "exactness", Exactness.EXACT)), getattr(cache, "entries", None)
        token_s, full_bytes = fmean(seconds[1:]) if seconds[1:] else None, whole_bytes(self.loaded.model, context)
        return AnswerCost(
            prompt_tokens, seconds[0], token_s, memory_of(cache).as_dict(), exactness, entries, full_bytes
        )

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], dtype=torch.long, device=self.loaded.model.device)

    def _cache(self, context: int, pinned: int = 0) -> Any:
        return cache_for(self.loaded.model, self.method, self.budget, context, self.chunk, pinned)

    def _full(self, context: int) -> Any:
        """Return a cache for scoring texts. Raises UsageError for a peer that reads the text itself."""
        cache = self._cache(context)
        if isinstance(cache, PeerReader):
            raise UsageError(
                f"'{self.method}' runs the model by itself, so it cannot score a given text; use it with "
                "generated answers only."
            )
        return cache

    def _written(
        self,
        cache: Any,
        ids: Sequence[int],
        new: int,
        ended: Callable[[str], bool] | None = None,
        first: ReadCache | None = None,
    ) -> SubjectAnswer:
        """Generate greedily with one pass a token, also with a peer that reads the text itself. first: as in
        :func:`~kvkeep_lab.reading.read`."""
        model = self.loaded.model
        stated = model.generation_config.eos_token_id
        ends = stated if isinstance(stated, list) else [stated]
        tokens: list[int] = []
        seconds: list[float] = []
        text = ""
        for logits, elapsed in read(model, self._tensor(ids), cache, new, first=first):
            tokens.append(int(logits.argmax()))
            seconds.append(elapsed)
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            if tokens[-1] in ends or (ended is not None and ended(text)):
                break
        return SubjectAnswer(text, tokens, self._cost(cache, len(ids), len(ids) + new, seconds))
