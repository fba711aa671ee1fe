"""Proving: prompts made of a text, answers judged, differences explained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import tokenizer
from families import tiny
from kvkeep_lab import prove as lab
from kvkeep_lab.prompts import KINDS, Prompt, prompts

from kvkeep.errors import UsageError

Run = Callable[..., tuple[int, str, str]]


def test_prompts_are_of_every_kind_and_length(words: str) -> None:
    made = prompts(tokenizer(), words, [40, 80], 16)
    assert [prompt.kind for prompt in made[:4]] == list(KINDS)
    assert len({tuple(prompt.ids) for prompt in made}) == 16
    continuations = [len(prompt.ids) for prompt in made if prompt.kind == "continuation"]
    assert continuations == [40, 80, 40, 80]
    with pytest.raises(UsageError, match="longer text"):
        prompts(tokenizer(), words, [900], 1)


def test_what_a_case_takes() -> None:
    listed = lab.cases(["stock", "full", "h2o", "h2o+verified"], ["16", "25%"], ["kv", "tokens"], ["host", "disk"])
    assert [case.label for case in listed] == [
        "stock",
        "full",
        "h2o at 16",
        "h2o at 25%",
        *(f"h2o+verified {kind}@{where} at {budget}" for budget in ("16", "25%") for kind, where in PLACED),
    ]


PLACED = (("kv", "host"), ("kv", "disk"), ("tokens", "host"))


def asked() -> list[Prompt]:
    return [Prompt("chat", [(7 * number + start) % 90 + 5 for number in range(60)]) for start in (1, 2)]


def test_exact_caches_give_identical_answers() -> None:
    listed = lab.cases(["full", "snapkv+verified", "kv-direct"], ["16"], ["kv"], ["host"])
    told: list[int] = []
    answers, refused = lab.prove(
        tiny("llama"), tokenizer(), asked(), listed, new=9, progress=lambda label, done, total: told.append(done)
    )
    assert not refused and len(answers) == 6 and told == list(range(8))
    rows = lab.rows(answers, refused)
    assert [(row.identical, row.same, row.tokens) for row in rows] == [(2, 18, 18)] * 3
    assert rows[0].within_budget is None and rows[1].within_budget and rows[2].within_budget
    assert rows[1].tokens_a_round is not None and rows[1].tokens_a_round >= 1 and rows[0].right is None


def test_a_difference_is_found_and_measured() -> None:
    """A method that drops goes wrong, and by far more than rounding."""
    listed = lab.cases(["window"], ["16"], [None], [None])
    answers, _ = lab.prove(tiny("llama"), tokenizer(), asked(), listed, new=9)
    wrong = [answer for answer in answers if answer.differs_at is not None]
    assert wrong, "a window of 16 of 60 tokens should not give the same answer"
    for answer in wrong:
        assert answer.same == answer.differs_at and answer.gap is not None and answer.noise is not None
        assert not answer.tie
    assert lab.rows(answers, {})[0].identical == 2 - len(wrong)


def test_each_prompt_with_one_case_in_turn() -> None:
    listed = lab.cases(["snapkv+verified"], ["16", "32"], ["kv"], ["host"])
    answers, _ = lab.prove(tiny("llama"), tokenizer(), asked(), listed, new=4, every=False)
    assert [answer.label for answer in answers] == [case.label for case in listed]


def test_answers_are_kept_and_not_asked_for_again(tmp_path: Path) -> None:
    """What a stopped run had measured is not measured again, a torn line is, and another setting has its own."""
    store, listed = tmp_path / "proof.jsonl", lab.cases(["full", "window"], ["16"], [None], [None])

    def stopping(label: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    def run(setting: str = "here", **options: Any) -> tuple[list[lab.Answer], list[str]]:
        told: list[str] = []
        options.setdefault("progress", lambda label, done, total: told.append(label))
        answers, _ = lab.prove(
            tiny("llama"), tokenizer(), asked(), listed, new=4, setting=setting, store=store, **options
        )
        return answers, told

    assert len(run(progress=stopping)[0]) == 3
    with store.open("a") as file:
        file.write('{"key": "torn')
    answers, told = run()
    assert len(answers) == 4 and told == ["chat of 60, stock", "chat of 60, window at 16"]
    again, told = run()
    assert sorted(one.key for one in again) == sorted(one.key for one in answers) and not told
    assert len(run("there")[1]) == 6


def test_a_refusal_is_a_row() -> None:
    listed = lab.cases(["snapkv+verified"], ["16"], ["tokens"], ["host"])
    answers, refused = lab.prove(tiny("gemma4"), tokenizer(), asked(), listed, new=4)
    assert not answers and "gemma4" in lab.rows(answers, refused)[0].error


def test_an_interrupt_keeps_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = lab.cases(["full", "snapkv+verified"], ["16"], ["kv"], ["host"])
    whole = lab.generate

    def interrupting(*arguments: Any, **options: Any) -> Any:
        if arguments[3].__class__.__name__ == "KeepCache" and arguments[3].method.name == "snapkv+verified":
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    monkeypatch.setattr(lab, "generate", interrupting)
    answers, _ = lab.prove(tiny("llama"), tokenizer(), asked(), listed, new=4)
    assert [answer.label for answer in answers] == ["full"]


def test_the_command(run: Run, model_folder: Path, tmp_path: Path, words: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(words)
    common = (
        "prove",
        "-m",
        str(model_folder),
        "-f",
        str(text),
        "--prompts",
        "2",
        "--lengths",
        "60",
        "-n",
        "6",
        "-b",
        "20",
    )
    code, out, err = run(*common, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert set(report) == {"machine", "rows", "answers"} and report["rows"][0]["identical"] == 2
    code, out, err = run(*common, "-x", "full,window,h2o+verified")
    assert code == 0 and "h2o+verified kv@disk at 20" in out and "identical" in out and "window at 20" in err
    for wrong in (("--kinds", "poem"), ("--lengths", "9"), ("-x", "nonsense"), ("-b", "x"), ("-c", "x"), ("-w", "x")):
        code, out, err = run(*common, *wrong)
        assert code == 2 and not out and err.count("\n") == 1, wrong
    code, out, err = run(*common, "--lengths", "9000")
    assert code == 2 and "longer text" in err
