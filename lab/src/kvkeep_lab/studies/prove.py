"""``prove``: compares the answers of other caches with those of transformers' cache, token by token, and their time.

In one run, every prompt is answered greedily with the stock cache and with the caches to be proved. Ends of text are
ignored. :mod:`kvkeep_lab.answers` judges the differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from kvkeep.decode.generate import Generation
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.models.loading import Loaded
from kvkeep.policies.names import STOCK
from kvkeep.stock import new_cache
from kvkeep_lab.answers import AnswerCase, ComparedAnswer, judged, written
from kvkeep_lab.bits import greatest_difference, one_at_a_time
from kvkeep_lab.partial import keeping
from kvkeep_lab.prompts import TEXT, Prompt, prompts
from kvkeep_lab.provenance import machine
from kvkeep_lab.reading import takes
from kvkeep_lab.store import append_line, whole_lines
from kvkeep_lab.studies.base import (
    BudgetText,
    Flag,
    Kind,
    OwnMethod,
    PlaceName,
    Progress,
    Study,
    Trial,
    text_of,
    unique,
)
from kvkeep_lab.studies.receipt import ReceiptStudy
from kvkeep_lab.tables import Table, fixed, number, percent, times

_ANSWER = TypeAdapter(ComparedAnswer)
_OF_RECEIPTS = ("receipt", "markdown")
"""Fields of receipts."""
_BITS = (
    "Logits: the greatest difference of any logit of prompt and answer from full's, one token at a time, when the text "
    "is read in chunks of random sizes, and in a batch, padded and beside that; 0 is the same to the bit."
)


@dataclass(frozen=True)
class ProveRow:
    """One case over all its prompts. Ratios are medians of times relative to the stock cache's."""

    label: str
    prompts: int
    identical: int
    """Number of prompts with identical answers."""
    ties: int
    """Number of prompts whose answers first differ at a tie."""
    tokens: int
    same: int
    """Number of leading tokens that are the same."""
    prefill_ratio: float
    decode_ratio: float
    tokens_a_pass: float | None
    """Tokens of a pass after the first one; None without drafts."""
    right: float | None
    """Share of accepted drafts."""
    within_budget: bool | None
    error: str = ""
    logits: float | None = None
    """Maximum difference of the logits."""


@dataclass(frozen=True)
class Proof:
    """All answers."""

    answers: list[ComparedAnswer]
    refused: dict[str, str]
    """Reasons of refused cases, by label."""

    @property
    def rows(self) -> list[ProveRow]:
        """A row for each case, in the order of the first answers."""
        labels = dict.fromkeys(answer.label for answer in self.answers)
        rows = [_row(label, [answer for answer in self.answers if answer.label == label]) for label in labels]
        return rows + [
            ProveRow(label, 0, 0, 0, 0, 0, 0.0, 0.0, None, None, None, why) for label, why in self.refused.items()
        ]


class Prove(Study):
    """Answers to prompts made from a text, and their time."""

    name = "prove"
    about = "compare the answers of other caches with the unbounded cache's, token by token, and their time"
    protocol = (
        "The model answers prompts made from a text greedily, with the stock cache (with 'full' for --bits) and "
        "with other caches. Where a token differs, the gap between its logits is compared with the noise of "
        "rounding. Times are relative to the stock cache in the same run: below 1 is faster."
    )
    found = Proof
    text = "optional"
    weights = "auto"

    methods: Annotated[list[OwnMethod], unique, Flag("--method", "-x")] = Field(
        ["snapkv+verified"], min_length=1, description="cache methods ('kvkeep methods' lists them)"
    )
    budgets: Annotated[list[BudgetText], unique, Flag("--budget", "-b")] = Field(
        ["12.5%"],
        min_length=1,
        description="cache budgets: entries per layer (64), bytes (4MB), or shares of prompt and answer (25%)",
    )
    checkpoints: Annotated[list[Kind], Flag("--checkpoint", "-c")] = Field(
        ["kv"], min_length=1, description="what is stored of evicted entries: kv, residual, residual:STRIDE, tokens"
    )
    where: Annotated[list[PlaceName], Flag("--where", "-w")] = Field(
        ["disk"], min_length=1, description="where evicted entries are stored: device, host, disk"
    )
    prompts: int = Field(8, ge=1, description="number of prompts to make from the text")
    lengths: list[Annotated[int, Field(ge=32)]] = Field([600], min_length=1, description="prompt lengths in tokens")
    kinds: list[Literal["summary", "question", "continuation", "chat"]] = Field(
        ["summary", "question", "continuation", "chat"], min_length=1, description="what the prompts ask for"
    )
    new: Annotated[int, Flag("--max-tokens", "-n")] = Field(
        128, ge=2, description="maximum number of tokens to generate"
    )
    every: Annotated[bool, Flag("--every/--in-turn")] = Field(
        True, description="answer every prompt with every cache, or each prompt with the next cache in turn"
    )
    copies: Annotated[bool, Flag("--copies/--no-copies")] = Field(
        True, description="let answers copy drafts from the text"
    )
    bits: bool = Field(
        False, description="compare every logit too, with kvkeep's unbounded cache reading one token at a time"
    )
    store: Path | None = Field(
        None, description="file to which every answer is saved at once; the same command continues an interrupted run"
    )
    receipt: Annotated[bool | None, Flag("--receipt")] = Field(
        None, description="print digests of logits, tokens and saved sessions for fixed prompts, to compare machines"
    )
    markdown: Annotated[bool | None, Flag("--markdown")] = Field(
        None, description="print the receipt's table as Markdown"
    )

    def variant(self) -> Study:
        """Return the study of receipts if ``receipt`` is set."""
        if not self.receipt:
            if self.markdown:
                raise UsageError("--markdown prints a receipt; add --receipt.")
            return self
        defaults = type(self).model_validate({})
        for name, field in type(self).model_fields.items():
            if name not in ("methods", *_OF_RECEIPTS) and getattr(self, name) != getattr(defaults, name):
                flag = next((one for one in field.metadata if isinstance(one, Flag)), Flag())
                option = (flag.names or (f"--{name}",))[0]
                raise UsageError(f"A receipt has prompts and budgets of its own and takes no {option}.")
        methods = self.methods if self.methods != defaults.methods else []
        return ReceiptStudy(methods=methods, markdown=bool(self.markdown))

    def measure(self, trial: Trial) -> Proof:
        """Answer prompts made from the files or the built-in text. Raises StoreError if the store cannot be read or
        written."""
        text = text_of(trial.sources) if trial.sources else "\n\n".join([TEXT] * 3)
        given = prompts(trial.tokenizer, text, self.lengths, self.prompts, self.kinds)
        return self.answer(trial.loaded, given, trial.progress)

    def answer(self, loaded: Loaded, given: Sequence[Prompt], progress: Progress) -> Proof:
        """Answer ``given`` with every case, or each prompt with the next case in turn. Answers in the store with the
        same model, precision, machine, prompt and case are reused."""
        known = {} if self.store is None else _known(self.store)
        listed = self.cases()
        setting = json.dumps(machine(loaded))
        kind = ["bits"] if self.bits else []

        def key(prompt: Prompt, case: AnswerCase) -> str:
            facts = [setting, prompt.ids, asdict(case), self.new, *kind]
            return sha256(json.dumps(facts).encode()).hexdigest()[:16]

        asking = [
            (prompt, case, key(prompt, case))
            for number, prompt in enumerate(given)
            for case in (listed if self.every else [listed[number % len(listed)]])
        ]
        found = Proof([known[key] for *_, key in asking if key in known], {})
        missing = [one for one in asking if one[2] not in known]
        with keeping(found, found.answers):
            for answer in self._answers(loaded, missing, found.refused, progress):
                found.answers.append(answer)
                if self.store is not None:
                    append_line(self.store, json.dumps(asdict(answer)))
        return found

    def cases(self) -> list[AnswerCase]:
        """Return every method with every budget, checkpoint kind and place that it accepts."""
        found: list[AnswerCase] = []
        for method in self.methods:
            options = takes(method)
            found += [
                AnswerCase(method, budget, kind, where, self.copies)
                for budget, kind, where in product(
                    self.budgets if "budget" in options else [None],
                    self.checkpoints if "checkpoint" in options else [None],
                    self.where if "where" in options else [None],
                )
                if not (kind == "tokens" and where not in (None, self.where[0]))  # ids are always on the model's device
            ]
        return found

    def _answers(
        self,
        loaded: Loaded,
        missing: Sequence[tuple[Prompt, AnswerCase, str]],
        refused: dict[str, str],
        progress: Progress,
    ) -> Iterator[ComparedAnswer]:
        """Yield the missing answers, each prompt's after the stock cache's. Add the reasons of refused cases to
        ``refused``."""
        total = len(missing) + len({id(prompt) for prompt, *_ in missing})
        done, rival = 0, "full" if self.bits else STOCK
        for _, group in groupby(missing, key=lambda one: id(one[0])):
            reference: Generation | None = None
            logits: Tensor | None = None
            for prompt, case, key in group:
                about = f"{prompt.kind} of {len(prompt.ids)}"
                if reference is None:
                    progress(f"{about}, {rival}", done, total)
                    reference = written(loaded, prompt, AnswerCase(rival), self.new)[0]
                    text_ids = torch.tensor([[*prompt.ids, *reference.tokens[:-1]]], device=loaded.model.device)
                    if self.bits:
                        logits = one_at_a_time(loaded.model, text_ids, new_cache(loaded.model, rival))
                    done += 1
                progress(f"{about}, {case.label}", done, total)
                done += 1
                try:
                    result, cache = written(loaded, prompt, case, self.new)
                except KvkeepError as error:
                    refused[case.label] = str(error)
                    continue
                answer = judged(loaded.model, prompt, case, key, result, reference, cache)
                if logits is not None:
                    make = partial(new_cache, loaded.model, case.method, **case.options(len(prompt.ids) + self.new))
                    answer = replace(answer, logits=greatest_difference(loaded.model, text_ids, logits, make))
                yield answer

    def problem(self, found: Proof) -> str | None:
        return None if found.answers else next(iter(found.refused.values()), "No prompt was answered.")

    def as_json(self, found: Proof) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in found.rows], "answers": [asdict(one) for one in found.answers]}

    def tables(self, found: Proof) -> list[Table]:
        stock = "transformers' own cache"
        table = Table(
            f"Answers of {self.new} tokens",
            [
                *("", "prompts", "identical", "ties", "tokens", "prefill", "decoding", "a pass", "right", "budget"),
                *(["logits differ by"] if self.bits else []),
            ],
            notes=[
                f"Times are relative to {'full' if self.bits else stock} in the same run: below 1 is faster.",
                *([_BITS] if self.bits else []),
                *(f"`{row.label}`: {row.error}" for row in found.rows if row.error),
                *(
                    f"`{one.label}`, {one.kind} of {one.prompt_tokens}: differs at token {one.differs_at}, gap "
                    f"{number(one.gap)}, noise {number(one.noise)}: {'a tie' if one.tie else 'no tie'}."
                    for one in found.answers
                    if one.differs_at is not None
                ),
            ],
        )
        for row in (row for row in found.rows if not row.error):
            counts = [f"{row.prompts}", f"{row.identical}", f"{row.ties}", f"{row.same}/{row.tokens}"]
            drafts = [fixed(row.tokens_a_pass, 1), percent(row.right, 0)]
            within = "-" if row.within_budget is None else "held" if row.within_budget else "exceeded"
            ratios = [times(row.prefill_ratio), times(row.decode_ratio)]
            bits = [number(row.logits)] if self.bits else []
            table.rows.append([f"`{row.label}`", *counts, *ratios, *drafts, within, *bits])
        return [table]


def _row(label: str, answers: Sequence[ComparedAnswer]) -> ProveRow:
    later, tried, right = (
        sum(getattr(answer, name) for answer in answers) for name in ("tokens", "drafted", "accepted")
    )
    later -= len(answers)  # the last of the prompt's passes chooses the first one
    budgeted = [answer for answer in answers if answer.budget_bytes is not None]
    exceeded = [answer.resident_bytes > (answer.budget_bytes or 0) for answer in budgeted]
    return ProveRow(
        label,
        len(answers),
        sum(answer.differs_at is None for answer in answers),
        sum(answer.tie for answer in answers),
        sum(answer.tokens for answer in answers),
        sum(answer.same for answer in answers),
        median(answer.prefill_ratio for answer in answers),
        median(answer.decode_ratio for answer in answers),
        later / (later - right) if tried else None,
        right / tried if tried else None,
        not any(exceeded) if budgeted else None,
        logits=max((max(answer.logits) for answer in answers if answer.logits is not None), default=None),
    )


def _known(store: Path) -> dict[str, ComparedAnswer]:
    """Return the answers of a file by their keys. An incomplete last line is ignored."""
    found = {}
    for line in whole_lines(store)[0]:
        with suppress(ValidationError):
            answer = _ANSWER.validate_json(line)
            found[answer.key] = answer
    return found
