"""RULER's questions from SQuAD and HotpotQA, with their documents among others of the same set."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import UsageError
from kvkeep_lab.tasks.rows import rows
from kvkeep_lab.tasks.ruler.generated import RulerQuestion

_ONLY = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
_TEXT = f"{_ONLY}\n\nThe following are given documents.\n\n{{context}}\n\n{_ONLY}\n\nQuestion: {{query}}"


@dataclass(frozen=True)
class Question:
    """One question of a set."""

    query: str
    answers: list[str]
    context: list[int]
    """Indices of its documents."""
    near: list[int]
    """Indices of all documents on the same subject."""


@dataclass(frozen=True)
class Documents:
    """All documents of a set, each once, and its questions."""

    texts: list[str]
    questions: list[Question]


def ask(loaded: Documents, draw: random.Random, size: int, length: int) -> RulerQuestion:
    """Return a question and ``size`` documents: all of its documents, then others on the same subject, then any."""
    chosen = draw.choice(loaded.questions)
    documents = list(chosen.context)
    for others in (chosen.near, range(len(loaded.texts))):
        new = sorted(set(others) - set(documents))
        draw.shuffle(new)
        documents += new[: max(0, size - len(documents))]
    draw.shuffle(documents)
    context = "\n\n".join(
        f"Document {number}:\n{loaded.texts[place]}" for number, place in enumerate(documents, start=1)
    )
    return RulerQuestion(
        _TEXT.format(context=context, query=chosen.query), "Answer:", chosen.answers, chosen.answers[0]
    )


def squad(paths: Sequence[Path]) -> Documents:
    """Read SQuAD's JSON, version 1.1 or 2.0, without the questions that have no answer."""
    with _understood(paths[0], "SQuAD"):
        subjects = [subject["paragraphs"] for row in rows(paths[0]) for subject in row["data"]]
        texts = sorted({paragraph["context"] for subject in subjects for paragraph in subject})
        places = {text: place for place, text in enumerate(texts)}
        questions = []
        for subject in subjects:
            near = [places[paragraph["context"]] for paragraph in subject]
            questions += [
                Question(
                    entry["question"],
                    [answer["text"] for answer in entry["answers"]],
                    [places[paragraph["context"]]],
                    near,
                )
                for paragraph in subject
                for entry in paragraph["qas"]
                if entry["answers"] and not entry.get("is_impossible", False)
            ]
        return _made(texts, questions)


def hotpotqa(paths: Sequence[Path]) -> Documents:
    """Read HotpotQA's JSON list. Each question lists its documents as (title, sentences)."""
    with _understood(paths[0], "HotpotQA"):
        found = [
            (row["question"], row["answer"], [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]])
            for row in rows(paths[0])
        ]
        texts = sorted({text for _, _, contexts in found for text in contexts})
        places = {text: place for place, text in enumerate(texts)}
        return _made(
            texts,
            [Question(query, [answer], [places[text] for text in contexts], []) for query, answer, contexts in found],
        )


def _made(texts: list[str], questions: list[Question]) -> Documents:
    if not questions:
        raise ValueError
    return Documents(texts, questions)


@contextmanager
def _understood(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"'{path}' has no questions in {name}'s own JSON form; take the file as it is published."
        ) from error
