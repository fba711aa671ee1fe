"""lm-evaluation-harness: likelihoods equal those of its own model, and those of decoding."""

from __future__ import annotations

import json
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny
from kvkeep_lab.reading import cache_for, read
from measuring import ending_subject as subject
from official import hellaswag_text_rows, write_lines

from kvkeep.errors import UsageError

pytest.importorskip("lm_eval")

from kvkeep_lab.harness import KeepLM, main


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=given) for given in arguments]


CONTEXT = (
    "the man was not there but it was all that she could have and they were out of time so we had to have some of it "
    "for you and for me"
)
ENDINGS = (" so he may be", " at the", " up", " which is not what they had and he would not")
PAIRS = [*((CONTEXT, ending) for ending in ENDINGS), ("we can do", " this"), ("", "you and her")]


@pytest.mark.parametrize(("method", "budget"), [("full", None), ("stock", None), ("kv-direct", "16"), ("paged", None)])
def test_likelihoods_equal_those_of_the_harnesss_model(method: str, budget: str | None) -> None:
    from lm_eval.models.huggingface import HFLM

    ours = KeepLM(subject(method, budget))
    theirs = HFLM(pretrained=tiny("llama"), tokenizer=ours.tokenizer, device="cpu", batch_size=1)
    expected = theirs.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    found = ours.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    assert [log for log, _ in found] == pytest.approx([log for log, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [cost.prompt_tokens for cost in ours.costs] == [len(CONTEXT.split()), 3, 1]  # one reading for the four
    texts = requests((CONTEXT,), ("we can do this",))
    rolled = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(rolled, abs=1e-4)
    until = requests((CONTEXT, {"until": ["\n"], "max_gen_toks": 6}))
    assert ours.generate_until(until, disable_tqdm=True) == theirs.generate_until(until, disable_tqdm=True)


@pytest.mark.parametrize("method", ["window", "h2o", "snapkv", "streaming-llm", "tova", "h2o+merge"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_likelihoods_equal_those_of_decoding_token_by_token(method: str, family: str) -> None:
    """Each continuation is decoded separately with a new cache."""
    one = subject(method, "16", family)
    ids = one.tokenizer(CONTEXT).input_ids
    tails = [one.tokenizer(ending).input_ids for ending in ENDINGS]
    weighed, cost = one.weigh(ids, tails)
    for tokens, found in zip(tails, weighed, strict=True):
        cache = cache_for(one.loaded.model, method, "16", len(ids) + max(map(len, tails)))
        steps = [logits for logits, _ in read(one.loaded.model, torch.tensor([ids]), cache, len(tokens), tokens)]
        logs = [float(logits.double().log_softmax(-1)[token]) for logits, token in zip(steps, tokens, strict=True)]
        assert found.logs == pytest.approx(logs, abs=1e-4)
        assert found.greedy == all(int(logits.argmax()) == token for logits, token in zip(steps, tokens, strict=True))
    assert cost.entries == 16 and cost.token_s is not None and cost.prompt_tokens == len(ids)
    full, free = subject("full", None, family).weigh(ids, tails)
    assert free.token_s is None and free.memory["resident_bytes"] > cost.memory["resident_bytes"]
    assert full[0].logs != pytest.approx(weighed[0].logs, abs=1e-3)


def test_greedy_is_true_for_the_models_greedy_continuation() -> None:
    one = subject()
    ids = one.tokenizer(CONTEXT).input_ids
    right = one.write(ids, 3).tokens
    (first, second), _ = one.weigh(ids, [right, [*right[:2], (right[2] + 1) % 97]])
    assert first.greedy and not second.greedy and first.logs[:2] == pytest.approx(second.logs[:2])


def test_long_texts_are_cut_at_their_beginning() -> None:
    short = KeepLM(subject(), max_length=8)
    unlimited = KeepLM(subject())
    cut = " ".join(CONTEXT.split()[-6:])
    (found,) = short.loglikelihood(requests((CONTEXT, ENDINGS[1] + " man")), disable_tqdm=True)  # three tokens
    (expected,) = unlimited.loglikelihood(requests((cut, ENDINGS[1] + " man")), disable_tqdm=True)
    assert found[0] == pytest.approx(expected[0], abs=1e-5) and short.costs[0].prompt_tokens == 6
    with pytest.raises(UsageError, match=r"has \d\d tokens, but the model's context has 8"):
        short.loglikelihood(requests(("we", " " + CONTEXT)), disable_tqdm=True)
    (rolled,) = short.loglikelihood_rolling(requests((CONTEXT,)), disable_tqdm=True)
    assert rolled < 0 and sum(cost.prompt_tokens for cost in short.costs[1:]) < len(CONTEXT.split())


def test_answers_end_at_stop_strings() -> None:
    model = KeepLM(subject("h2o", "16"))
    answer = model.subject.write(model.tok_encode(CONTEXT), 12).text
    word = answer.split()[4]
    (found,) = model.generate_until(requests((CONTEXT, {"until": [word], "max_gen_toks": 12})), disable_tqdm=True)
    assert found == answer.split(word)[0] and len(answer.split()) > len(found.split())
    with pytest.raises(UsageError, match="answers greedily"):
        model.generate_until(requests((CONTEXT, {"do_sample": True, "temperature": 1.0})), disable_tqdm=True)


def test_models_are_created_from_the_harnesss_arguments(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = KeepLM.create_from_arg_string(
        f"pretrained={model_folder},method=streaming-llm:sinks=2,budget=25%,max_length=64",
        {"batch_size": 1, "device": None},
    )
    assert (made.subject.method, made.subject.budget, made.max_length) == ("streaming-llm:sinks=2", "25%", 64)
    assert made.apply_chat_template([{"role": "user", "content": "the man"}]) == "<user> the man <bot>"
    for given, sentence in (
        ({"pretrianed": "x"}, "takes no 'pretrianed'; it takes budget, chunk"),
        ({"method": "full", "budget": 8}, "Method 'full' takes no budget"),
        ({"method": "h20"}, "did you mean h2o"),
    ):
        with pytest.raises(UsageError, match=sentence):
            KeepLM.create_from_arg_obj(given)
    project = tomllib.loads((Path(__file__).parents[2] / "lab" / "pyproject.toml").read_text())
    module, _, name = project["project"]["entry-points"]["lm_eval.models"]["kvkeep"].partition(":")
    assert getattr(import_module(module), name) is KeepLM


def test_the_harness_evaluates_kvkeep_by_name(model_folder: Path, tmp_path: Path, words: str) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    write_lines(tmp_path / "rows.jsonl", hellaswag_text_rows(words))
    files = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path)}
    mine = {
        "task": "mine", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "{{ctx}}", "doc_to_target": "{{label}}",
        "doc_to_choice": "{{endings}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(mine))
    found = simple_evaluate(
        model="kvkeep",
        model_args=f"pretrained={model_folder},method=h2o,budget=16",
        tasks=["mine"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        limit=3,
        bootstrap_iters=0,
    )
    assert 0 <= found["results"]["mine"]["acc,none"] <= 1 and found["n-samples"]["mine"]["effective"] == 3


def test_the_command_is_the_harnesss_with_kvkeep_registered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.api.registry import get_model

    def evaluate() -> None:
        assert get_model("kvkeep") is KeepLM
        KeepLM.create_from_arg_string("method=h20")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate)
    with pytest.raises(SystemExit) as leaving:
        main()
    err = capsys.readouterr().err
    assert leaving.value.code == 2 and err.count("\n") == 1 and "did you mean h2o" in err
