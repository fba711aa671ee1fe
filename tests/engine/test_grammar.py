"""Forms of answers: whatever the model would write, the answer has the form, and a model that obeys is not changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted import END, START, TURN, byte_level, scripted, sentencepiece

from kvkeep import KeepCache
from kvkeep.engine.answer import Answer, Ask, Scheduler
from kvkeep.engine.forms import of_lark, of_regex, of_schema
from kvkeep.engine.grammar import Grammar, vocabulary
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import UsageError
from kvkeep.models.loading import Loaded

pytest.importorskip("llguidance")
KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}
SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bb", None]},
        "count": {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}


def loaded(kind: str) -> Loaded:
    """A model that writes "yes" after a Q, if nothing forbids it."""
    made = KINDS[kind]("yes", "no", '{"', '":', " x")
    return scripted(made, made.script(["Q", "yes", END]))


def grammar(model: Loaded, text: str) -> Grammar:
    return Grammar(vocabulary(model.tokenizer, model.model.config.vocab_size, (model.tokenizer.eos_token_id,)), text)


def answer(model: Loaded, sampling: Sampling, method: str = "full", budget: int | None = None) -> Answer:
    ends, cache = [model.tokenizer.eos_token_id], KeepCache(model.model, method, budget)
    found = Answer(Ask(model.tokenizer("a Q").input_ids, 300, sampling), cache, model.tokenizer, ends, lambda _: None)
    scheduler = Scheduler(model.model)
    scheduled = scheduler.add(found)
    while not scheduled.give(scheduler.step()[0].logits):
        pass
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [TURN, f"x{START}y", f"{START}{TURN}"])
def test_the_name_of_a_special_token_is_spelt(kind: str, text: str) -> None:
    model = loaded(kind)
    found = answer(model, Sampling(temperature=0, grammar=grammar(model, of_lark(f"start: {json.dumps(text)}"))))
    special = model.tokenizer.convert_tokens_to_ids([TURN, START])
    assert model.tokenizer.decode(found.tokens, skip_special_tokens=True) == text and not {*special} & {*found.tokens}


def obeys(text: str) -> bool:
    found = json.loads(text)
    tags = found.get("tags", [])
    return (
        {"kind", "count"} <= found.keys() <= SCHEMA["properties"].keys()
        and found["kind"] in ("a", "bb", None)
        and type(found["count"]) is int
        and len(tags) < 3
        and all(len(one) <= 3 for one in tags)
    )


FORMS: dict[str, tuple[Callable[[], str], Callable[[str], Any]]] = {
    "regex": (lambda: of_regex("[a-c]{3,5}(x|yes) [0-9]{2}"), re.compile("[a-c]{3,5}(x|yes) [0-9]{2}").fullmatch),
    "grammar": (lambda: of_lark('start: "no" ("yes" | " x")~2..4'), re.compile("no(yes| x){2,4}").fullmatch),
    "schema": (lambda: of_schema(SCHEMA), obeys),
}


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_an_answer_has_its_form(kind: str, form: str) -> None:
    model, (text, fits), ended = loaded(kind), FORMS[form], 0
    compiled = grammar(model, text())
    for seed in range(12):
        found = answer(model, Sampling(temperature=2.0, seed=seed, grammar=compiled))
        assert found.reason in ("eos", "length")
        ended += found.reason == "eos"
        assert found.reason == "length" or fits(found.text), found.text
    assert ended > 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_form_changes_no_answer_that_has_it(kind: str) -> None:
    model = loaded(kind)
    assert answer(model, Sampling(grammar=grammar(model, of_regex("(yes|no)+")))).text == "yes"
    assert answer(model, Sampling(grammar=grammar(model, of_regex("no(yes)?")))).text.startswith("no")


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_drafts_change_nothing(seed: int | None) -> None:
    model = loaded("byte level")
    sampling = Sampling(0.0 if seed is None else 1.5, seed=seed, grammar=grammar(model, of_schema(SCHEMA)))
    wanted = answer(model, sampling)
    found = answer(model, sampling, "window+verified:4", 24)
    assert found.tokens == wanted.tokens and found.reason == wanted.reason


def test_answers_with_one_form_do_not_disturb_each_other() -> None:
    model = loaded("byte level")
    processors = [grammar(model, of_regex("(ab|cd)+")).processor(0) for _ in range(2)]
    scores = torch.zeros(1, model.model.config.vocab_size)
    made, allowed = byte_level("yes", "no", '{"', '":', " x"), []
    for text in ("", "a", "ab", "c", "cd", "a"):
        ids = torch.tensor([[made.id(one) for one in text]], dtype=torch.int64)
        kept = [one(ids, scores).isfinite().nonzero()[:, 1].tolist() for one in processors[len(text) % 2 :]]
        allowed.append({made.tokens[one] for one in kept[0]})
    assert allowed == [{"a", "c", "ab"}, {"b"}, {"a", "c", "ab", END}, {"d"}, {"a", "c", "ab", END}, {"b"}]


@pytest.mark.parametrize(
    "form, words",
    [
        (lambda: of_regex("("), "unclosed group"),
        (lambda: of_lark("start: nothing"), "nothing"),
        (lambda: of_schema({"type": "foo"}), "foo"),
        (lambda: of_schema({"$ref": "#/nowhere"}), "nowhere"),
        (lambda: of_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "No answer can have"),
        (lambda: of_schema({"if": {"type": "string"}, "then": {"minLength": 2}}), "if"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_in_a_sentence(form: Callable[[], str], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as refused:
        grammar(loaded("byte level"), form())
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")


def test_a_form_of_a_tokenizer_that_is_not_readable_is_refused() -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        vocabulary(type("Other", (), {"eos_token_id": 1})(), 10, (1,))
