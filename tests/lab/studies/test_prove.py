"""The study prove: prompts made of a text, judged answers, explained differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import tokenizer
from kvkeep_lab.answers import ComparedAnswer
from kvkeep_lab.partial import Interruption
from kvkeep_lab.prompts import KINDS, Prompt, prompts
from kvkeep_lab.studies import prove as lab
from kvkeep_lab.studies.prove import Proof, Prove
from measuring import loaded, quiet

from kvkeep.errors import UsageError
from kvkeep.models.loading import load


def test_prompts_have_every_kind_and_length(words: str) -> None:
    made = prompts(tokenizer(), words, [40, 80], 16)
    assert [prompt.kind for prompt in made[:4]] == list(KINDS)
    assert len({tuple(prompt.ids) for prompt in made}) == 16
    continuations = [len(prompt.ids) for prompt in made if prompt.kind == "continuation"]
    assert continuations == [40, 80, 40, 80]
    with pytest.raises(UsageError, match="longer text"):
        prompts(tokenizer(), words, [900], 1)


def test_cases_combine_methods_budgets_and_checkpoints() -> None:
    methods = ["stock", "full", "h2o", "h2o+verified"]
    study = Prove(methods=methods, budgets=["16", "25%"], checkpoints=["kv", "tokens"], where=["host", "disk"])
    placed = (("kv", "host"), ("kv", "disk"), ("tokens", "host"))
    assert [case.label for case in study.cases()] == [
        "stock",
        "full",
        "h2o at 16",
        "h2o at 25%",
        *(f"h2o+verified {kind}@{where} at {budget}" for budget in ("16", "25%") for kind, where in placed),
    ]


def two_prompts() -> list[Prompt]:
    return [Prompt("chat", [(7 * number + start) % 90 + 5 for number in range(60)]) for start in (1, 2)]


def proof(*methods: str, family: str = "llama", progress: Any = quiet, **sizes: Any) -> Proof:
    """Two prompts answered within 16 entries, checkpoints in host memory."""
    given = {"methods": methods, "budgets": ["16"], "where": ["host"], "new": 4} | sizes
    return Prove.model_validate(given).answer(loaded(family), two_prompts(), progress)


def test_exact_caches_give_identical_answers() -> None:
    steps: list[int] = []
    found = proof(
        *("full", "snapkv+verified", "kv-direct"), new=9, progress=lambda label, done, total: steps.append(done)
    )
    assert not found.refused and len(found.answers) == 6 and steps == list(range(8))
    rows = found.rows
    assert [(row.identical, row.same, row.tokens) for row in rows] == [(2, 18, 18)] * 3
    assert rows[0].within_budget is None and rows[1].within_budget and rows[2].within_budget
    assert rows[1].tokens_a_pass is not None and rows[1].tokens_a_pass >= 1 and rows[0].right is None


def test_a_lossy_method_is_found_to_differ() -> None:
    """By far more than rounding."""
    found = proof("window", new=9)
    wrong = [answer for answer in found.answers if answer.differs_at is not None]
    assert wrong, "a window of 16 of 60 tokens should not give the same answer"
    for answer in wrong:
        assert answer.same == answer.differs_at and answer.gap is not None and answer.noise is not None
        assert not answer.tie
    assert found.rows[0].identical == 2 - len(wrong)


def test_stored_answers_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn line is measured again, and another machine has its own answers."""
    store = tmp_path / "proof.jsonl"

    def stopping(label: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    def run() -> tuple[list[ComparedAnswer], list[str]]:
        labels: list[str] = []
        found = proof("full", "window", store=store, progress=lambda label, done, total: labels.append(label))
        return found.answers, labels

    with pytest.raises(Interruption) as stop:
        proof("full", "window", store=store, progress=stopping)
    assert len(stop.value.found.answers) == 3
    with store.open("a") as file:
        file.write('{"key": "torn')
    answers, labels = run()
    assert len(answers) == 4 and labels == ["chat of 60, stock", "chat of 60, window at 16"]
    again, labels = run()
    assert sorted(one.key for one in again) == sorted(one.key for one in answers) and not labels
    monkeypatch.setattr(lab, "machine", lambda loaded: {"device": "another"})
    assert len(run()[1]) == 6


def test_a_refused_case_has_a_row_with_its_reason() -> None:
    found = proof("snapkv+verified", family="gemma4", checkpoints=["tokens"])
    assert not found.answers and "gemma4" in found.rows[0].error


def test_bits_option_compares_logits_with_the_full_cache(model_folder: Path, kernels: None) -> None:
    """Logits are equal where kernels compute everything; in float32 the difference is printed."""
    study = Prove(methods=["kv-direct", "snapkv+verified"], budgets=["16"], where=["host"], new=6, bits=True)
    packed = study.answer(load(model_folder, weights="bfloat16", device="cpu"), two_prompts(), quiet)
    assert [one.logits for one in packed.answers] == [(0.0, 0.0)] * 4 and not packed.refused
    assert all(row.logits == 0.0 and row.identical == 2 for row in packed.rows)
    found = study.answer(loaded("llama"), two_prompts(), quiet)
    assert all(row.logits is not None and 0.0 < row.logits < 1e-3 for row in found.rows)
    (table,) = study.tables(found)
    assert table.headings[-1] == "logits differ by" and all(float(row[-1]) > 0.0 for row in table.rows)
    assert any("one token at a time" in note for note in table.notes)
    without = study.model_copy(update={"bits": False}).answer(loaded("llama"), two_prompts()[:1], quiet)
    assert all(row.logits is None for row in without.rows)
