"""LoCoMo: questions about a long conversation. Maharana et al., "Evaluating Very Long-Term Conversational Memory of LLM
Agents" (arXiv:2402.17753), with the prompts and the F1 of its published code."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar

from nltk.stem import PorterStemmer
from pydantic import Field

from kvkeep.decode.prompt import encode, question
from kvkeep.errors import UsageError
from kvkeep_lab.cell import Point
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.base import Metric, Sample, Task, TaskOutcome
from kvkeep_lab.tasks.rows import source
from kvkeep_lab.tasks.texts import read_once

FILE = "locomo/locomo_first6.json"
_START = (
    "Below is a conversation between two people: {} and {}. The conversation takes place over multiple days and the "
    "date of each conversation is wriiten at the beginning of the conversation.\n\n"  # their spelling
)
_ASK = (
    "Based on the above context, write an answer in the form of a short phrase for the following question. Answer with "
    "exact words from the context whenever possible.\n\nQuestion: {} Short answer:"
)
_DATED = " Use DATE of CONVERSATION to answer with an approximate date."
_STEMMER = PorterStemmer()
WRONG_ANSWERS = {
    "conv-26": (2, 5, 23, 26, 32, 43, 56, 66, 77, 94, 135, 137, 138, 144, 149),
    "conv-30": (31, 47, 57, 63),
    "conv-41": (48, 63, 68, 69, 129),
    "conv-42": (4, 5, 24, 34, 43, 52, 58, 61, 66, 68, 73, 81, 91, 119),
    "conv-43": (6, 9, 16, 56, 60, 74, 86, 128, 135, 136, 164, 165, 166),
    "conv-44": (2, 4, 5, 18, 37, 41, 57),
    "conv-47": (2, 11, 17, 31, 37, 61, 65, 88),
    "conv-48": (0, 75, 87, 116, 123, 174, 179),
    "conv-49": (4, 18, 24, 33, 36, 37, 43, 54, 74, 80, 102, 103, 106, 144),
    "conv-50": (1, 19, 29, 50, 60, 62, 63, 72, 88, 137, 147, 151),
}
"""The 99 of 1,540 questions whose answer in LoCoMo's file is wrong, by an audit (github.com/dial481/locomo-audit,
commit 9493fb4): the numbers of each conversation's questions, from 0. Questions with wrong evidence and a right answer
stay."""


class Locomo(Task):
    """Questions about a conversation, which is read before they are known."""

    name = "locomo"
    about = "LoCoMo: questions about conversations of 11,000 to 22,000 tokens, unseen while they are read"
    protocol = (
        "LoCoMo's prompt: all sessions with their dates, read in chunks within the budget. Then each question is asked "
        "to a copy of the cache, so the method does not know it when it evicts entries. Questions of the categories 1 "
        "to 4; the adversarial ones (5) are left out, because they are multiple choice. A chosen question is left out "
        "if its answer in the file is wrong, by an audit of the ten conversations. F1: that of LoCoMo's code, of "
        "stemmed words without articles and punctuation; several answers one by one. ln p: the mean of the right "
        "answer's tokens, given one by one."
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loglik", "ln p a token", "higher", "number"),
        Metric("f1", "F1"),
    )
    relative = ("loglik", "f1")
    axes = ("conversation",)

    conversation: list[Annotated[int, Field(ge=0)]] = Field(
        [0, 1, 2, 3, 4, 5], min_length=1, description="number of a conversation in the file, from 0"
    )
    new: int = Field(24, ge=1, description="tokens written")

    def sources(self, data: Path | None) -> list[Path]:
        found = source(data, FILE)
        for number in self.conversation:
            _read(found, number)
        return [found]

    def prepare(self, tokenizer: Any, sources: Sequence[Path], point: Point, seed: int) -> list[Sample]:
        """Choose ``samples`` questions of a conversation, at equal distances in the file's order from question ``seed``
        on, and leave out those in :data:`WRONG_ANSWERS`."""
        conversation, known = _read(sources[0], int(point["conversation"]))
        drawn = [known[(seed + len(known) * number // self.samples) % len(known)] for number in range(self.samples)]
        chosen = [one for one in drawn if not one["wrong"]]
        if not chosen:
            raise UsageError(f"LoCoMo's answers to all questions of seed {seed} are wrong; give more samples.")
        prompts = [_prompt(tokenizer, conversation, one) for one in chosen]
        parts = _text(conversation) + "\n", _start(conversation)
        shared, opening = (encode(tokenizer, question(part, None)) for part in parts)
        answers = [_answer(one) for one in chosen]
        rights = [list(tokenizer(answer, add_special_tokens=False).input_ids) for answer in answers]
        context = max(len(ids) + max(self.new, len(right)) for ids, right in zip(prompts, rights, strict=True))
        text, questions = read_once(prompts, shared, opening, context)
        turns = [turn["dia_id"] for turn in _turns(conversation)]
        return [
            Sample(
                ids,
                {
                    "text": text,
                    "right": right,
                    "answer": answer,
                    "several": one["category"] == 1,
                    "depth": _depth(one, turns),
                },
            )
            for one, ids, right, answer in zip(chosen, questions, rights, answers, strict=True)
        ]

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        facts = sample.facts
        answer = subject.examine_after(facts["text"], sample.ids, facts["right"], self.new)
        score = several_f1 if facts["several"] else f1
        scores = {"loglik": fmean(answer.logs), "f1": score(answer.text, facts["answer"])}
        return TaskOutcome(scores, answer.cost, facts["depth"])


def _read(path: Path, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a conversation and its questions of the categories 1 to 4. ``wrong`` of each says whether its answer is in
    :data:`WRONG_ANSWERS`. Raises UsageError for a file of another shape."""
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
        conversation, wrong = rows[number]["conversation"], WRONG_ANSWERS.get(rows[number].get("sample_id"), ())
        questions = [one | {"wrong": place in wrong} for place, one in enumerate(rows[number]["qa"])]
        questions = [one for one in questions if one["category"] in (1, 2, 3, 4) and str(one["answer"]).strip()]
        turns = [turn["dia_id"] for turn in _turns(conversation) if turn["speaker"] and isinstance(turn["text"], str)]
        fitting = all(isinstance(one["question"], str) and isinstance(one["evidence"], list) for one in questions)
        if not (_start(conversation) and turns and questions and fitting):
            raise ValueError("no turns, no questions, or other kinds of fields")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"'{path}' has no conversation {number} in the form of LoCoMo (qa, conversation with session_1, ...); give "
            "another data folder."
        ) from error
    return conversation, questions


def _sessions(conversation: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the date and the turns of each session that has turns."""
    number = 1
    while f"session_{number}_date_time" in conversation:
        if turns := conversation.get(f"session_{number}"):
            yield conversation[f"session_{number}_date_time"], turns
        number += 1


def _turns(conversation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for _, turns in _sessions(conversation):
        yield from turns


def _text(conversation: dict[str, Any]) -> str:
    """Return the conversation as LoCoMo's prompts have it. A picture is given by its caption."""
    parts = [_start(conversation)]
    for date, turns in _sessions(conversation):
        said = (
            f'{turn["speaker"]} said, "{turn["text"]}"'
            + (f" and shared {turn['blip_caption']}." if "blip_caption" in turn else "")
            for turn in turns
        )
        parts.append(f"DATE: {date}\nCONVERSATION:\n" + "\n".join(said) + "\n\n")
    return "".join(parts)


def _start(conversation: dict[str, Any]) -> str:
    return _START.format(conversation["speaker_a"], conversation["speaker_b"])


def _prompt(tokenizer: Any, conversation: dict[str, Any], one: dict[str, Any]) -> list[int]:
    ask = one["question"] + (_DATED if one["category"] == 2 else "")
    return encode(tokenizer, question(_text(conversation) + "\n" + _ASK.format(ask), None))


def _answer(one: dict[str, Any]) -> str:
    """Return the right answer; of category 3, the part before its explanation."""
    answer = str(one["answer"])
    return answer.split(";")[0].strip() if one["category"] == 3 else answer


def _depth(one: dict[str, Any], turns: Sequence[str]) -> float | None:
    """Return the mean place of the evidence among the turns in percent; None without evidence."""
    places = [turns.index(name) for name in one["evidence"] if name in turns]
    return 100 * fmean(places) / len(turns) if places else None


def f1(answer: str, right: str) -> float:
    """Return the F1 of the stemmed words of two answers."""
    given, wanted = _words(answer), _words(right)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def several_f1(answer: str, right: str) -> float:
    """Return the mean over the parts of ``right`` (separated by commas) of the best F1 of a part of ``answer``."""
    parts = answer.split(",")
    return fmean(max(f1(part, wanted) for part in parts) for wanted in right.split(","))


def _words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return [_STEMMER.stem(word) for word in re.sub(r"\b(a|an|the|and)\b", " ", plain).split()]
