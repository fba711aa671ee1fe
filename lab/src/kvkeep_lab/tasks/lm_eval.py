"""Any task of lm-evaluation-harness, with its prompts and scores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, model_validator

from kvkeep.errors import UsageError
from kvkeep.models.silence import silenced
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import AnswerCost, Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome
from kvkeep_lab.tasks.rows import drawn, rows, source

SPLITS = ("train", "validation", "test")


class LmEval(Task):
    """A task of the harness by its name, unchanged or with changes to its configuration, or a user's task.

    The harness downloads the data of its tasks from the hub. ``file`` in the data folder replaces it: rows with the
    fields that the task reads. All splits then have the same rows, so the prompt has no examples. A ``config`` with an
    ``output_type`` is a complete task, as in the harness's YAML files. Another ``config`` changes the task's
    configuration.
    """

    name = "lm-eval"
    about = "any task of lm-evaluation-harness (HellaSwag, PIQA, ...)"
    protocol = (
        "Prompts and judgement are the harness's. A context is read in chunks under the budget, once for all answers "
        "to be scored; these are given token by token, as decoding would, to exact methods many tokens at once. "
        "Written answers are greedy."
    )
    packages: ClassVar[dict[str, str]] = {"lm_eval": "lm-eval"}
    install = "pip install './lab[harness]' in a clone of kvkeep"

    task: str = Field("hellaswag", min_length=1, description="the harness's name of it")
    measures: list[str] = Field(
        ["acc_norm", "acc"], min_length=1, description="which of its numbers for a single row, shares from 0 to 1"
    )
    fewshot: int | None = Field(None, ge=0, description="examples in the prompt, where not as many as the task has")
    file: str = Field("", description="a file in the data folder, in place of the hub's data")
    config: dict[str, Any] = Field({}, description="changes to the task's configuration, or all of it")
    samples: int = Field(20, ge=1, description="rows")

    @model_validator(mode="after")
    def _no_examples_of_the_same_rows(self) -> LmEval:
        if self.file and self.fewshot:
            raise UsageError(f"'{self.file}' holds the rows to be asked; examples would be taken of the same ones")
        return self

    @property
    def metrics(self) -> tuple[Metric, ...]:  # type: ignore[override]
        return tuple(Metric(name, name) for name in self.measures)

    @property
    def relative(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.measures[0],)

    def sources(self, data: Path | None) -> list[Path]:
        return [source(data, self.file)] if self.file else []

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Return the harness's requests for each row: the first rows for seed 0, else a random draw."""
        with silenced(), redirect_stderr(StringIO()):
            task = self._task(sources)
            count = len(task.eval_docs)
        taken = sorted(drawn(range(count), self.samples, seed, f"Task '{self.task}' has {count} rows"))
        task.set_fewshot_seed(seed)
        with silenced(), redirect_stderr(StringIO()):  # its bars cannot be disabled
            task.build_all_requests(samples=taken)
        made = []
        for _, group in groupby(task.instances, lambda instance: instance.doc_id):
            instances = list(group)
            ids = list(tokenizer(instances[0].args[0], verbose=False).input_ids)
            made.append(Sample(ids, {"task": task, "instances": instances}))
        return made

    def _task(self, sources: Sequence[Path]) -> Any:
        """Return the harness's task. Raises UsageError for an unknown name."""
        changes = dict(self.config)
        if self.fewshot is not None:
            changes["num_fewshot"] = self.fewshot
        if sources:
            found = rows(sources[0])
            changes["custom_dataset"] = lambda **options: _dataset(found)
        inline = "output_type" in self.config
        manager = _manager(not inline)
        if not inline and self.task not in manager.all_subtasks:
            raise UsageError(f"lm-evaluation-harness knows no task '{self.task}'; 'lm_eval ls tasks' lists them.")
        config = {"task": self.task, **changes}
        loaded = manager.load([config if inline else {"group": "kvkeep", "task": [config]}])  # groups allow changes
        (task,) = loaded["tasks"].values()
        return task

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        from kvkeep_lab.harness import KeepLM

        task, instances = sample.facts["task"], sample.facts["instances"]
        model = KeepLM(subject)
        for kind, group in groupby(instances, lambda instance: instance.request_type):
            requests = list(group)
            for instance, answer in zip(requests, getattr(model, kind)(requests, disable_tqdm=True), strict=True):
                instance.resps, instance.filtered_resps = [answer], {}
        for filtering in task._filters:
            filtering.apply(instances)
        first = next(iter(instances[0].filtered_resps))
        found = task.process_results(instances[0].doc, [instance.filtered_resps[first] for instance in instances])
        return TaskOutcome({name: self._share(found, name) for name in self.measures}, _summed(model.costs))

    def _share(self, found: dict[str, Any], name: str) -> float:
        value = found.get(name)
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            shares = [key for key, value in found.items() if isinstance(value, int | float) and 0 <= value <= 1]
            raise UsageError(
                f"Task '{self.task}' gives no share '{name}' for a single row; it gives {', '.join(shares) or 'none'}."
            )
        return float(value)


@cache
def _manager(known: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=known)  # its defaults require thousands of files


def _dataset(found: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return dict.fromkeys(SPLITS, Dataset.from_list(found))


def _summed(costs: Sequence[AnswerCost]) -> AnswerCost:
    """Return the cost of all readings: the bytes of the largest one, and the mean seconds of a token."""
    steps = [cost.token_s for cost in costs if cost.token_s is not None]
    largest = max(costs, key=lambda cost: cost.held_bytes)
    prompt_tokens = max(cost.prompt_tokens for cost in costs)
    prefill_s = sum(cost.prefill_s for cost in costs)
    return replace(largest, prompt_tokens=prompt_tokens, prefill_s=prefill_s, token_s=fmean(steps) if steps else None)
