"""The same answers from other caches: compared token by token with transformers' own cache, and timed in the same run.

Every prompt is answered greedily with the stock cache, ends of text ignored, and with the caches to be proved. Where a
token differs, the model is asked how near the two tokens were: the *gap* between their logits at that position, and the
*noise*, the most by which the stock model's logits of that answer differ when it reads all of it at once instead of one
token at a time. A gap of at most twice the noise is a tie that rounding decides; any other difference is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from transformers import DynamicCache

from kvkeep.cache import STOCK, KeepCache, new_cache
from kvkeep.decode.generate import Generation, generate
from kvkeep.errors import KvkeepError
from kvkeep.policies.methods import resolve
from kvkeep_lab import lines
from kvkeep_lab.prompts import Prompt


@dataclass(frozen=True)
class Case:
    """One cache. ``copies``: as in :func:`~kvkeep.decode.generate.generate`; for "stock", transformers' own lookup."""

    method: str
    budget: str | None = None
    checkpoint: str | None = None
    where: str | None = None
    copies: int | None = None

    @property
    def label(self) -> str:
        """The case as a person reads it."""
        kind = "" if self.checkpoint is None and self.where is None else f" {self.checkpoint or ''}@{self.where or ''}"
        copies = "" if self.copies is None else ", no copies" if self.copies == 0 else f", copies of {self.copies}"
        return f"{self.method}{kind}{'' if self.budget is None else f' at {self.budget}'}{copies}"


@dataclass(frozen=True)
class Answer:
    """One case's answer to one prompt.

    key: what a store knows it by. same: leading tokens that are the stock cache's, of ``tokens``; differs_at: the first
    that is not. gap, noise: of logits, see above. resident_bytes: entries held at their peak, in full or smaller, the
    chunk in hand not counted.
    """

    key: str
    label: str
    kind: str
    prompt_tokens: int
    tokens: int
    same: int
    differs_at: int | None
    gap: float | None
    noise: float | None
    prefill_s: float
    decode_s: float
    prefill_ratio: float
    decode_ratio: float
    resident_bytes: int
    budget_bytes: int | None
    rounds: dict[str, Any] | None

    @property
    def tie(self) -> bool:
        """Whether the first difference is one that rounding decides."""
        return self.gap is not None and self.noise is not None and self.gap <= 2 * self.noise


_ANSWER = TypeAdapter(Answer)


@dataclass(frozen=True)
class Row:
    """One case over all its prompts: how many, how many identical, how many differ in a tie alone; leading tokens that
    are the same; medians of the ratios of times to the stock cache's; tokens a round, and the share of right drafts."""

    label: str
    prompts: int
    identical: int
    ties: int
    tokens: int
    same: int
    prefill_ratio: float
    decode_ratio: float
    tokens_a_round: float | None
    right: float | None
    within_budget: bool | None
    error: str = ""


def cases(
    methods: Sequence[str],
    budgets: Sequence[str],
    kinds: Sequence[str | None],
    places: Sequence[str | None],
    copies: int | None = None,
) -> list[Case]:
    """Return every method with every budget, checkpoint kind and place that it takes."""
    found: list[Case] = []
    for method in methods:
        options = () if method == STOCK else resolve(method).options
        found += [
            Case(method, budget, kind, where, copies)
            for budget, kind, where in product(
                budgets if "budget" in options else [None],
                kinds if "checkpoint" in options else [None],
                places if "where" in options else [None],
            )
            if not (kind == "tokens" and where not in (None, places[0]))  # ids are where the model is, wherever that is
        ]
    return found


def prove(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Prompt],
    listed: Sequence[Case],
    *,
    new: int = 128,
    every: bool = True,
    setting: str = "",
    store: Path | None = None,
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> tuple[list[Answer], dict[str, str]]:
    """Answer ``asked`` by ``new`` tokens each, with every case or (``every`` False) with one case a prompt, in turn.

    store: a file that keeps each answer as it comes; those it has of the same ``setting`` (model, precision, machine),
    prompt and case are not asked for again. Returns the answers, and the reasons of cases that refused, by label. An
    interrupt ends the run, and what was measured until then is returned. Raises StoreError for a file that cannot be
    read or written.
    """
    known = {} if store is None else _known(store)
    asking = [
        (prompt, case, _key(setting, prompt, case, new))
        for number, prompt in enumerate(asked)
        for case in (listed if every else [listed[number % len(listed)]])
    ]
    answers = [known[key] for *_, key in asking if key in known]
    missing = [(prompt, case, key) for prompt, case, key in asking if key not in known]
    refused: dict[str, str] = {}
    total = len(missing) + len({id(prompt) for prompt, *_ in missing})
    done = 0
    try:
        for _, group in groupby(missing, key=lambda one: id(one[0])):
            reference: Generation | None = None
            for prompt, case, key in group:
                about = f"{prompt.kind} of {len(prompt.ids)}"
                if reference is None:
                    progress(f"{about}, {STOCK}", done, total)
                    reference = _answer(model, tokenizer, prompt, Case(STOCK), new)[0]
                    done += 1
                progress(f"{about}, {case.label}", done, total)
                done += 1
                try:
                    result, cache = _answer(model, tokenizer, prompt, case, new)
                except KvkeepError as error:
                    refused[case.label] = str(error)
                    continue
                answers.append(_judged(model, prompt, case, key, result, reference, cache))
                if store is not None:
                    lines.append(store, json.dumps(asdict(answers[-1])))
    except KeyboardInterrupt:
        pass
    return answers, refused


def rows(answers: Sequence[Answer], refused: dict[str, str]) -> list[Row]:
    """Return a row for every case, in the order in which they were first answered."""
    found = []
    for label in dict.fromkeys(answer.label for answer in answers):
        own = [answer for answer in answers if answer.label == label]
        rounds = [answer.rounds for answer in own if answer.rounds is not None]
        tried = sum(one["drafted"] + one["copied"] for one in rounds)
        budgeted = [answer for answer in own if answer.budget_bytes is not None]
        found.append(
            Row(
                label,
                len(own),
                sum(answer.differs_at is None for answer in own),
                sum(answer.tie for answer in own),
                sum(answer.tokens for answer in own),
                sum(answer.same for answer in own),
                median(answer.prefill_ratio for answer in own),
                median(answer.decode_ratio for answer in own),
                sum(answer.tokens - 1 for answer in own) / sum(one["rounds"] for one in rounds) if rounds else None,
                sum(one["accepted"] for one in rounds) / tried if tried else None,
                all(answer.resident_bytes <= (answer.budget_bytes or 0) for answer in budgeted) if budgeted else None,
            )
        )
    return found + [Row(label, 0, 0, 0, 0, 0, 0.0, 0.0, None, None, None, why) for label, why in refused.items()]


def _key(setting: str, prompt: Prompt, case: Case, new: int) -> str:
    return sha256(json.dumps([setting, prompt.ids, asdict(case), new]).encode()).hexdigest()[:16]


def _known(store: Path) -> dict[str, Answer]:
    """Return the answers of a file by their keys; a line that a kill left torn is none."""
    found = {}
    for line in lines.whole(store)[0]:
        with suppress(ValidationError):
            answer = _ANSWER.validate_json(line)
            found[answer.key] = answer
    return found


def _answer(model: Any, tokenizer: Any, prompt: Prompt, case: Case, new: int) -> tuple[Generation, Any]:
    options = {"budget": case.budget, "checkpoint": case.checkpoint, "where": case.where}
    cache = new_cache(model, case.method, context=len(prompt.ids) + new, **options)
    result = generate(model, tokenizer, prompt.ids, cache, max_new_tokens=new, ignore_eos=True, copies=case.copies)
    return result, cache


def _judged(
    model: Any, prompt: Prompt, case: Case, key: str, result: Generation, reference: Generation, cache: Any
) -> Answer:
    pairs = list(zip(result.tokens, reference.tokens, strict=False))
    differs_at = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    gap = noise = None
    if differs_at is not None:
        gap, noise = _margin(model, list(prompt.ids), list(reference.tokens), differs_at, pairs[differs_at][0])
    budget = None
    if isinstance(cache, KeepCache) and cache.entries is not None:
        budget = cache.entries * cache.geometry.kv_bytes_per_token
        budget += sum(  # sliding windows are the model's own, and bounded by it
            layer.keys.nbytes + layer.values.nbytes
            for layer, sliding in zip(cache.layers, cache.is_sliding, strict=True)
            if sliding
        )
    return Answer(
        key,
        case.label,
        prompt.kind,
        len(prompt.ids),
        len(result.tokens),
        len(pairs) if differs_at is None else differs_at,
        differs_at,
        gap,
        noise,
        result.timing.prefill_s,
        result.timing.decode_s,
        result.timing.prefill_s / reference.timing.prefill_s,
        result.timing.decode_s / reference.timing.decode_s,
        result.memory.resident_bytes + result.memory.compressed_bytes,
        budget,
        None if result.rounds is None else asdict(result.rounds),
    )


@torch.no_grad()
def _margin(model: Any, prompt: list[int], answer: list[int], place: int, ours: int) -> tuple[float, float]:
    """Return by how much the stock model prefers token ``place`` of its answer to ``ours``, and the most by which its
    two largest logits differ, at any token of the answer, when it reads all at once."""
    text = torch.tensor([[*prompt, *answer[:-1]]], device=next(model.parameters()).device)
    cache = DynamicCache(config=model.config)
    parts = text.split([len(prompt), *[1] * (len(answer) - 1)], 1)
    steps = torch.stack([model(part, past_key_values=cache, logits_to_keep=1).logits[0, -1].float() for part in parts])
    whole = model(text, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
    noise = (steps - whole).gather(1, steps.topk(2).indices).abs().max()
    return float(steps[place, answer[place]] - steps[place, ours]), float(noise)
