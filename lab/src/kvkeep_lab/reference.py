"""The quality of every method on one text: KV-Direct's Fig. 4 and Fig. 9 on the user's own model.

The reference is an unbounded cache (:func:`unbounded`): its N greedy tokens r_i after the prompt, with ends of text
ignored, and its distributions p_i. Each method and budget is measured in two ways, because each way alone can mislead.
Both give a share of equal tokens and KL(p_i || q_i) = sum_v p_i(v) (ln p_i(v) - ln q_i(v)) in nats at each position:

*teacher-forced*: q_i receives r_0, r_1, ... one by one, so both distributions have the same text. Top-1 is the share of
positions where r_i has the largest q_i. The perplexity is exp(-mean ln q_i(r_i)).
*free-running*: q_i receives the tokens that the method chose. Match is the share of positions where its token is r_i.
After a difference, p_i and q_i have different texts. One early difference can therefore change all later tokens, and
the KL after it does not measure the method's quality.

A free run that chose r_0 ... r_{N-2} also gives the teacher-forced figures, and the second pass is skipped. Logits are
float32 and distributions float64, so that a KL of 0 means equal logits, and 1e-11 is not a rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.meter import Memory
from kvkeep.policies.names import STOCK
from kvkeep.stock import memory_of
from kvkeep_lab.partial import INTERRUPTED, Interruption, reason
from kvkeep_lab.published.selective import certificates
from kvkeep_lab.reading import cache_for, read, takes
from kvkeep_lab.statistics import mean

Progress = Callable[[str, float, float], None]
"""Called with the current measurement, the work done and the total work, in seconds at the reference's speed. The total
is 1 until the reference has been measured."""


@dataclass(frozen=True)
class ReferenceCase:
    """One method and one budget."""

    method: str
    """A name with its parameters."""
    budget: str | None = None
    """The budget as the user wrote it; None for methods without a budget."""

    @property
    def label(self) -> str:
        """The case as text for people."""
        return f"{self.method} at {self.budget}" if self.budget else self.method


@dataclass(frozen=True)
class ReferenceRow:
    """The results of one method within one budget."""

    method: str
    budget: str | None
    exactness: str = ""
    """Exactness that the cache reported at the end."""
    entries: int | None = None
    """Effective budget of a full layer."""
    match: float | None = None
    """Free-running: share of positions whose token is the reference's."""
    differs_at: int | None = None
    """Free-running: first position (from 0) whose token is not the reference's, or None."""
    kl_mean: float | None = None
    """Teacher-forced: mean of ``kl``."""
    kl_max: float | None = None
    """Teacher-forced: maximum of ``kl``."""
    kl: list[float] = field(default_factory=list)
    """Teacher-forced: KL in nats at each position."""
    kl_free_mean: float | None = None
    """Free-running: mean of ``kl_free``."""
    kl_free: list[float] = field(default_factory=list)
    """Free-running: KL in nats at each position."""
    top1: float | None = None
    """Teacher-forced: share of positions whose largest probability is the reference's token."""
    perplexity: float | None = None
    """Teacher-forced: perplexity of the reference's continuation."""
    memory: dict[str, Any] = field(default_factory=lambda: Memory().as_dict())
    """Bytes after the free run."""
    prefill_s: float | None = None
    tokens_per_s: float | None = None
    """Rate of decoding; None if only one token was generated."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the free run."""
    away: float | None = None
    """Selective recall: entries per KV head that could be recalled, mean over steps and layers."""
    recalled: float | None = None
    """Selective recall: entries per KV head that were recalled, mean over steps and layers."""
    left_out: float | None = None
    """Selective recall: largest bound on a query's attention to entries that were not recalled."""
    merges: tuple[int, int] = (0, 0)
    """Pairs that the free run merged, and shares of keys that were clamped."""
    error: str = ""
    """Reason if there are no other figures."""

    @property
    def label(self) -> str:
        """Method and budget."""
        return ReferenceCase(self.method, self.budget).label

    @property
    def nll(self) -> float | None:
        """Logarithm of the perplexity: the mean of -ln q of the reference's tokens, in nats."""
        return None if self.perplexity is None else math.log(self.perplexity)

    @property
    def held_bytes(self) -> int:
        """Bytes of entries that attention reads, in full or compressed."""
        return self.memory["resident_bytes"] + self.memory["compressed_bytes"]

    @property
    def kept_bytes(self) -> int:
        """Bytes of entries that are compressed or in another place."""
        return self.memory["compressed_bytes"] + sum(self.memory["checkpoint_bytes"].values())


@dataclass(frozen=True)
class Comparison:
    """All rows, and the row of the reference."""

    prompt_tokens: int
    new_tokens: int
    reference: ReferenceRow
    rows: list[ReferenceRow]
    whole_bytes: int = 0
    """Bytes of an unbounded cache in bfloat16."""

    @property
    def context(self) -> int:
        """Tokens of prompt and continuation; the base of budgets in percent."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Position:
    """One position compared with the reference."""

    kl: float
    """KL in nats."""
    nll: float
    """-ln q(token) in nats."""
    agrees: bool
    """Whether the largest probabilities are of the same token."""


def cases(methods: Sequence[str], budgets: Sequence[str]) -> list[ReferenceCase]:
    """Return every method at every budget. Methods without a budget come first, once each. Raises UsageError for an
    unknown name."""
    bounded = [method for method in methods if "budget" in takes(method)]
    free = [ReferenceCase(method) for method in methods if method not in bounded]
    return free + [ReferenceCase(method, budget) for budget in budgets for method in bounded]


def compare(
    model: Any,
    prompt: Sequence[int],
    listed: Sequence[ReferenceCase],
    *,
    new: int = 64,
    chunk: int | None = None,
    pinned: int = 0,
    progress: Progress = lambda label, done, total: None,
    measured: Callable[[ReferenceRow], None] = lambda row: None,
) -> Comparison:
    """Measure every case on ``prompt`` (token ids) and ``new`` tokens after it.

    ``chunk``: tokens of a prompt read at a time, for methods that read prompts in chunks. pinned: the first tokens of
    the prompt that methods with '+pinned' pin. The row of a refused case
    contains the reason. ``measured`` is called with each complete row, first the reference's. Raises
    :class:`Interruption` with the comparison if interrupted after the reference is complete, and UsageError for a
    prompt beyond the model's positions.
    """
    progress("the reference", 0.0, 1.0)
    reference = ReferenceAnswer.of(model, prompt, new, chunk, pinned)
    measured(reference.row)
    rows: list[ReferenceRow] = []
    total = 2 * len(listed) * reference.work(len(prompt), new - 1)
    for number, case in enumerate(listed):
        before = total * number / len(listed)

        def report(done: float, label: str = case.label, before: float = before) -> None:
            progress(label, before + done, total)

        report(0.0)
        try:
            rows.append(reference.measure(case, report))
        except Exception as error:
            rows.append(ReferenceRow(case.method, case.budget, error=reason(error)))
        except KeyboardInterrupt:
            rows += [ReferenceRow(missing.method, missing.budget, error=INTERRUPTED) for missing in listed[number:]]
            raise Interruption(Comparison(len(prompt), new, reference.row, rows)) from None
        measured(rows[-1])
    return Comparison(len(prompt), new, reference.row, rows)


def unbounded(model: Any) -> str:
    """Return the cache of the reference: transformers' cache in float32, kvkeep's ``full`` in 16 bits. In 16 bits,
    transformers' attention sums in another order than kvkeep's, and this changes every distribution more than a good
    method does."""
    return STOCK if model.dtype.itemsize > 2 else "full"


def judge(expected: Tensor, got: Tensor, token: int) -> Position:
    """Compare two distributions, given as logits (vocabulary,), at a position whose reference token is ``token``."""
    p, q = (logits.double().log_softmax(-1) for logits in (expected, got))
    kl = float((p.exp() * (p - q)).sum())
    return Position(max(kl, 0.0), -float(q[token]), int(got.argmax()) == token)  # negative values are rounding errors


def check_fits(model: Any, prompt_tokens: int, new: int) -> None:
    """Raise UsageError for an empty prompt, and for one that exceeds the model's positions with ``new`` more tokens."""
    positions = ModelGeometry.from_config(model.config).max_positions
    if prompt_tokens == 0:
        raise UsageError("There is nothing to continue: the prompt is empty; give --prompt or --file.")
    if positions is not None and prompt_tokens + new > positions:
        raise UsageError(
            f"The prompt has {prompt_tokens} tokens, which with {new} more exceeds the model's {positions} "
            "positions, where the full cache is no reference; shorten the text (--limit "
            f"{max(positions - new, 1)})."
        )


def _free(
    case: ReferenceCase,
    tokens: list[int],
    expected: list[int],
    judged: Sequence[Position],
    seconds: Sequence[float],
    cache: Any,
) -> ReferenceRow:
    """Return the results of a free run, including bytes."""
    divergences = [position.kl for position in judged]
    same = [a == b for a, b in zip(tokens, expected, strict=True)]
    recall = certificates(cache) if isinstance(cache, KeepCache) else []
    decoding = sum(seconds[1:])
    return ReferenceRow(
        case.method,
        case.budget,
        exactness=str(getattr(cache, "exactness", Exactness.EXACT)),
        entries=getattr(cache, "entries", None),
        match=fmean(same),
        differs_at=None if all(same) else same.index(False),
        kl_free_mean=fmean(divergences),
        kl_free=divergences,
        memory=memory_of(cache).as_dict(),
        prefill_s=seconds[0],
        tokens_per_s=(len(seconds) - 1) / decoding if decoding else None,
        tokens=tokens,
        away=mean(recall, "away"),
        recalled=mean(recall, "recalled"),
        left_out=max((layer.worst for layer in recall), default=None),
        merges=merges(cache),
    )


def merges(cache: Any) -> tuple[int, int]:
    """Return the number of merged pairs over all layers and heads, and the number of those with a clamped key weight,
    because its formula had no value or one outside [0, 1]. Both are 0 for methods that merge no pairs."""
    layers = cache.stream.bounded if isinstance(cache, KeepCache) and cache.stream.streams else []
    merged = [layer.evicted.merged() for layer in layers if layer.evicted.makes_room]
    return sum(pairs for pairs, _ in merged), sum(clamped for _, clamped in merged)


def _forced(row: ReferenceRow, judged: Sequence[Position]) -> ReferenceRow:
    """Return ``row`` with the results of the teacher-forced positions."""
    divergences = [position.kl for position in judged]
    return replace(
        row,
        kl_mean=fmean(divergences),
        kl_max=max(divergences),
        kl=divergences,
        top1=fmean(position.agrees for position in judged),
        perplexity=math.exp(fmean(position.nll for position in judged)),
    )


@dataclass(frozen=True)
class ReferenceAnswer:
    """The answer of the unbounded cache to one prompt, with which all cases are compared."""

    model: Any
    ids: Tensor
    """The prompt, (1, tokens)."""
    logits: list[Tensor]
    """(vocabulary,) for each position, in float32 on the CPU."""
    row: ReferenceRow
    step_s: float
    """Seconds of a decoding step."""
    chunk: int | None
    """Tokens of the prompt that a case reads at a time."""
    pinned: int = 0
    """First tokens of the prompt that methods with '+pinned' pin."""

    @classmethod
    def of(
        cls, model: Any, prompt: Sequence[int], new: int, chunk: int | None = None, pinned: int = 0
    ) -> ReferenceAnswer:
        """Read ``prompt`` (token ids) and generate ``new`` tokens. Raises UsageError if the model has too few
        positions."""
        check_fits(model, len(prompt), new)
        ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
        with torch.no_grad():
            model(ids[:, :16], use_cache=False)  # warms up
        method = unbounded(model)
        cache = cache_for(model, method, None, len(prompt) + new)
        logits, seconds = zip(*read(model, ids, cache, new), strict=True)
        tokens = [int(one.argmax()) for one in logits]
        judged = [judge(one, one, token) for one, token in zip(logits, tokens, strict=True)]
        row = _forced(_free(ReferenceCase(method), tokens, tokens, judged, seconds, cache), judged)
        return cls(model, ids, list(logits), row, fmean(seconds[1:]) if new > 1 else seconds[0], chunk, pinned)

    def work(self, tokens: int, steps: int) -> float:
        """Return the reference's seconds for ``tokens`` tokens of the prompt and ``steps`` steps."""
        return (self.row.prefill_s or 0.0) * tokens / self.ids.shape[1] + self.step_s * steps

    def measure(self, case: ReferenceCase, report: Callable[[float], None] = lambda done: None) -> ReferenceRow:
        """Measure one case free-running, and then teacher-forced unless the free run had the same text. ``report`` is
        called with the work done, in seconds at the reference's speed."""
        row, judged = self._run_freely(case, report)
        if row.tokens[:-1] != self.row.tokens[:-1]:
            one_pass = self.work(self.ids.shape[1], len(self.logits) - 1)
            judged = list(self._run_forced(case, lambda done: report(one_pass + done)))
        return _forced(row, judged)

    def _run_freely(self, case: ReferenceCase, report: Callable[[float], None]) -> tuple[ReferenceRow, list[Position]]:
        expected, cache = self.row.tokens, self._cache(case, report)
        tokens: list[int] = []
        seconds: list[float] = []
        judged: list[Position] = []
        for step, (logits, elapsed) in enumerate(read(self.model, self.ids, cache, len(expected))):
            judged.append(judge(self.logits[step], logits, expected[step]))
            tokens.append(int(logits.argmax()))
            seconds.append(elapsed)
            report(self.work(self.ids.shape[1], step))
        return _free(case, tokens, expected, judged, seconds, cache), judged

    def _run_forced(self, case: ReferenceCase, report: Callable[[float], None]) -> Iterator[Position]:
        expected, cache = self.row.tokens, self._cache(case, report)
        for step, (logits, _) in enumerate(read(self.model, self.ids, cache, len(expected), expected)):
            yield judge(self.logits[step], logits, expected[step])
            report(self.work(self.ids.shape[1], step))

    def _cache(self, case: ReferenceCase, report: Callable[[float], None]) -> Any:
        context = self.ids.shape[1] + len(self.row.tokens)
        cache = cache_for(self.model, case.method, case.budget, context, self.chunk, self.pinned)
        if isinstance(cache, KeepCache):
            prompt = self.ids.shape[1]
            cache.stream.record.tell(lambda done: report(self.work(done, 0)) if done < prompt else None)
        return cache
